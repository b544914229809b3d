"""Links between ranks of several nodes: hierarchical pulls and pushes, in two steps.

[Note: two steps] In one step an owner sends each reader its own copy, so a node of L readers gets
the same rows L times over a network that is many times slower than what joins its ranks. In two
steps each row crosses to a node once. Rank (n, l) is the l-th of node n, H_n are the rows that some
rank of node n reads, and I_nl are those that (n, l) holds for its node between the steps:

    pull   across   owners -> (n, l): their rows in I_nl ∩ H_n
           inside   (n, l') of all l' -> (n, l): what it reads
    push   inside   (n, l') -> (n, l): gradients of I_nl ∩ H_n, added
           across   (n, l) -> owners: sums of the nodes, added

Storage layouts put the rows of owners (., l) side by side
(:func:`headrace.layouts.partition.storage_partition`): an interval for each l, and these are the
I_nl of the largest nodes, so there a rank receives from those of its own place. In a smaller node
they are intervals with equally many rows of other nodes. Either step is a link of its own. Sums are
added in the order of ranks inside, of nodes across: the same bits each time. Between nodes a sum
travels in the wire's type.

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
from itertools import accumulate, pairwise
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
    """The link of each bucket for the rank of ``groups``: in two steps where ranks are on several
    nodes and so fewer rows cross between them, else in one. ``owners`` and ``readers`` are the
    storage and the working partition of each weight by its name."""
    nodes = groups.nodes
    if nodes is None or not taken(buckets, owners, readers, nodes.sizes):
        return list(bucket_links(buckets, owners, readers, groups.rank, groups.world))
    return _two_step_links(nodes, groups, buckets, owners, readers)


def crossing_rows(
    owners: Partition, readers: Partition, node_sizes: Sequence[int]
) -> tuple[int, int]:
    """Rows of one weight that cross between nodes in a pull: (in one step, in two steps)."""
    read, owned = (
        np.array([(part.start, part.stop) for part in parts])
        for parts in (readers.parts, owners.parts)
    )
    needed = _rows_read_by_node(readers, node_sizes)
    one_step = two_steps = 0
    for ranks, needed_here in zip(_ranks_of_nodes(node_sizes), needed, strict=True):
        # [readers, 1, 2] and [owners, 2] of one node are broadcast.
        one_step += sum(map(len, readers.parts[ranks]))
        one_step -= int(_common_rows(read[ranks, None], owned[ranks]).sum())
        whole = np.array([needed_here.start, needed_here.stop])
        two_steps += len(needed_here) - int(_common_rows(whole, owned[ranks]).sum())
    return one_step, two_steps


def _common_rows(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The number of rows that intervals (first, end) [..., 2] have in common with others, [...];
    the two are broadcast."""
    starts = np.maximum(some[..., 0], others[..., 0])
    return np.maximum(0, np.minimum(some[..., 1], others[..., 1]) - starts)


def taken(
    buckets: Iterable[Sequence[WeightSpec]],
    owners: Mapping[str, Partition],
    readers: Mapping[str, Partition],
    node_sizes: Sequence[int],
) -> bool:
    """Whether exchanges take two steps: whether these save enough of all elements that are read
    from crossing between nodes of ``node_sizes`` ranks."""
    # (rows saved, rows read) by the ids of the two partitions, which many weights share
    known: dict[tuple[int, int], tuple[int, int]] = {}
    saved_elements = read_elements = 0
    for weight in (w for bucket in buckets for w in bucket):
        owner, reader = owners[weight.name], readers[weight.name]
        kind = id(owner), id(reader)
        if kind not in known:
            one_step, two_steps = crossing_rows(owner, reader, node_sizes)
            known[kind] = one_step - two_steps, sum(map(len, reader.parts))
        saved_rows, read_rows = known[kind]
        saved_elements += saved_rows * weight.row_elements
        read_elements += read_rows * weight.row_elements
    return saved_elements > _WORTH * read_elements


def _ranks_of_nodes(node_sizes: Sequence[int]) -> list[slice]:
    """The ranks of each node, as a slice of all."""
    stops = accumulate(node_sizes)
    return [slice(stop - size, stop) for size, stop in zip(node_sizes, stops, strict=True)]


def _rows_read_by_node(readers: Partition, node_sizes: Sequence[int]) -> list[Rows]:
    """For each node the smallest interval with all rows that its ranks read."""
    return [hull(readers.parts[ranks]) for ranks in _ranks_of_nodes(node_sizes)]


def _held_rows(owners: Partition, readers: Partition, node_sizes: Sequence[int]) -> list[Rows]:
    """The rows I_nl ∩ H_n of the note that each rank holds for its node between the steps."""
    most, held = max(node_sizes), list[Rows]()
    local_ranks = [local for size in node_sizes for local in range(size)]
    by_place = [
        hull(part for part, local in zip(owners.parts, local_ranks, strict=True) if local == place)
        for place in range(most)
    ]
    needed_by_node = _rows_read_by_node(readers, node_sizes)
    for ranks, needed in zip(_ranks_of_nodes(node_sizes), needed_by_node, strict=True):
        size = ranks.stop - ranks.start
        if size == most:
            held += [rows.meet(needed) for rows in by_place]
        else:
            held += _cut_evenly(needed, owners.parts[ranks], size)
    return held


def _cut_evenly(needed: Rows, stored: Sequence[Rows], count: int) -> list[Rows]:
    """The rows ``needed`` cut into ``count`` intervals with equally many rows that are not among
    those ``stored`` here, one after the other."""
    inside = sorted(filter(len, (part.meet(needed) for part in stored)), key=lambda x: x.start)
    starts = np.array([needed.start, *(part.stop for part in inside)])  # of what is not stored here
    stops = np.array([*(part.start for part in inside), needed.stop])
    before = np.append(0, (stops - starts).cumsum())
    if not before[-1]:
        starts, before = starts[:1], np.array([0, len(needed)])  # all is here: cut it all evenly
    borders = [needed.start]
    for at in range(1, count):
        wanted = int(before[-1]) * at // count  # rows not stored here before this border
        gap = min(int(np.searchsorted(before, wanted, side="right")) - 1, len(starts) - 1)
        borders.append(int(starts[gap]) + wanted - int(before[gap]))
    borders.append(needed.stop)
    return [Rows(start, stop) for start, stop in pairwise(borders)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """The two steps of one rank for all weights with the same partitions; see [Note: two steps].

    ``across`` and ``inside`` are the (owner, reader) partitions of each step: over all ranks, and
    over those of the node, with rows counted from the first that the node reads. ``held`` is the
    number of rows that this rank holds between the steps.
    """

    held: int
    across: tuple[Partition, Partition]
    inside: tuple[Partition, Partition]

    @classmethod
    def of(
        cls, owners: Partition, readers: Partition, rank: int, node_sizes: Sequence[int]
    ) -> _Steps:
        """The two steps of ``rank``."""
        held = _held_rows(owners, readers, node_sizes)
        here = next(ranks for ranks in _ranks_of_nodes(node_sizes) if rank < ranks.stop)
        needed = hull(readers.parts[here])
        return cls(
            held=len(held[rank]),
            across=(owners, Partition(rows=owners.rows, parts=tuple(held))),
            inside=(_within(needed, held[here]), _within(needed, readers.parts[here])),
        )


def _within(outer: Rows, parts: Iterable[Rows]) -> Partition:
    """The partition of the rows ``outer`` into ``parts``, with rows counted from its first row."""
    moved = [
        Rows(part.start - outer.start, part.stop - outer.start) if part else Rows(0, 0)
        for part in parts
    ]
    return Partition(rows=len(outer), parts=tuple(moved))


def _two_step_links(
    nodes: NodeGroups,
    groups: Groups,
    buckets: Sequence[Sequence[WeightSpec]],
    owners: Mapping[str, Partition],
    readers: Mapping[str, Partition],
) -> list[WeightLink]:
    """The link of each bucket in two steps: across nodes, and inside of a node."""
    # by the ids of the two partitions, which many weights share
    known: dict[tuple[int, int], _Steps] = {}
    steps: dict[str, _Steps] = {}
    for weight in (w for bucket in buckets for w in bucket):
        owner, reader = owners[weight.name], readers[weight.name]
        kind = id(owner), id(reader)
        if kind not in known:
            known[kind] = _Steps.of(owner, reader, groups.rank, nodes.sizes)
        steps[weight.name] = known[kind]

    def links(
        partitions: dict[str, tuple[Partition, Partition]], rank: int, group: dist.ProcessGroup
    ) -> list[BucketLink]:
        """The links of one step for ``rank`` of its ``group``, from the (owner, reader) partitions
        of each weight."""
        step_owners = {name: owner for name, (owner, _) in partitions.items()}
        step_readers = {name: reader for name, (_, reader) in partitions.items()}
        return bucket_links(buckets, step_owners, step_readers, rank, group)

    local = dist.get_rank(nodes.inside)
    across = links({name: step.across for name, step in steps.items()}, groups.rank, groups.world)
    inside = links({name: step.inside for name, step in steps.items()}, local, nodes.inside)
    made: list[WeightLink] = []
    for bucket, across_link, inside_link in zip(buckets, across, inside, strict=True):
        held = {weight.name: (steps[weight.name].held, *weight.shape[1:]) for weight in bucket}
        made.append(_TwoSteps(across_link, inside_link, held, nodes.aside))
    return made


class _TwoSteps:
    """The two-step link of one bucket. ``held`` are the shapes of the tensors between the steps, by
    weight; ``aside`` is the stream on which the second step is issued, None on a CPU."""

    def __init__(
        self,
        across: BucketLink,
        inside: BucketLink,
        held: Mapping[str, tuple[int, ...]],
        aside: torch.cuda.Stream | None,
    ) -> None:
        """A link of two steps; with a stream ``aside`` the second step follows the first without
        the host's waiting for it."""
        self._across, self._inside = across, inside
        self._held, self._aside = held, aside
        self.waits = aside is None

    def between_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the tensors between the steps, for elements of ``dtype``."""
        return sum(map(prod, self._held.values())) * dtype.itemsize

    @property
    def pull_elements(self) -> int:
        """Elements this rank receives from others in both steps of a pull."""
        return self._across.pull_elements + self._inside.pull_elements

    @property
    def push_elements(self) -> int:
        """Elements this rank receives from others in both steps of a push."""
        return self._across.push_elements + self._inside.push_elements

    def pull(self, storage: Tensors, working: Tensors, wire: torch.dtype | None = None) -> Pending:
        """Start to copy rows of ``storage`` into ``working``: across nodes, then inside of each."""
        held = self._buffers_between(storage, wire)
        first = self._across.pull(storage, held, wire)
        return self._second_behind(first, held, lambda: self._inside.pull(held, working, wire))

    def push(self, gradients: Tensors, sums: Tensors, wire: torch.dtype | None = None) -> Pending:
        """Start to sum ``gradients`` into ``sums``: inside of each node, then across nodes."""
        held = self._buffers_between(sums, None)
        first = self._inside.push(gradients, held, wire)
        return self._second_behind(first, held, lambda: self._across.push(held, sums, wire))

    def _buffers_between(self, like: Tensors, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        """New tensors for what this rank holds between the steps, by weight, on the device of
        ``like``; of its types where ``dtype`` is None."""
        return {
            name: like[name].new_empty(shape, dtype=dtype) for name, shape in self._held.items()
        }

    def _second_behind(
        self, first: Pending, held: Mapping[str, torch.Tensor], issue: Callable[[], Pending]
    ) -> Pending:
        """Wait for the ``first`` step, on a device on the second step's stream alone, and ``issue``
        the second. Returns the second, which keeps the tensors ``held`` between the steps alive,
        and on a device the first step's buffers as well, so that all are freed only after whatever
        reads them on either stream."""
        kept = () if self._aside is None else first.buffers
        with self._stream_of_second():
            first.wait()
            second = issue()
        return second.keeping((*kept, *held.values()))

    def _stream_of_second(self) -> AbstractContextManager[object]:
        """Within it, kernels go to the stream of the second step; on a CPU nothing changes."""
        return nullcontext() if self._aside is None else torch.cuda.stream(self._aside)
