"""Packs the best drafts exactly and improves the best schedules by local search.

A step of the local search takes the rank that is free last and the pipelines in which it works.
One of their sequences goes to another pipeline, or changes places with a shorter one there, such
that both end earlier by the tables. The most promising changes are packed exactly, and the first
that really makes every rank it touches end earlier is taken. Effort is counted in steps, never in
time.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from headrace.planning.batch import GAIN, NEAR, Packed, PriceTable, Times
from headrace.planning.generators import ENOUGH, FEW, Draft
from headrace.planning.packing import pack
from headrace.planning.schedule import Assignment

__all__ = ["Improvement", "improved"]

_OTHERS = 8  # earliest pipelines that may take a sequence, besides the first of each other scheme
_PACKED = 4  # changes of a step that are packed exactly, at most
_NEAR = 2  # sequences tried in exchange on either side of the one that would level both ends

_Change = tuple[float, int, int, int, int]
"""A change: (expected seconds of the later end of two pipelines, pipeline that gives, pipeline that
takes, sequence given, sequence given back or -1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """How many drafts are packed exactly and improved, in schedules and steps: never in seconds.

    Attributes:
        packed: Drafts that are packed exactly and improved by local search, at most.
        steps: Steps of local search for each schedule, at most.
    """

    packed: int = 12
    steps: int = 1000

    def scheduled(
        self, drafts: Iterable[Draft], found: Iterable[Assignment], bound_s: float
    ) -> list[Assignment]:
        """The best drafts packed exactly, with schedules that are packed already, the best of all
        improved.

        Args:
            drafts: Schedules timed by usual rows.
            found: Schedules that are packed.
            bound_s: Seconds of computing that no schedule beats.

        Returns:
            All packed schedules, the quickest first.
        """
        made, drafts = list(found), sorted(drafts, key=lambda draft: draft.expected_s)
        several = bool(drafts) and not _are_few(drafts)
        for draft in self._various(drafts) if several else drafts:
            known_s = min((schedule.expected_s for schedule in made), default=inf)
            # The first draft may be the only one that packing makes much slower.
            limit_s = max(known_s, drafts[0].expected_s) * (1 + 2 * NEAR)
            if several and draft.expected_s > limit_s:
                continue
            if not draft.is_late(known_s * (1 + NEAR)):
                made.append(Assignment.of(draft.table, draft.groups, draft.source))
        made.sort(key=lambda schedule: schedule.expected_s)
        if not made:
            return made
        limit_s = made[0].expected_s * (1 + NEAR)
        for schedule in made[: self.packed]:
            done = made[0].expected_s <= bound_s * (1 + ENOUGH)
            if done or schedule.expected_s > limit_s:
                break
            better = improved(schedule, target_s=bound_s, steps=self.steps)
            if better is not schedule:
                made.append(replace(better, source="improved"))
                made.sort(key=lambda schedule: schedule.expected_s)
        return made

    def _various(self, drafts: Sequence[Draft]) -> list[Draft]:
        """The first of sorted drafts, as packing may reorder them: the best of each table and kind,
        then the others."""
        first, others, kinds = list[Draft](), list[Draft](), set[tuple[int, str]]()
        for draft in drafts:
            kind = id(draft.table), draft.source
            (others if kind in kinds else first).append(draft)
            kinds.add(kind)
        found = list[Draft]()
        for draft in (*first, *others):
            if len(found) == self.packed:
                break
            if not any(_same(draft, other) for other in found):
                found.append(draft)
        return sorted(found, key=lambda draft: draft.expected_s)


def _are_few(drafts: Sequence[Draft]) -> bool:
    """Whether drafts have so few sequences that packing all is quick."""
    fluid = any(any(draft.table.fluid) for draft in drafts)
    return len(drafts[0].table.tokens) <= FEW and not fluid


def _same(draft: Draft, other: Draft) -> bool:
    """Whether two drafts have the same pipelines with the same sequences."""
    return draft.table is other.table and draft.groups == other.groups


def improved(schedule: Assignment, *, target_s: float, steps: int) -> Assignment:
    """Improve a schedule by local search.

    Args:
        schedule: The schedule.
        target_s: Seconds at which the search ends.
        steps: Steps, at most.

    Returns:
        A schedule whose gradients are sent earlier, or the same.
    """
    search = _Search(schedule)
    for _ in range(steps):
        if search.seconds <= target_s or not search.step():
            break
    if search.seconds >= schedule.expected_s:
        return schedule
    members = zip(schedule.groups, search.members, strict=True)
    groups = [(k, ranks, own) for (k, ranks, _), own in members]
    return Assignment.of(schedule.table, groups, schedule.source)


class _Search:
    """The pipelines of a schedule while sequences move between them. Pipelines go by their number.

    Attributes:
        table: The prices.
        kinds: The scheme of each pipeline.
        ranks: The ranks of each pipeline.
        members: Positions of the sequences of each pipeline, longest first.
        packs: The micro-batches of each pipeline.
        chains: Which pipelines wait for which.
        nested: Whether any pipeline waits for another.
        after: Where pipelines are nested, the last pipelines of each one's ranks.
        only: The same where it is a single one, else -1.
        times: Seconds of each pipeline, waits included.
        ends: Seconds until the last rank of each pipeline has sent its gradients.
    """

    def __init__(self, schedule: Assignment) -> None:
        self.table: PriceTable = schedule.table
        self.kinds = [k for k, _, _ in schedule.groups]
        self.ranks = [ranks for _, ranks, _ in schedule.groups]
        self.members = [list(members) for _, _, members in schedule.groups]
        self.packs: list[Packed] = list(schedule.packs)
        self.chains = self.table.chained(self.ranks)
        self.nested = any(self.chains.before)
        last_of = self.chains.last_of.__getitem__
        self.after = [set(map(last_of, ranks)) for ranks in self.ranks if self.nested]
        self.only = [min(after) if len(after) == 1 else -1 for after in self.after]
        self.times: list[Times] = [(0.0, 0.0, 0.0)] * len(self.kinds)
        self.ends = [0.0] * len(self.kinds)
        self._timed(range(len(self.kinds)))

    @property
    def seconds(self) -> float:
        """Seconds until the last rank has sent its gradients."""
        return max(self.ends)

    def _timed(self, changed: Iterable[int]) -> None:
        """Time the ``changed`` pipelines anew, and what waits for them."""
        for g in changed:
            self.times[g] = self.table.times(self.kinds[g], self.packs[g])
            self.ends[g] = sum(self.times[g])
        if self.nested:
            sent = self.chains.sent_s(self.times)
            self.ends = [
                sent[last] if last >= 0 else max([sent[h] for h in after])
                for last, after in zip(self.only, self.after, strict=True)
            ]

    def step(self) -> bool:
        """Take one change; False when none helps."""
        last_s = self.seconds
        late = [g for g, end in enumerate(self.ends) if end >= last_s * (1 - GAIN)]
        if self.nested:
            ranks = set(self.ranks[late[-1]])
            late = [g for g in late if ranks.intersection(self.ranks[g])]
        else:
            late = late[:1]
        best: list[_Change] = []
        order = sorted(range(len(self.ends)), key=self.ends.__getitem__)
        for source in late:
            for target in self._others(source, order):
                self._changes(source, target, last_s, best)
        return any(self._taken(change, last_s) for change in best)

    def _others(self, source: int, order: Sequence[int]) -> list[int]:
        """Pipelines with which pipeline ``source`` may exchange sequences, of all in the ``order``
        of their ends: the first, and the first of every other scheme."""
        found = [g for g in order[: _OTHERS + 1] if g != source]
        kinds = {self.kinds[g] for g in found}
        for g in order[_OTHERS + 1 :]:
            if self.kinds[g] not in kinds and g != source:
                kinds.add(self.kinds[g])
                found.append(g)
        if self.nested:
            mine = set(self.ranks[source])
            found = [g for g in found if not mine.intersection(self.ranks[g])]
        return found

    def _changes(self, source: int, target: int, last_s: float, best: list[_Change]) -> None:
        """Add to ``best``, which holds few, the changes between two pipelines by which both end
        earliest, at most one for each sequence that leaves ``source``; it ends ``last_s``."""
        table, limit_s = self.table, last_s * (1 - GAIN)
        k, j = self.kinds[source], self.kinds[target]
        ours, room, c = table.seconds(k), table.room(k), self._constant(k)
        theirs, place, opening = table.seconds(j), table.room(j), self._constant(j)
        spare = self._spare(source) if c else 0
        more = table.cap[j] - self._spare(target) if opening else 0
        end_s, there, at = self.ends[target], self.members[target], 0
        half_s = (last_s - end_s) / 2
        if len(best) == _PACKED:
            limit_s = best[-1][0]
        for i in self.members[source]:
            own_s, over_s = ours[i], end_s + theirs[i]
            left_s = last_s - own_s
            if left_s - c >= limit_s:  # those after it are shorter
                break
            found = -2
            if over_s < limit_s:
                here_s = left_s - c if c and room[i] >= spare else left_s
                there_s = over_s + opening if opening and place[i] > more else over_s
                later_s = here_s if here_s > there_s else there_s
                if later_s < limit_s:
                    limit_s, found = later_s, -1
            # Both lists fall, so the place in the other only goes on.
            wanted_s = own_s - half_s
            while at < len(there) and ours[there[at]] > wanted_s:
                at += 1
            for r in there[max(0, at - _NEAR) : at + _NEAR]:
                there_s = over_s - theirs[r]
                if r > i and there_s < limit_s:
                    here_s = left_s + ours[r]
                    if c and room[i] - room[r] >= spare:
                        here_s -= c
                    if opening and place[i] - place[r] > more:
                        there_s += opening
                    later_s = here_s if here_s > there_s else there_s
                    if later_s < limit_s:
                        limit_s, found = later_s, r
            if found > -2:
                insort(best, (limit_s, source, target, i, found))
                del best[_PACKED:]
                limit_s = best[-1][0] if len(best) == _PACKED else last_s * (1 - GAIN)

    def _constant(self, k: int) -> float:
        """Seconds of a further micro-batch of scheme k, 0 where micro-batches are not counted one
        by one."""
        return 0.0 if self.table.depth[k] > 1 or self.table.fluid[k] else self.table.c[k]

    def _spare(self, g: int) -> int:
        """Tokens that pipeline g has to lose to need one micro-batch less."""
        k = self.kinds[g]
        room = self.table.room(k)
        held = sum([room[i] for i in self.members[g]])
        return held - (len(self.packs[g].bins) - 1) * self.table.cap[k]

    def _taken(self, change: _Change, last_s: float) -> bool:
        """Pack both pipelines after a change; False, and the change undone, where they do not both
        end before ``last_s``."""
        _, source, target, over, back = change
        before = self.members[source], self.members[target], self.packs[source], self.packs[target]
        here = [i for i in before[0] if i != over] + ([back] if back >= 0 else [])
        there = [i for i in before[1] if i != back] + [over]
        self._put(source, sorted(here))
        self._put(target, sorted(there))
        self._timed((source, target))
        if max(self.ends[source], self.ends[target]) < last_s * (1 - GAIN):
            return True
        self.members[source], self.members[target], self.packs[source], self.packs[target] = before
        self._timed((source, target))
        return False

    def _put(self, g: int, members: list[int]) -> None:
        """Give pipeline ``g`` its sequences, longest first, and pack them."""
        self.members[g] = members
        self.packs[g] = pack(self.table, self.kinds[g], members)
