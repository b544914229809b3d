"""Costs of which everything follows by hand: a layer takes one second per token forward and two
backward, keeps ten bytes per token and needs three more in passing; the ends cost nothing."""

from __future__ import annotations

from itertools import accumulate

from headrace.costs import CostModel, ExchangeCost, Linear, OptionCost, Quadratic, synthetic_costs
from headrace.simulator import simulate, step_s
from headrace.spec import (
    LayerPlan,
    Lengths,
    MicroBatch,
    Pipeline,
    Plan,
    Row,
    Scheme,
    Timeline,
    check_programs,
    compile_plan,
)
from headrace.spec.program import pushes_of

__all__ = ["arrivals_of", "pipeline_of", "rows_of_plan", "timeline_of", "unit_costs"]


def unit_costs(
    devices: int, layers: int, *, pull_s: float = 0.0, push_s: float = 0.0, update_s: float = 0.0
) -> CostModel:
    """The costs for ranks that work alone and in pairs, which are as fast as one rank."""
    layer = OptionCost(
        forward=Quadratic(b=1.0),
        backward=Quadratic(b=2.0),
        kept=Linear(slope=10.0),
        transient=Linear(slope=3.0),
    )
    ends = OptionCost(forward=Quadratic(), backward=Quadratic(), kept=Linear(), transient=Linear())
    return synthetic_costs(devices, layers).replace(
        options={1: {"local": layer}, 2: {"local": layer}},
        ends={1: ends, 2: ends},
        gather_s={},
        working_bytes={p: {"replicated": 0, "sharded": 0} for p in (1, 2)},
        exchange_s=ExchangeCost(pull_s=pull_s, push_s=push_s, update_s=update_s),
    )


def pipeline_of(sizes: list[int], stages: int, layers: int, width: int = 1) -> Plan:
    """One pipeline with a micro-batch of one sequence for each of ``sizes``."""
    scheme = Scheme(context=width, pipeline=stages)
    return Plan(
        lengths=Lengths.of(sizes),
        devices=scheme.devices,
        pipelines=(Pipeline(scheme=scheme, ranks=tuple(range(scheme.devices))),),
        micro_batches=tuple(
            MicroBatch(pipeline=0, sequences=(i,), layers=LayerPlan.parse(f"{layers}*local"))
            for i in range(len(sizes))
        ),
        predicted_s=0.0,
        lower_bound_s=0.0,
    )


def arrivals_of(costs: CostModel) -> list[float]:
    """When the weights of each bucket are there."""
    shape = costs.shape
    elements = [sum(x) for x in zip(shape.split_elements, shape.whole_elements, strict=True)]
    pull_s = costs.exchange_s.pull_s * costs.scale
    return [pull_s * count / sum(elements) for count in accumulate(elements)]


def timeline_of(plan: Plan, costs: CostModel) -> Timeline:
    """The simulated timeline, of which everything that must always hold is checked."""
    count = costs.shape.bucket_count
    programs = compile_plan(plan, count)
    check_programs(programs, plan, count)
    timeline = simulate(programs, plan, costs)
    assert timeline.source == "predicted"
    actions = [(p.rank, action) for p in programs for action in p.actions]
    wanted = [(rank, str(action)) for rank, action in actions if action.kind != "push"]
    wanted += [(rank, f"G{b}") for rank, action in actions for b in pushes_of(action)]
    found = [(row.rank, row.action) for row in timeline.rows]
    assert sorted(found) == sorted(wanted), "a row for all it does, as the executor writes them"
    assert abs(timeline.seconds - step_s(plan, costs)) <= 1e-9 * timeline.seconds
    return timeline


def rows_of_plan(plan: Plan, costs: CostModel) -> dict[tuple[int, str], Row]:
    """The rows by rank and action."""
    return {(row.rank, row.action): row for row in timeline_of(plan, costs).rows}
