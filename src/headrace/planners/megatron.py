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

_EVEN = 0.05  # loads that differ by at most this fraction of the largest count as even


def as_they_come(table: PriceTable, room: list[int], cap: int) -> list[list[int]]:
    """Packs of up to ``cap`` tokens, filled one after the other with sequences in the caller's
    order; ``room`` are the tokens that each position takes."""
    packs, left = list[list[int]](), 0
    for i in sorted(range(len(room)), key=table.batch.order.__getitem__):
        if not packs or room[i] > left:
            packs.append([])
            left = cap
        packs[-1].append(i)
        left -= room[i]
    return packs


def dp_balanced(table: PriceTable) -> list[Group]:
    """Launches of the whole batch as Megatron's dp_balanced makes them; none where no group size
    holds the longest sequence."""
    k = fitting(table)
    if k is None:
        return []
    packs = as_they_come(table, table.room(k), table.cap[k])
    # Split packs, from the back, until their number is a multiple of the number of groups.
    packs_missing, last = -len(packs) % (table.devices // table.width[k]), len(packs) - 1
    while packs_missing and last >= 0:
        if len(packs[last]) > 1:
            packs.append([packs[last].pop()])
            packs_missing -= 1
        else:
            last -= 1
    return in_turn(table, k, [sorted(pack) for pack in packs])


@dataclass(slots=True)
class _RoundGroup:
    """A group of ranks in one round of the hybrid scheduler; it may grow to larger sizes.

    Attributes:
        k: Its scheme, as a number in the table.
        held: Positions of its sequences.
        load: The sum of their squared tokens, over its ranks.
    """

    k: int
    held: list[int] = field(default_factory=list)
    load: float = 0.0


def hybrid(table: PriceTable) -> list[Group]:
    """Launches of the whole batch as Megatron's hybrid context parallel makes them, one sequence
    each; none where no group size holds the longest sequence."""
    if fitting(table) is None:
        return []
    # For each position the first scheme that holds it, as schemes are sorted by devices.
    scheme_of = table.batch.each(np.isfinite(table.alone).argmax(axis=0)).tolist()
    launches, left = list[Group](), list(range(len(table.tokens)))
    while left:
        groups, left = _round(table, scheme_of, left)
        for start, group in _placed(table, _grown(table, groups)):
            ranks = tuple(range(start, start + table.width[group.k]))
            launches += [(group.k, ranks, [i]) for i in group.held]
    return launches


def _round(
    table: PriceTable, scheme_of: list[int], waiting: list[int]
) -> tuple[list[_RoundGroup], list[int]]:
    """The groups of one round, and the positions left for later rounds. ``scheme_of`` has the
    scheme of every sequence, ``waiting`` the positions to place, longest first."""
    groups, not_placed = list[_RoundGroup](), list[int]()
    idle, first_scheme = table.devices, scheme_of[waiting[0]]
    # By scheme, a heap of (load, index in ``groups``) of its groups.
    groups_of: dict[int, list[tuple[float, int]]] = {k: [] for k in scheme_of}
    for number, i in enumerate(waiting):
        width, by_load = table.width[scheme_of[i]], groups_of[scheme_of[i]]
        if idle >= width:  # a new group has no load, so it takes the sequence
            heappush(by_load, (0.0, len(groups)))
            groups.append(_RoundGroup(scheme_of[i]))
            idle -= width
        if not by_load:
            not_placed.append(i)
            continue
        group = groups[by_load[0][1]]
        group.held.append(i)
        group.load += table.tokens[i] ** 2 / width
        heapreplace(by_load, (group.load, by_load[0][1]))
        if scheme_of[i] < first_scheme and not idle:  # a smaller size has begun
            loads = [group.load for group in groups]
            if max(loads) - min(loads) <= _EVEN * max(loads):
                return groups, not_placed + waiting[number + 1 :]
    return groups, not_placed


def _grown(table: PriceTable, groups: list[_RoundGroup]) -> list[_RoundGroup]:
    """The groups of a round after the smallest ones have grown to the next size, one after the
    other, as long as idle ranks suffice."""
    idle = table.devices - sum(table.width[group.k] for group in groups)
    while True:
        group = min(groups, key=lambda group: group.k)
        if group.k + 1 == len(table):  # there is no next size
            return groups
        extra_ranks = table.width[group.k + 1] - table.width[group.k]
        if extra_ranks > idle:
            return groups
        group.k += 1
        idle -= extra_ranks


def _placed(table: PriceTable, groups: list[_RoundGroup]) -> Iterator[tuple[int, _RoundGroup]]:
    """(first rank, group) of each group, larger groups first."""
    start = 0
    for group in sorted(groups, key=lambda group: -group.k):
        yield start, group
        start += table.width[group.k]
