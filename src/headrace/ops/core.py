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
from itertools import pairwise
from typing import Any, Protocol

import torch

from headrace.ops.attention import add_gradients, attend_blocks
from headrace.ops.rotary import Turned
from headrace.ops.row_sums import RowSum, adds_at_once
from headrace.spec.blocks import Block

__all__ = [
    "Core",
    "Gradients",
    "Heads",
    "PackCore",
    "attended",
    "attended_again",
    "sink_gradient",
    "sum_dtype",
    "sunk",
    "wide_dtype",
]

Saved = tuple[torch.Tensor, ...]
"""Tensors that a core keeps for its backward besides qkv and the heads."""


class Core(Protocol):
    """Attention over a group; both functions may communicate."""

    def forward(self, qkv: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        """(out [t, N, D], what the backward needs besides qkv and out)."""

    def backward(
        self, grad: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, saved: Saved
    ) -> Gradients:
        """The gradients of qkv, given ``grad`` [t, N, D] of out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Gradients of q [t, N, D], k and v [t, G, D]; ``joint`` [t, N + 2 G, D] holds all three where
    they were computed in one tensor. ``sinks`` [N] of a core that has them: this rank's part."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    joint: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    @classmethod
    def of(cls, dqkv: torch.Tensor, heads: Heads) -> Gradients:
        """Views of a joint gradient [t, N + 2 G, D]."""
        dq, dk, dv = heads.split(dqkv)
        return cls(q=dq, k=dk, v=dv, joint=dqkv)

    @property
    def whole(self) -> torch.Tensor:
        """All three gradients in one tensor, [t, N + 2 G, D]."""
        if self.joint is not None:
            return self.joint
        return torch.cat([self.q, self.k, self.v], dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """How the heads of ``qkv`` [t, N + 2 G, D] are divided: N = ``queries`` query heads, then
    G = ``keys`` keys and as many values. Where ``softcap`` c is above 0, each score s is replaced
    by c tanh(s / c)."""

    queries: int
    keys: int
    softcap: float = 0.0

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of q [t, N, D], k and v [t, G, D] in ``qkv`` [t, N + 2 G, D]."""
        q, k, v = qkv.split([self.queries, self.keys, self.keys], dim=1)
        return q, k, v


@dataclass(frozen=True, slots=True, kw_only=True)
class PackCore:
    """Attention over tokens that are all here: no communication. Keeps the log-sum-exp."""

    heads: Heads
    blocks: Sequence[Block]

    def forward(self, qkv: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        """(out [t, N, D], (lse [N, t],))."""
        out, lse = attend_blocks(*self.heads.split(qkv), self.blocks, self.heads.softcap)
        return out, (lse,)

    def backward(
        self, grad: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, saved: Saved
    ) -> Gradients:
        """The gradients of qkv; where one kernel computes all rows at once, its results are not
        copied."""
        dqkv = torch.empty_like(qkv, dtype=_sum_dtype(qkv, self.blocks))
        views = self.heads.split(dqkv)
        dq, dk, dv = (RowSum(len(qkv), total=view) for view in views)
        qkv_parts, cap = self.heads.split(qkv), self.heads.softcap
        add_gradients(grad, *qkv_parts, out, saved[0], self.blocks, dq, dk, dv, cap)
        # where each sum has one part, the kernel's result for all rows, these are returned uncopied
        only_q, only_k, only_v = dq.only(), dk.only(), dv.only()
        if only_q is not None and only_k is not None and only_v is not None:
            return Gradients(q=only_q, k=only_k, v=only_v)
        for row_sum, view in zip((dq, dk, dv), views, strict=True):
            row_sum.write(view)
        return Gradients.of(dqkv.to(qkv.dtype), self.heads)


def _sum_dtype(qkv: torch.Tensor, blocks: Sequence[Block]) -> torch.dtype:
    """The type for gradients of q, k and v over ``blocks``: that of :func:`sum_dtype` where several
    blocks have the same query or key rows, so that their gradients add up, else that of qkv."""
    queries = sorted((block.q_start, block.q_stop) for block in blocks)
    keys = sorted((block.k_start, block.k_stop) for block in blocks)
    apart = all(
        stop <= start for rows in (queries, keys) for (_, stop), (start, _) in pairwise(rows)
    )
    return qkv.dtype if apart else sum_dtype(qkv)


def sum_dtype(x: torch.Tensor) -> torch.dtype:
    """The type of a tensor in which gradients like ``x`` are accumulated. A CPU adds each part to
    it, so it is at least fp32; a device adds all parts in fp32 first and writes the rounded sum to
    it once, so it has the type of x."""
    return wide_dtype(x.dtype) if adds_at_once(x) else x.dtype


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of sums over many terms: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sunk(out: torch.Tensor, saved: Saved, sinks: torch.Tensor) -> tuple[torch.Tensor, Saved]:
    """Turn the results of attention without sinks into those with sinks. A sink is one more score s
    in each row's softmax, the same for all rows of a head and without a value: the weights become
    e^(score - l'), l' = logaddexp(l, s) with the log-sum-exp l, so out is multiplied by e^(l - l').
    The backward of a core needs no change, as it takes the softmax's denominator from the
    log-sum-exp alone.

        out      [t, N, D]
        saved    (lse [N, t],)
        sinks    [N]                         scores of these heads' sinks
        returns  out [t, N, D], (lse [N, t],)    with the sink
    """
    (lse,) = saved
    # the log-sum-exp with the sink [N, t], and the factor [t, N, 1] by which out shrinks
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    share = (lse - total).exp().t()[..., None]
    return (out.to(share.dtype) * share).to(out.dtype), (total,)


def sink_gradient(
    grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """This rank's part [N] of the gradient of ``sinks`` [N], summed over its rows. ``grad`` is the
    gradient of out; ``out`` [t, N, D] and ``lse`` [N, t] are the results with sinks."""
    # The softmax's backward is ds = p (dp - do . o): here p = e^(s - lse) is the sink's weight, and
    # dp = 0, as a sink has no value.
    weight = (sinks.to(lse.dtype)[:, None] - lse).exp()
    do_dot_o = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1).t()
    return -(weight * do_dot_o).sum(1)


def attended(core: Core, qkv: torch.Tensor | Turned) -> torch.Tensor:
    """Attention of ``core`` over ``qkv`` [t, N + 2 G, D] under autograd: out [t, N, D]. Saves qkv,
    out and what the core needs for its backward."""
    if isinstance(qkv, Turned):
        return _AttendedTurned.apply(qkv.token, core, qkv)  # type: ignore[no-any-return]
    return _Attended.apply(qkv, core)  # type: ignore[no-any-return]


class _Attended(torch.autograd.Function):
    """Autograd of :func:`attended`."""

    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, core: Core) -> torch.Tensor:
        """The heads of attention over qkv; the core says what else it keeps."""
        out, saved = core.forward(qkv)
        ctx.save_for_backward(qkv, out, *saved)
        ctx.core = core
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """The gradient of qkv, as one tensor."""
        qkv, out, *saved = ctx.saved_tensors
        return ctx.core.backward(grad, qkv, out, tuple(saved)).whole, None


class _AttendedTurned(torch.autograd.Function):
    """Autograd of :func:`attended` for a :class:`Turned`, whose three gradients stay apart."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, core: Core, turned: Turned) -> torch.Tensor:
        """Attention over ``turned.qkv``: out [t, N, D]. Autograd sees the empty ``token`` as the
        input in the place of qkv, so it runs the projection's backward after this one's."""
        out, saved = core.forward(turned.qkv)
        ctx.save_for_backward(turned.qkv, out, *saved)
        ctx.rest = (core, turned.grads)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """Append the gradients of q, k and v to ``turned.grads``, from which the projection's
        backward takes them; the gradient of the token is empty."""
        qkv, out, *saved = ctx.saved_tensors
        core, grads = ctx.rest
        parts = core.backward(grad, qkv, out, tuple(saved))
        grads.append((parts.q, parts.k, parts.v))
        return grad.new_empty(0), None, None


def attended_again(
    core: Core, project: Callable[[torch.Tensor], tuple[Turned, torch.Tensor]], x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the q, k and v that ``project(x)`` makes; returns the heads, and x for the
    residual sum. ``project`` returns q, k and v, and x again, so that the backward adds both
    gradients of x in one place. Saves x, the heads and what the core needs; the backward runs
    ``project`` again, which therefore must not communicate activations."""
    return _AttendedAgain.apply(core, project, x)  # type: ignore[no-any-return]


class _AttendedAgain(torch.autograd.Function):
    """Autograd of :func:`attended_again`."""

    @staticmethod
    def forward(
        ctx: Any, core: Core, project: Any, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [t, N, D] of attention over the projections of x [t, h], x for a residual sum);
        keeps x and not q, k and v."""
        with torch.no_grad():
            turned, _ = project(x)
        out, saved = core.forward(turned.qkv)
        ctx.save_for_backward(x, out, *saved)
        ctx.rest = (core, project)
        ctx.set_materialize_grads(False)
        return out, x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, passed: torch.Tensor | None) -> Any:  # type: ignore[override]
        """The gradient of x: projects x again and goes back through attention and projection.
        ``grad`` is the gradient of out, None where nothing used it; ``passed`` that of the second
        result, x."""
        if grad is None:
            return None, None, passed
        x, out, *saved = ctx.saved_tensors
        core, project = ctx.rest
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            turned, x_again = project(leaf)
        parts = core.backward(grad, turned.qkv, out, tuple(saved))
        turned.grads.append((parts.q, parts.k, parts.v))
        # The token carries no values: it has autograd run the projection's backward, which takes
        # the gradients from ``turned.grads``.
        results, grads = [turned.token], [grad.new_empty(0)]
        if passed is not None:
            results, grads = [*results, x_again], [*grads, passed]
        del parts, turned  # frees memory before the projection's backward
        torch.autograd.backward(results, grads)
        return None, None, leaf.grad
