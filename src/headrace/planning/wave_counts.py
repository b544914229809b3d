"""How many waves are worth trying, and about how long each would be.

At least as many waves as hold the tokens; a few more leave room for launches that take the same
time. V waves of D seconds have V N rank-waves, each with D - c seconds and room for some tokens. On
p ranks, with t seconds, a sequence takes p t / (D - c) of their time, and its tokens' part of their
room. Packed with others of its kind it takes the larger of the two of the rank-waves: ``guess_s``
is the least D at which all fit so. Packed with those that need more of what it leaves, together
they may take less, though not less than the sum of either: ``least_s``. Both are read off a grid of
D; of many sequences the short ones are counted by samples. :class:`Estimates` has the guess alone,
for many parts of one batch: its samples are taken, and priced for one grid, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, log

import numpy as np
from numpy.typing import NDArray

from headrace.planning.wave_filling import WaveFiller

__all__ = ["Estimates", "WaveCount", "wave_counts"]

Floats = NDArray[np.float64]

_STEPS = np.linspace(0, 1, 33)
_LONG = 8  # times the longest time that one wave may need
_EXACT = 96  # sequences, the longest; of the others every so many are alike
_ALIKE = 24
_EXACT_ONCE = 192  # where all openings share the samples
_CHUNKS = 64
_STEP = 1.1  # from one time to the next
_SHORTEST = 1e-5  # of the longest time: what is shorter is not told apart
_NEVER = 1e18  # rank-waves, for what does not end in time
_MORE = (1.0, 1.12, 1.3, 1.6, 2.0, 2.5)  # times the fewest waves that hold the tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveCount:
    """A number of waves; the seconds of each are hardly below ``least_s``, and about ``guess_s``
    where no launch holds sequences of different kinds."""

    count: int
    least_s: float
    guess_s: float


def wave_counts(filler: WaveFiller, some: Sequence[int]) -> list[WaveCount]:
    """Numbers of waves worth trying for the sequences ``some``, longest first; the most promising
    number first."""
    at, weight = _samples(some)
    times, bare, part = (rows[:, at] for rows in (filler.alone, filler.bare, filler.part))
    bare, part = weight * bare, weight * part
    devices = filler.table.devices
    fewest = max(1, ceil(float(part.min(axis=0).sum()) / devices * (1 - 1e-9)))
    counts = _counts(fewest)
    quickest_s = float(times.min(axis=0).max())
    even_s = float(bare.min(axis=0).sum()) / devices + float(filler.opening.max())
    least_s = max(quickest_s, even_s / counts[-1], 1e-300)
    most_s = _LONG * max(quickest_s, even_s, 1e-300)
    grid = least_s * (most_s / least_s) ** _STEPS
    needs = list(_needs(grid, times, bare, filler.opening))
    ranks = np.array(counts, dtype=np.float64) * devices
    packed = [np.maximum(need, tokens) for need, tokens in zip(needs, part, strict=True)]
    apart = np.minimum.reduce(packed).sum(axis=1)
    mixed = np.minimum.reduce(needs).sum(axis=1)
    found = [
        WaveCount(count=count, least_s=least_s, guess_s=max(least_s, guess_s))
        for count, least_s, guess_s in zip(
            counts, _crossing(grid, mixed, ranks), _crossing(grid, apart, ranks), strict=True
        )
    ]
    return sorted(found, key=lambda one: (one.guess_s * one.count, one.count))


class Estimates:
    """About how many waves any part of a batch takes, and how long. A part is an array: how many
    sequences of each sample it has; ``all`` is the whole batch."""

    def __init__(self, filler: WaveFiller) -> None:
        self.devices, count = filler.table.devices, len(filler.table.tokens)
        head = min(_EXACT_ONCE, count)
        alike = max(_ALIKE, -(-(count - head) // _CHUNKS))
        sample = np.arange(count)
        sample[head:] = head + (sample[head:] - head) // alike
        self.sample: list[int] = sample.tolist()
        self.all = np.bincount(sample).astype(np.float64)
        ends = np.cumsum(self.all).astype(np.int64)
        at = ends - 1 - (self.all / 2).astype(np.int64)  # the middle of each
        times, bare, part = (rows[:, at] for rows in (filler.alone, filler.bare, filler.part))
        self.opening_s = float(filler.opening.max())
        self.times, self.bare, self.part = (each.min(axis=0) for each in (times, bare, part))
        even_s = float(self.bare @ self.all) / self.devices + self.opening_s
        most_s = _LONG * max(float(self.times.max()), even_s, 1e-300)
        least_s = max(float(self.times.min()), most_s * _SHORTEST)
        steps = np.arange(ceil(log(most_s / least_s, _STEP)) + 1, dtype=np.float64)
        self.grid: Floats = least_s * np.power(_STEP, steps)
        needs = _needs(self.grid, times, bare, filler.opening)
        packed = [np.maximum(need, own) for need, own in zip(needs, part, strict=True)]
        self.apart = np.minimum(np.minimum.reduce(packed), _NEVER)

    def without(self, some: Floats, placed: Iterable[int]) -> Floats:
        """A part without some of its sequences."""
        left = some.copy()
        for i in placed:
            left[self.sample[i]] -= 1
        return left

    def likely(self, some: Floats) -> tuple[int, float]:
        """The most promising number of waves for a part, and about how long each would be; of
        nothing no waves."""
        held = np.flatnonzero(some)
        if not len(held):
            return 0, 0.0
        fewest = max(1, ceil(float(self.part @ some) / self.devices * (1 - 1e-9)))
        counts = _counts(fewest)
        even_s = float(self.bare @ some) / self.devices + self.opening_s
        least_s = max(float(self.times[held[0]]), even_s / counts[-1])
        ranks = np.array(counts, dtype=np.float64) * self.devices
        guesses = _crossing(self.grid, self.apart @ some, ranks)
        found = [(max(least_s, guess_s), n) for guess_s, n in zip(guesses, counts, strict=True)]
        guess_s, count = min(found, key=lambda one: (one[0] * one[1], one[1]))
        return count, guess_s


def _counts(fewest: int) -> list[int]:
    """Numbers of waves to try where ``fewest`` hold the tokens."""
    return sorted({round(more * fewest) for more in _MORE} | {fewest + 1, fewest + 2})


def _needs(grid: Floats, times: Floats, bare: Floats, opening: Floats) -> Iterator[Floats]:
    """The rank-waves that sequences take of the seconds of waves of each time [times, sequences],
    by kind."""
    limits = grid[:, None]
    for own_s, work_s, open_s in zip(times, bare, opening.tolist(), strict=True):
        with np.errstate(over="ignore"):
            need = work_s * (1 / np.maximum(limits - open_s, 1e-300))
        need[own_s > limits * (1 + 1e-9)] = np.inf
        yield need


def _crossing(grid: Floats, need: Floats, ranks: Floats) -> list[float]:
    """The times at which a falling need, about linear in 1 / D, comes down to each of ``ranks``."""
    falling = np.minimum.accumulate(need)[::-1]
    return (1 / np.interp(ranks, falling, 1 / grid[::-1])).tolist()


def _samples(some: Sequence[int]) -> tuple[NDArray[np.int64], Floats]:
    """Some of the sequences, and how many each stands for."""
    head = min(_EXACT, len(some))
    starts = np.arange(head, len(some), _ALIKE)
    middles = np.minimum(starts + _ALIKE // 2, len(some) - 1).tolist()
    at = np.array([*some[:head], *[some[n] for n in middles]], dtype=np.int64)
    return at, np.concatenate([np.ones(head), np.minimum(_ALIKE, len(some) - starts)])
