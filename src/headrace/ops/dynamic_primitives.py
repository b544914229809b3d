"""``hr.split``, ``hr.switch`` and ``hr.gather``: the primitives of DSP (Table 2), to be called in
models.

They are the operators of :mod:`headrace.ops.switch` for callers who need not know how many places
other ranks have, and may be mistaken. Before anything is sent, ranks tell each other what they were
called with, and all of them refuse calls that differ. A graph of torch.compile cannot wait for
that: it breaks at the call, unless ``sizes`` are given and nothing is compared.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from headrace.comm.collectives import all_gather_rows, gather_bytes
from headrace.errors import PlanMismatch, SpecError
from headrace.ops.switch import dim_of, shard_sizes, switched_dims, whole_sizes
from headrace.ops.switch import gather as gather_shards
from headrace.ops.switch import split as take_shard
from headrace.ops.switch import switch as switch_shards
from headrace.ops.traced_switch import GroupSlot, traced_gather, traced_switch

__all__ = ["gather", "split", "switch"]

_Sizes = tuple[int, ...]
"""Places of a sharded dim on each rank, in rank order."""

_MESSAGE = struct.Struct("=q24s")
"""The places of the sharded dim on one rank, and a digest of what the rank was called with: 32
bytes, which are sent as four int64."""


def split(
    x: torch.Tensor,
    dim: int,
    group: dist.ProcessGroup | None,
    *,
    sizes: Sequence[int] | None = None,
    compare: bool = True,
) -> torch.Tensor:
    """Take this rank's shard of a tensor that all ranks of a group have alike (DSP, Table 2).

    ``[.., S, ..]`` becomes ``[.., sizes[r], ..]`` on rank r, a view; nothing of the tensor is sent.
    The adjoint puts the gradient in its place among zeros: the objective is the sum of all ranks'
    losses, so the gradients of all ranks add up, and nothing is scaled.

    Args:
        x: The whole tensor. That its values are the same on all ranks is not looked at.
        dim: The dim to shard; negative ones count from the end.
        group: The ranks that share the tensor; None for a rank that has it alone, not for all ranks
            as in torch.
        sizes: The places for each rank, in rank order, 0 too; as even as can be where they are left
            out, larger ones first.
        compare: Whether ranks tell each other what they were called with: one small message.

    Returns:
        This rank's shard.

    Raises:
        SpecError: For what is no tensor, a dim that is not there, sizes that are not those of the
            dim, and a group that this rank is not in.
        PlanMismatch: On all ranks, where their tensors, dims or sizes differ.
    """
    _check("split", x, (dim,), group)
    given = _sizes("split", sizes)
    if group is not None and compare:
        _compared_sizes("split", x, (dim,), None, group, (given,))
    return take_shard(x, dim, group, sizes=given)


def switch(
    x: torch.Tensor,
    from_dim: int,
    to_dim: int,
    group: dist.ProcessGroup | None,
    *,
    sizes: Sequence[int] | None = None,
    to_sizes: Sequence[int] | None = None,
    compare: bool = True,
) -> torch.Tensor:
    """Gather one dim and shard another instead, by one all-to-all (DSP, Table 2 and Equation 10).

    ``[.., sizes[r], .., S, ..]`` becomes ``[.., sum(sizes), .., to_sizes[r], ..]`` on rank r. Of
    M bytes in all a rank sends M (N - 1) / N^2 to the N - 1 others; nothing is padded. The adjoint
    is the switch back. A backward sends as much again, and so does a checkpoint that is computed
    again with a switch in it.

    Args:
        x: This rank's shard.
        from_dim: The dim that is sharded; negative ones count from the end.
        to_dim: The dim to shard instead.
        group: The ranks that share the tensor; None for a rank that has it alone, not for all ranks
            as in torch.
        sizes: The places of ``from_dim`` on each rank, in rank order; ranks tell each other where
            they are left out.
        to_sizes: The places of ``to_dim`` for each rank, 0 too; as even as can be where they are
            left out, larger ones first, as :func:`split` has them.
        compare: Whether ranks tell each other what they were called with: one small message, for
            which a GPU is waited for. Without it ``sizes`` are needed, and calls that differ hang
            or give garbage.

    Returns:
        This rank's shard of ``to_dim``, all of ``from_dim``.

    Raises:
        SpecError: For what is no tensor, dims that are not there or the same, sizes that are not
            those of the dims, no sizes where ranks do not compare, and a group that this rank is
            not in.
        PlanMismatch: On all ranks, where their primitives, tensors, dims or sizes differ.
    """
    _check("switch", x, (from_dim, to_dim), group)
    given, wanted = _sizes("switch", sizes), _sizes("switch", to_sizes)
    if group is not None:
        dims = (from_dim, to_dim)
        given = _sizes_by_rank("switch", x, dims, group, given, (wanted,), compare=compare)
        if torch.compiler.is_compiling():
            sharded, whole = switched_dims(x, from_dim, to_dim)
            return traced_switch(
                x,
                sharded,
                whole,
                list(shard_sizes(x, sharded, group, given)),
                list(whole_sizes(x, whole, group, wanted)),
                _handle(group),
                dist.get_rank(group),
            )
    return switch_shards(x, from_dim, to_dim, group, sizes=given, to_sizes=wanted)


def gather(
    x: torch.Tensor,
    dim: int,
    group: dist.ProcessGroup | None,
    *,
    sizes: Sequence[int] | None = None,
    compare: bool = True,
) -> torch.Tensor:
    """Gather the shards of all ranks on every one of them (DSP, Table 2).

    ``[.., sizes[r], ..]`` on rank r becomes ``[.., sum(sizes), ..]``. Of M bytes in all a rank
    receives M (N - 1) / N. The adjoint is the sum of all ranks' gradients of this rank's shard, of
    the same traffic: a loss that all ranks compute alike of the result is divided by their number.

    Args:
        x: This rank's shard.
        dim: The dim that is sharded; negative ones count from the end.
        group: The ranks that share the tensor; None for a rank that has it alone, not for all ranks
            as in torch.
        sizes: The places of each rank, in rank order; ranks tell each other where they are left
            out.
        compare: Whether ranks tell each other what they were called with, as in :func:`switch`.

    Returns:
        The whole tensor.

    Raises:
        SpecError: For what is no tensor, a dim that is not there, sizes that are not those of the
            dim, no sizes where ranks do not compare, and a group that this rank is not in.
        PlanMismatch: On all ranks, where their primitives, tensors, dims or sizes differ.
    """
    _check("gather", x, (dim,), group)
    given = _sizes("gather", sizes)
    if group is not None:
        given = _sizes_by_rank("gather", x, (dim,), group, given, (), compare=compare)
        if torch.compiler.is_compiling():
            sharded = dim_of(x, dim)
            sizes_by_rank = list(shard_sizes(x, sharded, group, given))
            return traced_gather(x, sharded, sizes_by_rank, _handle(group), dist.get_rank(group))
    return gather_shards(x, dim, group, sizes=given)


def _check(name: str, x: object, dims: tuple[object, ...], group: object) -> None:
    """Raise SpecError where ``x`` is no plain tensor, a dim no number, or ``group`` no group of
    this rank; errors name the primitive ``name``."""
    if not isinstance(x, torch.Tensor) or isinstance(x, DTensor):
        hint = "x.to_local() is a rank's shard" if isinstance(x, DTensor) else None
        raise SpecError(f"x of {name}", got=type(x).__name__, wanted="a torch.Tensor", hint=hint)
    for dim in dims:
        if not isinstance(dim, int):
            raise SpecError(f"dim of {name}", got=repr(dim), wanted="its number")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise SpecError(
            f"group of {name}",
            got=type(group).__name__,
            wanted="a process group of torch.distributed that this rank is in",
            hint="mesh.get_group() of a DeviceMesh, or torch.distributed.group.WORLD",
        )


def _sizes(name: str, given: Sequence[int] | None) -> _Sizes | None:
    """Sizes as a tuple, None where they are left out. Raises SpecError where they are not whole
    numbers from 0 on."""
    if given is None:
        return None
    sizes = tuple(given)
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise SpecError(f"sizes of {name}", got=list(sizes), wanted="whole numbers from 0 on")
    return sizes


def _sizes_by_rank(
    name: str,
    x: torch.Tensor,
    dims: tuple[int, ...],
    group: dist.ProcessGroup,
    sizes: _Sizes | None,
    other_sizes: tuple[_Sizes | None, ...],
    *,
    compare: bool,
) -> _Sizes:
    """The places of the sharded dim, the first of ``dims``, on each rank: as given in ``sizes``, or
    as the ranks tell each other where they ``compare``. ``other_sizes`` are those given for other
    dims, which are only compared. Raises SpecError where sizes are neither given nor compared, and
    what :func:`_compared_sizes` does."""
    if compare:
        return _compared_sizes(name, x, dims, dims[0], group, (sizes, *other_sizes))
    if sizes is None:
        raise SpecError(
            f"sizes of {name}",
            got="none, with compare=False",
            wanted="the places of each rank",
            hint="with compare=True ranks tell each other",
        )
    return sizes


@torch.compiler.disable(
    reason="ranks compare what they were called with: give sizes and compare=False for one graph"
)
def _compared_sizes(
    name: str,
    x: torch.Tensor,
    dims: tuple[int, ...],
    sharded: int | None,
    group: dist.ProcessGroup,
    sizes: tuple[_Sizes | None, ...],
) -> _Sizes:
    """Compare how all ranks of ``group`` called the primitive ``name``; returns the places of the
    dim ``sharded`` on each rank (zeros for None: no dim of x is sharded). ``sizes`` are those given
    in the call, of the sharded dim first. Raises PlanMismatch on all ranks where their calls
    differ, and SpecError where the sharded dim has other sizes than given. Whatever else the
    primitive refuses later depends only on what is compared here: then all ranks refuse it, and
    none waits for another. Collective."""
    own_places = 0
    shape: list[Any] = list(x.shape)
    if sharded is not None and -x.dim() <= sharded < x.dim():
        # the one size in which ranks may differ
        own_places, shape[sharded] = x.shape[sharded], "_"
    has_backward = sharded is not None and x.requires_grad and torch.is_grad_enabled()
    dims_text, shape_text = " and ".join(map(str, dims)), ", ".join(map(str, shape))
    parts = [
        f"{name} of dims {dims_text} of [{shape_text}]",
        str(x.dtype).removeprefix("torch."),
        "with a gradient" if has_backward else "without a gradient",
    ]
    parts += [f"sizes {list(given)}" for given in sizes if given is not None]
    places = _exchange(own_places, ", ".join(parts), group, x.device)
    if sharded is not None and sizes[0] is not None and places != sizes[0]:
        raise SpecError(
            f"sizes of {name}", got=list(sizes[0]), wanted=f"{list(places)}, as the ranks have them"
        )
    return places


def _exchange(
    own_places: int, text: str, group: dist.ProcessGroup, device: torch.device
) -> tuple[int, ...]:
    """Gather ``own_places`` of all ranks, in rank order. Raises PlanMismatch on all ranks where
    their ``text``, which describes the call, differs. Each rank sends its places and a digest of
    its text in one message, and the text itself only where digests differ. Collective."""
    digest = hashlib.sha256(text.encode()).digest()
    message = torch.frombuffer(bytearray(_MESSAGE.pack(own_places, digest[:24])), dtype=torch.int64)
    ranks = dist.get_world_size(group)
    rows = all_gather_rows(message[None].to(device), [1] * ranks, group).tolist()
    # a row is the places of a rank and, in three numbers, its digest
    if all(row[1:] == rows[0][1:] for row in rows):
        return tuple(row[0] for row in rows)
    texts = [payload.decode() for payload in gather_bytes(text.encode(), group, device=device)]
    other = next(rank for rank, its_text in enumerate(texts) if its_text != texts[0])
    raise PlanMismatch(
        "split, switch or gather",
        got=f"{texts[other]} on rank {other} of the group",
        wanted=f"{texts[0]} as on rank 0",
        hint="ranks that share a tensor call the same primitives in the same order",
    )


def _handle(group: dist.ProcessGroup) -> int:
    """The number that stands for a group in traced graphs, whose operators take no groups."""
    return _handle_of_name(group.group_name)


@torch.compiler.assume_constant_result
def _handle_of_name(name: str) -> int:
    """As :func:`_handle`, by the group's name: torch.compile takes the result for a constant."""
    return GroupSlot.named(name).handle
