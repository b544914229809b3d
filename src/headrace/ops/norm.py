"""Norms over the features of each token; statistics in at least fp32.

A norm is a value with a forward and a backward, so that a linear map can take it in: the map then
keeps what the norm was given, which is alive anyway, and not what it gave.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from headrace.ops.fused import fused, widened

__all__ = ["LayerNorm", "Norm", "RMSNorm", "Vector", "normalised"]


class Vector(Protocol):
    """The weight of a norm, [h], which every rank holds in full."""

    def rows(self) -> torch.Tensor:
        """The value of the weight, [h]."""

    def add(self, grad: torch.Tensor) -> None:
        """Add a partial gradient, [h]."""


class Norm(Protocol):
    """A norm and its adjoint over x [T, h]; ``stats`` is what it keeps besides x."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """(y [T, h], statistics to save)."""

    def again(self, x: torch.Tensor, stats: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """y [T, h], recomputed from x and the saved statistics."""

    def backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        stats: tuple[torch.Tensor, ...],
        plus: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(dx [T, h] + ``plus`` [T, h]), where ``plus`` is another gradient of x; adds the
        gradients of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RMSNorm:
    """y = x r w with r = 1 / sqrt(mean_h(x^2) + eps).

    x         [T, h]
    weight    [h]
    stats     r [T, 1]
    backward  dx = r (g - x r^2 mean_h(g x)), g = dy w;  dw += sum_T dy x r
    """

    weight: Vector
    eps: float

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The normalised rows y [T, h], and what the backward needs of them, (r [T, 1],)."""
        y, scale = _rms(x, self.weight.rows(), self.eps)
        return y, (scale,)

    def again(self, x: torch.Tensor, stats: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """y [T, h], recomputed from x and r."""
        return _rms_again(x, self.weight.rows(), stats[0])  # type: ignore[no-any-return]

    def backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        stats: tuple[torch.Tensor, ...],
        plus: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """dx [T, h] + ``plus``; adds dw to the weight."""
        dx, dw = _rms_backward(grad, x, self.weight.rows(), stats[0], plus)
        self.weight.add(dw)
        return dx  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorm:
    """y = (x - mean_h) / sqrt(var_h + eps) w + b.

    x         [T, h]
    weight, bias  [h]
    stats     mean, s [T, 1], s = 1 / sqrt(var + eps)
    backward  dx = s (g - mean_h(g) - u mean_h(g u)), g = dy w, u the normalised x;
              dw += sum_T dy u;  db += sum_T dy
    """

    weight: Vector
    bias: Vector
    eps: float

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """(y [T, h], (mean [T, 1], s [T, 1]))."""
        y, mean, scale = _layer(x, self.weight.rows(), self.bias.rows(), self.eps)
        return y, (mean, scale)

    def again(self, x: torch.Tensor, stats: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """y [T, h], recomputed from x, the mean and s."""
        return _layer_again(  # type: ignore[no-any-return]
            x, self.weight.rows(), self.bias.rows(), *stats
        )

    def backward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        stats: tuple[torch.Tensor, ...],
        plus: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """dx [T, h] + ``plus``; adds dw and db."""
        dx, dw, db = _layer_backward(grad, x, self.weight.rows(), *stats, plus)
        self.weight.add(dw)
        self.bias.add(db)
        return dx  # type: ignore[no-any-return]


def normalised(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """A norm by itself: x [T, h] to [T, h]; keeps x and the norm's statistics."""
    return _Normalised.apply(x, norm)  # type: ignore[no-any-return]


class _Normalised(torch.autograd.Function):
    """Autograd of :func:`normalised`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """The norm y [T, h] of x [T, h]."""
        y, stats = norm.forward(x)
        ctx.save_for_backward(x, *stats)
        ctx.norm = norm
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """The gradient of x; those of the norm's weights are added to their sums."""
        x, *stats = ctx.saved_tensors
        return ctx.norm.backward(grad, x, tuple(stats)), None


@fused("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(RMS norm of x [t, h], one over the root mean square of each token [t, 1])."""
    wide = widened(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).mul_(weight).to(x.dtype), scale


@fused("rms_norm_again(Tensor x, Tensor weight, Tensor scale) -> Tensor")
def _rms_again(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The RMS norm of x [t, h] from the saved ``scale`` [t, 1]."""
    return (widened(x) * scale).mul_(weight).to(x.dtype)


@fused(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor scale, Tensor? plus) -> "
    "(Tensor, Tensor)",
    kernels=3,
)
def _rms_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    plus: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx [t, h], dw [h]) of an RMS norm; ``scale`` [t, 1] is one over the root mean square of each
    token. ``plus`` [t, h], where given, is added to dx. The formula is that of :class:`RMSNorm`:
    with unit = x r it is dx = r (g - unit mean_h(g unit))."""
    unit, dy = widened(x) * scale, widened(grad)
    dw = (dy * unit).sum(0)
    g = dy * weight
    inner = (g * unit).mean(-1, keepdim=True)
    dx = g.addcmul_(unit, inner, value=-1).mul_(scale)
    return (dx if plus is None else dx.add_(plus)).to(x.dtype), dw


@fused("layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)")
def _layer(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(layer norm of x [t, h], mean [t, 1], one over the standard deviation [t, 1]) of each
    token."""
    wide = widened(x)
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True).add_(eps))
    return torch.addcmul(bias, centred.mul_(scale), weight).to(x.dtype), mean, scale


@fused(
    "layer_norm_again(Tensor x, Tensor weight, Tensor bias, Tensor mean, Tensor scale) -> Tensor"
)
def _layer_again(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
    """The layer norm of x [t, h] from its saved statistics: ``mean`` and ``scale``, one over the
    standard deviation, each [t, 1]."""
    return torch.addcmul(bias, (widened(x) - mean).mul_(scale), weight).to(x.dtype)


@fused(
    "layer_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor mean, Tensor scale, "
    "Tensor? plus) -> (Tensor, Tensor, Tensor)",
    kernels=3,
)
def _layer_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    plus: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx [t, h], dw [h], db [h]) of a layer norm; ``mean`` and ``scale``, one over the standard
    deviation, are [t, 1]. ``plus`` [t, h], where given, is added to dx. The formula is that of
    :class:`LayerNorm`; ``unit`` is its u."""
    unit, dy = (widened(x) - mean).mul_(scale), widened(grad)
    dw, db = (dy * unit).sum(0), dy.sum(0)
    g = dy * weight
    inner = (g * unit).mean(-1, keepdim=True)
    g = g - g.mean(-1, keepdim=True)
    dx = g.addcmul_(unit, inner, value=-1).mul_(scale)
    return (dx if plus is None else dx.add_(plus)).to(x.dtype), dw, db
