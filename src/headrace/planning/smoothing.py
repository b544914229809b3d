"""Keeping the layers of the step before where others would hardly be quicker.

ParaDySe's fifth optimization: a change of methods or levels from step to step gives the allocator
other shapes, whose memory it keeps beside the old. So a layer plan of the last step's plan stays
where it fits and takes at most ``1 + smoothing`` times the best one's seconds. A plan is then at
most that much slower, which may cost it its lead over a static one. Nothing is remembered here:
the last plan is given, so a run that goes on from a file plans as if it had never stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.planning.problem import Arena, Problem
from headrace.spec import LayerPlan, Plan

__all__ = ["smoothed"]


def smoothed(problem: Problem, arena: Arena, plan: Plan, before: Plan) -> Plan:
    """``plan``, made in ``arena``, with layers of the plan ``before`` where the problem's
    smoothing allows."""
    micro_batches = []
    for micro in plan.micro_batches:
        p = len(plan.pipelines[micro.pipeline].ranks)
        layers = _kept(problem, arena, p, plan.tokens_of(micro), micro.layers, before)
        order = problem.costs.order_of(p, layers)
        micro_batches.append(replace(micro, layers=layers, order=order))
    kept = sum(
        new.layers != old.layers for new, old in zip(micro_batches, plan.micro_batches, strict=True)
    )
    if not kept:
        return plan
    reason = f"keeps layers of the step before in {kept} of {len(micro_batches)} micro-batches"
    return plan.replace(micro_batches=tuple(micro_batches), why=(*plan.why, reason))


def _kept(
    problem: Problem, arena: Arena, p: int, tokens: Sequence[int], best: LayerPlan, before: Plan
) -> LayerPlan:
    """The quickest layer plan for a micro-batch of ``tokens`` on p ranks that was used on p ranks
    before and is within the limit; ``best`` when there is none."""
    costs, working = problem.costs, arena.working

    def seconds(layers: LayerPlan) -> float:
        return sum(costs.micro_batch_s(tokens, p, layers, working))

    limit_s = seconds(best) * (1 + problem.smoothing)
    found = [
        layers
        for layers in _used(before, p)
        if problem.allows(p, layers)
        and costs.max_tokens(p, layers, working, arena.sizes) >= sum(tokens)
        and seconds(layers) <= limit_s
    ]
    return min(found, key=seconds, default=best)


def _used(before: Plan, p: int) -> list[LayerPlan]:
    """The layer plans of the micro-batches on p ranks, each once."""
    return list(
        dict.fromkeys(
            micro.layers
            for micro in before.micro_batches
            if len(before.pipelines[micro.pipeline].ranks) == p
        )
    )
