"""Moving rows along links: one uneven all-to-all per bucket and direction.

Shape legend: a bucket holds several weights; a rank's slices of them travel as one flat buffer
per peer, in the order of the bucket's weights. Own rows are copied, not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from headrace.comm.waiting import Transfer
from headrace.layouts.intervals import Partition, Rows
from headrace.layouts.link import Slice, link_of
from headrace.spec.weights import WeightSpec

__all__ = ["BucketLink", "Pending", "Tensors", "bucket_links"]

Tensors = Mapping[str, torch.Tensor]
Slices = tuple[tuple[Slice, ...], tuple[Slice, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    weight: str
    rows: Rows
    peer: int
    elements: int


class BucketLink:
    """The link of one bucket for one rank: what it sends and receives in a pull and in a push.

    ``slices`` of a weight are those that the rank serves and those that it reads.
    """

    def __init__(
        self,
        weights: Sequence[WeightSpec],
        owners: Mapping[str, Partition],
        readers: Mapping[str, Partition],
        slices: Mapping[str, Slices],
        rank: int,
        group: dist.ProcessGroup,
    ) -> None:
        self._group, self._rank = group, rank
        self._ranks = dist.get_world_size(group)
        self._owned = {w.name: owners[w.name].parts[rank] for w in weights}
        self._read = {w.name: readers[w.name].parts[rank] for w in weights}
        serving: list[_Piece] = []
        reading: list[_Piece] = []
        for weight in weights:
            served, read = slices[weight.name]
            serving += [_piece(weight, part, part.reader) for part in served]
            reading += [_piece(weight, part, part.owner) for part in read]
        # Both sides sort by peer and keep the bucket's order of weights: no lengths are exchanged.
        self._serving = sorted(serving, key=lambda p: p.peer)
        self._reading = sorted(reading, key=lambda p: p.peer)

    @property
    def pull_elements(self) -> int:
        """Elements this rank receives from others in a pull, and sends to others in a push."""
        return sum(p.elements for p in self._reading if p.peer != self._rank)

    @property
    def push_elements(self) -> int:
        """Elements this rank sends to others in a pull, and receives from others in a push."""
        return sum(p.elements for p in self._serving if p.peer != self._rank)

    def pull(self, storage: Tensors, working: Tensors, wire: torch.dtype | None = None) -> Pending:
        """Issue the copy of ``storage`` rows into ``working``; both hold this rank's parts.

        ``wire`` is the dtype in which they travel, that of ``storage`` unless told.
        """
        _fill(self._serving, self._reading, self._rank, storage, self._owned, working, self._read)
        sent = self._flatten(self._serving, storage, self._owned, wire)
        received, transfer = self._exchange(sent, self._serving, self._reading)

        def finish() -> None:
            for piece, value in self._unflatten(received, self._reading):
                _view(piece, working, self._read).copy_(value)

        return Pending(transfer, finish, keep=(sent, received))

    def push(self, gradients: Tensors, sums: Tensors, wire: torch.dtype | None = None) -> Pending:
        """Issue the sum of all readers' ``gradients``, which travel as ``wire``, into their
        owners' ``sums``.

        ``sums`` is overwritten: readers are added in rank order, so the same plan gives the same
        bits, and a rank that reads nothing contributes nothing.
        """
        sent = self._flatten(self._reading, gradients, self._read, wire)
        received, transfer = self._exchange(sent, self._reading, self._serving)

        def finish() -> None:
            for total in sums.values():
                total.zero_()
            arrived = self._unflatten(received, self._serving)
            for piece in self._serving:
                if piece.peer == self._rank:
                    value = _view(piece, gradients, self._read)
                else:
                    _, value = next(arrived)
                _view(piece, sums, self._owned).add_(value)

        return Pending(transfer, finish, keep=(sent, received))

    def _flatten(
        self, pieces: Sequence[_Piece], source: Tensors, held: Mapping[str, Rows],
        wire: torch.dtype | None,
    ) -> torch.Tensor:  # fmt: skip
        like = next(iter(source.values()))
        dtype = wire or like.dtype
        parts = [
            _view(p, source, held).reshape(p.elements).to(dtype)
            for p in pieces
            if p.peer != self._rank
        ]
        return torch.cat(parts) if parts else like.new_empty(0, dtype=dtype)

    def _exchange(
        self, sent: torch.Tensor, out: Sequence[_Piece], back: Sequence[_Piece]
    ) -> tuple[torch.Tensor, Transfer | None]:
        send, receive = self._sizes(out), self._sizes(back)
        received = sent.new_empty(sum(receive))
        if self._ranks == 1:
            return received, None
        work = dist.all_to_all_single(
            received, sent, receive, send, group=self._group, async_op=True
        )
        return received, Transfer(work, self._group)

    def _sizes(self, pieces: Sequence[_Piece]) -> list[int]:
        sizes = [0] * self._ranks
        for piece in pieces:
            if piece.peer != self._rank:
                sizes[piece.peer] += piece.elements
        return sizes

    def _unflatten(
        self, flat: torch.Tensor, pieces: Sequence[_Piece]
    ) -> Iterator[tuple[_Piece, torch.Tensor]]:
        at = 0
        for piece in pieces:
            if piece.peer != self._rank:
                yield piece, flat[at : at + piece.elements]
                at += piece.elements


def bucket_links(
    buckets: Iterable[Sequence[WeightSpec]],
    owners: Mapping[str, Partition],
    readers: Mapping[str, Partition],
    rank: int,
    group: dist.ProcessGroup,
) -> list[BucketLink]:
    """The links of all buckets. Weights that share their partitions share the work."""
    made: dict[tuple[int, int], Slices] = {}
    slices: dict[str, Slices] = {}
    for name, wanted in readers.items():
        same = (id(owners[name]), id(wanted))
        if same not in made:
            made[same] = link_of(owners[name], wanted, rank)
        slices[name] = made[same]
    return [BucketLink(bucket, owners, readers, slices, rank, group) for bucket in buckets]


class Pending:
    """An issued transfer. ``wait`` returns when its rows have arrived; call it exactly once."""

    def __init__(
        self,
        transfer: Transfer | None,
        finish: Callable[[], None],
        keep: tuple[torch.Tensor, ...],
    ) -> None:
        self._transfer, self._finish = transfer, finish
        self._keep = keep  # gloo loses a message whose buffer is freed

    def wait(self) -> None:
        """Wait for the transfer and put the rows in their place."""
        if self._transfer is not None:
            self._transfer.wait()
        self._finish()
        self._keep = ()


def _piece(weight: WeightSpec, part: Slice, peer: int) -> _Piece:
    return _Piece(
        weight=weight.name, rows=part.rows, peer=peer, elements=len(part.rows) * weight.row_elements
    )


def _view(piece: _Piece, tensors: Tensors, held: Mapping[str, Rows]) -> torch.Tensor:
    rows = tensors[piece.weight][piece.rows.within(held[piece.weight])]
    return rows if rows.dim() == 1 else rows.reshape(-1)


def _fill(
    serving: Sequence[_Piece], reading: Sequence[_Piece], rank: int,
    storage: Tensors, owned: Mapping[str, Rows], working: Tensors, read: Mapping[str, Rows],
) -> None:  # fmt: skip
    for piece in serving:
        if piece.peer == rank:
            _view(piece, working, read).copy_(_view(piece, storage, owned))
    assert sum(p.peer == rank for p in serving) == sum(p.peer == rank for p in reading)
