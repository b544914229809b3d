"""The parts of a layer that all methods share: norms, projections of local tokens, activations.

Shape legend: t tokens of this rank, h features of a token, n query heads in g KV groups of m, d
features of a head.
"""

from __future__ import annotations

import torch

from headrace.methods.context import Context
from headrace.methods.weights import State
from headrace.ops.activation import Activation, Gelu, SwiGLU, activated
from headrace.ops.core import Core, Heads, attended, attended_again
from headrace.ops.linear import linear, linear_inputs, normed_linear
from headrace.ops.norm import LayerNorm, Norm, RMSNorm, normalised
from headrace.ops.random import dropout
from headrace.ops.rotary import Rotation, Turned, rotate_and_sort, turned
from headrace.ops.spread import FeedForward, Spread, spread_feed_forward
from headrace.spec.architecture import Architecture
from headrace.spec.layer_plan import BRANCHES, Branch

__all__ = [
    "activation_of",
    "added",
    "all_heads",
    "dropout_rate",
    "first_norm",
    "gathered_feed_forward",
    "local_attention",
    "normalise",
    "output",
    "queries_keys_values",
]


def _norm(state: State, name: str, architecture: Architecture) -> Norm:
    """The layer's norm ``name``: a layer norm in models with biases, else an RMS norm."""
    weight = state[f"{name}.weight"]
    if architecture.biased:
        return LayerNorm(weight=weight, bias=state[f"{name}.bias"], eps=architecture.norm_eps)
    return RMSNorm(weight=weight, eps=architecture.norm_eps)


def first_norm(state: State, name: str, architecture: Architecture) -> Norm | None:
    """The norm ``name`` with which a branch begins; None where norms come after residual sums."""
    return _norm(state, name, architecture) if architecture.norm_first else None


def normalise(x: torch.Tensor, state: State, name: str, architecture: Architecture) -> torch.Tensor:
    """The model's norm ``name`` of x [t, h]."""
    return normalised(x, _norm(state, name, architecture))


def activation_of(architecture: Architecture) -> Activation:
    """The activation of the feed-forward."""
    if architecture.gated:
        return SwiGLU(block=architecture.ffn_block)
    return Gelu(approximate=architecture.gelu)


def all_heads(architecture: Architecture) -> Heads:
    """The numbers of query and key-value heads of the whole model."""
    return Heads(queries=architecture.heads, keys=architecture.kv_heads)


def queries_keys_values(
    x: torch.Tensor, state: State, context: Context
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm, fused projection and rotation of local tokens.

    x        [t, h]
    returns  [t, n + 2 g, d]   queries, keys, values; heads in order
             [t, h]            x, for the residual sum
    """
    y, x = _projected(x, state, context)
    return rotate_and_sort(y, context.place.tables((context.member,))), x


def _projected(
    x: torch.Tensor, state: State, context: Context
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm and fused projection of local tokens x [t, h]: (queries, key and value of each KV group
    [t, g, m + 2, d], x for the residual sum)."""
    architecture = context.architecture
    y, x = _first_linear(x, "qkv", first_norm(state, "norm1", architecture), state)
    kv_heads, group_heads = architecture.kv_heads, architecture.group_heads
    return y.view(x.shape[0], kv_heads, group_heads + 2, architecture.head_features), x


def _first_linear(
    x: torch.Tensor, name: str, norm: Norm | None, state: State
) -> tuple[torch.Tensor, torch.Tensor]:
    """The linear map ``name`` with which a branch begins, after ``norm`` where there is one:
    (features [t, O] of x [t, h], x for the residual sum)."""
    weight, bias = state[f"{name}.weight"], state.get(f"{name}.bias")
    if norm is None:
        return linear(x, weight, bias), x
    return normed_linear(x, norm, weight, bias)


def local_attention(x: torch.Tensor, state: State, context: Context, core: Core) -> torch.Tensor:
    """An attention branch of local tokens, x [t, h] to [t, h], whose queries stay on this rank:
    norm, projection, ``core`` (which may fetch keys and values of other ranks), output projection,
    residual sum. At level ``attention`` q, k and v are computed again in the backward.
    """

    rotation = Rotation(tables=context.place.tables((context.member,)))

    def project(x: torch.Tensor) -> tuple[Turned, torch.Tensor]:
        """(q, k and v of x [t, h], sorted and rotated; x for the residual sum)."""
        y, x = _projected(x, state, context)
        return turned(y, rotation), x

    if context.keeps_linear:
        qkv, x = project(x)
        heads = attended(core, qkv)
        del qkv
    else:
        heads, x = attended_again(core, project, x)
    return added(x, output(heads, state, context), "attention", context)


def output(heads: torch.Tensor, state: State, context: Context) -> torch.Tensor:
    """The output projection of local tokens: heads [t, n, d] to [t, h]."""
    flat = heads.reshape(heads.shape[0], context.architecture.hidden)
    return linear_inputs(flat, state["proj.weight"], state.get("proj.bias"))


def dropout_rate(context: Context) -> float:
    """Dropout rate of a branch's output; 0 outside of training."""
    return context.architecture.dropout if context.training else 0.0


def added(x: torch.Tensor, y: torch.Tensor, part: Branch, context: Context) -> torch.Tensor:
    """The residual stream x [t, h] plus the output y [t, h] of a branch after dropout."""
    # each branch of each layer draws a dropout mask of its own
    site = 2 * context.layer + BRANCHES.index(part)
    return x + dropout(y, dropout_rate(context), context.dropout, site)


def gathered_feed_forward(x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
    """The feed-forward branch of local tokens with full weights, gathered where they are sharded.

    x        [t, h]
    returns  [t, h]
    keeps    x and the wide features before and after the activation; x alone at level
             ``attention``, whose backward computes the wide features again
    """
    architecture = context.architecture
    parts = FeedForward(
        norm=first_norm(state, "norm2", architecture),
        matrix_in=state["in.weight"],
        bias_in=state.get("in.bias"),
        activation=activation_of(architecture),
        matrix_out=state["out.weight"],
        bias_out=state.get("out.bias"),
    )
    if context.keeps_linear:
        wide, x = _first_linear(x, "in", parts.norm, state)
        y = linear_inputs(activated(wide, parts.activation), parts.matrix_out, parts.bias_out)
    else:
        # A spread over one rank sends nothing; it computes the wide features again in the backward.
        y, x = spread_feed_forward(x, parts, Spread(sizes=(len(x),), group=None))
    return added(x, y, "feed_forward", context)
