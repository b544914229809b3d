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

from headrace.planning.batch import Packed, PriceTable, Times
from headrace.planning.generators import ENOUGH, FEW, Draft
from headrace.planning.packing import pack
from headrace.planning.schedule import Assignment
from headrace.planning.tolerances import GAIN, NEAR

__all__ = ["Improvement", "improved"]

_OTHERS = 8  # earliest pipelines that may take a sequence, besides the first of each other scheme
_PACKED = 4  # changes of a step that are packed exactly, at most
_NEAR = 2  # sequences tried in exchange on either side of the one that would level both ends

_Change = tuple[float, int, int, int, int]
"""A change: (expected seconds of the later end of two pipelines, pipeline that gives, pipeline that
takes, sequence given, sequence given back or -1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """How many drafts are packed exactly and improved, in schedules and in sequences looked at:
    never in seconds.

    Attributes:
        packed: Drafts that are packed exactly and improved by local search, at most.
        looks: Sequences that are looked at, at most: half of it by the packing of drafts, of which
            one is packed in any case, and the rest by local search, in all steps of all schedules
            together.
        clocked: Changes of a step that are packed exactly, at most, where a schedule with stages is
            levelled on the clock: what packing makes of a change is less sure there.
    """

    packed: int = 12
    looks: int = 500_000
    clocked: int = 64

    def scheduled(
        self, drafts: Iterable[Draft], found: Iterable[Assignment], bound_s: float
    ) -> list[Assignment]:
        """Pack the best drafts exactly, put them beside the schedules that are packed already, and
        improve the best of all.

        Args:
            drafts: Schedules timed by usual rows.
            found: Schedules that are packed.
            bound_s: Seconds of computing that no schedule beats.

        Returns:
            All packed schedules, the quickest first.
        """
        schedules, drafts = list(found), sorted(drafts, key=lambda draft: draft.expected_s)
        # Whether only some of the drafts are packed, as packing all would take too long.
        selects = bool(drafts) and not _are_few(drafts)
        looks = self.looks
        for draft in self._various(drafts) if selects else drafts:
            if schedules and 2 * looks < self.looks:
                break
            looks -= len(draft.table.tokens)
            known_s = min((schedule.expected_s for schedule in schedules), default=inf)
            # The first draft may be the only one that packing makes much slower.
            limit_s = max(known_s, drafts[0].expected_s) * (1 + 2 * NEAR)
            if selects and draft.expected_s > limit_s:
                continue
            if not draft.is_late(known_s * (1 + NEAR)):
                schedules.append(Assignment.of(draft.table, draft.groups, draft.source))
        schedules.sort(key=lambda schedule: schedule.expected_s)
        if not schedules:
            return schedules
        limit_s, alike = schedules[0].expected_s * (1 + NEAR), set[tuple[float, ...]]()
        for schedule in schedules[: self.packed]:
            # Drafts of one filling are often packed alike.
            ends = tuple(packed.seconds for packed in schedule.packs)
            if ends in alike:
                continue
            alike.add(ends)
            near_bound = schedules[0].expected_s <= bound_s * (1 + ENOUGH)
            if near_bound or schedule.expected_s > limit_s:
                break
            better, looked = improved(schedule, target_s=bound_s, looks=looks)
            looks -= looked
            if better is not schedule:
                schedules.append(replace(better, source="improved"))
                schedules.sort(key=lambda schedule: schedule.expected_s)
        return schedules

    def _various(self, drafts: Sequence[Draft]) -> list[Draft]:
        """Up to ``packed`` different drafts of those given, quickest first: the best of each table
        and source, then others. Packing may change which is quickest, so drafts of all kinds are
        kept."""
        best_of_kind, others, kinds = list[Draft](), list[Draft](), set[tuple[int, str]]()
        for draft in drafts:
            kind = id(draft.table), draft.source
            (others if kind in kinds else best_of_kind).append(draft)
            kinds.add(kind)
        chosen = list[Draft]()
        for draft in (*best_of_kind, *others):
            if len(chosen) == self.packed:
                break
            if not any(_same(draft, other) for other in chosen):
                chosen.append(draft)
        return sorted(chosen, key=lambda draft: draft.expected_s)


def _are_few(drafts: Sequence[Draft]) -> bool:
    """Whether packing all drafts is quick: they have few sequences, and all their schemes have one
    row, so that packing has no rows to choose from."""
    fluid = any(any(draft.table.fluid) for draft in drafts)
    return len(drafts[0].table.tokens) <= FEW and not fluid


def _same(draft: Draft, other: Draft) -> bool:
    """Whether two drafts have the same pipelines with the same sequences."""
    return draft.table is other.table and draft.groups == other.groups


def improved(
    schedule: Assignment,
    *,
    target_s: float,
    looks: int,
    late_s: Sequence[float] = (),
    packed: int = _PACKED,
) -> tuple[Assignment, int]:
    """Improve a schedule by local search.

    Args:
        schedule: The schedule.
        target_s: Seconds at which the search ends.
        looks: Sequences to look at: after so many no step begins.
        late_s: By how many seconds each pipeline ends later than the schedule estimates; 0 when
            left out.
        packed: Changes of a step that are packed exactly, at most.

    Returns:
        A schedule whose gradients are sent earlier, or the same, and the sequences looked at.
    """
    search = _Search(schedule, late_s, packed)
    first_s = search.seconds
    while search.looked < looks and search.seconds > target_s and search.step():
        pass
    if search.seconds >= first_s:
        return schedule, search.looked
    members = zip(schedule.groups, search.members, strict=True)
    groups = [(k, ranks, own) for (k, ranks, _), own in members]
    return Assignment.of(schedule.table, groups, schedule.source), search.looked


class _Search:
    """The pipelines of a schedule while sequences move between them. Pipelines go by their number.

    Attributes:
        table: The prices.
        kinds: The scheme of each pipeline.
        ranks: The ranks of each pipeline.
        members: Positions of the sequences of each pipeline, longest first.
        packs: The micro-batches of each pipeline.
        held: Tokens that the sequences of each pipeline take of its micro-batches.
        chains: Which pipelines wait for which.
        nested: Whether any pipeline waits for another.
        after: Where pipelines are nested, for each one the last pipelines that its ranks run; else
            empty.
        only: For each entry of ``after`` its pipeline where it is a single one, else -1.
        times: (wait for weights, computing, sending of gradients) of each pipeline, in seconds.
        late_s: By how many seconds each pipeline ends later than is estimated.
        most: Changes of a step that are packed exactly, at most.
        ends: Seconds until the last rank of each pipeline has sent its gradients.
        looked: Sequences that were looked at so far.
    """

    def __init__(self, schedule: Assignment, late_s: Sequence[float], most: int) -> None:
        self.table: PriceTable = schedule.table
        self.most = most
        self.late_s = late_s or [0.0] * len(schedule.groups)
        self.kinds = [k for k, _, _ in schedule.groups]
        self.ranks = [ranks for _, ranks, _ in schedule.groups]
        self.members = [list(members) for _, _, members in schedule.groups]
        self.packs: list[Packed] = list(schedule.packs)
        self.held = [self._held(k, own) for k, own in zip(self.kinds, self.members, strict=True)]
        self.chains = self.table.chained(self.ranks)
        self.nested = any(self.chains.before)
        last_of = self.chains.last_of.__getitem__
        self.after = [set(map(last_of, ranks)) for ranks in self.ranks if self.nested]
        self.only = [min(after) if len(after) == 1 else -1 for after in self.after]
        self.times: list[Times] = [(0.0, 0.0, 0.0)] * len(self.kinds)
        self.ends = [0.0] * len(self.kinds)
        self.looked = 0
        self._time(range(len(self.kinds)))

    @property
    def seconds(self) -> float:
        """Seconds until the last rank has sent its gradients."""
        return max(self.ends)

    def _time(self, changed: Iterable[int]) -> None:
        """Work out ``times`` and ``ends`` of the ``changed`` pipelines anew; where pipelines are
        nested, ``ends`` of all."""
        for g in changed:
            self.ends[g] = self._end_s(g)
        if self.nested:
            # A pipeline's ranks end with the last pipelines that have these ranks.
            sent = self.chains.sent_s(self.times)
            self.ends = [
                sent[last] if last >= 0 else max([sent[h] for h in after])
                for last, after in zip(self.only, self.after, strict=True)
            ]

    def _end_s(self, g: int) -> float:
        """Work out ``times`` of pipeline ``g``. Returns the seconds until it has sent its
        gradients, if it waits for no other."""
        self.times[g] = times = self.table.times(self.kinds[g], self.packs[g])
        return sum(times) + self.late_s[g]

    def step(self) -> bool:
        """Make the most promising change that lets the latest pipelines end earlier; False when
        none helps."""
        last_s = self.seconds
        latest = [g for g, end in enumerate(self.ends) if end >= last_s * (1 - GAIN)]
        if self.nested:  # all pipelines of the ranks that end last may give a sequence away
            ranks = set(self.ranks[latest[-1]])
            latest = [g for g in latest if ranks.intersection(self.ranks[g])]
        else:
            latest = latest[:1]
        changes: list[_Change] = []
        order = sorted(range(len(self.ends)), key=self.ends.__getitem__)
        for source in latest:
            for target in self._others(source, order):
                self.looked += len(self.members[source])
                self._changes(source, target, last_s, changes)
        return any(self._taken(change, last_s) for change in changes)

    def _others(self, source: int, order: Sequence[int]) -> list[int]:
        """Pipelines with which pipeline ``source`` may exchange sequences, given all in the
        ``order`` of their ends: the earliest, and the earliest of every other scheme. Where
        pipelines are nested, those that share a rank with ``source`` are left out."""
        targets = [g for g in order[: _OTHERS + 1] if g != source]
        kinds = {self.kinds[g] for g in targets}
        for g in order[_OTHERS + 1 :]:
            if self.kinds[g] not in kinds and g != source:
                kinds.add(self.kinds[g])
                targets.append(g)
        if self.nested:
            source_ranks = set(self.ranks[source])
            targets = [g for g in targets if not source_ranks.intersection(self.ranks[g])]
        return targets

    def _changes(self, source: int, target: int, last_s: float, best: list[_Change]) -> None:
        """Add changes to ``best``, which keeps the ``most`` changes whose later end of both
        pipelines is earliest: moves of a sequence from ``source``, which ends at ``last_s`` seconds
        now, to ``target``, and exchanges for a shorter one, at most one change for each sequence
        that leaves ``source``. Ends are estimated by the usual rows."""
        # A change is of use if both pipelines end before the limit.
        table, limit_s = self.table, last_s * (1 - GAIN)
        k, j = self.kinds[source], self.kinds[target]
        source_s, source_tokens, source_c = table.seconds(k), table.room(k), self._constant(k)
        target_s, target_tokens, target_c = table.seconds(j), table.room(j), self._constant(j)
        # Where each micro-batch pays a constant: the tokens that the source must lose to need one
        # micro-batch less, and those that the target can take without one more.
        surplus = self._surplus(source) if source_c else 0
        free_tokens = table.cap[j] - self._surplus(target) if target_c else 0
        end_s, target_members, index = self.ends[target], self.members[target], 0
        half_gap_s = (last_s - end_s) / 2
        if len(best) == self.most:
            limit_s = best[-1][0]
        # Two pipelines of one scheme can at best end together, with one micro-batch less.
        least_s = last_s - half_gap_s - source_c / 2 if k == j else 0.0
        for i in self.members[source] if least_s < limit_s else ():
            leaving_s, target_end_s = source_s[i], end_s + target_s[i]
            source_end_s = last_s - leaving_s
            if source_end_s - source_c >= limit_s:  # it is too short, and those after it, too
                break
            back = -2  # no change so far; -1 once moving the sequence alone helps
            if target_end_s < limit_s:  # move it alone, with one micro-batch less or more
                source_after_s = (
                    source_end_s - source_c
                    if source_c and source_tokens[i] >= surplus
                    else source_end_s
                )
                target_after_s = (
                    target_end_s + target_c
                    if target_c and target_tokens[i] > free_tokens
                    else target_end_s
                )
                later_end_s = source_after_s if source_after_s > target_after_s else target_after_s
                if later_end_s < limit_s:
                    limit_s, back = later_end_s, -1
            # An exchange levels both ends where the sequences differ by half the gap. Both lists
            # fall, so the place in the other one only moves on.
            wanted_s = leaving_s - half_gap_s
            while index < len(target_members) and source_s[target_members[index]] > wanted_s:
                index += 1
            for other in target_members[max(0, index - _NEAR) : index + _NEAR]:
                target_after_s = target_end_s - target_s[other]
                if other > i and target_after_s < limit_s:
                    source_after_s = source_end_s + source_s[other]
                    if source_c and source_tokens[i] - source_tokens[other] >= surplus:
                        source_after_s -= source_c
                    if target_c and target_tokens[i] - target_tokens[other] > free_tokens:
                        target_after_s += target_c
                    later_end_s = (
                        source_after_s if source_after_s > target_after_s else target_after_s
                    )
                    if later_end_s < limit_s:
                        limit_s, back = later_end_s, other
            if back > -2:  # a change with this sequence: keep it among the best
                insort(best, (limit_s, source, target, i, back))
                del best[self.most :]
                limit_s = best[-1][0] if len(best) == self.most else last_s * (1 - GAIN)

    def _constant(self, k: int) -> float:
        """Seconds that one micro-batch more costs a pipeline of scheme k; 0 where constants are
        charged by tokens and not by micro-batch."""
        return 0.0 if self.table.depth[k] > 1 or self.table.fluid[k] else self.table.c[k]

    def _surplus(self, g: int) -> int:
        """Tokens that pipeline g has to lose so that it needs one micro-batch less."""
        return self.held[g] - (len(self.packs[g].bins) - 1) * self.table.cap[self.kinds[g]]

    def _held(self, k: int, members: Sequence[int]) -> int:
        """Tokens that ``members`` take of the micro-batches of a pipeline of scheme k."""
        return sum(map(self.table.room(k).__getitem__, members))

    def _taken(self, change: _Change, last_s: float) -> bool:
        """Make a change and pack both pipelines exactly. Where they do not both end before
        ``last_s``, undo it and return False."""
        _, source, target, given, back = change
        before = [(g, self.members[g], self.packs[g], self.held[g]) for g in (source, target)]
        source_members = [i for i in self.members[source] if i != given]
        source_members += [back] if back >= 0 else []
        target_members = [i for i in self.members[target] if i != back] + [given]
        limit_s = last_s * (1 - GAIN)
        self._put(target, sorted(target_members))
        # More often it is the target that ends too late; then the source need not be packed.
        if self.nested or self._end_s(target) < limit_s:
            self._put(source, sorted(source_members))
            self._time((source, target))
            if max(self.ends[source], self.ends[target]) < limit_s:
                return True
        for g, members, packed, held in before:
            self.members[g], self.packs[g], self.held[g] = members, packed, held
        self._time((source, target))
        return False

    def _put(self, g: int, members: list[int]) -> None:
        """Give pipeline ``g`` its sequences, longest first, and pack them."""
        self.members[g] = members
        self.packs[g] = pack(self.table, self.kinds[g], members)
        self.held[g] = self._held(self.kinds[g], members)
