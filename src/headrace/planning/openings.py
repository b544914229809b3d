"""How a plan of waves may begin: with waves that grow shorter, before waves of one time.

Where some sequences are far longer than the rest, waves of one time are as long as the longest
needs, and short sequences cannot fill them: a launch holds only so many tokens. So the long ones
come first, in waves that each last as long as the longest that is left takes on some scheme. Each
such beginning, of any number of waves, is an *opening*. What its waves hold and what the rest takes
after them is estimated, and the most promising openings are made longer, a few at a time; only
their waves are filled.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from headrace.planning.wave_counts import Estimates
from headrace.planning.wave_filling import Wave, WaveFiller

__all__ = ["FEW", "Begun", "Opening", "openings"]

Floats = NDArray[np.float64]

_WIDE = 2  # openings that are made longer
_LONGEST = 10  # waves
_HEADS = 2, 4  # of the longest sequences, at least and at most: a wave lasts as long as one takes
_RANKS_EACH = 16  # for each of those: a wave of few ranks holds few of the longest
_SHORTEST = 0.2  # times the time of waves of one time: shorter waves cost ranks for nothing
_LEFT_BEHIND = 1.02  # times the best estimate: such openings are not made longer
_FILLED = 2  # waves that may come next, for each opening
FEW = 300  # sequences: of fewer, all waves that may come next are filled
_ESTIMATED = 100  # sequences placed while an estimate is made
_ROUNDED = 1 + 1e-9

# What is promised for waves that are not filled yet may be this much above the best estimate, and
# more where a rank has few sequences: then estimates are too low, as whole sequences leave gaps.
_ABOVE = 0.002
_ABOVE_EACH = 0.12  # times ranks for each sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """First waves and their seconds, and the sequences that are left, longest first; as a part of
    all, for the estimates."""

    before: list[Wave]
    spent_s: float
    left: list[int]
    part: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Where a plan ``begun``; of what is left about the seconds of a wave; and the estimated
    seconds of it all."""

    begun: Begun
    wave_s: float
    estimate_s: float


def openings(filler: WaveFiller, estimates: Estimates, effort: int) -> list[Opening]:
    """Openings for all sequences, the most promising first, as long as ``effort``, in sequences
    placed, lasts; the one without waves is among them."""
    every = list(range(len(filler.table.tokens)))
    start = Begun(before=[], spent_s=0.0, left=every, part=estimates.all)
    found = wide = _estimated(estimates, [start])
    best_s = found[0].estimate_s
    for _ in range(_LONGEST):
        longer = dict[tuple[float, int], Begun]()
        for opening in wide:
            for time_s in _promising(estimates, opening, best_s):
                more = _filled(filler, estimates, opening.begun, time_s)
                effort -= len(opening.begun.left) - len(more.left) + _ESTIMATED
                longer.setdefault((round(more.spent_s, 9), len(more.left)), more)
        if not longer or effort <= 0:
            break
        some = sorted(_estimated(estimates, longer.values()), key=lambda one: one.estimate_s)
        found = found + some
        best_s = min(best_s, some[0].estimate_s)
        wide = [one for one in some[:_WIDE] if _may_win(filler, one, best_s)]
    return sorted(found, key=lambda one: (one.estimate_s, len(one.begun.before)))


def _may_win(filler: WaveFiller, opening: Opening, best_s: float) -> bool:
    """Whether a longer opening may be better than the best."""
    begun, estimate_s = opening.begun, opening.estimate_s
    least_s = begun.spent_s + float(filler.least[begun.left].sum()) / filler.table.devices
    return bool(begun.left) and estimate_s <= best_s * _LEFT_BEHIND and least_s < best_s


def _estimated(estimates: Estimates, some: Collection[Begun]) -> list[Opening]:
    counts, waves_s = estimates.likely(np.stack([begun.part for begun in some]))
    rows = zip(some, counts.tolist(), waves_s.tolist(), strict=True)
    return [
        Opening(begun=begun, wave_s=wave_s, estimate_s=begun.spent_s + count * wave_s)
        for begun, count, wave_s in rows
    ]


def _promising(estimates: Estimates, opening: Opening, best_s: float) -> list[float]:
    """The seconds of waves that may come next: those that one of the longest sequences left takes
    and in which the longest ends, if estimates promise a plan that is not far from the best."""
    begun = opening.begun
    heads = min(max(estimates.devices // _RANKS_EACH, _HEADS[0]), _HEADS[1])
    times_s = estimates.launches_s(begun.part, heads)
    times_s = times_s[times_s > opening.wave_s * _SHORTEST]
    if len(times_s) > _FILLED and len(begun.left) >= FEW:
        counts, waves_s = estimates.likely(estimates.after(begun.part, times_s))
        promised_s = begun.spent_s + times_s + counts * waves_s
        limit_s = best_s * (1 + _ABOVE + _ABOVE_EACH * estimates.devices / len(begun.left))
        best = promised_s.argsort(kind="stable")[:_FILLED]
        times_s = times_s[best[promised_s[best] <= limit_s]]
    found: list[float] = times_s.tolist()
    return found


def _filled(filler: WaveFiller, estimates: Estimates, begun: Begun, time_s: float) -> Begun:
    """One wave more, of ``time_s`` or as long as the longest sequence takes."""
    limit_s = max(time_s, filler.quickest_s(begun.left[0])) * _ROUNDED
    groups, left = filler.fill(limit_s, filler.table.devices, begun.left, whole=False)
    return Begun(
        before=[*begun.before, groups],
        spent_s=begun.spent_s + filler.wave_s(groups),
        left=left,
        part=estimates.without(begun.part, chain.from_iterable(own for _, own in groups)),
    )
