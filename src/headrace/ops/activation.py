"""Activations as objects with a forward and a backward; autograd saves only their input.

Shape legend: T tokens, f features of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from headrace.ops.fused import fused, widened

__all__ = ["Activation", "Gelu", "SwiGLU", "activated"]


class Activation(Protocol):
    """A function of each token's features and its adjoint."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The activation y of x [T, ...]."""

    def backward(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The gradient dx of x, given ``grad`` = dy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwiGLU:
    """silu(gate) * up, gate and up interleaved in blocks of ``block`` features.

    x         [T, 2 f]   with B = ``block``: gate 0..B-1, up 0..B-1, gate B..2B-1, up B..2B-1, ...
    y         [T, f]
    backward  dgate = dy up s (1 + gate (1 - s)), s = sigmoid(gate);  dup = dy gate s
    """

    block: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The activation y [T, f] of x [T, 2 f]."""
        return _swiglu(x, self.block)  # type: ignore[no-any-return]

    def backward(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """dx [T, 2 f] of ``grad`` = dy [T, f]."""
        return _swiglu_backward(grad, x, self.block)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gelu:
    """x Phi(x), or its tanh approximation: x [T, f] to y [T, f]."""

    approximate: Literal["tanh", "none"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The activation y [T, f] of x [T, f]."""
        return torch.nn.functional.gelu(x, approximate=self.approximate)

    def backward(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """dx [T, f] of ``grad`` = dy [T, f]."""
        dx: torch.Tensor = torch.ops.aten.gelu_backward(grad, x, approximate=self.approximate)
        return dx


def activated(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Apply an activation to x [T, ...] under autograd, which saves x alone: intermediate results
    are computed again in the backward."""
    return _Activated.apply(x, activation)  # type: ignore[no-any-return]


class _Activated(torch.autograd.Function):
    """Autograd of :func:`activated`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """The activation of x [T, ...], of which only x is saved."""
        ctx.save_for_backward(x)
        ctx.activation = activation
        return activation.forward(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """The gradient of x, from ``grad``, that of the activation."""
        (x,) = ctx.saved_tensors
        return ctx.activation.backward(grad, x), None


def _halves(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of gate and up, each [T, f / block, block], in x [T, 2 f], where blocks of ``block``
    features are gate and up in turn."""
    blocks = x.view(x.shape[0], x.shape[1] // (2 * block), 2, block)
    return blocks[:, :, 0], blocks[:, :, 1]


def _plain_swiglu(x: torch.Tensor, block: int) -> torch.Tensor:
    """silu(gate) * up [T, f] of x [T, 2 f], in the type of x."""
    gate, up = _halves(x, block)
    return torch.nn.functional.silu(gate).mul_(up).reshape(x.shape[0], x.shape[1] // 2)


def _plain_swiglu_backward(grad: torch.Tensor, x: torch.Tensor, block: int) -> torch.Tensor:
    """The gradient of x [T, 2 f] from ``grad`` [T, f], that of :func:`_plain_swiglu`."""
    gate, up = _halves(x, block)
    grad = grad.reshape(gate.shape)
    out = torch.empty_like(x)
    # dgate and dup are views of ``out``: writing to them fills it
    dgate, dup = _halves(out, block)
    torch.mul(grad, torch.nn.functional.silu(gate), out=dup)
    dgate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
    return out


@fused("swiglu(Tensor x, int block) -> Tensor", plain=_plain_swiglu)
def _swiglu(x: torch.Tensor, block: int) -> torch.Tensor:
    """As :func:`_plain_swiglu`, but in at least fp32 and without writes in place, so that it can be
    compiled."""
    gate, up = (widened(half) for half in _halves(x, block))
    return (gate * gate.sigmoid() * up).to(x.dtype).reshape(x.shape[0], x.shape[1] // 2)


@fused("swiglu_backward(Tensor grad, Tensor x, int block) -> Tensor", plain=_plain_swiglu_backward)
def _swiglu_backward(grad: torch.Tensor, x: torch.Tensor, block: int) -> torch.Tensor:
    """As :func:`_plain_swiglu_backward`, in at least fp32 and without writes in place; the formula
    is that of :class:`SwiGLU`."""
    gate, up = (widened(half) for half in _halves(x, block))
    dy, s = widened(grad).reshape(gate.shape), gate.sigmoid()
    dgate = dy * up * s * (1 + gate * (1 - s))
    return torch.stack((dgate, dy * gate * s), dim=2).to(x.dtype).reshape(x.shape)
