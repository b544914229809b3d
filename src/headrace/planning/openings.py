"""How a plan of waves may begin: with waves that grow shorter, before waves of one time.

Where some sequences are far longer than the rest, waves of one time are as long as the longest
needs, and short sequences cannot fill them: a launch holds only so many tokens. So the long ones
come first, in waves that each last as long as the longest that is left takes on some scheme. Each
such beginning, of any number of waves, is an *opening*; what the rest takes after it is estimated,
and the most promising openings are made longer, a few at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from headrace.planning.wave_counts import Estimates
from headrace.planning.wave_filling import Wave, WaveFiller

__all__ = ["Opening", "openings"]

Floats = NDArray[np.float64]

_WIDE = 2  # openings that are made longer
_LONGEST = 10  # waves
_HEADS = 2  # sequences, the longest, whose seconds a wave may last
_SHORTEST = 0.2  # times the time of waves of one time: shorter waves cost ranks for nothing
_ESTIMATED = 100  # sequences placed while an estimate is made
_ROUNDED = 1 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """First waves and their seconds, the sequences that are left (longest first; as a part of all,
    for the estimates), about the seconds of a wave of them, and the estimated seconds of it all."""

    before: list[Wave]
    spent_s: float
    left: list[int]
    part: Floats
    wave_s: float
    estimate_s: float

    @classmethod
    def of(
        cls, estimates: Estimates, before: list[Wave], spent_s: float, left: list[int], part: Floats
    ) -> Opening:
        """The opening ``before``."""
        count, wave_s = estimates.likely(part)
        return cls(
            before=before, spent_s=spent_s, left=left, part=part, wave_s=wave_s,
            estimate_s=spent_s + count * wave_s,
        )  # fmt: skip


def openings(filler: WaveFiller, effort: int) -> list[Opening]:
    """Openings for all sequences, the most promising first, as long as ``effort``, in sequences
    placed, lasts; the one without waves is among them."""
    estimates = Estimates(filler)
    start = Opening.of(estimates, [], 0.0, list(range(len(filler.table.tokens))), estimates.all)
    found = wide = [start]
    for _ in range(_LONGEST):
        longer = dict[tuple[float, int], Opening]()
        for opening in wide:
            for more in _longer(filler, estimates, opening):
                effort -= len(opening.left) - len(more.left) + _ESTIMATED
                longer.setdefault((round(more.spent_s, 9), len(more.left)), more)
        some = sorted(longer.values(), key=lambda one: one.estimate_s)
        found = found + some
        best_s = min(one.estimate_s for one in found)
        wide = [one for one in some[:_WIDE] if one.left and _least_s(filler, one) < best_s]
        if not wide or effort <= 0:
            break
    return sorted(found, key=lambda one: (one.estimate_s, len(one.before)))


def _longer(filler: WaveFiller, estimates: Estimates, opening: Opening) -> Iterator[Opening]:
    """The opening with one wave more, of every time that one of the longest sequences left takes
    and in which the longest ends."""
    left, floor_s = opening.left, opening.wave_s * _SHORTEST
    least_s = min(filler.alone_s(k, left[0]) for k in filler.cheapest[left[0]])
    times = {filler.alone_s(k, i) for i in left[:_HEADS] for k in filler.cheapest[i]}
    for time_s in sorted({least_s, *times}):
        if time_s >= least_s and time_s > floor_s:
            groups, rest = filler.fill(time_s * _ROUNDED, filler.table.devices, left, whole=False)
            spent_s = opening.spent_s + filler.wave_s(groups)
            part = estimates.without(opening.part, chain.from_iterable(own for _, own in groups))
            yield Opening.of(estimates, [*opening.before, groups], spent_s, rest, part)


def _least_s(filler: WaveFiller, opening: Opening) -> float:
    """What no end of an opening can beat."""
    return opening.spent_s + float(filler.least[opening.left].sum()) / filler.table.devices
