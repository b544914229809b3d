"""Method ``colossal_z``: ring self-attention with whole score rows, for comparisons.

ParaDySe's "Colossal-AI SP + ZeRO-3" (it conflicts with FlashAttention, and the paper leaves it out
of its own experiments). Sends what ``megatron_cz`` sends; keeps the scores besides,
``ops/score_rows`` says how many. Chosen only when asked for by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.methods.block import all_heads, gathered_feed_forward, local_attention
from headrace.methods.context import Context
from headrace.methods.megatron_cz import ring_of
from headrace.methods.method import Method
from headrace.methods.weights import State
from headrace.ops.score_rows import ScoreRowsCore
from headrace.spec.blocks import Block
from headrace.spec.known_methods import COLOSSAL_Z

__all__ = ["METHODS", "attention"]


def attention(x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
    """The attention branch with ring self-attention: x [T / R, h] to [T / R, h]."""
    architecture = context.architecture

    def blocks(source: int) -> Sequence[Block]:
        """Score blocks of this rank's queries with the keys of rank ``source``."""
        return context.tokens.blocks((context.member,), (source,), architecture.causal)

    core = ScoreRowsCore(heads=all_heads(architecture), ring=ring_of(context), blocks=blocks)
    return local_attention(x, state, context, core)


METHODS = (Method(facts=COLOSSAL_Z, attention=attention, feed_forward=gathered_feed_forward),)
