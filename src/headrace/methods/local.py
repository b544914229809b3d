"""Method ``local``: one rank runs the layer alone."""

from __future__ import annotations

import torch

from headrace.methods.block import gathered_feed_forward, output, queries_keys_values
from headrace.methods.context import Context, State
from headrace.ops.attention import attend
from headrace.spec.architecture import Architecture

__all__ = ["Local"]


class Local:
    """The layer as one process computes it: x [T, h], no communication."""

    name = "local"

    def supports(self, architecture: Architecture, ranks: int) -> str | None:
        """Only a group of one rank."""
        return None if ranks == 1 else f"local runs on 1 rank, not {ranks}"

    def attention(self, x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
        """Norm, projection, attention within each document, output projection."""
        a = context.architecture
        qkv = queries_keys_values(x, state, context)
        q, k, v = qkv.split([a.heads, a.kv_heads, a.kv_heads], dim=1)
        return output(attend(q, k, v, context.tokens.lengths, a.causal), state, context)

    def feed_forward(self, x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
        """Norm and feed-forward."""
        return gathered_feed_forward(x, state, context)
