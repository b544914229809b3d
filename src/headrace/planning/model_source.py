"""What a search needs of a model's costs: tables of prices, bounds, and the simulated step.

A table is made for each way to hold weights: replicated or sharded. Tables are offered only while
their bound is below the best so far. A schedule becomes a plan here: its micro-batches get their
layers and their order, and the simulator says when the step ends.
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
from headrace.planning.priced import Least, PricedScheme, StageCosts, worth_keeping
from headrace.planning.problem import Problem
from headrace.planning.schedule import Assignment, expected_s
from headrace.planning.smoothing import smoothed
from headrace.planning.tolerances import NEAR
from headrace.simulator import (
    StagedPipeline,
    exposed_s,
    staged_pipeline,
    staged_steps_s,
    step_s,
)
from headrace.spec import LayerPlan, MicroBatch, Pipeline, Plan

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
        flat: The bound of only those plans that have neither stages nor tensor blocks (flat ones);
            None where no such plan holds the batch, or strategies are given.
    """

    problem: Problem
    batch: SortedBatch
    simulates: bool = True
    asked: set[TableKind] = field(default_factory=set)
    bounds_s: list[float] = field(default_factory=list)
    laid: list[tuple[Candidate, Plan]] = field(default_factory=list)
    _tables: dict[Hashable, PriceTable] = field(default_factory=dict)  # cache of :meth:`_table`
    _groups: list[PriceTable] = field(default_factory=list)  # of groups without stages
    # Groups without stages, none of which holds the longest sequence with its weights held so.
    _short: list[PricedScheme] = field(default_factory=list)
    _given: list[tuple[Offer, Bound]] = field(default_factory=list)  # of the listed strategies
    _staged: _StagedSetups = field(default_factory=dict)  # of all schedules timed so far
    flat: Bound | None = None

    def __post_init__(self) -> None:
        """Make the tables that are offered. Where the problem lists strategies: one for each. Else
        one of the groups without stages for each way to hold weights, without tables that another
        one dominates, and the bound ``flat`` of their plans."""
        problem, longest, index = self.problem, self.batch.tokens[0], self.batch.order[0]
        if problem.strategies:
            require_strategies(problem, problem.strategies, longest, index)
            self._given = list(self._listed())
            return
        require_fit(problem, longest, index)
        for weights in problem.holding:
            table = self._table(schemes := problem.pricing.groups(weights))
            if table is None:
                self._short += schemes
            # Of a dominated table only schemes that move fewer weights still have a use.
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
            yield from (Offer(table=table, bound_s=self._flat_s) for table in self._groups)
        elif kind == "groups":
            for table in self._groups:
                if self._promises(rows := BoundRows.of(table), best_s):
                    # With a single table its bound is that of all flat plans, known already.
                    alone = len(self._groups) == 1
                    self.bounds_s.append(self._flat_s if alone else self._about_s(rows))
                    yield Offer(table=table, bound_s=self._flat_s)
        elif kind == "nested":
            for table in self._nested(best_s):
                yield Offer(table=table, bound_s=self._flat_s)
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
        """The lower bound in seconds of computing of plans in which one group of all devices shards
        the weights, and which so move fewer of them; infinite where there is no such plan."""
        problem, pricing = self.problem, self.problem.pricing
        if problem.strategies:
            schemes = [scheme for offer, _ in self._given for scheme in offer.table.schemes]
        elif "sharded" in problem.holding:
            deeper = [*pricing.deeper("sharded"), *pricing.unlikely("sharded")]
            schemes = [*pricing.groups("sharded"), *deeper]
        else:
            return inf
        table = self._table(self._moving_less(schemes))
        if table is None:
            return inf
        return lower_bound(BoundRows.of(table), problem.devices).seconds

    def _moving_less(self, schemes: Sequence[PricedScheme]) -> list[PricedScheme]:
        """Those of ``schemes`` whose plans pull and push fewer weights, as one group of all devices
        shards them."""
        if self.problem.model.exchange_s.sharded_share == 1:
            return []
        return [scheme for scheme in schemes if scheme.shards_over(self.problem.devices)]

    @property
    def _computing(self) -> Bound:
        """The lower bound of computing of all plans that the tables asked for so far allow."""
        if self._given:
            return min((bound for _, bound in self._given), key=lambda bound: bound.seconds)
        if self.flat is not None:
            if self.asked == {"one size"}:
                return self.flat
            if self.flat.seconds <= self._ideal.seconds * (1 + ENOUGH):
                return self._ideal  # memory makes no difference: it bounds every scheme
        pricing, holding = self.problem.pricing, self.problem.holding
        deeper = [*self._short, *(scheme for held in holding for scheme in pricing.deeper(held))]
        rows = self._least([*map(BoundRows.of, self._groups)], deeper)
        bound = lower_bound(rows, self.problem.devices)
        every = self._least([rows], [u for held in holding for u in pricing.unlikely(held)], True)
        if not allows(every, self.problem.devices, bound.seconds):
            return bound  # schemes that never pay do not make it looser
        return lower_bound(every, self.problem.devices)

    def closer(self, bound: Bound, found: Sequence[Assignment]) -> Bound:
        """The same bound: no closer one is known for packed schedules."""
        return bound

    def latest_s(self, best: Assignment | None) -> float:
        """Seconds of computing from which on no schedule can have a quicker step than ``best`` has,
        which is simulated here, or any that was simulated before. A step takes at least what it
        computes, the update, and the moving of weights that nothing hides."""
        costs = self.problem.model
        if best is not None:
            self.timed(best)
        least_s = min((candidate.seconds for candidate, _ in self.laid), default=inf)
        least_s -= costs.exchange_s.update_s
        # Plans of one group of all devices move fewer weights. They count only where their bound
        # says that one of them may be quicker.
        sharded_exposed_s = exposed_s(costs) * costs.exchange_s.sharded_share
        if self._sharded_s + sharded_exposed_s < least_s:
            return least_s - sharded_exposed_s
        return least_s - exposed_s(costs)

    def least_s(self, schedule: Assignment) -> float:
        """Seconds that the step of a schedule takes at least, without the costs' scale."""
        # The share of all weights and gradients that moves.
        moved = max(schedule.table.moved[k] for k, _, _ in schedule.groups)
        return schedule.seconds + exposed_s(self._costs) * moved

    def timed(self, schedule: Assignment) -> Candidate:
        """A schedule with the seconds of its simulated step, without the costs' scale."""
        known = next((one for one, _ in self.laid if one.schedule is schedule), None)
        if known is None:
            larger_last = _larger_last(schedule)
            plan = laid_out(schedule, self._costs, larger_last=larger_last, known=self._staged)
            known = Candidate(schedule=schedule, seconds=plan.predicted_s)
            self.laid.append((known, plan))
        return known

    def late_s(self, schedule: Assignment) -> list[float]:
        """By how many seconds each pipeline of a schedule ends later on the clock, if it is alone,
        than the schedule estimates: of pipelines with stages, as others are estimated closely."""
        table, update_s = schedule.table, self.problem.model.exchange_s.update_s
        chosen = _staged_setups(schedule, self._costs, self._staged)
        return [
            0.0 if setup is None else setup.seconds - update_s - sum(table.times(k, packed))
            for setup, (k, _, _), packed in zip(
                chosen, schedule.groups, schedule.packs, strict=True
            )
        ]

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

    @property
    def _costs(self) -> CostModel:
        """The model's costs without their scale."""
        return self.problem.pricing.costs

    @cached_property
    def _ideal(self) -> Bound:
        """A bound that no plan beats, whatever its layers, degrees and memory."""
        problem = self.problem
        depth = problem.model.shape.layers
        whole = [_whole_model(problem, p, depth) for p in problem.group_sizes]
        return lower_bound(BoundRows.of_models(self.batch, whole), problem.devices)

    @property
    def _flat_s(self) -> float:
        """Seconds of computing that no plan of groups without stages and tensor blocks beats."""
        return self._ideal.seconds if self.flat is None else self.flat.seconds

    def _table(self, schemes: Sequence[PricedScheme]) -> PriceTable | None:
        """The price table of ``schemes`` for the batch, made once for each choice of schemes; None
        where none holds the longest sequence."""
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
                # The embedding's and the first layer's weights: no computation comes before them.
                unhidden=sum(costs.shape.bucket_shares[:2]),
            )
        return self._tables[key]

    def _promises(self, rows: BoundRows, best_s: Callable[[], float]) -> bool:
        """Whether schedules of the schemes with these bound rows may compute in less than the best
        so far; always True before the first table was offered."""
        if not self.bounds_s:
            return True
        return best_s() < inf and allows(rows, self.problem.devices, best_s())

    def _about_s(self, rows: BoundRows) -> float:
        """The lower bound of these rows in seconds, worked out to 0.1 % only, which is quicker."""
        return lower_bound(rows, self.problem.devices, close=1e-3).seconds

    def _nested(self, best_s: Callable[[], float]) -> Iterator[PriceTable]:
        """Tables for ranks that work in groups of several sizes within a step: of all sizes with
        replicated weights; of pairs of sizes with sharded weights, as a rank then holds the shards
        of every size in which it works."""
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
                continue  # sizes do not divide one another, or shards save no memory
            # With less memory for each size they are no quicker than if ranks had one size alone.
            of_pair = [k for k, width in enumerate(alone.width) if width in pair]
            if not of_pair or not self._promises(rows.only(of_pair), best_s):
                continue
            table = self._table(pricing.nested("sharded", pair))
            if table is None or (replicated is not None and _dominates(replicated, table)):
                continue
            if self._promises(BoundRows.of(table), best_s):
                yield table

    def _deeper(self, best_s: Callable[[], float]) -> Iterator[Offer]:
        """Tables of all schemes, tensor blocks and stages included, whose bound is below that of
        groups, and far enough below the best to pay for bubbles, which saves a tenth of the time
        of a plan of 8B. None are offered where memory makes no difference: where the bound
        of groups is about that of plans with unlimited memory."""
        if self.flat is not None and self.flat.seconds <= self._ideal.seconds * (1 + ENOUGH):
            return
        pricing, groups_s = self.problem.pricing, min(self.bounds_s, default=inf)
        for weights in self.problem.holding:
            table = self._table([*pricing.groups(weights), *pricing.deeper(weights)])
            if table is None or not self._promises(rows := BoundRows.of(table), best_s):
                continue
            self.bounds_s.append(self._about_s(rows))
            if self.bounds_s[-1] < min(groups_s, best_s() * (1 - NEAR)):
                yield Offer(table=table, bound_s=self.bounds_s[-1])

    def _least(
        self, rows: list[BoundRows], schemes: Sequence[PricedScheme], by_shape: bool = False
    ) -> BoundRows:
        """``rows`` of a bound joined with those of more ``schemes``, where asked only by their
        shape, which is looser and quick. A scheme with stages has the rows ``StageCosts.least`` of
        each split of its layers, what all its stages take together, as its stages may differ."""
        single = [scheme for scheme in schemes if scheme.stages is None]
        # Of one rank a stage both ways to hold weights are one scheme.
        deep = dict.fromkeys(scheme.stages for scheme in schemes if scheme.stages is not None)
        splits = [split.least for stages in deep for split in stages.variants]
        if single:
            rows.append(BoundRows.of(PriceTable(self.batch, single, self.problem.devices)))
        if staged := [least for least in splits if least.alone.most_tokens]:
            rows_of = BoundRows.of_shapes if by_shape else BoundRows.of_models
            rows.append(rows_of(self.batch, staged))
        assert rows, "some scheme holds the longest sequence"
        return BoundRows.joined(rows)

    def _listed(self) -> Iterator[tuple[Offer, Bound]]:
        """(table to draft from, its bound) for each strategy that the problem lists and each way to
        hold weights that it allows."""
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
    """Whether some ranks work in several groups, one after the other, and gradients would be sent
    sooner if the larger groups, which a schedule has first, ran last."""
    places = sum(len(ranks) for _, ranks, _ in schedule.groups)
    if places == len({rank for _, ranks, _ in schedule.groups for rank in ranks}):
        return False
    turned_s = expected_s(schedule.table, schedule.groups[::-1], schedule.packs[::-1])
    return turned_s < schedule.expected_s


def _dominates(table: PriceTable, beaten: PriceTable) -> bool:
    """Whether both tables have the same widths and every sequence is at least as quick on each by
    ``table`` as by ``beaten``."""
    if table.width != beaten.width:
        return False
    pairs = (
        (table.alone, beaten.alone),
        (table.work, beaten.work),
        (table.spread, beaten.spread),
    )
    return all(bool((ours <= theirs).all()) for ours, theirs in pairs)


def _whole_model(problem: Problem, width: int, depth: int) -> Least:
    """The least seconds of micro-batches on stages of ``width`` ranks in a pipeline of ``depth``
    stages, for all layers together, with the best layer options, unlimited memory, and no fetching
    of weights."""
    cache = problem.ideals
    if width not in cache:
        costs = problem.model.replace(scale=1.0)
        layers, ends = costs.shape.layers, costs.ends[width]
        rows = []
        for option in problem.options[width]:
            cost = costs.option(width, option)
            line = (cost.forward + cost.backward) * layers + ends.forward + ends.backward
            rows.append((line.a, line.b, line.c))
        total = np.array(rows)
        quick = worth_keeping(total, np.full(len(rows), float(MOST_TOKENS)))
        total = total[quick]
        caps, kept = [MOST_TOKENS] * len(total), np.zeros((len(total), 2))
        cache[width] = Least.of(width, depth, caps, total, total[None], kept)
    return cache[width]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setup:
    """How a pipeline does its micro-batches.

    Attributes:
        priced: The scheme, with the split of its layers among the stages.
        bins: Positions of the sequences of each micro-batch, in order.
        rows: For each micro-batch the number of the row of the scheme's frontier.
        seconds: Seconds of its step if it is alone on its ranks; 0 where there is one stage.
    """

    priced: PricedScheme
    bins: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]
    seconds: float = 0.0


_StagedSetups = dict[tuple[int, tuple[tuple[int, ...], ...]], _Setup]
"""The set-ups of pipelines with stages, by scheme (its id) and micro-batches."""


def laid_out(
    schedule: Assignment,
    costs: CostModel,
    *,
    larger_last: bool = False,
    known: _StagedSetups | None = None,
) -> Plan:
    """Make a schedule a plan, with the seconds that the simulator predicts, and no bound yet.

    Args:
        schedule: The schedule, of a table of a model's costs.
        costs: These costs, without their scale.
        larger_last: Whether ranks work in larger groups after smaller ones, not before.
        known: Set-ups of pipelines with stages that were chosen before; new ones are added.

    Returns:
        The plan.
    """
    table = schedule.table
    batch, pipelines, micro_batches = table.batch, list[Pipeline](), list[MicroBatch]()
    staged = _staged_setups(schedule, costs, {} if known is None else known)
    groups = list(zip(schedule.groups, schedule.packs, staged, strict=True))
    groups = groups[::-1] if larger_last else groups
    ends = _pipeline_ends([ranks for (_, ranks, _), _, _ in groups])
    for ((k, ranks, _), packed, chosen), (first, last) in zip(groups, ends, strict=True):
        number = len(pipelines)
        setup = chosen or _plain(table.schemes[k], packed, first=first, last=last)
        priced, stages = setup.priced, setup.priced.stages
        micro_batches += micro_batches_of(priced, setup.bins, setup.rows, number, batch, costs)
        shares = () if stages is None else stages.shares
        pipelines.append(Pipeline(scheme=priced.scheme, ranks=ranks, shares=shares))
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
        rows: For each micro-batch the number of the row of the scheme's frontier.
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
    """(is the first of some rank, is the last of some rank) for each of ``groups`` of ranks, which
    run in this order."""
    first_of_rank, last_of_rank = dict[int, int](), dict[int, int]()
    for number, ranks in enumerate(groups):
        for rank in ranks:
            first_of_rank.setdefault(rank, number)
            last_of_rank[rank] = number
    first_groups, last_groups = set(first_of_rank.values()), set(last_of_rank.values())
    return [(number in first_groups, number in last_groups) for number in range(len(groups))]


def _plain(priced: PricedScheme, packed: Packed, *, first: bool, last: bool) -> _Setup:
    """The micro-batches of a pipeline of a scheme with one stage, longest first. Where it is the
    ``last`` of some rank, or not the ``first`` of any, the longest comes last instead: its backward
    hides the push of gradients."""
    order = _falling(packed)
    if len(order) > 1 and (last or not first):
        order = [*order[1:], order[0]]
    return _Setup(
        priced=priced,
        bins=tuple(packed.bins[number] for number in order),
        rows=tuple(packed.rows[number] for number in order),
    )


def _falling(packed: Packed) -> list[int]:
    """Numbers of the micro-batches of a pipeline, those of the most seconds first."""
    times, bins = packed.times, packed.bins
    return sorted(range(len(bins)), key=lambda j: (-times[j], bins[j]))


def _staged_setups(
    schedule: Assignment, costs: CostModel, known: _StagedSetups
) -> list[_Setup | None]:
    """The set-up of each pipeline of a schedule, None where it has one stage. Those that are not
    ``known`` are chosen, and added to these."""
    table = schedule.table
    keys = [
        (id(table.schemes[k]), packed.bins) if table.staged[k] else None
        for (k, _, _), packed in zip(schedule.groups, schedule.packs, strict=True)
    ]
    unknown = {
        key: (table.schemes[k], packed)
        for key, (k, _, _), packed in zip(keys, schedule.groups, schedule.packs, strict=True)
        if key is not None and key not in known
    }
    if unknown:
        chosen = _quickest_setups([*unknown.values()], table.batch, costs)
        known.update(zip(unknown, chosen, strict=True))
    return [None if key is None else known[key] for key in keys]


def _quickest_setups(
    pipelines: Sequence[tuple[PricedScheme, Packed]], batch: SortedBatch, costs: CostModel
) -> list[_Setup]:
    """The quickest set-up found of each pipeline with stages, given its scheme and micro-batches.
    First the split of the layers is chosen, with micro-batches longest first; then, with it, their
    order: longest first, shortest first, or the longest in the middle, so that short ones fill and
    drain the pipeline."""
    tried = list[tuple[int, _Setup]]()  # with the number of the pipeline
    for number, (priced, packed) in enumerate(pipelines):
        order = _falling(packed)
        tried += [(number, _ordered(split, packed, order, batch)) for split in priced.splits]
    first = _quickest_of_each(tried, len(pipelines), batch, costs)
    again = list(enumerate(first))
    for number, (setup, (_, packed)) in enumerate(zip(first, pipelines, strict=True)):
        falling = _falling(packed)
        for order in (falling[::-1], [*falling[1::2][::-1], *falling[::2]]):
            if len(falling) > 1:
                again.append((number, _ordered(setup.priced, packed, order, batch)))
    return _quickest_of_each(again, len(pipelines), batch, costs)


def _ordered(
    priced: PricedScheme, packed: Packed, order: Sequence[int], batch: SortedBatch
) -> _Setup:
    """A pipeline with stages whose micro-batches run in ``order``, with layers as quick as memory
    allows; its seconds are infinite where they do not fit with this split of the layers, else still
    unknown."""
    bins = tuple(packed.bins[number] for number in order)
    rows = _quickest_rows(priced, bins, batch)
    if rows is None:
        return _Setup(priced=priced, bins=bins, rows=packed.rows, seconds=inf)
    return _Setup(priced=priced, bins=bins, rows=rows)


def _quickest_of_each(
    tried: Sequence[tuple[int, _Setup]], count: int, batch: SortedBatch, costs: CostModel
) -> list[_Setup]:
    """Of all set-ups ``tried``, with the numbers of their pipelines, the quickest of each of
    ``count`` pipelines, the first one where several are. Those whose seconds are not known are
    timed, all at once."""
    untimed = [at for at, (_, setup) in enumerate(tried) if not setup.seconds]
    clocked = list[StagedPipeline]()
    for _, setup in (tried[at] for at in untimed):
        priced = setup.priced
        layers = [priced.layer_plan(row) or LayerPlan() for row in setup.rows]
        pipeline = _stages_of(priced).pipeline
        clocked.append(
            staged_pipeline(costs, pipeline, priced.weights, batch.values, setup.bins, layers)
        )
    found = list(tried)
    for at, seconds in zip(untimed, staged_steps_s(clocked, costs), strict=True):
        number, setup = tried[at]
        found[at] = (number, replace(setup, seconds=seconds))
    best = dict[int, _Setup]()
    for number, setup in found:
        if number not in best or setup.seconds < best[number].seconds:
            best[number] = setup
    assert all(setup.seconds < inf for setup in best.values()), (
        "micro-batches of the same layers fit in any order"
    )
    return [best[number] for number in range(count)]


def _stages_of(priced: PricedScheme) -> StageCosts:
    """What the stages of a scheme take, which has several."""
    assert priced.stages is not None, "asked only of pipelines with stages"
    return priced.stages


def _quickest_rows(
    priced: PricedScheme, bins: Sequence[Sequence[int]], batch: SortedBatch
) -> tuple[int, ...] | None:
    """Rows of the micro-batches ``bins`` in their order, each by its number, as quick as the memory
    of the stages allows: each takes the quickest row of which as many as are in flight would fit;
    where those in flight together do not fit, the largest of them take thriftier ones; then those
    with the most to gain take quicker ones. None where a micro-batch fits no row."""
    stages, frontier = _stages_of(priced), priced.frontier
    tokens = [sum([batch.tokens[i] for i in members]) for members in bins]
    squares = [sum([batch.tokens[i] ** 2 for i in members]) for members in bins]
    if max(tokens) > frontier.most_tokens:
        return None
    best = [frontier.best(*sums) for sums in zip(squares, tokens, strict=True)]
    rows = np.array([row for _, row in filter(None, best)])
    held, thriftiest = np.array(tokens, dtype=np.float64), len(frontier.caps) - 1
    while (crowded := stages.crowded(held, rows)) is not None:
        largest = max((j for j in crowded if rows[j] < thriftiest), key=tokens.__getitem__)
        rows[largest] += 1
    stages.quicken(held, rows, stages.seconds(np.array(squares, dtype=np.float64), held))
    return tuple(rows.tolist())
