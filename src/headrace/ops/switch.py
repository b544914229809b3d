"""Switch: from a shard of the tokens to a shard of the heads, and back.

Shape legend, over R ranks: T tokens of the pack, T_r of them on rank r; C columns (heads) of D
features, of which rank r takes the list ``columns[r]``. Lists may overlap: a column on several
ranks is copied on the way out and its gradients are added on the way back, which is how
key-value heads are replicated when ranks outnumber them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from headrace.comm.collectives import all_to_all_rows
from headrace.errors import SpecError

__all__ = ["Columns", "reordered", "switch", "switch_back", "to_columns", "to_tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which columns of ``total`` each rank takes, in the order it wants them."""

    total: int
    of: tuple[tuple[int, ...], ...]

    def index(self, rank: int, device: torch.device) -> torch.Tensor:
        """The columns of one rank as an index tensor."""
        return torch.tensor(self.of[rank], dtype=torch.int64, device=device)


def switch(
    x: torch.Tensor, sizes: tuple[int, ...], columns: Columns, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Gather the tokens, shard the columns: one all-to-all.

        x         [T_r, C, D]          this rank's tokens, all columns
        returns   [T, |columns[r]|, D] all tokens, this rank's columns
        backward  switch_back(grad), columns held by several ranks added in rank order

    ``sizes[r]`` is T_r. Raises SpecError when ``x`` disagrees with ``sizes`` or ``columns``.
    """  # fmt: skip
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
    """  # fmt: skip
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
    """  # fmt: skip
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
    rank, features = dist.get_rank(group), x.shape[2]
    parts = [
        x.index_select(1, columns.index(r, x.device)).reshape(-1) for r in range(len(columns.of))
    ]
    mine = len(columns.of[rank])
    flat = all_to_all_rows(
        torch.cat(parts),
        [part.numel() for part in parts],
        [size * mine * features for size in sizes],
        group,
    )
    return flat.view(sum(sizes), mine, features)


def to_tokens(
    x: torch.Tensor, sizes: tuple[int, ...], columns: Columns, group: dist.ProcessGroup
) -> torch.Tensor:
    """:func:`switch_back` without autograd."""
    rank, features = dist.get_rank(group), x.shape[2]
    held = [len(part) for part in columns.of]
    flat = all_to_all_rows(
        x.reshape(-1),
        [size * held[rank] * features for size in sizes],
        [sizes[rank] * count * features for count in held],
        group,
    )
    out = x.new_zeros((sizes[rank], columns.total, features))
    at = 0
    for r, count in enumerate(held):
        part = flat[at : at + sizes[rank] * count * features].view(sizes[rank], count, features)
        out.index_add_(1, columns.index(r, x.device), part)
        at += part.numel()
    return out


def _is_identity(columns: Columns) -> bool:
    return columns.of == (tuple(range(columns.total)),)


def _check(what: str, x: torch.Tensor, rows: int, count: int) -> None:
    if x.dim() != 3 or x.shape[0] != rows or x.shape[1] != count:
        raise SpecError(what, got=f"a tensor {list(x.shape)}", wanted=f"[{rows}, {count}, D]")
