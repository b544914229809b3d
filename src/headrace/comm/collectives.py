"""Collectives without autograd: their adjoints live with the operators that use them.

On CPUs all of them are deterministic: sums are taken in rank order, never by an algorithm that
depends on the message size. A device adds what came from all ranks in one kernel of torch.
``group=None`` is a group of one rank and communicates nothing.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from headrace.comm.waiting import Transfer
from headrace.errors import PlanMismatch

__all__ = [
    "Arriving",
    "agree",
    "agree_each",
    "all_gather_rows",
    "all_to_all_rows",
    "exchange_bytes",
    "from_first",
    "gather_bytes",
    "gather_floats",
    "gather_to_first",
    "issue_all_gather",
    "issue_all_to_all",
    "issue_padded_gather",
    "issue_reduce_scatter",
    "issue_shift",
    "meet",
    "reduce_scatter_rows",
    "sum_of_parts",
]

_LENGTH = struct.Struct("=q")


class Arriving:
    """An issued collective: ``wait`` returns its result, and is called exactly once.

    Ranks of a group issue what they share in the same order; waits may come in any.
    """

    def __init__(
        self,
        transfer: Transfer | None,
        result: Callable[[], torch.Tensor],
        keep: torch.Tensor | None = None,
    ) -> None:
        """``result`` makes the result once ``transfer`` (None: there was nothing to send) has
        ended; ``keep`` is a buffer that must live until then."""
        self._transfer, self._result = transfer, result
        self._keep = keep  # gloo loses a message whose buffer is freed

    @classmethod
    def there(cls, x: torch.Tensor) -> Arriving:
        """A result ``x`` that needs no communication."""
        return cls(None, lambda: x)

    def wait(self) -> torch.Tensor:
        """The result, once it has arrived."""
        if self._transfer is not None:
            self._transfer.wait()
        result = self._result()
        del self._transfer, self._keep, self._result  # frees the buffers of a sum, too
        return result


def all_to_all_rows(
    x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Rows of ``x`` to each rank of the group in order, ``send[r]`` rows to rank r.

    x        [sum(send), ...]      contiguous or not
    returns  [sum(receive), ...]   rows from rank 0, 1, ... in order
    adjoint  all_to_all_rows(grad, receive, send)
    """
    return issue_all_to_all(x, send, receive, group).wait()


def issue_all_to_all(
    x: torch.Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    group: dist.ProcessGroup | None,
    *,
    out: torch.Tensor | None = None,
) -> Arriving:
    """:func:`all_to_all_rows`, issued; into ``out`` [sum(receive), ...] where it is given."""
    if group is None:
        return Arriving.there(x)
    if out is None:
        out = x.new_empty((sum(receive), *x.shape[1:]))
    sent = x.contiguous()
    work = dist.all_to_all_single(out, sent, list(receive), list(send), group=group, async_op=True)
    return Arriving(Transfer(work, group, x), lambda: out, keep=sent)


def all_gather_rows(
    x: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Everyone's rows in rank order; ``sizes[r]`` rows come from rank r (uneven, zero allowed).

    x        [sizes[rank], ...]
    returns  [sum(sizes), ...]
    adjoint  reduce_scatter_rows(grad, sizes)
    """
    return issue_all_gather(x, sizes, group).wait()


def issue_all_gather(
    x: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None
) -> Arriving:
    """Start :func:`all_gather_rows`; the result is returned by ``wait``."""
    if group is None:
        return Arriving.there(x)
    ranks = dist.get_world_size(group)
    if len(set(sizes)) == 1:
        out = x.new_empty((sum(sizes), *x.shape[1:]))
        sent = x.contiguous()
        work = dist.all_gather_single(out, sent, group=group, async_op=True)
        return Arriving(Transfer(work, group, x), lambda: out, keep=sent)
    if x.device.type != "cpu" and max(sizes) - min(sizes) == 1:
        return _padded_gather(x, sizes, group)
    # No backend gathers sizes that differ freely: each rank sends its rows to every other, which
    # is as many bytes.
    repeated = x.repeat(ranks, *([1] * (x.dim() - 1)))
    return issue_all_to_all(repeated, [len(x)] * ranks, sizes, group)


def _padded_gather(x: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Arriving:
    """An all-gather of equal sizes, padded by one row where a rank has one less: a device has
    kernels for equal sizes, and no rank copies its rows once for each other rank."""
    coming = issue_padded_gather(x, sizes, group)

    def joined() -> torch.Tensor:
        """The rows that arrived, without the padding."""
        parts = coming.wait().split(max(sizes))
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    return Arriving(None, joined)


def issue_padded_gather(
    x: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup
) -> Arriving:
    """:func:`issue_all_gather` of max(sizes) rows from each rank; rows beyond ``sizes[r]`` hold
    arbitrary values."""
    most = max(sizes)
    missing = x.new_empty((most - len(x), *x.shape[1:]))
    padded = torch.cat((x, missing)) if len(missing) else x
    return issue_all_gather(padded, [most] * len(sizes), group)


def reduce_scatter_rows(
    x: torch.Tensor,
    sizes: Sequence[int],
    group: dist.ProcessGroup | None,
    *,
    add: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """The sum over ranks of each rank's rows, half types in fp32; added in rank order on a CPU.

        x        [sum(sizes), ...]
        returns  [sizes[rank], ...]
        adjoint  all_gather_rows(grad, sizes)

    ``add(parts)``, where it is given, makes the result from the parts of all ranks
    [R, sizes[rank], ...] in place of :func:`sum_of_parts`.
    """
    return issue_reduce_scatter(x, sizes, group, add=add).wait()


def issue_reduce_scatter(
    x: torch.Tensor,
    sizes: Sequence[int],
    group: dist.ProcessGroup | None,
    *,
    add: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Arriving:
    """Start :func:`reduce_scatter_rows`; the result is returned by ``wait``."""
    if group is None:
        return Arriving.there(x) if add is None else Arriving(None, lambda: add(x[None]))
    add = add or sum_of_parts
    own_rows = sizes[dist.get_rank(group)]
    ranks = dist.get_world_size(group)
    parts = x.new_empty((ranks, own_rows, *x.shape[1:]))
    sent = x.contiguous()
    work = dist.all_to_all_single(
        parts.view(ranks * own_rows, *x.shape[1:]),
        sent,
        [own_rows] * ranks,
        list(sizes),
        group=group,
        async_op=True,
    )
    return Arriving(Transfer(work, group, x), lambda: add(parts), keep=sent)


def sum_of_parts(parts: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """The sum over the first dim of parts [R, ...], half types in fp32, on a CPU in rank order;
    written to ``into`` [...], of any strides, where it is given."""
    if parts.device.type != "cpu":  # one kernel, which adds half types in fp32
        return parts.sum(0) if into is None else torch.sum(parts, 0, out=into)
    is_half = parts.element_size() < 4
    total = parts[0].float() if is_half else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype) if into is None else into.copy_(total)


def issue_shift(x: torch.Tensor, rows: int, group: dist.ProcessGroup | None) -> Arriving:
    """Rows of ``x`` to the next rank of a ring, ``rows`` rows from the one before.

    x        [t, ...]
    returns  [rows, ...]
    adjoint  the shift the other way
    """
    if group is None:
        return Arriving.there(x)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    send, receive = [0] * ranks, [0] * ranks
    send[(rank + 1) % ranks] = len(x)
    receive[(rank - 1) % ranks] = rows
    return issue_all_to_all(x, send, receive, group)


def gather_bytes(
    payload: bytes, group: dist.ProcessGroup | None, *, device: str | torch.device = "cpu"
) -> list[bytes]:
    """Every rank's payload in rank order, as bytes (no pickle on the wire), by way of tensors on
    ``device``."""
    if group is None:
        return [payload]
    size = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    sizes = [int(count) for count in all_gather_rows(size, [1] * dist.get_world_size(group), group)]
    # frombuffer refuses an empty buffer: an empty payload gets a byte that is cut off again
    sent = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[: len(payload)]
    received = bytes(all_gather_rows(sent.to(device), sizes, group).cpu().numpy())
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    return [received[start : start + count] for start, count in zip(starts, sizes, strict=True)]


def exchange_bytes(payloads: Sequence[bytes], group: dist.ProcessGroup | None) -> list[bytes]:
    """What every rank of the group gives this one, in rank order, where this one gives
    ``payloads[r]`` to rank r: as bytes, by way of the host."""
    if group is None:
        return list(payloads)
    ones, send = [1] * len(payloads), [len(payload) for payload in payloads]
    receive = all_to_all_rows(torch.tensor(send, dtype=torch.int64), ones, ones, group).tolist()
    joined = b"".join(payloads)
    # frombuffer refuses an empty buffer: an empty one gets a byte that is cut off again
    sent = torch.frombuffer(bytearray(joined or b"\0"), dtype=torch.uint8)[: len(joined)]
    received = bytes(all_to_all_rows(sent, send, receive, group).numpy())
    starts = [sum(receive[:rank]) for rank in range(len(receive))]
    return [received[start : start + count] for start, count in zip(starts, receive, strict=True)]


def gather_to_first(payload: bytes, group: dist.ProcessGroup | None) -> list[bytes] | None:
    """Every rank's payload in rank order on the group's first rank, None on the others, whose work
    does not grow with the number of ranks. Payloads are padded to the longest."""
    if group is None:
        return [payload]
    first_rank, is_first = dist.get_global_rank(group, 0), dist.get_rank(group) == 0
    longest = torch.tensor(len(payload), dtype=torch.int64)
    work = dist.all_reduce(longest, dist.ReduceOp.MAX, group=group, async_op=True)
    Transfer(work, group, longest).wait()
    row_bytes = _LENGTH.size + int(longest)
    # each row: the length of the payload, the payload, zeros up to the longest one
    sent = torch.frombuffer(
        bytearray(_LENGTH.pack(len(payload)) + payload).ljust(row_bytes, b"\0"), dtype=torch.uint8
    )
    count = dist.get_world_size(group) if is_first else 0
    received = torch.empty((count, row_bytes), dtype=torch.uint8)
    rows = list(received.unbind()) if is_first else None
    work = dist.gather(sent, rows, first_rank, group=group, async_op=True)
    Transfer(work, group, sent).wait()
    if not is_first:
        return None
    padded = [row.tobytes() for row in received.numpy()]
    return [row[_LENGTH.size :][: _LENGTH.unpack_from(row)[0]] for row in padded]


def from_first(payload: bytes, group: dist.ProcessGroup | None) -> bytes:
    """The payload of the group's first rank, on all ranks; the other payloads are ignored."""
    if group is None:
        return payload
    first_rank, is_first = dist.get_global_rank(group, 0), dist.get_rank(group) == 0
    size = torch.tensor([len(payload)], dtype=torch.int64)
    work = dist.broadcast(size, first_rank, group=group, async_op=True)
    Transfer(work, group, size).wait()
    flat = torch.empty(int(size), dtype=torch.uint8)
    if is_first and payload:
        flat.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    if len(flat):
        work = dist.broadcast(flat, first_rank, group=group, async_op=True)
        Transfer(work, group, flat).wait()
    return bytes(flat.numpy())


def gather_floats(values: Sequence[float], group: dist.ProcessGroup | None) -> list[list[float]]:
    """Every rank's list of floats (sent in fp64), in rank order; all lists are equally long."""
    if group is None:
        return [list(values)]
    ranks = dist.get_world_size(group)
    flat = all_gather_rows(torch.tensor(values, dtype=torch.float64), [len(values)] * ranks, group)
    return flat.view(ranks, -1).tolist()


def meet(group: dist.ProcessGroup | None) -> None:
    """A barrier on the host: wait until all ranks of the group have called it."""
    if group is not None:
        x = torch.zeros(1)
        work = dist.all_reduce(x, group=group, async_op=True)
        Transfer(work, group, x).wait()


def agree(
    what: str,
    value: str,
    group: dist.ProcessGroup | None,
    *,
    shown: int = 12,
    hint: str = "all ranks must see the same files, configuration and versions",
) -> None:
    """Raise PlanMismatch on every rank when ``value`` is not the same on all of them; its message
    has the first ``shown`` characters of values that differ, and ``hint``. A digest of fixed size
    is compared; the values are exchanged only where digests differ."""
    if group is None:
        return
    # One all-reduce gives max(d) and max(~d) = ~min(d): digests agree where maximum and minimum do.
    digest = torch.frombuffer(bytearray(hashlib.sha256(value.encode()).digest()), dtype=torch.int64)
    extremes = torch.stack([digest, ~digest])
    work = dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group, async_op=True)
    Transfer(work, group, extremes).wait()
    if torch.equal(extremes[0], ~extremes[1]):
        return
    values = [gathered.decode() for gathered in gather_bytes(value.encode(), group)]
    other_ranks = [rank for rank, text in enumerate(values) if text != values[0]]
    if other_ranks:
        raise PlanMismatch(
            what,
            got=f"{values[other_ranks[0]][:shown]} on rank {other_ranks[0]}",
            wanted=f"{values[0][:shown]} as on rank 0",
            hint=hint,
        )


def agree_each(of: str, values: Mapping[str, str], group: dist.ProcessGroup | None) -> None:
    """Raise PlanMismatch on every rank when one of the ``values`` by name, arguments of a function
    ``of``, is not the same on all; the error names the first that differs."""
    try:  # all at once, which is one exchange where they agree
        agree(f"arguments of {of}", "\n".join(f"{k}={v}" for k, v in values.items()), group)
    except PlanMismatch:  # on every rank
        for name, value in values.items():
            agree(f"argument {name} of {of}", value, group)
        raise
