"""Attention of local queries over gathered keys and values.

Shape legend: t_r tokens on rank r of R, T in all, N query heads, G key-value heads, D features.

    forward    kv = all_gather(k, v) [T, 2 G, D];  o = attention of the local queries over kv
    backward   kv gathered again;  dkv [T, 2 G, D] partial;  dk, dv = reduce_scatter(dkv)

The bytes of a ring in one message each way: with few key-value heads the better choice on fast
links (Llama 3; torch's context parallel by default). Elements sent per rank, kv = G D,
V = (R - 1) / R: forward 2 V T kv, backward as many for kv and for dkv (fp32 for half types).
In passing: kv of the whole pack. Kept: out and its log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from headrace.comm.collectives import all_gather_rows, reduce_scatter_rows
from headrace.ops.attention import attend_blocks, attend_blocks_backward
from headrace.ops.core import Heads, Saved, wide_dtype
from headrace.spec.blocks import Block

__all__ = ["GatheredCore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredCore:
    """``blocks`` are the scores of the local queries with the pack; ``order`` [T] takes gathered
    rows into the order of the pack and ``back`` undoes it, None where they are in order."""

    heads: Heads
    sizes: Sequence[int]
    group: dist.ProcessGroup | None
    blocks: Sequence[Block]
    order: torch.Tensor | None
    back: torch.Tensor | None

    def forward(self, qkv: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        """(out [t, N, D], (lse [N, t],))."""
        g, kv = self.heads.keys, self._gather(qkv)
        q = qkv[:, : self.heads.queries]
        out, lse = attend_blocks(q, kv[:, :g], kv[:, g:], self.blocks)
        return out, (lse,)

    def backward(
        self, grad: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, saved: Saved
    ) -> torch.Tensor:
        """dqkv [t, N + 2 G, D]."""
        n, g, kv = self.heads.queries, self.heads.keys, self._gather(qkv)
        dqkv = torch.empty_like(qkv, dtype=wide_dtype(qkv.dtype))
        dkv = torch.empty_like(kv, dtype=dqkv.dtype)
        attend_blocks_backward(
            grad, qkv[:, :n], kv[:, :g], kv[:, g:], out, saved[0], self.blocks,
            dqkv[:, :n], dkv[:, :g], dkv[:, g:], fresh_q=True, fresh_kv=True,
        )  # fmt: skip
        del kv
        if self.back is not None:
            dkv = dkv.index_select(0, self.back)
        dqkv[:, n:] = reduce_scatter_rows(dkv, self.sizes, self.group)
        return dqkv.to(qkv.dtype)

    def _gather(self, qkv: torch.Tensor) -> torch.Tensor:
        kv = all_gather_rows(qkv[:, self.heads.queries :], self.sizes, self.group)
        return kv if self.order is None else kv.index_select(0, self.order)
