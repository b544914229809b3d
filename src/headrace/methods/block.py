"""The parts of a layer that no method changes: norms, projections of local tokens, activations."""

from __future__ import annotations

import torch

from headrace.methods.context import Context, State
from headrace.ops.activation import swiglu
from headrace.ops.linear import linear, linear_inputs
from headrace.ops.norm import layer_norm, rms_norm
from headrace.ops.rotary import rotate_and_sort
from headrace.spec.architecture import Architecture

__all__ = ["gathered_feed_forward", "normalise", "output", "queries_keys_values"]


def normalise(x: torch.Tensor, state: State, name: str, architecture: Architecture) -> torch.Tensor:
    """The model's norm ``name`` of x [t, h]."""
    weight = state[f"{name}.weight"]
    if architecture.biased:
        return layer_norm(x, weight, state[f"{name}.bias"], architecture.norm_eps)
    return rms_norm(x, weight, architecture.norm_eps)


def queries_keys_values(x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
    """Norm, fused projection and rotation of local tokens.

        x        [t, h]
        returns  [t, n + 2 g, d]   queries, keys, values; heads in order
    """  # fmt: skip
    a = context.architecture

    def part(x: torch.Tensor) -> torch.Tensor:
        y = linear(normalise(x, state, "norm1", a), state["qkv.weight"], state.get("qkv.bias"))
        y = y.view(x.shape[0], a.kv_heads, a.group_heads + 2, a.head_features)
        return rotate_and_sort(y, context.tables)

    return context.linear_part(part, x)


def output(heads: torch.Tensor, state: State, context: Context) -> torch.Tensor:
    """The output projection of local tokens: heads [t, n, d] to [t, h]."""
    flat = heads.reshape(heads.shape[0], context.architecture.hidden)
    return linear_inputs(flat, state["proj.weight"], state.get("proj.bias"))


def gathered_feed_forward(x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
    """The feed-forward of local tokens with whole weights, gathered by their sources.

        x        [t, h]
        returns  [t, h]
    """  # fmt: skip
    a = context.architecture

    def part(x: torch.Tensor) -> torch.Tensor:
        y = linear(normalise(x, state, "norm2", a), state["in.weight"], state.get("in.bias"))
        y = swiglu(y, a.ffn_block) if a.gated else torch.nn.functional.gelu(y, approximate="tanh")
        return linear_inputs(y, state["out.weight"], state.get("out.bias"))

    return context.linear_part(part, x)
