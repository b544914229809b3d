"""Seconds of the micro-batches of a plan, and when the ranks are free again."""

from __future__ import annotations

from headrace.costs.cost_model import CostModel
from headrace.errors import CostError
from headrace.spec.plan import Plan

__all__ = ["check_costs", "finish_times", "micro_batch_seconds", "step_s"]


def check_costs(plan: Plan, costs: CostModel) -> None:
    """Raise CostError when ``plan`` uses a scheme for which ``costs`` have no answer."""
    for pipeline in plan.pipelines:
        scheme = pipeline.scheme
        if scheme.context != scheme.devices or scheme.context not in costs.options:
            known = ", ".join(f"cp{p}" for p in costs.group_sizes)
            raise CostError(f"costs of {scheme}", got="none", hint=f"known are {known}")


def micro_batch_seconds(plan: Plan, costs: CostModel) -> list[tuple[float, float]]:
    """Seconds of (forward, backward) of each micro-batch, in the plan's order."""
    check_costs(plan, costs)
    return [
        costs.micro_batch_s(
            plan.tokens_of(micro),
            len(plan.pipelines[micro.pipeline].ranks),
            micro.layers,
            plan.working,
        )
        for micro in plan.micro_batches
    ]


def finish_times(plan: Plan, costs: CostModel) -> list[float]:
    """When each rank has done its micro-batches, in seconds since the step began.

    A micro-batch starts when all ranks of its group are free, and none before the weights are
    pulled: the clock of :func:`headrace.simulator.simulate` without its rows.
    """
    free = [costs.exchange_s.pull_s * costs.scale] * plan.devices
    for micro, (forward, backward) in zip(
        plan.micro_batches, micro_batch_seconds(plan, costs), strict=True
    ):
        ranks = plan.pipelines[micro.pipeline].ranks
        end = max(free[rank] for rank in ranks) + forward + backward
        for rank in ranks:
            free[rank] = end
    return free


def step_s(plan: Plan, costs: CostModel) -> float:
    """Predicted seconds of the whole step: pull, micro-batches, push and update."""
    exchange = costs.exchange_s
    return max(finish_times(plan, costs)) + (exchange.push_s + exchange.update_s) * costs.scale
