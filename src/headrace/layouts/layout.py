"""Storage layouts and the working layouts of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headrace.layouts.intervals import Partition, Rows, hull, split_rows
from headrace.spec.plan import Pipeline, Plan
from headrace.spec.weights import WeightSpec

__all__ = [
    "group_shards",
    "storage_partition",
    "storage_partitions",
    "working_key",
    "working_partition",
    "working_partitions",
    "works_whole",
]


def storage_partition(weight: WeightSpec, ranks: int, node_ranks: int | None = None) -> Partition:
    """Rows split over all ranks: fully sharded master weights, optimizer state, gradient sums.

    With ``node_ranks`` of each node, a divisor of ``ranks``, those of the first ranks of all nodes
    come first, then those of the second ranks: what crosses between nodes is together.
    """
    even = Partition.even(weight.rows, ranks, weight.unit or 1)
    if node_ranks is None:
        return even
    nodes = ranks // node_ranks
    parts = (
        even.parts[place * nodes + node] for node in range(nodes) for place in range(node_ranks)
    )
    return Partition(rows=even.rows, parts=tuple(parts))


def storage_partitions(
    table: Iterable[WeightSpec], ranks: int, node_ranks: int | None = None
) -> dict[str, Partition]:
    """:func:`storage_partition` of each weight; equal ones are one object."""
    weights = list(table)
    kinds = {(w.rows, w.unit): w for w in weights}
    made = {kind: storage_partition(w, ranks, node_ranks) for kind, w in kinds.items()}
    return {w.name: made[w.rows, w.unit] for w in weights}


def group_shards(weight: WeightSpec, ranks: int) -> tuple[Rows, ...]:
    """The part of each member of a group that holds its weights sharded, cut at unit borders;
    weights without a unit are whole on every member."""
    if weight.unit is None:
        return (Rows(0, weight.rows),) * ranks
    return split_rows(weight.rows, ranks, weight.unit)


def works_whole(plan: Plan) -> tuple[bool, ...]:
    """For each rank whether it holds all rows of the weights that it works with while ``plan``
    propagates: when some pipeline of it cuts none."""
    whole = [False] * plan.devices
    for pipeline in _used(plan):
        if pipeline.scheme.parts(sharded=plan.working == "sharded") == 1:
            for rank in pipeline.ranks:
                whole[rank] = True
    return tuple(whole)


def working_partition(weight: WeightSpec, plan: Plan) -> Partition:
    """The rows each rank needs to run its micro-batches; none for a rank without work.

    A rank in several sharded groups holds the smallest interval that contains its part of each.
    """
    return _working(weight, plan.devices, list(_stages(plan)))


def working_partitions(table: Iterable[WeightSpec], plan: Plan) -> dict[str, Partition]:
    """:func:`working_partition` of each weight; equal ones are one object, as there are many
    weights of few kinds."""
    staged = list(_stages(plan))
    stages = dict.fromkeys(buckets for _, buckets, _ in staged)
    made: dict[tuple[int, int | None, tuple[bool, ...]], Partition] = {}
    found: dict[str, Partition] = {}
    for weight in table:
        key = (weight.rows, weight.unit, tuple(weight.used_in(buckets) for buckets in stages))
        if key not in made:
            made[key] = _working(weight, plan.devices, staged)
        found[weight.name] = made[key]
    return found


def _stages(plan: Plan) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Ranks and buckets of the stages of all pipelines with work, and in how many parts each holds
    its weights."""
    for pipeline in _used(plan):
        count = pipeline.scheme.parts(sharded=plan.working == "sharded")
        for stage in pipeline.stages(plan.layers):
            yield stage.ranks, stage.buckets, count


def _working(
    weight: WeightSpec, devices: int, stages: Iterable[tuple[tuple[int, ...], tuple[int, ...], int]]
) -> Partition:
    parts: list[Rows] = [Rows(0, 0)] * devices
    shards: dict[int, tuple[Rows, ...]] = {}
    used = dict[tuple[int, ...], bool]()
    for ranks, buckets, count in stages:
        if buckets not in used:
            used[buckets] = weight.used_in(buckets)
        if used[buckets]:
            if count not in shards:
                shards[count] = group_shards(weight, count)
            for member, rank in enumerate(ranks):
                parts[rank] = hull((parts[rank], shards[count][member % count]))
    return Partition(rows=weight.rows, parts=tuple(parts))


def working_key(plan: Plan) -> tuple[object, ...]:
    """All that working partitions depend on: plans of equal keys have equal ones."""
    return (plan.devices, plan.working, plan.layers, *_used(plan))


def _used(plan: Plan) -> Iterator[Pipeline]:
    return (plan.pipelines[i] for i in sorted({m.pipeline for m in plan.micro_batches}))
