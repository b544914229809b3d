"""The methods of DSP's Table 3 on one Transformer-2D, each with true adjoints.

All but DSP hold shards of the frames (Megatron-LM: everything) and communicate within blocks:

    dsp           axes are switched between blocks
    ulysses       heads for frames around attention over time: queries, keys and values at once
    ring          keys and values of other frames go round
    megatron-sp   frames are gathered, weights split by heads, sums scattered: twice a block
    megatron-lm   weights split by heads, sums on all ranks: twice a block

The objective is the sum of all ranks' losses, so gradients of all ranks add up to the model's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as f
from dense_ring import ring_attention

import headrace as hr
from headrace.comm.collectives import all_gather_rows, reduce_scatter_rows
from headrace.layouts.partition import split_sizes
from headrace.models.transformer_2d import Block2D, Transformer2D, attend_over
from headrace.ops.switch import gather, split, switch

__all__ = ["METHODS", "Prepared", "prepare"]

METHODS = ("dsp", "ulysses", "ring", "megatron-sp", "megatron-lm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """``loss()`` is this rank's part of the sum of squares of the model's result."""

    loss: Callable[[], torch.Tensor]
    keep: Any = None  # what must outlive it


def prepare(method: str, model: Transformer2D, inputs: dict[str, torch.Tensor]) -> Prepared:
    """A model made ready for a method, on all ranks; every rank has its weights and the inputs."""
    if method == "dsp":
        run = hr.adapt(model)
        shard = run.shard(inputs)
        run(**shard)  # the order of the stages is learnt
        return Prepared(loss=lambda: run(**shard).square().sum(), keep=run)
    group, ranks = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    sizes = split_sizes(inputs["x"].shape[1], ranks)
    local = dict(inputs)
    if method != "megatron-lm":
        local["x"] = split(inputs["x"], 1, group, sizes=sizes)
        local["frames"] = split(inputs["frames"], 0, group, sizes=sizes)
    for layer in model.layers:
        if method.startswith("megatron"):
            for block in (layer.spatial, layer.temporal):
                _split_by_heads(block, group, sizes if method == "megatron-sp" else None)
        elif method == "ulysses":
            layer.temporal.attend = _ulysses(group, sizes)
        else:
            layer.temporal.attend = partial(ring_attention, sizes=sizes, group=group)
    share = ranks if method == "megatron-lm" else 1
    return Prepared(loss=lambda: model(**local).square().sum() / share)


def _ulysses(group: Any, sizes: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    over_time = attend_over("t")

    def attend(qkv: torch.Tensor) -> torch.Tensor:
        heads = split_sizes(qkv.shape[3], len(sizes))
        own = over_time(switch(qkv, 1, 3, group, sizes=sizes, to_sizes=heads))
        return switch(own, 3, 1, group, sizes=heads, to_sizes=sizes)

    return attend


def _split_by_heads(block: Block2D, group: Any, sizes: tuple[int, ...] | None) -> None:
    """Have a block use this rank's heads, and its part of the feed-forward."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    hidden = block.out.weight.shape[0]
    heads = split_sizes(block.heads, ranks)
    each = hidden // block.heads
    mine = slice(sum(heads[:rank]) * each, sum(heads[: rank + 1]) * each)
    inner = split_sizes(4 * hidden, ranks)
    part = slice(sum(inner[:rank]), sum(inner[: rank + 1]))
    three = slice(3 * mine.start, 3 * mine.stop)
    attend = attend_over(block.mixes)

    def whole(x: torch.Tensor) -> torch.Tensor:
        return x if sizes is None else gather(x, 1, group, sizes=sizes)

    def added(x: torch.Tensor) -> torch.Tensor:
        return _Added.apply(x, sizes, group)  # type: ignore[no-any-return]

    def attention_of(x: torch.Tensor) -> torch.Tensor:
        qkv = f.linear(whole(x), block.qkv.weight[three], block.qkv.bias[three])
        own = attend(qkv.unflatten(-1, (heads[rank], 3, -1))).flatten(-2)
        return added(f.linear(own, block.out.weight[:, mine])) + block.out.bias

    def feed_forward_of(x: torch.Tensor) -> torch.Tensor:
        up = f.gelu(f.linear(whole(x), block.up.weight[part], block.up.bias[part]))
        return added(f.linear(up, block.down.weight[:, part])) + block.down.bias

    block.attention = attention_of  # type: ignore[method-assign]
    block.feed_forward = feed_forward_of  # type: ignore[method-assign]


class _Added(torch.autograd.Function):
    """The sum of all ranks' [b, t, s, h]: this rank's frames of it where there are ``sizes``, else
    all of it on all ranks. Adjoint: gathered, or summed as well."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: tuple[int, ...] | None, group: Any) -> Any:
        ctx.rest = (sizes, group)
        return _summed(x, sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        sizes, group = ctx.rest
        if sizes is None:
            return _summed(grad, None, group), None, None
        return all_gather_rows(grad.movedim(1, 0), sizes, group).movedim(0, 1), None, None


def _summed(x: torch.Tensor, sizes: tuple[int, ...] | None, group: Any) -> torch.Tensor:
    rows = sizes or split_sizes(x.shape[1], dist.get_world_size(group))
    part = reduce_scatter_rows(x.movedim(1, 0), rows, group)
    whole = part if sizes is not None else all_gather_rows(part, rows, group)
    return whole.movedim(0, 1)
