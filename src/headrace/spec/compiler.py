"""From a plan to one program per rank."""

from __future__ import annotations

from headrace.spec.plan import Plan
from headrace.spec.program import Action, Backward, Forward, Program, Pull, Push, Update

__all__ = ["compile_plan", "compile_rank"]


def compile_rank(plan: Plan, rank: int, bucket_count: int) -> Program:
    """The program of ``rank``: all pulls, its micro-batches in the plan's order, all pushes from
    the last bucket to the first, the update.

    Ranks without work pull nothing but still issue every world collective: they own, serve and
    update their part of the storage.
    """
    actions: list[Action] = [Pull(bucket=bucket) for bucket in range(bucket_count)]
    for index, micro in enumerate(plan.micro_batches):
        group = plan.pipelines[micro.pipeline].ranks
        if rank in group:
            actions.append(Forward(stage=0, micro_batch=index, group=group))
            actions.append(Backward(stage=0, micro_batch=index, group=group))
    actions += [Push(bucket=bucket) for bucket in reversed(range(bucket_count))]
    actions.append(Update())
    return Program(rank=rank, actions=tuple(actions))


def compile_plan(plan: Plan, bucket_count: int) -> tuple[Program, ...]:
    """The programs of all ranks of a plan over a model of ``bucket_count`` weight buckets."""
    return tuple(compile_rank(plan, rank, bucket_count) for rank in range(plan.devices))
