"""Storage layouts and the working layouts of a plan."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.layouts.intervals import Partition, Rows, split_rows
from headrace.spec.plan import Plan
from headrace.spec.weights import WeightSpec

__all__ = ["group_shards", "storage_partition", "working_partition", "works_whole"]


def storage_partition(weight: WeightSpec, ranks: int) -> Partition:
    """Rows split over all ranks: fully sharded master weights, optimizer state, gradient sums."""
    return Partition.even(weight.rows, ranks, weight.unit or 1)


def group_shards(weight: WeightSpec, ranks: int) -> tuple[Rows, ...]:
    """The part of each member of a group that holds its weights sharded, cut at unit borders;
    weights without a unit are whole on every member."""
    if weight.unit is None:
        return (Rows(0, weight.rows),) * ranks
    return split_rows(weight.rows, ranks, weight.unit)


def works_whole(plan: Plan) -> tuple[bool, ...]:
    """For each rank whether it holds all rows of every weight while ``plan`` propagates: always
    when it works alone in some micro-batch, or when the plan says ``whole``."""
    whole = [False] * plan.devices
    for pipeline in _used(plan):
        if plan.working == "whole" or len(pipeline) == 1:
            for rank in pipeline:
                whole[rank] = True
    return tuple(whole)


def working_partition(weight: WeightSpec, plan: Plan) -> Partition:
    """The rows each rank needs to run its micro-batches; none for a rank without work.

    A rank in several sharded groups holds the smallest interval that contains its part of each.
    """
    parts: list[Rows] = [Rows(0, 0)] * plan.devices
    whole = works_whole(plan)
    for pipeline in _used(plan):
        for rank, shard in zip(pipeline, group_shards(weight, len(pipeline)), strict=True):
            parts[rank] = Rows(0, weight.rows) if whole[rank] else _hull(parts[rank], shard)
    return Partition(rows=weight.rows, parts=tuple(parts))


def _used(plan: Plan) -> Sequence[tuple[int, ...]]:
    # In the order of their process group, which is rising whatever order the plan names.
    used = sorted({m.pipeline for m in plan.micro_batches})
    return [tuple(sorted(plan.pipelines[i].ranks)) for i in used]


def _hull(one: Rows, other: Rows) -> Rows:
    if not len(one):
        return other
    if not len(other):
        return one
    return Rows(min(one.start, other.start), max(one.stop, other.stop))
