"""The planner of the lockstep semantics: waves of launches that all take the same time.

Data        a batch on a world (:mod:`headrace.planning.groups.work`).
Variables   waves; in each a partition of the ranks into groups, the sequences of every group.
Constraint  a group holds at most its ranks' tokens.
Objective   minimise the sum over the waves of their slowest launch.

Solve. For V waves the least time D is sought in which groups of V N ranks can be filled
(:mod:`headrace.planning.groups.filling`), from an estimate upwards and then by halving; short
sequences are dealt out again so that the groups end together, and the groups are sorted into waves
by their seconds. Which V: few waves pay few constants, but leave the longest sequence more of the
world and memory less room; the best by estimate are tried, as long as one could beat the best that
is known. Where some sequences are far longer than the rest, waves that grow shorter come first
(:mod:`headrace.planning.groups.openings`). Of small batches every size of the longest is tried as
the time of a first wave, and then other orders, until the effort is spent: so many sequences
placed, never so much time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.planning.groups.filling import Filler, Group
from headrace.planning.groups.openings import Opening, openings
from headrace.planning.groups.wave import Wave, sorted_into_waves, waves_s
from headrace.planning.groups.wave_counts import WaveCount

__all__ = ["plan_waves", "search_waves"]

Span = tuple[float, float]

_CLOSE_ENOUGH = 1 + 2e-3  # of the bound: no search beyond it
_EFFORT = 20_000  # sequences placed
_FEW = 300  # sequences: of fewer, the search is fine
_COARSE = (1.0, 1.04, 1.12, 1.3, 1.6, 2.2, 4.0, 10.0, 40.0)  # times the guess
_FINE = tuple(1 + 0.004 * k for k in range(1, 30)) + _COARSE[3:]  # times the least
_COUNTS = 5
_FINISHED = 3
_PEELED_TWICE = 2
_SPREADS = (0.03, 0.1, 0.3)
_STEP = 0.998  # of the best: less gain is not worth a try


def plan_waves(filler: Filler, *, bound_s: float, seed: int) -> list[Wave]:
    """Waves for all sequences of the filler's batch, longest wave first."""
    return search_waves(filler, bound_s=bound_s, seed=seed)[0]


def search_waves(filler: Filler, *, bound_s: float, seed: int) -> tuple[list[Wave], list[Wave]]:
    """Waves for all sequences of the filler's batch, and the best that were met with groups of
    other sizes (none, if there were no such)."""
    everyone = list(range(len(filler.work.tokens)))
    search = _Search(filler=filler, enough_s=bound_s * _CLOSE_ENOUGH)
    small = len(everyone) < _FEW
    for n, opening in enumerate(openings(filler, everyone, _EFFORT // 2)[:_FINISHED]):
        search.finish(opening, counts=_COUNTS if small or not n else 2)
    if not search.best:
        search.one_by_one(everyone)
    if small:
        search.peeled(everyone, [])
        search.shuffled(np.random.default_rng(seed))
    return search.best, search.second


@dataclass(slots=True, kw_only=True)
class _Search:
    """The best waves so far, the best of groups of other sizes, and what may still be spent."""

    filler: Filler
    enough_s: float
    best: list[Wave] = field(default_factory=list)
    seconds: float = float("inf")
    second: list[Wave] = field(default_factory=list)
    second_s: float = float("inf")
    effort: int = _EFFORT

    @property
    def over(self) -> bool:
        """Whether to stop: close enough to the bound, or, with a plan, spent."""
        return self.seconds <= self.enough_s or (self.effort <= 0 and bool(self.best))

    def finish(self, opening: Opening, *, counts: int) -> None:
        """Waves of one time for what an opening leaves, where they are better."""
        some, before = opening.left, opening.before
        if not some:
            self._keep(before)
        spent_s = waves_s(self.filler, before)
        for one in opening.counts[:counts]:
            limit_s = (self.seconds - spent_s) / one.count * _STEP
            if self.over or one.least_s >= limit_s:
                continue
            for low_s, time_s in self._times(one, limit_s, fine=len(some) < _FEW):
                groups = self._try(some, before, one.count, time_s)
                if groups:
                    groups = self._halve(some, before, one.count, low_s, time_s) or groups
                    self._level(groups, before, one.count)
                if groups or self.over:
                    break

    def _times(self, one: WaveCount, limit_s: float, *, fine: bool) -> Iterator[Span]:
        """Times to try, with the one below each, rising to ``limit_s``: from the least in small
        steps, or from the guess in large ones, as what is between will be halved."""
        low_s, start_s = one.least_s * _STEP, one.least_s if fine else one.guess_s
        for factor in _FINE if fine else _COARSE:
            time_s = min(start_s * factor, limit_s)
            if time_s <= low_s:
                break
            yield low_s, time_s
            low_s = time_s

    def _halve(
        self, some: list[int], before: list[Wave], count: int, low_s: float, high_s: float
    ) -> list[Group]:
        """The groups of the least time found between two times."""
        best: list[Group] = []
        while high_s - low_s > 3e-3 * low_s and not self.over:
            middle_s = (low_s + high_s) / 2
            groups = self._try(some, before, count, middle_s)
            if groups:
                best, high_s = groups, middle_s
            else:
                low_s = middle_s
        return best

    def _try(
        self, some: Sequence[int], before: list[Wave], count: int, time_s: float
    ) -> list[Group]:
        """Groups of ``count`` waves of ``time_s`` that hold ``some``, taken in this order; none
        when there are no such."""
        ranks = count * self.filler.work.devices
        for join_any in (True, False)[: 1 + (len(some) < _FEW)]:
            self.effort -= len(some)
            groups, left = self.filler.fill(time_s, ranks, some, join_any=join_any)
            waves = None if left else sorted_into_waves(self.filler, groups, count)
            if waves is not None:
                self._keep(before + waves)
                return groups
        return []

    def _level(self, groups: list[Group], before: list[Wave], count: int) -> None:
        level = self.filler.levelled(groups, count * self.filler.work.devices)
        waves = sorted_into_waves(self.filler, level, count)
        if waves is not None:
            self._keep(before + waves)

    def _keep(self, waves: list[Wave]) -> None:
        seconds = waves_s(self.filler, waves)
        if seconds < self.seconds:
            if _sizes(waves) != _sizes(self.best):
                self.second_s, self.second = self.seconds, self.best
            self.seconds, self.best = seconds, waves
        elif seconds < self.second_s and _sizes(waves) != _sizes(self.best):
            self.second_s, self.second = seconds, waves

    def peeled(self, some: list[int], before: list[Wave]) -> None:
        """A first wave that takes as long as the longest of ``some`` does on some size, filled with
        as much as fits, before waves for the rest."""
        filler = self.filler
        work, spent_s = filler.work, waves_s(filler, before)
        for row in filler.cheapest[some[0]]:
            time_s = (filler.work.rows[row][some[0]] + work.c_s) * (1 + 1e-9)
            if self.over or spent_s + time_s >= self.seconds:
                continue
            self.effort -= len(some)
            groups, left = filler.fill(time_s, work.devices, some, whole=False)
            waves = sorted_into_waves(filler, groups, 1)
            if waves is None:
                continue
            if not left:
                self._keep(before + waves)
                continue
            self.finish(Opening.of(filler, before + waves, left), counts=1)
            if len(some) < _FEW and len(before) < _PEELED_TWICE:
                self.peeled(left, before + waves)

    def one_by_one(self, some: list[int]) -> None:
        """Wave after wave as long as its longest sequence takes on the size of least area."""
        filler, waves = self.filler, list[Wave]()
        while some:
            row = filler.cheapest[some[0]][0]
            time_s = (filler.work.rows[row][some[0]] + filler.work.c_s) * (1 + 1e-9)
            groups, some = filler.fill(time_s, filler.work.devices, some, whole=False)
            wave = sorted_into_waves(filler, groups, 1)
            assert wave is not None, "groups of one wave are on ranks of their own"
            waves += wave
        self._keep(sorted(waves, key=lambda wave: -waves_s(filler, [wave])))

    def shuffled(self, random: np.random.Generator) -> None:
        """As many waves in a little less time, with the sequences in other orders."""
        length = np.array(self.filler.work.tokens, dtype=np.float64)
        tries = 0
        while not self.over:
            noise = np.exp(random.normal(0.0, _SPREADS[tries % len(_SPREADS)], len(length)))
            order = np.argsort(-length * noise, kind="stable").tolist()
            count = len(self.best)
            groups = self._try(order, [], count, self.seconds / count * _STEP)
            if groups:
                self._level(groups, [], count)
            tries += 1


def _sizes(waves: Sequence[Wave]) -> list[int]:
    """Rows of the sizes of all groups, sorted."""
    return sorted(row for wave in waves for row, _ in wave)
