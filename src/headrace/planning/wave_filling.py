"""Fills groups that all run for one time: waves, in which groups start together.

In lockstep a wave lasts as long as its slowest launch, so the launches of a wave should all take
the same time. Given a time D and R ranks (the world, once per wave), each group is one launch:
longest first, a sequence joins the group that it fills best, else opens a group of the scheme of
least area that runs it within D, as long as ranks are left. A group holds its ranks for D whatever
it holds, so joining costs nothing. While groups are filled they have the usual rows of their
schemes; a group that is there takes the quickest row that holds it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import inf, isfinite
from operator import neg

import numpy as np

from headrace.planning.batch import PriceTable
from headrace.planning.schedule import launch_s
from headrace.planning.side_by_side import Pipelines

__all__ = ["Wave", "WaveFiller", "sorted_into_waves"]

Wave = Pipelines

_FULL = 2e-3  # of the time or the tokens: a group with less left is not looked at again
_ROUNDING = 1e-9
_SHORT = 1 / 16  # of the time: sequences that are dealt out again to level the groups


class WaveFiller:
    """Fills groups of the table's schemes ``kinds``, each of one stage. ``cheapest[i]`` are those
    that hold sequence i, by rising area. By kind and sequence: ``alone`` are the seconds of a
    launch of its own, ``bare`` the device-seconds without the constant ``opening``, ``part`` the
    ranks whose tokens it takes. By sequence: ``needs`` are the device-seconds that it takes at
    least, ``least`` those with its share of a constant."""

    def __init__(self, table: PriceTable, kinds: Sequence[int]) -> None:
        self.table, self.kinds = table, list(kinds)
        self.seconds = {k: table.seconds(k) for k in self.kinds}
        self.room = {k: self._room(k) for k in self.kinds}
        each, area = table.batch.each, (table.ranks * table.spread)[self.kinds]
        self.least = each(area.min(axis=0))
        rows = map(table.priced_arrays, self.kinds)
        seconds, room = (np.array(own) for own in zip(*rows, strict=True))
        ranks, self.opening = table.ranks[self.kinds], np.array([[table.c[k]] for k in self.kinds])
        caps = np.array([[table.cap[k]] for k in self.kinds], dtype=np.float64)
        part = ranks * room / caps
        part[np.isinf(seconds)] = np.inf
        self.alone, self.bare, self.part = (
            each(seconds + self.opening),
            each(ranks * seconds),
            each(part),
        )
        self.needs: list[float] = self.bare.min(axis=0).tolist()
        fits = np.isfinite(area).sum(axis=0).tolist()
        order = np.array(self.kinds)[area.argsort(axis=0, kind="stable")].T.tolist()
        self.cheapest = table.batch.listed(
            [
                some[:count] if count < len(some) else some
                for some, count in zip(order, fits, strict=True)
            ]
        )

    def _room(self, k: int) -> list[int]:
        """Tokens that each sequence takes of a launch of scheme k: more than a launch has where k
        does not hold the sequence. Of a scheme of several rows the table has the usual row's."""
        room, seconds, beyond = self.table.room(k), self.seconds[k], self.table.cap[k] + 1
        if not self.table.fluid[k] or isfinite(seconds[0]):
            return room
        pairs = zip(room, seconds, strict=True)
        return [tokens if isfinite(own) else beyond for tokens, own in pairs]

    def alone_s(self, k: int, i: int) -> float:
        """Seconds of a launch of one sequence, by the usual row."""
        return self.seconds[k][i] + self.table.c[k]

    def quickest_s(self, i: int) -> float:
        """The least seconds of a launch of one sequence, by the usual rows."""
        return min([self.alone_s(k, i) for k in self.cheapest[i]])

    def wave_s(self, wave: Wave) -> float:
        """Seconds of a wave: its slowest launch."""
        return max([launch_s(self.table, k, members) for k, members in wave])

    def waves_s(self, waves: Sequence[Wave]) -> float:
        """Seconds of waves one after the other."""
        return sum([self.wave_s(wave) for wave in waves])

    def fill(
        self,
        time_s: float,
        ranks: int,
        order: Sequence[int],
        *,
        join_any: bool = True,
        whole: bool = True,
    ) -> tuple[Pipelines, list[int]]:
        """Groups of ``ranks`` ranks in all that hold sequences taken in ``order``, each for at most
        ``time_s``, and the sequences that found no place (``whole``: ends at the first of them;
        else ``order`` rises). ``whole`` also ends where the sequences left need more device-seconds
        than are left.
        With ``join_any`` a sequence looks for room in groups of every scheme before it opens one,
        else scheme by scheme."""
        table, cheapest = self.table, self.cheapest
        rows, widths, caps = range(len(table)), table.width, table.cap
        seconds_of = [self.seconds.get(k, []) for k in rows]
        room_of = [self.room.get(k, []) for k in rows]
        room_s = [time_s - c for c in table.c]
        few_s, few = [_FULL * s for s in room_s], [_FULL * cap for cap in caps]
        rooms: list[list[tuple[float, int]]] = [[] for _ in rows]  # (seconds left, group), rising
        # Groups without the tokens for the sequence before, those with the most first.
        parked: list[list[tuple[int, float, int]]] = [[] for _ in rows]
        groups: Pipelines = []
        spare, left = list[int](), list[int]()  # tokens left of every group; sequences left
        narrowest, n = min(widths[k] for k in self.kinds), 0
        least = self.needs
        spare_s = ranks * time_s - sum([least[i] for i in order]) if whole else inf
        given_up_s = -_ROUNDING * ranks * time_s
        while n < len(order):
            if spare_s < given_up_s:
                return groups, [*order[n:]]
            i, found, at = order[n], -1, -1
            n += 1
            for k in cheapest[i]:
                need, length, room, park = seconds_of[k][i], room_of[k][i], rooms[k], parked[k]
                if need > room_s[k]:
                    continue
                while park and -park[0][0] >= length:
                    _, rest_s, g = heappop(park)
                    insort(room, (rest_s, g))
                if room:
                    at, size = bisect_left(room, (need, -1)), len(room)
                    while at < size and spare[room[at][1]] < length:
                        rest_s, g = room.pop(at)
                        heappush(park, (-spare[g], rest_s, g))
                        size -= 1
                    if at < size:
                        found = k
                        break
                if found < 0 and widths[k] <= ranks:
                    found = k
                    if not join_any:
                        break
                at = -1
            if found < 0:
                first = n - 1
                if whole:
                    n = len(order)
                elif ranks < narrowest:
                    n = max(n, bisect_left(order, self._next(rooms, parked), n))
                left += order[first:n]
                continue
            k, room = found, rooms[found]
            if 0 <= at < len(room):
                rest_s, g = room.pop(at)
            else:
                rest_s, g, at = room_s[k], len(groups), len(room)
                ranks -= widths[k]
                spare_s -= table.c[k] * widths[k]
                groups.append((k, []))
                spare.append(caps[k])
            seconds, tokens, park, space = seconds_of[k], room_of[k], parked[k], spare[g]
            members, below_s = groups[g][1], room[at - 1][0] if at else -1.0
            while True:
                rest_s -= seconds[i]
                space -= tokens[i]
                spare_s -= seconds[i] * widths[k] - least[i]
                members.append(i)
                if space <= few[k] or rest_s <= few_s[k]:
                    spare_s -= rest_s * widths[k]
                    break
                # The next one goes to the same group where it looks for one of this scheme first,
                # and no other is fuller and holds it.
                i, going = order[n] if n < len(order) else -1, False
                if i >= 0 and below_s < seconds[i] <= rest_s and cheapest[i][0] == k:
                    going = tokens[i] <= space and not (park and -park[0][0] >= tokens[i])
                if not going:
                    insort(room, (rest_s, g))
                    break
                n += 1
            spare[g] = space
        return groups, left

    def _next(
        self,
        rooms: Sequence[list[tuple[float, int]]],
        parked: Sequence[list[tuple[int, float, int]]],
    ) -> int:
        """The first position that may still find a place in some group."""
        found = len(self.table.tokens)
        for k in self.kinds:
            if parked[k]:
                found = bisect_left(self.room[k], parked[k][0][0], hi=found, key=neg)
            if rooms[k]:
                found = bisect_left(self.seconds[k], -rooms[k][-1][0], hi=found, key=neg)
        return found

    def levelled(self, groups: Pipelines, ranks: int) -> Pipelines:
        """The same groups, and groups of one of what is left of ``ranks``, with the short sequences
        dealt out again: longest first, each to the group that ends first and has room for it."""
        table, top_s = self.table, self.wave_s(groups)
        kept, loose = Pipelines(), list[int]()
        for k, members in groups:
            seconds = self.seconds[k]
            stay = [i for i in members if seconds[i] > _SHORT * top_s] or [min(members)]
            kept.append((k, stay))
            loose += set(members).difference(stay)
        if table.width[self.kinds[0]] == 1:
            idle = ranks - sum(table.width[k] for k, _ in groups)
            kept += [(self.kinds[0], []) for _ in range(idle)]
        spare = [table.cap[k] - sum([self.room[k][i] for i in members]) for k, members in kept]
        heap = [
            (table.c[k] + sum([self.seconds[k][i] for i in members]), g)
            for g, (k, members) in enumerate(kept)
        ]
        heapify(heap)
        for i in sorted(loose):
            full: list[tuple[float, int]] = []
            while heap and spare[heap[0][1]] < self.room[kept[heap[0][1]][0]][i]:
                full.append(heappop(heap))
            if not heap:
                return groups
            at, g = heap[0]
            k, members = kept[g]
            members.append(i)
            spare[g] -= self.room[k][i]
            heapreplace(heap, (at + self.seconds[k][i], g))
            for entry in full:
                heappush(heap, entry)
        return [group for group in kept if group[1]]


def sorted_into_waves(
    filler: WaveFiller, groups: Pipelines, count: int
) -> tuple[float, list[Wave]] | None:
    """The groups in ``count`` waves, longest first, and the seconds of these; None when they do not
    fit."""
    widths, devices = filler.table.width, filler.table.devices
    narrowest = min(widths[k] for k in filler.kinds)
    timed = [(launch_s(filler.table, *group), group) for group in groups]
    by_time = sorted(timed, key=lambda item: (-item[0], item[1][1][0]))
    by_size = sorted(timed, key=lambda item: (-item[1][0], -item[0], item[1][1][0]))
    for order in (by_time, by_size):
        rooms, first = [devices] * count, 0
        waves: list[Wave] = [[] for _ in range(count)]
        ends = [0.0] * count
        for seconds, group in order:
            while first < count and rooms[first] < narrowest:
                first += 1
            width = widths[group[0]]
            at = next((w for w in range(first, count) if rooms[w] >= width), None)
            if at is None:
                break
            rooms[at] -= width
            ends[at] = max(ends[at], seconds)
            waves[at].append(group)
        else:
            used = sorted((w for w in range(count) if waves[w]), key=lambda w: -ends[w])
            return sum(ends), [waves[w] for w in used]
    return None
