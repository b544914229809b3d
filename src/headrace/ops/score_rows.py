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
    """``blocks(s)`` are the scores of the local queries with the tokens of s; queries of a block
    are all of this rank's piece of a document."""

    heads: Heads
    ring: Ring
    blocks: Callable[[int], Sequence[Block]]

    def forward(self, qkv: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        """(out [t, N, D], one P [N, rows, columns] for each block in the order of the ring)."""
        n, g = self.heads.queries, self.heads.keys
        q, wide = qkv[:, :n], wide_dtype(qkv.dtype)
        scores: list[torch.Tensor] = []
        for keys, source in self._round(qkv[:, n : n + g]):
            scores += [_scores(q, keys, block).to(wide) for block in self.blocks(source)]
        order = [b for step in range(self.ring.ranks) for b in self.blocks(self.ring.source(step))]
        shares = [p.to(qkv.dtype) for p in _softmax(scores, order)]
        del scores
        out = q.new_zeros(q.shape, dtype=wide)
        at = iter(shares)
        for values, source in self._round(qkv[:, n + g :]):
            for block in self.blocks(source):
                rows = slice(block.q_start, block.q_stop)
                out[rows] += _weigh_values(next(at), values[block.k_start : block.k_stop], n)
        return out.to(qkv.dtype), tuple(shares)

    def backward(
        self, grad: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, saved: Saved
    ) -> Gradients:
        """The gradients of qkv; keys and values travel around the ring again."""
        n, g = self.heads.queries, self.heads.keys
        wide = wide_dtype(qkv.dtype)
        dqkv = torch.zeros_like(qkv, dtype=wide)
        dq, dkv = dqkv[:, :n], torch.empty_like(qkv[:, n:], dtype=wide)
        delta = (grad.to(wide) * out.to(wide)).sum(-1).t()[..., None]
        at = iter(saved)

        def attend(kv: torch.Tensor, source: int) -> Onto:
            """Add the gradients of the local queries, and return what adds those of rank
            ``source``'s keys and values to a sum that comes round."""
            into = dkv if source == self.ring.member else torch.empty_like(kv, dtype=wide)
            into.zero_()
            for block in self.blocks(source):
                rows = slice(block.q_start, block.q_stop)
                columns = slice(block.k_start, block.k_stop)
                p, do = next(at).to(wide), grad[rows].to(wide)
                k, v = kv[columns, :g].to(wide), kv[columns, g:].to(wide)
                ds = p * (torch.einsum("qnd,knd->nqk", do, _expand(v, n)) - delta[:, rows])
                ds /= math.sqrt(qkv.shape[-1])
                dq[rows] += torch.einsum("nqk,knd->qnd", ds, _expand(k, n))
                dk = torch.einsum("nqk,qnd->knd", ds, qkv[rows, :n].to(wide))
                into[columns, :g] += _sum_groups(dk, g)
                into[columns, g:] += _sum_groups(torch.einsum("nqk,qnd->knd", p, do), g)
            return lambda behind: into if behind is None else into.add_(behind)

        self.ring.sums(qkv[:, n:].contiguous(), attend)
        dqkv[:, n:] = dkv
        return Gradients.of(dqkv.to(qkv.dtype), self.heads)

    def _round(self, x: torch.Tensor) -> _Round:
        return _Round(self.ring, x)


class _Round:
    """Iterates over all ranks' rows of x as they arrive around the ring, each with its source
    rank."""

    def __init__(self, ring: Ring, x: torch.Tensor) -> None:
        self._ring, self._rows, self._step = ring, x.contiguous(), 0
        self._coming = ring.onward(self._rows, 0)

    def __iter__(self) -> _Round:
        return self

    def __next__(self) -> tuple[torch.Tensor, int]:
        """The next rank's rows and its number; the rows after them are sent for first."""
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
    """[N, rows, columns], minus infinity where a causal row does not see."""
    rows = q[block.q_start : block.q_stop]
    columns = _expand(keys[block.k_start : block.k_stop], q.shape[1])
    scores = torch.einsum("qnd,knd->nqk", rows, columns) / math.sqrt(q.shape[-1])
    if block.causal:
        length = block.q_stop - block.q_start
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(future, -math.inf)
    return scores


def _softmax(scores: Sequence[torch.Tensor], order: Sequence[Block]) -> list[torch.Tensor]:
    """The blocks of each row divided by the sum over all of them, in place."""
    normal: dict[int, torch.Tensor] = {}
    for block, part in zip(order, scores, strict=True):
        here = part.logsumexp(-1, keepdim=True)
        before = normal.get(block.q_start)
        normal[block.q_start] = here if before is None else torch.logaddexp(before, here)
    return [
        part.sub_(normal[block.q_start]).exp_() for block, part in zip(order, scores, strict=True)
    ]


def _weigh_values(p: torch.Tensor, values: torch.Tensor, heads: int) -> torch.Tensor:
    return torch.einsum("nqk,knd->qnd", p, _expand(values, heads))


def _expand(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _sum_groups(grad: torch.Tensor, groups: int) -> torch.Tensor:
    rows, heads, features = grad.shape
    return grad.view(rows, groups, heads // groups, features).sum(2)
