"""Switch of tokens for heads, and back: the special case of three dims, with heads of any order.

Shape legend, over R ranks: T tokens of the pack, T_r of them on rank r; C columns (heads) of D
features, of which rank r takes the list ``columns[r]``. Lists may overlap: a column on several
ranks is copied on the way out and its gradients are added on the way back, which is how
key-value heads are replicated when ranks outnumber them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from headrace.errors import SpecError
from headrace.ops.resharding import Columns, Resharding

__all__ = ["reordered", "switch", "switch_back", "to_columns", "to_tokens"]


def switch(
    x: torch.Tensor, sizes: tuple[int, ...], columns: Columns, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Gather the tokens, shard the columns: one all-to-all.

        x         [T_r, C, D]          this rank's tokens, all columns
        returns   [T, |columns[r]|, D] all tokens, this rank's columns
        backward  switch_back(grad), columns held by several ranks added in rank order

    ``sizes[r]`` is T_r. Raises SpecError when ``x`` disagrees with ``sizes`` or ``columns``.
    """
    if group is None:
        return x if _is_identity(columns) else x.index_select(1, columns.index(0, x.device))
    _check("switch", x, sizes[dist.get_rank(group)], columns.total)
    return _Switch.apply(x, sizes, columns, group)  # type: ignore[no-any-return]


def switch_back(
    x: torch.Tensor, sizes: tuple[int, ...], columns: Columns, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Gather the columns, shard the tokens: one all-to-all.

    x         [T, |columns[r]|, D] all tokens, this rank's columns
    returns   [T_r, C, D]          this rank's tokens, all columns; columns held by several
                                   ranks are added in rank order
    backward  switch(grad)
    """
    if group is None:
        assert _is_identity(columns), "a single rank holds all columns in order"
        return x
    _check("switch_back", x, sum(sizes), len(columns.of[dist.get_rank(group)]))
    return _SwitchBack.apply(x, sizes, columns, group)  # type: ignore[no-any-return]


def reordered(x: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """Rows in another order.

    x         [T, ...]
    returns   x[order], ``order`` [T] a permutation and ``back`` its inverse
    backward  grad[back]
    """
    return _Reordered.apply(x, order, back)  # type: ignore[no-any-return]


class _Reordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.back = back
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad.index_select(0, ctx.back), None, None


class _Switch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: Any, columns: Any, group: Any) -> torch.Tensor:
        ctx.rest = (sizes, columns, group)
        return to_columns(x, sizes, columns, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return to_tokens(grad, *ctx.rest), None, None, None


class _SwitchBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: Any, columns: Any, group: Any) -> torch.Tensor:
        ctx.rest = (sizes, columns, group)
        return to_tokens(x, sizes, columns, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return to_columns(grad, *ctx.rest), None, None, None


def to_columns(
    x: torch.Tensor, sizes: tuple[int, ...], columns: Columns, group: dist.ProcessGroup
) -> torch.Tensor:
    """:func:`switch` without autograd."""
    return _resharding(sizes, columns, group).out(x)


def to_tokens(
    x: torch.Tensor, sizes: tuple[int, ...], columns: Columns, group: dist.ProcessGroup
) -> torch.Tensor:
    """:func:`switch_back` without autograd."""
    return _resharding(sizes, columns, group).back(x)


def _resharding(sizes: tuple[int, ...], columns: Columns, group: dist.ProcessGroup) -> Resharding:
    return Resharding(from_dim=0, to_dim=1, sizes=sizes, columns=columns, group=group)


def _is_identity(columns: Columns) -> bool:
    return columns.of == (tuple(range(columns.total)),)


def _check(what: str, x: torch.Tensor, rows: int, count: int) -> None:
    if x.dim() != 3 or x.shape[0] != rows or x.shape[1] != count:
        raise SpecError(what, got=f"a tensor {list(x.shape)}", wanted=f"[{rows}, {count}, D]")
