"""How many waves are worth trying, and about how long each would be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.planning.groups.work import Floats, Work

__all__ = ["WaveCount", "wave_counts"]

_GRID = 129
_EXACT = 128  # sequences, the longest; of the others every so many are alike
_ALIKE = 16
_MORE = (1.0, 1.12, 1.3, 1.6, 2.0, 2.5)  # times the fewest waves that hold the tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveCount:
    """A number of waves; the seconds of each are hardly below ``least_s``, and about ``guess_s``
    where no launch holds sequences of different kinds."""

    count: int
    least_s: float
    guess_s: float


def wave_counts(work: Work, some: Sequence[int]) -> list[WaveCount]:
    """Numbers of waves worth trying for the sequences ``some``, longest first; the most promising
    number first.

    At least as many waves as hold the tokens; a few more leave room for launches that take the
    same time. V waves of D seconds have V N rank-waves, each with D - c seconds and room for cap
    tokens. On p ranks, with t seconds, a sequence of l tokens takes p t / (D - c) of their time and
    l / cap of their room. Packed with others of its kind it takes the larger of the two of the
    rank-waves: ``guess_s`` is the least D at which all fit so. Packed with those that need more of
    what it leaves, together they may take less, though not less than the sum of either:
    ``least_s``. Of many sequences the short ones are counted by samples.
    """
    total = sum([work.tokens[i] for i in some])
    fewest = -(-total // (work.devices * work.costs.cap_tokens))
    counts = {round(more * fewest) for more in _MORE} | {fewest + 1, fewest + 2}
    sampled, weight = _samples(some)
    times = work.seconds[:, sampled]
    bare = weight * times * np.array(work.sizes, dtype=np.float64)[:, None]
    room = weight * np.array([work.tokens[i] for i in sampled]) / work.costs.cap_tokens
    quickest_s = float(times.min(axis=0).max())
    most_s = 1.01 * max(quickest_s, float(bare.min(axis=0).sum()), 1e-300)
    grid = np.geomspace(max(quickest_s, 1e-9 * most_s), most_s, _GRID)
    need = _Need(times=times, bare=bare, room=room, grid=grid.tolist(), known={})
    found = []
    for count in sorted(counts):
        least_s, guess_s = need.seconds(count * work.devices)
        found.append(
            WaveCount(
                count=count,
                least_s=max(least_s, quickest_s) + work.c_s,
                guess_s=max(guess_s, quickest_s) + work.c_s,
            )
        )
    return sorted(found, key=lambda one: (one.guess_s * one.count, one.count))


def _samples(some: Sequence[int]) -> tuple[list[int], Floats]:
    """Some of the sequences, and how many each stands for."""
    head, tail = list(some[:_EXACT]), some[_EXACT:]
    chunks = [tail[n : n + _ALIKE] for n in range(0, len(tail), _ALIKE)]
    sampled = head + [chunk[len(chunk) // 2] for chunk in chunks]
    return sampled, np.array([1.0] * len(head) + [float(len(chunk)) for chunk in chunks])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    """What sequences need, by the time of a wave without its constant, on a grid of times."""

    times: Floats
    bare: Floats
    room: Floats
    grid: list[float]
    known: dict[int, tuple[float, float]]

    def seconds(self, ranks: int) -> tuple[float, float]:
        """The least times in which ``ranks`` rank-waves are enough, mixed and apart."""
        return self._first(ranks, 0), self._first(ranks, 1)

    def _at(self, at: int) -> tuple[float, float]:
        """Rank-waves needed in time ``grid[at]``, mixed and apart."""
        if at not in self.known:
            limit_s = self.grid[at] * (1 + 1e-12)
            least = np.where(self.times <= limit_s, self.bare, np.inf).min(axis=0) / limit_s
            self.known[at] = float(least.sum()), float(np.maximum(least, self.room).sum())
        return self.known[at]

    def _first(self, ranks: int, which: int) -> float:
        low, high = -1, len(self.grid) - 1
        while high - low > 1:
            middle = (low + high) // 2
            if self._at(middle)[which] <= ranks:
                high = middle
            else:
                low = middle
        if which == 0 and low >= 0:
            return max(self.grid[low], self.grid[high] * self._at(high)[0] / ranks)
        return self.grid[high]
