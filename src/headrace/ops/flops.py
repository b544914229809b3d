"""Counting the floating-point operations of attention, and of weight gradients.

torch's counter does not know the CPU kernel, counts causal squares whole and leaves out products
that are added in place. Here only scores that are not masked are counted, document by document: two
products forward (scores, output) and five backward (scores again, dP, dV, dQ, dK), each 2 N D
operations per score.

Shape legend: B samples, Q query and K key tokens, N query heads, G key-value heads, D features of a
head.
"""

# ruff: noqa: SLF001  kernels have no public names

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils.flop_counter import FlopCounterMode

__all__ = ["ATTENTION", "FLOPS", "flop_counter"]


def flop_counter() -> FlopCounterMode:
    """torch's counter of FLOPs, with the formulas of ``FLOPS`` in place of its own for attention
    and for products that are added to a tensor; it prints nothing."""
    return FlopCounterMode(display=False, custom_mapping=dict(FLOPS))


@dataclass(frozen=True, slots=True)
class _Formula:
    """A function ``count`` from an operator's arguments to its FLOPs, in the form that torch's
    counter takes. ``_get_raw`` has the counter pass tensors, where it would pass their shapes."""

    count: Callable[..., int]
    _get_raw: ClassVar[bool] = True

    def __call__(self, *args: Any, out_val: Any = None, **rest: Any) -> int:
        """The FLOPs of a call with these arguments; its result ``out_val`` is not needed."""
        return self.count(*args, **rest)


def _cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    **rest: Any,
) -> int:
    """FLOPs of the forward of torch's attention on a CPU: q [B, N, Q, D], k [B, G, K, D]."""
    batch, _, rows, _ = q.shape
    # two products of 2 N D operations per score
    return 4 * _width(q, 1) * batch * _scores(rows, k.shape[2], causal)


def _cpu_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dropout: float,
    causal: bool,
    **rest: Any,
) -> int:
    """FLOPs of the backward of torch's attention on a CPU: five products where the forward has
    two."""
    return 5 * _cpu(q, k, v, dropout, causal) // 2


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_starts: torch.Tensor | None,
    k_starts: torch.Tensor | None,
    q_most: int,
    k_most: int,
    dropout: float,
    causal: bool,
    *rest: Any,
    **more: Any,
) -> int:
    """FLOPs of the forward of flash attention: q [Q, N, D] where ``q_starts`` cut it into
    documents, [B, Q, N, D] without."""
    return 4 * _width(q, -2) * _packed_scores(q, k, q_starts, k_starts, q_most, k_most, causal)


def _flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *rest: Any,
    **more: Any,
) -> int:
    """FLOPs of the backward of flash attention: five products where the forward has two."""
    return 5 * _flash(q, k, v, *rest) // 2


def _efficient(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    q_starts: torch.Tensor | None,
    k_starts: torch.Tensor | None,
    q_most: int | None,
    k_most: int | None,
    dropout: float,
    mask: int,
    *rest: Any,
    **more: Any,
) -> int:
    """FLOPs of the forward of memory-efficient attention: q [1, Q, N, D] where ``q_starts`` cut it
    into documents, [B, Q, N, D] without. ``mask`` is 0 for full attention."""
    scores = _packed_scores(q, k, q_starts, k_starts, q_most or 0, k_most or 0, bool(mask))
    return 4 * _width(q, -2) * scores


def _efficient_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    q_starts: torch.Tensor | None,
    k_starts: torch.Tensor | None,
    q_most: int,
    k_most: int,
    lse: torch.Tensor,
    dropout: float,
    seed: torch.Tensor,
    offset: torch.Tensor,
    mask: int,
    *rest: Any,
    **more: Any,
) -> int:
    """FLOPs of the backward of memory-efficient attention: five products where the forward has
    two."""
    forward = _efficient(q, k, v, bias, q_starts, k_starts, q_most, k_most, dropout, mask)
    return 5 * forward // 2


def _packed_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    q_starts: torch.Tensor | None,
    k_starts: torch.Tensor | None,
    q_most: int,
    k_most: int,
    causal: bool,
) -> int:
    """The number of scores that are not masked: over all samples of q [B, Q, ...] and k
    [B, K, ...], or over all documents where ``q_starts`` and ``k_starts`` [documents + 1] cut one
    row of tokens into them. ``q_most`` and ``k_most`` are the longest documents' tokens."""
    if q_starts is None or k_starts is None:
        return q.shape[0] * _scores(q.shape[1], k.shape[1], causal)
    pairs = zip(_lengths(q_starts, q_most), _lengths(k_starts, k_most), strict=True)
    return sum(_scores(rows, columns, causal) for rows, columns in pairs)


def _lengths(starts: torch.Tensor, most: int) -> Sequence[int]:
    """Lengths of documents from their ``starts`` [documents + 1]; all ``most``, the longest, where
    the tensor has no values (in tracing)."""
    if isinstance(starts, FakeTensor | FunctionalTensor) or starts.is_meta:
        return [most] * (starts.shape[0] - 1)
    return starts.diff().tolist()


def _scores(rows: int, columns: int, causal: bool) -> int:
    """The number of scores of ``rows`` queries with ``columns`` keys: all, or for causal attention
    those up to the diagonal, which begins at the first row and column."""
    if not causal:
        return rows * columns
    # Row i sees columns 0..i: a triangle with its diagonal, and where there are more rows than
    # columns the rows below it, which see all columns.
    corner = min(rows, columns)
    return corner * (corner + 1) // 2 + (rows - corner) * columns


def _width(q: torch.Tensor, heads_dim: int) -> int:
    """N D, the features of all query heads; ``heads_dim`` is the dim of the heads."""
    return q.shape[heads_dim] * q.shape[-1]


def _added_product(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *others: Any, **rest: Any
) -> int:
    """FLOPs of left [M, K] times right [K, N]. torch's counter leaves such a product out when it is
    added in place, and cannot count it when the result is of another type."""
    return 2 * left.shape[0] * left.shape[1] * right.shape[1]


ATTENTION: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _Formula(_cpu),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _Formula(_cpu_backward),
    torch.ops.aten._flash_attention_forward: _Formula(_flash),
    torch.ops.aten._flash_attention_backward: _Formula(_flash_backward),
    torch.ops.aten._efficient_attention_forward: _Formula(_efficient),
    torch.ops.aten._efficient_attention_backward: _Formula(_efficient_backward),
}
"""Attention operators and their formulas."""

FLOPS = ATTENTION | {
    torch.ops.aten.addmm_: _Formula(_added_product),
    torch.ops.aten.addmm: _Formula(_added_product),
}
"""Operators and their formulas, for ``FlopCounterMode``'s ``custom_mapping``."""
