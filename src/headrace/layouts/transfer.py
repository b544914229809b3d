"""Moving rows along links: one uneven all-to-all per bucket and direction.

Shape legend: a bucket holds several weights; a rank's rows of them travel as one flat buffer per
peer, in the order of the bucket's weights, so no lengths are exchanged. Own rows are copied, not
sent. Buckets whose weights have equal partitions share the computation of their links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from headrace.comm.waiting import Transfer
from headrace.layouts.partition import Partition, rows_between
from headrace.layouts.peer_rows import ReadRows, ServedRows, Tensors
from headrace.spec.architecture import WeightSpec

__all__ = ["BucketLink", "Pending", "bucket_links"]


class BucketLink:
    """The link of one bucket for one rank: what it sends and receives in a pull (stored rows to the
    ranks that work with them) and in a push (gradients back). Buckets with equal partitions may
    share ``serving`` and ``reading``."""

    def __init__(
        self,
        names: Sequence[str],
        serving: ServedRows,
        reading: ReadRows,
        group: dist.ProcessGroup,
    ) -> None:
        """A link over ``group`` for the weights ``names``: ``serving`` are the rows that this rank
        owns and others read, ``reading`` those that it reads of others."""
        self._names, self._group = tuple(names), group
        self._serving, self._reading = serving, reading

    @property
    def pull_elements(self) -> int:
        """Elements this rank receives from others in a pull, and sends to others in a push."""
        return self._reading.total

    @property
    def push_elements(self) -> int:
        """Elements this rank sends to others in a pull, and receives from others in a push."""
        return self._serving.total

    @property
    def waits(self) -> bool:
        """Whether the rank waits while it issues a transfer: never."""
        return False

    def between_bytes(self, dtype: torch.dtype) -> int:
        """Bytes held between the two steps of a transfer: none, as there is one step."""
        return 0

    def pull(self, storage: Tensors, working: Tensors, wire: torch.dtype | None = None) -> Pending:
        """Issue the copy of ``storage`` rows into ``working``; both hold this rank's parts.

        ``wire`` is the dtype in which they travel, by default that of ``storage``.
        """
        names, serving, reading = self._names, self._serving, self._reading
        own_rows = zip(reading.own(names, working), serving.own(names, storage), strict=True)
        for read_rows, stored_rows in own_rows:
            read_rows.copy_(stored_rows)
        sent = serving.pack(names, storage, wire)
        received, transfer = self._exchange(sent, serving.sizes, reading.sizes)
        return Pending(
            transfer, lambda: reading.unpack(received, names, working), keep=(sent, received)
        )

    def push(self, gradients: Tensors, sums: Tensors, wire: torch.dtype | None = None) -> Pending:
        """Issue the sum of all readers' ``gradients``, which travel as ``wire``, into their
        owners' ``sums``.

        ``sums`` is overwritten: readers are added in rank order, so the same plan gives the same
        bits, and a rank that reads nothing contributes nothing.
        """
        names, serving, reading = self._names, self._serving, self._reading
        sent = reading.pack(names, gradients, wire)
        received, transfer = self._exchange(sent, reading.sizes, serving.sizes)
        own = reading.own(names, gradients)
        return Pending(
            transfer, lambda: serving.add(received, own, names, sums), keep=(sent, received)
        )

    def _exchange(
        self, sent: torch.Tensor, sent_sizes: list[int], received_sizes: list[int]
    ) -> tuple[torch.Tensor, Transfer | None]:
        """Issue an all-to-all of ``sent``: ``sent_sizes[r]`` elements to rank r and
        ``received_sizes[r]`` from it. Returns the buffer for what is received, and the transfer,
        None where there is one rank alone."""
        received = sent.new_empty(sum(received_sizes))
        if len(received_sizes) == 1:
            return received, None
        work = dist.all_to_all_single(
            received, sent, received_sizes, sent_sizes, group=self._group, async_op=True
        )
        return received, Transfer(work, self._group, sent)


def bucket_links(
    buckets: Iterable[Sequence[WeightSpec]],
    owners: Mapping[str, Partition],
    readers: Mapping[str, Partition],
    rank: int,
    group: dist.ProcessGroup,
) -> list[BucketLink]:
    """The links of all buckets for ``rank`` of ``group``; ``owners`` and ``readers`` are the
    storage and the working partition of each weight by its name.

    Buckets whose weights have the same partition objects, as most layers have, share the rows that
    they serve and read.
    """
    shared_bounds: dict[tuple[int, int], _ServedAndRead] = {}
    shared_rows: dict[tuple[tuple[int, int, int], ...], tuple[ServedRows, ReadRows]] = {}
    links: list[BucketLink] = []
    for bucket in buckets:
        pairs = [(owners[weight.name], readers[weight.name]) for weight in bucket]
        row_elements = [weight.row_elements for weight in bucket]
        kind = tuple(
            (id(owner), id(reader), elements)
            for (owner, reader), elements in zip(pairs, row_elements, strict=True)
        )
        if kind not in shared_rows:
            shared_rows[kind] = _rows_of_bucket(pairs, row_elements, rank, shared_bounds)
        serving, reading = shared_rows[kind]
        links.append(BucketLink([weight.name for weight in bucket], serving, reading, group))
    return links


_ServedAndRead = tuple[NDArray[np.int64], NDArray[np.int64]]
"""The rows of one weight that a rank serves to and reads from each peer: first row and end,
[peers, 2] each."""


def _rows_of_bucket(
    pairs: Sequence[tuple[Partition, Partition]],
    row_elements: Sequence[int],
    rank: int,
    shared_bounds: dict[tuple[int, int], _ServedAndRead],
) -> tuple[ServedRows, ReadRows]:
    """(what ``rank`` serves, what it reads) of a bucket. ``pairs`` are the (owner, reader)
    partitions of its weights, ``row_elements`` the elements in a row of each.

    ``shared_bounds`` caches the bounds of each pair of partition objects, by their ids.
    """
    bounds_of_weights: list[_ServedAndRead] = []
    for owner, reader in pairs:
        key = id(owner), id(reader)
        if key not in shared_bounds:
            shared_bounds[key] = rows_between(owner, reader, rank)
        bounds_of_weights.append(shared_bounds[key])
    served = np.stack([served for served, _ in bounds_of_weights], axis=1)  # [peers, weights, 2]
    read = np.stack([read for _, read in bounds_of_weights], axis=1)
    # rows are counted in the weight so far, from here on in the tensor of this rank's part of it
    owned = [owner.parts[rank] for owner, _ in pairs]
    served -= np.array([[[rows.start] for rows in owned]])
    read -= np.array([[[reader.parts[rank].start] for _, reader in pairs]])
    return (
        ServedRows(served, row_elements, [len(rows) for rows in owned], rank),
        ReadRows(read, row_elements, rank),
    )


class Pending:
    """A transfer of rows that has been issued; call ``wait`` exactly once. Its ``buffers`` must
    live until then."""

    def __init__(
        self,
        transfer: Transfer | None,
        finish: Callable[[], None],
        keep: tuple[torch.Tensor, ...],
    ) -> None:
        """``transfer`` is the collective under way, None where nothing travels; ``finish`` puts the
        received values in place once it has ended; ``keep`` are its buffers."""
        self._transfer, self._finish = transfer, finish
        self.buffers = keep  # gloo loses a message whose buffer is freed

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that the transfer keeps alive."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def keeping(self, more: tuple[torch.Tensor, ...]) -> Pending:
        """Keep the buffers ``more`` alive until the transfer's end, too; returns this transfer."""
        self.buffers += more
        return self

    def wait(self) -> None:
        """Wait for the transfer, put the received values in place and let the buffers go."""
        if self._transfer is not None:
            self._transfer.wait()
        self._finish()
        self.buffers = ()
