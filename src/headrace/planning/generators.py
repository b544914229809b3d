"""Generators: ways to draft schedules of one table, beside each other.

side by side    pipelines that share no device (:mod:`headrace.planning.side_by_side`), with the
                schemes of one stage, with all where some have more, and with strategies that
                exchange pipelines (:mod:`headrace.planning.strategy_search`)
nested          groups one in another (:mod:`headrace.planning.nested`), where schemes allow it

A draft is timed by the usual rows of its schemes. :func:`scheduled` packs the best drafts exactly
and improves the best of those by local search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isinf

import numpy as np

from headrace.planning.batch import PriceTable
from headrace.planning.local_search import improved
from headrace.planning.nested import Nesting
from headrace.planning.packing import likely, pack
from headrace.planning.schedule import Assignment, Group, placed
from headrace.planning.search import Effort, Searched, least_time
from headrace.planning.side_by_side import Filler, Pipelines
from headrace.planning.strategy_search import Counts, climbed, counts_of, worthwhile

__all__ = ["Draft", "SearchLimits", "nested", "scheduled", "side_by_side"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """What a search may spend, in fillings, steps and schedules: never in time. What each is worth
    is printed by ``benchmarks/worlds.py --ablate``.

    Seconds and bounds are compared by ratios. *Fluid* tables have frontiers of many rows, of which
    packing takes longer.

    Attributes:
        few: Batches of up to so many sequences are tried in more ways.
        many: Of more sequences than this, each of which matters less, less is tried.
        enough: Up to this share above the bound, nothing more is tried.
        worth: Up to this share above the bound, nested groups of many sequences are not filled.
        probe: Share of the best known time that a draft must gain to be searched.
        levels: Shares of the time; sequences up to each are dealt out again.
        biases: How many times their devices schemes with stages are taken to need.
        exchanged: Fillings of exchanged pipelines.
        halvings: Halvings of a time that succeeded.
        packed: Drafts that are packed exactly.
        polished: Packed drafts that are improved by local search.
        alike: Of these, drafts of one source.
        near: Packed drafts up to this share above the best are improved; nested drafts up to this
            share above it are made.
        steps: Steps of local search for each draft.
        step_work: Sequences placed in these steps.
        loose: Where the plan is this share above the bound, the bound of waves is asked for.
        loose_each: And only where each device has so many sequences.
    """

    few: int = 140
    many: int = 20_000
    enough: float = 1e-4
    worth: float = 0.005
    probe: float = 5e-4
    levels: Sequence[float] = (0.08, 0.3, float("inf"))
    biases: Sequence[float] = (1.0, 1.1, 1.25)
    exchanged: int = 60
    halvings: int = 5
    packed: int = 5
    polished: int = 2
    alike: int = 2
    near: float = 0.01
    steps: int = 100
    step_work: int = 20_000
    loose: float = 0.02
    loose_each: int = 4

    def of(self, sequences: int) -> SearchLimits:
        """The limits for a batch of ``sequences``: less for each where there are more than
        ``many``."""
        if sequences <= self.many:
            return self
        return replace(
            self,
            levels=self.levels[:1],
            biases=self.biases[:1],
            halvings=self.halvings // 2,
            packed=2,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draft:
    """A schedule before it is packed, timed by the usual rows.

    Attributes:
        table: The prices.
        seconds: Expected seconds of computing.
        expected_s: Expected seconds until gradients are sent.
        groups: Its pipelines with their sequences, larger ones first.
        source: The generator, by name.
        ends: Pipelines that are the last of some rank, those expected to end last first where that
            is known.
    """

    table: PriceTable
    seconds: float
    expected_s: float
    groups: list[Group]
    source: str
    ends: Sequence[int] = ()

    @classmethod
    def of(cls, table: PriceTable, seconds: float, groups: list[Group], source: str) -> Draft:
        """Pipelines that compute for ``seconds``."""
        expected_s, ends = seconds, list[int]()
        if table.push_s:
            times = [table.times(k, likely(table, k, own)) for k, _, own in groups]
            chains = table.chained(ranks for _, ranks, _ in groups)
            sent = chains.sent_s(times)
            expected_s = max(seconds, *sent.values())
            ends = sorted(sent, key=sent.__getitem__, reverse=True)
        return cls(
            table=table,
            seconds=seconds,
            expected_s=expected_s,
            groups=groups,
            source=source,
            ends=ends,
        )

    def is_late(self, limit_s: float) -> bool:
        """Whether a pipeline of ``ends``, packed exactly after those that it waits for, has its
        gradients sent at ``limit_s`` or later: then the rest need no packing."""
        before = (
            self.table.chained(ranks for _, ranks, _ in self.groups).before if self.ends else []
        )
        ends = dict[int, tuple[float, float]]()  # each free, and its gradients sent

        def end(g: int) -> tuple[float, float]:
            if g not in ends:
                k, _, members = self.groups[g]
                there_s, seconds, behind_s = self.table.times(k, pack(self.table, k, members))
                free_s = max([there_s, *(end(h)[0] for h in before[g])]) + seconds
                ends[g] = free_s, free_s + behind_s
            return ends[g]

        return any(end(g)[1] >= limit_s for g in self.ends)


def side_by_side(
    table: PriceTable,
    bound_s: float,
    high_s: float,
    *,
    limits: SearchLimits,
    most: Sequence[int] | None = None,
    deeper: bool = False,
    known: bool = False,
    exchanges: bool = True,
) -> Iterator[Draft]:
    """Drafts of pipelines side by side that may take less than ``high_s`` seconds.

    Args:
        table: The prices.
        bound_s: Seconds that no plan beats.
        high_s: Seconds of the best schedule known.
        limits: What the search may spend.
        most: The most pipelines of each scheme.
        deeper: Whether drafts without stages are known already.
        known: Whether other drafts are known, so that what hardly gains is not searched.
        exchanges: Whether pipelines of a strategy are exchanged even where filling finds none.
    """
    starts = list[Counts]()
    tried = list[Filler]()
    for bias in _biases(table, limits, deeper=deeper):
        filler = Filler(table, most=most, bias=bias)
        if not starts and any(filler.is_like(other, high_s) for other in tried[-1:]):
            continue
        tried.append(filler)
        probe = limits.probe if known or starts else 0.0
        found = _filled(filler, bound_s, high_s, limits, probe)
        if found is not None:
            starts.append(counts_of(table, found.result))
            high_s = min(high_s, found.seconds)
            reached = not any(table.fluid) and high_s <= bound_s * (1 + limits.enough)
            levels = limits.levels[-1:] if reached else limits.levels
            yield from _dealt(filler, found, levels)
            if reached:
                return
    if most is not None or high_s <= bound_s * (1 + limits.enough):
        return
    if not (exchanges or starts):
        return
    kinds, starts = worthwhile(table, bound_s * 1.1), starts[::-1] or _homogeneous(table)
    climbs = [*climbed(table, starts, kinds, high_s, bound_s, limits.exchanged)]
    if climbs:
        yield from _dealt(*climbs[-1], limits.levels)


def _biases(table: PriceTable, limits: SearchLimits, *, deeper: bool) -> Iterator[list[float]]:
    """Biases of schemes to fill with, infinite for those that are left out, by families: schemes of
    one stage, then all; of each first those with a power of two of ranks, which leave few ranks
    over, as filling is misled by more schemes. Schemes with stages are biased by ``limits`` too."""
    single = [depth == 1 for depth in table.depth]
    even = [width & (width - 1) == 0 for width in table.width]
    families = list[tuple[list[bool], float]]()
    if any(single) and not deeper:
        families.append((single, 1.0))
    if not all(single):
        families += [([True] * len(table), bias) for bias in limits.biases]
    for family, bias in families:
        some = [a and b for a, b in zip(family, even, strict=True)]
        for chosen in (some, family) if any(some) and some != family else (family,):
            yield [
                (1.0 if one else bias) if used else inf
                for used, one in zip(chosen, single, strict=True)
            ]


def _homogeneous(table: PriceTable) -> list[Counts]:
    """Strategies of one scheme that hold the longest sequence, those that need the least first."""
    fits = [
        k
        for k in range(len(table))
        if np.isfinite(table.alone[k, 0]) and table.width[k] <= table.devices
    ]
    fits.sort(key=lambda k: float(table.ranks[k, 0] * (table.spread[k] @ table.batch.counts)))
    return [
        tuple(table.devices // table.width[k] if j == k else 0 for j in range(len(table)))
        for k in fits
    ]


def _filled(
    filler: Filler, bound_s: float, high_s: float, limits: SearchLimits, probe: float
) -> Searched[Pipelines] | None:
    table = filler.table
    # Where sequences are few, the order in which schemes are looked at matters.
    few = len(table.tokens) <= limits.few

    def fill(tau: float, *, measured: bool = True) -> Pipelines | float:
        found = filler.fill(tau, measured=measured)
        if isinstance(found, float) and few:
            found = filler.fill(tau, join_any=False, measured=measured)
        return found

    effort = Effort(probe=0.0 if few else probe, halvings=limits.halvings)
    return least_time(fill, bound_s, high_s, effort)


def _dealt(filler: Filler, found: Searched[Pipelines], levels: Sequence[float]) -> Iterator[Draft]:
    """Drafts of a filling: as it is, and with short sequences dealt out again up to each of
    ``levels``."""
    table = filler.table
    yield Draft.of(table, found.seconds, placed(table, found.result), "filled")
    for level in levels:
        limit_s = level if isinf(level) else found.seconds * level
        seconds, dealt = filler.levelled(found.result, limit_s)
        if dealt:
            yield Draft.of(table, seconds, placed(table, dealt), f"dealt {level}")


def nested(
    table: PriceTable, bound_s: float, high_s: float, *, limits: SearchLimits
) -> Iterator[Draft]:
    """Drafts of nested groups: with the sizes that divide one another, and, for few sequences,
    with all where there are others. Where frontiers have many rows packing decides what fits into
    a time, so there nothing is filled but for few."""
    rows = [
        k for k in range(len(table)) if table.depth[k] == 1 and table.schemes[k].scheme.tensor == 1
    ]
    chain = _chain(table, rows)
    few = len(table.tokens) <= limits.few
    for some in [chain, rows] if few and len(chain) < len(rows) else [chain]:
        nesting = Nesting(table, some)
        for draft in _drafts(nesting, bound_s, high_s * (1 + limits.near)):
            high_s = min(high_s, draft.seconds)
            yield draft
        near = high_s <= bound_s * (1 + limits.worth)
        if not few and (any(table.fluid) or near):
            continue
        if some is chain:
            found = least_time(
                lambda tau, **_: nesting.by_deadline(tau),  # noqa: B023
                bound_s,
                high_s,
                Effort(least=8e-3, wider=2.0),
            )
            if found is not None:
                high_s = found.seconds
                yield Draft.of(table, found.seconds, found.result, "by deadline")

        def fill(tau: float, *, measured: bool = True) -> list[Group] | float:
            found = nesting.fill(tau)  # noqa: B023
            if isinstance(found, float) and few:
                found = nesting.fill(tau, longest=True)  # noqa: B023
            return found

        effort = Effort(probe=0.0 if isinf(high_s) else limits.probe)
        found = least_time(fill, bound_s, high_s, effort)
        if found is not None:
            high_s = found.seconds
            yield Draft.of(table, found.seconds, found.result, "nested")


_TARGETS = (1.0, 1.4, inf)
"""Times for which nested groups are drafted, over the bound: with later ones sequences take fewer
devices."""


def _drafts(nesting: Nesting, bound_s: float, high_s: float) -> list[Draft]:
    """Nested drafts: for each target time, then without sizes that cost more than they bring."""
    drafts, tried = list[tuple[float, list[Group]]](), set[tuple[int, ...]]()

    def drafted(target_s: float, levels: Sequence[int]) -> tuple[float, float, tuple[int, ...]]:
        below_s = min((seconds for seconds, _ in drafts), default=high_s)
        seconds, key, groups = nesting.dealt(target_s, levels, tried, below_s)
        tried.add(key)
        if groups:
            drafts.append((seconds, groups))
        return seconds, target_s, key

    levels = list(range(len(nesting.rows)))
    best_s, target_s, sizes = min(drafted(bound_s * factor, levels) for factor in _TARGETS)
    gained = True
    while gained and len(levels) > 1:
        gained = False
        for left_out in sorted(set(sizes)):
            fewer = [level for level in levels if level != left_out]
            seconds, _, fewer_sizes = drafted(target_s, fewer)
            if seconds < best_s:
                best_s, sizes, levels, gained = seconds, fewer_sizes, fewer, True
                break
    drafts.sort(key=lambda draft: draft[0])
    return [Draft.of(nesting.table, seconds, groups, "nested") for seconds, groups in drafts[:2]]


def _chain(table: PriceTable, rows: Sequence[int]) -> list[int]:
    """The longest chain of sizes that divide the next and, the largest, the devices."""
    best: dict[int, list[int]] = {}
    for k in rows:
        width = table.width[k]
        below = [best[j] for j in best if table.width[j] < width and width % table.width[j] == 0]
        best[k] = [*max(below, key=len, default=[]), k]

    def key(chain: list[int]) -> tuple[bool, int]:
        return table.devices % table.width[chain[-1]] == 0, len(chain)

    return max(best.values(), key=key, default=[])


def _various(drafts: Iterable[Draft], limits: SearchLimits) -> list[Draft]:
    """The best drafts, some of each source and of several tables, as packing may reorder them; all
    of few sequences where packing is quick."""
    drafts = sorted(drafts, key=lambda draft: draft.expected_s)
    if not drafts:
        return []
    fluid = any(any(draft.table.fluid) for draft in drafts)
    if len(drafts[0].table.tokens) <= limits.few and not fluid:
        return drafts
    limit_s, found = drafts[0].expected_s * (1 + 2 * limits.near), list[Draft]()
    for shared in (max(1, limits.packed - 1), limits.packed):
        for draft in drafts:
            if draft.expected_s > limit_s or len(found) == limits.packed:
                break
            alike = sum(other.source == draft.source for other in found)
            beside = sum(other.table is draft.table for other in found)
            if draft not in found and alike < limits.alike and beside < shared:
                found.append(draft)
    return found


def scheduled(
    drafts: Iterable[Draft], found: Iterable[Assignment], bound_s: float, limits: SearchLimits
) -> list[Assignment]:
    """The best ``drafts`` packed exactly, with the schedules ``found``, the best of all improved;
    quickest first."""
    made = list(found)
    for draft in _various(drafts, limits):
        known_s = min((schedule.expected_s for schedule in made), default=inf)
        if not draft.is_late(known_s * (1 + limits.near)):
            made.append(Assignment.of(draft.table, draft.groups, draft.source))
    made.sort(key=lambda schedule: schedule.expected_s)
    limit_s, seen = made[0].expected_s * (1 + limits.near), Counter[str]()
    for schedule in list(made):
        done = made[0].expected_s <= bound_s * (1 + limits.enough)
        if done or schedule.expected_s > limit_s or seen.total() >= limits.polished:
            break
        if seen[schedule.source] >= limits.alike:
            continue
        seen[schedule.source] += 1
        steps = min(limits.steps, limits.step_work // len(schedule.table.tokens))
        better = improved(schedule, target_s=bound_s, steps=steps)
        if better is not schedule:
            made.append(replace(better, source="improved"))
            made.sort(key=lambda schedule: schedule.expected_s)
    return made
