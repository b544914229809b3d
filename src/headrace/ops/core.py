"""Cores: the attention of a method from fused projections to heads, with its own backward.

Shape legend: t tokens of a rank (T where a method gathers them), N query heads and G key-value
heads here, D features of a head. ``qkv`` [t, N + 2 G, D] holds queries, keys and values, heads in
order, rotated.

A core has no autograd, so that the same pair of functions serves when q, k and v are kept and when
they are made again in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from headrace.ops.attention import attend_blocks, attend_blocks_backward
from headrace.ops.row_sums import adds_at_once
from headrace.spec.blocks import Block

__all__ = ["Core", "Heads", "PackCore", "attended", "attended_again", "sum_dtype", "wide_dtype"]

Saved = tuple[torch.Tensor, ...]


class Core(Protocol):
    """Attention over a group; both functions may communicate."""

    def forward(self, qkv: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        """(out [t, N, D], what the backward needs besides qkv and out)."""

    def backward(
        self, grad: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, saved: Saved
    ) -> torch.Tensor:
        """dqkv [t, N + 2 G, D] of grad [t, N, D]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """N query heads and G key-value heads: how ``qkv`` is divided."""

    queries: int
    keys: int

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of q, k and v."""
        q, k, v = qkv.split([self.queries, self.keys, self.keys], dim=1)
        return q, k, v


@dataclass(frozen=True, slots=True, kw_only=True)
class PackCore:
    """Attention over tokens that are all here: no communication. Keeps the log-sum-exp."""

    heads: Heads
    blocks: Sequence[Block]

    def forward(self, qkv: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        """(out, (lse [N, t],))."""
        out, lse = attend_blocks(*self.heads.split(qkv), self.blocks)
        return out, (lse,)

    def backward(
        self, grad: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, saved: Saved
    ) -> torch.Tensor:
        """dqkv."""
        dqkv = torch.empty_like(qkv, dtype=_sum_dtype(qkv, self.blocks))
        attend_blocks_backward(
            grad, *self.heads.split(qkv), out, saved[0], self.blocks, *self.heads.split(dqkv),
            fresh_q=True, fresh_kv=True,
        )  # fmt: skip
        return dqkv.to(qkv.dtype)


def _sum_dtype(qkv: torch.Tensor, blocks: Sequence[Block]) -> torch.dtype:
    """Rows that several blocks touch are added in fp32."""
    starts = {block.q_start for block in blocks}
    return qkv.dtype if len(starts) == len(blocks) else sum_dtype(qkv)


def sum_dtype(x: torch.Tensor) -> torch.dtype:
    """The type in which a gradient like ``x`` is added up: a CPU adds to it, wide; a device adds
    what it holds in fp32 and rounds once."""
    return wide_dtype(x.dtype) if adds_at_once(x) else x.dtype


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of sums over many terms."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attended(core: Core, qkv: torch.Tensor) -> torch.Tensor:
    """The heads of ``qkv``: keeps qkv, the result and what the core says."""
    return _Attended.apply(core, qkv)  # type: ignore[no-any-return]


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, core: Core, qkv: torch.Tensor) -> torch.Tensor:
        out, saved = core.forward(qkv)
        ctx.save_for_backward(qkv, out, *saved)
        ctx.core = core
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        qkv, out, *saved = ctx.saved_tensors
        return None, ctx.core.backward(grad, qkv, out, tuple(saved))


def attended_again(
    core: Core, project: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    x: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The heads of the first of ``project(x)``, and the second, which is x: keeps x, the heads and
    what the core says, and makes q, k and v again in the backward. ``project`` must not communicate
    activations."""
    return _AttendedAgain.apply(core, project, x)  # type: ignore[no-any-return]


class _AttendedAgain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, core: Core, project: Any, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            qkv, _ = project(x)
        out, saved = core.forward(qkv)
        ctx.save_for_backward(x, out, *saved)
        ctx.rest = (core, project)
        ctx.set_materialize_grads(False)
        return out, x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, passed: torch.Tensor | None) -> Any:  # type: ignore[override]
        if grad is None:
            return None, None, passed
        x, out, *saved = ctx.saved_tensors
        core, project = ctx.rest
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            made = project(leaf)
        dqkv = core.backward(grad, made[0].detach(), out, tuple(saved))
        grads = zip(made, (dqkv, passed), strict=True)
        torch.autograd.backward(*zip(*((y, dy) for y, dy in grads if dy is not None), strict=True))
        return None, None, leaf.grad
