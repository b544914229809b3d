"""Method ``local``: one rank runs the layer alone."""

from __future__ import annotations

import torch

from headrace.methods.block import all_heads, gathered_feed_forward, local_attention
from headrace.methods.context import Context
from headrace.methods.method import Method
from headrace.methods.weights import State
from headrace.ops.core import PackCore
from headrace.spec.known_methods import LOCAL

__all__ = ["METHODS", "attention"]


def attention(x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
    """The attention branch of a rank that has all tokens: x [T, h] to [T, h], no communication."""
    architecture = context.architecture
    blocks = context.tokens.blocks((0,), (0,), architecture.causal)
    core = PackCore(heads=all_heads(architecture), blocks=blocks)
    return local_attention(x, state, context, core)


METHODS = (Method(facts=LOCAL, attention=attention, feed_forward=gathered_feed_forward),)
