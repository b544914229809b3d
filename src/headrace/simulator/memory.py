"""Predicted peak bytes of every rank."""

from __future__ import annotations

from headrace.costs.cost_model import CostModel
from headrace.simulator.clock import check_costs
from headrace.spec.plan import Plan

__all__ = ["peak_bytes"]


def peak_bytes(plan: Plan, costs: CostModel) -> tuple[int, ...]:
    """Peak bytes of each rank over one step of ``plan``.

    A rank holds its state always, the working weights of every group size in which it works from
    the pull to the push, and the activations of one micro-batch at a time. A rank without work
    holds its state. Raises CostError for a scheme without costs.
    """
    check_costs(plan, costs)
    sizes: list[set[int]] = [set() for _ in range(plan.devices)]
    for micro in plan.micro_batches:
        ranks = plan.pipelines[micro.pipeline].ranks
        for rank in ranks:
            sizes[rank].add(len(ranks))
    peaks = [costs.state_bytes + costs.held_bytes(held, plan.working) for held in sizes]
    for micro in plan.micro_batches:
        ranks = plan.pipelines[micro.pipeline].ranks
        tokens, size = sum(plan.tokens_of(micro)), len(ranks)
        for held in {frozenset(sizes[rank]) for rank in ranks}:
            peak = costs.micro_batch_bytes(tokens, size, micro.layers, plan.working, held)
            for rank in ranks:
                if sizes[rank] == held:
                    peaks[rank] = max(peaks[rank], peak)
    return tuple(peaks)
