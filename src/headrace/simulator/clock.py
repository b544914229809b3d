"""The seconds of a step without its rows: what planners ask for many plans.

A plan without stages has a closed form. Micro-batches run in the plan's order, each when all ranks
of its group are free. One that starts before all weights are there waits for them segment by
segment, so its forward ends no sooner than the weights of any segment plus the segments from there
on; in the last one of each rank the gradients of a segment are complete when it ends. With stages
the programs are walked, of one rank per stage: the first has the most rows of every message, so
none of the others is later.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.costs.cost_model import CostModel
from headrace.costs.stages import segment_rows
from headrace.simulator.exchange import arrivals, push_ends
from headrace.simulator.seconds import check_costs
from headrace.simulator.walk import Walk
from headrace.spec.compiler import compile_rank
from headrace.spec.plan import Plan
from headrace.spec.scheme import Scheme

__all__ = ["micro_batch_seconds", "step_s"]

Floats = NDArray[np.float64]


def step_s(plan: Plan, costs: CostModel) -> float:
    """Predicted seconds of the whole step: the end of what
    :func:`headrace.simulator.simulate` gives for the plan's programs."""
    check_costs(plan, costs)
    if any(pipeline.scheme.pipeline > 1 for pipeline in plan.pipelines):
        return _staged_s(plan, costs)
    forward, backward = _segments(plan, costs)
    there = np.array(arrivals(costs))
    begins, ends = _runs(plan, forward, backward.sum(axis=1), there)
    last = _last_of_ranks(plan)
    buckets = len(there)
    issued = np.zeros(buckets)
    if last:
        complete = np.cumsum(backward[last][:, ::-1], axis=1)[:, ::-1]
        issued = (begins[last][:, None] + complete).max(axis=0)
    order = [(bucket, float(issued[bucket])) for bucket in reversed(range(buckets))]
    pushed = push_ends(costs, order)
    last_s = max(pushed[-1], float(there[-1]), float(ends.max(initial=0.0)), 0.0)
    return last_s + costs.exchange_s.update_s * costs.scale


def micro_batch_seconds(plan: Plan, costs: CostModel) -> tuple[float, ...]:
    """Predicted seconds of the forward and backward of each micro-batch over its stages, without
    waiting. Raises CostError for what the costs do not know."""
    check_costs(plan, costs)
    if not plan.micro_batches:
        return ()
    forward, backward = _segments(plan, costs)  # cut into stages the segments are the same
    return tuple((forward.sum(axis=1) + backward.sum(axis=1)).tolist())


def _segments(plan: Plan, costs: CostModel) -> tuple[Floats, Floats]:
    """Seconds of (forward, backward) of the segments of each micro-batch [micro-batches,
    buckets]."""
    tokens = np.array(plan.lengths.tokens, dtype=np.float64)
    counts = [len(micro.sequences) for micro in plan.micro_batches]
    held = tokens[[i for micro in plan.micro_batches for i in micro.sequences]]
    first = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)
    sums = np.stack(
        [np.add.reduceat(held**2, first), np.add.reduceat(held, first), np.ones(len(counts))]
    )
    schemes: dict[Scheme, int] = {}
    kinds = [schemes.setdefault(pipeline.scheme, len(schemes)) for pipeline in plan.pipelines]
    # By identity: hashing all layers of all micro-batches takes longer than the few repetitions.
    alike: dict[tuple[int, int], list[int]] = {}
    for number, micro in enumerate(plan.micro_batches):
        alike.setdefault((id(micro.layers), kinds[micro.pipeline]), []).append(number)
    forward = np.zeros((len(counts), costs.shape.bucket_count))
    backward = np.zeros_like(forward)
    for numbers in alike.values():
        micro = plan.micro_batches[numbers[0]]
        scheme = plan.pipelines[micro.pipeline].scheme
        rows, own = segment_rows(costs, scheme, micro.layers, plan.working), sums[:, numbers]
        forward[numbers], backward[numbers] = (rows[0] @ own).T, (rows[1] @ own).T
    return forward, backward


def _runs(plan: Plan, forward: Floats, backward_s: Floats, there: Floats) -> tuple[Floats, Floats]:
    """When the backward of each micro-batch starts, and ends."""
    rest = np.cumsum(forward[:, ::-1], axis=1)[:, ::-1]
    waited = (there + rest).max(axis=1).tolist()
    free, all_there = [0.0] * plan.devices, float(there[-1])
    begins, ends = list[float](), list[float]()
    for micro, forward_s, back_s, least_s in zip(
        plan.micro_batches, rest[:, 0].tolist(), backward_s.tolist(), waited, strict=True
    ):
        ranks = plan.pipelines[micro.pipeline].ranks
        now_s = max([free[rank] for rank in ranks])
        now_s = max(now_s + forward_s, least_s) if now_s < all_there else now_s + forward_s
        begins.append(now_s)
        ends.append(now_s + back_s)
        for rank in ranks:
            free[rank] = ends[-1]
    return np.array(begins), np.array(ends)


def _last_of_ranks(plan: Plan) -> list[int]:
    """The last micro-batch of every rank that has one."""
    last_of = {micro.pipeline: index for index, micro in enumerate(plan.micro_batches)}
    last: dict[int, int] = {}
    for pipeline, index in last_of.items():
        for rank in plan.pipelines[pipeline].ranks:
            last[rank] = max(index, last.get(rank, -1))
    return sorted(set(last.values()))


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
