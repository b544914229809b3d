"""Method ``megatron_ts``: tensor parallelism with the sequence spread between the products.

ParaDySe's "Megatron-LM tensor + sequence parallel". Each rank multiplies all tokens with its shard
of every matrix:

    attention     X = all_gather(norm(x));  q, k, v = X W_qkv,r^T  [T, (n + 2 g) / R heads, d]
                  A = attention of whole documents over the shard's heads
                  z = reduce_scatter(A W_proj,r)
    feed-forward  z = reduce_scatter(act(X W_in,r^T) W_out,r)

Elements sent per rank and layer, V = (R - 1) / R, T tokens of the pack: 4 V T h forward and
6 V T h backward (the gathered X is not kept but gathered again), whatever the weights: each rank
uses its shard as it lies. No imbalance in any token order. Needs R <= g, as KV groups are not cut;
heads that R does not divide are spread unevenly.
Kept, in units u of one local activation, kappa = kv / h, f features of the feed-forward by h: none
4 + 2 kappa + 2 f (SwiGLU 3 f), attention 4 + 2 kappa (making q, k and v again would repeat the
gather), full 1. In passing: two chunks of gathered activations and of their products.
Wide features stay in the order in which chunks come, and are put into that of the pack where the
rotation reads them. What cannot be less, besides products: what R ranks send of an activation is
read and its sum written, R + 1 activations four times a layer, as sums of half types are fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.methods.block import activation_of, added, dropout_rate, first_norm
from headrace.methods.context import Context
from headrace.methods.method import Method
from headrace.methods.weights import Part, State
from headrace.ops.activation import activated
from headrace.ops.core import Core, Heads, PackCore, attended
from headrace.ops.linear import WeightSource
from headrace.ops.rotary import Rotation, turned
from headrace.ops.spread import (
    FeedForward,
    Spread,
    gather_linear,
    linear_scatter,
    spread_feed_forward,
)
from headrace.spec.known_methods import MEGATRON_TS
from headrace.spec.layer_plan import Branch
from headrace.spec.method_facts import Members

__all__ = ["METHODS", "Tensor", "attention", "feed_forward"]

_CHUNK_TOKENS = 2048
"""Least tokens of a chunk: smaller products and messages are slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One layer with tensor parallelism over ``members``, neighbours in the layer's group that
    include this rank. Each weight is cut into ``parts`` shards; member m of the whole group uses
    shard ``shards[m]``. ``state`` are the layer's weights."""

    state: State
    context: Context
    members: Members
    parts: int
    shards: tuple[int, ...]

    @property
    def spread(self) -> Spread:
        """How the tokens of the members are sharded over them, and into how many chunks they are
        cut: at most one for each member, each of at least ``_CHUNK_TOKENS`` tokens."""
        sizes = tuple(self.context.tokens.sizes[member] for member in self.members)
        orders = self.context.place.order(self.members)
        return Spread(
            sizes=sizes,
            group=self.context.place.subgroup(self.members),
            places=None if orders is None else orders[1],
            chunks=min(len(self.members), max(1, sum(sizes) // _CHUNK_TOKENS)),
        )

    def attention(self, x: torch.Tensor, core_of: Callable[[Heads], Core]) -> torch.Tensor:
        """The attention branch: all-gather of tokens, attention over this rank's shard of the
        heads, reduce-scatter: x [t, h] to [t, h]. ``core_of`` makes the core for the shard's
        heads."""
        architecture, place, spread = self.context.architecture, self.context.place, self.spread
        y, x = gather_linear(
            x,
            self._matrix("qkv.weight"),
            self._part("qkv.bias", "qkv.weight"),
            first_norm(self.state, "norm1", architecture),
            spread,
        )
        queries_per_kv, head_features = architecture.group_heads, architecture.head_features
        # The shard has whole KV groups: per group its queries, a key and a value.
        kv_heads = y.shape[1] // ((queries_per_kv + 2) * head_features)
        y = y.view(spread.total, kv_heads, queries_per_kv + 2, head_features)
        # Rows of y lie in the order in which chunks arrive; the rotation puts them into pack order.
        order = place.arrival(self.members, spread.chunks)
        rotation = Rotation(tables=place.tables(self.members), order=order)
        qkv = turned(y, rotation)
        del y
        heads = attended(core_of(Heads(queries=kv_heads * queries_per_kv, keys=kv_heads)), qkv)
        del qkv
        flat = heads.reshape(spread.total, kv_heads * queries_per_kv * head_features)
        bias, matrix = self.state.get("proj.bias"), self._matrix("proj.weight")
        return self._added(x, flat, matrix, bias, "attention", in_pack=True)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """The feed-forward branch: all-gather of tokens, feed-forward with this rank's shard of the
        features, reduce-scatter: x [t, h] to [t, h]."""
        architecture, spread = self.context.architecture, self.spread
        parts = FeedForward(
            norm=first_norm(self.state, "norm2", architecture),
            matrix_in=self._matrix("in.weight"),
            bias_in=self._part("in.bias", "in.weight"),
            activation=activation_of(architecture),
            matrix_out=self._matrix("out.weight"),
            bias_out=self.state.get("out.bias"),
        )
        if not self.context.keeps_linear:
            y, x = spread_feed_forward(x, parts, spread)
            return added(x, y, "feed_forward", self.context)
        y, x = gather_linear(x, parts.matrix_in, parts.bias_in, parts.norm, spread)
        y = activated(y, parts.activation)
        return self._added(x, y, parts.matrix_out, parts.bias_out, "feed_forward", in_pack=False)

    def _added(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        matrix: WeightSource,
        bias: WeightSource | None,
        part: Branch,
        *,
        in_pack: bool,
    ) -> torch.Tensor:
        """The residual stream x [t, h] plus the result of a branch, whose second linear map, with
        ``matrix`` and ``bias``, is applied here. Its input ``y`` [T, features of the shard] is in
        pack order where ``in_pack``, else one chunk after the other."""
        # without dropout in between the reduce-scatter can add x as it sums
        residual = None if dropout_rate(self.context) else x
        out = linear_scatter(y, matrix, bias, residual, self.spread, in_pack=in_pack)
        return out if residual is not None else added(x, out, part, self.context)

    def _part(self, name: str, matrix: str) -> Part | None:
        """This rank's shard of the weight ``name``, whose rows are cut where those of the weight
        ``matrix`` are; None where the layer has no such weight."""
        weight, cuts = self.state.get(name), self.state[matrix].split(self.parts)
        return None if weight is None else weight.part([cuts[shard] for shard in self.shards])

    def _matrix(self, name: str) -> Part:
        """This rank's shard of a matrix, which every layer has."""
        part = self._part(name, name)
        assert part is not None, "every layer has its matrices"
        return part


def _whole_group(state: State, context: Context) -> Tensor:
    """Tensor parallelism over the whole group: member m uses shard m."""
    everyone = context.place.everyone
    return Tensor(
        state=state, context=context, members=everyone, parts=len(everyone), shards=everyone
    )


def attention(x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
    """The attention branch over the whole group: all-gather, attention over a shard of the heads,
    reduce-scatter: x [T / R, h] to [T / R, h]."""
    everyone = context.place.everyone
    blocks = context.tokens.blocks(everyone, everyone, context.architecture.causal)
    return _whole_group(state, context).attention(
        x, lambda heads: PackCore(heads=heads, blocks=blocks)
    )


def feed_forward(x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
    """The feed-forward branch over the whole group: all-gather, feed-forward with a shard of the
    features, reduce-scatter: x [T / R, h] to [T / R, h]."""
    return _whole_group(state, context).feed_forward(x)


METHODS = (Method(facts=MEGATRON_TS, attention=attention, feed_forward=feed_forward),)
