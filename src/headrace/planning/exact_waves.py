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

from headrace.planning.batch import PriceTable
from headrace.planning.filling import Pipelines
from headrace.planning.schedule import launch_s
from headrace.planning.tolerances import GAIN

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
    count = 1 << len(members)  # subsets, as bits of a number
    # n(S, D) [subsets, times]: ranks that each subset needs in one wave of each time.
    ranks_needed = np.full((count, len(launches.times_s)), np.inf)
    ranks_needed[0] = 0.0
    for subset in range(1, count):
        subset_ranks = ranks_needed[subset]
        for part in _parts(subset):
            np.minimum(
                subset_ranks,
                launches.least_ranks[part] + ranks_needed[subset ^ part],
                out=subset_ranks,
            )
    # The shortest wave that holds each subset, then the best way to cut it into waves.
    fits = ranks_needed <= table.devices
    least_time = fits.argmax(axis=1)  # number of the first, so the shortest, time that suffices
    wave_s = np.where(fits.any(axis=1), launches.times_s[least_time], inf).tolist()
    total_s, chosen = [0.0] * count, [0] * count
    for subset in range(1, count):
        total_s[subset], chosen[subset] = min(
            (wave_s[part] + total_s[subset ^ part], part) for part in _parts(subset)
        )
    if total_s[-1] == inf:
        return None
    waves, left_over = list[Pipelines](), count - 1
    while left_over:
        wave = chosen[left_over]
        waves.append(list(launches.split(wave, ranks_needed, int(least_time[wave]))))
        left_over ^= wave
    return total_s[-1], waves


def rejoined(
    table: PriceTable, kinds: Sequence[int], waves: Sequence[Pipelines], bound_s: float
) -> list[Pipelines]:
    """Improve the waves of a plan: up to three waves that have few sequences together are replaced
    by the best waves for the same sequences, as long as that gains and the plan is above
    ``bound_s``.

    Args:
        table: The prices.
        kinds: The schemes that launches may have.
        waves: The waves of a plan.
        bound_s: Seconds that no plan beats.

    Returns:
        Waves that take no longer.
    """
    timed_waves = [(_wave_s(table, wave), list(wave)) for wave in waves]  # (seconds, launches)
    programs_left = _TIMES  # dynamic programs that may still be solved
    tried = set[frozenset[int]]()  # sets of sequences that were solved
    gained = True
    while gained:
        gained = False
        for group in _small(timed_waves):
            members = sorted(
                i
                for number in group
                for _, launch_members in timed_waves[number][1]
                for i in launch_members
            )
            if programs_left <= 0 or sum(seconds for seconds, _ in timed_waves) <= bound_s * (
                1 + GAIN
            ):
                break
            if frozenset(members) in tried:
                continue
            tried.add(frozenset(members))
            programs_left -= 1
            before_s = sum(timed_waves[number][0] for number in group)
            exact = exact_waves(table, kinds, members)
            if exact is not None and exact[0] < before_s * (1 - GAIN):
                others = [own for number, own in enumerate(timed_waves) if number not in group]
                timed_waves = [*others, *((_wave_s(table, wave), wave) for wave in exact[1])]
                gained = True
                break
    return [wave for _, wave in timed_waves]


def _small(waves: Sequence[tuple[float, Pipelines]]) -> Iterator[tuple[int, ...]]:
    """Numbers of waves to solve together, as triples, then pairs, then single waves: those that
    have few enough sequences in all to be solved exactly. ``waves`` are (seconds, launches)."""
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
    """All subsets of ``subset`` that contain its lowest member; sets are bits of a number. The
    lowest member is fixed, so that each split into two parts comes once."""
    lowest = subset & -subset
    rest = subset ^ lowest
    part = rest
    while True:
        yield part | lowest
        if not part:
            return
        part = (part - 1) & rest  # the next smaller subset of ``rest``


class _Launches:
    """Seconds and ranks of every subset of a few sequences as one launch, which is one micro-batch
    on a group of some scheme (``kinds``, by number). Subset n has those sequences whose bits are
    set in n.

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
        """Positions of the sequences of a subset, longest first."""
        return [i for bit, i in enumerate(self.members) if subset >> bit & 1]

    def split(
        self, wave: int, ranks_needed: np.ndarray, time: int
    ) -> Iterator[tuple[int, list[int]]]:
        """The launches, as (scheme, positions), that need the fewest ranks for a ``wave``, which is
        a subset, if it lasts ``times_s[time]`` seconds. ``ranks_needed`` has the ranks that each
        subset needs in a wave of each time [subsets, times]."""
        while wave:
            # The launch with the first sequence that attains the minimum n(S, D).
            part = min(
                _parts(wave),
                key=lambda part: float(
                    self.least_ranks[part, time] + ranks_needed[wave ^ part, time]
                ),
            )
            # Of the groups that are quick enough the fewest ranks, then the least seconds.
            kinds_in_time = [
                (self.table.width[k], float(self.seconds[row, part]), k)
                for row, k in enumerate(self.kinds)
                if self.seconds[row, part] <= self.times_s[time]
            ]
            _, _, kind = min(kinds_in_time)
            yield kind, self.positions(part)
            wave ^= part
