"""Method ``ulysses_z``: an all-to-all from tokens to heads around attention, gathered weights.

Over R ranks, with T tokens, n query and g key-value heads of d features:

    q, k, v   [T/R, n + 2g, d]     local tokens, all heads
    switch    [T, (n + 2g)/R, d]   all tokens, this rank's heads
    attend    [T, n/R, d]          whole documents, local heads
    switch_heads_back  [T/R, n, d]

Activations sent per rank, forward (backward the same), V = (R - 1)/R: V (2 h + 2 g d) T / R
elements when R divides T, n and g. Key-value heads are replicated when ranks outnumber them, and
heads that R does not divide are split unevenly. Weights held sharded cost V W on each gather and
V W on the reduce-scatter of each gradient; replicated weights cost nothing here (ParaDySe's
"Ulysses + ZeRO-3"; DeepSpeed Ulysses).
"""

from __future__ import annotations

import torch

from headrace.methods.block import added, gathered_feed_forward, output, queries_keys_values
from headrace.methods.context import Context
from headrace.methods.method import Method
from headrace.methods.switched import local_heads, split_heads
from headrace.methods.weights import State
from headrace.ops.core import PackCore, attended
from headrace.ops.switch import reordered, switch_heads, switch_heads_back
from headrace.spec.known_methods import ULYSSES_Z

__all__ = ["METHODS", "attention"]


def attention(x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
    """Norm, projection to q, k and v, all-to-all from tokens to heads, attention over this rank's
    heads, all-to-all back, output projection, residual sum: x [T / R, h] to [T / R, h]. The
    recompute level ``attention`` changes nothing: q, k and v are kept as the first all-to-all
    brought them, since making them again would repeat it."""
    architecture, place, sizes = context.architecture, context.place, context.tokens.sizes
    split = split_heads(architecture.heads, architecture.kv_heads, context.ranks)
    qkv, x = queries_keys_values(x, state, context)
    qkv = switch_heads(qkv, sizes, split.columns, context.group)
    # Rows arrive rank after rank: (indices into pack order, indices back), None where rank order is
    # pack order.
    orders = place.order(place.everyone)
    if orders is not None:
        qkv = reordered(qkv, *orders)
    qkv, heads = local_heads(qkv, split, context.member)
    blocks = context.tokens.blocks(place.everyone, place.everyone, architecture.causal)
    out = attended(PackCore(heads=heads, blocks=blocks), qkv)
    if orders is not None:
        out = reordered(out, orders[1], orders[0])
    out = switch_heads_back(out, sizes, split.queries, context.group)
    return added(x, output(out, state, context), "attention", context)


METHODS = (Method(facts=ULYSSES_Z, attention=attention, feed_forward=gathered_feed_forward),)
