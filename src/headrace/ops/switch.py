"""Switch, split and gather a dim of a tensor of any number of dims (DSP, Table 2).

Shape legend: a tensor of any dims, one of them in shards over the R ranks of a group, ``sizes[r]``
places on rank r in turn; M values in all. What the objective is: the sum of all ranks' losses. So
gradients are true adjoints, and nothing is scaled:

    switch   [.., s_r, .., S, ..] -> [.., s, .., S_r, ..]   all-to-all, adjoint: switched back
    split    [.., S, ..]          -> [.., S_r, ..]          nothing sent, adjoint: zeros elsewhere
    gather   [.., S_r, ..]        -> [.., S, ..]            all-gather, adjoint: reduce-scatter

A switch sends M (R - 1) / R^2 values from each rank, not M / R as in Table 2, which leaves out that
a rank keeps its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from headrace.comm.collectives import all_gather_rows, reduce_scatter_rows
from headrace.errors import SpecError
from headrace.layouts.intervals import split_sizes
from headrace.ops.resharding import Columns, Coming, Resharding

__all__ = ["Switching", "gather", "issue_switch", "split", "switch"]

_Sizes = tuple[int, ...]


def switch(
    x: torch.Tensor,
    from_dim: int,
    to_dim: int,
    group: dist.ProcessGroup | None,
    *,
    sizes: _Sizes | None = None,
    to_sizes: _Sizes | None = None,
) -> torch.Tensor:
    """Make ``from_dim`` whole and shard ``to_dim`` instead: one all-to-all.

        x         [.., sizes[r], .., S, ..]
        returns   [.., sum(sizes), .., to_sizes[r], ..]
        backward  switch(grad, to_dim, from_dim)

    ``sizes`` are as many on every rank where they are left out, ``to_sizes`` as even as can be.
    Raises SpecError for dims that are not there or the same, sizes that are not those of ``x``, and
    a group without this rank.
    """
    return issue_switch(x, from_dim, to_dim, group, sizes=sizes, to_sizes=to_sizes).wait()


def issue_switch(
    x: torch.Tensor,
    from_dim: int,
    to_dim: int,
    group: dist.ProcessGroup | None,
    *,
    sizes: _Sizes | None = None,
    to_sizes: _Sizes | None = None,
) -> Switching:
    """:func:`switch`, issued: compute something else, then ``wait()``. The backward issues where
    the forward waited, and waits where it issued."""
    own, other = _dim(x, from_dim), _dim(x, to_dim)
    if own == other:
        raise SpecError("switch", got=f"dim {from_dim} twice", wanted="two dims")
    if group is None:
        return Switching(value=x)
    ranks = _ranks(group)
    sizes = sizes or (x.shape[own],) * ranks
    to_sizes = to_sizes or split_sizes(x.shape[other], ranks)
    _check_shard(x, own, sizes, group)
    _check_whole(x, other, to_sizes, ranks)
    how = Resharding(
        from_dim=own, to_dim=other, sizes=sizes, columns=Columns.consecutive(to_sizes), group=group
    )
    messages = _Messages(how=how)
    return Switching(value=_Issued.apply(x, messages), _coming=messages)


@dataclass(slots=True, kw_only=True)
class Switching:
    """A switch under way; :meth:`wait` is called once."""

    value: torch.Tensor
    _coming: _Messages | None = None

    def wait(self) -> torch.Tensor:
        """The result, once it has arrived."""
        if self._coming is None:
            return self.value
        return _Waited.apply(self.value, self._coming)  # type: ignore[no-any-return]


@dataclass(slots=True, kw_only=True)
class _Messages:
    """What both halves of a switch know of it: the graph between them carries no values."""

    how: Resharding
    under_way: list[Coming] = field(default_factory=list)


class _Issued(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, messages: _Messages) -> torch.Tensor:
        ctx.messages = messages
        messages.under_way.append(messages.how.issue_out(x))
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        messages: _Messages = ctx.messages
        return messages.how.added(messages.under_way.pop()), None


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, messages: _Messages) -> torch.Tensor:
        ctx.messages = messages
        return messages.how.joined(messages.under_way.pop())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        messages: _Messages = ctx.messages
        messages.under_way.append(messages.how.issue_back(grad))
        return grad.new_empty(0), None


def split(
    x: torch.Tensor, dim: int, group: dist.ProcessGroup | None, *, sizes: _Sizes | None = None
) -> torch.Tensor:
    """This rank's shard of a tensor that all ranks have alike.

    x         [.., S, ..]
    returns   [.., sizes[r], ..]   a view
    backward  the gradient in its place, zeros elsewhere: the gradients of all ranks add up
    """
    at = _dim(x, dim)
    if group is None:
        return x
    sizes = sizes or split_sizes(x.shape[at], _ranks(group))
    rank = dist.get_rank(group)
    _check_whole(x, at, sizes, _ranks(group))
    return x.narrow(at, sum(sizes[:rank]), sizes[rank])


def gather(
    x: torch.Tensor, dim: int, group: dist.ProcessGroup | None, *, sizes: _Sizes | None = None
) -> torch.Tensor:
    """All ranks' shards.

    x         [.., sizes[r], ..]
    returns   [.., sum(sizes), ..]   on every rank
    backward  the sum of all ranks' gradients of this rank's shard
    """
    at = _dim(x, dim)
    if group is None:
        return x
    sizes = sizes or (x.shape[at],) * _ranks(group)
    _check_shard(x, at, sizes, group)
    return _Gather.apply(x, at, sizes, group)  # type: ignore[no-any-return]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, sizes: _Sizes, group: Any) -> torch.Tensor:
        ctx.rest = (dim, sizes, group)
        return all_gather_rows(x.movedim(dim, 0), sizes, group).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        dim, sizes, group = ctx.rest
        mine = reduce_scatter_rows(grad.movedim(dim, 0), sizes, group).movedim(0, dim)
        return mine, None, None, None


def _dim(x: torch.Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise SpecError("dim of a tensor", got=dim, wanted=f"one of {list(x.shape)}")
    return dim % x.dim()


def _ranks(group: dist.ProcessGroup) -> int:
    if dist.get_rank(group) < 0:
        raise SpecError(
            "group of ranks", got="one of other ranks", wanted=f"one with rank {dist.get_rank()}"
        )
    return dist.get_world_size(group)


def _check_shard(x: torch.Tensor, dim: int, sizes: _Sizes, group: dist.ProcessGroup) -> None:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if len(sizes) != ranks or sizes[rank] != x.shape[dim]:
        raise SpecError(
            f"dim {dim} of {list(x.shape)}",
            got=f"shards {list(sizes)}",
            wanted=f"one for each of {ranks} ranks, {x.shape[dim]} places on rank {rank}",
        )


def _check_whole(x: torch.Tensor, dim: int, sizes: _Sizes, ranks: int) -> None:
    if len(sizes) != ranks or sum(sizes) != x.shape[dim]:
        raise SpecError(
            f"dim {dim} of {list(x.shape)}",
            got=f"shards {list(sizes)}",
            wanted=f"one for each of {ranks} ranks, {x.shape[dim]} places in all",
        )
