"""The seconds of a step without its rows: what planners ask for many plans.

A plan without stages has a closed form. Micro-batches run in the plan's order, each when all ranks
of its group are free. One that starts before all weights are there waits for them segment by
segment; in the last one of each rank the gradients of a segment are complete when it ends. With
stages the programs are walked, of one rank per stage: the first has the most rows of every
message, so none of the others is later.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.costs.cost_model import CostModel
from headrace.simulator.exchange import arrivals, push_ends
from headrace.simulator.seconds import micro_batch_seconds, segments_of
from headrace.simulator.walk import Walk
from headrace.spec.compiler import compile_rank
from headrace.spec.plan import MicroBatch, Plan
from headrace.spec.stage import Stage

__all__ = ["step_s"]


def step_s(plan: Plan, costs: CostModel) -> float:
    """Predicted seconds of the whole step: the end of what
    :func:`headrace.simulator.simulate` gives for the plan's programs."""
    if any(pipeline.scheme.pipeline > 1 for pipeline in plan.pipelines):
        return _staged_s(plan, costs)
    runs = _runs(plan, costs)
    buckets = costs.shape.bucket_count
    issued = [0.0] * buckets
    # Latest first: a rank that ends before all of another's pushes are issued changes nothing.
    for index in sorted(_last_of_ranks(plan), key=lambda index: -runs[index][1]):
        if runs[index][1] > min(issued):
            _push(plan, plan.micro_batches[index], runs[index], costs, issued)
    order = [(bucket, issued[bucket]) for bucket in reversed(range(buckets))]
    ends = push_ends(costs, order)
    last_s = max(ends[-1], arrivals(costs)[-1], *(end_s for _, end_s in runs), 0.0)
    return last_s + costs.exchange_s.update_s * costs.scale


def _runs(plan: Plan, costs: CostModel) -> list[tuple[float, float]]:
    """When the backward of each micro-batch starts, and ends."""
    free, there = [0.0] * plan.devices, arrivals(costs)
    runs: list[tuple[float, float]] = []
    seconds = micro_batch_seconds(plan, costs)
    for micro, (forward_s, backward_s) in zip(plan.micro_batches, seconds, strict=True):
        ranks = plan.pipelines[micro.pipeline].ranks
        now_s = max(free[rank] for rank in ranks)
        if now_s < there[-1]:
            stage = _only_stage(plan, micro, costs)
            for bucket, (segment_s, _) in enumerate(segments_of(plan, micro, stage, costs)):
                now_s = max(now_s, there[bucket]) + segment_s
        else:
            now_s += forward_s
        runs.append((now_s, now_s + backward_s))
        for rank in ranks:
            free[rank] = now_s + backward_s
    return runs


def _only_stage(plan: Plan, micro: MicroBatch, costs: CostModel) -> Stage:
    return plan.pipelines[micro.pipeline].stages(costs.shape.layers)[0]


def _last_of_ranks(plan: Plan) -> set[int]:
    """The last micro-batch of every rank that has one."""
    last = {
        rank: index
        for index, micro in enumerate(plan.micro_batches)
        for rank in plan.pipelines[micro.pipeline].ranks
    }
    return set(last.values())


def _push(
    plan: Plan, micro: MicroBatch, run: tuple[float, float], costs: CostModel, issued: list[float]
) -> None:
    """Note when the gradients of a rank's last micro-batch are complete, bucket by bucket."""
    segments, now_s = segments_of(plan, micro, _only_stage(plan, micro, costs), costs), run[0]
    for bucket in reversed(range(len(issued))):
        now_s += segments[bucket][1]
        issued[bucket] = max(issued[bucket], now_s)


def _staged_s(plan: Plan, costs: CostModel) -> float:
    count = costs.shape.bucket_count
    programs = [compile_rank(plan, rank, count) for rank in _walkers(plan, costs)]
    return Walk(programs, plan, costs, recorded=False).run()


def _walkers(plan: Plan, costs: CostModel) -> Sequence[int]:
    """The ranks that work, of stages only the first one."""
    ranks: set[int] = set()
    for index in {micro.pipeline for micro in plan.micro_batches}:
        pipeline = plan.pipelines[index]
        if pipeline.scheme.pipeline > 1:
            ranks |= {s.ranks[0] for s in pipeline.stages(costs.shape.layers)}
        else:
            ranks |= set(pipeline.ranks)
    return sorted(ranks) or [0]
