"""Rotary positions, together with sorting the heads of a fused projection.

A fused projection gives, for each KV group, its queries, its key and its value; attention takes all
queries, then all keys, then all values. One kernel sorts heads and rotates queries and keys.

Shape legend: t tokens of a rank, g KV groups of m query heads, n = g m, D features of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from headrace.ops.fused import fused, widened

Pair = tuple[torch.Tensor, torch.Tensor]
"""(cos, sin), each [tokens, D / 2], or (an order of rows, its inverse), each [tokens]."""

__all__ = [
    "Rotation",
    "Turned",
    "rotary_tables",
    "rotate_and_sort",
    "turned",
]


def rotary_tables(
    positions: torch.Tensor, features: int, theta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotate-half convention, angle(i) = position theta^(-2 i / D).

    positions  [t]             position of each token in its own document
    features   D
    returns    (cos, sin), [t, D / 2] each, computed in fp64 and rounded to ``dtype``
    """
    exponent = torch.arange(0, features, 2, dtype=torch.float64, device=positions.device)
    angle = torch.outer(positions.double(), theta ** (-exponent / features))
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate_and_sort(qkv: torch.Tensor, tables: Pair | None) -> torch.Tensor:
    """Queries, keys and values of a fused projection, heads in order, q and k rotated.

        qkv       [t, g, m + 2, D]   per group its queries, its key, its value
        returns   [t, n + 2 g, D]    queries 0..n-1, keys 0..g-1, values 0..g-1
        backward  the inverse rotation and order

    ``tables=None`` leaves positions to the embedding and only sorts.
    """
    return _RotateAndSort.apply(qkv, Rotation(tables=tables))  # type: ignore[no-any-return]


class _RotateAndSort(torch.autograd.Function):
    """Autograd of :func:`rotate_and_sort`."""

    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Rotate and sort qkv [t, g, m + 2, D] to [t, n + 2 g, D]."""
        ctx.groups, ctx.rotation = qkv.shape[1], rotation
        return rotation.turned(qkv)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """The gradient of qkv from that of all queries, all keys and all values [t, n + 2 g, D]."""
        groups = ctx.groups
        parts = grad.split([grad.shape[1] - 2 * groups, groups, groups], dim=1)
        return ctx.rotation.turned_back(*parts), None


@dataclass(slots=True, kw_only=True)
class Turned:
    """q, k and v of a projection, sorted and rotated, for one attention: ``qkv`` [t, n + 2 g, D].

    Their gradients go back as three tensors, which autograd could not do, as qkv is one tensor: the
    backward of attention appends (dq, dk, dv) to ``grads``, and the backward of the rotation takes
    them from there. Only the order of these two backwards is left to autograd: ``token`` is an
    empty tensor that the rotation returns and attention takes as its input.
    """

    token: torch.Tensor
    qkv: torch.Tensor
    grads: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def turned(qkv: torch.Tensor, rotation: Rotation) -> Turned:
    """Rotate and sort as :func:`rotate_and_sort`, for :func:`headrace.ops.core.attended`: the
    gradients of q, k and v come back apart, and are never put into one tensor."""
    made = Turned(token=qkv, qkv=qkv, grads=[])
    # replaces ``made.qkv``, too
    made.token = _Turn.apply(qkv, rotation, made)
    return made


class _Turn(torch.autograd.Function):
    """Autograd of :func:`turned`."""

    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, rotation: Rotation, made: Turned) -> torch.Tensor:
        """Put the turned qkv into ``made`` and return an empty token that autograd follows."""
        made.qkv = rotation.turned(qkv)
        ctx.rest = (rotation, made.grads)
        return qkv.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """The gradient of the projection's qkv [t, g, m + 2, D], from the gradients of q, k and v
        that attention's backward has put into ``grads``; ``grad``, that of the token, is empty."""
        rotation, grads = ctx.rest
        return rotation.turned_back(*grads.pop()), None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """:func:`rotate_and_sort` without autograd, which may reorder tokens as well.

    ``tables`` are the cosines and sines [t, D / 2] of the result's rows; None for no rotation.
    ``order`` is (a permutation of rows, its inverse), each [t]: row i of the result is row
    ``order[0][i]`` of the input. None keeps the order."""

    tables: Pair | None
    order: Pair | None = None

    def turned(self, qkv: torch.Tensor) -> torch.Tensor:
        """Rotate and sort qkv [t, g, m + 2, D] to [t, n + 2 g, D]."""
        rows = None if self.order is None else self.order[0]
        if self.tables is None:
            return _sort(qkv if rows is None else qkv.index_select(0, rows))
        return _rotate_and_sort(qkv, *self.tables, rows)  # type: ignore[no-any-return]

    def turned_back(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> torch.Tensor:
        """The adjoint of :meth:`turned`: the gradient of its input [t, g, m + 2, D] from those of q
        [t, n, D], k and v [t, g, D]."""
        rows = None if self.order is None else self.order[1]
        if self.tables is None:
            return _unsort(*_select_rows((dq, dk, dv), rows))
        return _unrotate_and_unsort(dq, dk, dv, *self.tables, rows)  # type: ignore[no-any-return]


def _sort(qkv: torch.Tensor) -> torch.Tensor:
    """Sort qkv [t, g, m + 2, D], in each group m queries, a key and a value, into [t, n + 2 g, D]:
    all queries, all keys, all values."""
    t, groups, group_heads, features = qkv.shape
    group_queries, queries = group_heads - 2, groups * (group_heads - 2)
    out = qkv.new_empty((t, queries + 2 * groups, features))
    out[:, :queries].view(t, groups, group_queries, features).copy_(qkv[:, :, :group_queries])
    out[:, queries : queries + groups] = qkv[:, :, group_queries]
    out[:, queries + groups :] = qkv[:, :, group_queries + 1]
    return out


def _unsort(dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> torch.Tensor:
    """The adjoint of :func:`_sort`: dq [t, n, D], dk and dv [t, g, D] to [t, g, m + 2, D]."""
    t, groups, features = dk.shape
    group_queries = dq.shape[1] // groups if groups else 0
    out = dq.new_empty((t, groups, group_queries + 2, features))
    out[:, :, :group_queries] = dq.unflatten(1, (groups, group_queries))
    out[:, :, group_queries] = dk
    out[:, :, group_queries + 1] = dv
    return out


def _select_rows(
    values: tuple[torch.Tensor, ...], rows: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """The same rows of several tensors; all rows for None."""
    return values if rows is None else tuple(x.index_select(0, rows) for x in values)


def _plain_rotate_and_sort(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rows: torch.Tensor | None
) -> torch.Tensor:
    """Sort qkv [t, g, m + 2, D] into [t, n + 2 g, D], and rotate queries and keys by ``cos`` and
    ``sin`` [t, D / 2]; ``rows`` [t], where given, selects rows of qkv first."""
    out, groups = _sort(qkv if rows is None else qkv.index_select(0, rows)), qkv.shape[1]
    # all heads but the values, which are last
    _rotate(out[:, : out.shape[1] - groups], cos, sin)
    return out


def _plain_unrotate_and_unsort(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rows: torch.Tensor | None,
) -> torch.Tensor:
    """The adjoint of :func:`_plain_rotate_and_sort`: gradients rotated back and sorted to [t, g, m
    + 2, D]; ``rows`` is the inverse selection."""
    dq, dk, dv, cos, sin = _select_rows((dq, dk, dv, cos, sin), rows)
    out = _unsort(dq, dk, dv)
    # all heads of a group but its value; minus the sine is the inverse rotation
    _rotate(out[:, :, :-1].transpose(0, 1), cos, -sin)
    return out


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate the pairs of features (i, i + D / 2) of ``x`` [.., t, heads, D] in place."""
    half = x.shape[-1] // 2
    cos, sin = cos[:, None], sin[:, None]
    first, second = x[..., :half].clone(), x[..., half:]
    x[..., :half].mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)


@fused(
    "rotate_and_sort(Tensor qkv, Tensor cos, Tensor sin, Tensor? rows) -> Tensor",
    plain=_plain_rotate_and_sort,
)
def _rotate_and_sort(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rows: torch.Tensor | None
) -> torch.Tensor:
    """The same as :func:`_plain_rotate_and_sort` without writes in place, so that it can be
    compiled into one kernel."""
    qkv = qkv if rows is None else qkv.index_select(0, rows)
    t, groups, heads, features = qkv.shape
    queries = qkv[:, :, : heads - 2].reshape(t, groups * (heads - 2), features)
    rotated = _rotated_pairs(torch.cat((queries, qkv[:, :, heads - 2]), dim=1), cos, sin)
    return torch.cat((rotated, qkv[:, :, heads - 1]), dim=1)


@fused(
    "unrotate_and_unsort(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin, Tensor? rows) -> "
    "Tensor",
    plain=_plain_unrotate_and_unsort,
)
def _unrotate_and_unsort(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rows: torch.Tensor | None,
) -> torch.Tensor:
    """The same as :func:`_plain_unrotate_and_unsort` without writes in place."""
    if rows is not None:
        dq, dk, dv, cos, sin = (x.index_select(0, rows) for x in (dq, dk, dv, cos, sin))
    t, groups, features = dk.shape
    group_queries = dq.shape[1] // groups if groups else 0
    queries = _rotated_pairs(dq, cos, -sin).reshape(t, groups, group_queries, features)
    return torch.cat((queries, _rotated_pairs(dk, cos, -sin)[:, :, None], dv[:, :, None]), dim=2)


def _rotated_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x`` [t, heads, D] with the pairs of features (i, i + D / 2) rotated, computed in at least
    fp32."""
    first, second = widened(x).chunk(2, dim=-1)
    cos, sin = widened(cos)[:, None], widened(sin)[:, None]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
