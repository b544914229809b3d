"""The strategy of one iteration: candidates, a search near the best of them, then the real thing.

1. The bound and the relaxed optimum (:mod:`headrace.planning.pipelines.bounds`), rounded: a
   candidate of this very batch, beside those that the proposal brings.
2. Candidates are ranked by the fluid estimate. From the best, pipelines are exchanged while that
   helps: once by the fluid estimate, once by the estimate that also places the head.
3. The most promising are dispatched, packed and timed; the quickest is the plan. Few sequences
   leave time for more of them, and need it: the estimate cuts what cannot be cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from headrace.planning.pipelines.batch import Batch
from headrace.planning.pipelines.bounds import Relaxation, Relaxed
from headrace.planning.pipelines.climb import climb, filled, rounded
from headrace.planning.pipelines.dispatch import estimate_s
from headrace.planning.pipelines.fluid import fluid
from headrace.planning.pipelines.solution import FEW, Solution, alike, polished, solved
from headrace.planning.pipelines.world import Counts, World

__all__ = ["BALANCED", "Chosen", "choose", "ranked"]

_TRIES = 60
_TIMED = 3
_RUNNER_UP = 1.1
_HEAD_COSTS = 1.5
_STEPS = 12
_STEPS_BEST = 300
_STEPS_AT_LEAST = 40
_FEW_WORK = 3000  # sequences dispatched, all in all, where an iteration has few
_STRATEGY_WORK = 10  # as many sequences does a strategy cost by itself
_FEW_STARTS = 4
_LEAST_TRIES = 3
_FAR = 1.005
_NEARLY = 1.007
_FAR_FROM_BOUND = 1.03
BALANCED = 1000  # sequences; of more, no other way to balance gains anything
_CLOSE_ENOUGH = 1 + 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The solution of an iteration, its bound, and the next best strategy with its seconds
    (estimated where it was not worth while to dispatch it); ``relaxation`` is the bound's."""

    solution: Solution
    bound: Relaxed
    relaxation: Relaxation
    runner_up: tuple[float, Counts] | None


def ranked(
    batch: Batch, candidates: Iterable[Counts], *, within: float = inf
) -> list[tuple[float, Counts]]:
    """Candidates that hold the batch by the fluid estimate, ties by the strategy; without those
    that take more than ``within`` times the best before them."""
    found = list[tuple[float, Counts]]()
    limit_s = inf
    for counts in dict.fromkeys(candidates):
        seconds = fluid(batch, counts, below_s=limit_s).seconds
        if seconds < inf:
            found.append((seconds, counts))
            limit_s = min(limit_s, seconds * within)
    return sorted(found)


def choose(
    world: World, batch: Batch, candidates: Sequence[Counts], kinds: Sequence[int]
) -> Chosen:
    """The quickest solution found for one batch, each of whose sequences fits some pipe; ``kinds``
    are the pipes worth looking at."""
    relaxation = Relaxation(batch)
    bound = relaxation.bound()
    longest = batch.tokens[0]
    if len(batch) <= FEW or not any(world.pipes[k].cap >= longest for k in kinds):
        kinds = range(len(world.pipes))
    start = rounded(world, relaxation.start(bound.seconds, kinds), longest)
    within = inf if len(batch) <= FEW else _RUNNER_UP
    order = ranked(batch, [start, *candidates], within=within)
    if not order:
        order = ranked(batch, world.homogeneous())
    target_s = bound.seconds * _CLOSE_ENOUGH
    search = _Search(batch, target_s)
    for expected_s, counts in _searched(world, batch, order, kinds, bound.seconds):
        if not search.found or expected_s < search.best.seconds > target_s:
            search.real_s(counts, search.best.seconds if search.many and search.found else inf)
    if search.best.seconds > target_s:
        search.near(kinds, [counts for _, counts in order])
        search.other_kinds(kinds, bound.seconds)
        search.last_chances()
    best = search.best
    timed = [(solution.seconds, counts) for counts, solution in search.found.items()]
    # What is expected to take less was not placed, or not timed for that reason.
    others = [x for x in (*timed, *order) if x[1] != best.counts and x[0] >= best.seconds]
    if not others:
        every = [counts for counts in (*candidates, *world.homogeneous()) if counts != best.counts]
        others = ranked(batch, every, within=1.0)
    runner_up = min(others, default=None)
    return Chosen(solution=best, bound=bound, relaxation=relaxation, runner_up=runner_up)


class _Search:
    """Strategies dispatched and packed, with what came of them."""

    def __init__(self, batch: Batch, target_s: float) -> None:
        self.batch, self.world, self.target_s = batch, batch.world, target_s
        self.found: dict[Counts, Solution] = {}
        self.few, self.many = len(batch) <= FEW, len(batch) > BALANCED

    @property
    def best(self) -> Solution:
        """The quickest; of equals the first."""
        return min(self.found.values(), key=lambda solution: solution.seconds)

    def real_s(self, counts: Counts, below_s: float) -> float:
        """Seconds of a strategy. Where there are not so few sequences that the estimate misleads,
        infinite when that does not get below ``below_s``; with many, whose dispatch takes long,
        when the head cannot be placed in less."""
        if counts not in self.found:
            if self.many and estimate_s(self.batch, counts, below_s) == inf:
                return inf
            if not self.few and fluid(self.batch, counts, below_s=below_s).seconds == inf:
                return inf
            solution = solved(self.batch, counts, steps=_STEPS, target_s=self.target_s)
            if solution is None:
                return inf
            self.found[counts] = solution
        return self.found[counts].seconds

    def near(self, kinds: Sequence[int], others: Sequence[Counts]) -> None:
        """Exchange pipelines by the real seconds where the estimate, which cuts what cannot be
        cut, is far from them; with few sequences from several starts."""
        best = self.best
        expected_s = fluid(self.batch, best.counts).seconds
        if not self.few and best.seconds < expected_s * _FAR:
            return
        tries = max(_LEAST_TRIES, _FEW_WORK // (len(self.batch) + _STRATEGY_WORK))
        starts = [best.counts, *(others if self.few else ())]
        timed = [(self.real_s(counts, inf), counts) for counts in dict.fromkeys(starts[:tries])]
        for seconds, counts in sorted(timed)[:_FEW_STARTS]:
            left = max(0, tries - len(self.found))
            climb(self.world, counts, seconds, self.real_s, kinds, left, self.target_s)

    def other_kinds(self, kinds: Sequence[int], bound_s: float) -> None:
        """Far from the bound, look at the pipes too that the proposal found useless."""
        best, every = self.best, range(len(self.world.pipes))
        if self.few or len(kinds) == len(every) or best.seconds < bound_s * _FAR_FROM_BOUND:
            return

        def by_fluid(counts: Counts, below_s: float) -> float:
            return fluid(self.batch, counts, below_s=below_s).seconds

        _, counts, _ = climb(
            self.world, best.counts, best.seconds, by_fluid, every, _TRIES // 2, bound_s
        )
        self.real_s(counts, inf)

    def last_chances(self) -> None:
        """More steps for the best, other ways to level pipelines that are all alike, and small
        pipelines on devices left over."""
        batch, best = self.batch, self.best
        if self.many:
            # Of those that come out nearly the same, the one that steps may bring lowest.
            near = [x for x in self.found.values() if x.seconds <= best.seconds * _NEARLY]
            best = min(near, key=lambda x: (fluid(batch, x.counts).seconds, x.counts))
        steps = min(_STEPS_BEST, _STEPS_AT_LEAST + len(batch) // 10)
        found = [polished(batch, best, steps=steps, target_s=self.target_s)]
        if len(batch) <= BALANCED:
            found += alike(batch, best.counts, steps=_STEPS if len(batch) <= 2 * FEW else 0)
        more = filled(self.world, best.counts, range(len(self.world.pipes)))
        if more != best.counts:
            self.real_s(more, inf)
        for solution in found:
            if solution.seconds < self.best.seconds:
                self.found[solution.counts] = solution


def _searched(
    world: World, batch: Batch, order: list[tuple[float, Counts]], kinds: Sequence[int],
    floor_s: float,
) -> list[tuple[float, Counts]]:  # fmt: skip
    """Strategies to time with what to expect of them, the most promising first."""
    start_s, start = order[0]

    def by_fluid(counts: Counts, below_s: float) -> float:
        return fluid(batch, counts, below_s=below_s).seconds

    def with_head(counts: Counts, below_s: float) -> float:
        return estimate_s(batch, counts, below_s)

    smooth_s, smooth, path = climb(world, start, start_s, by_fluid, kinds, _TRIES, floor_s)
    head_s = estimate_s(batch, start, start_s * _HEAD_COSTS)
    placed_s, placed, _ = climb(world, start, head_s, with_head, kinds, _TRIES, floor_s)
    first = [(placed_s, placed)] if placed_s < inf else []
    found = dict[Counts, float]()
    for expected_s, counts in (*first, (smooth_s, smooth), *reversed(path), *order):
        found.setdefault(counts, expected_s)
    return [(expected_s, counts) for counts, expected_s in found.items()][:_TIMED]
