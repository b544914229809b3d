"""Plans a batch with published costs: by the formula, as nothing is known of weights."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.planning.batch import Batch, PriceTable
from headrace.planning.bounds import Bound, BoundRows, lower_bound
from headrace.planning.generators import Limits, nested, scheduled, side_by_side
from headrace.planning.problem import Problem
from headrace.planning.published import require_held
from headrace.planning.schedule import Schedule
from headrace.planning.static import best_static
from headrace.spec import LayerPlan, MicroBatch, Pipeline, Plan
from headrace.units import percent_text, seconds_text

__all__ = ["PublishedSearch", "plan_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSearch:
    """One batch being planned."""

    problem: Problem
    batch: Batch
    seed: int
    limits: Limits

    def plan(self) -> Plan:
        """See :func:`headrace.planning.planner.plan`."""
        problem, batch = self.problem, self.batch
        schemes = problem.published_schemes
        costs = problem.published
        require_held(costs, schemes, problem.devices, batch.tokens[0], batch.order[0])
        table = PriceTable(batch, schemes, problem.devices)
        bound = lower_bound(BoundRows.of(table), problem.devices)
        found = self._schedules(table, bound)
        made = plan_of(found[0], bound)
        return made.replace(
            planner=problem.planner, seed=self.seed, why=_reasons(found, bound),
        )  # fmt: skip

    def _schedules(self, table: PriceTable, bound: Bound) -> list[Schedule]:
        """Schedules, the quickest first."""
        problem, limits, low_s = self.problem, self.limits, bound.seconds
        static = best_static(table)
        found = [] if static is None else [static]
        if problem.planner == "static":
            return found
        high_s = static.seconds if static is not None else float("inf")
        if high_s == float("inf"):
            high_s = low_s * len(table.tokens)
        drafts = list(
            side_by_side(table, low_s, high_s, seed=self.seed, limits=limits)
        )  # fmt: skip
        high_s = min([high_s, *(draft.seconds for draft in drafts)])
        if problem.nests and high_s > low_s * (1 + limits.enough):
            drafts += nested(table, low_s, high_s, seed=self.seed, limits=limits)
        return scheduled(drafts, found, low_s, limits)


def plan_of(schedule: Schedule, bound: Bound) -> Plan:
    """The plan of a schedule, timed by the formula."""
    batch = schedule.table.batch
    pipelines, micro_batches = list[Pipeline](), list[MicroBatch]()
    for number, ((k, ranks, _), packed) in enumerate(
        zip(schedule.groups, schedule.packs, strict=True)
    ):
        pipelines.append(Pipeline(scheme=schedule.table.schemes[k].scheme, ranks=ranks))
        micro_batches += [
            MicroBatch(
                pipeline=number, layers=LayerPlan(),
                sequences=tuple([batch.order[i] for i in members]),
            )
            for members in packed.bins
        ]  # fmt: skip
    return Plan(
        lengths=batch.lengths, devices=schedule.table.devices, pipelines=tuple(pipelines),
        micro_batches=tuple(micro_batches), predicted_s=schedule.seconds,
        lower_bound_s=min(bound.seconds, schedule.seconds),
    )  # fmt: skip


def _reasons(found: list[Schedule], bound: Bound) -> tuple[str, ...]:
    """What binds, who is last, what the best static schedule and the next strategy would take."""
    best, table = found[0], found[0].table
    gap = percent_text(best.seconds / bound.seconds - 1)
    binds = "the longest sequence is quicker nowhere"
    if not bound.by_longest:
        binds = (
            f"all sequences on the schemes that need the fewest devices keep {table.devices} busy "
            "so long"
        )
    texts = [f"bound {seconds_text(bound.seconds)}, {gap} above it: {binds}"]
    last = max(range(len(best.packs)), key=lambda g: best.packs[g].seconds)
    k, _, members = best.groups[last]
    texts.append(
        f"the busiest pipeline is a {table.schemes[k]} with {len(members)} sequences in "
        f"{len(best.packs[last].bins)} micro-batches, the longest of "
        f"{table.tokens[min(members)]:,} tokens"
    )
    static = next((one for one in found if one.source == "static"), None)
    if static is not None and static is not best:
        ratio = static.seconds / best.seconds
        texts.append(f"best static: {static.names}, {seconds_text(static.seconds)} ({ratio:.3g}x)")
    other = next((one for one in found if one.strategy != best.strategy and one is not static), None)
    if other is not None:
        over = percent_text(other.seconds / best.seconds - 1)
        texts.append(f"next strategy: {other.names}, {seconds_text(other.seconds)} (+{over})")
    idle = table.devices - len({rank for _, ranks, _ in best.groups for rank in ranks})
    if idle:
        texts.append(f"{idle} devices are idle: no scheme that helps is small enough")
    return tuple(texts)
