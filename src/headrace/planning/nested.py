"""Nested groups: ranks work in large groups first, then in smaller ones, all within one time.

Data        sequences with their seconds on every group size; N ranks; a time tau.
Variables   the group of each sequence.
Constraint  a group starts when all its ranks are free, and every rank is free within tau.

A dual approximation like :mod:`headrace.planning.side_by_side`, size by size from the largest.
Each sequence has a size: that of the fewest device-seconds that ends it within tau. For a size the
ranks are cut into groups in the order in which they are free; where sizes divide one another a
group lies in one of the size before, and no rank waits for another. Longest first, a sequence goes
to the group that it fills best. Where one finds no room, it or the longest of its size is given the
next larger size, and the sizes from there on are filled again.

Terms of :mod:`headrace.planning.batch`: a sequence goes by its *position*, its place in the batch,
longest first; a *run* has the sequences of equal length; the *usual row* of a scheme has the
seconds ``c`` of each micro-batch's constant and the ``cap`` tokens that it holds. On *fluid*
schemes, which have several rows, each token pays a ``share`` of the constant instead.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Container, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from math import inf, isinf

import numpy as np

from headrace.planning.batch import PriceTable
from headrace.planning.generators import FEW, Draft, Effort, Known, Role, least_time
from headrace.planning.schedule import Group
from headrace.planning.tolerances import NEAR, ROUNDING

__all__ = ["Nested", "Nesting"]


Segment = tuple[float, tuple[int, ...]]
"""When some ranks are free, in seconds, and these ranks."""


class Nesting:
    """Fills nested groups of a table's schemes, which have one stage each and different widths.

    Args:
        table: The prices.
        rows: The numbers of the schemes to use. Sizes go by *levels*, the smallest first: level i
            is the i-th of these schemes.

    Attributes:
        alone: Least seconds of a sequence in a micro-batch of its own [levels, runs], infinite
            where the size does not hold it.
        area: Device-seconds of a sequence with its share of the constant [levels, runs].
    """

    def __init__(self, table: PriceTable, rows: Sequence[int]) -> None:
        self.table, self.rows = table, sorted(rows)
        self.alone = table.alone[self.rows]
        self.area = table.ranks[self.rows] * table.spread[self.rows]

    def fill_in_two_ways(self, tau: float, *, measured: bool = True) -> list[Group] | float:
        """:meth:`fill`, and where that fails again with ``longest=True``: then the longest sequence
        of a full size gets the next larger size, not the one without a place."""
        found = self.fill(tau, measured=measured)
        return self.fill(tau, longest=True) if isinstance(found, float) else found

    def fill(
        self, tau: float, *, measured: bool = True, promotions: int = 2, longest: bool = False
    ) -> list[Group] | float:
        """Place all sequences in nested groups in which every rank is free within a time.

        Args:
            tau: The time in seconds, by the usual rows.
            measured: Of no use here: a failure is measured where that costs nothing.
            promotions: How many sequences may be given a larger size.
            longest: Whether these are the longest of their size, else those without a place.

        Returns:
            The groups, larger ones first; else, as a float, about the share of the work that finds
            no place, 0 where it is unknown.
        """
        # Device-seconds on each size that ends the sequence in time [levels, sequences].
        device_s = self.table.batch.each(np.where(self.alone > tau, np.inf, self.area))
        total_s = float(device_s.min(axis=0).sum())
        if not total_s <= self.table.devices * tau:  # the share of the work that is too much
            return max(0.0, min(1.0, total_s / (self.table.devices * tau) - 1)) if tau else 1.0
        # Each sequence starts with the size of the fewest device-seconds.
        level_of = device_s.argmin(axis=0)
        given = [np.flatnonzero(level_of == level).tolist() for level in range(len(self.rows))]
        segments: list[Segment] = [(0.0, tuple(range(self.table.devices)))]
        free_before: dict[int, list[Segment]] = {}  # when ranks are free before a level is filled
        done: dict[int, list[Group]] = {}
        level = len(self.rows) - 1
        while level >= 0:
            free_before[level] = segments
            done.pop(level, None)
            if given[level]:
                filled = self._level(level, given[level], segments, tau)
                if isinstance(filled, int):  # the position of a sequence without room
                    promotions -= 1
                    promoted = given[level][0] if longest else filled
                    larger = self._larger(device_s, level, promoted)
                    if promotions < 0 or larger is None:
                        return 0.0
                    # Give the sequence the larger size, and fill again from that size on.
                    given[level].remove(promoted)
                    given[larger].append(promoted)
                    given[larger].sort()
                    level, segments = larger, free_before[larger]
                    continue
                segments, done[level] = filled
            level -= 1
        return [group for at in sorted(done, reverse=True) for group in done[at]]

    def by_deadline(self, tau: float, *, measured: bool = True) -> list[Group] | float:
        """Another way to :meth:`fill`, for sizes that divide one another and few sequences. Longest
        first, each sequence goes to the size on which it takes the fewest device-seconds and still
        ends by ``tau`` seconds, there to the latest group that still ends in time. Returns groups
        as :meth:`fill` does; 0.0 where a sequence finds no place."""
        table = self.table
        device_s = table.batch.each(np.where(self.alone > tau, np.inf, self.area))
        # For each sequence the levels by rising device-seconds, and how many of them end in time.
        order = device_s.argsort(axis=0, kind="stable").T.tolist()
        within = np.isfinite(device_s).sum(axis=0).tolist()
        widths = [table.width[k] for k in self.rows]
        # By level, an entry for each group of neighbouring ranks. When its last rank is free:
        free_s = [np.zeros(table.devices // p) for p in widths]
        # Where the next sequence of a group starts: with the constant of its first micro-batch.
        ready_s = [
            np.full(table.devices // p, table.c[k]) for p, k in zip(widths, self.rows, strict=True)
        ]
        seconds, tokens = ([of(k) for k in self.rows] for of in (table.seconds, table.room))
        # By (level, group): the tokens left in its micro-batches, rising; its sequences.
        token_rooms: dict[tuple[int, int], list[int]] = {}
        members: dict[tuple[int, int], list[int]] = {}
        # Device-seconds that are not used yet, and those that the sequences from each on need.
        spare_s, left_s = table.devices * tau * (1 + ROUNDING), self._rest_s
        for i, (levels, count) in enumerate(zip(order, within, strict=True)):
            if left_s[i] > spare_s:
                return 0.0
            for level in levels[:count]:
                starts, need_s = ready_s[level], seconds[level][i]
                # The latest group that still ends in time; any one where there is none.
                g = int(np.where(starts <= tau - need_s, starts, -1.0).argmax())
                end = float(starts[g]) + need_s
                if end > tau:
                    continue
                room = token_rooms.setdefault((level, g), [])
                if room and tokens[level][i] > room[-1]:
                    end += table.added_s(self.rows[level], room, tokens[level][i])
                if end <= tau:
                    break
            else:
                return 0.0
            table.put(self.rows[level], room, tokens[level][i])
            members.setdefault((level, g), []).append(i)
            # The group's first rank, and by how much later its ranks are free now.
            first, grown_s = g * widths[level], end - float(free_s[level][g])
            spare_s -= grown_s * widths[level]
            if len(members[level, g]) == 1:  # its first micro-batch is paid now
                ready_s[level][g] -= table.c[self.rows[level]]
            # Smaller groups inside this one start later by as much; larger ones around it start
            # when it ends, at the earliest.
            for below in range(level + 1):
                p = widths[below]
                inside = slice(first // p, (first + widths[level]) // p)
                free_s[below][inside] += grown_s
                ready_s[below][inside] += grown_s
            for above in range(level + 1, len(widths)):
                at = first // widths[above]
                if at < len(free_s[above]) and free_s[above][at] < end:
                    ready_s[above][at] += end - free_s[above][at]
                    free_s[above][at] = end
        return [
            (self.rows[level], tuple(range(g * widths[level], (g + 1) * widths[level])), held)
            for (level, g), held in sorted(members.items(), key=lambda item: (-item[0][0], item[0]))
        ]

    @cached_property
    def _rest_s(self) -> list[float]:
        """Least device-seconds of each sequence and all shorter ones together [sequences]."""
        least = self.table.batch.each(self.table.usual[self.rows].min(axis=0))
        return np.cumsum(least[::-1])[::-1].tolist()

    def dealt(
        self, target_s: float, levels: Sequence[int], known: Container[Hashable], below_s: float
    ) -> tuple[float, tuple[int, ...], list[Group]]:
        """Give every sequence a size, and deal the sequences of a size out to its groups, each to
        the one that is free first, so that groups have sequences of all lengths.

        Args:
            target_s: A sequence gets the size of the fewest device-seconds that runs it within so
                many seconds, else the quickest.
            levels: The sizes to choose from.
            known: Choices of sizes that are not dealt out again.
            below_s: Seconds that the groups must stay below.

        Returns:
            (seconds until all ranks are free, the scheme chosen for each run, the groups with the
            larger ones first); infinite seconds and no groups for a known choice, and where the
            groups cannot stay below ``below_s``.
        """
        alone_s, device_s = self.alone[levels], self.area[levels]
        # The number in ``levels`` of the size of each run.
        in_time_s = np.where(alone_s > target_s, np.inf, device_s)
        too_slow = ~np.isfinite(in_time_s).any(axis=0)
        chosen = np.where(too_slow, alone_s.argmin(axis=0), in_time_s.argmin(axis=0))
        key = tuple(np.array(levels)[chosen].tolist())
        if key in known or not np.isfinite(alone_s.min(axis=0)).all():
            return float("inf"), key, []
        batch, devices = self.table.batch, self.table.devices
        # Device-seconds of all sequences on the sizes chosen: shared evenly, are they too many?
        least = np.take_along_axis(device_s, chosen[None], axis=0) @ batch.counts
        if float(least[0]) >= below_s * devices:
            return float("inf"), key, []
        chosen = batch.each(chosen)
        segments: list[Segment] = [(0.0, tuple(range(devices)))]
        found = list[Group]()
        for number in range(len(levels) - 1, -1, -1):
            members = np.flatnonzero(chosen == number).tolist()
            if members:
                made = self._dealt(self.rows[levels[number]], members, segments, below_s)
                if made is None:
                    return float("inf"), key, []
                segments, groups = made
                found += groups
        return max(free for free, _ in segments), key, found

    def _dealt(
        self, k: int, given: Sequence[int], segments: Sequence[Segment], below_s: float
    ) -> tuple[list[Segment], list[Group]] | None:
        """Deal the positions ``given``, longest first, out to groups of scheme k on ranks that are
        free as ``segments`` say, each to the group that is free first (Graham's rule). Returns
        (segments of all ranks afterwards, the groups with sequences); None as soon as a group would
        end at ``below_s`` seconds or later."""
        table = self.table
        seconds, tokens = table.seconds(k), table.room(k)
        groups, loose_ranks = _cut(segments, table.width[k])
        loads = [(free + table.c[k], g) for g, (free, _) in enumerate(groups)]
        heapify(loads)
        members = [list[int]() for _ in groups]
        rooms = [list[int]() for _ in (() if table.fluid[k] else groups)]
        if table.fluid[k]:  # the rule of ``added_s`` and ``put``, without calls: the innermost loop
            tokens_left, share = [table.cap[k]] * len(groups), table.share[k]
            for i in given:
                load_s, g = loads[0]
                load_s += seconds[i]
                unused = tokens_left[g] - tokens[i]
                if unused < 0:
                    load_s -= unused * share
                    unused = 0
                tokens_left[g] = unused
                if load_s >= below_s:
                    return None
                members[g].append(i)
                heapreplace(loads, (load_s, g))
            given = ()  # nothing is left for the loop below
        for i in given:
            load_s, g = loads[0]
            if rooms[g]:
                load_s += table.added_s(k, rooms[g], tokens[i])
            load_s += seconds[i]
            if load_s >= below_s:
                return None
            table.put(k, rooms[g], tokens[i])
            members[g].append(i)
            heapreplace(loads, (load_s, g))
        used_groups = [(load_s, (k, groups[g][1], members[g])) for load_s, g in loads if members[g]]
        unused_groups = [groups[g] for _, g in loads if not members[g]]
        used_groups.sort(key=lambda item: item[1][1])
        busy_until = [(load_s, group[1]) for load_s, group in used_groups]
        return sorted([*loose_ranks, *unused_groups, *busy_until]), [
            group for _, group in used_groups
        ]

    @staticmethod
    def _larger(area: np.ndarray, level: int, i: int) -> int | None:
        """Of the levels above ``level``, the one on which the sequence at position ``i`` takes the
        fewest device-seconds, given ``area``, the device-seconds [levels, sequences]; None where it
        fits on none."""
        above = area[level + 1 :, i]
        if not len(above) or not np.isfinite(above).any():
            return None
        return level + 1 + int(above.argmin())

    def _level(
        self, level: int, given: Sequence[int], segments: Sequence[Segment], tau: float
    ) -> tuple[list[Segment], list[Group]] | int:
        """Fill the groups of one size, on ranks that are free as ``segments`` say, with the
        positions ``given``, longest first: each goes to the group that it fills best within ``tau``
        seconds. Returns (segments of all ranks afterwards, the groups with sequences); or the
        position of a sequence that finds no room."""
        table, k = self.table, self.rows[level]
        seconds, tokens, c = table.seconds(k), table.room(k), table.c[k]
        groups, loose_ranks = _cut(segments, table.width[k])
        loads = sorted([(free + c, g) for g, (free, _) in enumerate(groups)])
        rooms, members = [list[int]() for _ in groups], [list[int]() for _ in groups]
        above_all = len(groups)
        for i in given:
            need_s = seconds[i]
            # From the fullest group that has the seconds down to one that has the tokens, too.
            at = bisect_right(loads, (tau - need_s, above_all))
            while at > 0:
                at -= 1
                load_s, g = loads[at]
                after_s, room = load_s + need_s, rooms[g]
                if room and tokens[i] > room[-1]:
                    after_s += table.added_s(k, room, tokens[i])
                if after_s <= tau:
                    break
            else:
                return i
            del loads[at]
            insort(loads, (after_s, g))
            if len(room) == 1 and tokens[i] <= room[0]:
                room[0] -= tokens[i]
            else:
                table.put(k, room, tokens[i])
            members[g].append(i)
        used_groups = [(load_s, (k, groups[g][1], members[g])) for load_s, g in loads if members[g]]
        unused_groups = [groups[g] for _, g in loads if not members[g]]
        busy_until = [(load_s, group[1]) for load_s, group in used_groups]
        return sorted([*loose_ranks, *unused_groups, *busy_until]), [
            group for _, group in used_groups
        ]


def _cut(segments: Sequence[Segment], p: int) -> tuple[list[Segment], list[Segment]]:
    """Cut ranks into groups of ``p`` that are free at about the same time. Returns each group with
    the seconds when the last of its ranks is free, and the ranks that are left over, one by one
    with theirs."""
    groups, loose = list[Segment](), list[tuple[float, int]]()
    for free_s, ranks in segments:
        end = len(ranks) - len(ranks) % p
        groups += [(free_s, ranks[at : at + p]) for at in range(0, end, p)]
        loose += [(free_s, rank) for rank in ranks[end:]]
    loose.sort()
    end = len(loose) - len(loose) % p
    for at in range(0, end, p):
        last_s, _ = loose[at + p - 1]
        groups.append((last_s, tuple(sorted(rank for _, rank in loose[at : at + p]))))
    return groups, [(free_s, (rank,)) for free_s, rank in loose[end:]]


_NESTED = Role(name="nested", tables="nested", costs=("model", "groups"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Nested:
    """Drafts groups one in another: with the sizes that divide one another and, for few sequences,
    with all where there are others.

    Attributes:
        role: For which problems it is, and when it is asked.
        worth: Up to this share above the bound, groups of many sequences are not filled.
    """

    role: Role = _NESTED
    worth: float = 0.005

    def drafts(self, table: PriceTable, known: Known) -> Iterator[Draft]:
        """Dealt groups first, then filled ones in the least time. Where frontiers have many rows,
        packing decides what fits into a time, so there only few sequences are filled."""
        rows = [
            k
            for k in range(len(table))
            if table.depth[k] == 1 and table.schemes[k].scheme.tensor == 1
        ]
        chain, few = _chain(table, rows), len(table.tokens) <= FEW
        bound_s, high_s = known.bound_s, known.best_s
        if few and not any(table.fluid):
            high_s = inf  # few sequences are drafted even where that is no quicker
        for sizes in [chain, rows] if few and len(chain) < len(rows) else [chain]:
            nesting = Nesting(table, sizes)
            dealing = _Dealing(nesting, high_s * (1 + NEAR))
            for draft in dealing.drafts(bound_s):
                high_s = min(high_s, draft.seconds)
                yield draft
            near = high_s <= bound_s * (1 + self.worth)
            if not few and (any(table.fluid) or near):
                continue
            if sizes is chain:
                found = least_time(nesting.by_deadline, bound_s, high_s, Effort())
                if found is not None:
                    high_s = found.seconds
                    yield Draft.of(table, found.seconds, found.result, "by deadline")
            effort = Effort(probe=not isinf(high_s))
            fill = nesting.fill_in_two_ways if few else nesting.fill
            found = least_time(fill, bound_s, high_s, effort)
            if found is not None:
                high_s = found.seconds
                yield Draft.of(table, found.seconds, found.result, "nested")


class _Dealing:
    """Drafts of nested groups by dealing, each quicker than all before.

    Args:
        nesting: Deals sequences out.
        high_s: Seconds that drafts must stay below.
    """

    def __init__(self, nesting: Nesting, high_s: float) -> None:
        self.nesting, self.high_s = nesting, high_s
        self.dealt = list[tuple[float, list[Group]]]()  # (seconds, groups) of each draft
        self.tried = set[tuple[int, ...]]()  # choices of a scheme for each run

    def drafts(self, target_s: float) -> list[Draft]:
        """All drafts, the quickest first. Sequences are dealt for a target time, the bound, with
        all sizes; then, as long as that gains, without one more size, the one whose absence gains
        the most."""
        self._deal_without_sizes(target_s)
        self.dealt.sort(key=lambda item: item[0])
        table = self.nesting.table
        return [Draft.of(table, seconds, groups, "nested") for seconds, groups in self.dealt]

    def _deal_without_sizes(self, target_s: float) -> None:
        """Deal with all sizes, then without those that cost more than they bring."""
        levels = list(range(len(self.nesting.rows)))
        best_s, sizes = self._deal(target_s, levels)
        while len(levels) > 1:
            attempts = [
                (*self._deal(target_s, fewer), fewer)
                for left_out in sorted(set(sizes))
                if (fewer := [level for level in levels if level != left_out])
            ]
            seconds, fewer_sizes, fewer = min(attempts, key=lambda item: item[0])
            if seconds >= best_s:
                return
            best_s, sizes, levels = seconds, fewer_sizes, fewer

    def _deal(self, target_s: float, levels: Sequence[int]) -> tuple[float, tuple[int, ...]]:
        """Deal with the sizes ``levels`` for a target time and keep the groups. Returns the seconds
        and the scheme chosen for each run; the seconds are infinite where that is no quicker than
        what was dealt before."""
        below_s = min((seconds for seconds, _ in self.dealt), default=self.high_s)
        seconds, choice, groups = self.nesting.dealt(target_s, levels, self.tried, below_s)
        self.tried.add(choice)
        if groups:
            self.dealt.append((seconds, groups))
        return seconds, choice


def _chain(table: PriceTable, rows: Sequence[int]) -> list[int]:
    """The longest chain of schemes each of whose widths divides the next one's, the last one the
    number of devices where that is possible; as numbers of schemes, rising."""
    longest: dict[int, list[int]] = {}
    for k in rows:
        width = table.width[k]
        shorter = [
            longest[j] for j in longest if table.width[j] < width and width % table.width[j] == 0
        ]
        longest[k] = [*max(shorter, key=len, default=[]), k]

    whole = [sizes for sizes in longest.values() if table.devices % table.width[sizes[-1]] == 0]
    return max(whole or longest.values(), key=len, default=[])
