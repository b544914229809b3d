"""Rows and partitions: every layout of a weight is a partition of its rows into intervals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.errors import SpecError
from headrace.spec.architecture import WeightSpec
from headrace.spec.plan import Pipeline, Plan

__all__ = [
    "Partition",
    "Rows",
    "Slice",
    "group_shards",
    "hull",
    "link",
    "received_rows",
    "rows_between",
    "sent_rows",
    "split_rows",
    "split_sizes",
    "storage_partition",
    "storage_partitions",
    "working_key",
    "working_partition",
    "working_partitions",
    "works_whole",
]


@dataclass(frozen=True, slots=True)
class Rows:
    """The half-open interval of rows [start, stop); empty when they are equal."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise SpecError("rows", got=f"[{self.start}, {self.stop})", wanted="0 <= start <= stop")

    def __len__(self) -> int:
        return self.stop - self.start

    def meet(self, other: Rows) -> Rows:
        """The rows in both; empty (at the later start) when there are none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Rows(start, max(start, stop))

    def within(self, other: Rows) -> slice:
        """These rows as a slice of a tensor that holds the rows ``other``, which contain them."""
        return slice(self.start - other.start, self.stop - other.start)


def hull(parts: Iterable[Rows]) -> Rows:
    """The smallest interval that contains all of ``parts``; [0, 0) when they are all empty."""
    filled = [part for part in parts if part]
    if not filled:
        return Rows(0, 0)
    return Rows(min(part.start for part in filled), max(part.stop for part in filled))


def split_sizes(count: int, parts: int) -> tuple[int, ...]:
    """The sizes of ``parts`` parts of ``count`` things: they differ by at most one, larger ones
    come first."""
    return tuple(count // parts + (1 if part < count % parts else 0) for part in range(parts))


def split_rows(rows: int, parts: int, unit: int = 1) -> tuple[Rows, ...]:
    """``rows`` cut into ``parts`` intervals at multiples of ``unit``, as even as units allow.

    With fewer units than parts the last parts are empty. Raises SpecError when ``unit`` does not
    divide ``rows``.
    """
    if rows % unit:
        raise SpecError("rows", got=rows, wanted=f"a multiple of the unit {unit}")
    intervals: list[Rows] = []
    start = 0
    for size in split_sizes(rows // unit, parts):
        intervals.append(Rows(start, start + size * unit))
        start += size * unit
    return tuple(intervals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Which of the ``rows`` rows of one weight each rank holds: the interval ``parts[rank]``, which
    may be empty or overlap those of other ranks."""

    rows: int
    parts: tuple[Rows, ...]

    def __post_init__(self) -> None:
        for rank, part in enumerate(self.parts):
            if part.stop > self.rows:
                raise SpecError(f"rows of rank {rank}", got=part, wanted=f"within {self.rows}")

    @classmethod
    def even(cls, rows: int, ranks: int, unit: int = 1) -> Partition:
        """Disjoint parts, as even as possible: cut at multiples of ``unit`` where there is a unit
        for each rank, else at any row."""
        enough_units = rows // unit >= ranks
        return cls(rows=rows, parts=split_rows(rows, ranks, unit if enough_units else 1))

    @property
    def is_disjoint_cover(self) -> bool:
        """Whether every row has exactly one holder: what a storage layout must be."""
        filled = [part for part in self.parts if part]
        return covers_once(sorted(filled, key=lambda part: part.start), self.rows)


def covers_once(parts: Sequence[Rows], rows: int) -> bool:
    """Whether sorted, non-empty ``parts`` follow each other from 0 to ``rows``."""
    covered = 0
    for part in parts:
        if part.start != covered:
            return False
        covered = part.stop
    return covered == rows


def storage_partition(
    weight: WeightSpec, ranks: int, node_sizes: Sequence[int] | None = None
) -> Partition:
    """Rows split over all ranks: fully sharded master weights, optimizer state, gradient sums.

    With ``node_sizes``, the number of ranks on each node, the weight's first rows are on the first
    ranks of all nodes, the next ones on the second ranks, and so on: the ranks with one local rank,
    which exchange rows between nodes, hold one interval together.
    """
    even = Partition.even(weight.rows, ranks, weight.unit or 1)
    if node_sizes is None:
        return even
    local_ranks = [local for size in node_sizes for local in range(size)]
    in_order = sorted(range(ranks), key=local_ranks.__getitem__)  # stable, so by node then
    part_of = dict(zip(in_order, even.parts, strict=True))
    return Partition(rows=even.rows, parts=tuple(part_of[rank] for rank in range(ranks)))


def storage_partitions(
    table: Iterable[WeightSpec], ranks: int, node_sizes: Sequence[int] | None = None
) -> dict[str, Partition]:
    """:func:`storage_partition` of each weight by its name; equal ones are one object."""
    weights = list(table)
    # a partition depends on these two alone
    kinds = {(weight.rows, weight.unit): weight for weight in weights}
    partitions = {
        kind: storage_partition(weight, ranks, node_sizes) for kind, weight in kinds.items()
    }
    return {weight.name: partitions[weight.rows, weight.unit] for weight in weights}


def group_shards(weight: WeightSpec, ranks: int) -> tuple[Rows, ...]:
    """The rows that each member of a group of ``ranks`` holds of a sharded weight, cut at unit
    borders; of a weight without a unit every member holds all."""
    if weight.unit is None:
        return (Rows(0, weight.rows),) * ranks
    return split_rows(weight.rows, ranks, weight.unit)


def works_whole(plan: Plan) -> tuple[bool, ...]:
    """For each rank whether it holds all rows of its working weights while ``plan`` runs: true
    where one of its pipelines does not shard them."""
    whole = [False] * plan.devices
    for pipeline in _used_pipelines(plan):
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
    """:func:`working_partition` of each weight by its name; equal ones are one object, as there are
    many weights of few kinds."""
    stages = list(_stages(plan))
    # a weight's partition depends on its rows and unit, and on the stages that use it: weights with
    # an equal ``kind`` share one
    bucket_sets = dict.fromkeys(buckets for _, buckets, _ in stages)
    known: dict[tuple[int, int | None, tuple[bool, ...]], Partition] = {}
    partitions: dict[str, Partition] = {}
    for weight in table:
        used = tuple(weight.used_in(buckets) for buckets in bucket_sets)
        kind = (weight.rows, weight.unit, used)
        if kind not in known:
            known[kind] = _working(weight, plan.devices, stages)
        partitions[weight.name] = known[kind]
    return partitions


def _stages(plan: Plan) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """For each stage of all pipelines that have work: (its ranks, the buckets of its weights, the
    number of shards into which each weight is cut)."""
    for pipeline in _used_pipelines(plan):
        shard_count = pipeline.scheme.parts(sharded=plan.working == "sharded")
        for stage in pipeline.stages(plan.layers):
            yield stage.ranks, stage.buckets, shard_count


def _working(
    weight: WeightSpec, devices: int, stages: Iterable[tuple[tuple[int, ...], tuple[int, ...], int]]
) -> Partition:
    """The rows of a weight that each of ``devices`` ranks works with: for each of ``stages``, which
    :func:`_stages` gives, that uses the weight, member m of the stage needs shard m."""
    parts: list[Rows] = [Rows(0, 0)] * devices
    shards_by_count: dict[int, tuple[Rows, ...]] = {}
    used_by_buckets = dict[tuple[int, ...], bool]()
    for ranks, buckets, shard_count in stages:
        if buckets not in used_by_buckets:
            used_by_buckets[buckets] = weight.used_in(buckets)
        if not used_by_buckets[buckets]:
            continue
        if shard_count not in shards_by_count:
            shards_by_count[shard_count] = group_shards(weight, shard_count)
        shards = shards_by_count[shard_count]
        for member, rank in enumerate(ranks):
            # with fewer shards than ranks, every block of ``shard_count`` ranks has all shards
            parts[rank] = hull((parts[rank], shards[member % shard_count]))
    return Partition(rows=weight.rows, parts=tuple(parts))


def working_key(plan: Plan) -> tuple[object, ...]:
    """A key of all that working partitions depend on: plans with equal keys have equal
    partitions."""
    return (plan.devices, plan.working, plan.layers, *_used_pipelines(plan))


def _used_pipelines(plan: Plan) -> Iterator[Pipeline]:
    """The pipelines of a plan that have micro-batches."""
    numbers = {micro_batch.pipeline for micro_batch in plan.micro_batches}
    return (plan.pipelines[number] for number in sorted(numbers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Rows of one weight that rank ``reader`` works with and rank ``owner`` stores."""

    rows: Rows
    owner: int
    reader: int


def link(owners: Partition, readers: Partition) -> tuple[Slice, ...]:
    """The rows that each reader needs of each owner, ordered by (reader, owner); at most one slice
    for a pair of ranks, none where they share no rows.

    ``owners`` must be a disjoint cover (a storage layout); ``readers`` may overlap and have gaps.
    """
    assert owners.is_disjoint_cover, "a storage layout covers each row once"
    slices: list[Slice] = []
    for reader, wanted in enumerate(readers.parts):
        for owner, stored in enumerate(owners.parts):
            common = stored.meet(wanted)
            if len(common):
                slices.append(Slice(rows=common, owner=owner, reader=reader))
    return tuple(slices)


def rows_between(
    owners: Partition, readers: Partition, rank: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The part of :func:`link` that concerns ``rank``: (the rows it serves to each reader, the rows
    it reads from each owner). Both are [ranks, 2]: for each other rank the first row and the end,
    equal where there are none. Takes time proportional to the ranks, not to their pairs."""
    assert owners.is_disjoint_cover, "a storage layout covers each row once"
    served = _meet(_bounds(readers), owners.parts[rank])
    read = _meet(_bounds(owners), readers.parts[rank])
    return served, read


def _bounds(partition: Partition) -> NDArray[np.int64]:
    """[ranks, 2]: the first row and the end of each rank's part."""
    rows = [(part.start, part.stop) for part in partition.parts]
    return np.array(rows, dtype=np.int64)


def _meet(bounds: NDArray[np.int64], rows: Rows) -> NDArray[np.int64]:
    """[n, 2]: the intersection of each interval of ``bounds`` [n, 2] with ``rows``; an empty one
    is (``rows.start``, ``rows.start``)."""
    starts, stops = np.maximum(bounds[:, 0], rows.start), np.minimum(bounds[:, 1], rows.stop)
    empty = stops <= starts
    starts[empty] = stops[empty] = rows.start
    return np.stack([starts, stops], axis=1)


def received_rows(slices: tuple[Slice, ...], rank: int) -> int:
    """Rows that ``rank`` gets from other ranks in a pull (and sends to others in a push)."""
    return sum(len(s.rows) for s in slices if s.reader == rank != s.owner)


def sent_rows(slices: tuple[Slice, ...], rank: int) -> int:
    """Rows that ``rank`` sends to other ranks in a pull (and gets from others in a push)."""
    return sum(len(s.rows) for s in slices if s.owner == rank != s.reader)
