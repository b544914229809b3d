"""Products and sums of half types that are wider: gradients of weights over many tokens.

A device sums a product in fp32 anyway; where the result is asked for in fp32, it is not rounded to
a half type before it is added to what other micro-batches gave.
"""

from __future__ import annotations

import torch

__all__ = ["add_product", "add_wide_product", "product", "total"]


def product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """left^T right, left [T, rows], right [T, columns]; on a device in ``dtype``, on a CPU, which
    knows no such product, in theirs."""
    if left.dtype == dtype or left.device.type == "cpu":
        return left.t() @ right
    return torch.mm(left.t(), right, out_dtype=dtype)


def add_product(sums: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left^T right to ``sums`` [rows, columns], which may be wider."""
    if left.dtype == sums.dtype:
        sums.addmm_(left.t(), right)
    elif left.device.type == "cpu":
        sums.add_(left.t() @ right)
    else:
        torch.addmm(sums, left.t(), right, out_dtype=sums.dtype, out=sums)


def add_wide_product(sums: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """The same without a rounding on a CPU either, for which the factors are widened there."""
    if left.device.type == "cpu":
        sums.addmm_(left.t().to(sums.dtype), right.to(sums.dtype))
    else:
        add_product(sums, left, right)


def total(x: torch.Tensor) -> torch.Tensor:
    """The sum over tokens [..] of x [T, ..], of half types in fp32."""
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))
