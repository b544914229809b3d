"""Norms over the features of each token; statistics in at least fp32."""

from __future__ import annotations

from typing import Any

import torch

from headrace.ops.linear import Source

__all__ = ["layer_norm", "rms_norm"]


def rms_norm(x: torch.Tensor, weight: Source, eps: float) -> torch.Tensor:
    """y = x r w with r = 1 / sqrt(mean_h(x^2) + eps).

        x         [T, h]
        weight    [h]
        returns   [T, h]
        backward  dx = r (g - x r^2 mean_h(g x)), g = dy w;  dw += sum_T dy x r
    """  # fmt: skip
    return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Source, eps: float) -> torch.Tensor:
        wide = _wide(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, scale)
        ctx.weight = weight
        return (wide * scale).mul_(weight.rows()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, scale = ctx.saved_tensors
        unit = _wide(x) * scale
        wide = _wide(grad)
        ctx.weight.add((wide * unit).sum(0))
        g = wide * ctx.weight.rows()
        inner = (g * unit).mean(-1, keepdim=True)
        return g.addcmul_(unit, inner, value=-1).mul_(scale).to(x.dtype), None, None


def layer_norm(x: torch.Tensor, weight: Source, bias: Source, eps: float) -> torch.Tensor:
    """y = (x - mean_h) / sqrt(var_h + eps) w + b.

        x         [T, h]
        weight, bias  [h]
        returns   [T, h]
        backward  dx = s (g - mean_h(g) - u mean_h(g u)), g = dy w, u the normalised x,
                  s = 1 / sqrt(var + eps);  dw += sum_T dy u;  db += sum_T dy
    """  # fmt: skip
    return _LayerNorm.apply(x, weight, bias, eps)  # type: ignore[no-any-return]


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: Source, bias: Source, eps: float
    ) -> torch.Tensor:
        wide = _wide(x)
        mean = wide.mean(-1, keepdim=True)
        centred = wide - mean
        scale = torch.rsqrt(centred.square().mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, mean, scale)
        ctx.rest = (weight, bias)
        unit = centred.mul_(scale)
        return torch.addcmul(bias.rows(), unit, weight.rows()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, mean, scale = ctx.saved_tensors
        weight, bias = ctx.rest
        unit = (_wide(x) - mean).mul_(scale)
        wide = _wide(grad)
        weight.add((wide * unit).sum(0))
        bias.add(wide.sum(0))
        g = wide * weight.rows()
        inner = (g * unit).mean(-1, keepdim=True)
        g = g - g.mean(-1, keepdim=True)
        return g.addcmul_(unit, inner, value=-1).mul_(scale).to(x.dtype), None, None, None


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()
