"""Activations that keep only their input."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["swiglu"]


def swiglu(x: torch.Tensor, block: int) -> torch.Tensor:
    """silu(gate) * up, gate and up interleaved in blocks of ``block`` features.

        x         [T, 2 f]   gate_0..B-1, up_0..B-1, gate_B.., ...
        returns   [T, f]
        backward  dgate = dy up s (1 + gate (1 - s)), s = sigmoid(gate);  dup = dy gate s
    """  # fmt: skip
    return _SwiGLU.apply(x, block)  # type: ignore[no-any-return]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: int) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.block = block
        gate, up = _halves(x, block)
        return torch.nn.functional.silu(gate).mul_(up).reshape(x.shape[0], x.shape[1] // 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        gate, up = _halves(x, ctx.block)
        grad = grad.reshape(gate.shape)
        out = torch.empty_like(x)
        dgate, dup = _halves(out, ctx.block)
        torch.mul(grad, torch.nn.functional.silu(gate), out=dup)
        dgate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return out, None


def _halves(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = x.view(x.shape[0], x.shape[1] // (2 * block), 2, block)
    return blocks[:, :, 0], blocks[:, :, 1]
