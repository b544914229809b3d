"""Method ``metp``: memory-efficient tensor parallelism, activations stay and weights travel.

Liang et al. 2025; the paper applies one kernel, O = f(A B) C, twice:

    outer loop j over shards of the heads   z_r = sum_j A_j W_proj,j,
                                            A_j = attention of q, k, v = norm(x_r) W_qkv,j^T
    inner loop over the ranks               A_j by ring attention over the heads of shard j
    feed-forward                            z_r = sum_j act(norm(x_r) W_in,j^T) W_out,j

In step j of the attention all ranks work on the same heads, as the inner ring needs all tokens'
keys of them; so shard j goes from its owner to everyone. In the feed-forward rank r takes shard
r - j, so that each owner serves one rank at a time. The next shard is under way while one is used.
The backward walks the same way: projections are made again, gradients of a shard go to its owner.

Elements sent per rank and layer, W elements of the matrices, kv = g d, T tokens of the pack,
V = (R - 1) / R: forward V W for sharded weights (nothing for replicated ones) + 2 V T kv, backward
2 V W + 4 V T kv; in R (R - 1) messages of keys and values each way. Needs R <= g.
Kept, in units u of one local activation: x, the heads, x: 3 at every level but full. In passing:
two shards of a matrix, one shard's q, k and v, one shard of the wide features.
The rotation of shards among ranks, which the abstract suggests for both loops, cannot serve the
attention: at one time every rank would hold other heads, whose keys nobody else computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.comm.collectives import Arriving
from headrace.layouts.partition import Rows
from headrace.methods.block import activation_of, added, first_norm
from headrace.methods.context import Context
from headrace.methods.megatron_cz import ring_of
from headrace.methods.method import Method
from headrace.methods.weights import Part, State
from headrace.ops.activation import Activation
from headrace.ops.core import Heads, wide_dtype
from headrace.ops.linear import add_product, total
from headrace.ops.norm import Norm
from headrace.ops.ring import RingCore
from headrace.ops.rotary import Rotation
from headrace.spec.blocks import Block
from headrace.spec.known_methods import METP

__all__ = ["METHODS", "attention", "feed_forward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """The weights with which a branch computes in one step: one shard of its ``first`` and of its
    ``second`` matrix, and of the ``bias`` of the first, None where the model has none."""

    first: Part
    bias: Part | None
    second: Part

    def issue(self) -> tuple[Arriving, Arriving]:
        """Start to fetch both matrices: (the first, the second), which arrive at ``wait``."""
        return self.first.issue(), self.second.issue()


def _steps(
    state: State, names: tuple[str, str], wanted: Sequence[Sequence[int]], ranks: int
) -> list[_Step]:
    """One step for each entry of ``wanted``: in step i member m uses shard ``wanted[i][m]`` of the
    two matrices ``names`` (first, second), each of which is cut into ``ranks`` shards."""
    first, second = (state[f"{name}.weight"] for name in names)
    first_cuts, second_cuts = first.split(ranks), second.split(ranks)
    bias = state.get(f"{names[0]}.bias")

    def rows(cuts: Sequence[Rows], step: Sequence[int]) -> list[Rows]:
        """For each member the rows of its shard in a step."""
        return [cuts[shard] for shard in step]

    return [
        _Step(
            first=first.part(rows(first_cuts, step)),
            bias=None if bias is None else bias.part(rows(first_cuts, step)),
            second=second.part(rows(second_cuts, step)),
        )
        for step in wanted
    ]


def _fetched(steps: Sequence[_Step]) -> Iterator[tuple[_Step, torch.Tensor, torch.Tensor]]:
    """Yields (step, its first matrix, its second matrix); those of the next step are fetched while
    one is used."""
    coming = steps[0].issue()
    for i, step in enumerate(steps):
        first, second = (arriving.wait() for arriving in coming)
        if i + 1 < len(steps):
            coming = steps[i + 1].issue()
        yield step, first, second


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """The arguments of the attention branch besides x: for each shard of the heads its step and its
    core; ``features`` are those of a head."""

    norm: Norm | None
    steps: Sequence[_Step]
    cores: Sequence[RingCore]
    features: int
    rotation: Rotation

    def project(
        self, y: torch.Tensor, step: _Step, first: torch.Tensor, core: RingCore
    ) -> torch.Tensor:
        """q, k and v [t, n_j + 2 g_j, d] of one shard j of the heads, rotated, from normed tokens y
        [t, h] and the step's matrix ``first``, which has been fetched."""
        qkv = _product(y, first.t(), step.bias)
        kv_heads = core.heads.keys
        # a KV group is its queries, one key and one value
        heads_per_kv = core.heads.queries // kv_heads + 2 if kv_heads else 2
        return self.rotation.turned(qkv.view(len(y), kv_heads, heads_per_kv, self.features))


class _MetpAttention(torch.autograd.Function):
    """The attention branch without its output bias: x [t, h] to (result [t, h], x for the residual
    sum). Keeps x, the heads' outputs and their log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parts: _Attention) -> tuple[torch.Tensor, torch.Tensor]:
        """(sum over the shards of the heads, added in at least fp32, of what each gives; x)."""
        y, stats = (x, ()) if parts.norm is None else parts.norm.forward(x)
        out_sum = torch.zeros_like(x, dtype=wide_dtype(x.dtype))
        kept: list[torch.Tensor] = []
        for (step, first, second), core in zip(_fetched(parts.steps), parts.cores, strict=True):
            heads, (lse,) = core.forward(parts.project(y, step, first, core))
            kept += [heads, lse]
            add_product(out_sum, heads.reshape(len(x), second.shape[0]).t(), second)
        ctx.save_for_backward(x, *stats, *kept)
        ctx.rest = (parts, len(stats))
        return out_sum.to(x.dtype), x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, passed: torch.Tensor) -> Any:  # type: ignore[override]
        """The gradient of x [t, h], with ``passed``, that of the residual sum; projects q, k and v
        of each shard again, and gives the shard's weight gradients to its owner."""
        parts, count = ctx.rest
        x, *rest = ctx.saved_tensors
        stats, kept = tuple(rest[:count]), rest[count:]
        y = x if parts.norm is None else parts.norm.again(x, stats)
        dy = torch.zeros_like(x, dtype=wide_dtype(x.dtype))
        for j, (step, first, second) in enumerate(_fetched(parts.steps)):
            core, heads, lse = parts.cores[j], kept[2 * j], kept[2 * j + 1]
            step.second.add_product(heads.reshape(len(x), second.shape[0]), grad)
            dheads = (grad @ second.t()).view(heads.shape)
            qkv = parts.project(y, step, first, core)
            grads = core.backward(dheads, qkv, heads, (lse,))
            dqkv = parts.rotation.turned_back(grads.q, grads.k, grads.v)
            dqkv = dqkv.reshape(len(x), first.shape[0])
            step.first.add_product(dqkv, y)
            if step.bias is not None:
                step.bias.add(total(dqkv))
            add_product(dy, dqkv.t(), first)
        dx = dy.to(x.dtype)
        if parts.norm is None:
            return dx.add_(passed), None
        return parts.norm.backward(dx, x, stats, passed), None


@dataclass(frozen=True, slots=True, kw_only=True)
class _FeedForward:
    """The arguments of the feed-forward branch besides x."""

    norm: Norm | None
    steps: Sequence[_Step]
    activation: Activation


class _MetpFeedForward(torch.autograd.Function):
    """The feed-forward branch without its output bias: x [t, h] to (result [t, h], x for the
    residual sum). Keeps x."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, parts: _FeedForward
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(sum over the shards of the features, added in at least fp32, of what each gives; x)."""
        y, stats = (x, ()) if parts.norm is None else parts.norm.forward(x)
        out_sum = torch.zeros_like(x, dtype=wide_dtype(x.dtype))
        for step, first, second in _fetched(parts.steps):
            wide = _product(y, first.t(), step.bias)
            add_product(out_sum, parts.activation.forward(wide).t(), second)
        ctx.save_for_backward(x, *stats)
        ctx.parts = parts
        return out_sum.to(x.dtype), x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, passed: torch.Tensor) -> Any:  # type: ignore[override]
        """The gradient of x [t, h], with ``passed``, that of the residual sum; computes the
        features of each shard again, and gives the shard's weight gradients to its owner."""
        parts = ctx.parts
        x, *stats = ctx.saved_tensors
        y = x if parts.norm is None else parts.norm.again(x, tuple(stats))
        dy = torch.zeros_like(x, dtype=wide_dtype(x.dtype))
        for step, first, second in _fetched(parts.steps):
            wide = _product(y, first.t(), step.bias)
            step.second.add_product(parts.activation.forward(wide), grad)
            dwide = parts.activation.backward(grad @ second.t(), wide)
            step.first.add_product(dwide, y)
            if step.bias is not None:
                step.bias.add(total(dwide))
            add_product(dy, dwide.t(), first)
        dx = dy.to(x.dtype)
        if parts.norm is None:
            return dx.add_(passed), None
        return parts.norm.backward(dx, x, tuple(stats), passed), None


def attention(x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
    """The attention branch, one shard of the heads after the other: x [T / R, h] to [T / R, h]."""
    architecture, ranks, ring = context.architecture, context.ranks, ring_of(context)

    def blocks(source: int) -> Sequence[Block]:
        """Score blocks of this rank's queries with the keys of rank ``source``."""
        return context.tokens.blocks((context.member,), (source,), architecture.causal)

    # rows of the fused projection for one KV group: its queries, its key and its value
    group_rows = (architecture.group_heads + 2) * architecture.head_features
    shard_kv_heads = [len(rows) // group_rows for rows in state["qkv.weight"].split(ranks)]
    parts = _Attention(
        norm=first_norm(state, "norm1", architecture),
        # in step j all members use shard j
        steps=_steps(state, ("qkv", "proj"), [(j,) * ranks for j in range(ranks)], ranks),
        cores=[
            RingCore(
                heads=Heads(queries=kv_heads * architecture.group_heads, keys=kv_heads),
                ring=ring,
                blocks=blocks,
            )
            for kv_heads in shard_kv_heads
        ],
        features=architecture.head_features,
        rotation=Rotation(tables=context.place.tables((context.member,))),
    )
    y, x = _MetpAttention.apply(x, parts)
    return added(x, _plus(y, state, "proj.bias"), "attention", context)


def feed_forward(x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
    """The feed-forward branch, one shard of the features after the other: x [T / R, h] to
    [T / R, h]."""
    ranks, architecture = context.ranks, context.architecture
    # Step j gives each member another shard, so that an owner serves one rank at a time.
    wanted = [[(member - j) % ranks for member in range(ranks)] for j in range(ranks)]
    parts = _FeedForward(
        norm=first_norm(state, "norm2", architecture),
        steps=_steps(state, ("in", "out"), wanted, ranks),
        activation=activation_of(architecture),
    )
    y, x = _MetpFeedForward.apply(x, parts)
    return added(x, _plus(y, state, "out.bias"), "feed_forward", context)


def _plus(x: torch.Tensor, state: State, name: str) -> torch.Tensor:
    """x [t, h] plus the bias ``name`` where the model has it."""
    bias = state.get(name)
    return x if bias is None else _Bias.apply(x, bias)  # type: ignore[no-any-return]


class _Bias(torch.autograd.Function):
    """Autograd of adding a bias [h], whose gradient is added to its sum, to x [t, h]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: Part) -> torch.Tensor:
        """The sum of x [t, h] and the bias, [t, h]."""
        ctx.bias = bias
        return x + bias.rows()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """The gradient of x, ``grad`` itself; adds that of the bias, its sum over tokens."""
        ctx.bias.add(total(grad))
        return grad, None


def _product(x: torch.Tensor, matrix: torch.Tensor, bias: Part | None) -> torch.Tensor:
    """x [t, I] times matrix [I, O], plus the bias [O] where there is one."""
    return x @ matrix if bias is None else torch.addmm(bias.rows(), x, matrix)


METHODS = (Method(facts=METP, attention=attention, feed_forward=feed_forward),)
