"""The best waves of few sequences, by a dynamic program over their subsets.

Data        sequences with their seconds and tokens on every group size; N ranks.
Variables   a partition of the sequences into waves, of each wave into launches, and the size of
            each launch.
Constraint  the sizes of a wave's launches sum to at most N; a launch holds its tokens.
Objective   minimise the sum over the waves of their slowest launch.

Solve. Let w(S, D) be the least size that runs the sequences S as one launch within D seconds. Then
the ranks that S needs in one wave of D seconds are

    n(S, D) = min over T in S, with S's first sequence, of w(T, D) + n(S - T, D)

for all times D that some launch takes at once. The wave of S lasts the least D with n(S, D) <= N,
and all waves of S take min over T of wave(T) + all(S - T), T again with the first sequence. That is
3^n / 2 sums for n sequences, so n is small; longer plans are improved a few waves at a time
(:func:`rejoined`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import inf

import numpy as np

from headrace.planning.batch import GAIN, PriceTable
from headrace.planning.filling import Pipelines
from headrace.planning.schedule import launch_s

__all__ = ["MOST_SEQUENCES", "exact_waves", "rejoined"]

MOST_SEQUENCES = 8
"""Sequences for which waves are exact: 3,280 sums, about 20 ms. One more takes three times that."""

_TIMES = 40
"""Programs that are solved to improve a plan, at most."""


def exact_waves(
    table: PriceTable, kinds: Sequence[int], members: Sequence[int]
) -> tuple[float, list[Pipelines]] | None:
    """The least seconds of waves for some sequences, and these waves.

    Args:
        table: The prices.
        kinds: The schemes that launches may have, of one stage.
        members: Positions of the sequences, at most :data:`MOST_SEQUENCES`.

    Returns:
        Seconds of all waves and, for each wave, its launches; None where a sequence fits nowhere.
    """
    launches = _Launches(table, kinds, members)
    if not len(launches.times_s):
        return None
    count = 1 << len(members)
    needed = np.full((count, len(launches.times_s)), np.inf)
    needed[0] = 0.0
    for subset in range(1, count):
        row = needed[subset]
        for part in _parts(subset):
            np.minimum(row, launches.least_ranks[part] + needed[subset ^ part], out=row)
    fits = needed <= table.devices
    first = fits.argmax(axis=1)
    wave_s = np.where(fits.any(axis=1), launches.times_s[first], inf).tolist()
    total_s, chosen = [0.0] * count, [0] * count
    for subset in range(1, count):
        total_s[subset], chosen[subset] = min(
            (wave_s[part] + total_s[subset ^ part], part) for part in _parts(subset)
        )
    if total_s[-1] == inf:
        return None
    waves, left = list[Pipelines](), count - 1
    while left:
        wave = chosen[left]
        waves.append(list(launches.split(wave, needed, int(first[wave]))))
        left ^= wave
    return total_s[-1], waves


def rejoined(
    table: PriceTable, kinds: Sequence[int], waves: Sequence[Pipelines], bound_s: float
) -> list[Pipelines]:
    """The waves after pairs and triples of them with few sequences were solved exactly, as long as
    that gains and the plan is above ``bound_s``.

    Args:
        table: The prices.
        kinds: The schemes that launches may have.
        waves: The waves of a plan.
        bound_s: Seconds that no plan beats.

    Returns:
        Waves that take no longer.
    """
    now, left = [(_wave_s(table, wave), list(wave)) for wave in waves], _TIMES
    tried = set[frozenset[int]]()
    gained = True
    while gained:
        gained = False
        for group in _small(now):
            members = sorted(i for n in group for _, own in now[n][1] for i in own)
            if left <= 0 or sum(seconds for seconds, _ in now) <= bound_s * (1 + GAIN):
                break
            if frozenset(members) in tried:
                continue
            tried.add(frozenset(members))
            left -= 1
            before_s = sum(now[n][0] for n in group)
            found = exact_waves(table, kinds, members)
            if found is not None and found[0] < before_s * (1 - GAIN):
                rest = [own for n, own in enumerate(now) if n not in group]
                now = [*rest, *((_wave_s(table, wave), wave) for wave in found[1])]
                gained = True
                break
    return [wave for _, wave in now]


def _small(waves: Sequence[tuple[float, Pipelines]]) -> Iterator[tuple[int, ...]]:
    """Numbers of the waves in triples, then pairs, then single waves, that have few enough
    sequences together to be solved exactly; ``waves`` are (seconds, launches)."""
    counts = [sum(len(own) for _, own in wave) for _, wave in waves]
    few = [n for n, count in enumerate(counts) if count <= MOST_SEQUENCES]
    for size in (3, 2, 1):
        for group in combinations(few, size):
            if sum(counts[n] for n in group) <= MOST_SEQUENCES:
                yield group


def _wave_s(table: PriceTable, wave: Pipelines) -> float:
    """Seconds of a wave: its slowest launch."""
    return max(launch_s(table, k, members) for k, members in wave)


def _parts(subset: int) -> Iterator[int]:
    """The subsets of ``subset`` that have its lowest member; sets are bits of a number."""
    lowest = subset & -subset
    rest = subset ^ lowest
    part = rest
    while True:
        yield part | lowest
        if not part:
            return
        part = (part - 1) & rest


class _Launches:
    """What subsets of a few sequences take as one launch each; subsets are bits of a number.

    Attributes:
        seconds: Seconds of a launch of each subset on each kind of group [kinds, subsets],
            infinite where it does not fit.
        times_s: The seconds of all launches, rising, each once [times].
        least_ranks: The fewest ranks that run each subset within each time [subsets, times],
            infinite where none do.
    """

    def __init__(self, table: PriceTable, kinds: Sequence[int], members: Sequence[int]) -> None:
        self.table, self.kinds, self.members = table, kinds, members
        count = 1 << len(members)
        self.seconds = np.full((len(kinds), count), np.inf)
        for row, k in enumerate(kinds):
            most = table.schemes[k].frontier.most_tokens
            for subset in range(1, count):
                own = self.positions(subset)
                if sum(table.tokens[i] for i in own) <= most:
                    self.seconds[row, subset] = launch_s(table, k, own)
        finite = self.seconds[np.isfinite(self.seconds)]
        self.times_s = np.unique(finite)
        ranks = np.array([float(table.width[k]) for k in kinds])
        held = self.seconds[:, :, None] <= self.times_s
        self.least_ranks = np.where(held, ranks[:, None, None], np.inf).min(axis=0)

    def positions(self, subset: int) -> list[int]:
        """The sequences of a subset, longest first."""
        return [i for bit, i in enumerate(self.members) if subset >> bit & 1]

    def split(self, wave: int, needed: np.ndarray, at: int) -> Iterator[tuple[int, list[int]]]:
        """The launches (scheme, positions) of a ``wave``, a subset, that lasts as long as the time
        number ``at``; ``needed`` are the ranks that each subset needs in each time."""
        while wave:
            part = min(
                _parts(wave),
                key=lambda part: float(self.least_ranks[part, at] + needed[wave ^ part, at]),
            )
            fast = [
                (self.table.width[k], float(self.seconds[row, part]), k)
                for row, k in enumerate(self.kinds)
                if self.seconds[row, part] <= self.times_s[at]
            ]
            yield min(fast)[2], self.positions(part)
            wave ^= part
