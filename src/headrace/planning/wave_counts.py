"""How many waves are worth trying, and about how long each would be.

At least as many waves as hold the tokens; a few more leave room for launches that take the same
time. V waves of D seconds have V N rank-waves, each with D - c seconds and room for some tokens. On
p ranks, with t seconds, a sequence takes p t / (D - c) of their time, and its tokens' part of their
room. Packed with others of its kind it takes the larger of the two of the rank-waves: ``guess_s``
is the least D at which all fit so. Packed with those that need more of what it leaves, together
they may take less, though not less than the sum of either: ``least_s``. Both are read off a grid of
D. This is asked of many parts of one batch, so what its sequences take is worked out once, of
those that are not among the longest by samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, log

import numpy as np
from numpy.typing import NDArray

from headrace.planning.wave_filling import WaveFiller

__all__ = ["Estimates", "WaveCount"]

Floats = NDArray[np.float64]

_LONG = 8  # times the longest time that one wave may need
_EXACT = 128  # sequences, the longest; of the others every so many are alike
_ALIKE = 24
_CHUNKS = 32  # of such, at most
_STEP = 1.05  # from one time of the grid to the next
_ABOVE = 1.5  # times what the fewest waves last: up to there the grid is that fine
_READ = 0.99  # of what is read between two times, for what is least
_APART = 1.5  # from one time to the next elsewhere, where waves hardly are
_SHORTEST = 1e-5  # of the longest time: what is shorter is not told apart
_NEVER = 1e18  # rank-waves, for what does not end in time
_MORE = np.array([1.0, 1.12, 1.3, 1.6, 2.0, 2.5])  # times the fewest waves that hold the tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveCount:
    """A number of waves; the seconds of each are hardly below ``least_s``, and about ``guess_s``
    where no launch holds sequences of different kinds."""

    count: int
    least_s: float
    guess_s: float


class Estimates:
    """About how many waves any part of a batch takes, and how long. A part is an array: how many
    sequences of each sample it has; ``all`` is the whole batch."""

    def __init__(self, filler: WaveFiller) -> None:
        self.devices, count = filler.table.devices, len(filler.table.tokens)
        head = min(_EXACT, count)
        alike = max(_ALIKE, -(-(count - head) // _CHUNKS))
        sample = np.arange(count)
        sample[head:] = head + (sample[head:] - head) // alike
        self.sample: list[int] = sample.tolist()
        self.all = np.bincount(sample).astype(np.float64)
        ends = np.cumsum(self.all).astype(np.int64)
        at = ends - 1 - (self.all / 2).astype(np.int64)  # the middle of each
        self._times, bare, part = (
            np.minimum(rows[:, at], _NEVER) for rows in (filler.alone, filler.bare, filler.part)
        )
        self._bare, self._part, self._opening = bare, part, filler.opening
        self.opening_s = float(filler.opening.max())
        self.times, self.bare, self.part = (own.min(axis=0) for own in (self._times, bare, part))
        self.grid = self._grid()
        # In times that are too short for a sequence it counts as in the least that is not: that the
        # longest must end is asked for apart, and a jump could not be read between two times.
        limits = np.maximum(self.grid[:, None], self.times)
        needs = self._needs(limits)
        self.mixed: Floats = needs.min(axis=1)
        self.apart: Floats = np.maximum(needs, part).min(axis=1)

    def _grid(self) -> Floats:
        """Times, rising; close to one another where waves of most of the batch will be."""
        fewest = float(self._counts(self.all[None])[0].min())
        longest_s = max(float(self.times.max()), 1e-300)
        even_s = float(self.bare @ self.all) / self.devices + self.opening_s
        most_s = _LONG * max(longest_s, even_s)
        least_s = max(float(self.times.min()), most_s * _SHORTEST)
        low_s = max(least_s, longest_s / _LONG)
        high_s = max(low_s, min(most_s, _ABOVE * max(longest_s, even_s / fewest)))
        spans = (least_s, low_s, _APART), (low_s, high_s, _STEP), (high_s, most_s, _APART)
        found = [
            start_s * step ** np.arange(ceil(log(end_s / start_s, step)))
            for start_s, end_s, step in spans
        ]
        return np.concatenate([*found, [most_s]])

    def _needs(self, times_s: Floats) -> Floats:
        """The rank-waves that one of each sample takes of the seconds of waves of some times
        [times, samples or 1], by kind [times, kinds, samples]."""
        limits = times_s[:, None]
        needs: Floats = self._bare / np.maximum(limits - self._opening, 1e-280)
        np.putmask(needs, self._times > limits * (1 + 1e-9), _NEVER)
        return needs

    def without(self, some: Floats, placed: Iterable[int]) -> Floats:
        """A part without some of its sequences."""
        left = some.copy()
        for i in placed:
            left[self.sample[i]] -= 1
        return left

    def launches_s(self, some: Floats, heads: int) -> Floats:
        """The seconds, rising, that launches of one of the ``heads`` longest sequences of a part
        take on every scheme, where the longest ends."""
        times = self._times[:, some.nonzero()[0][:heads]]
        found = set(times[(times >= times[:, 0].min()) & (times < _NEVER)].tolist())
        return np.array(sorted(found))

    def after(self, some: Floats, times_s: Floats) -> Floats:
        """About what waves of each time, which take the longest sequences first, leave of a part
        [times, samples]."""
        wanted = np.maximum(self._needs(times_s[:, None]), self._part).min(axis=1) * some
        over = np.maximum(np.cumsum(wanted, axis=1) - self.devices, 0.0)
        left: Floats = some * np.minimum(over / np.maximum(wanted, 1e-300), 1.0)
        return left

    def likely(self, parts: Floats) -> tuple[Floats, Floats]:
        """The most promising numbers of waves for parts [parts, samples], and about how long each
        would be; of nothing no waves."""
        counts, least_s = self._counts(parts)
        ranks = counts * self.devices
        needs = (self.apart @ parts.T).T
        found = [_crossing(self.grid, need, own) for need, own in zip(needs, ranks, strict=True)]
        guesses = np.maximum(least_s[:, None], found)
        each, best = np.arange(len(parts)), (guesses * counts).argmin(axis=1)
        some = parts.any(axis=1)
        return counts[each, best] * some, guesses[each, best] * some

    def worth_trying(self, some: Floats) -> list[WaveCount]:
        """Numbers of waves for a part, the most promising first."""
        counts, (floor_s,) = self._counts(some[None])
        ranks = counts[0] * self.devices
        least = np.maximum(floor_s, _READ * _crossing(self.grid, self.mixed @ some, ranks))
        guesses = np.maximum(least, _crossing(self.grid, self.apart @ some, ranks))
        rows = zip(counts[0].tolist(), least.tolist(), guesses.tolist(), strict=True)
        found = {
            int(count): WaveCount(count=int(count), least_s=least_s, guess_s=guess_s)
            for count, least_s, guess_s in rows
        }
        return sorted(found.values(), key=lambda one: (one.guess_s * one.count, one.count))

    def _counts(self, parts: Floats) -> tuple[Floats, Floats]:
        """Numbers of waves for parts [parts, numbers], and what a wave of them lasts at least."""
        fewest = np.maximum(1, np.ceil(parts @ self.part / self.devices * (1 - 1e-9)))[:, None]
        counts = np.concatenate([np.round(fewest * _MORE), fewest + 1, fewest + 2], axis=1)
        even_s = parts @ self.bare / self.devices + self.opening_s
        longest_s = self.times[(parts > 0).argmax(axis=1)]
        return counts, np.maximum(longest_s, even_s / counts.max(axis=1))


def _crossing(grid: Floats, need: Floats, ranks: Floats) -> Floats:
    """The times at which a falling need, about linear in 1 / D, comes down to each of ``ranks``."""
    falling = np.minimum.accumulate(need)[::-1]
    return 1 / np.interp(ranks, falling, 1 / grid[::-1])
