"""How many waves are worth trying, and about how long each would be.

At least as many waves as hold the tokens; a few more leave room for launches that take the same
time. V waves of D seconds have V N rank-waves, each with D - c seconds and room for some tokens. On
p ranks, with t seconds, a sequence takes p t / (D - c) of their time, and its tokens' part of their
room. Packed with others of its kind it takes the larger of the two of the rank-waves: ``guess_s``
is the least D at which all fit so. Packed with those that need more of what it leaves, together
they may take less, though not less than the sum of either: ``least_s``. Both are read off a grid of
D; of many sequences the short ones are counted by samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from headrace.planning.wave_filling import WaveFiller

__all__ = ["WaveCount", "wave_counts"]

Floats = NDArray[np.float64]

_STEPS = np.linspace(0, 1, 33)
_LONG = 8  # times the longest time that one wave may need
_EXACT = 96  # sequences, the longest; of the others every so many are alike
_ALIKE = 24
_CHUNKS = 64  # of alike sequences at most, in an estimate that is coarse
_MORE = (1.0, 1.12, 1.3, 1.6, 2.0, 2.5)  # times the fewest waves that hold the tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveCount:
    """A number of waves; the seconds of each are hardly below ``least_s``, and about ``guess_s``
    where no launch holds sequences of different kinds."""

    count: int
    least_s: float
    guess_s: float


def wave_counts(
    filler: WaveFiller, some: Sequence[int], *, coarse: bool = False
) -> list[WaveCount]:
    """Numbers of waves worth trying for the sequences ``some``, longest first; the most promising
    number first. ``coarse``: of many sequences with fewer samples, and ``least_s`` is ``guess_s``.
    """
    at, weight = _samples(some, _CHUNKS if coarse else len(some))
    times, bare, part = (rows[:, at] for rows in (filler.alone, filler.bare, filler.part))
    bare, part = weight * bare, weight * part
    devices = filler.table.devices
    fewest = max(1, ceil(float(part.min(axis=0).sum()) / devices * (1 - 1e-9)))
    counts = sorted({round(more * fewest) for more in _MORE} | {fewest + 1, fewest + 2})
    quickest_s = float(times.min(axis=0).max())
    even_s = float(bare.min(axis=0).sum()) / devices + float(filler.opening.max())
    least_s = max(quickest_s, even_s / counts[-1], 1e-300)
    most_s = _LONG * max(quickest_s, even_s, 1e-300)
    grid = least_s * (most_s / least_s) ** _STEPS
    needs = list(_needs(grid, times, bare, filler.opening))
    ranks = np.array(counts, dtype=np.float64) * devices
    packed = [np.maximum(need, tokens) for need, tokens in zip(needs, part, strict=True)]
    apart = np.minimum.reduce(packed).sum(axis=1)
    mixed = apart if coarse else np.minimum.reduce(needs).sum(axis=1)
    found = [
        WaveCount(count=count, least_s=least_s, guess_s=max(least_s, guess_s))
        for count, least_s, guess_s in zip(
            counts, _crossing(grid, mixed, ranks), _crossing(grid, apart, ranks), strict=True
        )
    ]
    return sorted(found, key=lambda one: (one.guess_s * one.count, one.count))


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


def _samples(some: Sequence[int], most: int) -> tuple[NDArray[np.int64], Floats]:
    """Some of the sequences, and how many each stands for: the longest, and of the others one of
    each of ``most`` chunks at most."""
    head = min(_EXACT, len(some))
    alike = max(_ALIKE, -(-(len(some) - head) // most))
    starts = np.arange(head, len(some), alike)
    middles = np.minimum(starts + alike // 2, len(some) - 1).tolist()
    at = np.array([*some[:head], *[some[n] for n in middles]], dtype=np.int64)
    return at, np.concatenate([np.ones(head), np.minimum(alike, len(some) - starts)])
