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
        """These rows as a slice of a tensor that holds ``other``."""
        return slice(self.start - other.start, self.stop - other.start)


def hull(parts: Iterable[Rows]) -> Rows:
    """The smallest interval with all of ``parts``; empty when they are."""
    some = [part for part in parts if part]
    if not some:
        return Rows(0, 0)
    return Rows(min(p.start for p in some), max(p.stop for p in some))


def split_sizes(count: int, parts: int) -> tuple[int, ...]:
    """``count`` things in ``parts`` sizes that differ by at most one, larger ones first."""
    return tuple(count // parts + (part < count % parts) for part in range(parts))


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
    """The rows of one weight that each rank holds: ``parts[rank]``, possibly empty or
    overlapping."""

    rows: int
    parts: tuple[Rows, ...]

    def __post_init__(self) -> None:
        for rank, part in enumerate(self.parts):
            if part.stop > self.rows:
                raise SpecError(f"rows of rank {rank}", got=part, wanted=f"within {self.rows}")

    @classmethod
    def even(cls, rows: int, ranks: int, unit: int = 1) -> Partition:
        """Disjoint parts at unit borders where there are enough units, else at any row."""
        return cls(rows=rows, parts=split_rows(rows, ranks, unit if rows // unit >= ranks else 1))

    @property
    def is_disjoint_cover(self) -> bool:
        """Whether every row has exactly one holder: what a storage layout must be."""
        return covers_once(sorted((p for p in self.parts if p), key=lambda p: p.start), self.rows)


def covers_once(parts: Sequence[Rows], rows: int) -> bool:
    """Whether sorted, non-empty ``parts`` follow each other from 0 to ``rows``."""
    at = 0
    for part in parts:
        if part.start != at:
            return False
        at = part.stop
    return at == rows


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
    """The rows of each member of a group over which weights are sharded, cut at unit borders;
    weights without a unit are replicated on every member."""
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
    """For the stages of all pipelines with work: (ranks, buckets, number of shards of each
    weight)."""
    for pipeline in _used_pipelines(plan):
        count = pipeline.scheme.parts(sharded=plan.working == "sharded")
        for stage in pipeline.stages(plan.layers):
            yield stage.ranks, stage.buckets, count


def _working(
    weight: WeightSpec, devices: int, stages: Iterable[tuple[tuple[int, ...], tuple[int, ...], int]]
) -> Partition:
    """The rows of a weight that each of ``devices`` ranks works with; ``stages`` are (ranks,
    buckets of their layers, shards of a weight)."""
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
    """A key of all that working partitions depend on: plans with equal keys have equal
    partitions."""
    return (plan.devices, plan.working, plan.layers, *_used_pipelines(plan))


def _used_pipelines(plan: Plan) -> Iterator[Pipeline]:
    return (plan.pipelines[i] for i in sorted({m.pipeline for m in plan.micro_batches}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Rows of one weight that ``reader`` needs and ``owner`` stores."""

    rows: Rows
    owner: int
    reader: int


def link(owners: Partition, readers: Partition) -> tuple[Slice, ...]:
    """All mutual slices, ordered by (reader, owner): at most one per pair.

    ``owners`` must be a disjoint cover (a storage layout); ``readers`` may overlap and have gaps.
    """
    assert owners.is_disjoint_cover, "a storage layout covers each row once"
    return tuple(
        Slice(rows=common, owner=owner, reader=reader)
        for reader, wanted in enumerate(readers.parts)
        for owner, held in enumerate(owners.parts)
        if len(common := held.meet(wanted))
    )


def rows_between(
    owners: Partition, readers: Partition, rank: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The part of :func:`link` that concerns ``rank``: the rows it serves to each reader, and those
    it reads from each owner, as (first, end) [ranks, 2], equal where there are none. Takes time
    proportional to the ranks, not to their pairs."""
    assert owners.is_disjoint_cover, "a storage layout covers each row once"
    serving = _meet(_bounds(readers), owners.parts[rank])
    return serving, _meet(_bounds(owners), readers.parts[rank])


def _bounds(partition: Partition) -> NDArray[np.int64]:
    rows = [(part.start, part.stop) for part in partition.parts]
    return np.array(rows, dtype=np.int64)


def _meet(bounds: NDArray[np.int64], rows: Rows) -> NDArray[np.int64]:
    """The intersection of each interval with ``rows``; an empty one begins and ends at the
    start."""
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
