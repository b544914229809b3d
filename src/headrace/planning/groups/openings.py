"""How a plan of waves may begin: with waves that grow shorter, before waves of one time.

Where some sequences are far longer than the rest, waves of one time are as long as the longest
needs, and short sequences cannot fill them: a launch holds only so many tokens. So the long ones
come first, in waves that each last as long as their longest sequence takes on the size of least
area that meets a target time. Each such beginning, of any number of waves, is an *opening*; what
the rest takes after it is estimated, so that only the most promising need be finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.planning.groups.filling import Filler
from headrace.planning.groups.wave import Wave, sorted_into_waves, waves_s
from headrace.planning.groups.wave_counts import WaveCount, wave_counts

__all__ = ["Opening", "openings"]

_SHORTEST = 0.6  # times the time of waves of one time: targets below cost ranks for nothing
_HOPELESS = 1.01  # times the best estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """First waves, the sequences that are left (longest first), numbers of waves for them, and the
    estimated seconds of it all."""

    before: list[Wave]
    left: list[int]
    counts: list[WaveCount]
    estimate_s: float

    @classmethod
    def of(cls, filler: Filler, before: list[Wave], left: list[int]) -> Opening:
        """The opening ``before``."""
        counts = wave_counts(filler.work, left) if left else []
        rest_s = counts[0].count * counts[0].guess_s if counts else 0.0
        return cls(
            before=before, left=left, counts=counts, estimate_s=waves_s(filler, before) + rest_s
        )


def openings(filler: Filler, some: Sequence[int], effort: int) -> list[Opening]:
    """Openings for the sequences ``some``, longest first, the most promising first: the one
    without waves, and those of every target that the longest could meet, as long as ``effort``,
    in sequences placed, lasts."""
    found = [Opening.of(filler, [], list(some))]
    even_s, rows = found[0].counts[0].guess_s, filler.work.rows
    targets = {rows[row][some[0]] for row in filler.cheapest[some[0]]}
    for target_s in sorted(time_s for time_s in targets if time_s > even_s * _SHORTEST):
        for opening in _graded(filler, found[0], target_s * (1 + 1e-9)):
            best_s = min(one.estimate_s for one in found)
            found.append(opening)
            effort -= len(some) - len(opening.left)
            if effort <= 0 or _least_s(filler, opening) > best_s * _HOPELESS:
                break
    return sorted(found, key=lambda one: (one.estimate_s, len(one.before)))


def _graded(filler: Filler, opening: Opening, target_s: float) -> Iterator[Opening]:
    """Longer and longer openings, while their last wave is longer than what follows."""
    work = filler.work
    while opening.left:
        rows, first = filler.cheapest[opening.left[0]], opening.left[0]
        quickest = min(rows, key=lambda row: work.rows[row][first])
        row = next((row for row in rows if work.rows[row][first] <= target_s), quickest)
        time_s = (work.rows[row][first] + work.c_s) * (1 + 1e-9)
        if opening.before and time_s <= opening.counts[0].guess_s:
            break
        groups, left = filler.fill(time_s, work.devices, opening.left, whole=False)
        wave = sorted_into_waves(filler, groups, 1)
        assert wave is not None, "groups of one wave are on ranks of their own"
        opening = Opening.of(filler, opening.before + wave, left)
        yield opening


def _least_s(filler: Filler, opening: Opening) -> float:
    """What no end of an opening can beat."""
    area = filler.work.area[:, opening.left].min(axis=0).sum() if opening.left else 0.0
    return waves_s(filler, opening.before) + float(area) / filler.work.devices
