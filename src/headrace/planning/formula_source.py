"""What a search needs of published costs, and of a model's costs in lockstep: one table of prices,
bounds, and a formula for the step.

Published costs know nothing of weights. In lockstep weights are gathered layer by layer, which the
prices have, and there is nothing else to hide. So a step takes what computing takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from headrace.costs import CostModel
from headrace.planning.batch import PriceTable, SortedBatch
from headrace.planning.bounds import Bound, BoundRows, lower_bound
from headrace.planning.exact_waves import MOST_SEQUENCES
from headrace.planning.explain import Candidate, require_lockstep
from headrace.planning.generators import Offer, TableKind
from headrace.planning.problem import Problem
from headrace.planning.published import require_held
from headrace.planning.schedule import Assignment
from headrace.planning.tolerances import NEAR
from headrace.planning.wave_bounds import wave_bound_s
from headrace.spec import LayerPlan, MicroBatch, Pipeline, Plan, Scheme

__all__ = ["FormulaSource", "bounded", "formula_table", "plan_of"]


@dataclass(slots=True, kw_only=True)
class FormulaSource:
    """Table, bounds and clock of costs by formula for one batch.

    Attributes:
        problem: What is planned for.
        batch: The batch, longest sequences first.
        simulates: False, as a schedule is timed when it is packed.
        flat: None: no bound is known of only those plans that have no stages and tensor blocks.
        table: The prices.

    ``_table_bound`` is the bound of the table alone, to which :attr:`bound` adds what pipelines
    that share no device imply.
    """

    problem: Problem
    batch: SortedBatch
    simulates: bool = False
    flat: Bound | None = None
    table: PriceTable = field(init=False)
    _table_bound: Bound = field(init=False)

    def __post_init__(self) -> None:
        self.table = formula_table(self.problem, self.batch)
        self._table_bound = bounded(self.table)

    def offers(self, kind: TableKind, best_s: Callable[[], float]) -> Iterator[Offer]:
        """The one table, where the costs and the semantics have tables of this kind.

        Args:
            kind: Which tables.
            best_s: Gives the least seconds of computing so far.

        Yields:
            The table with the bound of its schedules, or nothing.
        """
        exists = kind != "groups" and (kind != "nested" or self.problem.nests)
        if exists:
            yield Offer(table=self.table, bound_s=self._table_bound.seconds)

    @property
    def bound(self) -> Bound:
        """Seconds that no plan of the table beats."""
        if not self.problem.apart or self.problem.others is not None:
            return self._table_bound
        rows = BoundRows.of(self.table)
        return lower_bound(rows, self.table.devices, apart=True, known_s=self._table_bound.seconds)

    def closer(self, bound: Bound, found: Sequence[Assignment]) -> Bound:
        """A bound at least as close as ``bound``, given packed schedules, the quickest first. Of
        few sequences in lockstep the best plan is known exactly; of many the closer bound of waves
        is worked out where the quickest schedule is far above ``bound``."""
        table, problem = self.table, self.problem
        if problem.semantics != "lockstep" or any(table.staged) or not found:
            return bound
        if problem.planner == "adaptive" and len(table.tokens) <= MOST_SEQUENCES:
            # Waves of so few sequences come from a dynamic program, so the quickest is the best.
            by_program = any(schedule.source == "waves" for schedule in found)
            return replace(bound, seconds=found[0].seconds, exact=True) if by_program else bound
        crowded = len(table.tokens) > table.devices  # with fewer the other bound is hardly closer
        if not crowded or found[0].seconds <= bound.seconds * (1 + 2 * NEAR):
            return bound
        seconds = wave_bound_s(table, bound.seconds, found[0].seconds)
        return replace(bound, seconds=seconds, by_wave=seconds > bound.seconds)

    def latest_s(self, best: Assignment | None) -> float:
        """Seconds of computing from which on a schedule is of no use beside ``best``: here those of
        ``best`` itself, as nothing else takes time."""
        return float("inf") if best is None else best.seconds

    def least_s(self, schedule: Assignment) -> float:
        """Seconds that the step of a schedule takes: those of computing."""
        return schedule.seconds

    def timed(self, schedule: Assignment) -> Candidate:
        """A schedule with the seconds of its step, which are those of computing."""
        return Candidate(schedule=schedule, seconds=schedule.seconds)

    def late_s(self, schedule: Assignment) -> tuple[float, ...]:
        """Empty: schedules know what published costs say."""
        return ()

    def plan(self, best: Candidate, bound: Bound, previous: Plan | None) -> Plan:
        """The plan of the best candidate. With a model's costs its micro-batches get layers, and
        its seconds the update and the costs' scale; published costs know none of these."""
        made = plan_of(best.schedule, bound)
        if self.problem.is_published:
            return made
        return _with_model(made, self.problem.model, best.schedule)


def formula_table(problem: Problem, batch: SortedBatch) -> PriceTable:
    """The price table of a batch: of published schemes, or of a model's groups in lockstep. Raises
    InfeasiblePlan when the batch's longest sequence fits no scheme."""
    longest, index = batch.tokens[0], batch.order[0]
    if problem.is_published:
        schemes = problem.published_schemes
        require_held(problem.published, schemes, problem.devices, longest, index)
    else:
        schemes = problem.pricing.lockstep()
        require_lockstep(problem, longest, index)
    return PriceTable(batch, schemes, problem.devices)


def bounded(table: PriceTable) -> Bound:
    """The lower bound of all plans of a table."""
    return lower_bound(BoundRows.of(table), table.devices)


def plan_of(schedule: Assignment, bound: Bound) -> Plan:
    """The plan of a schedule, timed by the formula. Groups of the same scheme and ranks are one
    pipeline."""
    table, batch = schedule.table, schedule.table.batch
    # The number of each pipeline in the plan, by its scheme and ranks.
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
    """The plan with what a model's costs know besides: layers and token order of each micro-batch,
    the seconds of the update, and the costs' scale."""
    schemes = schedule.table.schemes
    # By micro-batch: the row of the frontier by which it is priced, and the number of its scheme.
    rows = [row for packed in schedule.packs for row in packed.rows]
    scheme_numbers = [
        k
        for (k, _, _), packed in zip(schedule.groups, schedule.packs, strict=True)
        for _ in packed.rows
    ]
    micro_batches = tuple(
        replace(
            micro,
            layers=schemes[k].layer_plan(row) or LayerPlan(),
            order=schemes[k].order_of(row, costs),
        )
        for micro, k, row in zip(plan.micro_batches, scheme_numbers, rows, strict=True)
    )
    update_s = costs.exchange_s.update_s
    return plan.replace(
        micro_batches=micro_batches,
        working="sharded",
        predicted_s=(plan.predicted_s + update_s) * costs.scale,
        lower_bound_s=(plan.lower_bound_s + update_s) * costs.scale,
    )
