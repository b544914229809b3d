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
    """The link of one bucket, whose weights have ``names``, for one rank: what it sends and
    receives in a pull and in a push. ``serving`` and ``reading`` may be those of other buckets."""

    def __init__(
        self,
        names: Sequence[str],
        serving: ServedRows,
        reading: ReadRows,
        group: dist.ProcessGroup,
    ) -> None:
        """The link of a bucket's weights ``names``: the rows that this rank serves to others, and
        those that it reads."""
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
        own = zip(reading.own(names, working), serving.own(names, storage), strict=True)
        for here, there in own:
            here.copy_(there)
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
        self, sent: torch.Tensor, out: list[int], back: list[int]
    ) -> tuple[torch.Tensor, Transfer | None]:
        """Issue an all-to-all of ``sent``, ``out[r]`` elements to rank r and ``back[r]`` from it;
        the transfer is None on one rank."""
        received = sent.new_empty(sum(back))
        if len(back) == 1:
            return received, None
        work = dist.all_to_all_single(received, sent, back, out, group=self._group, async_op=True)
        return received, Transfer(work, self._group, sent)


def bucket_links(
    buckets: Iterable[Sequence[WeightSpec]],
    owners: Mapping[str, Partition],
    readers: Mapping[str, Partition],
    rank: int,
    group: dist.ProcessGroup,
) -> list[BucketLink]:
    """The links of all buckets. Buckets with equal partitions, as most layers have, share them."""
    between: dict[tuple[int, int], tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
    sides: dict[tuple[tuple[int, int, int], ...], tuple[ServedRows, ReadRows]] = {}
    links: list[BucketLink] = []
    for bucket in buckets:
        pairs = [(owners[weight.name], readers[weight.name]) for weight in bucket]
        elements = [weight.row_elements for weight in bucket]
        kind = tuple((id(o), id(r), n) for (o, r), n in zip(pairs, elements, strict=True))
        if kind not in sides:
            for owner, reader in pairs:
                same = id(owner), id(reader)
                if same not in between:
                    between[same] = rows_between(owner, reader, rank)
            serving, reading = (
                np.stack([between[id(o), id(r)][side] for o, r in pairs], axis=1) for side in (0, 1)
            )
            # From rows of the weight to rows of the tensor that holds this rank's part.
            owned = [owner.parts[rank] for owner, _ in pairs]
            serving -= np.array([[[rows.start] for rows in owned]])
            reading -= np.array([[[reader.parts[rank].start] for _, reader in pairs]])
            sides[kind] = (
                ServedRows(serving, elements, [len(rows) for rows in owned], rank),
                ReadRows(reading, elements, rank),
            )
        links.append(BucketLink([w.name for w in bucket], *sides[kind], group))
    return links


class Pending:
    """An issued transfer with its ``buffers``. ``wait`` returns when its rows have
    arrived; call it exactly once."""

    def __init__(
        self,
        transfer: Transfer | None,
        finish: Callable[[], None],
        keep: tuple[torch.Tensor, ...],
    ) -> None:
        """A move under way: ``finish`` puts the values in place once ``transfer`` has ended."""
        self._transfer, self._finish = transfer, finish
        self.buffers = keep  # gloo loses a message whose buffer is freed

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that the transfer keeps alive."""
        return sum(x.nbytes for x in self.buffers)

    def keeping(self, more: tuple[torch.Tensor, ...]) -> Pending:
        """This transfer, which also keeps the buffers ``more`` alive until its end."""
        self.buffers += more
        return self

    def wait(self) -> None:
        """Wait for the transfer and copy the received rows to their tensors."""
        if self._transfer is not None:
            self._transfer.wait()
        self._finish()
        self.buffers = ()
