"""Attention of local queries over gathered keys and values.

Shape legend: t_r tokens on rank r of R, T in all, N query heads, G key-value heads, D features.

    forward    kv = all_gather(k, v) [T, 2 G, D];  o = attention of the local queries over kv
    backward   kv gathered again;  dkv [T, 2 G, D] partial;  dk, dv = reduce_scatter(dkv)

The bytes of a ring in one message each way: with few key-value heads the better choice on fast
links (Llama 3; torch's context parallel by default). Elements sent per rank, kv = G D,
V = (R - 1) / R: forward 2 V T kv, backward as many for kv and for dkv.
In passing: kv of the whole pack. Kept: out and its log-sum-exp.

dkv of half types is rounded to them once, after this rank's parts of a row were added in fp32
(a kernel has rounded each), and is added over the ranks in fp32. The bytes that this moves besides
what attention reads, in units of kv of the pack in the type of activations: 2 to put gathered rows
in order, forward and again backward; 2 to put dkv in the order of the ranks; 1 to add what arrived.
Zigzag order asks for the first 6, as gathered rows of one document are not side by side in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from headrace.comm.collectives import (
    all_gather_rows,
    issue_padded_gather,
    reduce_scatter_rows,
    sum_of_parts,
)
from headrace.ops.attention import add_gradients, attend_blocks
from headrace.ops.core import Gradients, Heads, Saved, sum_dtype
from headrace.ops.fused import kept, to_device
from headrace.ops.row_sums import RowSum, adds_at_once
from headrace.spec.blocks import Block

__all__ = ["GatheredCore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredCore:
    """Attention of local queries over the keys and values of all ranks, which are gathered.

    ``sizes[r]`` tokens are on rank r; ``blocks`` are the scores of the local queries with the
    tokens of the whole pack. ``order`` [T] is the index of each row of the pack among the gathered
    rows, which lie one rank after the other, ``back`` [T] the inverse; both are None where gathered
    rows are in the order of the pack."""

    heads: Heads
    sizes: Sequence[int]
    group: dist.ProcessGroup | None
    blocks: Sequence[Block]
    order: torch.Tensor | None
    back: torch.Tensor | None

    def forward(self, qkv: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        """(out [t, N, D], (lse [N, t],))."""
        kv_heads, kv = self.heads.keys, self._gather_kv(qkv)
        q = qkv[:, : self.heads.queries]
        out, lse = attend_blocks(
            q, kv[:, :kv_heads], kv[:, kv_heads:], self.blocks, self.heads.softcap
        )
        return out, (lse,)

    def backward(
        self, grad: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, saved: Saved
    ) -> Gradients:
        """The gradients of qkv; gathers keys and values again."""
        queries, kv_heads, kv = self.heads.queries, self.heads.keys, self._gather_kv(qkv)
        dqkv = torch.empty_like(qkv, dtype=sum_dtype(qkv))
        dq_rows, dkv_own = dqkv[:, :queries], dqkv[:, queries:]
        dkv = torch.empty_like(kv, dtype=dqkv.dtype)
        dq = RowSum(len(qkv), total=dq_rows)
        dk, dv = (RowSum(len(kv), total=part) for part in (dkv[:, :kv_heads], dkv[:, kv_heads:]))
        add_gradients(
            grad,
            qkv[:, :queries],
            kv[:, :kv_heads],
            kv[:, kv_heads:],
            out,
            saved[0],
            self.blocks,
            dq,
            dk,
            dv,
            self.heads.softcap,
        )
        del kv
        dq.write(dq_rows)
        sent = self._in_rank_order(dkv, dk, dv)
        del dkv, dk, dv
        # the sum over ranks of this rank's rows goes right into ``dqkv``
        reduce_scatter_rows(
            sent.to(qkv.dtype), self.sizes, self.group, add=partial(sum_of_parts, into=dkv_own)
        )
        return Gradients.of(dqkv.to(qkv.dtype), self.heads)

    def _in_rank_order(self, dkv: torch.Tensor, dk: RowSum, dv: RowSum) -> torch.Tensor:
        """The gradients of all keys and values [T, 2 G, D], with rows in rank order, from the sums
        ``dk`` and ``dv``, whose rows are in pack order. ``dkv`` [T, 2 G, D] is the tensor to which
        a CPU has added all parts already, and on a device a buffer for the result."""
        kv_heads = self.heads.keys
        # a CPU's sums stay where they are, in pack order; a device's are written in rank order
        rank_rows = None if adds_at_once(dkv) else self.order
        dk.write(dkv[:, :kv_heads], rank_rows)
        dv.write(dkv[:, kv_heads:], rank_rows)
        # the rows are in rank order now, or both orders are the same
        if rank_rows is self.order or self.back is None:
            return dkv
        return dkv.index_select(0, self.back)

    def _gather_kv(self, qkv: torch.Tensor) -> torch.Tensor:
        """The keys and values [T, 2 G, D] of all ranks, in the order of the pack."""
        kv = qkv[:, self.heads.queries :]
        if self.order is None or self.group is None:
            return all_gather_rows(kv, self.sizes, self.group)
        # on a CPU, and where sizes are equal or differ by more than one
        if adds_at_once(kv) or max(self.sizes) - min(self.sizes) != 1:
            return all_gather_rows(kv, self.sizes, self.group).index_select(0, self.order)
        # Sizes differ by one, on a device, where gathers are padded to equal sizes: one selection
        # drops the padding and sorts the rows.
        coming = issue_padded_gather(kv, self.sizes, self.group)
        order = _padded_index(tuple(self.sizes), kv.device).index_select(0, self.order)
        return coming.wait().index_select(0, order)


def _padded_index(sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """[T]: the index of each row, in rank order, among gathered rows that are padded to max(sizes)
    rows per rank."""

    def make() -> torch.Tensor:
        rows = [torch.arange(size) + rank * max(sizes) for rank, size in enumerate(sizes)]
        return to_device(torch.cat(rows), device)

    return kept(("padded rows", sizes, device), make)
