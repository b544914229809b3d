"""Local search: moves and swaps off the ranks that end last, until none helps.

Solutions are compared by their finish times, latest first, so that relieving one of two equally
late ranks counts. Changes are ranked by what the tables predict of them; the best are tried with
exact packs. Effort is counted in tries, never in time, so that a seed gives one plan.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from headrace.planning.dispatch import Block, Members, order_of
from headrace.planning.sizing import Batch
from headrace.planning.solution import Solution

__all__ = ["Effort", "improve"]

_TRIED_PER_ROUND = 6
_SWAP_TARGETS = 3
_GAIN = 1e-9  # relative: less is rounding

# (predicted seconds, sequence, from, to, sequence that comes back or -1)
_Move = tuple[float, int, Block, Block, int]


@dataclass(slots=True)
class Effort:
    """How many solutions may still be tried."""

    tries: int


@dataclass(frozen=True, kw_only=True)
class _Ground:
    """What a search does not change: ``seconds[p][i]`` predicts sequence i on p ranks."""

    batch: Batch
    seconds: dict[int, list[float]]
    devices: int
    target_s: float


def improve(
    starts: Sequence[Solution],
    batch: Batch,
    seconds: dict[int, list[float]],
    *,
    target_s: float,
    effort: Effort,
    random: Random,
) -> Solution:
    """The best solution found from ``starts`` (best first) with at most ``effort.tries`` tries.

    Descends from one start after the other while half of the effort is left; then shakes a few
    sequences of the best loose and descends again, keeping what is better. Stops at ``target_s``.
    """
    ground = _Ground(batch=batch, seconds=seconds, devices=len(starts[0].free), target_s=target_s)
    best, shaking = starts[0], effort.tries // 2
    for start in starts:
        if effort.tries > shaking and best.seconds > target_s:
            found = _descend(ground, start, effort)
            best = found if _better(found, best) else best
    while effort.tries > 0 and best.seconds > target_s:
        shaken = _shaken(ground, best, random)
        if shaken is None:
            break
        effort.tries -= 1
        again = _descend(ground, shaken, effort)
        if _better(again, best):
            best = again
    return best


def _better(one: Solution, other: Solution) -> bool:
    """Whether ``one`` ends earlier, or as late on fewer ranks."""
    if abs(one.seconds - other.seconds) > _GAIN * other.seconds:
        return one.seconds < other.seconds
    for here, there in zip(
        sorted(one.free, reverse=True), sorted(other.free, reverse=True), strict=True
    ):
        if abs(here - there) > _GAIN * other.seconds:
            return here < there
    return False


def _descend(ground: _Ground, solution: Solution, effort: Effort) -> Solution:
    while solution.seconds > ground.target_s:
        better = None
        for move in _moves(ground, solution)[: min(_TRIED_PER_ROUND, effort.tries)]:
            effort.tries -= 1
            tried = solution.changed(ground.batch, _change(solution, move))
            if _better(tried, solution):
                better = tried
                break
        if better is None:
            break
        solution = better
    return solution


def _moves(ground: _Ground, solution: Solution) -> list[_Move]:
    """Changes that are predicted to help, best first."""
    least = _least_late(ground, solution)
    found: list[_Move] = []
    for source in _critical(solution):
        found += _shifts(ground, solution, source, least)
        found += _swaps(ground, solution, source, least)
    return sorted(found)


def _critical(solution: Solution) -> list[Block]:
    """The chain of blocks that makes the last rank late, last block first."""
    free = [0.0] * len(solution.free)
    last: list[Block | None] = [None] * len(free)
    before: dict[Block, Block | None] = {}
    for block in order_of(solution.members):
        p, k = block
        ranks = range(k * p, (k + 1) * p)
        latest = max(ranks, key=free.__getitem__)
        before[block] = last[latest]
        end = free[latest] + solution.packs[block].seconds
        for rank in ranks:
            free[rank], last[rank] = end, block
    chain: list[Block] = []
    link = last[max(range(len(free)), key=free.__getitem__)]
    while link is not None:
        chain.append(link)
        link = before[link]
    return chain


def _least_late(ground: _Ground, solution: Solution) -> dict[int, list[tuple[float, int]]]:
    """For every size the blocks by when their last rank is free."""
    free = solution.free
    return {
        p: sorted((max(free[k * p : (k + 1) * p]), k) for k in range(ground.devices // p))
        for p in ground.seconds
    }


def _shifts(
    ground: _Ground,
    solution: Solution,
    source: Block,
    least: dict[int, list[tuple[float, int]]],
) -> Iterator[_Move]:
    """A sequence of ``source`` goes to another block, of any size.

    The longer the sequence, the earlier ``source`` ends and the later the target does, so only
    those where the two meet are worth a look; and the longest, for a block of more ranks.
    """
    late_s, held = solution.seconds, solution.members[source]
    own, start = ground.seconds[source[0]], source[0] * source[1]
    for p, blocks in least.items():
        added = ground.seconds[p]
        targets = {k for _, k in blocks[:2]}
        if p > source[0] and start // p < len(blocks):
            targets.add(start // p)
        for target in ((p, k) for k in sorted(targets) if (p, k) != source):
            inside, outside = _free(solution, source, target)
            free_s = max(inside, outside)
            meet = bisect_left(held, free_s - late_s, key=lambda i: -own[i] - added[i])
            for i in {*held[max(0, meet - 1) : meet + 2], *held[: 2 * (p > source[0])]}:
                after_s = max(inside - own[i], outside) + added[i]
                predicted_s = max(after_s, late_s - own[i])
                if predicted_s < late_s * (1 - _GAIN):
                    yield predicted_s, i, source, target, -1


def _free(solution: Solution, source: Block, target: Block) -> tuple[float, float]:
    """When the ranks of ``target`` are free: those also in ``source``, and the others."""
    first, last = source[0] * source[1], source[0] * (source[1] + 1)
    inside, outside = 0.0, 0.0
    start, stop = target[0] * target[1], target[0] * (target[1] + 1)
    if stop <= first or last <= start:
        return 0.0, max(solution.free[start:stop])
    for rank in range(start, stop):
        if first <= rank < last:
            inside = max(inside, solution.free[rank])
        else:
            outside = max(outside, solution.free[rank])
    return inside, outside


def _swaps(
    ground: _Ground,
    solution: Solution,
    source: Block,
    least: dict[int, list[tuple[float, int]]],
) -> Iterator[_Move]:
    """A sequence of ``source`` changes places with a shorter one of another block of its size,
    shorter by about half the time between the two blocks."""
    p, late_s = source[0], solution.seconds
    limit_s, own = late_s * (1 - _GAIN), ground.seconds[p]
    others = [(at, (p, k)) for at, k in least[p] if (p, k) != source and (p, k) in solution.members]
    for at, target in others[:_SWAP_TARGETS]:
        there = solution.members[target]
        rising = [-own[j] for j in there]
        for i in solution.members[source]:
            near = bisect_left(rising, (late_s - at) / 2 - own[i])
            for j in there[max(0, near - 1) : near + 1]:
                moved_s = own[i] - own[j]
                if moved_s > 0 and at + moved_s < limit_s:
                    yield max(at + moved_s, late_s - moved_s), i, source, target, j


def _change(solution: Solution, move: _Move) -> Members:
    """The blocks that a move changes."""
    _, i, source, target, back = move
    here = [x for x in solution.members[source] if x != i]
    there = [x for x in solution.members.get(target, []) if x != back]
    insort(there, i)
    if back >= 0:
        insort(here, back)
    return {source: here, target: there}


def _shaken(ground: _Ground, solution: Solution, random: Random) -> Solution | None:
    """One to three sequences at random blocks; None when there is nowhere to go."""
    blocks = [(p, k) for p in sorted(ground.seconds) for k in range(ground.devices // p)]
    if len(blocks) < 2:
        return None
    homes = {i: block for block, held in solution.members.items() for i in held}
    for _ in range(random.randint(1, 3)):
        i = random.randrange(len(homes))
        target = blocks[random.randrange(len(blocks))]
        fits = ground.seconds[target[0]][i] < 2 * solution.seconds
        if fits and target != homes[i]:
            change = _change(solution, (0.0, i, homes[i], target, -1))
            solution = solution.changed(ground.batch, change)
            homes[i] = target
    return solution
