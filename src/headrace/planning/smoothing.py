"""Keeping the layers of the step before where others would hardly be quicker.

ParaDySe's fifth optimization: a change of methods or levels from step to step gives the allocator
other shapes, whose memory it keeps beside the old. So a layer plan of the last step's plan stays
where it fits and takes at most ``1 + smoothing`` times the best one's seconds. A plan is then at
most that much slower, which may cost it its lead over a static one. Nothing is remembered here:
the last plan is given, so a run that goes on from a file plans as if it had never stopped.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.planning.problem import Problem
from headrace.simulator import step_s
from headrace.spec import LayerPlan, MicroBatch, Plan

__all__ = ["smoothed"]


def smoothed(problem: Problem, plan: Plan, before: Plan) -> Plan:
    """``plan``, timed anew, whose micro-batches take layer plans of the plan ``before`` where these
    are slower than their own by at most the share ``problem.smoothing``. Micro-batches of pipelines
    with tensor blocks or stages stay as they are."""
    sizes, micro_batches = _sizes(plan), list[MicroBatch]()
    for micro in plan.micro_batches:
        scheme = plan.pipelines[micro.pipeline].scheme
        if scheme.context < scheme.devices:  # it has tensor blocks or stages
            micro_batches.append(micro)
            continue
        layers = _kept(problem, plan, micro, sizes[micro.pipeline], before)
        order = problem.model.order_of(scheme.devices, layers)
        micro_batches.append(replace(micro, layers=layers, order=order))
    changed = sum(
        new.layers != old.layers for new, old in zip(micro_batches, plan.micro_batches, strict=True)
    )
    if not changed:
        return plan
    reason = f"keeps layers of the step before in {changed} of {len(micro_batches)} micro-batches"
    smooth = plan.replace(micro_batches=tuple(micro_batches), why=(*plan.why, reason))
    return smooth.replace(predicted_s=step_s(smooth, problem.model.replace(scale=1.0)))


def _sizes(plan: Plan) -> list[set[int]]:
    """For each pipeline, all group sizes in which any of its ranks works."""
    of_rank: dict[int, set[int]] = {}
    for pipeline in plan.pipelines:
        for rank in pipeline.ranks:
            of_rank.setdefault(rank, set()).add(len(pipeline.ranks))
    return [set[int]().union(*(of_rank[rank] for rank in p.ranks)) for p in plan.pipelines]


def _kept(
    problem: Problem, plan: Plan, micro: MicroBatch, sizes: set[int], before: Plan
) -> LayerPlan:
    """The layer plan for a micro-batch: the quickest of those that the plan ``before`` used on as
    many ranks, if one fits and is within the smoothing's limit; else its own. ``sizes`` are the
    group sizes in which its ranks work."""
    costs, tokens = problem.model, plan.tokens_of(micro)
    p = len(plan.pipelines[micro.pipeline].ranks)
    own_s = sum(costs.micro_batch_s(tokens, p, micro.layers, plan.working))
    best, best_s = micro.layers, own_s * (1 + problem.smoothing)
    # Of equal seconds layers of the plan before win over the micro-batch's own.
    from_before = False
    for layers in _used(before, p):
        if not problem.allows(p, layers):
            continue
        if costs.max_tokens(p, layers, plan.working, sizes) >= sum(tokens):
            seconds = sum(costs.micro_batch_s(tokens, p, layers, plan.working))
            if seconds < best_s or (seconds == best_s and not from_before):
                best, best_s, from_before = layers, seconds, True
    return best


def _used(before: Plan, p: int) -> list[LayerPlan]:
    """The different layer plans of the micro-batches of the plan ``before`` that run on ``p``
    ranks."""
    return list(
        dict.fromkeys(
            micro.layers
            for micro in before.micro_batches
            if len(before.pipelines[micro.pipeline].ranks) == p
        )
    )
