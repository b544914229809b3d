"""Attention over packed documents: the one door to kernels.

Shape legend: T tokens of a pack of documents, N query heads, G key-value heads (G divides N),
D features of a head. Each document attends within itself.

A back end is a pair of functions over one document; the first of ``BACKENDS`` that supports the
tensors is used. Later kernels with cu_seqlens join the list. The log-sum-exp is natural, [N, T],
fp32 (fp64 for fp64).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from headrace.errors import SpecError

__all__ = ["BACKENDS", "Backend", "attend", "attend_backward", "attend_forward"]

_Pair = tuple[torch.Tensor, torch.Tensor]
_Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Backend(Protocol):
    """Forward and backward of one document; q, k, v [L, heads, D], lse [N, L]."""

    def supports(self, q: torch.Tensor) -> bool:
        """Whether tensors like ``q`` can be handled."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> _Pair:
        """(out [L, N, D], lse [N, L])."""

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor, lse: torch.Tensor, causal: bool,
    ) -> _Triple:  # fmt: skip
        """(dq, dk, dv) in the shapes of q, k, v."""


@dataclass(frozen=True, slots=True)
class _CpuFlash:
    """torch's blocked CPU kernel: fp64, fp32 and half types, grouped heads as they are."""

    def supports(self, q: torch.Tensor) -> bool:
        return q.device.type == "cpu"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> _Pair:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), 0.0, causal
        )
        return out[0].transpose(0, 1), lse[0]

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor, lse: torch.Tensor, causal: bool,
    ) -> _Triple:  # fmt: skip
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        heads = [x.transpose(0, 1)[None] for x in (grad, q, k, v, out)]
        grads = backward(*heads, lse.contiguous()[None], 0.0, causal)
        dq, dk, dv = (x[0].transpose(0, 1) for x in grads)
        return dq, dk, dv


@dataclass(frozen=True, slots=True)
class _Plain:
    """Whole score rows in plain operators: right on any device, for short documents."""

    def supports(self, q: torch.Tensor) -> bool:
        return True

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> _Pair:
        scores = self._scores(q, k, causal)
        lse = scores.logsumexp(-1)
        values = self._expand(v, q).to(scores.dtype)
        out = torch.einsum("nqk,knd->qnd", (scores - lse[..., None]).exp(), values)
        return out.to(q.dtype), lse

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor, lse: torch.Tensor, causal: bool,
    ) -> _Triple:  # fmt: skip
        p = (self._scores(q, k, causal) - lse[..., None]).exp()
        g = grad.to(p.dtype)
        dv = self._fold(torch.einsum("nqk,qnd->knd", p, g), v)
        dp = torch.einsum("qnd,knd->nqk", g, self._expand(v, q).to(p.dtype))
        inner = (g * out).sum(-1).t()[..., None]
        ds = p * (dp - inner) / math.sqrt(q.shape[-1])
        dq = torch.einsum("nqk,knd->qnd", ds, self._expand(k, q).to(p.dtype))
        dk = self._fold(torch.einsum("nqk,qnd->knd", ds, q.to(p.dtype)), k)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _scores(self, q: torch.Tensor, k: torch.Tensor, causal: bool) -> torch.Tensor:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        scores = torch.einsum("qnd,knd->nqk", q.to(wide), self._expand(k, q).to(wide))
        scores /= math.sqrt(q.shape[-1])
        if causal:
            length = q.shape[0]
            future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
            scores.masked_fill_(future, -math.inf)
        return scores

    @staticmethod
    def _expand(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)

    @staticmethod
    def _fold(grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        length, heads, features = like.shape
        return grad.view(length, heads, grad.shape[1] // heads, features).sum(2)


BACKENDS: list[Backend] = [_CpuFlash(), _Plain()]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], causal: bool
) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v within each document of a pack.

        q         [T, N, D]
        k, v      [T, G, D]
        lengths   tokens of each document in pack order, summing to T
        returns   [T, N, D]
        backward  from q, k, v, the output and its log-sum-exp; scores are never kept

    Raises SpecError when the shapes disagree.
    """  # fmt: skip
    if sum(lengths) != q.shape[0] or k.shape != v.shape or k.shape[0] != q.shape[0]:
        raise SpecError(
            "attention", got=f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}",
            wanted=f"{sum(lengths)} tokens in each",
        )  # fmt: skip
    if q.shape[1] and (not k.shape[1] or q.shape[1] % k.shape[1]):
        raise SpecError(
            "attention", got=f"{q.shape[1]} query heads", wanted=f"a multiple of {k.shape[1]}"
        )
    return _Attend.apply(q, k, v, tuple(lengths), causal)  # type: ignore[no-any-return]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Any, causal: bool
    ) -> torch.Tensor:
        out, lse = attend_forward(q, k, v, lengths, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = (lengths, causal)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        return *attend_backward(grad, q, k, v, out, lse, *ctx.rest), None, None


def attend_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], causal: bool
) -> _Pair:
    """(out [T, N, D], lse [N, T]) without autograd."""
    backend = _backend(q)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=wide)
    for part in _documents(lengths) if q.shape[1] else ():
        out[part], lse[:, part] = backend.forward(q[part], k[part], v[part], causal)
    return out, lse


def attend_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, lengths: Sequence[int], causal: bool,
) -> _Triple:  # fmt: skip
    """(dq, dk, dv) without autograd; ``out`` and ``lse`` as the forward gave them."""
    backend = _backend(q)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for part in _documents(lengths) if q.shape[1] else ():
        dq[part], dk[part], dv[part] = backend.backward(
            grad[part], q[part], k[part], v[part], out[part], lse[:, part], causal
        )
    return dq, dk, dv


def _backend(q: torch.Tensor) -> Backend:
    return next(backend for backend in BACKENDS if backend.supports(q))


def _documents(lengths: Sequence[int]) -> list[slice]:
    parts: list[slice] = []
    start = 0
    for length in lengths:
        parts.append(slice(start, start + length))
        start += length
    return parts
