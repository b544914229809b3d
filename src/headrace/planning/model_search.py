"""Plans a batch with a model's costs: schedules by computing, plans by the simulated step."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import inf

import numpy as np

from headrace.costs.cost_model import MOST_TOKENS
from headrace.planning.baselines import BASELINES
from headrace.planning.batch import PriceTable, SortedBatch
from headrace.planning.bounds import Bound, BoundRows, allows, lower_bound, step_bound_s
from headrace.planning.explain import Candidate, reasons, require_fit, require_strategies
from headrace.planning.generators import Draft, SearchLimits, nested, scheduled, side_by_side
from headrace.planning.priced import Frontier, Least, PricedScheme, worth_keeping
from headrace.planning.problem import Problem
from headrace.planning.schedule import Assignment, expected_s, laid_out
from headrace.planning.smoothing import smoothed
from headrace.planning.static import best_statics, static_schedule
from headrace.simulator import exposed_s
from headrace.spec import Plan

__all__ = ["ModelSearch"]

_CLOSE_ENOUGH = 1 + 2e-4  # up to this times the bound, the search ends


@dataclass(slots=True, kw_only=True)
class ModelSearch:
    """The search for the plan of one batch, timed by the simulated step.

    Attributes:
        problem: What is planned for.
        batch: The batch, longest sequences first.
        seed: The seed of drawn orders.
        limits: What the search may spend.
        found: Schedules that are packed.
        drafts: Drafts that are not packed yet.
        lows: Lower bounds, in seconds, of the tables that were searched.
        flat: The bound of plans without stages and tensor blocks.
        laid: Schedules whose plans were simulated.
        tables: Tables of prices made so far.
    """

    problem: Problem
    batch: SortedBatch
    seed: int
    limits: SearchLimits
    found: list[Assignment] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)
    lows: list[float] = field(default_factory=list)
    flat: Bound | None = None
    laid: list[Candidate] = field(default_factory=list)
    tables: dict[Hashable, PriceTable] = field(default_factory=dict)

    def plan(self, previous: Plan | None) -> Plan:
        """Plan the batch, as :func:`headrace.planning.planner.plan` says."""
        problem, batch = self.problem, self.batch
        if problem.strategies:
            require_strategies(problem, problem.strategies, batch.tokens[0], batch.order[0])
            bound = self._given()
        else:
            require_fit(problem, batch.tokens[0], batch.order[0])
            bound = self._free()
        return self._best(bound, previous)

    @property
    def best_s(self) -> float:
        """The least seconds of computing so far."""
        return min((one.seconds for one in (*self.found, *self.drafts)), default=inf)

    def _free(self) -> Bound:
        """The bound of any strategy that the problem allows; its drafts and schedules are added."""
        problem, pricing = self.problem, self.problem.pricing
        tables = [
            table
            for weights in problem.holding
            if (table := self._table(pricing.groups(weights))) is not None
        ]
        tables = [t for at, t in enumerate(tables) if not any(_rules(o, t) for o in tables[:at])]
        if problem.others is not None:
            self.found += BASELINES[problem.others].tried(tables, "free", self.seed)
            return self._bound(tables)
        self._static(tables)
        ideal = self._ideal()
        bound = self.flat = self._bound(tables) if tables else None
        if problem.planner == "static" and bound is not None:
            return bound
        low_s = ideal.seconds if bound is None else bound.seconds
        for table in tables:
            if self._promises(rows := BoundRows.of(table)):
                self.lows.append(low_s if len(tables) == 1 else self._low_s(rows))
                self._side_by_side(table, low_s)
        if problem.planner == "adaptive":
            for table in self._nests():
                if not self._close(low_s):
                    self.drafts += nested(table, low_s, self.best_s, limits=self.limits)
        if bound is not None and bound.seconds <= ideal.seconds * _CLOSE_ENOUGH:
            return ideal
        return self._deeper(tables)

    def _table(self, schemes: Sequence[PricedScheme]) -> PriceTable | None:
        """The table of prices of some schemes, made once; None where none holds the longest
        sequence."""
        longest = self.batch.tokens[0]
        if not any(scheme.most_tokens >= longest for scheme in schemes):
            return None
        key = tuple((scheme.scheme, scheme.weights, id(scheme.frontier)) for scheme in schemes)
        if key not in self.tables:
            moved, shares = self.problem.model.exchange_s, self.problem.model.shape.bucket_shares
            self.tables[key] = PriceTable(
                self.batch,
                schemes,
                self.problem.devices,
                pull_s=moved.pull_s,
                push_s=moved.push_s,
                unhidden=sum(shares[:2]),
            )
        return self.tables[key]

    def _close(self, low_s: float) -> bool:
        return self.best_s <= low_s * _CLOSE_ENOUGH

    def _promises(self, rows: BoundRows) -> bool:
        """Whether the bound of these schemes is below the best so far; of what comes first,
        always."""
        if not self.lows:
            return True
        return self.best_s < inf and allows(rows, self.problem.devices, self.best_s)

    def _low_s(self, rows: BoundRows) -> float:
        """The bound in seconds, to 0.1 %, of schemes that promise something."""
        return lower_bound(rows, self.problem.devices, close=1e-3).seconds

    def _static(self, tables: Sequence[PriceTable]) -> None:
        """Add schedules of one group size whose bound is below the best simulated step."""
        size = self.problem.static_size
        for table in tables:
            if size is None:
                self.found += best_statics(table, self._latest_s)
            elif size in table.width:
                made = static_schedule(table, table.width.index(size))
                self.found += [] if made is None else [made]

    def _latest_s(self, best: Assignment | None) -> float:
        """Seconds of computing from which on no step beats that of ``best`` or one that was
        simulated."""
        costs = self.problem.model
        if best is not None:
            self._laid_out(best)
        least_s = min((one.plan.predicted_s for one in self.laid), default=inf)
        return least_s - exposed_s(costs) - costs.exchange_s.update_s

    def _side_by_side(
        self,
        table: PriceTable,
        low_s: float,
        most: Sequence[int] | None = None,
        *,
        deeper: bool = False,
    ) -> None:
        if not self._close(low_s):
            self.drafts += side_by_side(
                table,
                low_s,
                self.best_s,
                limits=self.limits,
                most=most,
                deeper=deeper,
                known=bool(self.drafts) and most is None,
            )

    def _nests(self) -> Iterator[PriceTable]:
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
        if not self._promises(rows):
            return
        for few in combinations(sizes, 2):
            if few[-1] % few[0] or (
                costs.held_bytes(few, "sharded") >= costs.held_bytes(few, "replicated")
            ):
                continue
            # With less memory for each size they are no quicker than if ranks had one size alone.
            ones = [k for k, width in enumerate(alone.width) if width in few]
            table = (
                self._table(pricing.nested("sharded", few))
                if (ones and self._promises(rows.only(ones)))
                else None
            )
            if table is None or (replicated is not None and _rules(replicated, table)):
                continue
            if self._promises(BoundRows.of(table)):
                yield table

    def _bound(self, tables: Sequence[PriceTable]) -> Bound:
        rows = BoundRows.joined([*map(BoundRows.of, tables)])
        return lower_bound(rows, self.problem.devices)

    def _ideal(self) -> Bound:
        """What no plan beats, whatever its layers, degrees and memory."""
        problem = self.problem
        depth = problem.model.shape.layers
        whole = [_whole_model(problem, p, depth) for p in problem.group_sizes]
        return lower_bound(BoundRows.of_models(self.batch, whole), problem.devices)

    def _deeper(self, tables: Sequence[PriceTable]) -> Bound:
        """The bound with tensor blocks and stages too; their drafts are added."""
        problem, pricing = self.problem, self.problem.pricing
        some = list[PricedScheme]()
        groups_s = min(self.lows, default=inf)
        for weights in problem.holding:
            deeper = pricing.deeper(weights)
            table = self._table([*pricing.groups(weights), *deeper])
            some += deeper
            if table is None or not self._promises(rows := BoundRows.of(table)):
                continue
            self.lows.append(self._low_s(rows))
            if self.lows[-1] < groups_s:
                self._side_by_side(table, self.lows[-1], deeper=True)
        return lower_bound(self._least([*map(BoundRows.of, tables)], some), problem.devices)

    def _least(self, rows: list[BoundRows], some: Sequence[PricedScheme]) -> BoundRows:
        """Rows of the bound with those of some more schemes: of schemes with stages, what all take
        together."""
        single = [scheme for scheme in some if scheme.stages is None]
        staged = [scheme.stages.least for scheme in some if scheme.stages is not None]
        if single:
            rows.append(BoundRows.of(PriceTable(self.batch, single, self.problem.devices)))
        if staged:
            rows.append(BoundRows.of_models(self.batch, staged))
        assert rows, "some scheme holds the longest sequence"
        return BoundRows.joined(rows)

    def _given(self) -> Bound:
        """The bound of the strategies that the problem lists; their drafts are added."""
        problem, pricing = self.problem, self.problem.pricing
        bounds = list[Bound]()
        for strategy in dict.fromkeys(problem.strategies):
            for weights in problem.holding:
                schemes = pricing.strategy(strategy, weights)
                table = self._table(schemes or ())
                if table is None:
                    continue
                counts = dict(strategy.counts)
                most = [counts[scheme.scheme] for scheme in table.schemes]
                bound = lower_bound(self._least([], table.schemes), strategy.devices)
                bounds.append(bound)
                if bound.seconds < self.best_s:
                    self._side_by_side(table, bound.seconds, most)
        assert bounds
        assert self.drafts, "some strategy holds the longest sequence"
        return min(bounds, key=lambda bound: bound.seconds)

    def _best(self, bound: Bound, previous: Plan | None) -> Plan:
        """Simulate the most promising schedules and return the quickest plan, with its reasons."""
        problem, costs = self.problem, self.problem.model
        unscaled = costs.replace(scale=1.0)
        tried = list[Candidate]()
        for schedule in self._promising(bound):
            least_s = schedule.seconds + exposed_s(unscaled)
            known = schedule.source != "static" or any(map(_is_static, tried))
            if tried and known and least_s > min(one.plan.predicted_s for one in tried):
                continue
            tried.append(Candidate(schedule=schedule, plan=self._laid_out(schedule)))
        tried.sort(key=lambda one: (one.plan.predicted_s, not _is_static(one)))
        best = tried[0].plan
        if previous is not None and problem.smoothing > 0:
            best = smoothed(problem, best, previous)
        bound_s = step_bound_s(unscaled, bound.seconds)
        assert bound_s <= best.predicted_s * (1 + 1e-9), "a bound is below every plan"
        static = next(filter(_is_static, tried), None)
        return best.replace(
            predicted_s=best.predicted_s * costs.scale,
            lower_bound_s=min(bound_s, best.predicted_s) * costs.scale,
            planner=self._name(),
            seed=self.seed,
            why=(*reasons(problem, bound, tried, static, self.flat), *best.why),
        )

    def _laid_out(self, schedule: Assignment) -> Plan:
        """The plan of a schedule, without the costs' scale."""
        known = next((one.plan for one in self.laid if one.schedule is schedule), None)
        if known is None:
            costs = self.problem.model.replace(scale=1.0)
            known = laid_out(schedule, costs, larger_last=_larger_last(schedule))
            self.laid.append(Candidate(schedule=schedule, plan=known))
        return known

    def _name(self) -> str:
        size = self.problem.static_size
        return self.problem.planner if size is None else f"static-cp{size}"

    def _promising(self, bound: Bound) -> list[Assignment]:
        """The schedules to simulate: the quickest by computing, and the best static one."""
        if self.problem.planner == "static" or self.problem.others is not None:
            return sorted(self.found, key=lambda schedule: schedule.seconds)
        self.found = scheduled(self.drafts, self.found, bound.seconds, self.limits)
        first, *rest = self.found
        return [first, *(one for one in rest if one.source == "static")]


def _is_static(candidate: Candidate) -> bool:
    return candidate.schedule.source == "static"


def _larger_last(schedule: Assignment) -> bool:
    """Whether some ranks work in several groups and would send gradients sooner with the larger
    ones last."""
    used = sum(len(ranks) for _, ranks, _ in schedule.groups)
    if used == len({rank for _, ranks, _ in schedule.groups for rank in ranks}):
        return False
    turned_s = expected_s(schedule.table, schedule.groups[::-1], schedule.packs[::-1])
    return turned_s < schedule.expected_s


def _rules(one: PriceTable, other: PriceTable) -> bool:
    """Whether every sequence is at least as quick on each size by ``one``, which has all sizes."""
    if one.width != other.width:
        return False
    pairs = (one.alone, other.alone), (one.work, other.work), (one.spread, other.spread)
    return all(bool((here <= there).all()) for here, there in pairs)


def _whole_model(problem: Problem, width: int, depth: int) -> Least:
    """The least that micro-batches take on stages of a width, whatever the memory: with every layer
    option, and no fetching of weights."""
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
        known[width] = Least(width=width, depth=depth, alone=whole, dealt=whole)
    return known[width]
