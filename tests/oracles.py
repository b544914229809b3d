"""Single-process references, apart from the library: plain autograd, a document at a time."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from headrace.layouts.partition import Rows
from headrace.models.initial import initial_rows
from headrace.spec import Architecture, weight_table

__all__ = [
    "full_weights",
    "reference_attention",
    "reference_example",
    "reference_logits",
    "reference_step",
]


def full_weights(a: Architecture, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All rows of all initial weights."""
    return {w.name: initial_rows(w, Rows(0, w.rows), a, seed, dtype) for w in weight_table(a)}


def reference_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> torch.Tensor:
    """One document, heads expanded, whole score matrix: q [L, n, d], k, v [L, g, d]."""
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.einsum("qnd,knd->nqk", q, k) / math.sqrt(q.shape[-1])
    if causal:
        future = torch.triu(torch.ones(len(q), len(q), dtype=torch.bool), 1)
        scores = scores.masked_fill(future, -math.inf)
    return torch.einsum("nqk,knd->qnd", scores.softmax(-1), v)


def reference_logits(
    ids: torch.Tensor, weights: dict[str, torch.Tensor], a: Architecture
) -> torch.Tensor:
    """Logits [L, V] of one document."""
    d, g, m = a.head_features, a.kv_heads, a.group_heads
    x = weights["embed.weight"][ids]
    if a.kind == "bert":
        return _bert_logits(x, weights, a)
    if a.kind == "gpt":
        x = x + weights["positions.weight"][: len(ids)]
    for layer in range(a.layers):
        w = {n.split(".", 2)[2]: t for n, t in weights.items() if n.startswith(f"layers.{layer}.")}
        y = F.linear(_norm(x, w, "norm1", a), w["qkv.weight"], w.get("qkv.bias"))
        y = y.view(len(ids), g, m + 2, d)
        q, k, v = y[:, :, :m].reshape(len(ids), g * m, d), y[:, :, m], y[:, :, m + 1]
        if a.kind == "llama":
            q, k = _rope(q, a), _rope(k, a)
        o = reference_attention(q, k, v, a.causal).reshape(len(ids), -1)
        x = x + o @ w["proj.weight"] + w.get("proj.bias", 0)
        y = F.linear(_norm(x, w, "norm2", a), w["in.weight"], w.get("in.bias"))
        if a.gated:
            pairs = y.view(len(ids), -1, 2, a.ffn_block)
            y = (F.silu(pairs[:, :, 0]) * pairs[:, :, 1]).reshape(len(ids), -1)
        else:
            y = F.gelu(y, approximate="tanh")
        x = x + y @ w["out.weight"] + w.get("out.bias", 0)
    x = _norm(x, weights, "norm", a)
    return x @ weights["embed.weight" if a.tied else "head.weight"].t()


def _bert_logits(
    x: torch.Tensor, weights: dict[str, torch.Tensor], a: Architecture
) -> torch.Tensor:
    """BertForMaskedLM after its word embeddings x [L, h], written after the paper."""
    d, length = a.head_features, len(x)

    def norm(x: torch.Tensor, w: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + a.norm_eps)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def gelu(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2

    x = norm(
        x + weights["positions.weight"][:length] + weights["types.weight"][:1],
        weights,
        "embed_norm",
    )
    for layer in range(a.layers):
        w = {n.split(".", 2)[2]: t for n, t in weights.items() if n.startswith(f"layers.{layer}.")}
        y = (x @ w["qkv.weight"].t() + w["qkv.bias"]).view(length, a.kv_heads, a.group_heads + 2, d)
        q = y[:, :, :-2].reshape(length, a.heads, d)
        o = reference_attention(q, y[:, :, -2], y[:, :, -1], causal=False).reshape(length, -1)
        x = norm(x + o @ w["proj.weight"] + w["proj.bias"], w, "norm1")
        y = gelu(x @ w["in.weight"].t() + w["in.bias"])
        x = norm(x + y @ w["out.weight"] + w["out.bias"], w, "norm2")
    x = gelu(x @ weights["head_dense.weight"].t() + weights["head_dense.bias"])
    x = norm(x, weights, "head_norm")
    return x @ weights["embed.weight" if a.tied else "head.weight"].t() + weights["head.bias"]


def reference_example(
    document: np.ndarray, a: Architecture, sample: int = 0, seed: int = 0, step: int = 0
) -> tuple[list[int], dict[int, int]]:
    """The ids that a model reads of a document, and the label of each position that has one."""
    ids = [int(token) for token in document]
    if a.kind != "bert":
        return ids, dict(enumerate(ids[1:]))
    assert a.mask_id is not None
    key, labels = _splitmix(_splitmix(seed) ^ step), {}
    for position, token in enumerate(ids):
        bits = _splitmix(_splitmix(key ^ sample) + position * 0x9E3779B97F4A7C15)
        if bits >> 32 < round(0.15 * 2**32):
            labels[position] = token
            if bits % 2**32 < round(0.8 * 2**32):
                ids[position] = a.mask_id
            elif bits % 2**32 < round(0.9 * 2**32):
                ids[position] = _splitmix(bits) % a.vocabulary
    return ids, labels


def _splitmix(x: int) -> int:
    x %= 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def reference_step(
    documents: list[np.ndarray],
    weights: dict[str, torch.Tensor],
    a: Architecture,
    *,
    seed: int = 0,
    step: int = 0,
) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss of a batch and its gradient of every weight: of the next tokens, or of the masked
    ones, whose choice depends on ``seed`` and ``step``; document i is sample i."""
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    examples = [reference_example(d, a, i, seed, step) for i, d in enumerate(documents)]
    count = max(1, sum(len(labels) for _, labels in examples))
    loss = torch.zeros((), dtype=torch.float64)
    for ids, labels in examples:
        if labels:
            logits = reference_logits(torch.tensor(ids), leaves, a)[list(labels)]
            wanted = torch.tensor(list(labels.values()))
            loss = loss + F.cross_entropy(logits, wanted, reduction="sum").double() / count
    if loss.requires_grad:
        loss.backward()
    grads = {n: w.grad if w.grad is not None else torch.zeros_like(w) for n, w in leaves.items()}
    return float(loss.detach()), grads


def _norm(x: torch.Tensor, w: dict[str, torch.Tensor], name: str, a: Architecture) -> torch.Tensor:
    if a.kind == "gpt":
        return F.layer_norm(x, (a.hidden,), w[f"{name}.weight"], w[f"{name}.bias"], eps=a.norm_eps)
    return F.rms_norm(x, (a.hidden,), w[f"{name}.weight"], eps=a.norm_eps)


def _rope(x: torch.Tensor, a: Architecture) -> torch.Tensor:
    d = a.head_features
    inv = a.rope_theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = torch.outer(torch.arange(len(x), dtype=torch.float64), inv)
    cos, sin = (torch.cat([f, f], -1)[:, None].to(x.dtype) for f in (angle.cos(), angle.sin()))
    half = d // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos + turned * sin
