"""What simpler planners make of a batch: where one of them beats ours, its solution is the plan.

Ours is better by far where strategies matter, and hardly ever worse; but a few sequences on a few
pipelines are a lottery that a hundred random trials may win. So what the baselines and, in small
worlds, the paper's planner would do is done too, for those strategies of theirs that a bound does
not rule out: few, as ours is close to the bound of every plan, and with many sequences none.

A change of the strategy within an iteration is none of them, although it may pay where the longest
sequence needs all devices: it is no plan of one strategy, which ours is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from headrace.planning.pipelines.baselines import by_cost, by_length, by_tokens
from headrace.planning.pipelines.batch import Batch
from headrace.planning.pipelines.choose import BALANCED, Chosen
from headrace.planning.pipelines.fluid import fluid
from headrace.planning.pipelines.paper import by_greedy, paper_candidates
from headrace.planning.pipelines.solution import FEW, Solution
from headrace.planning.pipelines.world import Counts, World

__all__ = ["Rivals"]

_CLOSE_ENOUGH = 1 + 1e-6
_SEQUENCES = 150  # of more, random trials never came level
_DEVICES = 32
_FAR_FROM_IT = 1.1


class Rivals:
    """The others, prepared for some iterations, of which ``context`` is the longest sequence."""

    def __init__(self, world: World, iterations: Sequence[Sequence[int]], seed: int) -> None:
        self.seed = seed
        self.homogeneous = world.homogeneous()
        self.context = max(max(lengths) for lengths in iterations)
        small = world.devices <= _DEVICES and min(map(len, iterations)) <= _SEQUENCES
        self.candidates = paper_candidates(world, iterations) if small else []

    def best(self, number: int, batch: Batch, chosen: Chosen) -> Chosen:
        """The best of what was chosen for iteration ``number`` and of what the others make."""
        ours = best = chosen.solution
        for solution in self._others(number, batch, chosen):
            if solution.seconds < best.seconds:
                best = solution
        if best is ours:
            return chosen
        runner_up = chosen.runner_up if best.counts == ours.counts else (ours.seconds, ours.counts)
        return replace(chosen, solution=best, runner_up=runner_up)

    def _others(self, number: int, batch: Batch, chosen: Chosen) -> Iterator[Solution]:
        relaxation, seconds = chosen.relaxation, chosen.solution.seconds
        if seconds <= chosen.bound.seconds * _CLOSE_ENOUGH:
            return
        shares = relaxation.shares(seconds)

        def left(candidates: Sequence[Counts]) -> list[Counts]:
            return [counts for counts in candidates if not relaxation.closed(counts, shares)]

        for counts in left(self.homogeneous):
            found = by_cost(batch, counts), by_length(batch, counts, self.context)
            if counts != chosen.solution.counts or len(batch) > BALANCED:
                found = *found, by_tokens(batch, counts)
            yield from filter(None, found)
        if len(batch) <= _SEQUENCES:
            for counts in left(self.candidates):
                # With few sequences no estimate is to be trusted.
                most_s = seconds * _FAR_FROM_IT if len(batch) > FEW else inf
                if fluid(batch, counts, below_s=most_s).seconds == inf:
                    continue
                solution = by_greedy(batch, counts, seed=self.seed + number)
                if solution is not None:
                    yield solution
