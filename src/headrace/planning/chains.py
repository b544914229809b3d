"""Which pipelines follow which on their ranks, and when they end.

Pipelines run in a given order, each when all its ranks are free. So each waits for the last ones
that had any of its ranks, which are few: one where groups lie one in another. Of the ranks, which
are many more, nothing is asked after that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Chains", "Times"]

Times = tuple[float, float, float]
"""Of a pipeline the seconds before which it does not start, as weights are on their way; those that
it computes; and those from then until its gradients are sent."""


class Chains:
    """Pipelines in their order, each on some ranks. ``before[g]`` are those that pipeline g waits
    for, ``last_of`` is the last one of every rank that has one, and ``last`` has these once."""

    def __init__(self, ranks: Iterable[Sequence[int]]) -> None:
        self.last_of: dict[int, int] = {}
        self.before: list[list[int]] = []
        for g, own in enumerate(ranks):
            self.before.append([h for h in set(map(self.last_of.get, own)) if h is not None])
            self.last_of.update(dict.fromkeys(own, g))
        self.last = sorted(set(self.last_of.values()))

    def free_s(self, times: Iterable[Times]) -> list[float]:
        """When each pipeline has nothing left to compute."""
        free = list[float]()
        for (there_s, seconds, _), before in zip(times, self.before, strict=True):
            start_s = there_s
            for h in before:  # by hand, as ``max`` of a list takes longer than of one or two
                if free[h] > start_s:
                    start_s = free[h]
            free.append(start_s + seconds)
        return free

    def sent_s(self, times: Sequence[Times]) -> dict[int, float]:
        """When each of the ``last`` has its gradients sent."""
        free = self.free_s(times)
        return {g: free[g] + times[g][2] for g in self.last}
