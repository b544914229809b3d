"""Methods over two mesh axes: one inside blocks of neighbouring ranks, a ring across them.

    ulysses_ring   heads are exchanged for tokens inside a block, keys and values of a block's
                   tokens travel from block to block (USP; Hydraulis' and Megatron's a2a+p2p)
    tensor_ring    tensor parallelism with sequence parallelism inside a block, a ring across

A group of R ranks is R / U blocks of U neighbours: U the tensor degree of its scheme where it has
one (``tensor_ring``), else the largest proper divisor of R that the heads allow:
put ranks of one node next to each other, and the heavy exchange stays inside nodes.
The ring of a block's rank runs over the ranks with its place in the other blocks.

Elements sent per rank and layer, T tokens of the pack, V_n = (n - 1) / n, C = R / U blocks:

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
from dataclasses import dataclass

import torch

from headrace.errors import SpecError
from headrace.methods.block import (
    gathered_feed_forward,
    output,
    queries_keys_values,
)
from headrace.methods.context import Context, Members
from headrace.methods.megatron_cz import any_group
from headrace.methods.megatron_ts import Tensor
from headrace.methods.method import Method
from headrace.methods.ulysses_z import local_heads, split_heads
from headrace.methods.weights import State
from headrace.ops.core import Heads, attended
from headrace.ops.ring import Ring, RingCore
from headrace.ops.switch import reordered, switch, switch_back
from headrace.spec.architecture import Architecture
from headrace.spec.blocks import Block

__all__ = ["TENSOR_RING", "ULYSSES_RING"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mesh:
    """R ranks as blocks of ``inner`` neighbours."""

    ranks: int
    inner: int

    @property
    def blocks(self) -> tuple[Members, ...]:
        """The members of each block."""
        return tuple(
            tuple(range(start, start + self.inner)) for start in range(0, self.ranks, self.inner)
        )

    @property
    def rings(self) -> tuple[Members, ...]:
        """The members with the same place in all blocks."""
        return tuple(tuple(range(place, self.ranks, self.inner)) for place in range(self.inner))


def _largest(ranks: int, most: int) -> int | None:
    """The largest proper divisor of ``ranks`` above one and at most ``most``."""
    return next((d for d in range(min(most, ranks - 1), 1, -1) if ranks % d == 0), None)


def _ulysses_inner(a: Architecture, ranks: int) -> int | None:
    return _largest(ranks, a.kv_heads) or _largest(ranks, a.heads)


def _tensor_inner(a: Architecture, ranks: int, tensor: int = 1) -> int | None:
    """Ranks of a tensor block: those that hold the weights together where there are such."""
    most = min(a.kv_heads, a.ffn // a.ffn_block)
    if tensor == 1:
        return _largest(ranks, most)
    return tensor if tensor <= most else None


def _mesh(ranks: int, inner: int | None) -> _Mesh:
    assert inner is not None, "the method's rule was asked"
    return _Mesh(ranks=ranks, inner=inner)


def _ring_core(context: Context, mesh: _Mesh, heads: Heads) -> RingCore:
    """The ring over blocks, each with what its ranks hold together."""
    tokens, here = context.tokens, context.member // mesh.inner
    causal = context.architecture.causal

    def blocks(source: int) -> Sequence[Block]:
        return tokens.blocks(mesh.blocks[here], mesh.blocks[source], causal)

    ring = Ring(
        sizes=[sum(tokens.sizes[m] for m in block) for block in mesh.blocks],
        member=here,
        group=context.place.subgroup(mesh.rings[context.member % mesh.inner]),
    )
    return RingCore(heads=heads, ring=ring, blocks=blocks)


def ulysses_ring(x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
    """Switch inside the block, ring across blocks: x [T / R, h] to [T / R, h]."""
    a, place = context.architecture, context.place
    mesh = _mesh(context.ranks, _ulysses_inner(a, context.ranks))
    block = mesh.blocks[context.member // mesh.inner]
    sizes, group = tuple(context.tokens.sizes[m] for m in block), place.subgroup(block)
    split = split_heads(a.heads, a.kv_heads, mesh.inner)
    qkv = switch(queries_keys_values(x, state, context), sizes, split.columns, group)
    order = place.order(block)
    if order is not None:
        qkv = reordered(qkv, *order)
    qkv, heads = local_heads(qkv, split, context.member % mesh.inner)
    out = attended(_ring_core(context, mesh, heads), qkv)
    if order is not None:
        out = reordered(out, order[1], order[0])
    return output(switch_back(out, sizes, split.queries, group), state, context)


def _tensor(state: State, context: Context) -> tuple[Tensor, _Mesh]:
    inner = _tensor_inner(context.architecture, context.ranks, context.place.tensor)
    mesh = _mesh(context.ranks, inner)
    here = context.member // mesh.inner
    shards = tuple(member % mesh.inner for member in range(context.ranks))
    return Tensor(
        state=state, context=context, members=mesh.blocks[here], parts=mesh.inner, shards=shards
    ), mesh


def tensor_ring(x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
    """Shards of the heads inside the block, ring across blocks: x [T / R, h] to [T / R, h]."""
    tensor, mesh = _tensor(state, context)
    return tensor.attention(x, lambda heads: _ring_core(context, mesh, heads))


def tensor_feed_forward(x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
    """Shards of the features inside the block: x [T / R, h] to [T / R, h]."""
    return _tensor(state, context)[0].feed_forward(x)


def _rule(name: str, ranks: int, inner: int | None) -> str | None:
    if inner is not None:
        return None
    return f"{name} runs on ranks that are blocks of at least 2 with a head each, not {ranks}"


def _ulysses_rule(a: Architecture, ranks: int) -> str | None:
    return _rule("ulysses_ring", ranks, _ulysses_inner(a, ranks))


def _tensor_rule(a: Architecture, ranks: int) -> str | None:
    return _rule("tensor_ring", ranks, _tensor_inner(a, ranks))


def _ulysses_groups(a: Architecture, ranks: int, tensor: int) -> tuple[Members, ...]:
    mesh = _mesh(ranks, _ulysses_inner(a, ranks))
    return mesh.blocks + mesh.rings


def _tensor_groups(a: Architecture, ranks: int, tensor: int) -> tuple[Members, ...]:
    inner = _tensor_inner(a, ranks, tensor)
    if inner is None:
        raise SpecError(
            f"tensor_ring in blocks of {tensor}", wanted="at least a key-value head for each rank",
            got=f"{a.kv_heads} key-value heads",
        )  # fmt: skip
    mesh = _mesh(ranks, inner)
    return mesh.blocks + mesh.rings


def _tensor_fetched(a: Architecture, ranks: int) -> float:
    """A rank holds 1 / R of the rows and needs 1 / U of them."""
    inner = _tensor_inner(a, ranks) or ranks
    return (1 / inner - 1 / ranks) / (1 - 1 / ranks)


ULYSSES_RING = Method(
    name="ulysses_ring", attention=ulysses_ring, feed_forward=gathered_feed_forward,
    attention_rule=_ulysses_rule, feed_forward_rule=any_group, of="ulysses_z", order="zigzag",
    attention_groups=_ulysses_groups, unlevelled=("attention",), automatic=False,
)  # fmt: skip
TENSOR_RING = Method(
    name="tensor_ring", attention=tensor_ring, feed_forward=tensor_feed_forward,
    attention_rule=_tensor_rule, feed_forward_rule=_tensor_rule, of="tensor_ring", order="zigzag",
    attention_groups=_tensor_groups, feed_forward_groups=_tensor_groups, fetched=_tensor_fetched,
    unlevelled=("attention",), automatic=False,
)  # fmt: skip
