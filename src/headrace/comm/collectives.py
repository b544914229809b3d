"""Collectives without autograd: their adjoints live with the operators that use them.

All of them are deterministic: sums are taken in rank order, never by an algorithm that depends on
the message size. ``group=None`` is a group of one rank and communicates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from headrace.errors import PlanMismatch

__all__ = [
    "agree",
    "all_gather_rows",
    "all_to_all_rows",
    "gather_bytes",
    "gather_floats",
    "group_size",
    "reduce_scatter_rows",
]


def group_size(group: dist.ProcessGroup | None) -> int:
    """Ranks of a group; one for None."""
    return 1 if group is None else dist.get_world_size(group)


def all_to_all_rows(
    x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Rows of ``x`` to each rank of the group in order, ``send[r]`` rows to rank r.

        x        [sum(send), ...]      contiguous or not
        returns  [sum(receive), ...]   rows from rank 0, 1, ... in order
        adjoint  all_to_all_rows(grad, receive, send)
    """  # fmt: skip
    if group is None:
        return x
    out = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=group)
    return out


def all_gather_rows(
    x: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Everyone's rows in rank order; ``sizes[r]`` rows come from rank r (uneven, zero allowed).

        x        [sizes[rank], ...]
        returns  [sum(sizes), ...]
        adjoint  reduce_scatter_rows(grad, sizes)
    """  # fmt: skip
    if group is None:
        return x
    ranks = dist.get_world_size(group)
    if len(set(sizes)) == 1:
        out = x.new_empty((sum(sizes), *x.shape[1:]))
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        gather(out, x.contiguous(), group=group)
        return out
    # gloo has no uneven all-gather: each rank sends its rows to every other, the same bytes.
    repeated = x.repeat(ranks, *([1] * (x.dim() - 1)))
    return all_to_all_rows(repeated, [len(x)] * ranks, sizes, group)


def reduce_scatter_rows(
    x: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """The sum over ranks of each rank's rows, added in rank order.

        x        [sum(sizes), ...]
        returns  [sizes[rank], ...]
        adjoint  all_gather_rows(grad, sizes)
    """  # fmt: skip
    if group is None:
        return x
    mine = sizes[dist.get_rank(group)]
    ranks = dist.get_world_size(group)
    parts = all_to_all_rows(x, sizes, [mine] * ranks, group).view(ranks, mine, *x.shape[1:])
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def gather_bytes(payload: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Every rank's payload in rank order, as bytes (no pickle on the wire)."""
    if group is None:
        return [payload]
    size = torch.tensor([len(payload)], dtype=torch.int64)
    sizes = [int(n) for n in all_gather_rows(size, [1] * dist.get_world_size(group), group)]
    mine = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[: len(payload)]
    flat = bytes(all_gather_rows(mine, sizes, group).numpy())
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    return [flat[start : start + n] for start, n in zip(starts, sizes, strict=True)]


def gather_floats(values: Sequence[float], group: dist.ProcessGroup | None) -> list[list[float]]:
    """Every rank's list of as many floats (fp64 on the wire), in rank order."""
    if group is None:
        return [list(values)]
    ranks = dist.get_world_size(group)
    flat = all_gather_rows(torch.tensor(values, dtype=torch.float64), [len(values)] * ranks, group)
    return flat.view(ranks, -1).tolist()


def agree(what: str, value: str, group: dist.ProcessGroup | None) -> None:
    """Raise PlanMismatch on every rank when ``value`` is not the same on all of them."""
    values = [payload.decode() for payload in gather_bytes(value.encode(), group)]
    odd = [rank for rank, other in enumerate(values) if other != values[0]]
    if odd:
        raise PlanMismatch(
            what, got=f"{values[odd[0]][:12]} on rank {odd[0]}",
            wanted=f"{values[0][:12]} as on rank 0",
            hint="all ranks must see the same files, configuration and versions",
        )  # fmt: skip
