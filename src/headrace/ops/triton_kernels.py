"""Triton kernels of the functions that ``torch.compile`` makes slow, for ``headrace.ops.fused``.

Gates, and heads that are sorted and rotated, are moved in blocks whose place takes divisions by
sizes. With sizes that are not known as it compiles, the compiler divides for every element, and
writes halves of a result apart: on an H200 five to twenty times what the memory takes. Here block,
heads and features are constants of a kernel, the number of tokens is not.

Functions have the names and arguments of the operators. Sums and products are in fp32 (fp64 of
fp64), results are rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["rotate_and_sort", "swiglu", "swiglu_backward", "unrotate_and_unsort"]

_FEATURES = 1024
"""Features that a program of a gate takes: 8 a thread, two loads of 16 bytes for half types."""

_HEADS = 16
"""Heads that a program of a rotation takes at once."""


def swiglu(x: torch.Tensor, block: int) -> torch.Tensor:
    """silu(gate) * up [T, f] of x [T, 2 f], gate and up in turns of ``block`` features."""
    x = x.contiguous()
    tokens, features = x.shape[0], x.shape[1] // 2
    out = x.new_empty((tokens, features))
    if out.numel():
        grid = (tokens, triton.cdiv(features, _FEATURES))
        _swiglu[grid](x, out, features, block=block, wide=_wide(x), taken=_FEATURES)
    return out


def swiglu_backward(grad: torch.Tensor, x: torch.Tensor, block: int) -> torch.Tensor:
    """The gradient of x [T, 2 f] from that of :func:`swiglu` [T, f]."""
    grad, x = grad.contiguous(), x.contiguous()
    tokens, features = grad.shape
    out = torch.empty_like(x)
    if out.numel():
        grid = (tokens, triton.cdiv(features, _FEATURES))
        _swiglu_backward[grid](grad, x, out, features, block=block, wide=_wide(x), taken=_FEATURES)
    return out


def rotate_and_sort(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rows: torch.Tensor | None
) -> torch.Tensor:
    """qkv [t, g, m + 2, D], or its ``rows``, to [t, n + 2 g, D], queries and keys rotated by cos
    and sin [t, D / 2]."""
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    tokens = len(qkv) if rows is None else len(rows)
    _, groups, heads, features = qkv.shape
    out = qkv.new_empty((tokens, groups * heads, features))
    if out.numel():
        _rotate_and_sort[(tokens, triton.cdiv(groups * heads, _HEADS))](
            qkv,
            cos,
            sin,
            qkv if rows is None else rows,
            out,
            groups=groups,
            queries=heads - 2,
            half=features // 2,
            places=triton.next_power_of_2(features // 2),
            chosen=rows is not None,
            wide=_wide(qkv),
            taken=_HEADS,
        )
    return out


def unrotate_and_unsort(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rows: torch.Tensor | None,
) -> torch.Tensor:
    """The adjoint: [t, n, D] and two of [t, g, D], or their ``rows``, to [t, g, m + 2, D]."""
    dq, dk, dv = (x if x.stride(-1) == 1 else x.contiguous() for x in (dq, dk, dv))
    cos, sin = cos.contiguous(), sin.contiguous()
    tokens = len(dq) if rows is None else len(rows)
    groups, features = dk.shape[1:]
    queries = dq.shape[1] // groups if groups else 0
    out = dq.new_empty((tokens, groups, queries + 2, features))
    if out.numel():
        _unrotate_and_unsort[(tokens, triton.cdiv(groups * (queries + 2), _HEADS))](
            dq,
            dk,
            dv,
            cos,
            sin,
            dq if rows is None else rows,
            out,
            *dq.stride()[:2],
            *dk.stride()[:2],
            *dv.stride()[:2],
            groups=groups,
            queries=queries,
            half=features // 2,
            places=triton.next_power_of_2(features // 2),
            chosen=rows is not None,
            wide=_wide(dq),
            taken=_HEADS,
        )
    return out


def _wide(x: torch.Tensor) -> tl.dtype:
    """The type in which a kernel computes."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


@triton.jit
def _swiglu(x, out, features, block: tl.constexpr, wide: tl.constexpr, taken: tl.constexpr) -> None:
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * taken + tl.arange(0, taken)
    there = at < features
    place = x + token * 2 * features + at // block * (2 * block) + at % block
    gate = tl.load(place, mask=there, other=0).to(wide)
    up = tl.load(place + block, mask=there, other=0).to(wide)
    y = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + token * features + at, y.to(out.dtype.element_ty), mask=there)


@triton.jit
def _swiglu_backward(
    grad, x, out, features, block: tl.constexpr, wide: tl.constexpr, taken: tl.constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * taken + tl.arange(0, taken)
    there = at < features
    place = token * 2 * features + at // block * (2 * block) + at % block
    gate = tl.load(x + place, mask=there, other=0).to(wide)
    up = tl.load(x + place + block, mask=there, other=0).to(wide)
    dy = tl.load(grad + token * features + at, mask=there, other=0).to(wide)
    s = 1 / (1 + tl.exp(-gate))
    dgate = dy * up * s * (1 + gate * (1 - s))
    tl.store(out + place, dgate.to(out.dtype.element_ty), mask=there)
    tl.store(out + place + block, (dy * gate * s).to(out.dtype.element_ty), mask=there)


@triton.jit
def _rotate_and_sort(
    qkv,
    cos,
    sin,
    rows,
    out,
    groups: tl.constexpr,
    queries: tl.constexpr,
    half: tl.constexpr,
    places: tl.constexpr,
    chosen: tl.constexpr,
    wide: tl.constexpr,
    taken: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    source = tl.load(rows + token) if chosen else token
    heads: tl.constexpr = groups * (queries + 2)
    j = tl.program_id(1) * taken + tl.arange(0, taken)
    i = tl.arange(0, places)
    there = (j < heads)[:, None] & (i < half)[None, :]
    group, own = j // (queries + 2), j % (queries + 2)
    first_place = qkv + source * (heads * 2 * half) + j[:, None] * (2 * half) + i[None, :]
    first = tl.load(first_place, mask=there, other=0).to(wide)
    second = tl.load(first_place + half, mask=there, other=0).to(wide)
    c = tl.load(cos + token * half + i, mask=i < half, other=0).to(wide)[None, :]
    s = tl.load(sin + token * half + i, mask=i < half, other=0).to(wide)[None, :]
    turned = (own <= queries)[:, None]
    one = tl.where(turned, first * c - second * s, first)
    two = tl.where(turned, second * c + first * s, second)
    keys: tl.constexpr = groups * queries
    head = tl.where(own < queries, group * queries + own, keys + (own - queries) * groups + group)
    to = out + token * (heads * 2 * half) + head[:, None] * (2 * half) + i[None, :]
    tl.store(to, one.to(out.dtype.element_ty), mask=there)
    tl.store(to + half, two.to(out.dtype.element_ty), mask=there)


@triton.jit
def _unrotate_and_unsort(
    dq,
    dk,
    dv,
    cos,
    sin,
    rows,
    out,
    dq_token,
    dq_head,
    dk_token,
    dk_head,
    dv_token,
    dv_head,
    groups: tl.constexpr,
    queries: tl.constexpr,
    half: tl.constexpr,
    places: tl.constexpr,
    chosen: tl.constexpr,
    wide: tl.constexpr,
    taken: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    source = tl.load(rows + token) if chosen else token
    heads: tl.constexpr = groups * (queries + 2)
    j = tl.program_id(1) * taken + tl.arange(0, taken)
    i = tl.arange(0, places)
    inside = (i < half)[None, :]
    group, own = j // (queries + 2), j % (queries + 2)
    is_q = ((j < heads) & (own < queries))[:, None] & inside
    is_k = ((j < heads) & (own == queries))[:, None] & inside
    is_v = ((j < heads) & (own == queries + 1))[:, None] & inside
    q_place = dq + source * dq_token + (group * queries + own)[:, None] * dq_head + i[None, :]
    k_place = dk + source * dk_token + group[:, None] * dk_head + i[None, :]
    v_place = dv + source * dv_token + group[:, None] * dv_head + i[None, :]
    first = tl.load(q_place, mask=is_q, other=0).to(wide)
    first += tl.load(k_place, mask=is_k, other=0).to(wide)
    first += tl.load(v_place, mask=is_v, other=0).to(wide)
    second = tl.load(q_place + half, mask=is_q, other=0).to(wide)
    second += tl.load(k_place + half, mask=is_k, other=0).to(wide)
    second += tl.load(v_place + half, mask=is_v, other=0).to(wide)
    c = tl.load(cos + source * half + i, mask=i < half, other=0).to(wide)[None, :]
    s = tl.load(sin + source * half + i, mask=i < half, other=0).to(wide)[None, :]
    turned = (own <= queries)[:, None]
    one = tl.where(turned, first * c + second * s, first)
    two = tl.where(turned, second * c - first * s, second)
    there = (j < heads)[:, None] & inside
    to = out + token * (heads * 2 * half) + j[:, None] * (2 * half) + i[None, :]
    tl.store(to, one.to(out.dtype.element_ty), mask=there)
    tl.store(to + half, two.to(out.dtype.element_ty), mask=there)
