"""Searches strategies by exchanging pipelines of one pipe for those of another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from headrace.planning.pipelines.world import Counts, World

__all__ = ["climb", "filled", "rounded"]

Score = Callable[[Counts, float], float]
"""Seconds of a strategy; may be infinite when it is not below the second argument."""

_GAIN = 1e-3


def climb(
    world: World, start: Counts, start_s: float, score: Score, kinds: Sequence[int], tries: int,
    floor_s: float = 0.0,
) -> tuple[float, Counts, list[tuple[float, Counts]]]:  # fmt: skip
    """Exchange pipelines among the pipes ``kinds`` while that helps, with at most ``tries``
    scores, or until the seconds are down to ``floor_s``. Returns the best with its seconds and
    the path of bests to it."""
    best, best_s, path = start, start_s, [(start_s, start)]
    seen = {start}
    going = True
    while going and tries > 0 and best_s > floor_s:
        going = False
        for tried in _neighbours(world, best, kinds):
            if tried in seen:
                continue
            if tries <= 0:
                break
            seen.add(tried)
            tries -= 1
            seconds = score(tried, best_s * (1 - _GAIN))
            if seconds < best_s * (1 - _GAIN):
                best, best_s, going = tried, seconds, True
                path.append((seconds, tried))
                break
    return best_s, best, path


def _neighbours(world: World, counts: Counts, kinds: Sequence[int]) -> Iterator[Counts]:
    """Strategies with 1, 2, 4, ... pipelines of one kind more in place of another's."""
    idle = world.devices - world.used(counts)
    sizes = [pipe.devices for pipe in world.pipes]
    held = [k for k in range(len(counts)) if counts[k]]
    largest = max((counts[k] * sizes[k] for k in held), default=0)
    amount = 1
    while amount <= max(1, largest):
        for j in held:
            for k in kinds:
                if k == j or (amount > 1 and amount * sizes[k] > counts[j] * sizes[j] + idle):
                    continue
                taken = max(0, -(-(amount * sizes[k] - idle) // sizes[j]))
                if taken > counts[j]:
                    continue
                changed = list(counts)
                changed[j] -= taken
                changed[k] += amount
                yield filled(world, tuple(changed), kinds)
        amount *= 2


def filled(world: World, counts: Counts, kinds: Sequence[int]) -> Counts:
    """Put pipelines of ``kinds`` on devices that are left over, the largest that fit first."""
    idle = world.devices - world.used(counts)
    grown = list(counts)
    for k in sorted(kinds, key=lambda k: (-world.pipes[k].devices, k)):
        more = idle // world.pipes[k].devices
        grown[k] += more
        idle -= more * world.pipes[k].devices
    return tuple(grown)


def rounded(world: World, pipelines: Sequence[float], longest: int) -> Counts:
    """Whole numbers of pipelines near the relaxed ones, at least one that holds ``longest``."""
    needs = sum(n * pipe.devices for n, pipe in zip(pipelines, world.pipes, strict=True))
    shrink = min(1.0, world.devices / needs) if needs > 0 else 1.0
    pipelines = [n * shrink for n in pipelines]
    counts = [int(n) for n in pipelines]
    kinds = [k for k, n in enumerate(pipelines) if n > 0]
    for k in sorted(kinds, key=lambda k: (counts[k] - pipelines[k], k)):
        if world.used((*counts[:k], counts[k] + 1, *counts[k + 1 :])) <= world.devices:
            counts[k] += 1
    if not any(n and pipe.cap >= longest for n, pipe in zip(counts, world.pipes, strict=True)):
        holds = [k for k, pipe in enumerate(world.pipes) if pipe.cap >= longest]
        needed = min(holds, key=lambda k: (world.pipes[k].devices, k))
        counts[needed] = 1
        for k in sorted(kinds, key=lambda k: world.pipes[k].devices):
            while world.used(tuple(counts)) > world.devices and counts[k] > (k == needed):
                counts[k] -= 1
    return filled(world, tuple(counts), kinds)
