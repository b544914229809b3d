"""Method ``megatron_cz``: queries stay, keys and values travel round or are gathered.

ParaDySe's "Megatron-LM context parallel + ZeRO-3" in two variants over one token plan:

    megatron_cz         ring attention, in zigzag order balanced for causal models (ops/ring)
    megatron_cz_gather  keys and values gathered in one message (ops/gathered)

Elements sent per rank and layer, W elements of the layer's matrices, kv = g d, T tokens of the
pack, V = (R - 1) / R: activations 2 V T kv forward and 4 V T kv backward (in a ring the half for
gradients, added on the way, is fp32 for half types); weights held sharded V W forward and 2 V W
backward, replicated nothing. Any number of ranks and heads.
Kept, in units u of one local activation, kappa = kv / h, f features of the feed-forward by h: none
4 + 2 kappa + 2 f (SwiGLU 3 f), attention 3 (q, k and v are made again), full 1. In passing: the
ring holds two neighbours' keys and values and, on a device, up to 9 u of results or gradients that
wait to be added (ops/row_sums), the gather all keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.methods.block import all_heads, gathered_feed_forward, local_attention
from headrace.methods.context import Context
from headrace.methods.method import Method
from headrace.methods.weights import State
from headrace.ops.gathered import GatheredCore
from headrace.ops.ring import Ring, RingCore
from headrace.spec.blocks import Block
from headrace.spec.known_methods import MEGATRON_CZ, MEGATRON_CZ_GATHER

__all__ = ["METHODS", "gather_attention", "ring_attention", "ring_of"]


def ring_of(context: Context) -> Ring:
    """The ring of the whole group."""
    return Ring(sizes=context.tokens.sizes, member=context.member, group=context.group)


def ring_attention(x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
    """The attention branch with ring attention: x [T / R, h] to [T / R, h]."""
    architecture = context.architecture

    def blocks(source: int) -> Sequence[Block]:
        """Score blocks of this rank's queries with the keys of rank ``source``."""
        return context.tokens.blocks((context.member,), (source,), architecture.causal)

    core = RingCore(heads=all_heads(architecture), ring=ring_of(context), blocks=blocks)
    return local_attention(x, state, context, core)


def gather_attention(x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
    """The attention branch with attention over the gathered keys and values of all ranks: x
    [T / R, h] to [T / R, h]."""
    architecture, place = context.architecture, context.place
    # Gathered rows lie rank after rank; kernels need the rows of each document one after the other.
    order, back = place.order(place.everyone) or (None, None)
    core = GatheredCore(
        heads=all_heads(architecture),
        sizes=context.tokens.sizes,
        group=context.group,
        blocks=context.tokens.blocks((context.member,), place.everyone, architecture.causal),
        order=order,
        back=back,
    )
    return local_attention(x, state, context, core)


METHODS = (
    Method(facts=MEGATRON_CZ, attention=ring_attention, feed_forward=gathered_feed_forward),
    Method(
        facts=MEGATRON_CZ_GATHER, attention=gather_attention, feed_forward=gathered_feed_forward
    ),
)
