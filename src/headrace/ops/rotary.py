"""Rotary positions, and from KV-group-major rows to heads in order.

Shape legend: t tokens of a rank, g KV groups of m query heads, n = g m, D features of a head.
"""

from __future__ import annotations

from typing import Any

import torch

from headrace.ops.fused import fused, widened

Pair = tuple[torch.Tensor, torch.Tensor]

__all__ = [
    "rotary_tables",
    "rotate_and_sort",
    "rotated_and_sorted",
    "unrotated_and_unsorted",
]


def rotary_tables(
    positions: torch.Tensor, features: int, theta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotate-half convention, angle(i) = position theta^(-2 i / D).

        positions  [t]             position of each token in its own document
        returns    [t, D / 2] each, computed in fp64
    """  # fmt: skip
    exponent = torch.arange(0, features, 2, dtype=torch.float64, device=positions.device)
    angle = torch.outer(positions.double(), theta ** (-exponent / features))
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate_and_sort(
    qkv: torch.Tensor, tables: Pair | None, order: Pair | None = None
) -> torch.Tensor:
    """Queries, keys and values of a fused projection, heads in order, q and k rotated.

        qkv       [t, g, m + 2, D]   per group its queries, its key, its value
        order     [t] each           result row i is row order[0][i] of qkv; the inverse; None: row i
        returns   [t, n + 2 g, D]    queries 0..n-1, keys 0..g-1, values 0..g-1
        backward  the inverse rotation and orders

    ``tables=None`` leaves positions to the embedding and only sorts; they are the results' rows.
    """  # fmt: skip
    return _RotateAndSort.apply(qkv, tables, order)  # type: ignore[no-any-return]


class _RotateAndSort(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, tables: Any, order: Pair | None) -> torch.Tensor:
        groups, heads = qkv.shape[1:3]
        rows, back = order or (None, None)
        ctx.rest = (groups * (heads - 2), groups, tables, back)
        return rotated_and_sorted(qkv, tables, rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return unrotated_and_unsorted(grad, *ctx.rest), None, None


def rotated_and_sorted(
    qkv: torch.Tensor, tables: Pair | None, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """:func:`rotate_and_sort` without autograd, of ``rows`` [t] in turn."""
    if tables is None:
        return _sort(qkv if rows is None else qkv.index_select(0, rows))
    return _rotate_and_sort(qkv, *tables, rows)  # type: ignore[no-any-return]


def unrotated_and_unsorted(
    grad: torch.Tensor, n: int, groups: int, tables: Pair | None, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """The adjoint of :func:`rotated_and_sorted`: grad [t, n + 2 g, D] to [t, g, m + 2, D]; of
    ``rows`` [t] in turn, those of ``tables`` too."""
    if tables is None:
        return _unsort(grad if rows is None else grad.index_select(0, rows), n, groups)
    return _unrotate_and_unsort(grad, *tables, n, groups, rows)  # type: ignore[no-any-return]


def _sort(qkv: torch.Tensor) -> torch.Tensor:
    t, groups, heads, features = qkv.shape
    m, n = heads - 2, groups * (heads - 2)
    out = qkv.new_empty((t, n + 2 * groups, features))
    out[:, :n].view(t, groups, m, features).copy_(qkv[:, :, :m])
    out[:, n : n + groups] = qkv[:, :, m]
    out[:, n + groups :] = qkv[:, :, m + 1]
    return out


def _unsort(grad: torch.Tensor, n: int, groups: int) -> torch.Tensor:
    t, _, features = grad.shape
    m = n // groups if groups else 0
    out = grad.new_empty((t, groups, m + 2, features))
    out[:, :, :m] = grad[:, :n].reshape(t, groups, m, features)
    out[:, :, m] = grad[:, n : n + groups]
    out[:, :, m + 1] = grad[:, n + groups :]
    return out


def _plain_rotate_and_sort(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rows: torch.Tensor | None
) -> torch.Tensor:
    out, groups = _sort(qkv if rows is None else qkv.index_select(0, rows)), qkv.shape[1]
    _rotate(out[:, : out.shape[1] - groups], cos, sin)
    return out


def _plain_unrotate_and_unsort(
    grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, n: int, groups: int,
    rows: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    grad = grad.clone() if rows is None else grad.index_select(0, rows)
    if rows is not None:
        cos, sin = cos.index_select(0, rows), sin.index_select(0, rows)
    _rotate(grad[:, : n + groups], cos, -sin)
    return _unsort(grad, n, groups)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate pairs (i, i + D/2) of ``x`` [t, heads, D] in place."""
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
    qkv = qkv if rows is None else qkv.index_select(0, rows)
    t, groups, heads, features = qkv.shape
    queries = qkv[:, :, : heads - 2].reshape(t, groups * (heads - 2), features)
    rotated = _turned(torch.cat((queries, qkv[:, :, heads - 2]), dim=1), cos, sin)
    return torch.cat((rotated, qkv[:, :, heads - 1]), dim=1)


@fused(
    "unrotate_and_unsort(Tensor grad, Tensor cos, Tensor sin, int n, int groups, Tensor? rows) -> "
    "Tensor", plain=_plain_unrotate_and_unsort,
)  # fmt: skip
def _unrotate_and_unsort(
    grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, n: int, groups: int,
    rows: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    if rows is not None:
        grad, cos, sin = (x.index_select(0, rows) for x in (grad, cos, sin))
    t, _, features = grad.shape
    turned = _turned(grad[:, : n + groups], cos, -sin)
    queries = turned[:, :n].reshape(t, groups, n // groups if groups else 0, features)
    rest = (turned[:, n:, None], grad[:, n + groups :, None])
    return torch.cat((queries, *rest), dim=2)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs (i, i + D/2) of ``x`` [t, heads, D] rotated."""
    first, second = widened(x).chunk(2, dim=-1)
    cos, sin = widened(cos)[:, None], widened(sin)[:, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
