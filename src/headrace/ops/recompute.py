"""Regions whose intermediate results are computed again in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["region"]


def region(fn: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """``fn(*inputs)``, keeping only the inputs for the backward.

    ``fn`` must depend on nothing but its inputs and on weights that it takes from a
    :class:`headrace.ops.linear.WeightSource`, to which their gradients are added in its backward.
    Dropout masks depend on sample and position, so the second run draws the same ones.
    Communication inside ``fn`` is repeated: methods put it outside unless the recompute level says
    otherwise.
    """
    return _Region.apply(fn, *inputs)  # type: ignore[no-any-return]


class _Region(torch.autograd.Function):
    """Autograd of :func:`region`."""

    @staticmethod
    def forward(ctx: Any, fn: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """Run ``fn`` without an autograd graph, keeping only its inputs."""
        ctx.fn = fn
        ctx.save_for_backward(*inputs)
        with torch.no_grad():
            return fn(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """Run ``fn`` again with a graph; returns the gradients of its inputs from ``grad``, that of
        its result."""
        needed = ctx.needs_input_grad[1:]
        inputs = [
            x.detach().requires_grad_(need)
            for x, need in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            out = ctx.fn(*inputs)
        torch.autograd.backward(out, grad)
        return (None, *(x.grad for x in inputs))
