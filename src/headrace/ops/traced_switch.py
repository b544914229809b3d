"""Switch and gather as registered operators, for traced graphs.

A registered operator takes tensors and numbers only, so a number, its handle, stands for a group.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
import torch.distributed as dist

from headrace.comm.collectives import all_gather_rows, reduce_scatter_rows
from headrace.errors import ModelError
from headrace.ops.switch import Columns, Resharding

__all__ = ["GroupSlot", "traced_gather", "traced_switch"]

_slots: WeakValueDictionary[int, GroupSlot] = WeakValueDictionary()
"""The slots by their handles."""

_slot_of_group: WeakKeyDictionary[dist.ProcessGroup, GroupSlot] = WeakKeyDictionary()
"""The slot of each group that :meth:`GroupSlot.named` was asked for."""

_handles = count(1)


class GroupSlot:
    """Registers a group under the number ``handle``, by which operators find it as long as this
    object and the group exist; it does not keep the group alive. ``rank`` is this process's in the
    group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Register ``group``, which this process is in, under a new handle."""
        self._group, self.handle = ref(group), next(_handles)
        self.rank = dist.get_rank(group)
        _slots[self.handle] = self

    @classmethod
    def named(cls, name: str) -> GroupSlot:
        """The slot of the group that torch knows by ``name``; made at the first call."""
        group_by_name: Any = dist.distributed_c10d._resolve_process_group  # noqa: SLF001
        group: dist.ProcessGroup = group_by_name(name)
        if group not in _slot_of_group:
            _slot_of_group[group] = cls(group)
        return _slot_of_group[group]

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group; None once it is gone."""
        return self._group()


def _group_of(handle: int) -> dist.ProcessGroup:
    """The group of a handle. Raises ModelError where it, or its slot, is gone."""
    slot = _slots.get(handle)
    group = None if slot is None else slot.group
    if group is None:
        raise ModelError("switch", got="a group that is gone", wanted="one that somebody holds")
    return group


@torch.library.custom_op("headrace::switch", mutates_args=())
def traced_switch(
    x: torch.Tensor,
    from_dim: int,
    to_dim: int,
    sizes: list[int],
    to_sizes: list[int],
    handle: int,
    rank: int,
) -> torch.Tensor:
    """:func:`headrace.ops.switch.switch` on the group of a handle, in which this is rank ``rank``.

    x         [.., sizes[rank], .., sum(to_sizes), ..]
    returns   [.., sum(sizes), .., to_sizes[rank], ..]
    """
    resharding = Resharding(
        from_dim=from_dim,
        to_dim=to_dim,
        sizes=tuple(sizes),
        columns=Columns.consecutive(tuple(to_sizes)),
        group=_group_of(handle),
    )
    return resharding.out(x)


@traced_switch.register_fake
def _(
    x: torch.Tensor,
    from_dim: int,
    to_dim: int,
    sizes: list[int],
    to_sizes: list[int],
    handle: int,
    rank: int,
) -> torch.Tensor:
    """An empty result of the switch, for tracing."""
    shape = list(x.shape)
    shape[from_dim], shape[to_dim] = sum(sizes), to_sizes[rank]
    return x.new_empty(shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Keep all arguments but the first, x, for the backward: none of them are tensors."""
    ctx.rest = inputs[1:]


def _switch_adjoint(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The gradients of :func:`traced_switch`: of x, by the switch back, and None for the six other
    arguments."""
    from_dim, to_dim, sizes, to_sizes, handle, rank = ctx.rest
    back = traced_switch(grad, to_dim, from_dim, to_sizes, sizes, handle, rank)
    return (back, *(None,) * 6)


traced_switch.register_autograd(_switch_adjoint, setup_context=_keep)


@torch.library.custom_op("headrace::gather", mutates_args=())
def traced_gather(
    x: torch.Tensor, dim: int, sizes: list[int], handle: int, rank: int
) -> torch.Tensor:
    """:func:`headrace.ops.switch.gather` on the group of a handle, in which this is rank ``rank``.

    x         [.., sizes[rank], ..]
    returns   [.., sum(sizes), ..]
    """
    rows = all_gather_rows(x.movedim(dim, 0), sizes, _group_of(handle))
    return rows.movedim(0, dim).contiguous()


@traced_gather.register_fake
def _(x: torch.Tensor, dim: int, sizes: list[int], handle: int, rank: int) -> torch.Tensor:
    """An empty result of the gather, for tracing."""
    return _resized(x, dim, sum(sizes))


@torch.library.custom_op("headrace::gather_back", mutates_args=())
def _traced_gather_back(
    x: torch.Tensor, dim: int, sizes: list[int], handle: int, rank: int
) -> torch.Tensor:
    """Reduce-scatter: the sum over ranks of x at this rank's places of ``dim``, the adjoint of
    :func:`traced_gather`."""
    rows = reduce_scatter_rows(x.movedim(dim, 0), sizes, _group_of(handle))
    return rows.movedim(0, dim).contiguous()


@_traced_gather_back.register_fake
def _(x: torch.Tensor, dim: int, sizes: list[int], handle: int, rank: int) -> torch.Tensor:
    """An empty result of the sum, for tracing."""
    return _resized(x, dim, sizes[rank])


def _resized(x: torch.Tensor, dim: int, places: int) -> torch.Tensor:
    """An empty tensor like x with ``places`` places of ``dim``."""
    shape = list(x.shape)
    shape[dim] = places
    return x.new_empty(shape)


def _gather_adjoint(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The gradients of :func:`traced_gather`: of x, by a reduce-scatter, and None for the four
    other arguments."""
    return (_traced_gather_back(grad, *ctx.rest), *(None,) * 4)


def _gather_back_adjoint(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The gradients of :func:`_traced_gather_back`: of x, by a gather, and None for the four other
    arguments."""
    return (traced_gather(grad, *ctx.rest), *(None,) * 4)


traced_gather.register_autograd(_gather_adjoint, setup_context=_keep)
_traced_gather_back.register_autograd(_gather_back_adjoint, setup_context=_keep)
