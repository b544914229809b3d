"""Transformer-2D: blocks over space and over time in turn (DSP, section 4 and appendix A.1).

OpenSora's model without cross attention, so a layer is two transformer blocks that differ only in
the axis that their attention mixes. Each is shifted and scaled by the time of the diffusion
(adaLN-single, as in OpenSora). Places are inputs, so that a shard of them is right.

Shape legend: b clips of t frames of s patches; c channels of a patch, h features, n heads.

Table 5 names 28 layers of 1,152 features "720M" and 36 of 2,038 "3B" (an error for 2,048, as 32
heads do not divide it). With two blocks of 12 h^2 a layer they have 0.89 and 3.6 billion weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as f
from torch.utils.checkpoint import checkpoint

from headrace.errors import SpecError

__all__ = ["SHAPES_2D", "Attend2D", "Block2D", "Shape2D", "Transformer2D", "attend_over"]

Mixed = Literal["t", "s"]

Attend2D = Callable[[torch.Tensor], torch.Tensor]
"""A function for attention over one axis: queries, keys and values in one tensor [b, t, s, n, 3, d]
to [b, t, s, n, d]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape2D:
    """Sizes of a Transformer-2D; each of its ``layers`` has two blocks."""

    layers: int
    hidden: int
    heads: int
    channels: int = 16

    def __post_init__(self) -> None:
        """Raise SpecError unless the features are even and heads divide them."""
        if self.hidden % self.heads or self.hidden % 2:
            raise SpecError(
                "Transformer-2D",
                got=f"{self.hidden} features, {self.heads} heads",
                wanted="an even number of features, which heads divide",
            )

    @property
    def block_elements(self) -> int:
        """Weights of the matrices of a layer: 12 h^2 for each of two blocks."""
        return 24 * self.hidden**2


SHAPES_2D = {
    "720m": Shape2D(layers=28, hidden=1152, heads=16),
    "3b": Shape2D(layers=36, hidden=2048, heads=32),
    "tiny": Shape2D(layers=2, hidden=32, heads=4, channels=4),
}
"""The paper's, by their names there, and one for tests."""


def attend_over(axis: Mixed) -> Attend2D:
    """A function that computes attention over one axis, time (``t``) or space (``s``), of tensors
    that have all places of it."""

    # The dim of the other axis, and how dims are permuted: [b, t, s, n, d] to [b, other axis, n,
    # axis, d], and back.
    other = 2 if axis == "t" else 1
    order = (0, 2, 3, 1, 4) if axis == "t" else (0, 1, 3, 2, 4)
    back = (0, 3, 1, 2, 4) if axis == "t" else (0, 1, 3, 2, 4)

    def attend(qkv: torch.Tensor) -> torch.Tensor:
        """Attention of queries, keys and values [b, t, s, n, 3, d]: [b, t, s, n, d]."""
        # The other axis is joined to the batch. With five dims instead of four, torch's kernels
        # would hold all scores, and Inductor gets shapes wrong.
        q, k, v = (x.permute(order).flatten(0, 1) for x in qkv.unbind(-2))
        out = f.scaled_dot_product_attention(q, k, v)
        return out.unflatten(0, (qkv.shape[0], qkv.shape[other])).permute(back)

    return attend


class Block2D(nn.Module):
    """A transformer block: attention over one axis and a feed-forward, the inputs of both shifted
    and scaled, and their outputs gated, by what the model makes of the diffusion's time."""

    def __init__(self, hidden: int, heads: int, mixes: Mixed) -> None:
        """A block whose attention is over space (``s``) or time (``t``), as ``mixes`` says."""
        super().__init__()
        self.heads, self.mixes = heads, mixes
        self.norm = nn.LayerNorm(hidden, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(hidden, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.table = nn.Parameter(torch.randn(6, hidden) / hidden**0.5)
        self.attend = attend_over(mixes)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """The block's output [b, t, s, h] for its input x of that shape and the embedded ``time``
        [b, 6, h] of each clip."""
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(time)
        x = x + gate * self.attention(self.norm(x) * (1 + scale) + shift)
        return x + gate2 * self.feed_forward(self.norm2(x) * (1 + scale2) + shift2)

    def modulation(self, time: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Shift, scale and gate of attention, then those of the feed-forward, six tensors
        [b, 1, 1, h], for the embedded ``time`` [b, 6, h]."""
        return (self.table + time)[:, :, None, None].unbind(1)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """Attention over this block's axis with its projections, x [b, t, s, h] to [b, t, s, h].
        The rows of the input projection are q, k and v of the first head, then of the next."""
        qkv = self.qkv(x).unflatten(-1, (self.heads, 3, -1))
        return self.out(self.attend(qkv).flatten(-2))

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """The feed-forward, x [b, t, s, h] to [b, t, s, h]."""
        return self.down(f.gelu(self.up(x)))


class Layer2D(nn.Module):
    """A block over space and one over time, each computed again in the backward where
    ``gradient_checkpointing`` says so."""

    def __init__(self, hidden: int, heads: int) -> None:
        """A block over space and one over time."""
        super().__init__()
        self.gradient_checkpointing = False
        self._gradient_checkpointing_func: Any = partial(checkpoint, use_reentrant=False)
        self.spatial = Block2D(hidden, heads, "s")
        self.temporal = Block2D(hidden, heads, "t")

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """The layer's output [b, t, s, h] for its input x of that shape and the embedded ``time``
        [b, 6, h] of each clip."""
        for block in (self.spatial, self.temporal):
            if self.gradient_checkpointing:
                x = self._gradient_checkpointing_func(block, x, time)
            else:
                x = block(x, time)
        return x


class Transformer2D(nn.Module):
    """The diffusion model: predicts a value for every channel of every patch."""

    def __init__(self, shape: Shape2D) -> None:
        """A model of this shape with random weights."""
        super().__init__()
        self.shape, hidden = shape, shape.hidden
        self.embed = nn.Linear(shape.channels, hidden)
        self.predict = nn.Linear(hidden, shape.channels)
        self.time = nn.Sequential(
            nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 6 * hidden)
        )
        self.layers = nn.ModuleList(Layer2D(hidden, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(hidden)

    def forward(
        self, x: torch.Tensor, timestep: torch.Tensor, frames: torch.Tensor, patches: torch.Tensor
    ) -> torch.Tensor:
        """Predict a value for every channel of every patch.

        x          [b, t, s, c]  noisy clips
        timestep   [b]           the time of the diffusion
        frames     [t]           the numbers of the frames in their clip
        patches    [s]           the numbers of the patches in their frame
        returns    [b, t, s, c]
        """
        hidden, dtype = self.shape.hidden, x.dtype
        places = _sinusoids(frames, hidden, dtype)[:, None] + _sinusoids(patches, hidden, dtype)
        x = self.embed(x) + places
        time = self.time(_sinusoids(timestep, hidden, dtype)).unflatten(-1, (6, -1))
        for layer in self.layers:
            x = layer(x, time)
        return self.predict(self.norm(x))


def _sinusoids(places: torch.Tensor, features: int, dtype: torch.dtype) -> torch.Tensor:
    """The sinusoidal embedding of places or times [n], [n, features] of ``dtype``: half of the
    features are sines, half cosines, with wavelengths from 2 pi up to almost 2 pi 10^4."""
    half = features // 2
    exponents = torch.arange(half, device=places.device, dtype=torch.float64) / half
    angles = places.double()[:, None] * torch.exp(-math.log(1e4) * exponents)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype)
