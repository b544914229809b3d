"""Several homogeneous strategies in turn within every iteration, as HotSPa does.

Sequences of a range of lengths run on the strategy of that range; then the model is brought into
the layout of the next, which takes time. Ranges are cut at 4K and 16K tokens, or at one of them, or
not at all (Hydraulis, appendix G); what is best over all iterations is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from headrace.errors import InfeasiblePlan
from headrace.planning.pipelines.batch import Batch
from headrace.planning.pipelines.bounds import Relaxation
from headrace.planning.pipelines.plan import Iteration, iteration_of
from headrace.planning.pipelines.solution import solved
from headrace.planning.pipelines.world import Counts, World

__all__ = ["switch_s", "switching"]

_CUTS = ((), (4096,), (16384,), (4096, 16384))

# Hydraulis, table 4: an iteration with three strategies, two changes, spends 1.54 s on them with
# 7B parameters and 2.19 s with 32B.
_MEASURED = ((12 * 32 * 4096**2, 1.54 / 2), (12 * 60 * 6656**2, 2.19 / 2))

Planned = tuple[tuple[str, ...], Callable[[int, Batch], Iteration]]
Phase = tuple[int, Counts]
"""Sequences of up to so many tokens, and what they run on."""


def switch_s(world: World) -> float:
    """Seconds of one change, on the line through what was measured for two models."""
    (small, low_s), (large, high_s) = _MEASURED
    if world.parameters is None:
        return low_s
    return max(0.0, low_s + (world.parameters - small) * (high_s - low_s) / (large - small))


def switching(world: World, iterations: Sequence[Sequence[int]], seed: int) -> Planned:
    """Up to three homogeneous strategies in turn."""
    change_s = switch_s(world)
    best_s, best = inf, list[Phase]()
    for cuts in _CUTS:
        phases = [
            phase for low, high in zip((0, *cuts), (*cuts, world.pipes[0].cap), strict=True)
            if (phase := _phase(world, iterations, low, high)) is not None
        ]  # fmt: skip
        total = sum(seconds for seconds, _ in phases)
        total += change_s * (len(phases) - 1) * len(iterations)
        if phases and total < best_s:
            best_s, best = total, [phase for _, phase in phases]
    if not best:
        raise InfeasiblePlan("no homogeneous strategy holds every iteration")

    def one(_: int, batch: Batch) -> Iteration:
        parts = [part for part in _parts(batch, best) if part[1]]
        made = [_made(world, batch, counts, places) for counts, places in parts]
        changes_s = change_s * (len(made) - 1)
        seconds = sum(item.predicted_s for item in made) + changes_s
        return Iteration(
            strategy=" then ".join(item.strategy for item in made),
            pipelines=tuple(
                replace(own, phase=phase)
                for phase, item in enumerate(made)
                for own in item.pipelines
            ),
            predicted_s=seconds,
            lower_bound_s=min(seconds, Relaxation(batch).bound().seconds),
            switch_s=changes_s,
            phases=tuple(made) if len(made) > 1 else (),
        )

    return tuple(world.text(counts) for _, counts in best), one


def _phase(
    world: World, iterations: Sequence[Sequence[int]], low: int, high: int
) -> tuple[float, Phase] | None:
    """The best strategy of a range of lengths, and its seconds over all iterations; None when
    there is nothing to do."""
    parts = [[tokens for tokens in lengths if low < tokens <= high] for lengths in iterations]
    batches = [Batch(world, part) for part in parts if part]
    if not batches:
        return None
    best_s, best = inf, world.homogeneous()[0]
    for counts in world.homogeneous():
        total = 0.0
        for batch in batches:
            solution = solved(batch, counts, steps=0)
            total += inf if solution is None else solution.seconds
            if total >= best_s:
                break
        if total < best_s:
            best_s, best = total, counts
    return best_s, (high, best)


def _parts(batch: Batch, phases: Sequence[Phase]) -> list[tuple[Counts, list[int]]]:
    """Places of the sequences of each phase."""
    parts, low = list[tuple[Counts, list[int]]](), 0
    for high, counts in phases:
        places = [i for i, tokens in enumerate(batch.tokens) if low < tokens <= high]
        parts.append((counts, places))
        low = high
    return parts


def _made(world: World, batch: Batch, counts: Counts, places: Sequence[int]) -> Iteration:
    """The plan of one phase, with the sequences' numbers in the whole iteration."""
    part = Batch(world, [batch.tokens[i] for i in places])
    part.order = [batch.order[places[i]] for i in part.order]
    solution = solved(part, counts, steps=0)
    assert solution is not None, "the strategy holds its range"
    return iteration_of(part, solution, Relaxation(part).bound())
