"""Back ends of attention that run anywhere: torch's CPU kernel and plain operators.

Shape legend: Q query and K key tokens of a run of documents, N query heads, G key-value heads
(G divides N), D features of a head. The log-sum-exp is natural, of scaled scores, [N, Q], fp32
(fp64 for fp64).
"""

# ruff: noqa: SLF001  kernels have no public names

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["Backend", "CpuFlash", "Pair", "Plain", "Triple", "dense", "fold", "spread", "wide"]

Pair = tuple[torch.Tensor, torch.Tensor]
"""Attention out [Q, N, D] and its log-sum-exp [N, Q]."""

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Gradients of q [Q, N, D], k and v [K, G, D]."""


class Backend(Protocol):
    """Attention over runs of documents: queries of document i see the keys of document i.

    q [Q, N, D], k and v [K, G, D] with Q the sum of ``q_lengths`` and K that of ``k_lengths``;
    lengths are not 0, and a causal document has as many keys as queries. ``backward`` may be given
    an ``out`` and ``lse`` over more keys than k holds: then its dq is the part that comes through
    these keys.
    """

    @property
    def documents(self) -> int:
        """The most documents that one call of ``forward`` or ``backward`` takes."""

    def supports(self, q: torch.Tensor) -> bool:
        """Whether tensors like ``q`` can be handled."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_lengths: Sequence[int],
        k_lengths: Sequence[int],
        causal: bool,
    ) -> Pair:
        """(out [Q, N, D], lse [N, Q])."""

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        q_lengths: Sequence[int],
        k_lengths: Sequence[int],
        causal: bool,
    ) -> Triple:
        """(dq, dk, dv) in the shapes of q, k, v."""


@dataclass(frozen=True, slots=True)
class CpuFlash:
    """torch's blocked CPU kernel: fp64, fp32 and half types, grouped heads as they are."""

    documents: int = 1

    def supports(self, q: torch.Tensor) -> bool:
        """Whether a tensor is on a CPU, whatever its type and shape."""
        return q.device.type == "cpu"

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_lengths: Sequence[int],
        k_lengths: Sequence[int],
        causal: bool,
    ) -> Pair:
        """Attention within one document: (out [Q, N, D], lse [N, Q])."""
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(dense(x).transpose(0, 1)[None] for x in (q, k, v)), 0.0, causal
        )
        return out[0].transpose(0, 1), lse[0]

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        q_lengths: Sequence[int],
        k_lengths: Sequence[int],
        causal: bool,
    ) -> Triple:
        """(dq, dk, dv) of one document, in the shapes of q, k, v."""
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        heads = [dense(x).transpose(0, 1)[None] for x in (grad, q, k, v, out)]
        grads = backward(*heads, lse.contiguous()[None], 0.0, causal)
        dq, dk, dv = (x[0].transpose(0, 1) for x in grads)
        return dq, dk, dv


@dataclass(frozen=True, slots=True)
class Plain:
    """Attention in plain operators, some rows of queries at a time: right on any device, but slow.

    ``softcap`` c above 0 bounds scores: c tanh(score / c), as Gemma 2 has them.
    """

    softcap: float = 0.0
    documents: int = 1

    def supports(self, q: torch.Tensor) -> bool:
        """Always True: plain operators take any tensor."""
        return True

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_lengths: Sequence[int],
        k_lengths: Sequence[int],
        causal: bool,
    ) -> Pair:
        """Attention within one document: (out [Q, N, D], lse [N, Q])."""
        out = q.new_empty((*q.shape[:2], v.shape[2]))
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=wide(q))
        for rows, keys in _tiles(q, k, causal):
            scores = self._scores(q[rows], k[keys], rows.start if causal else None)
            lse[:, rows] = scores.logsumexp(-1)
            p = (scores - lse[:, rows, None]).exp()
            out[rows] = torch.einsum("nqk,knd->qnd", p, spread(v[keys], q).to(p.dtype)).to(q.dtype)
        return out, lse

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        q_lengths: Sequence[int],
        k_lengths: Sequence[int],
        causal: bool,
    ) -> Triple:
        """(dq, dk, dv) of one document, in the shapes of q, k, v."""
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=wide(x)) for x in (k, v))
        for rows, keys in _tiles(q, k, causal):
            scores = self._scores(q[rows], k[keys], rows.start if causal else None)
            p = (scores - lse[:, rows, None]).exp()
            do = grad[rows].to(p.dtype)
            dv[keys] += fold(torch.einsum("nqk,qnd->knd", p, do), v[keys])
            dp = torch.einsum("qnd,knd->nqk", do, spread(v[keys], q).to(p.dtype))
            # dS = P (dP - delta) / sqrt(D), delta = sum_D(do o) of each query
            delta = (do * out[rows].to(p.dtype)).sum(-1).t()[..., None]
            ds = p * (dp - delta) / math.sqrt(q.shape[-1])
            if self.softcap:
                # The slope of c tanh(x / c) is 1 - tanh^2. Masked scores are -inf and their ds is 0
                # already: clamped, or 0 times infinity would be NaN.
                ds *= 1 - (scores / self.softcap).clamp_min_(-1).square_()
            dq[rows] = torch.einsum("nqk,knd->qnd", ds, spread(k[keys], q).to(p.dtype)).to(q.dtype)
            dk[keys] += fold(torch.einsum("nqk,qnd->knd", ds, q[rows].to(p.dtype)), k[keys])
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    def _scores(self, q: torch.Tensor, k: torch.Tensor, first: int | None) -> torch.Tensor:
        """Scaled scores [N, queries, keys]. Where attention is causal, ``first`` is the index of
        the first query among the keys, and scores of later keys are minus infinity; else it is
        None."""
        scores = torch.einsum("qnd,knd->nqk", q.to(wide(q)), spread(k, q).to(wide(q)))
        scores /= math.sqrt(q.shape[-1])
        if self.softcap:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if first is not None:
            future = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(first + 1)
            scores.masked_fill_(future, -math.inf)
        return scores


_SCORES = 1 << 24
"""Scores that plain operators hold at once: 64 MiB in fp32."""


def _tiles(q: torch.Tensor, k: torch.Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """(rows of queries, the keys that they see), cut so that the scores of a tile, of all heads,
    stay within ``_SCORES``."""
    rows = max(1, _SCORES // max(1, q.shape[1] * len(k)))
    for start in range(0, len(q), rows):
        stop = min(start + rows, len(q))
        yield slice(start, stop), slice(0, stop if causal else len(k))


def wide(x: torch.Tensor) -> torch.dtype:
    """Type of sums over many tokens, and of the log-sum-exp: fp64 for fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def dense(x: torch.Tensor) -> torch.Tensor:
    """``x``, copied where the features of a head are not adjacent in memory: kernels take that for
    granted."""
    return x if x.stride(-1) == 1 else x.contiguous()


def spread(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Repeat the key-value heads x [K, G, D], one for each query head of ``q``: [K, N, D]."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def fold(grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The adjoint of :func:`spread`: the gradients [K, N, D] of the query heads of a group are
    added up, to the shape of ``like``, [K, G, D]."""
    length, heads, features = like.shape
    return grad.reshape(length, heads, grad.shape[1] // heads, features).sum(2)
