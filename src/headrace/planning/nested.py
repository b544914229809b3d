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
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Container, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from math import inf, isinf

import numpy as np

from headrace.planning.batch import NEAR, ROUNDING, PriceTable
from headrace.planning.generators import FEW, Draft, Effort, Known, Role, least_time
from headrace.planning.schedule import Group

__all__ = ["Nested", "Nesting"]


Segment = tuple[float, tuple[int, ...]]
"""When some ranks are free, in seconds, and these ranks."""


class Nesting:
    """Fills nested groups of a table's schemes, which have one stage each and different widths.

    Args:
        table: The prices.
        rows: The numbers of the schemes to use. Sizes go by *levels*, the smallest first: level i
            is the i-th of these schemes.
    """

    def __init__(self, table: PriceTable, rows: Sequence[int]) -> None:
        self.table, self.rows = table, sorted(rows)
        self.alone = table.alone[self.rows]
        self.area = table.ranks[self.rows] * table.spread[self.rows]

    def fill_in_two_ways(self, tau: float, *, measured: bool = True) -> list[Group] | float:
        """:meth:`fill`, and where that fails, again with the longest of a size promoted."""
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
        area = self.table.batch.each(np.where(self.alone > tau, np.inf, self.area))
        total = float(area.min(axis=0).sum())
        if not total <= self.table.devices * tau:
            return max(0.0, min(1.0, total / (self.table.devices * tau) - 1)) if tau else 1.0
        chosen = area.argmin(axis=0)
        levels = [np.flatnonzero(chosen == level).tolist() for level in range(len(self.rows))]
        segments: list[Segment] = [(0.0, tuple(range(self.table.devices)))]
        before: dict[int, list[Segment]] = {}
        done: dict[int, list[Group]] = {}
        level = len(self.rows) - 1
        while level >= 0:
            before[level] = segments
            done.pop(level, None)
            if levels[level]:
                filled = self._level(level, levels[level], segments, tau)
                if isinstance(filled, int):
                    promotions -= 1
                    filled = levels[level][0] if longest else filled
                    larger = self._larger(area, level, filled)
                    if promotions < 0 or larger is None:
                        return 0.0
                    levels[level].remove(filled)
                    levels[larger].append(filled)
                    levels[larger].sort()
                    level, segments = larger, before[larger]
                    continue
                segments, done[level] = filled
            level -= 1
        return [group for at in sorted(done, reverse=True) for group in done[at]]

    def by_deadline(self, tau: float, *, measured: bool = True) -> list[Group] | float:
        """:meth:`fill` in another way, for sizes that divide one another and few sequences. Longest
        first, each goes to the size on which it takes the fewest device-seconds and still ends by
        ``tau`` seconds, into the group that it fills best."""
        table = self.table
        area = table.batch.each(np.where(self.alone > tau, np.inf, self.area))
        order = area.argsort(axis=0, kind="stable").T.tolist()
        within = np.isfinite(area).sum(axis=0).tolist()
        widths = [table.width[k] for k in self.rows]
        free = [np.zeros(table.devices // p) for p in widths]  # of a group's last rank
        ready = [  # and its first micro-batch paid for
            np.full(table.devices // p, table.c[k]) for p, k in zip(widths, self.rows, strict=True)
        ]
        seconds, tokens = ([of(k) for k in self.rows] for of in (table.seconds, table.room))
        rooms: dict[tuple[int, int], list[int]] = {}
        members: dict[tuple[int, int], list[int]] = {}
        spare_s, rest_s = table.devices * tau * (1 + ROUNDING), self._rest_s
        for i, (levels, count) in enumerate(zip(order, within, strict=True)):
            if rest_s[i] > spare_s:
                return 0.0
            for level in levels[:count]:
                starts, need_s = ready[level], seconds[level][i]
                g = int(np.where(starts <= tau - need_s, starts, -1.0).argmax())
                end = float(starts[g]) + need_s
                if end > tau:
                    continue
                room = rooms.setdefault((level, g), [])
                if room and tokens[level][i] > room[-1]:
                    end += table.added_s(self.rows[level], room, tokens[level][i])
                if end <= tau:
                    break
            else:
                return 0.0
            table.put(self.rows[level], room, tokens[level][i])
            members.setdefault((level, g), []).append(i)
            first, later = g * widths[level], end - float(free[level][g])
            spare_s -= later * widths[level]
            if len(members[level, g]) == 1:
                ready[level][g] -= table.c[self.rows[level]]
            for below in range(level + 1):
                p = widths[below]
                own = slice(first // p, (first + widths[level]) // p)
                free[below][own] += later
                ready[below][own] += later
            for above in range(level + 1, len(widths)):
                at = first // widths[above]
                if at < len(free[above]) and free[above][at] < end:
                    ready[above][at] += end - free[above][at]
                    free[above][at] = end
        return [
            (self.rows[level], tuple(range(g * widths[level], (g + 1) * widths[level])), own)
            for (level, g), own in sorted(members.items(), key=lambda item: (-item[0][0], item[0]))
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
            Seconds, the scheme chosen for each run, and the groups, larger ones first; infinite
            seconds and no groups for a known choice, and where they cannot stay below ``below_s``.
        """
        alone, area = self.alone[levels], self.area[levels]
        within = np.where(alone > target_s, np.inf, area)
        late = ~np.isfinite(within).any(axis=0)
        chosen = np.where(late, alone.argmin(axis=0), within.argmin(axis=0))
        key = tuple(np.array(levels)[chosen].tolist())
        if key in known or not np.isfinite(alone.min(axis=0)).all():
            return float("inf"), key, []
        batch, devices = self.table.batch, self.table.devices
        least = np.take_along_axis(area, chosen[None], axis=0) @ batch.counts
        if float(least[0]) >= below_s * devices:
            return float("inf"), key, []
        chosen = batch.each(chosen)
        segments: list[Segment] = [(0.0, tuple(range(devices)))]
        found = list[Group]()
        for at in range(len(levels) - 1, -1, -1):
            members = np.flatnonzero(chosen == at).tolist()
            if members:
                made = self._dealt(self.rows[levels[at]], members, segments, below_s)
                if made is None:
                    return float("inf"), key, []
                segments, groups = made
                found += groups
        return max(free for free, _ in segments), key, found

    def _dealt(
        self, k: int, given: Sequence[int], segments: Sequence[Segment], below_s: float
    ) -> tuple[list[Segment], list[Group]] | None:
        """Deal the positions ``given``, longest first, out to groups of scheme k on ranks that are
        free as ``segments`` say, each to the group that is free first (Graham's rule). Returns when
        ranks are free then, and the groups; None when a group takes ``below_s`` or more."""
        table = self.table
        seconds, tokens = table.seconds(k), table.room(k)
        groups, left = _cut(segments, table.width[k])
        loads = [(free + table.c[k], g) for g, (free, _) in enumerate(groups)]
        heapify(loads)
        members = [list[int]() for _ in groups]
        if table.fluid[k]:  # the rule of ``added_s`` and ``put``, without calls: the innermost loop
            room_of, share = [table.cap[k]] * len(groups), table.share[k]
            for i in given:
                load, g = loads[0]
                load += seconds[i]
                unused = room_of[g] - tokens[i]
                if unused < 0:
                    load -= unused * share
                    unused = 0
                room_of[g] = unused
                if load >= below_s:
                    return None
                members[g].append(i)
                heapreplace(loads, (load, g))
            given = ()
        rooms = [list[int]() for _ in groups]
        for i in given:
            load, g = loads[0]
            if rooms[g]:
                load += table.added_s(k, rooms[g], tokens[i])
            load += seconds[i]
            if load >= below_s:
                return None
            table.put(k, rooms[g], tokens[i])
            members[g].append(i)
            heapreplace(loads, (load, g))
        used = [(load, (k, groups[g][1], members[g])) for load, g in loads if members[g]]
        rest = [groups[g] for _, g in loads if not members[g]]
        used.sort(key=lambda item: item[1][1])
        after_it = [(load, group[1]) for load, group in used]
        return sorted([*left, *rest, *after_it]), [group for _, group in used]

    @staticmethod
    def _larger(area: np.ndarray, level: int, i: int) -> int | None:
        """The level of the larger size on which sequence i takes the fewest device-seconds; None
        where there is none."""
        above = area[level + 1 :, i]
        if not len(above) or not np.isfinite(above).any():
            return None
        return level + 1 + int(above.argmin())

    def _level(
        self, level: int, given: Sequence[int], segments: Sequence[Segment], tau: float
    ) -> tuple[list[Segment], list[Group]] | int:
        """Put the positions ``given``, longest first, into groups of one size on ranks that are
        free as ``segments`` say, each into the group that it fills best within ``tau`` seconds.
        Returns when ranks are free then, and the groups; or the position of a sequence without
        room."""
        table, k = self.table, self.rows[level]
        seconds, tokens, c = table.seconds(k), table.room(k), table.c[k]
        groups, left = _cut(segments, table.width[k])
        loads = sorted([(free + c, g) for g, (free, _) in enumerate(groups)])
        spaces, members = [list[int]() for _ in groups], [list[int]() for _ in groups]
        last = len(groups)
        for i in given:
            need = seconds[i]
            at = bisect_right(loads, (tau - need, last))
            while at > 0:
                at -= 1
                load, g = loads[at]
                after, space = load + need, spaces[g]
                if space and tokens[i] > space[-1]:
                    after += table.added_s(k, space, tokens[i])
                if after <= tau:
                    break
            else:
                return i
            del loads[at]
            insort(loads, (after, g))
            if len(space) == 1 and tokens[i] <= space[0]:
                space[0] -= tokens[i]
            else:
                table.put(k, space, tokens[i])
            members[g].append(i)
        used = [(load, (k, groups[g][1], members[g])) for load, g in loads if members[g]]
        rest = [groups[g] for _, g in loads if not members[g]]
        after_it = [(load, group[1]) for load, group in used]
        return sorted([*left, *rest, *after_it]), [group for _, group in used]


def _cut(segments: Sequence[Segment], p: int) -> tuple[list[Segment], list[Segment]]:
    """Groups of ``p`` ranks that are free at about the same time, with the seconds when the last of
    these is free; and the ranks left over, one by one."""
    groups, single = list[Segment](), list[tuple[float, int]]()
    for free, ranks in segments:
        end = len(ranks) - len(ranks) % p
        groups += [(free, ranks[at : at + p]) for at in range(0, end, p)]
        single += [(free, rank) for rank in ranks[end:]]
    single.sort()
    end = len(single) - len(single) % p
    for at in range(0, end, p):
        last_s, _ = single[at + p - 1]
        groups.append((last_s, tuple(sorted(rank for _, rank in single[at : at + p]))))
    return groups, [(free, (rank,)) for free, rank in single[end:]]


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
        """Dealt groups, then filled ones in the least time. Where
        frontiers have many rows packing decides what fits into a time, so there nothing is filled
        but for few."""
        rows = [
            k
            for k in range(len(table))
            if table.depth[k] == 1 and table.schemes[k].scheme.tensor == 1
        ]
        chain, few = _chain(table, rows), len(table.tokens) <= FEW
        bound_s, high_s = known.bound_s, known.best_s
        if few and not any(table.fluid):
            high_s = inf
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


_TARGETS, _DEALT = (1.0, 1.02, 1.05), 4
"""Times for which sequences are dealt out, over the bound, and drafts that are kept: with one time
and two drafts steps of an 8B on 8 to 256 devices are 0.01 % longer in the mean, 0.4 % at most."""


class _Dealing:
    """Drafts of nested groups by dealing, each quicker than all before.

    Args:
        nesting: Deals sequences out.
        high_s: Seconds that drafts must stay below.
    """

    def __init__(self, nesting: Nesting, high_s: float) -> None:
        self.nesting, self.high_s = nesting, high_s
        self.dealt, self.tried = list[tuple[float, list[Group]]](), set[tuple[int, ...]]()

    def drafts(self, bound_s: float) -> list[Draft]:
        """The best drafts: for the bound, ``bound_s`` seconds, and a little more as the time, each
        with all sizes, then without those that cost more than they bring."""
        for target in _TARGETS:
            self._without_sizes(bound_s * target)
        self.dealt.sort(key=lambda item: item[0])
        table, kept = self.nesting.table, self.dealt[:_DEALT]
        return [Draft.of(table, seconds, groups, "nested") for seconds, groups in kept]

    def _without_sizes(self, target_s: float) -> None:
        """Deal for a target time with all sizes, then without the size that gains the most by being
        left out, as long as one gains."""
        levels = list(range(len(self.nesting.rows)))
        best_s, sizes = self._deal(target_s, levels)
        while len(levels) > 1:
            tried = [
                (*self._deal(target_s, fewer), fewer)
                for left_out in sorted(set(sizes))
                if (fewer := [level for level in levels if level != left_out])
            ]
            seconds, fewer_sizes, fewer = min(tried, key=lambda item: item[0])
            if seconds >= best_s:
                return
            best_s, sizes, levels = seconds, fewer_sizes, fewer

    def _deal(self, target_s: float, levels: Sequence[int]) -> tuple[float, tuple[int, ...]]:
        """(seconds, schemes chosen for runs) of dealing with some sizes for a target time; the
        seconds are infinite where that is no quicker than what was dealt."""
        below_s = min((seconds for seconds, _ in self.dealt), default=self.high_s)
        seconds, sizes, groups = self.nesting.dealt(target_s, levels, self.tried, below_s)
        self.tried.add(sizes)
        if groups:
            self.dealt.append((seconds, groups))
        return seconds, sizes


def _chain(table: PriceTable, rows: Sequence[int]) -> list[int]:
    """The longest chain of sizes that divide the next and, the largest, the devices."""
    best: dict[int, list[int]] = {}
    for k in rows:
        width = table.width[k]
        below = [best[j] for j in best if table.width[j] < width and width % table.width[j] == 0]
        best[k] = [*max(below, key=len, default=[]), k]

    filling = [own for own in best.values() if table.devices % table.width[own[-1]] == 0]
    return max(filling or best.values(), key=len, default=[])
