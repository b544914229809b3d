"""Triton kernels of the functions that ``torch.compile`` makes slow, for ``headrace.ops.fused``.

To find an element of a gate, or of a head that is sorted and rotated, indices are divided by sizes
(of a block, of a group). ``torch.compile`` with dynamic sizes divides for every element, and writes
the halves of a result separately: on an H200 that takes five to twenty times as long as
reading and writing the memory. Here block, heads and features are constants of a kernel; only the
number of tokens is not.

Functions have the names and arguments of the operators. Sums and products are in fp32 (fp64 of
fp64), results are rounded once.

Shape legend: T or t tokens, f features of a gate, g KV groups of m query heads, n = g m, D features
of a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["rotate_and_sort", "swiglu", "swiglu_backward", "unrotate_and_unsort"]

_FEATURES = 1024
"""Features that one program of a gate's kernel computes: 8 a thread, two loads of 16 bytes for half
types."""

_HEADS = 16
"""Heads that one program of a rotation's kernel computes."""


def swiglu(x: torch.Tensor, block: int) -> torch.Tensor:
    """silu(gate) * up [T, f] of x [T, 2 f], where blocks of ``block`` features are gate and up in
    turn."""
    x = x.contiguous()
    tokens, features = x.shape[0], x.shape[1] // 2
    out = x.new_empty((tokens, features))
    if out.numel():
        grid = (tokens, triton.cdiv(features, _FEATURES))
        _swiglu[grid](x, out, features, block=block, wide=_wide(x), program_features=_FEATURES)
    return out


def swiglu_backward(grad: torch.Tensor, x: torch.Tensor, block: int) -> torch.Tensor:
    """The gradient of x [T, 2 f] from ``grad`` [T, f], that of :func:`swiglu`."""
    grad, x = grad.contiguous(), x.contiguous()
    tokens, features = grad.shape
    out = torch.empty_like(x)
    if out.numel():
        grid = (tokens, triton.cdiv(features, _FEATURES))
        _swiglu_backward[grid](
            grad, x, out, features, block=block, wide=_wide(x), program_features=_FEATURES
        )
    return out


def rotate_and_sort(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rows: torch.Tensor | None
) -> torch.Tensor:
    """Sort qkv [t, g, m + 2, D], in each group m queries, a key and a value, into [t, n + 2 g, D]:
    all queries, all keys, all values; queries and keys are rotated by cos and sin [t, D / 2].
    ``rows`` [t], where given, selects rows of qkv first."""
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
            padded_half=triton.next_power_of_2(features // 2),
            selects=rows is not None,
            wide=_wide(qkv),
            program_heads=_HEADS,
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
    """The adjoint of :func:`rotate_and_sort`: dq [t, n, D], dk and dv [t, g, D] to
    [t, g, m + 2, D]. ``rows`` is the inverse selection, also of cos and sin [t, D / 2], or None."""
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
            padded_half=triton.next_power_of_2(features // 2),
            selects=rows is not None,
            wide=_wide(dq),
            program_heads=_HEADS,
        )
    return out


def _wide(x: torch.Tensor) -> tl.dtype:
    """The type in which a kernel computes on x: fp64 for fp64, else fp32."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


@triton.jit
def _swiglu(
    x, out, features, block: tl.constexpr, wide: tl.constexpr, program_features: tl.constexpr
) -> None:
    """Write silu(gate) * up of x [T, 2 ``features``] to ``out`` [T, ``features``], both contiguous.
    Program (i, j) computes the j-th ``program_features`` features of token i, in the type
    ``wide``."""
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * program_features + tl.arange(0, program_features)
    exists = feature < features
    gate_pointer = x + token * 2 * features + feature // block * (2 * block) + feature % block
    gate = tl.load(gate_pointer, mask=exists, other=0).to(wide)
    up = tl.load(gate_pointer + block, mask=exists, other=0).to(wide)
    result = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + token * features + feature, result.to(out.dtype.element_ty), mask=exists)


@triton.jit
def _swiglu_backward(
    grad, x, out, features, block: tl.constexpr, wide: tl.constexpr, program_features: tl.constexpr
) -> None:
    """Write the gradient of x [T, 2 ``features``] to ``out`` from ``grad`` [T, ``features``], all
    contiguous. Program (i, j) is as in :func:`_swiglu`; the formula is that of
    :class:`headrace.ops.activation.SwiGLU`."""
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * program_features + tl.arange(0, program_features)
    exists = feature < features
    gate_offset = token * 2 * features + feature // block * (2 * block) + feature % block
    gate = tl.load(x + gate_offset, mask=exists, other=0).to(wide)
    up = tl.load(x + gate_offset + block, mask=exists, other=0).to(wide)
    dy = tl.load(grad + token * features + feature, mask=exists, other=0).to(wide)
    sigmoid = 1 / (1 + tl.exp(-gate))
    dgate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(out + gate_offset, dgate.to(out.dtype.element_ty), mask=exists)
    tl.store(out + gate_offset + block, (dy * gate * sigmoid).to(out.dtype.element_ty), mask=exists)


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
    padded_half: tl.constexpr,
    selects: tl.constexpr,
    wide: tl.constexpr,
    program_heads: tl.constexpr,
) -> None:
    """Write :func:`rotate_and_sort` of qkv to ``out``, all tensors contiguous; ``groups`` is g,
    ``queries`` m, ``half`` D / 2. Program (i, j) computes the j-th ``program_heads`` heads of
    token i, counted in the order of qkv, in the type ``wide``. ``padded_half`` is a power of two
    that is at least ``half``; ``rows`` are read where ``selects``."""
    token = tl.program_id(0).to(tl.int64)
    source = tl.load(rows + token) if selects else token
    heads: tl.constexpr = groups * (queries + 2)
    head = tl.program_id(1) * program_heads + tl.arange(0, program_heads)
    # features i and i + half of a head are rotated together
    pair = tl.arange(0, padded_half)
    exists = (head < heads)[:, None] & (pair < half)[None, :]
    # members of a group: its queries 0..m-1, its key m, its value m + 1
    group, member = head // (queries + 2), head % (queries + 2)
    first_place = qkv + source * (heads * 2 * half) + head[:, None] * (2 * half) + pair[None, :]
    first = tl.load(first_place, mask=exists, other=0).to(wide)
    second = tl.load(first_place + half, mask=exists, other=0).to(wide)
    cosine = tl.load(cos + token * half + pair, mask=pair < half, other=0).to(wide)[None, :]
    sine = tl.load(sin + token * half + pair, mask=pair < half, other=0).to(wide)[None, :]
    is_rotated = (member <= queries)[:, None]
    new_first = tl.where(is_rotated, first * cosine - second * sine, first)
    new_second = tl.where(is_rotated, second * cosine + first * sine, second)
    first_key: tl.constexpr = groups * queries
    out_head = tl.where(
        member < queries, group * queries + member, first_key + (member - queries) * groups + group
    )
    target = out + token * (heads * 2 * half) + out_head[:, None] * (2 * half) + pair[None, :]
    tl.store(target, new_first.to(out.dtype.element_ty), mask=exists)
    tl.store(target + half, new_second.to(out.dtype.element_ty), mask=exists)


@triton.jit
def _unrotate_and_unsort(
    dq,
    dk,
    dv,
    cos,
    sin,
    rows,
    out,
    dq_token_stride,
    dq_head_stride,
    dk_token_stride,
    dk_head_stride,
    dv_token_stride,
    dv_head_stride,
    groups: tl.constexpr,
    queries: tl.constexpr,
    half: tl.constexpr,
    padded_half: tl.constexpr,
    selects: tl.constexpr,
    wide: tl.constexpr,
    program_heads: tl.constexpr,
) -> None:
    """Write :func:`unrotate_and_unsort` of dq, dk and dv to ``out``. Strides of a token and of a
    head are given in elements; all other tensors are contiguous. Arguments and programs are as in
    :func:`_rotate_and_sort`, heads counted in the order of ``out``."""
    token = tl.program_id(0).to(tl.int64)
    source = tl.load(rows + token) if selects else token
    heads: tl.constexpr = groups * (queries + 2)
    head = tl.program_id(1) * program_heads + tl.arange(0, program_heads)
    # features i and i + half of a head were rotated together
    pair = tl.arange(0, padded_half)
    inside = (pair < half)[None, :]
    group, member = head // (queries + 2), head % (queries + 2)
    is_q = ((head < heads) & (member < queries))[:, None] & inside
    is_k = ((head < heads) & (member == queries))[:, None] & inside
    is_v = ((head < heads) & (member == queries + 1))[:, None] & inside
    q_place = (
        dq
        + source * dq_token_stride
        + (group * queries + member)[:, None] * dq_head_stride
        + pair[None, :]
    )
    k_place = dk + source * dk_token_stride + group[:, None] * dk_head_stride + pair[None, :]
    v_place = dv + source * dv_token_stride + group[:, None] * dv_head_stride + pair[None, :]
    # each head is read from one of the three tensors; the other two loads give 0
    first = tl.load(q_place, mask=is_q, other=0).to(wide)
    first += tl.load(k_place, mask=is_k, other=0).to(wide)
    first += tl.load(v_place, mask=is_v, other=0).to(wide)
    second = tl.load(q_place + half, mask=is_q, other=0).to(wide)
    second += tl.load(k_place + half, mask=is_k, other=0).to(wide)
    second += tl.load(v_place + half, mask=is_v, other=0).to(wide)
    cosine = tl.load(cos + source * half + pair, mask=pair < half, other=0).to(wide)[None, :]
    sine = tl.load(sin + source * half + pair, mask=pair < half, other=0).to(wide)[None, :]
    is_rotated = (member <= queries)[:, None]
    new_first = tl.where(is_rotated, first * cosine + second * sine, first)
    new_second = tl.where(is_rotated, second * cosine - first * sine, second)
    exists = (head < heads)[:, None] & inside
    target = out + token * (heads * 2 * half) + head[:, None] * (2 * half) + pair[None, :]
    tl.store(target, new_first.to(out.dtype.element_ty), mask=exists)
    tl.store(target + half, new_second.to(out.dtype.element_ty), mask=exists)
