"""A decoder Transformer, written for one device: methods know how a layer is spread.

Shape legend: T tokens of a pack over R ranks, h hidden, V vocabulary. Activations between layers
are [T / R, h] for every method.

The model runs in segments (embedding, each layer, end) that are cut from each other: forward and
backward are one segment after the other, whatever the plan, so the order of every sum is fixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from headrace.methods.block import normalise
from headrace.methods.context import Context, State
from headrace.methods.registry import method
from headrace.ops.linear import Source, embed
from headrace.ops.loss import head_loss
from headrace.ops.random import dropout
from headrace.ops.recompute import region
from headrace.spec.architecture import Architecture
from headrace.spec.method import LayerOption

__all__ = ["Transformer"]


class Transformer:
    """The segments of a model of one architecture; it holds no weights."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture

    def embedding(
        self, ids: torch.Tensor, positions: torch.Tensor, weights: Mapping[str, Source],
    ) -> torch.Tensor:  # fmt: skip
        """Token (and learned position) embeddings: ids, positions [T / R] to [T / R, h]."""
        anchor = torch.empty(0, device=ids.device, requires_grad=torch.is_grad_enabled())
        x = embed(ids, weights["embed.weight"], anchor)
        if self.architecture.kind == "gpt":
            x = x + embed(positions, weights["positions.weight"], anchor)
        return x

    def layer(
        self, x: torch.Tensor, index: int, option: LayerOption, weights: Mapping[str, Source],
        context: Context,
    ) -> torch.Tensor:  # fmt: skip
        """Layer ``index``: x [T / R, h] to [T / R, h], spread and recomputed as ``option`` says.

        ``full`` keeps only x and runs the layer again in the backward, its communication too.
        """
        prefix = f"layers.{index}."
        state = {
            name.removeprefix(prefix): weight
            for name, weight in weights.items()
            if name.startswith(prefix)
        }
        inner = replace(context, recompute=option.recompute, layer=index)
        if option.recompute == "full":

            def whole(x: torch.Tensor) -> torch.Tensor:
                return self._layer(x, option, state, inner)

            return region(whole, x)
        return self._layer(x, option, state, inner)

    def _layer(
        self, x: torch.Tensor, option: LayerOption, state: State, context: Context
    ) -> torch.Tensor:
        a = self.architecture
        attention = method(option.attention, a, context.ranks).attention
        feed_forward = method(option.feed_forward, a, context.ranks).feed_forward
        rate = a.dropout if context.training else 0.0
        y = attention(x, state, context)
        x = x + dropout(y, rate, context.dropout, 2 * context.layer)
        y = feed_forward(x, state, context)
        return x + dropout(y, rate, context.dropout, 2 * context.layer + 1)

    def last_norm(self, x: torch.Tensor, weights: Mapping[str, Source]) -> torch.Tensor:
        """The norm before the head: x [T / R, h] to [T / R, h]."""
        return normalise(x, weights, "norm", self.architecture)

    def head(
        self, x: torch.Tensor, labels: torch.Tensor, weights: Mapping[str, Source], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss [] and its gradient [T / R, h] of normalised x [T / R, h]; see ops.head_loss."""
        name = "embed.weight" if self.architecture.tied else "head.weight"
        return head_loss(x, labels, weights[name], scale)
