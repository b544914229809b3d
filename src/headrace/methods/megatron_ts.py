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
    """Tensor parallelism over ``members``, neighbours in the group: member m of the group uses
    shard ``shards[m]`` of ``parts``."""

    state: State
    context: Context
    members: Members
    parts: int
    shards: tuple[int, ...]

    @property
    def spread(self) -> Spread:
        """How the tokens of the members are sharded over them."""
        sizes = tuple(self.context.tokens.sizes[member] for member in self.members)
        orders = self.context.place.order(self.members)
        return Spread(
            sizes=sizes,
            group=self.context.place.subgroup(self.members),
            places=None if orders is None else orders[1],
            chunks=min(len(self.members), max(1, sum(sizes) // _CHUNK_TOKENS)),
        )

    def attention(self, x: torch.Tensor, core_of: Callable[[Heads], Core]) -> torch.Tensor:
        """Gather, attention over this rank's heads, scatter: x [t, h] to [t, h]."""
        a, place, spread = self.context.architecture, self.context.place, self.spread
        y, x = gather_linear(
            x,
            self._matrix("qkv.weight"),
            self._part("qkv.bias", "qkv.weight"),
            first_norm(self.state, "norm1", a),
            spread,
        )
        m, d = a.group_heads, a.head_features
        keys = y.shape[1] // ((m + 2) * d)
        y = y.view(spread.total, keys, m + 2, d)
        order = place.arrival(self.members, spread.chunks)
        rotation = Rotation(tables=place.tables(self.members), order=order)
        qkv = turned(y, rotation)
        del y
        heads = attended(core_of(Heads(queries=keys * m, keys=keys)), qkv)
        del qkv
        flat = heads.reshape(spread.total, keys * m * d)
        bias, matrix = self.state.get("proj.bias"), self._matrix("proj.weight")
        return self._added(x, flat, matrix, bias, "attention", in_pack=True)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gather, feed-forward over this rank's features, scatter: x [t, h] to [t, h]."""
        a, spread = self.context.architecture, self.spread
        parts = FeedForward(
            norm=first_norm(self.state, "norm2", a),
            matrix_in=self._matrix("in.weight"),
            bias_in=self._part("in.bias", "in.weight"),
            activation=activation_of(a),
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
        """The residual stream x [t, h] plus the second linear map of a branch; without dropout both
        are added in the reduce-scatter."""
        onto = None if dropout_rate(self.context) else x
        z = linear_scatter(y, matrix, bias, onto, self.spread, in_pack=in_pack)
        return z if onto is not None else added(x, z, part, self.context)

    def _part(self, name: str, matrix: str) -> Part | None:
        """This rank's rows of a weight that is cut like ``matrix``; None where there is no such
        weight."""
        weight, cuts = self.state.get(name), self.state[matrix].split(self.parts)
        return None if weight is None else weight.part([cuts[shard] for shard in self.shards])

    def _matrix(self, name: str) -> Part:
        part = self._part(name, name)
        assert part is not None, "every layer has its matrices"
        return part


def _everyone(state: State, context: Context) -> Tensor:
    everyone = context.place.everyone
    return Tensor(
        state=state, context=context, members=everyone, parts=len(everyone), shards=everyone
    )


def attention(x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
    """Gather, shard of the heads, scatter: x [T / R, h] to [T / R, h]."""
    everyone = context.place.everyone
    blocks = context.tokens.blocks(everyone, everyone, context.architecture.causal)
    return _everyone(state, context).attention(
        x, lambda heads: PackCore(heads=heads, blocks=blocks)
    )


def feed_forward(x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
    """Gather, shard of the features, scatter: x [T / R, h] to [T / R, h]."""
    return _everyone(state, context).feed_forward(x)


METHODS = (Method(facts=MEGATRON_TS, attention=attention, feed_forward=feed_forward),)
