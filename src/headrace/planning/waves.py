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
(:mod:`headrace.planning.wave_counts`) are tried, as long as one could beat the best that is known.
Few sequences are tried in other orders too, until the effort is spent: so many sequences placed,
never so much time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.planning.batch import PriceTable
from headrace.planning.openings import Opening, openings
from headrace.planning.schedule import Assignment
from headrace.planning.side_by_side import Pipelines
from headrace.planning.wave_counts import WaveCount, wave_counts
from headrace.planning.wave_filling import Wave, WaveFiller, sorted_into_waves

__all__ = ["waves"]

Span = tuple[float, float]

_CLOSE_ENOUGH = 1 + 2e-3  # of the bound: no search beyond it
_EFFORT = 20_000
_FEW = 300  # sequences: of fewer, the search is fine
_COARSE = (1.0, 1.04, 1.12, 1.3, 1.6, 2.2, 4.0, 10.0, 40.0)  # times the guess
_FINE = tuple(1 + 0.004 * k for k in range(1, 30)) + _COARSE[3:]  # times the least
_COUNTS = 5
_FINISHED = 6
_FINISHED_FEW = 24
_SPREADS = (0.03, 0.1, 0.3)
_TRIED = 30  # sequences that could be placed while a try begins
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
    search = _Search(filler=filler, enough_s=bound_s * _CLOSE_ENOUGH, effort=effort)
    few = len(table.tokens) < _FEW
    begun = openings(filler, effort // 2)
    for n, opening in enumerate(begun[: _FINISHED_FEW if few else _FINISHED]):
        search.finish(opening, counts=2 if n else _COUNTS)
    if not search.best:
        search.one_by_one(begun[0])
    if few:
        search.shuffled(np.random.default_rng(seed))
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
    """The best waves so far, and what may still be spent."""

    filler: WaveFiller
    enough_s: float
    effort: int
    best: list[Wave] = field(default_factory=list)
    seconds: float = float("inf")

    @property
    def over(self) -> bool:
        """Whether to stop: close enough to the bound, or, with a plan, spent."""
        return self.seconds <= self.enough_s or (self.effort <= 0 and bool(self.best))

    def finish(self, opening: Opening, *, counts: int) -> None:
        """Waves of one time for what an opening leaves, where they are better."""
        if not opening.left:
            self._keep(opening.before)
            return
        if self.over:
            return
        for one in wave_counts(self.filler, opening.left)[:counts]:
            limit_s = (self.seconds - opening.spent_s) / one.count * _STEP
            if self.over or one.least_s >= limit_s:
                continue
            for low_s, time_s in _times(one, limit_s, fine=len(opening.left) < _FEW):
                groups = self._try(opening.left, opening.before, one.count, time_s)
                if groups:
                    groups = self._halve(opening, one.count, low_s, time_s) or groups
                    self._level(groups, opening.before, one.count)
                if groups or self.over:
                    break

    def one_by_one(self, opening: Opening) -> None:
        """Wave after wave as long as its longest sequence takes on the size of least area."""
        filler, made, left = self.filler, list(opening.before), opening.left
        while left:
            time_s = filler.alone_s(filler.cheapest[left[0]][0], left[0]) * (1 + 1e-9)
            groups, left = filler.fill(time_s, filler.table.devices, left, whole=False)
            made.append(groups)
        self._keep(made)

    def shuffled(self, random: np.random.Generator) -> None:
        """As many waves in a little less time, with the sequences in other orders."""
        length, tries = self.filler.table.batch.values, 0
        while not self.over:
            noise = np.exp(random.normal(0.0, _SPREADS[tries % len(_SPREADS)], len(length)))
            order = np.argsort(-length * noise, kind="stable").tolist()
            count = len(self.best)
            groups = self._try(order, [], count, self.seconds / count * _STEP)
            if groups:
                self._level(groups, [], count)
            tries += 1

    def _halve(self, opening: Opening, count: int, low_s: float, high_s: float) -> Pipelines:
        """The groups of the least time found between two times."""
        best: Pipelines = []
        while high_s - low_s > 3e-3 * low_s and not self.over:
            middle_s = (low_s + high_s) / 2
            groups = self._try(opening.left, opening.before, count, middle_s)
            if groups:
                best, high_s = groups, middle_s
            else:
                low_s = middle_s
        return best

    def _try(self, some: Sequence[int], before: list[Wave], count: int, time_s: float) -> Pipelines:
        """Groups of ``count`` waves of ``time_s`` that hold ``some``, taken in this order; none
        when there are no such."""
        ranks = count * self.filler.table.devices
        for join_any in (True, False)[: 1 + (len(some) < _FEW)]:
            groups, left = self.filler.fill(time_s, ranks, some, join_any=join_any)
            self.effort -= len(some) - len(left) + _TRIED
            found = None if left else sorted_into_waves(self.filler, groups, count)
            if found is not None:
                self._keep(before + found)
                return groups
        return []

    def _level(self, groups: Pipelines, before: list[Wave], count: int) -> None:
        level = self.filler.levelled(groups, count * self.filler.table.devices)
        found = sorted_into_waves(self.filler, level, count)
        if found is not None:
            self._keep(before + found)

    def _keep(self, found: list[Wave]) -> None:
        seconds = self.filler.waves_s(found)
        if seconds < self.seconds:
            self.seconds, self.best = seconds, found


def _times(one: WaveCount, limit_s: float, *, fine: bool) -> Iterator[Span]:
    """Times to try, with the one below each, rising to ``limit_s``: from the least in small steps,
    or from the guess in large ones, as what is between will be halved."""
    low_s, start_s = one.least_s * _STEP, one.least_s if fine else one.guess_s
    for factor in _FINE if fine else _COARSE:
        time_s = min(start_s * factor, limit_s)
        if time_s <= low_s:
            break
        yield low_s, time_s
        low_s = time_s
