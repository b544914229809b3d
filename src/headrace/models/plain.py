"""The model as for a single process: plain autograd over full weights and packed documents.

The reference that ``headrace verify`` compares with, and the hand-written loop of the benchmarks.
It shares no operator with the methods.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from headrace.layouts.partition import Rows
from headrace.models.initial import initial_rows
from headrace.spec.architecture import Architecture, weight_table

__all__ = ["plain_logits", "plain_loss", "whole_weights"]


def whole_weights(
    architecture: Architecture, seed: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """All initial weights of a seed, by name."""
    return {
        weight.name: initial_rows(weight, Rows(0, weight.rows), architecture, seed, dtype)
        for weight in weight_table(architecture)
    }


def plain_logits(
    ids: torch.Tensor, lengths: Sequence[int], weights: Mapping[str, torch.Tensor], a: Architecture
) -> torch.Tensor:
    """Logits [T, V] of a pack with token ids ``ids`` [T]: documents of these ``lengths``, one after
    another, each of which attends within itself.

    ``weights`` are the whole weights by name. In each layer norms come before attention and
    feed-forward (``a.norm_first``), or after the residual sums (BERT).
    """
    # Embedding.
    positions = torch.cat([torch.arange(n, device=ids.device) for n in lengths])
    x = weights["embed.weight"][ids]
    if a.learned_positions:
        x = x + weights["positions.weight"][positions]
    if a.kind == "bert":
        x = _norm(x + weights["types.weight"][0], weights, "embed_norm", a)
    for layer in range(a.layers):
        prefix = f"layers.{layer}"
        # Attention with its residual sum.
        y = _norm(x, weights, f"{prefix}.norm1", a) if a.norm_first else x
        y = F.linear(y, weights[f"{prefix}.qkv.weight"], weights.get(f"{prefix}.qkv.bias"))
        y = _attention(y, positions, lengths, a)
        x = x + _linear_in_out(y, weights, f"{prefix}.proj")
        x = x if a.norm_first else _norm(x, weights, f"{prefix}.norm1", a)
        # Feed-forward with its residual sum.
        y = _norm(x, weights, f"{prefix}.norm2", a) if a.norm_first else x
        y = F.linear(y, weights[f"{prefix}.in.weight"], weights.get(f"{prefix}.in.bias"))
        if a.gated:
            # SwiGLU: features are blocks of gate and up by turns, [T, blocks, 2, of a block].
            pairs = y.view(len(ids), a.ffn // a.ffn_block, 2, a.ffn_block)
            y = (F.silu(pairs[:, :, 0]) * pairs[:, :, 1]).reshape(len(ids), a.ffn)
        else:
            y = F.gelu(y, approximate=a.gelu)
        x = x + _linear_in_out(y, weights, f"{prefix}.out")
        x = x if a.norm_first else _norm(x, weights, f"{prefix}.norm2", a)
    # Head; BERT's has a dense layer of its own before the norm.
    if a.masked:
        x = F.gelu(F.linear(x, weights["head_dense.weight"], weights["head_dense.bias"]))
    x = _norm(x, weights, "head_norm" if a.masked else "norm", a)
    head = weights["embed.weight" if a.tied else "head.weight"]
    return F.linear(x, head, weights.get("head.bias"))


def plain_loss(
    ids: torch.Tensor,
    labels: torch.Tensor,
    lengths: Sequence[int],
    weights: Mapping[str, torch.Tensor],
    a: Architecture,
    count: int,
) -> torch.Tensor:
    """Sum of the losses of a pack's ``labels`` [T] (-100: none) over ``count``, the number of
    tokens with a loss in the whole batch."""
    logits = plain_logits(ids, lengths, weights, a)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, labels, reduction="sum") / max(1, count)


def _attention(
    qkv: torch.Tensor, positions: torch.Tensor, lengths: Sequence[int], a: Architecture
) -> torch.Tensor:
    """Attention within each of the packed documents of ``lengths`` tokens: qkv [T, g (m + 2) d] to
    [T, h]. In qkv each of g groups has m query heads, a key and a value of d features;
    ``positions`` [T] are those of the tokens in their documents."""
    g, m, d = a.kv_heads, a.group_heads, a.head_features
    groups = qkv.view(qkv.shape[0], g, m + 2, d)
    q, k, v = groups[:, :, :m].reshape(-1, g * m, d), groups[:, :, m], groups[:, :, m + 1]
    if a.kind == "llama":
        q, k = _rotate(q, positions, a), _rotate(k, positions, a)
    k, v = k.repeat_interleave(m, 1), v.repeat_interleave(m, 1)
    sizes = list(lengths)
    outs = [
        F.scaled_dot_product_attention(
            _heads_first(document_q),
            _heads_first(document_k),
            _heads_first(document_v),
            is_causal=a.causal,
        )[0].transpose(0, 1)
        for document_q, document_k, document_v in zip(
            q.split(sizes), k.split(sizes), v.split(sizes), strict=True
        )
    ]
    return torch.cat(outs).reshape(qkv.shape[0], a.hidden)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, d] to [1, heads, tokens, d]."""
    return x.transpose(0, 1)[None]


def _rotate(x: torch.Tensor, positions: torch.Tensor, a: Architecture) -> torch.Tensor:
    """Queries or keys [tokens, heads, d] with rotary positions: each pair of features (i, i + d/2)
    is turned by an angle in proportion to its token's position, [tokens]."""
    half = a.head_features // 2
    exponent = torch.arange(half, dtype=torch.float64, device=x.device) / half
    angle = torch.outer(positions.double(), math.e ** (-math.log(a.rope_theta) * exponent))
    cos, sin = angle.cos().to(x.dtype)[:, None], angle.sin().to(x.dtype)[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _norm(
    x: torch.Tensor, weights: Mapping[str, torch.Tensor], name: str, a: Architecture
) -> torch.Tensor:
    """The norm ``name`` of x [tokens, features], of the same shape: a layer norm where the model
    has biases, else an RMS norm."""
    weight = weights[f"{name}.weight"]
    if a.biased:
        return F.layer_norm(x, (a.hidden,), weight, weights[f"{name}.bias"], a.norm_eps)
    return F.rms_norm(x, (a.hidden,), weight, a.norm_eps)


def _linear_in_out(x: torch.Tensor, weights: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """The linear layer ``name`` of x [tokens, in] whose matrix W is stored as [in, out]: x W + b,
    or x W where there is no bias."""
    y = x @ weights[f"{name}.weight"]
    bias = weights.get(f"{name}.bias")
    return y if bias is None else y + bias
