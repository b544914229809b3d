"""Ring self-attention with whole score rows, which are kept (Colossal-AI SP; Li et al., 2023).

Shape legend: t_r tokens on rank r of R, N query heads in G groups, D features of a head, L tokens
of a document.

    forward    K travels: S = q k^T / sqrt(D), block by block; P = softmax over the whole row
               V travels: o += P v
    backward   K and V travel, dK and dV one step behind:
               dV += P^T do;  dS = P (do v^T - sum_D(do o));  dq += dS k;  dK += dS^T q

Kept: P, N t L elements, so memory grows with the square of the length, which is why nobody uses it
on long sequences. It is here for comparison. Only the blocks that count are computed, where the
original computes the masked half too; and own gradients stay at home, where the original sums
whole dK and dV over all ranks and divides by R, which is wrong for a sum.
Elements sent per rank as ring attention's, in two messages instead of one going forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from headrace.ops.core import Gradients, Heads, Saved, wide_dtype
from headrace.ops.ring import Onto, Ring
from headrace.spec.blocks import Block

__all__ = ["ScoreRowsCore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRowsCore:
    """Ring self-attention that keeps the softmax of every row. ``blocks(s)`` are the scores that
    count between the local queries and the keys of rank s. The queries of a block are all that this
    rank has of a document, so blocks with the same first query are parts of the same rows."""

    heads: Heads
    ring: Ring
    blocks: Callable[[int], Sequence[Block]]

    def forward(self, qkv: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        """(out [t, N, D], the softmax P [N, rows, columns] of each block, in the order in which
        keys come round the ring)."""
        queries, kv_heads = self.heads.queries, self.heads.keys
        q, wide_type = qkv[:, :queries], wide_dtype(qkv.dtype)
        scores: list[torch.Tensor] = []
        for keys, source in _RingRows(self.ring, qkv[:, queries : queries + kv_heads]):
            scores += [_scores(q, keys, block).to(wide_type) for block in self.blocks(source)]
        # the blocks in the order of the ring, in which scores were computed
        blocks = [b for step in range(self.ring.ranks) for b in self.blocks(self.ring.source(step))]
        probabilities = [p.to(qkv.dtype) for p in _softmax(scores, blocks)]
        del scores
        out = q.new_zeros(q.shape, dtype=wide_type)
        next_probabilities = iter(probabilities)
        for values, source in _RingRows(self.ring, qkv[:, queries + kv_heads :]):
            for block in self.blocks(source):
                rows = slice(block.q_start, block.q_stop)
                out[rows] += _weigh_values(
                    next(next_probabilities), values[block.k_start : block.k_stop], queries
                )
        return out.to(qkv.dtype), tuple(probabilities)

    def backward(
        self, grad: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, saved: Saved
    ) -> Gradients:
        """The gradients of qkv; keys and values travel around the ring again."""
        queries, kv_heads = self.heads.queries, self.heads.keys
        wide_type = wide_dtype(qkv.dtype)
        dqkv = torch.zeros_like(qkv, dtype=wide_type)
        dq, dkv = dqkv[:, :queries], torch.empty_like(qkv[:, queries:], dtype=wide_type)
        # sum_D(do o) of each query [N, t, 1], by which the softmax's gradient is centred
        delta = (grad.to(wide_type) * out.to(wide_type)).sum(-1).t()[..., None]
        next_probabilities = iter(saved)

        def attend(kv: torch.Tensor, source: int) -> Onto:
            """Add to the gradient ``dq`` of the local queries. Returns a function that adds the
            gradients of the keys and values ``kv`` of rank ``source`` to the partial sum that comes
            round the ring."""
            dkv_source = (
                dkv if source == self.ring.member else torch.empty_like(kv, dtype=wide_type)
            )
            dkv_source.zero_()
            for block in self.blocks(source):
                rows = slice(block.q_start, block.q_stop)
                columns = slice(block.k_start, block.k_stop)
                p, do = next(next_probabilities).to(wide_type), grad[rows].to(wide_type)
                k, v = kv[columns, :kv_heads].to(wide_type), kv[columns, kv_heads:].to(wide_type)
                ds = p * (torch.einsum("qnd,knd->nqk", do, _expand(v, queries)) - delta[:, rows])
                ds /= math.sqrt(qkv.shape[-1])
                dq[rows] += torch.einsum("nqk,knd->qnd", ds, _expand(k, queries))
                dk = torch.einsum("nqk,qnd->knd", ds, qkv[rows, :queries].to(wide_type))
                dkv_source[columns, :kv_heads] += _sum_groups(dk, kv_heads)
                dkv_source[columns, kv_heads:] += _sum_groups(
                    torch.einsum("nqk,qnd->knd", p, do), kv_heads
                )
            return lambda behind: dkv_source if behind is None else dkv_source.add_(behind)

        self.ring.sums(qkv[:, queries:].contiguous(), attend)
        dqkv[:, queries:] = dkv
        return Gradients.of(dqkv.to(qkv.dtype), self.heads)


class _RingRows:
    """Iterator over (rows, their rank): first this rank's rows of ``x``, then those of the other
    ranks, in the order in which they arrive around the ring."""

    def __init__(self, ring: Ring, x: torch.Tensor) -> None:
        """Start to send this rank's rows ``x`` [t_r, ...] around the ring."""
        self._ring, self._rows, self._step = ring, x.contiguous(), 0
        self._coming = ring.onward(self._rows, 0)

    def __iter__(self) -> _RingRows:
        return self

    def __next__(self) -> tuple[torch.Tensor, int]:
        """(the rows of the next rank, that rank). The rows after them are already on their way."""
        step = self._step
        if step == self._ring.ranks:
            raise StopIteration
        if step > 0:
            assert self._coming is not None
            self._rows = self._coming.wait()
            self._coming = self._ring.onward(self._rows, step)
        self._step += 1
        return self._rows, self._ring.source(step)


def _scores(q: torch.Tensor, keys: torch.Tensor, block: Block) -> torch.Tensor:
    """Scaled scores [N, rows, columns] of one block; minus infinity for keys behind a query where
    it is causal."""
    rows = q[block.q_start : block.q_stop]
    columns = _expand(keys[block.k_start : block.k_stop], q.shape[1])
    scores = torch.einsum("qnd,knd->nqk", rows, columns) / math.sqrt(q.shape[-1])
    if block.causal:
        length = block.q_stop - block.q_start
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(future, -math.inf)
    return scores


def _softmax(scores: Sequence[torch.Tensor], blocks: Sequence[Block]) -> list[torch.Tensor]:
    """The softmax of each row, whose scores may lie in several of the ``blocks``, in place:
    exp(scores - l) for each block's ``scores`` [N, rows, columns], where l is the log-sum-exp over
    all blocks of these rows."""
    # l [N, rows, 1] by the blocks' first row, which all blocks of these rows share
    row_lse: dict[int, torch.Tensor] = {}
    for block, block_scores in zip(blocks, scores, strict=True):
        block_lse = block_scores.logsumexp(-1, keepdim=True)
        before = row_lse.get(block.q_start)
        row_lse[block.q_start] = block_lse if before is None else torch.logaddexp(before, block_lse)
    return [
        block_scores.sub_(row_lse[block.q_start]).exp_()
        for block, block_scores in zip(blocks, scores, strict=True)
    ]


def _weigh_values(p: torch.Tensor, values: torch.Tensor, heads: int) -> torch.Tensor:
    """P V: out [rows, N, D] of probabilities [N, rows, columns] and values [columns, G, D]."""
    return torch.einsum("nqk,knd->qnd", p, _expand(values, heads))


def _expand(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat key-value heads [t, G, D], one for each of ``heads`` query heads: [t, N, D]."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _sum_groups(grad: torch.Tensor, groups: int) -> torch.Tensor:
    """The adjoint of :func:`_expand`: gradients [t, N, D] to [t, G, D]."""
    rows, heads, features = grad.shape
    return grad.view(rows, groups, heads // groups, features).sum(2)
