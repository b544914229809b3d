"""The switch as a registered operator, for traced graphs; a number stands for its group."""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from headrace.errors import ModelError
from headrace.ops.switch import Columns, Resharding

__all__ = ["GroupSlot", "traced_switch"]

# A registered operator takes tensors and numbers only: it looks up the group by number.
_slots: WeakValueDictionary[int, GroupSlot] = WeakValueDictionary()
_handles = count(1)


class GroupSlot:
    """Registers a group under the number ``handle``, by which graphs find it as long as this object
    exists."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.handle = group, next(_handles)
        self.rank = dist.get_rank(group)
        _slots[self.handle] = self


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
    """:func:`headrace.ops.switch.switch` on the group of a handle, of which this is a ``rank``.

    x         [.., sizes[rank], .., sum(to_sizes), ..]
    returns   [.., sum(sizes), .., to_sizes[rank], ..]
    """
    slot = _slots.get(handle)
    if slot is None:
        raise ModelError("switch", got="a group that is gone", wanted="one that somebody holds")
    how = Resharding(
        from_dim=from_dim,
        to_dim=to_dim,
        sizes=tuple(sizes),
        columns=Columns.consecutive(tuple(to_sizes)),
        group=slot.group,
    )
    return how.out(x)


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
    ctx.rest = inputs[1:]


def _adjoint(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The switch back, and None for the six other arguments."""
    from_dim, to_dim, sizes, to_sizes, handle, rank = ctx.rest
    back = traced_switch(grad, to_dim, from_dim, to_sizes, sizes, handle, rank)
    return (back, *(None,) * 6)


traced_switch.register_autograd(_adjoint, setup_context=_keep)
