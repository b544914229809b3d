"""Bucket parallel and packed parallel, the two classes that Data-Centric Parallel starts from.

Both keep one size for all groups: of the sizes in the table, the smallest that fits the longest
sequence. Planned by name, every size is tried as a table of its own, and the best is kept.

bucket   Sequences of like length (within a factor of two) form a bucket. A launch holds sequences
         of one bucket, as many as memory allows, but no more than take T seconds: "decrease the
         batch size for slow batches". Batch sizes are what a user of buckets tunes, so the T is
         taken with which the whole batch ends first; a sequence that takes longer is launched
         alone. A bucket's launches are as even as their number allows. Each goes to the group that
         is free first, the longest launch first.
packed   Sequences are packed to up to C tokens, whatever their lengths. The size of packs is what a
         user of packing tunes, so the C is taken with which the whole batch ends first, from the
         longest sequence to what memory allows. Packs are dealt as launches of buckets are.

A longer T makes fewer launches. G groups run n launches in n / G rounds, rounded up; of the T that
make the same number of rounds the shortest is always tried, as it fills these rounds best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import inf, isqrt

import numpy as np
from numpy.typing import NDArray

from headrace.planners.launched import block, dealt, fitting
from headrace.planning.batch import PriceTable, best_fit
from headrace.planning.priced import Frontier
from headrace.planning.schedule import Group
from headrace.planning.tolerances import CLOSE, ROUNDING
from headrace.spec.plan import Semantics

__all__ = ["bucket", "buckets", "packed"]

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

_TIMES = 64
"""Up to so many times T are all tried; of more, some in even steps."""

_PACK_SIZES = 24
"""Sizes of packs that are tried, in even ratios, and as many that fill rounds."""


def buckets(table: PriceTable) -> list[list[int]]:
    """The positions of a batch in buckets of like lengths, 2^(k-1) + 1 to 2^k tokens each, the
    longest bucket first."""
    tokens = table.tokens
    grouped = groupby(range(len(tokens)), key=lambda i: (tokens[i] - 1).bit_length())
    return [list(bucket) for _, bucket in grouped]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Bucket:
    """The sequences of a bucket, and the batches in which they may be launched.

    Attributes:
        first: Position of the first, the longest.
        count: Number of sequences.
        launches: Numbers of launches that memory allows, falling [batches].
        seconds: Seconds of a launch of the longest sequences for each of these, rising [batches].
    """

    first: int
    count: int
    launches: Counts
    seconds: Floats

    @classmethod
    def of(cls, frontier: Frontier, members: Sequence[int], longest: int) -> _Bucket:
        """The bucket of the positions ``members``, of which the first has ``longest`` tokens, on
        groups with the layer plans of a frontier."""
        count = len(members)
        most = min(count, max(1, frontier.most_tokens // longest))
        # Every number of launches that some batch makes: about two square roots of them.
        few = np.arange(1, isqrt(count) + 2)
        launches = np.unique(np.concatenate([-(-count // few), few]))[::-1]
        sizes = -(-count // launches)  # the smallest batch that makes so few launches
        launches = -(-count // sizes)
        held = sizes <= most
        tokens = sizes[held].astype(np.float64) * longest
        seconds = _launch_s(frontier, tokens * longest, tokens)
        return cls(first=members[0], count=count, launches=launches[held], seconds=seconds)

    def within(self, most_s: Floats) -> Counts:
        """The fewest launches of which none takes longer than each of the times ``most_s``; where
        not even a single sequence is so quick, those of one sequence each [times]."""
        last = np.searchsorted(self.seconds, most_s * (1 + ROUNDING), side="right") - 1
        fewest: Counts = self.launches[np.maximum(0, last)]
        return fewest

    def borders(self, launches: int) -> Counts:
        """The position of the first sequence of each of so many launches, as even as can be."""
        each, more = divmod(self.count, launches)
        number = np.arange(launches)
        borders: Counts = self.first + number * each + np.minimum(number, more)
        return borders


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Launches:
    """Launches that a batch may be cut into.

    Attributes:
        order: The positions of the batch, launch by launch [sequences].
        borders: Where in ``order`` each launch begins, and where the last one ends [launches + 1].
    """

    order: Counts
    borders: Counts

    def members(self) -> list[list[int]]:
        """The positions of each launch."""
        order = self.order.tolist()
        return [order[start:stop] for start, stop in pairwise(self.borders.tolist())]

    def seconds(self, table: PriceTable, k: int) -> Floats:
        """Seconds of each launch on a group of scheme k [launches]."""
        tokens = table.batch.values[self.order]
        sums = np.add.reduceat([tokens**2, tokens], self.borders[:-1], axis=1)
        return _launch_s(table.schemes[k].frontier, *sums)


def bucket(table: PriceTable, semantics: Semantics = "free") -> list[Group]:
    """Launches of the whole batch as bucket parallel makes them, with the batch sizes that are
    quickest under some semantics; none where no group size holds the longest sequence."""
    k = fitting(table)
    return [] if k is None else _quickest(table, k, semantics, _batchings(table, k))


def packed(table: PriceTable, semantics: Semantics = "free") -> list[Group]:
    """Launches of the whole batch as packed parallel makes them, with packs of the size that is
    quickest under some semantics; none where no group size holds the longest sequence."""
    k = fitting(table)
    return [] if k is None else _quickest(table, k, semantics, _packings(table, k))


def _quickest(
    table: PriceTable, k: int, semantics: Semantics, ways: Iterator[tuple[_Launches, float]]
) -> list[Group]:
    """The launches of a batch on groups of scheme k that end first under some semantics, each on
    the group that is free first, the longest before others. Each of the ``ways`` to cut the batch
    has seconds that it takes at least, which rise."""
    groups = table.devices // table.width[k]
    best_s, best, best_launch_s = inf, None, np.zeros(0)
    for way, least_s in ways:
        if least_s * (1 + CLOSE) >= best_s:
            break
        launch_s = way.seconds(table, k)
        _, end_s = dealt(np.sort(launch_s)[::-1].tolist(), groups, semantics)
        if end_s < best_s:
            best_s, best, best_launch_s = end_s, way, launch_s
    assert best is not None, "a scheme that fits holds each sequence alone"
    longest_first = np.argsort(-best_launch_s, kind="stable").tolist()
    group_of, _ = dealt(best_launch_s[longest_first].tolist(), groups, semantics)
    members = best.members()
    return [
        (k, block(table.width[k], group), members[number])
        for number, group in zip(longest_first, group_of, strict=True)
    ]


def _packings(table: PriceTable, k: int) -> Iterator[tuple[_Launches, float]]:
    """Ways to pack the batch into launches on groups of scheme k, the largest packs first, each
    with seconds that it takes at least; these rise."""
    groups, frontier = table.devices // table.width[k], table.schemes[k].frontier
    room, everyone = table.room(k), range(len(table.tokens))
    work_s, c_s, total = float(table.work[k] @ table.batch.counts), frontier.least[2], sum(room)
    most = int(max(table.cap[k], frontier.most_tokens))
    sizes = np.geomspace(min(room[0], most), most, _PACK_SIZES)
    # Packs that are full after so many rounds of all groups, with room for one sequence more.
    even = total / (groups * np.arange(1, _PACK_SIZES)) + room[-1]
    tried = np.concatenate([sizes, even[(even > sizes[0]) & (even < most)]]).astype(int)
    for size in np.unique(tried)[::-1].tolist():
        yield _packing(room, everyone, size), (work_s + c_s * -(-total // size)) / groups


def _packing(room: Sequence[int], members: Sequence[int], size: int) -> _Launches:
    """The packs of ``members``, positions with the longest first, each of up to ``size`` tokens of
    ``room``."""
    packs = best_fit(room, members, size)
    return _Launches(
        order=np.concatenate([np.array(pack) for pack in packs]),
        borders=np.cumsum([0, *map(len, packs)]),
    )


def _batchings(table: PriceTable, k: int) -> Iterator[tuple[_Launches, float]]:
    """Ways to cut the buckets into launches on groups of scheme k, the fewest launches first, each
    with seconds that it takes at least; these rise."""
    groups, frontier = table.devices // table.width[k], table.schemes[k].frontier
    tokens, order = table.tokens, np.arange(len(table.tokens))
    all_buckets = [_Bucket.of(frontier, own, tokens[own[0]]) for own in buckets(table)]
    most_s = np.unique(np.concatenate([own.seconds for own in all_buckets]))
    launches = np.array([own.within(most_s) for own in all_buckets])  # [buckets, times]
    total = launches.sum(axis=0)
    work_s, c_s = float(table.work[k] @ table.batch.counts), frontier.least[2]
    for at in _tried(-(-total // groups)):
        borders = [
            own.borders(count)
            for own, count in zip(all_buckets, launches[:, at].tolist(), strict=True)
        ]
        least_s = (work_s + c_s * float(total[at])) / groups
        cut = np.concatenate([*borders, [len(tokens)]])
        yield _Launches(order=order, borders=cut), least_s


def _tried(rounds: Counts) -> list[int]:
    """Which of rising times are tried, by the rounds that each makes [times], the fewest rounds
    first: the shortest of each number of rounds, and every one or, of many, some in even steps."""
    _, shortest = np.unique(rounds, return_index=True)
    step = -(-len(rounds) // _TIMES)
    return sorted({*shortest.tolist(), *range(0, len(rounds), step)}, reverse=True)


def _launch_s(frontier: Frontier, squares: Floats, tokens: Floats) -> Floats:
    """Seconds of launches whose squared lengths sum to ``squares`` and lengths to ``tokens``, each
    by the quickest layer plan that holds it [launches]."""
    seconds, small = np.empty(len(tokens)), tokens <= frontier.limits[0]
    # Any layer plan holds the small ones: few of many plans are the quickest for some launch.
    for which, (a, b, c, _, caps) in ((small, frontier.quick), (~small, frontier.columns(0))):
        if which.any():
            each_s = a * squares[which] + b * tokens[which] + c  # [layer plans, launches]
            each_s[caps < tokens[which]] = np.inf
            seconds[which] = each_s.min(axis=0)
    return seconds
