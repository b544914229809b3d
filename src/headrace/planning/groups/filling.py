"""Fills groups that all run for one time: first schedules under the lockstep semantics.

In lockstep a wave lasts as long as its slowest launch, so the launches of a wave should all take
the same time. Given a time D and R ranks (the world, once per wave), each group is one launch:
longest first, a sequence joins the group that it fills best, else opens a group of the size of
least area that runs it within D, as long as ranks are left. A group holds its ranks for D
whatever it holds, so joining costs nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from headrace.planning.groups.work import Work

__all__ = ["Filler", "Group"]

Group = tuple[int, list[int]]
"""(row of the size, positions)"""

_LOOKED_AT = 6  # groups with enough time whose tokens are looked at, from either end
_FULL = 2e-3  # of the time or the tokens: a group with less left is not looked at again
_SHORT = 1 / 16  # of the time: sequences that are dealt out again to level the groups


@dataclass(frozen=True, kw_only=True)
class Filler:
    """Fills groups of the sizes of ``work``. ``cheapest[i]`` are the rows of the sizes that hold
    sequence i, by rising area."""

    work: Work
    cheapest: list[list[int]]

    @classmethod
    def of(cls, work: Work) -> Filler:
        """A filler for a batch."""
        fits = np.isfinite(work.area).sum(axis=0).tolist()
        order = work.area.argsort(axis=0, kind="stable").T.tolist()
        cheapest = [some[:count] for some, count in zip(order, fits, strict=True)]
        return cls(work=work, cheapest=cheapest)

    def fill(
        self, time_s: float, ranks: int, order: Sequence[int], *, join_any: bool = True,
        whole: bool = True,
    ) -> tuple[list[Group], list[int]]:  # fmt: skip
        """Groups of ``ranks`` ranks in all that hold sequences taken in ``order``, each for at most
        ``time_s``, and the sequences that found no place (``whole``: ends at the first of them).
        With ``join_any`` a sequence looks for room in groups of every size before it opens one,
        else size by size."""
        work, seconds, tokens = self.work, self.work.rows, self.work.tokens
        cap, sizes, room_s = work.costs.cap_tokens, work.sizes, time_s - work.c_s
        rooms: list[list[tuple[float, int]]] = [[] for _ in sizes]  # (seconds left, group), rising
        groups: list[Group] = []
        spare: list[int] = []  # tokens left of every group
        left: list[int] = []
        slack_s, open_groups = _FULL * room_s, 0
        slack = [int(_FULL * cap * p) for p in sizes]
        for n, i in enumerate(order):
            length, opening = tokens[i], -1
            for row in self.cheapest[i]:
                need = seconds[row][i]
                if need > room_s:
                    continue
                room = rooms[row]
                at = bisect_left(room, (need, -1))
                most = len(room)
                while at < most and spare[room[at][1]] < length:
                    at += 1
                    if at % _LOOKED_AT == 0:  # of the others only the emptiest
                        at = max(at, most - _LOOKED_AT)
                if at < most:
                    rest_s, g = room.pop(at)
                    spare[g] -= length
                    if spare[g] > slack[row] and rest_s - need > slack_s:
                        insort(room, (rest_s - need, g))
                    else:
                        open_groups -= 1
                    groups[g][1].append(i)
                    opening = -1
                    break
                if opening < 0 and sizes[row] <= ranks:
                    opening = row
                    if not join_any:
                        break
            else:
                if opening < 0:
                    if whole or (not open_groups and ranks < sizes[0]):
                        left += order[n:]
                        break
                    left.append(i)
            if opening >= 0:
                ranks -= sizes[opening]
                spare.append(cap * sizes[opening] - length)
                rest_s = room_s - seconds[opening][i]
                if spare[-1] > slack[opening] and rest_s > slack_s:
                    insort(rooms[opening], (rest_s, len(groups)))
                    open_groups += 1
                groups.append((opening, [i]))
        return groups, left

    def levelled(self, groups: Sequence[Group], ranks: int) -> list[Group]:
        """The same groups, and groups of one of what is left of ``ranks``, with the short sequences
        dealt out again: longest first, each to the group that ends first and has room for it."""
        work, seconds, tokens = self.work, self.work.rows, self.work.tokens
        top_s = max(self.group_s(group) for group in groups)
        kept: list[Group] = []
        loose: list[int] = []
        for row, held in groups:
            stay = [i for i in held if seconds[row][i] > _SHORT * top_s] or [min(held)]
            kept.append((row, stay))
            loose += set(held).difference(stay)
        idle = ranks - sum(work.sizes[row] for row, _ in groups)
        if work.sizes[0] == 1:
            kept += [(0, []) for _ in range(idle)]
        spare = [
            work.costs.cap_tokens * work.sizes[row] - sum([tokens[i] for i in held])
            for row, held in kept
        ]
        heap = [(sum([seconds[row][i] for i in held]), g) for g, (row, held) in enumerate(kept)]
        heapify(heap)
        for i in sorted(loose):
            full: list[tuple[float, int]] = []
            while heap and spare[heap[0][1]] < tokens[i]:
                full.append(heappop(heap))
            if not heap:
                return list(groups)
            at, g = heap[0]
            row, held = kept[g]
            held.append(i)
            spare[g] -= tokens[i]
            heapreplace(heap, (at + seconds[row][i], g))
            for entry in full:
                heappush(heap, entry)
        return [group for group in kept if group[1]]

    def group_s(self, group: Group) -> float:
        """Seconds of one group's launch."""
        row, held = group
        seconds = self.work.rows[row]
        return sum([seconds[i] for i in held]) + self.work.c_s
