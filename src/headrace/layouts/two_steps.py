"""Links between ranks of several nodes: hierarchical pulls and pushes, in two steps.

[Note: two steps] In one step an owner sends each reader its own copy, so a node of L readers gets
the same rows L times over a network that is many times slower than what joins its ranks. In two
steps each row crosses to a node once. Rank (n, l) is the l-th of node n, and H_n are the rows that
some rank of node n reads:

    pull   across   owners (m, l) of all nodes m -> (n, l): their rows in H_n
           inside   (n, l') of all l' -> (n, l): what it reads
    push   inside   (n, l') -> (n, l): gradients of what the owners (., l) hold, added
           across   (n, l) -> owners (m, l): sums of the nodes, added

Storage layouts put the rows of owners (., l) side by side
(:func:`headrace.layouts.partition.storage_partition`), so what a rank holds between the steps is
one interval I_l ∩ H_n, and either step is a link of its own. Sums are added in the order of ranks
inside, of nodes across: the same bits each time. Between nodes a sum travels in the wire's type.

On a device the second step is issued on a stream of its own, which waits for the first; on a CPU
the rank waits itself. What that stream allocates is freed when the main stream has waited for the
second step. The next that it allocates is used after another first step, which the main stream
issued later, so no buffer is used twice at a time, though no event is recorded for it. All ranks
issue both at the same places of their programs, so what holds of the order of exchanges over all
ranks holds of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from headrace.comm.mesh import Groups, NodeGroups
from headrace.layouts.partition import Partition, Rows, hull
from headrace.layouts.peer_rows import Tensors
from headrace.layouts.transfer import BucketLink, Pending, bucket_links
from headrace.spec.architecture import WeightSpec

__all__ = ["WeightLink", "crossing_rows", "links_over", "taken"]

_WORTH = 1 / 8
"""Two steps are used if they save at least this fraction of the rows from crossing between nodes:
all rows then move once more within nodes, over links some nine times as fast."""


class WeightLink(Protocol):
    """Pulls and pushes of one bucket: of :class:`BucketLink`, or in two steps."""

    @property
    def pull_elements(self) -> int:
        """Elements this rank receives from others in a pull."""
        ...

    @property
    def push_elements(self) -> int:
        """Elements this rank receives from others in a push."""
        ...

    @property
    def waits(self) -> bool:
        """Whether the rank waits while it issues a transfer."""
        ...

    def between_bytes(self, dtype: torch.dtype) -> int:
        """Bytes held between the two steps of a transfer, for elements of ``dtype``."""
        ...

    def pull(self, storage: Tensors, working: Tensors, wire: torch.dtype | None = None) -> Pending:
        """Start to copy rows of ``storage`` into ``working``; see :meth:`BucketLink.pull`."""
        ...

    def push(self, gradients: Tensors, sums: Tensors, wire: torch.dtype | None = None) -> Pending:
        """Start to sum ``gradients`` into their owners' ``sums``; see :meth:`BucketLink.push`."""
        ...


def links_over(
    groups: Groups,
    buckets: Sequence[Sequence[WeightSpec]],
    owners: Mapping[str, Partition],
    readers: Mapping[str, Partition],
) -> list[WeightLink]:
    """The links of all buckets: in two steps where the ranks of ``groups`` are of several nodes and
    fewer rows would cross between them."""
    nodes = groups.nodes
    if nodes is None or not taken(buckets, owners, readers, nodes.ranks):
        return list(bucket_links(buckets, owners, readers, groups.rank, groups.world))
    return _two_step_links(nodes, groups, buckets, owners, readers)


def crossing_rows(owners: Partition, readers: Partition, node_ranks: int) -> tuple[int, int]:
    """Rows that cross between nodes in a pull: in one step, in two."""
    count = len(owners.parts) // node_ranks
    here = np.array([(p.start, p.stop) for p in readers.parts]).reshape(count, node_ranks, 1, 2)
    there = np.array([(p.start, p.stop) for p in owners.parts]).reshape(count, 1, node_ranks, 2)
    at_home = int(_common(here, there).sum())
    once = sum(map(len, readers.parts)) - at_home
    twice = 0
    for n, needed in enumerate(_needs(readers, node_ranks)):
        home = owners.parts[n * node_ranks : (n + 1) * node_ranks]
        twice += len(needed) - sum(len(part.meet(needed)) for part in home)
    return once, twice


def _common(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    stops = np.minimum(one[..., 1], other[..., 1])
    return np.maximum(0, stops - np.maximum(one[..., 0], other[..., 0]))


def taken(
    buckets: Iterable[Sequence[WeightSpec]],
    owners: Mapping[str, Partition],
    readers: Mapping[str, Partition],
    node_ranks: int,
) -> bool:
    """Whether exchanges take two steps: for all weights together enough rows fewer cross."""
    known: dict[tuple[int, int], tuple[int, int]] = {}
    saved = read = 0
    for weight in (w for bucket in buckets for w in bucket):
        owner, reader = owners[weight.name], readers[weight.name]
        kind = id(owner), id(reader)
        if kind not in known:
            once, twice = crossing_rows(owner, reader, node_ranks)
            known[kind] = once - twice, sum(map(len, reader.parts))
        saved += known[kind][0] * weight.row_elements
        read += known[kind][1] * weight.row_elements
    return saved > _WORTH * read


def _needs(readers: Partition, node_ranks: int) -> list[Rows]:
    """The rows of each node's readers, as one interval."""
    parts = readers.parts
    return [hull(parts[at : at + node_ranks]) for at in range(0, len(parts), node_ranks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """The two steps for one kind of weight and one rank: (owner, reader) partitions of each step
    over its group, counted from the step's first row, and the number of rows ``held`` in
    between."""

    held: int
    across: tuple[Partition, Partition]
    inside: tuple[Partition, Partition]

    @classmethod
    def of(cls, owners: Partition, readers: Partition, rank: int, node_ranks: int) -> _Steps:
        """The two steps of ``rank``, for nodes of ``node_ranks`` ranks."""
        node, local = divmod(rank, node_ranks)
        needs = _needs(readers, node_ranks)
        mine = owners.parts[local::node_ranks]
        column, needed = hull(mine), needs[node]
        held = [hull(owners.parts[at::node_ranks]).meet(needed) for at in range(node_ranks)]
        return cls(
            held=len(held[local]),
            across=(_within(column, mine), _within(column, [column.meet(n) for n in needs])),
            inside=(
                _within(needed, held),
                _within(needed, readers.parts[node * node_ranks : (node + 1) * node_ranks]),
            ),
        )


def _within(outer: Rows, parts: Iterable[Rows]) -> Partition:
    """Partition of ``outer`` into ``parts``, with rows counted from its first row."""
    moved = (Rows(p.start - outer.start, p.stop - outer.start) if p else Rows(0, 0) for p in parts)
    return Partition(rows=len(outer), parts=tuple(moved))


def _two_step_links(
    nodes: NodeGroups,
    groups: Groups,
    buckets: Sequence[Sequence[WeightSpec]],
    owners: Mapping[str, Partition],
    readers: Mapping[str, Partition],
) -> list[WeightLink]:
    """A link for each bucket that moves rows across nodes first, among ranks with the same index in
    their nodes, and then inside of them."""
    made: dict[tuple[int, int], _Steps] = {}
    steps: dict[str, _Steps] = {}
    for weight in (w for bucket in buckets for w in bucket):
        pair = owners[weight.name], readers[weight.name]
        kind = id(pair[0]), id(pair[1])
        if kind not in made:
            made[kind] = _Steps.of(*pair, groups.rank, nodes.ranks)
        steps[weight.name] = made[kind]
    node, local = divmod(groups.rank, nodes.ranks)

    def links(
        sides: dict[str, tuple[Partition, Partition]], rank: int, group: dist.ProcessGroup
    ) -> list[BucketLink]:
        owned, read = ({name: both[k] for name, both in sides.items()} for k in (0, 1))
        return bucket_links(buckets, owned, read, rank, group)

    across = links({name: s.across for name, s in steps.items()}, node, nodes.across)
    inside = links({name: s.inside for name, s in steps.items()}, local, nodes.inside)
    held = ({w.name: (steps[w.name].held, *w.shape[1:]) for w in bucket} for bucket in buckets)
    return [
        _TwoSteps(one, other, shapes, nodes.aside)
        for shapes, one, other in zip(held, across, inside, strict=True)
    ]


class _TwoSteps:
    """The two-step link of one bucket. ``held`` are the shapes of the tensors between the steps;
    ``aside`` is the stream on which the second step is issued, None on a CPU."""

    def __init__(
        self,
        across: BucketLink,
        inside: BucketLink,
        held: Mapping[str, tuple[int, ...]],
        aside: torch.cuda.Stream | None,
    ) -> None:
        """``held`` are the shapes of the rows that a node's rank holds in between; with a stream
        ``aside`` the second step follows without the host."""
        self._across, self._inside = across, inside
        self._held, self._aside = held, aside
        self.waits = aside is None

    def between_bytes(self, dtype: torch.dtype) -> int:
        return sum(map(prod, self._held.values())) * dtype.itemsize

    @property
    def pull_elements(self) -> int:
        return self._across.pull_elements + self._inside.pull_elements

    @property
    def push_elements(self) -> int:
        return self._across.push_elements + self._inside.push_elements

    def pull(self, storage: Tensors, working: Tensors, wire: torch.dtype | None = None) -> Pending:
        """Rows cross to each node once, and are handed on inside."""
        held = self._buffers_between(storage, wire)
        first = self._across.pull(storage, held, wire)
        return self._second_behind(first, held, lambda: self._inside.pull(held, working, wire))

    def push(self, gradients: Tensors, sums: Tensors, wire: torch.dtype | None = None) -> Pending:
        """Gradients are summed inside of each node, then across."""
        held = self._buffers_between(sums, None)
        first = self._inside.push(gradients, held, wire)
        return self._second_behind(first, held, lambda: self._across.push(held, sums, wire))

    def _buffers_between(self, like: Tensors, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        return {n: like[n].new_empty(shape, dtype=dtype) for n, shape in self._held.items()}

    def _second_behind(
        self, first: Pending, held: Mapping[str, torch.Tensor], issue: Callable[[], Pending]
    ) -> Pending:
        """Issue the second step behind the first. On a device all is freed after both, and so after
        all that reads it on either stream."""
        kept = () if self._aside is None else first.buffers
        with self._second():
            first.wait()
            second = issue()
        return second.keeping((*kept, *held.values()))

    def _second(self) -> AbstractContextManager[object]:
        return nullcontext() if self._aside is None else torch.cuda.stream(self._aside)
