"""The generator of lockstep schedules: waves of launches that all take the same time.

Data        sequences with their seconds and tokens on every group size; N ranks.
Variables   waves; in each a partition of the ranks into groups, the sequences of every group.
Constraint  a group is one micro-batch: it holds at most its scheme's tokens.
Objective   minimise the sum over the waves of their slowest launch.

Solve. Waves that grow shorter come first where some sequences are far longer than the rest
(:mod:`headrace.planning.openings`). For the rest, of V waves the least time D is sought in which
groups of V N ranks can be filled (:mod:`headrace.planning.wave_filling`), from an estimate upwards
and then by halving; short sequences are dealt out again so that the groups end together, and the
groups are sorted into waves by their seconds. Which V: few waves pay few constants, but leave the
longest sequence more of the world and memory less room; the best by estimate
(:mod:`headrace.planning.wave_counts`) are tried, as long as one could beat the best that is known:
those of all openings close to their estimates, and far above only where none of them succeeds. What
the best opening leaves is tried in other orders too where sequences are few, until too many fail or
the effort is spent: so many sequences placed, never so much time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.planning.batch import PriceTable
from headrace.planning.openings import FEW, Begun, openings
from headrace.planning.schedule import Assignment
from headrace.planning.side_by_side import Pipelines
from headrace.planning.wave_counts import Estimates, WaveCount
from headrace.planning.wave_filling import Wave, WaveFiller, sorted_into_waves

__all__ = ["waves"]

Span = tuple[float, float]

_CLOSE_ENOUGH = 1 + 2e-3  # of the bound: no search beyond it
_EFFORT = 20_000
_COARSE = (1.0, 1.004, 1.012, 1.03, 1.08)  # times the guess
_FINE = tuple(1 + 0.004 * k for k in range(1, 30))  # times the least
_FAR = (1.08, 1.3, 1.6, 2.2, 4.0, 10.0, 40.0)  # times the guess, if there is no plan in these
_COUNTS = 3  # numbers of waves for the most promising opening
_COUNTS_LATER = 2  # and for the others
_FINISHED = 5  # openings
_FINISHED_FEW = 24
_HOPE = 1.003  # times the best: openings with longer estimates are not finished
_HOPE_FEW = 1.1
_SPREADS = (0.03, 0.1, 0.3)
_CLOSE = 1e-3  # of a time: how closely the least is sought
_TRIED = 30  # sequences that could be placed while a try begins
_MISSED = 45  # drawn orders in a row, or as many as place so many sequences:
_PLACED = 1500
_STEP = 0.998  # of the best: less gain is not worth a try


def waves(
    table: PriceTable, bound_s: float, *, seed: int, effort: int = _EFFORT
) -> Assignment | None:
    """The best waves found for all sequences, with groups of the table's schemes of one stage;
    None where these do not hold the longest. ``effort``: about how many sequences are placed."""
    kinds = [
        k for k, depth in enumerate(table.depth) if depth == 1 and table.width[k] <= table.devices
    ]
    if not kinds or not np.isfinite(table.alone[kinds, 0]).any():
        return None
    filler = WaveFiller(table, kinds)
    few, estimates = len(table.tokens) < FEW, Estimates(filler)
    found = openings(filler, estimates, effort // 2)
    start = next(opening.begun for opening in found if not opening.begun.before)
    search = _Search(filler=filler, enough_s=bound_s * _CLOSE_ENOUGH, effort=effort, begun=start)
    hope = _HOPE_FEW if few else _HOPE
    for far in (False, True):
        for n, opening in enumerate(found[: _FINISHED_FEW if few else _FINISHED]):
            if opening.estimate_s > search.seconds * hope or (far and search.best):
                break
            counts = estimates.worth_trying(opening.begun.part)
            search.finish(opening.begun, counts[: _COUNTS_LATER if n else _COUNTS], far=far)
    if not search.best:
        search.one_by_one(found[0].begun)
    if few:
        search.shuffled(np.random.default_rng(seed), start)
    launches = [launch for wave in search.best for launch in _launches(table, wave)]
    return Assignment.of_launches(table, launches, "waves", "lockstep")


def _launches(table: PriceTable, wave: Wave) -> Iterator[tuple[int, tuple[int, ...], list[int]]]:
    """The launches of a wave: the largest groups first, on neighbouring ranks."""
    start = 0
    for k, members in sorted(wave, key=lambda group: (-table.width[group[0]], min(group[1]))):
        end = start + table.width[k]
        yield k, tuple(range(start, end)), sorted(members)
        start = end


@dataclass(slots=True, kw_only=True)
class _Search:
    """The best waves so far, where they began, and what may still be spent."""

    filler: WaveFiller
    enough_s: float
    effort: int
    begun: Begun
    best: list[Wave] = field(default_factory=list)
    seconds: float = float("inf")

    @property
    def over(self) -> bool:
        """Whether to stop: close enough to the bound, or, with a plan, spent."""
        return self.seconds <= self.enough_s or (self.effort <= 0 and bool(self.best))

    def finish(self, begun: Begun, counts: Sequence[WaveCount], *, far: bool) -> None:
        """Waves of one time for what a beginning leaves, where they are better: of about the times
        that are guessed, or ``far`` above them."""
        if not begun.left:
            self._keep(begun, 0.0, [])
            return
        if self.over:
            return
        for one in counts:
            limit_s = (self.seconds - begun.spent_s) / one.count * _STEP
            if self.over or one.least_s >= limit_s:
                continue
            for low_s, time_s in _times(one, limit_s, few=len(begun.left) < FEW, far=far):
                groups = self._try(begun, begun.left, one.count, time_s)
                if groups:
                    groups = self._halve(begun, one.count, low_s, time_s) or groups
                    self._level(begun, groups, one.count)
                if groups or self.over:
                    break

    def one_by_one(self, begun: Begun) -> None:
        """Wave after wave as long as its longest sequence takes on the size of least area."""
        filler, made, left = self.filler, list[Wave](), begun.left
        while left:
            time_s = filler.alone_s(filler.cheapest[left[0]][0], left[0]) * (1 + 1e-9)
            groups, left = filler.fill(time_s, filler.table.devices, left, whole=False)
            made.append(groups)
        self._keep(begun, filler.waves_s(made), made)

    def shuffled(self, random: np.random.Generator, start: Begun) -> None:
        """As many waves after the best beginning, or from the ``start`` where it left nothing, in a
        little less time, with the sequences in other orders; until too many in a row failed."""
        begun = self.begun if self.begun.left else start
        length, missed = self.filler.table.batch.values[begun.left], 0
        least_s, most = self.filler.quickest_s(begun.left[0]), max(_MISSED, _PLACED // len(length))
        while not self.over and missed < most:
            count = len(self.best) - len(begun.before)
            time_s = (self.seconds - begun.spent_s) / count * _STEP
            if time_s < least_s:
                break
            noise = np.exp(random.normal(0.0, _SPREADS[missed % len(_SPREADS)], len(length)))
            order = np.argsort(-length * noise, kind="stable").tolist()
            groups = self._try(begun, [begun.left[n] for n in order], count, time_s)
            if groups:
                self._level(begun, groups, count)
            missed = 0 if groups else missed + 1

    def _halve(self, begun: Begun, count: int, low_s: float, high_s: float) -> Pipelines:
        """The groups of the least time found between two times."""
        best: Pipelines = []
        while high_s - low_s > _CLOSE * low_s and not self.over:
            middle_s = (low_s + high_s) / 2
            groups = self._try(begun, begun.left, count, middle_s)
            if groups:
                best, high_s = groups, middle_s
            else:
                low_s = middle_s
        return best

    def _try(self, begun: Begun, order: Sequence[int], count: int, time_s: float) -> Pipelines:
        """Groups of ``count`` waves of ``time_s`` that hold what is left, taken in this ``order``;
        none when there are no such."""
        ranks = count * self.filler.table.devices
        for join_any in (True, False)[: 1 + (len(order) < FEW)]:
            groups, left = self.filler.fill(time_s, ranks, order, join_any=join_any)
            self.effort -= len(order) - len(left) + _TRIED
            found = None if left else sorted_into_waves(self.filler, groups, count)
            if found is not None:
                self._keep(begun, *found)
                return groups
        return []

    def _level(self, begun: Begun, groups: Pipelines, count: int) -> None:
        level = self.filler.levelled(groups, count * self.filler.table.devices)
        found = sorted_into_waves(self.filler, level, count)
        if found is not None:
            self._keep(begun, *found)

    def _keep(self, begun: Begun, more_s: float, found: list[Wave]) -> None:
        """What has begun, and after it waves that take ``more_s``, where they are the best."""
        seconds = begun.spent_s + more_s
        if seconds < self.seconds:
            self.seconds, self.best, self.begun = seconds, begun.before + found, begun


def _times(one: WaveCount, limit_s: float, *, few: bool, far: bool) -> Iterator[Span]:
    """Times to try, with the one below each, rising to ``limit_s``: of ``few`` sequences from the
    least in small steps, else from the guess in larger ones, as what is between will be halved."""
    low_s, start_s = one.least_s * _STEP, one.least_s if few and not far else one.guess_s
    for factor in _FAR if far else _FINE if few else _COARSE:
        time_s = min(start_s * factor, limit_s)
        if time_s <= low_s:
            break
        yield low_s, time_s
        low_s = time_s
