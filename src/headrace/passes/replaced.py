"""What models call that knows of other tokens, replaced: the same arguments, and a model's handle.

Doors differ in how they find the calls, in a graph or as they are made; what stands there instead
is one function for all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from headrace.errors import ModelError
from headrace.passes.heads import attention
from headrace.passes.operators import positions, targets

__all__ = [
    "Cut",
    "cross_entropy",
    "cuts_of",
    "multi_head_attention",
    "rows_of",
    "scaled_dot_product_attention",
]


class Cut(NamedTuple):
    """The part ``at`` of an index, which takes the first rows of ``dim``: of ``made``, in the
    result."""

    at: int
    dim: int
    made: int


def cuts_of(index: Any, dims: int) -> list[Cut]:
    """What an index of a tensor of ``dims`` dims cuts to its first rows: none where it does more
    than to cut and pick."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, (torch.Tensor, list, bool)) for part in parts):
        return []
    taken = sum(part is not None and part is not Ellipsis for part in parts)
    found, dim, made = list[Cut](), 0, 0
    for at, part in enumerate(parts):
        if part is Ellipsis:
            dim, made = dim + dims - taken, made + dims - taken
        elif part is None:
            made += 1
        elif not isinstance(part, slice):
            dim += 1
        else:
            if part.stop is not None and part.start in (None, 0) and part.step in (None, 1):
                found.append(Cut(at=at, dim=dim, made=made))
            dim, made = dim + 1, made + 1
    return found


def rows_of(
    table: torch.Tensor, index: Any, *, at: int, dim: int, made: int, handle: int
) -> torch.Tensor:
    """``table[index]`` with the rows of the local tokens in place of as many first ones: those of a
    :class:`Cut`."""
    counted = torch.arange(table[index].shape[made], device=table.device)
    parts = index if isinstance(index, tuple) else (index,)
    rest = tuple(slice(None) if i == at else part for i, part in enumerate(parts))
    return table.index_select(dim, positions(counted, handle))[rest]


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    handle: int,
) -> torch.Tensor:
    """Attention of the local tokens over the group: q [b, N, s_r, D], k and v [b, G, s_r, D].
    Raises ModelError for masks, dropout and tokens of other places."""
    what = "scaled_dot_product_attention"
    if attn_mask is not None:
        raise ModelError(
            what,
            got="attn_mask",
            wanted="is_causal, or no mask",
            hint="a mask of this rank's tokens says nothing of those of others",
        )
    if dropout_p > 0:
        raise ModelError(what, got=f"dropout_p {dropout_p}", wanted="0")
    if query.dim() != 4 or key.shape[2] != query.shape[2]:
        raise ModelError(
            what,
            got=f"queries {list(query.shape)}, keys {list(key.shape)}",
            wanted="[rows, heads, tokens, features] of the same tokens",
        )
    return attention(query, key, value, handle, causal=is_causal, scale=scale)


def multi_head_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    features: int,
    heads: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    bias_k: torch.Tensor | None,
    bias_v: torch.Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_weight: torch.Tensor,
    out_bias: torch.Tensor | None,
    training: bool = True,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: torch.Tensor | None = None,
    k_proj_weight: torch.Tensor | None = None,
    v_proj_weight: torch.Tensor | None = None,
    static_k: torch.Tensor | None = None,
    static_v: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    *,
    handle: int,
) -> tuple[torch.Tensor, None]:
    """What torch's MultiheadAttention calls, of the local tokens: all three inputs [s_r, b, N D].
    As there, a mask is dropped where ``is_causal`` says what it is. Raises ModelError for what
    changes the scores, and where the weights are wanted."""
    odd = {
        "bias_k": bias_k,
        "bias_v": bias_v,
        "add_zero_attn": add_zero_attn or None,
        "key_padding_mask": key_padding_mask,
        "need_weights": need_weights or None,
        "attn_mask": None if is_causal else attn_mask,
        "static_k": static_k,
        "static_v": static_v,
        "dropout": (training and dropout_p) or None,
    }
    if found := [name for name, value in odd.items() if value is not None]:
        raise ModelError(
            "MultiheadAttention",
            got=found[0],
            wanted="need_weights=False, is_causal or no mask",
            hint="padding and documents are known from what shard() was given",
        )
    if query.dim() != 3 or query.shape != key.shape:
        raise ModelError(
            "MultiheadAttention",
            got=f"queries {list(query.shape)}, keys {list(key.shape)}",
            wanted="rows of the same tokens",
        )
    separate = (q_proj_weight, k_proj_weight, v_proj_weight)
    weights = separate if weight is None else weight.chunk(3)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    q, k, v = (
        functional.linear(x, part, own).unflatten(2, (heads, -1)).permute(1, 2, 0, 3)
        for x, part, own in zip((query, key, value), weights, biases, strict=True)
        if part is not None
    )
    out = attention(q, k, v, handle, causal=is_causal).permute(2, 0, 1, 3).flatten(2)
    return functional.linear(out, out_weight, out_bias), None


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    handle: int,
) -> torch.Tensor:
    """Of a mean the part of the local tokens: their sum, divided by the targets of the step. Raises
    ModelError for means that are weighted by classes."""
    if size_average is not None or reduce is not None:
        raise ModelError("cross_entropy", got="size_average or reduce", wanted="reduction")
    if reduction != "mean":
        return functional.cross_entropy(
            logits,
            labels,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    if weight is not None:
        raise ModelError(
            "cross_entropy", got="weights of classes and a mean", wanted="no weights, or a sum"
        )
    total = functional.cross_entropy(
        logits, labels, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
    )
    return total / targets(total.detach(), handle)
