"""Methods over two mesh axes: one inside blocks of neighbouring ranks, a ring across them.

    ulysses_ring   heads are exchanged for tokens inside a block, keys and values of a block's
                   tokens travel from block to block (USP; Hydraulis' and Megatron's a2a+p2p)
    tensor_ring    tensor parallelism with sequence parallelism inside a block, a ring across

A group of R ranks is R / U blocks of U neighbours: U the tensor degree of its scheme where it has
one (``tensor_ring``), else the largest proper divisor of R that the heads allow:
put ranks of one node next to each other, and the heavy exchange stays inside nodes.
The ring of a block's rank runs over the ranks with its place in the other blocks.

Elements sent per rank and layer, T tokens of the pack of h features, kv those of all keys of a
token, W elements of the layer's matrices, V_i = (i - 1) / i, C = R / U blocks:

    ulysses_ring   switch V_U (2 h + 2 kv) T / R each way, ring 2 V_C T kv / U forward and twice
                   that backward; weights as ``ulysses_z``
    tensor_ring    4 V_U T h / C forward and 6 V_U T h / C backward, the same ring; sharded weights
                   (1 / U - 1 / R) W at each use and for each gradient

They are measured and chosen when named in the configuration: on one node they seldom win, and each
more method makes a profile longer. Kept as the inner method's. ``tensor_ring`` needs U <= g,
``ulysses_ring`` U <= n.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.methods.block import added, gathered_feed_forward, output, queries_keys_values
from headrace.methods.context import Context
from headrace.methods.megatron_ts import Tensor
from headrace.methods.method import Method
from headrace.methods.switched import local_heads, split_heads
from headrace.methods.weights import State
from headrace.ops.core import Heads, attended
from headrace.ops.ring import Ring, RingCore
from headrace.ops.switch import reordered, switch_heads, switch_heads_back
from headrace.spec.blocks import Block
from headrace.spec.known_methods import TENSOR_RING, ULYSSES_RING
from headrace.spec.method_facts import RankBlocks, tensor_blocks, ulysses_blocks

__all__ = ["METHODS"]


def _ring_core(context: Context, mesh: RankBlocks, heads: Heads) -> RingCore:
    """Ring attention across the blocks of ``mesh``, for the ``heads`` of this rank. The ring joins
    the ranks with the same place in their blocks; in each step the keys and values of one block's
    tokens, of these heads, are on this rank."""
    tokens, own_block = context.tokens, context.member // mesh.inner
    causal = context.architecture.causal

    def blocks(source: int) -> Sequence[Block]:
        """Score blocks of the queries of this rank's block with the keys of block ``source``."""
        return tokens.blocks(mesh.blocks[own_block], mesh.blocks[source], causal)

    ring = Ring(
        sizes=[sum(tokens.sizes[m] for m in block) for block in mesh.blocks],
        member=own_block,
        # the ranks that have this rank's place in their blocks
        group=context.place.subgroup(mesh.rings[context.member % mesh.inner]),
    )
    return RingCore(heads=heads, ring=ring, blocks=blocks)


def ulysses_ring(x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
    """The attention branch with an all-to-all from tokens to heads inside this rank's block, ring
    attention across blocks, and an all-to-all back: x [T / R, h] to [T / R, h]."""
    architecture, place = context.architecture, context.place
    mesh = ulysses_blocks(architecture, context.ranks)
    assert mesh is not None, "the method's rule was asked"
    block = mesh.blocks[context.member // mesh.inner]
    sizes, group = tuple(context.tokens.sizes[m] for m in block), place.subgroup(block)
    split = split_heads(architecture.heads, architecture.kv_heads, mesh.inner)
    qkv, x = queries_keys_values(x, state, context)
    qkv = switch_heads(qkv, sizes, split.columns, group)
    # Rows arrive rank after rank: (indices into pack order, indices back), None where rank order is
    # pack order.
    orders = place.order(block)
    if orders is not None:
        qkv = reordered(qkv, *orders)
    qkv, heads = local_heads(qkv, split, context.member % mesh.inner)
    out = attended(_ring_core(context, mesh, heads), qkv)
    if orders is not None:
        out = reordered(out, orders[1], orders[0])
    out = output(switch_heads_back(out, sizes, split.queries, group), state, context)
    return added(x, out, "attention", context)


def _tensor(state: State, context: Context) -> tuple[Tensor, RankBlocks]:
    """(tensor parallelism inside this rank's block, the mesh of blocks). The i-th member of each
    block uses the i-th shard of a weight."""
    mesh = tensor_blocks(context.architecture, context.ranks, context.place.tensor)
    assert mesh is not None, "the method's rule was asked"
    own_block = context.member // mesh.inner
    shards = tuple(member % mesh.inner for member in range(context.ranks))
    return Tensor(
        state=state,
        context=context,
        members=mesh.blocks[own_block],
        parts=mesh.inner,
        shards=shards,
    ), mesh


def tensor_ring(x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
    """Tensor parallelism over heads inside the block, ring attention across blocks: x [T / R, h] to
    [T / R, h]."""
    tensor, mesh = _tensor(state, context)
    return tensor.attention(x, lambda heads: _ring_core(context, mesh, heads))


def tensor_feed_forward(x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
    """Tensor parallelism over features inside the block: x [T / R, h] to [T / R, h]."""
    tensor, _ = _tensor(state, context)
    return tensor.feed_forward(x)


METHODS = (
    Method(facts=ULYSSES_RING, attention=ulysses_ring, feed_forward=gathered_feed_forward),
    Method(facts=TENSOR_RING, attention=tensor_ring, feed_forward=tensor_feed_forward),
)
