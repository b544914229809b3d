"""Norms over the features of each token; statistics in at least fp32.

A norm is a value with a forward and a backward, so that a linear map can take it in: the map then
keeps what the norm was given, which is alive anyway, and not what it gave.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["LayerNorm", "Norm", "RMSNorm", "Vector", "normalised"]


class Vector(Protocol):
    """The weight of a norm, [h]: whole on every rank."""

    def rows(self) -> torch.Tensor:
        """Its value."""

    def add(self, grad: torch.Tensor) -> None:
        """Add a partial gradient."""


class Norm(Protocol):
    """A norm and its adjoint over x [T, h]; ``stats`` is what it keeps besides x."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """(y [T, h], stats)."""

    def again(self, x: torch.Tensor, stats: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """y once more."""

    def backward(
        self, grad: torch.Tensor, x: torch.Tensor, stats: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """dx [T, h]; adds the gradients of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RMSNorm:
    """y = x r w with r = 1 / sqrt(mean_h(x^2) + eps).

        x         [T, h]
        weight    [h]
        stats     r [T, 1]
        backward  dx = r (g - x r^2 mean_h(g x)), g = dy w;  dw += sum_T dy x r
    """  # fmt: skip

    weight: Vector
    eps: float

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """(y, stats)."""
        wide = _wide(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(self.eps))
        return (wide * scale).mul_(self.weight.rows()).to(x.dtype), (scale,)

    def again(self, x: torch.Tensor, stats: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """y once more."""
        return (_wide(x) * stats[0]).mul_(self.weight.rows()).to(x.dtype)

    def backward(
        self, grad: torch.Tensor, x: torch.Tensor, stats: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """dx; adds dw."""
        unit = _wide(x) * stats[0]
        wide = _wide(grad)
        self.weight.add((wide * unit).sum(0))
        g = wide * self.weight.rows()
        inner = (g * unit).mean(-1, keepdim=True)
        return g.addcmul_(unit, inner, value=-1).mul_(stats[0]).to(x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorm:
    """y = (x - mean_h) / sqrt(var_h + eps) w + b.

        x         [T, h]
        weight, bias  [h]
        stats     mean, s [T, 1], s = 1 / sqrt(var + eps)
        backward  dx = s (g - mean_h(g) - u mean_h(g u)), g = dy w, u the normalised x;
                  dw += sum_T dy u;  db += sum_T dy
    """  # fmt: skip

    weight: Vector
    bias: Vector
    eps: float

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """(y, stats)."""
        wide = _wide(x)
        mean = wide.mean(-1, keepdim=True)
        centred = wide - mean
        scale = torch.rsqrt(centred.square().mean(-1, keepdim=True).add_(self.eps))
        return self._affine(centred.mul_(scale)).to(x.dtype), (mean, scale)

    def again(self, x: torch.Tensor, stats: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """y once more."""
        mean, scale = stats
        return self._affine((_wide(x) - mean).mul_(scale)).to(x.dtype)

    def backward(
        self, grad: torch.Tensor, x: torch.Tensor, stats: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """dx; adds dw and db."""
        mean, scale = stats
        unit = (_wide(x) - mean).mul_(scale)
        wide = _wide(grad)
        self.weight.add((wide * unit).sum(0))
        self.bias.add(wide.sum(0))
        g = wide * self.weight.rows()
        inner = (g * unit).mean(-1, keepdim=True)
        g = g - g.mean(-1, keepdim=True)
        return g.addcmul_(unit, inner, value=-1).mul_(scale).to(x.dtype)

    def _affine(self, unit: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self.bias.rows(), unit, self.weight.rows())


def normalised(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """A norm by itself: x [T, h] to [T, h]; keeps x and the norm's statistics."""
    return _Normalised.apply(x, norm)  # type: ignore[no-any-return]


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        y, stats = norm.forward(x)
        ctx.save_for_backward(x, *stats)
        ctx.norm = norm
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, *stats = ctx.saved_tensors
        return ctx.norm.backward(grad, x, tuple(stats)), None


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()
