"""A model of three axes in the manner of those that people write, and stages that name them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as f
from torch.utils.checkpoint import checkpoint

import headrace as hr

AXES = "ijk"
DIMS = "b i j k c"


class Axial(nn.Module):
    """Attention over one dim of a tensor, and a feed-forward."""

    def __init__(self, dim: int, features: int = 8) -> None:
        super().__init__()
        self.dim = dim
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.norm, self.up = nn.LayerNorm(features), nn.Linear(features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).transpose(self.dim, -2).chunk(3, dim=-1)
        y = f.scaled_dot_product_attention(q, k, v).transpose(self.dim, -2)
        x = x + self.out(y)
        return x + f.gelu(self.up(x))


class Table(nn.Module):
    """Blocks over each axis in turn."""

    def __init__(self, rounds: int, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: Axial(1 + at) for at, name in enumerate(AXES)})
            for _ in range(rounds)
        )
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.blocks:
            for name in AXES:
                inner: Any = block[name]  # type: ignore[index]
                if self.checkpointed:
                    x = checkpoint(inner, x, use_reentrant=False)
                else:
                    x = inner(x) if name == "i" else inner(x=x)
        return x if scale is None else x * scale


def stages(*, returns: bool, swapped: bool = False) -> list[hr.AxisStage]:
    """What each block mixes; ``swapped``: a wrong name for one of them."""
    mixed = {"i": "j", "j": "i"} if swapped else {}
    return [
        hr.AxisStage(
            modules=f"blocks.*.{name}", mixes=mixed.get(name, name), dims=DIMS, returns=returns
        )
        for name in AXES
    ]


def table(rounds: int = 2, *, checkpointed: bool = False) -> Table:
    """A model in fp64."""
    torch.manual_seed(0)
    return Table(rounds, checkpointed).double()


def example(*, returns: bool = False, swapped: bool = False) -> hr.AxisExample:
    """Such a model to verify."""
    x = torch.randn(1, 5, 4, 6, 8, dtype=torch.float64)
    return hr.AxisExample(
        model=table(),
        inputs={"x": x},
        results=lambda out: [(out, DIMS)],
        adapted=lambda model: hr.adapt(
            model, stages=stages(returns=returns, swapped=swapped), inputs={"x": DIMS}, axis="i"
        ),
    )


def wrong() -> hr.AxisExample:
    """With a stage that mixes something else than it says."""
    return example(swapped=True)
