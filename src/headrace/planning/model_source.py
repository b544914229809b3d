"""What a search needs of a model's costs: tables of prices, bounds, and the simulated step.

A table is made for each way to hold weights. Tables are offered only while their bound is below
the best so far. A schedule becomes a plan here: its micro-batches get their layers and their order,
and the simulator says when the step ends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from math import inf

import numpy as np

from headrace.costs import CostModel
from headrace.costs.cost_model import MOST_TOKENS
from headrace.planning.batch import Packed, PriceTable, SortedBatch
from headrace.planning.bounds import Bound, BoundRows, allows, lower_bound, step_bound_s
from headrace.planning.explain import Candidate, require_fit, require_strategies
from headrace.planning.generators import ENOUGH, Offer, TableKind
from headrace.planning.priced import Frontier, Least, PricedScheme, StageCosts, worth_keeping
from headrace.planning.problem import Problem
from headrace.planning.schedule import Assignment, expected_s
from headrace.planning.smoothing import smoothed
from headrace.simulator import exposed_s, step_s
from headrace.spec import LayerPlan, Lengths, MicroBatch, Pipeline, Plan

__all__ = ["ModelSource", "laid_out", "micro_batches_of"]


@dataclass(kw_only=True)
class ModelSource:
    """Tables, bounds and clock of a model's costs for one batch.

    Attributes:
        problem: What is planned for.
        batch: The batch, longest sequences first.
        simulates: True, as a step is timed by its simulation.
        asked: The kinds of tables that were asked for.
        bounds_s: Bounds in seconds of the tables that were offered.
        laid: Schedules whose plans were simulated, with these plans.
        flat: The bound of plans without stages and tensor blocks; None where no such plan holds
            the batch, or strategies are given.
    """

    problem: Problem
    batch: SortedBatch
    simulates: bool = True
    asked: set[TableKind] = field(default_factory=set)
    bounds_s: list[float] = field(default_factory=list)
    laid: list[tuple[Candidate, Plan]] = field(default_factory=list)
    _tables: dict[Hashable, PriceTable] = field(default_factory=dict)
    _groups: list[PriceTable] = field(default_factory=list)
    _given: list[tuple[Offer, Bound]] = field(default_factory=list)
    flat: Bound | None = None

    def __post_init__(self) -> None:
        """Make what is offered: the strategies that are listed; or, where none is, a table of the
        schemes without stages for each way to hold weights, less those that another dominates, and
        the bound of these."""
        problem, longest, index = self.problem, self.batch.tokens[0], self.batch.order[0]
        if problem.strategies:
            require_strategies(problem, problem.strategies, longest, index)
            self._given = list(self._listed())
            return
        require_fit(problem, longest, index)
        for weights in problem.holding:
            table = self._table(schemes := problem.pricing.groups(weights))
            if table is not None and any(_dominates(other, table) for other in self._groups):
                table = self._table(self._moving_less(schemes))
            if table is not None:
                self._groups.append(table)
        if self._groups:
            rows = BoundRows.joined([*map(BoundRows.of, self._groups)])
            self.flat = lower_bound(rows, problem.devices)

    def offers(self, kind: TableKind, best_s: Callable[[], float]) -> Iterator[Offer]:
        """The tables of a kind that promise something.

        Args:
            kind: Which tables.
            best_s: Gives the least seconds of computing so far.

        Yields:
            Each table when the last one has been drafted from, with the bound of its schedules.
        """
        self.asked.add(kind)
        if self.problem.strategies:
            yield from (offer for offer, _ in self._given if kind == "groups")
        elif kind == "one size":
            yield from (Offer(table=table, bound_s=self._low_s) for table in self._groups)
        elif kind == "groups":
            for table in self._groups:
                if self._promises(rows := BoundRows.of(table), best_s):
                    alone = len(self._groups) == 1
                    self.bounds_s.append(self._low_s if alone else self._about_s(rows))
                    yield Offer(table=table, bound_s=self._low_s)
        elif kind == "nested":
            for table in self._nested(best_s):
                yield Offer(table=table, bound_s=self._low_s)
        elif kind == "any scheme":
            yield from self._deeper(best_s)
        else:
            for weights in self.problem.holding:
                pricing = self.problem.pricing
                table = self._table([*pricing.groups(weights), *pricing.deeper(weights)])
                if table is not None:
                    yield Offer(table=table, bound_s=self._about_s(BoundRows.of(table)))

    @property
    def bound(self) -> Bound:
        """The bound of all plans that the tables asked for allow."""
        return replace(self._computing, sharded_s=self._sharded_s)

    @cached_property
    def _sharded_s(self) -> float:
        """The bound of plans of one group of all devices that move less as it shards weights."""
        problem, pricing = self.problem, self.problem.pricing
        if problem.strategies:
            schemes = [scheme for offer, _ in self._given for scheme in offer.table.schemes]
        elif "sharded" in problem.holding:
            schemes = [*pricing.groups("sharded"), *pricing.deeper("sharded")]
        else:
            return inf
        table = self._table(self._moving_less(schemes))
        if table is None:
            return inf
        return lower_bound(BoundRows.of(table), problem.devices).seconds

    def _moving_less(self, schemes: Sequence[PricedScheme]) -> list[PricedScheme]:
        """The schemes whose plans move less of the weights."""
        if self.problem.model.exchange_s.sharded_share == 1:
            return []
        return [one for one in schemes if one.shards_over(self.problem.devices)]

    @property
    def _computing(self) -> Bound:
        """The bound of the computations of all plans that the tables asked for allow."""
        if self._given:
            return min((bound for _, bound in self._given), key=lambda bound: bound.seconds)
        if self.flat is not None:
            if self.asked == {"one size"}:
                return self.flat
            if self.flat.seconds <= self._ideal.seconds * (1 + ENOUGH):
                return self._ideal
        pricing = self.problem.pricing
        deeper = [scheme for held in self.problem.holding for scheme in pricing.deeper(held)]
        rows = self._least([*map(BoundRows.of, self._groups)], deeper)
        return lower_bound(rows, self.problem.devices)

    def closer(self, bound: Bound, found: Sequence[Assignment]) -> Bound:
        """The same bound: no closer one is known for packed schedules."""
        return bound

    def latest_s(self, best: Assignment | None) -> float:
        """Seconds of computing from which on no step beats that of ``best`` or one that was
        simulated."""
        costs = self.problem.model
        if best is not None:
            self.timed(best)
        least_s = min((one.seconds for one, _ in self.laid), default=inf)
        least_s -= costs.exchange_s.update_s
        shared_s = exposed_s(costs) * costs.exchange_s.sharded_share
        return least_s - (shared_s if self._sharded_s + shared_s < least_s else exposed_s(costs))

    def least_s(self, schedule: Assignment) -> float:
        """Seconds that the step of a schedule takes at least, without the costs' scale."""
        moved = max(schedule.table.moved[k] for k, _, _ in schedule.groups)
        return schedule.seconds + exposed_s(self._costs) * moved

    def timed(self, schedule: Assignment) -> Candidate:
        """A schedule with the seconds of its simulated step, without the costs' scale."""
        known = next((one for one, _ in self.laid if one.schedule is schedule), None)
        if known is None:
            plan = laid_out(schedule, self._costs, larger_last=_larger_last(schedule))
            known = Candidate(schedule=schedule, seconds=plan.predicted_s)
            self.laid.append((known, plan))
        return known

    def plan(self, best: Candidate, bound: Bound, previous: Plan | None) -> Plan:
        """The plan of the best candidate, with the costs' scale, smoothed by the plan of the step
        before where the problem says so."""
        made = next(plan for one, plan in self.laid if one is best)
        if previous is not None and self.problem.smoothing > 0:
            made = smoothed(self.problem, made, previous)
        bound_s, scale = step_bound_s(self._costs, bound), self.problem.model.scale
        assert bound_s <= made.predicted_s * (1 + 1e-9), "a bound is below every plan"
        return made.replace(
            predicted_s=made.predicted_s * scale,
            lower_bound_s=min(bound_s, made.predicted_s) * scale,
        )

    @cached_property
    def _costs(self) -> CostModel:
        """The model's costs without their scale."""
        return self.problem.model.replace(scale=1.0)

    @cached_property
    def _ideal(self) -> Bound:
        """What no plan beats, whatever its layers, degrees and memory."""
        problem = self.problem
        depth = problem.model.shape.layers
        whole = [_whole_model(problem, p, depth) for p in problem.group_sizes]
        return lower_bound(BoundRows.of_models(self.batch, whole), problem.devices)

    @property
    def _low_s(self) -> float:
        """Seconds of computing that no plan of groups beats."""
        return self._ideal.seconds if self.flat is None else self.flat.seconds

    def _table(self, schemes: Sequence[PricedScheme]) -> PriceTable | None:
        """The table of prices of given schemes, made once; None where none holds the longest
        sequence."""
        longest = self.batch.tokens[0]
        if not any(scheme.most_tokens >= longest for scheme in schemes):
            return None
        key = tuple((scheme.scheme, scheme.weights, id(scheme.frontier)) for scheme in schemes)
        if key not in self._tables:
            costs = self.problem.model
            self._tables[key] = PriceTable(
                self.batch,
                schemes,
                self.problem.devices,
                exchange=costs.exchange_s,
                unhidden=sum(costs.shape.bucket_shares[:2]),
            )
        return self._tables[key]

    def _promises(self, rows: BoundRows, best_s: Callable[[], float]) -> bool:
        """Whether the bound of these schemes is below the best so far; of what comes first,
        always."""
        if not self.bounds_s:
            return True
        return best_s() < inf and allows(rows, self.problem.devices, best_s())

    def _about_s(self, rows: BoundRows) -> float:
        """The bound of some schemes in seconds, to 0.1 %."""
        return lower_bound(rows, self.problem.devices, close=1e-3).seconds

    def _nested(self, best_s: Callable[[], float]) -> Iterator[PriceTable]:
        """Tables for ranks that work in groups of several sizes: all of them with replicated
        weights; with shards one size or two, as a rank holds the shards of every size in which it
        works."""
        problem, pricing = self.problem, self.problem.pricing
        sizes, costs = problem.group_sizes, problem.model
        replicated = self._table(pricing.nested("replicated", sizes))
        if replicated is not None:
            yield replicated
        alone = self._table(pricing.groups("sharded"))
        if alone is None or "sharded" not in problem.holding:
            return
        rows = BoundRows.of(alone)
        if not self._promises(rows, best_s):
            return
        for pair in combinations(sizes, 2):
            if pair[-1] % pair[0] or (
                costs.held_bytes(pair, "sharded") >= costs.held_bytes(pair, "replicated")
            ):
                continue
            # With less memory for each size they are no quicker than if ranks had one size alone.
            own = [k for k, width in enumerate(alone.width) if width in pair]
            if not own or not self._promises(rows.only(own), best_s):
                continue
            table = self._table(pricing.nested("sharded", pair))
            if table is None or (replicated is not None and _dominates(replicated, table)):
                continue
            if self._promises(BoundRows.of(table), best_s):
                yield table

    def _deeper(self, best_s: Callable[[], float]) -> Iterator[Offer]:
        """Tables of all schemes whose bound is below that of groups, where memory makes a
        difference: where the bound of groups is above one that knows no memory."""
        if self.flat is not None and self.flat.seconds <= self._ideal.seconds * (1 + ENOUGH):
            return
        pricing, groups_s = self.problem.pricing, min(self.bounds_s, default=inf)
        for weights in self.problem.holding:
            table = self._table([*pricing.groups(weights), *pricing.deeper(weights)])
            if table is None or not self._promises(rows := BoundRows.of(table), best_s):
                continue
            self.bounds_s.append(self._about_s(rows))
            if self.bounds_s[-1] < groups_s:
                yield Offer(table=table, bound_s=self.bounds_s[-1])

    def _least(self, rows: list[BoundRows], schemes: Sequence[PricedScheme]) -> BoundRows:
        """Rows of the bound with those of more ``schemes``: of schemes with stages, what all stages
        take together."""
        single = [scheme for scheme in schemes if scheme.stages is None]
        deep = [scheme.stages for scheme in schemes if scheme.stages is not None]
        staged = [least for stages in deep for least in stages.least]
        if single:
            rows.append(BoundRows.of(PriceTable(self.batch, single, self.problem.devices)))
        if staged:
            rows.append(BoundRows.of_models(self.batch, staged))
        assert rows, "some scheme holds the longest sequence"
        return BoundRows.joined(rows)

    def _listed(self) -> Iterator[tuple[Offer, Bound]]:
        """A table with its bound for each strategy that the problem lists, by how weights are
        held."""
        problem, pricing = self.problem, self.problem.pricing
        for strategy in dict.fromkeys(problem.strategies):
            for weights in problem.holding:
                table = self._table(pricing.strategy(strategy, weights) or ())
                if table is None:
                    continue
                counts = dict(strategy.counts)
                most = [counts[scheme.scheme] for scheme in table.schemes]
                bound = lower_bound(self._least([], table.schemes), strategy.devices)
                yield Offer(table=table, bound_s=bound.seconds, most=most), bound


def _larger_last(schedule: Assignment) -> bool:
    """Whether ranks work in several groups and would send gradients sooner with the larger ones
    last."""
    used = sum(len(ranks) for _, ranks, _ in schedule.groups)
    if used == len({rank for _, ranks, _ in schedule.groups for rank in ranks}):
        return False
    turned_s = expected_s(schedule.table, schedule.groups[::-1], schedule.packs[::-1])
    return turned_s < schedule.expected_s


def _dominates(table: PriceTable, beaten: PriceTable) -> bool:
    """Whether every sequence is at least as quick by ``table`` as by ``beaten`` on each size, and
    both have the same sizes."""
    if table.width != beaten.width:
        return False
    pairs = (
        (table.alone, beaten.alone),
        (table.work, beaten.work),
        (table.spread, beaten.spread),
    )
    return all(bool((here <= there).all()) for here, there in pairs)


def _whole_model(problem: Problem, width: int, depth: int) -> Least:
    """The least that micro-batches take on stages of ``width`` ranks in a pipeline of ``depth``
    stages, whatever the memory: with the best layer options, and no fetching of weights."""
    known = problem.ideals
    if width not in known:
        costs = problem.model.replace(scale=1.0)
        layers, ends = costs.shape.layers, costs.ends[width]
        rows = []
        for option in problem.options[width]:
            cost = costs.option(width, option)
            q = (cost.forward + cost.backward) * layers + ends.forward + ends.backward
            rows.append((q.a, q.b, q.c))
        quick = worth_keeping(np.array(rows), np.full(len(rows), float(MOST_TOKENS)))
        whole = Frontier.of_rows([rows[i] for i in quick.tolist()], MOST_TOKENS)
        known[width] = Least(width=width, depth=depth, alone=whole, dealt=(whole,))
    return known[width]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setup:
    """A pipeline of a plan with its micro-batches in order.

    Attributes:
        pipeline: The pipeline.
        bins: Positions of the sequences of each micro-batch.
        rows: The row of its scheme's frontier of each.
    """

    pipeline: Pipeline
    bins: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]


def laid_out(schedule: Assignment, costs: CostModel, *, larger_last: bool = False) -> Plan:
    """Make a schedule a plan, with the seconds that the simulator predicts, and no bound yet.

    Args:
        schedule: The schedule, of a table of a model's costs.
        costs: These costs, without their scale.
        larger_last: Whether ranks work in larger groups after smaller ones, not before.

    Returns:
        The plan.
    """
    table = schedule.table
    batch, groups = table.batch, list(zip(schedule.groups, schedule.packs, strict=True))
    pipelines, micro_batches = list[Pipeline](), list[MicroBatch]()
    groups = groups[::-1] if larger_last else groups
    ends = _pipeline_ends([ranks for (_, ranks, _), _ in groups])
    for ((k, ranks, _), packed), (first, last) in zip(groups, ends, strict=True):
        priced = table.schemes[k]
        if priced.stages is not None:
            setup = _set_up(priced, ranks, packed, batch, costs)
        else:
            setup = _plain(priced, ranks, packed, first=first, last=last)
        number = len(pipelines)
        micro_batches += micro_batches_of(priced, setup.bins, setup.rows, number, batch, costs)
        pipelines.append(setup.pipeline)
    weights = {table.schemes[k].weights for k, _, _ in schedule.groups}
    plan = Plan(
        lengths=batch.lengths,
        devices=table.devices,
        working="sharded" if "sharded" in weights else "replicated",
        pipelines=tuple(pipelines),
        micro_batches=tuple(micro_batches),
        predicted_s=0.0,
        lower_bound_s=0.0,
    )
    return plan.replace(predicted_s=step_s(plan, costs))


def micro_batches_of(
    priced: PricedScheme,
    bins: Sequence[Sequence[int]],
    rows: Sequence[int],
    pipeline: int,
    batch: SortedBatch,
    costs: CostModel,
) -> Iterator[MicroBatch]:
    """The micro-batches of a plan for one pipeline.

    Args:
        priced: The pipeline's scheme.
        bins: Positions of the sequences of each micro-batch.
        rows: The row of the scheme's frontier of each.
        pipeline: The pipeline's number in the plan.
        batch: The batch.
        costs: The model's costs.

    Yields:
        The micro-batches in order.
    """
    for members, row in zip(bins, rows, strict=True):
        layers = priced.layer_plan(row) or LayerPlan()
        yield MicroBatch(
            pipeline=pipeline,
            sequences=tuple([batch.order[i] for i in members]),
            layers=layers,
            order=priced.order_of(row, costs),
        )


def _pipeline_ends(groups: Sequence[tuple[int, ...]]) -> list[tuple[bool, bool]]:
    """For each of ``groups`` of ranks, which run in this order, whether it is the first of some
    rank, and whether it is the last of some rank."""
    first, last = dict[int, int](), dict[int, int]()
    for number, ranks in enumerate(groups):
        for rank in ranks:
            first.setdefault(rank, number)
            last[rank] = number
    firsts, lasts = set(first.values()), set(last.values())
    return [(number in firsts, number in lasts) for number in range(len(groups))]


def _plain(
    priced: PricedScheme, ranks: tuple[int, ...], packed: Packed, *, first: bool, last: bool
) -> _Setup:
    """A pipeline of one stage with its micro-batches longest first, or with the longest last where
    it is the ``last`` of some rank, or not the ``first`` of any: its backward hides pushes."""
    pipeline = Pipeline(scheme=priced.scheme, ranks=ranks)
    if len(packed.bins) == 1:
        return _Setup(pipeline=pipeline, bins=packed.bins, rows=packed.rows)
    order = _falling(packed)
    if last or not first:
        order = [*order[1:], order[0]]
    return _Setup(
        pipeline=pipeline,
        bins=tuple(packed.bins[j] for j in order),
        rows=tuple(packed.rows[j] for j in order),
    )


def _falling(packed: Packed) -> list[int]:
    """The numbers of micro-batches by their seconds, longest first."""
    times, bins = packed.times, packed.bins
    return sorted(range(len(bins)), key=lambda j: (-times[j], bins[j]))


def _set_up(
    priced: PricedScheme,
    ranks: tuple[int, ...],
    packed: Packed,
    batch: SortedBatch,
    costs: CostModel,
) -> _Setup:
    """The quickest shares of layers for micro-batches longest first, then the quickest order of
    these: shortest first, or the longest in the middle, so that short ones fill and drain the
    pipeline."""
    assert priced.stages is not None, "asked only of pipelines with stages"
    falling = _falling(packed)
    orders = [falling, falling[::-1], [*falling[1::2][::-1], *falling[::2]]]
    made = [
        (*_timed_orders(priced, stages, ranks, packed, falling, batch, costs), stages)
        for stages in priced.stages.variants()
    ]
    best_s, best, stages = min(made, key=lambda item: item[0])
    for order in orders[1:] if len(falling) > 1 else ():
        seconds, tried = _timed_orders(priced, stages, ranks, packed, order, batch, costs)
        if seconds < best_s:
            best_s, best = seconds, tried
    assert best_s < inf, "micro-batches of the same layers fit in any order"
    return best


def _timed_orders(
    priced: PricedScheme,
    stages: StageCosts,
    ranks: tuple[int, ...],
    packed: Packed,
    order: Sequence[int],
    batch: SortedBatch,
    costs: CostModel,
) -> tuple[float, _Setup]:
    """(seconds, set-up) of a pipeline with stages alone on its ranks, with its micro-batches in an
    ``order``; infinite seconds where they do not fit the memory in it."""
    bins = tuple(packed.bins[j] for j in order)
    rows = _quickened(stages, bins, [packed.rows[j] for j in order], batch)
    pipeline = Pipeline(scheme=priced.scheme, ranks=ranks, shares=stages.shares)
    setup = _Setup(pipeline=pipeline, bins=bins, rows=rows)
    held = [sum([batch.tokens[i] for i in own]) for own in bins]
    if not stages.fits(list(zip(held, rows, strict=True))):
        return inf, setup
    return step_s(_alone(priced, setup, batch, costs), costs), setup


def _alone(priced: PricedScheme, setup: _Setup, batch: SortedBatch, costs: CostModel) -> Plan:
    """The plan of one pipeline with its sequences only."""
    held = sorted(i for members in setup.bins for i in members)
    place = {i: at for at, i in enumerate(held)}
    lengths = Lengths(tokens=tuple(batch.tokens[i] for i in held))
    own = SortedBatch.of(lengths)
    at = {index: position for position, index in enumerate(own.order)}
    bins = [[at[place[i]] for i in members] for members in setup.bins]
    return Plan(
        lengths=lengths,
        devices=costs.cluster.devices,
        working=priced.weights,
        pipelines=(setup.pipeline,),
        micro_batches=tuple(micro_batches_of(priced, bins, setup.rows, 0, own, costs)),
        predicted_s=0.0,
        lower_bound_s=0.0,
    )


def _quickened(
    stages: StageCosts, bins: Sequence[Sequence[int]], rows: Sequence[int], batch: SortedBatch
) -> tuple[int, ...]:
    """The rows of micro-batches in this order, given ``rows`` that fit: made quicker where the
    stages have memory for all that is in flight, the largest gains first."""
    held = [sum([batch.tokens[i] for i in own]) for own in bins]
    squares = [float(sum([batch.tokens[i] ** 2 for i in own])) for own in bins]
    table = stages.seconds(np.array(squares), np.array(held, dtype=np.float64))
    chosen = list(rows)
    over = table - table[np.arange(len(rows)), chosen][:, None]
    gains = sorted((float(over[j, other]), j, other) for j, other in np.argwhere(over < 0).tolist())
    done = set[int]()
    for _, j, other in gains:
        if j not in done:
            tried = [*chosen[:j], other, *chosen[j + 1 :]]
            if stages.fits(list(zip(held, tried, strict=True))):
                chosen[j] = other
                done.add(j)
    return tuple(chosen)
