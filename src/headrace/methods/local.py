"""Method ``local``: one rank runs the layer alone."""

from __future__ import annotations

import torch

from headrace.methods.block import all_heads, gathered_feed_forward, local_attention
from headrace.methods.context import Context
from headrace.methods.method import Method
from headrace.methods.weights import State
from headrace.ops.core import PackCore
from headrace.spec.architecture import Architecture

__all__ = ["LOCAL", "attention"]


def attention(x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
    """The attention of one process: x [T, h] to [T, h], no communication."""
    a = context.architecture
    blocks = context.tokens.blocks((0,), (0,), a.causal)
    core = PackCore(heads=all_heads(a), blocks=blocks)
    return local_attention(x, state, context, core)


def _one_rank(architecture: Architecture, ranks: int) -> str | None:
    return None if ranks == 1 else f"local runs on 1 rank, not {ranks}"


LOCAL = Method(
    name="local", attention=attention, feed_forward=gathered_feed_forward,
    attention_rule=_one_rank, feed_forward_rule=_one_rank, of="local",
)  # fmt: skip
