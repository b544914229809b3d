"""Plans a batch by the formula: with published costs, which know nothing of weights, and in
lockstep, where weights are gathered layer by layer and there is nothing else to hide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.costs import CostModel
from headrace.costs.pipeline_costs import PipelineCosts
from headrace.errors import InfeasiblePlan
from headrace.planning.baselines import BASELINES
from headrace.planning.batch import PriceTable, SortedBatch
from headrace.planning.bounds import Bound, BoundRows, lower_bound
from headrace.planning.exact_waves import MOST_SEQUENCES
from headrace.planning.explain import require_lockstep
from headrace.planning.generators import Draft, SearchLimits, nested, scheduled, side_by_side
from headrace.planning.problem import Problem
from headrace.planning.published import require_held
from headrace.planning.schedule import Assignment
from headrace.planning.wave_bounds import wave_bound_s
from headrace.planning.waves import waves
from headrace.spec import LayerPlan, MicroBatch, Pipeline, Plan, Scheme
from headrace.units import percent_text, seconds_text

__all__ = ["FormulaSearch", "bounded", "formula_table", "plan_of", "reasons"]


def formula_table(problem: Problem, batch: SortedBatch) -> PriceTable:
    """The table of a batch. Raises InfeasiblePlan when its longest sequence fits no scheme."""
    longest, index = batch.tokens[0], batch.order[0]
    if problem.is_published:
        schemes = problem.published_schemes
        require_held(problem.published, schemes, problem.devices, longest, index)
    else:
        schemes = problem.pricing.lockstep()
        require_lockstep(problem, longest, index)
    return PriceTable(batch, schemes, problem.devices)


def bounded(table: PriceTable) -> Bound:
    """The bound of a table's plans."""
    return lower_bound(BoundRows.of(table), table.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaSearch:
    """The search for the plan of one batch, timed by the formulas of its schemes."""

    problem: Problem
    batch: SortedBatch
    seed: int
    limits: SearchLimits

    def plan(self) -> Plan:
        """Plan the batch, as :func:`headrace.planning.planner.plan` says."""
        table = formula_table(self.problem, self.batch)
        others = self.problem.others
        low = bound = bounded(table)
        if self.problem.apart and others is None:
            rows = BoundRows.of(table)
            bound = lower_bound(rows, table.devices, apart=True, known_s=low.seconds)
        found = self._static(table) if others is None else self._others(table, others)
        searched = self.problem.planner != "static" and others is None
        found = self._found(table, low, found) if searched else found
        bound = self._closer(table, bound, found)
        if searched and len(table.tokens) <= self.limits.few:
            found = self._tried(table, bound, found)
        made = plan_of(found[0], bound)
        if not self.problem.is_published:
            made = _with_model(made, self.problem.model, found[0])
        name = self.problem.planner
        if self.problem.static_size is not None:
            name = f"static-cp{self.problem.static_size}"
        return made.replace(planner=name, seed=self.seed, why=reasons(found, bound))

    def _static(self, table: PriceTable) -> list[Assignment]:
        """The best schedule with groups of one size; of ``static_size`` where it is given."""
        size, semantics = self.problem.static_size, self.problem.semantics
        if size is not None:
            some = [scheme for scheme in table.schemes if scheme.devices == size]
            if not some or some[0].most_tokens < table.tokens[0]:
                raise InfeasiblePlan(
                    f"sequence {self.batch.order[0]} of {table.tokens[0]:,} tokens does not fit",
                    got=f"groups of {size}",
                    wanted="a size that holds it",
                )
            table = PriceTable(self.batch, some, table.devices)
        made = BASELINES["best-static"].schedules(table, semantics, self.seed)
        return [] if made is None else [made]

    def _others(self, table: PriceTable, name: str) -> list[Assignment]:
        """Schedules of the baseline that the problem names."""
        made = BASELINES[name].tried([table], self.problem.semantics, self.seed)
        if not made:
            raise InfeasiblePlan(
                f"sequence {self.batch.order[0]} of {table.tokens[0]:,} tokens does not fit",
                got=f"planner {name}",
                wanted="a group size that holds it",
            )
        return made

    def _found(self, table: PriceTable, low: Bound, found: list[Assignment]) -> list[Assignment]:
        """The schedules that are there and those of the search, the quickest first."""
        if self.problem.semantics == "free":
            return self._free(table, low.seconds, found)
        made = waves(table, low.seconds, seed=self.seed)
        every = [*found, *([] if made is None else [made])]
        return sorted(every, key=lambda schedule: schedule.seconds)

    def _closer(self, table: PriceTable, bound: Bound, found: list[Assignment]) -> Bound:
        """The tighter bound of waves, where the best plan is far above ``bound`` and ranks have so
        many sequences that prices tell something; of few sequences the best plan itself."""
        if self._is_exact(table) and found:
            return replace(bound, seconds=found[0].seconds, exact=True)
        many = len(table.tokens) >= self.limits.loose_each * table.devices
        loose_s = bound.seconds * (1 + self.limits.loose)
        lockstep = self.problem.semantics == "lockstep" and not any(table.staged)
        if not (lockstep and many and found and found[0].seconds > loose_s):
            return bound
        seconds = wave_bound_s(table, bound.seconds, found[0].seconds)
        return replace(bound, seconds=seconds, by_wave=seconds > bound.seconds)

    def _is_exact(self, table: PriceTable) -> bool:
        """Whether the search compares all plans."""
        adaptive = self.problem.planner == "adaptive"
        lockstep = self.problem.semantics == "lockstep" and not any(table.staged)
        return adaptive and lockstep and len(table.tokens) <= MOST_SEQUENCES

    def _free(self, table: PriceTable, low_s: float, found: list[Assignment]) -> list[Assignment]:
        """Schedules whose groups start when their ranks are free. Nested groups come first, as
        nearly always they are quicker; of the fewest sequences all drafts are packed, as what is
        filled in a longer time may be packed in a shorter."""
        count, limits, drafts, known = len(table.tokens), self.limits, list[Draft](), False
        high_s = min((one.seconds for one in found), default=low_s * (1 + count))
        if self.problem.nests:
            most_s = high_s if count > limits.few else float("inf")
            drafts += nested(table, low_s, most_s, limits=limits)
            if drafts and count > limits.few:
                found = scheduled(drafts, found, low_s, limits)
                drafts, high_s, known = list[Draft](), found[0].seconds, True
        if high_s > low_s * (1 + limits.enough):
            drafts += side_by_side(
                table,
                low_s,
                high_s,
                limits=limits,
                known=known,
                exchanges=not known or count <= limits.few,
            )
        return scheduled(drafts, found, low_s, limits) if drafts or not known else found

    def _tried(self, table: PriceTable, bound: Bound, found: list[Assignment]) -> list[Assignment]:
        """Add schedules of others' planners whose bound is below the best: of few sequences any of
        them may win, by up to 5 %."""
        best_s = min((one.seconds for one in found), default=float("inf"))
        of_pipelines = isinstance(self.problem.costs, PipelineCosts)
        for name, baseline in BASELINES.items():
            if best_s <= bound.seconds * (1 + self.limits.enough):
                break
            if name == "switching" or of_pipelines != baseline.staged:
                continue
            if baseline.least_s(table) < best_s:
                made = baseline.schedules(table, self.problem.semantics, self.seed)
                if made is not None:
                    found = [*found, made]
                    best_s = min(best_s, made.seconds)
        return sorted(found, key=lambda schedule: schedule.seconds)


def plan_of(schedule: Assignment, bound: Bound) -> Plan:
    """The plan of a schedule, timed by the formula."""
    table, batch = schedule.table, schedule.table.batch
    numbers: dict[tuple[Scheme, tuple[int, ...]], int] = {}
    micro_batches = list[MicroBatch]()
    for (k, ranks, _), packed in zip(schedule.groups, schedule.packs, strict=True):
        number = numbers.setdefault((table.schemes[k].scheme, ranks), len(numbers))
        micro_batches += [
            MicroBatch(
                pipeline=number,
                layers=LayerPlan(),
                sequences=tuple([batch.order[i] for i in members]),
            )
            for members in packed.bins
        ]
    return Plan(
        lengths=batch.lengths,
        devices=table.devices,
        pipelines=tuple(Pipeline(scheme=scheme, ranks=ranks) for scheme, ranks in numbers),
        micro_batches=tuple(micro_batches),
        predicted_s=schedule.seconds,
        lower_bound_s=min(bound.seconds, schedule.seconds),
        semantics=schedule.semantics,
    )


def _with_model(plan: Plan, costs: CostModel, schedule: Assignment) -> Plan:
    """The plan with the layers of a model's costs, the update's seconds and their scale."""
    schemes, rows = schedule.table.schemes, [row for own in schedule.packs for row in own.rows]
    kinds = [
        k for (k, _, _), own in zip(schedule.groups, schedule.packs, strict=True) for _ in own.rows
    ]
    micro_batches = tuple(
        replace(
            micro,
            layers=schemes[k].layer_plan(row) or LayerPlan(),
            order=schemes[k].order_of(row, costs),
        )
        for micro, k, row in zip(plan.micro_batches, kinds, rows, strict=True)
    )
    update_s = costs.exchange_s.update_s
    return plan.replace(
        micro_batches=micro_batches,
        working="sharded",
        predicted_s=(plan.predicted_s + update_s) * costs.scale,
        lower_bound_s=(plan.lower_bound_s + update_s) * costs.scale,
    )


def reasons(found: Sequence[Assignment], bound: Bound) -> tuple[str, ...]:
    """What binds, who is busiest, what the best static schedule and the next strategy would
    take."""
    best, table = found[0], found[0].table
    gap = percent_text(_over(best.seconds, bound.seconds))
    binds = "the longest sequence is quicker nowhere"
    if bound.exact:
        binds = "no plan of so few sequences is quicker: all were compared"
    elif bound.by_wave:
        binds = (
            "on few devices the longest sequences make a wave longer than what fits into memory "
            "beside them, on many devices they take more device-seconds"
        )
    elif not bound.by_longest:
        binds = (
            f"all sequences on the schemes that need the fewest devices keep {table.devices} busy "
            "so long"
        )
    texts = [f"bound {seconds_text(bound.seconds)}, {gap} above it: {binds}"]
    last = max(range(len(best.packs)), key=lambda g: best.packs[g].seconds)
    k, _, members = best.groups[last]
    texts.append(
        f"the busiest pipeline is a {table.schemes[k]}: {_several(len(members), 'sequence', 's')}"
        f" in {_several(len(best.packs[last].bins), 'micro-batch', 'es')}, the longest of "
        f"{table.tokens[min(members)]:,} tokens"
    )
    static = next((one for one in found if one.source == "static"), None)
    if static is best:
        texts.append("the best static plan")
    elif static is not None:
        ratio = 1 + _over(static.seconds, best.seconds)
        texts.append(f"best static: {static.names}, {seconds_text(static.seconds)} ({ratio:.3g}x)")
    others = (one for one in found if one.strategy != best.strategy and one is not static)
    other = next(others, None)
    if other is not None:
        over = _over(other.seconds, best.seconds)
        more = f"+{percent_text(over)}" if over >= _SAME else "as fast"
        texts.append(f"next strategy: {other.names}, {seconds_text(other.seconds)} ({more})")
    idle = table.devices - len({rank for _, ranks, _ in best.groups for rank in ranks})
    if idle:
        texts.append(f"{idle} devices are idle: no scheme that helps is small enough")
    return tuple(texts)


_SAME = 1e-5
"""Smallest relative difference of seconds that is shown."""


def _over(seconds: float, least_s: float) -> float:
    return seconds / least_s - 1 if least_s else 0.0


def _several(count: int, what: str, ending: str) -> str:
    return f"{count:,} {what}{ending if count != 1 else ''}"
