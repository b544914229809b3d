"""Two schedulers of Megatron-Core: ``dp_balanced`` and hybrid context parallel.

dp_balanced   Groups have one static size. Sequences are packed greedily in the order of the batch;
              packs are split from the back until their number is a multiple of the groups, and
              dealt out in turn, so that all groups have as many launches.
hybrid        A sequence runs alone on the fewest ranks, of the sizes, that hold it: no packing. In
              rounds, longest first, it goes to the group of its size with the least load, or to a
              new group if ranks are left. A round ends when nothing more can be placed, or when
              a smaller size has begun and loads (l^2 / p: another formula that knows no machine)
              differ by at most 5 %. Ranks that a round leaves idle go to its smallest groups,
              which grow to the next size while that fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappush, heapreplace

import numpy as np

from headrace.planners.launched import fitting, in_turn
from headrace.planning.batch import PriceTable
from headrace.planning.schedule import Group

__all__ = ["as_they_come", "dp_balanced", "hybrid"]

_EVEN = 0.05


def as_they_come(table: PriceTable, room: list[int], cap: int) -> list[list[int]]:
    """Packs of up to ``cap`` tokens, filled in the caller's order with ``room`` tokens each."""
    packs, left = list[list[int]](), 0
    for i in sorted(range(len(room)), key=table.batch.order.__getitem__):
        if not packs or room[i] > left:
            packs.append([])
            left = cap
        packs[-1].append(i)
        left -= room[i]
    return packs


def dp_balanced(table: PriceTable) -> list[Group]:
    """Launches of the whole batch by dp_balanced; none where no size holds the longest."""
    k = fitting(table)
    if k is None:
        return []
    packs = as_they_come(table, table.room(k), table.cap[k])
    missing, at = -len(packs) % (table.devices // table.width[k]), len(packs) - 1
    while missing and at >= 0:
        if len(packs[at]) > 1:
            packs.append([packs[at].pop()])
            missing -= 1
        else:
            at -= 1
    return in_turn(table, k, [sorted(pack) for pack in packs])


@dataclass(slots=True)
class _Lent:
    """A group of a round, which may grow to larger sizes.

    Attributes:
        k: Its scheme.
        held: Positions of its sequences.
        load: Squared tokens of these over its ranks.
    """

    k: int
    held: list[int] = field(default_factory=list)
    load: float = 0.0


def hybrid(table: PriceTable) -> list[Group]:
    """Launches of the whole batch by hybrid context parallel, one sequence each; none where no
    size holds the longest."""
    if fitting(table) is None:
        return []
    kinds = table.batch.each(np.isfinite(table.alone).argmax(axis=0)).tolist()
    launches, left = list[Group](), list(range(len(table.tokens)))
    while left:
        groups, left = _round(table, kinds, left)
        for start, group in _placed(table, _grown(table, groups)):
            ranks = tuple(range(start, start + table.width[group.k]))
            launches += [(group.k, ranks, [i]) for i in group.held]
    return launches


def _round(
    table: PriceTable, kinds: list[int], waiting: list[int]
) -> tuple[list[_Lent], list[int]]:
    """The groups of one round, and the positions left for later rounds, given the scheme of every
    sequence and the positions that are ``waiting``, longest first."""
    groups, left, idle, first = list[_Lent](), list[int](), table.devices, kinds[waiting[0]]
    heaps: dict[int, list[tuple[float, int]]] = {k: [] for k in kinds}  # (load, group)
    for n, i in enumerate(waiting):
        width, heap = table.width[kinds[i]], heaps[kinds[i]]
        if idle >= width:
            heappush(heap, (0.0, len(groups)))
            groups.append(_Lent(kinds[i]))
            idle -= width
        if not heap:
            left.append(i)
            continue
        group = groups[heap[0][1]]
        group.held.append(i)
        group.load += table.tokens[i] ** 2 / width
        heapreplace(heap, (group.load, heap[0][1]))
        if kinds[i] < first and not idle:
            loads = [group.load for group in groups]
            if max(loads) - min(loads) <= _EVEN * max(loads):
                return groups, left + waiting[n + 1 :]
    return groups, left


def _grown(table: PriceTable, groups: list[_Lent]) -> list[_Lent]:
    """The groups after the smallest of them have grown as far as idle ranks allow."""
    idle = table.devices - sum(table.width[group.k] for group in groups)
    while True:
        group = min(groups, key=lambda group: group.k)
        if group.k + 1 == len(table):
            return groups
        more = table.width[group.k + 1] - table.width[group.k]
        if more > idle:
            return groups
        group.k += 1
        idle -= more


def _placed(table: PriceTable, groups: list[_Lent]) -> Iterator[tuple[int, _Lent]]:
    """(first rank, group) of each group, larger groups first."""
    start = 0
    for group in sorted(groups, key=lambda group: -group.k):
        yield start, group
        start += table.width[group.k]
