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
    """What a search may spend, in sequences placed, steps and schedules: never in time.

    Seconds and bounds are compared by ratios. *Fluid* tables have frontiers of many rows, of which
    packing takes longer.

    Attributes:
        few: Batches of up to so many sequences are tried in more ways.
        fewest: For batches of up to so many sequences, all drafts are packed.
        probe_few: Of few sequences, a draft must gain this share of what is known to be searched.
        probe: The same of more sequences.
        shaken: Sequences that are placed in drawn orders, where they are few.
        levels: Shares of the time; sequences up to each are dealt out again.
        biases: How many times their devices schemes with stages are taken to need.
        exchanged: Fillings of exchanged pipelines.
        large: On more devices than this nothing is exchanged, where tables are fluid.
        targets: Nested groups are drafted for these times the bound.
        dropped: They are drafted without some sizes, too, where that is this share above the bound.
        worth: They are filled where the best is this share above the bound.
        crowd: Pipelines side by side are filled scheme by scheme, too, where there are at most so
            many sequences for each device.
        promotions: Sequences that a filling may give a larger size.
        packed: Drafts that are packed exactly.
        polished: Packed drafts that are improved by local search.
        alike: Of these, drafts of one source.
        near: Packed drafts up to this share above the best are improved, where tables are fluid;
            nested drafts up to this share above it are made.
        near_polished: Packed drafts up to this share above the best are improved, elsewhere.
        steps: Steps of local search for each draft.
        step_work: Sequences placed in these steps.
        packed_fluid: As ``packed``, where tables are fluid.
        polished_fluid: As ``polished``, where tables are fluid.
        steps_fluid: As ``steps``, where tables are fluid.
        step_work_fluid: As ``step_work``, where tables are fluid.
        enough: Up to this share above the bound, nothing more is tried.
        crowded: On more devices than this, only brief planners of others are run.
        doubtful: And only where the plan is this share above the bound.
        loose: Where the plan is this share above the bound, the bound of waves is asked for.
        loose_each: And only where each device has so many sequences.
        many: Of more sequences than this, each of which matters less, less is tried.
        least: Least share by which a guessed time grows.
        halvings: Halvings of a time that succeeded.
    """

    few: int = 300
    fewest: int = 140
    probe_few: float = 2e-3
    probe: float = 5e-4
    shaken: int = 1500
    levels: Sequence[float] = (0.08, 0.3, float("inf"))
    biases: Sequence[float] = (1.0, 1.1, 1.25)
    exchanged: int = 60
    large: int = 16
    targets: Sequence[float] = (1.0, 1.1, 1.4, float("inf"))
    dropped: float = 0.0
    worth: float = 0.005
    crowd: int = 3
    promotions: int = 2
    packed: int = 10
    polished: int = 6
    alike: int = 2
    near: float = 0.01
    near_polished: float = 0.03
    steps: int = 100
    step_work: int = 20_000
    packed_fluid: int = 3
    polished_fluid: int = 1
    steps_fluid: int = 200
    step_work_fluid: int = 200_000
    enough: float = 1e-6
    crowded: int = 32
    doubtful: float = 0.03
    loose: float = 0.02
    loose_each: int = 4
    many: int = 20_000
    least: float = 2e-3
    halvings: int = 5

    def of(self, sequences: int) -> SearchLimits:
        """The limits for a batch of ``sequences``: less for each where there are more than
        ``many``."""
        if sequences <= self.many:
            return self
        return replace(
            self,
            levels=self.levels[:1],
            biases=self.biases[:1],
            targets=self.targets[:3],
            dropped=self.near,
            least=5 * self.least,
            halvings=self.halvings // 2,
            packed=2,
            packed_fluid=2,
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
    seed: int,
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
        seed: The seed of drawn orders.
        limits: What the search may spend.
        most: The most pipelines of each scheme.
        deeper: Whether drafts without stages are known already.
        known: Whether other drafts are known, so that what hardly gains is not searched.
        exchanges: Whether pipelines of a strategy are exchanged even where filling finds none.
    """
    starts = list[Counts]()
    crowded = any(table.fluid) and table.devices > limits.large
    tried = list[Filler]()
    for bias in _biases(table, limits, deeper=deeper):
        filler = Filler(table, most=most, bias=bias)
        if not starts and any(filler.is_like(other, high_s) for other in tried[-1:]):
            continue
        tried.append(filler)
        probe = limits.probe if known or starts else 0.0
        if starts and len(table.tokens) <= limits.few:
            probe = limits.probe_few
        found = _filled(filler, bound_s, high_s, seed, limits, probe)
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
    if crowded or not (exchanges or starts):
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
    filler: Filler, bound_s: float, high_s: float, seed: int, limits: SearchLimits, probe: float
) -> Searched[Pipelines] | None:
    table = filler.table
    few = len(table.tokens) <= limits.few
    # Where pipelines get few sequences each, the order in which schemes are looked at matters.
    sparse = few and len(table.tokens) * min(table.width) <= limits.crowd * table.devices

    def fill(
        tau: float, order: Sequence[int] | None = None, *, measured: bool = True
    ) -> Pipelines | float:
        found = filler.fill(tau, order, measured=measured)
        if isinstance(found, float) and sparse and order is None:
            found = filler.fill(tau, order, join_any=False, measured=measured)
        return found

    shaken = 0
    if len(table.tokens) <= limits.fewest:
        probe, shaken = 0.0, 0 if any(table.fluid) else limits.shaken
    effort = Effort(probe=probe, least=limits.least, halvings=limits.halvings, shaken=shaken)
    return least_time(fill, table.batch.values, bound_s, high_s, effort, seed)


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
    table: PriceTable, bound_s: float, high_s: float, *, seed: int, limits: SearchLimits
) -> Iterator[Draft]:
    """Drafts of nested groups: with the sizes that divide one another, and, for few sequences,
    with all where there are others. Where frontiers have many rows packing decides what fits into
    a time, so there nothing is filled but for the fewest."""
    rows = [
        k for k in range(len(table)) if table.depth[k] == 1 and table.schemes[k].scheme.tensor == 1
    ]
    chain = _chain(table, rows)
    few = len(table.tokens) <= limits.few and len(chain) < len(rows)
    many = len(table.tokens) > limits.fewest
    for some in [chain, rows] if few else [chain]:
        nesting = Nesting(table, some)
        for draft in _drafts(nesting, bound_s, high_s * (1 + limits.near), limits):
            high_s = min(high_s, draft.seconds)
            yield draft
        near = len(table.tokens) > limits.few and high_s <= bound_s * (1 + limits.worth)
        if (any(table.fluid) and many) or near:
            continue
        if some is chain:
            found = least_time(
                lambda tau, *_, **__: nesting.by_deadline(tau),  # noqa: B023
                table.batch.values,
                bound_s,
                high_s,
                Effort(least=8e-3, wider=2.0, halvings=5),
            )
            if found is not None:
                high_s = found.seconds
                yield Draft.of(table, found.seconds, found.result, "by deadline")

        def fill(  # whether it is measured or not takes it as long
            tau: float, order: Sequence[int] | None = None, *, measured: bool = True
        ) -> list[Group] | float:
            found = nesting.fill(tau, order, promotions=limits.promotions)  # noqa: B023
            if isinstance(found, float) and not many:
                found = nesting.fill(tau, order, promotions=limits.promotions, longest=True)  # noqa: B023
            return found

        probe = limits.probe if many else limits.enough
        effort = Effort(halvings=8 if few else 5, probe=0.0 if isinf(high_s) else probe)
        found = least_time(fill, table.batch.values, bound_s, high_s, effort, seed)
        if found is not None:
            high_s = found.seconds
            yield Draft.of(table, found.seconds, found.result, "nested")


def _drafts(nesting: Nesting, bound_s: float, high_s: float, limits: SearchLimits) -> list[Draft]:
    """Nested drafts: for each target time, then without sizes that cost more than they bring."""
    drafts, tried = list[tuple[float, list[Group]]](), set[tuple[int, ...]]()

    def drafted(target_s: float, levels: Sequence[int]) -> tuple[float, float, tuple[int, ...]]:
        below_s = min((seconds for seconds, _ in drafts), default=high_s)
        seconds, key, groups = nesting.dealt(target_s, levels, tried, below_s)
        tried.add(key)
        if groups:
            drafts.append((seconds, groups))
        return seconds, target_s, key

    every = list(range(len(nesting.rows)))
    best_s, target_s, sizes = min(drafted(bound_s * factor, every) for factor in limits.targets)
    dropping = best_s > bound_s * (1 + limits.dropped)
    while dropping and len(every) > 1:
        dropping = False
        for row in sorted(set(sizes)):
            fewer = [other for other in every if other != row]
            seconds, _, fewer_sizes = drafted(target_s, fewer)
            if seconds < best_s * (1 - 1e-9):
                best_s, sizes, every, dropping = seconds, fewer_sizes, fewer, True
                break
    return [
        Draft.of(nesting.table, seconds, groups, "nested")
        for seconds, groups in sorted(drafts, key=lambda item: item[0])[:2]
    ]


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
    for the fewest sequences."""
    drafts = sorted(drafts, key=lambda draft: draft.expected_s)
    if not drafts:
        return []
    fluid = any(any(draft.table.fluid) for draft in drafts)
    most = limits.packed_fluid if fluid else limits.packed
    near = limits.near if fluid else limits.near_polished
    if len(drafts[0].table.tokens) <= limits.fewest and not fluid:
        return drafts
    limit_s, found = drafts[0].expected_s * (1 + 2 * near), list[Draft]()
    for shared in (max(1, most - 1), most):
        for draft in drafts:
            if draft.expected_s > limit_s or len(found) == most:
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
    best = _various(drafts, limits)
    fluid = any(any(draft.table.fluid) for draft in best)
    polished = limits.polished_fluid if fluid else limits.polished
    near = limits.near if fluid else limits.near_polished
    made = list(found)
    over = 0.0 if polished == 1 else near  # of the best: only those are improved
    for draft in best:
        known_s = min((schedule.expected_s for schedule in made), default=inf)
        if not draft.is_late(known_s * (1 + over)):
            made.append(Assignment.of(draft.table, draft.groups, draft.source))
    made.sort(key=lambda schedule: schedule.expected_s)
    limit_s, seen = made[0].expected_s * (1 + near), Counter[str]()
    for schedule in list(made):
        done = made[0].expected_s <= bound_s * (1 + limits.enough)
        if done or schedule.expected_s > limit_s or seen.total() >= polished:
            break
        if seen[schedule.source] >= limits.alike:
            continue
        seen[schedule.source] += 1
        steps, work = limits.steps, limits.step_work
        if fluid:
            steps, work = limits.steps_fluid, limits.step_work_fluid
        steps = min(steps, work // len(schedule.table.tokens))
        better = improved(schedule, target_s=bound_s, steps=steps)
        if better is not schedule:
            made.append(replace(better, source="improved"))
            made.sort(key=lambda schedule: schedule.expected_s)
    return made
