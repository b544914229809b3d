"""Linear maps and the embedding over weights that may be spread over a group.

Shape legend: T tokens, I and O features of input and output, V words, h features of a word.

[Note: sources] A method does not hold weights; it asks a ``WeightSource`` for the rows when it
needs them and hands gradients back. A source that holds all rows answers at once; one that holds a
shard gathers on each request and reduce-scatters each gradient, so that neither direction keeps a
gathered matrix alive between forward and backward.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from headrace.ops.norm import Norm

__all__ = [
    "WeightSource",
    "add_product",
    "add_wide_product",
    "embed",
    "linear",
    "linear_inputs",
    "normed_linear",
    "product",
    "total",
]


def product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """left^T right, left [T, rows], right [T, columns]: in ``dtype`` on a device; on a CPU, which
    has no such mixed product, in the type of the factors."""
    if left.dtype == dtype or left.device.type == "cpu":
        return left.t() @ right
    return torch.mm(left.t(), right, out_dtype=dtype)


def add_product(sums: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left^T right to ``sums`` [rows, columns] in place; ``left`` [T, rows] and ``right``
    [T, columns] may be of a narrower type. A CPU then rounds the product to that type first."""
    if left.dtype == sums.dtype:
        sums.addmm_(left.t(), right)
    elif left.device.type == "cpu":
        sums.add_(left.t() @ right)
    else:
        torch.addmm(sums, left.t(), right, out_dtype=sums.dtype, out=sums)


def add_wide_product(sums: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """As :func:`add_product`, but the product is not rounded to the type of its factors on a CPU
    either: the factors are widened first."""
    if left.device.type == "cpu":
        sums.addmm_(left.t().to(sums.dtype), right.to(sums.dtype))
    else:
        add_product(sums, left, right)


def total(x: torch.Tensor) -> torch.Tensor:
    """The sum over tokens [..] of x [T, ..], of half types in fp32."""
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))


class WeightSource(Protocol):
    """One weight of a layer, whose rows may be held by other ranks."""

    def rows(self) -> torch.Tensor:
        """All rows of the weight; may communicate."""

    def sums(self) -> torch.Tensor:
        """A tensor of all rows, in at least fp32, for a caller to add partial gradients to and then
        give to :meth:`add`: zeros, or the sum of gradients itself where this rank holds all of
        it."""

    def add(self, grad: torch.Tensor) -> None:
        """Add a partial gradient of all rows, this rank's part of a sum; may communicate."""

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add the partial gradient left^T right, left [T, rows], right [T, columns]."""


def linear(x: torch.Tensor, weight: WeightSource, bias: WeightSource | None = None) -> torch.Tensor:
    """y = x W^T + b, W's rows being output features.

    x         [T, I]
    weight    [O, I], bias [O]
    returns   [T, O]
    backward  dx = dy W;  dW += dy^T x;  db += sum_T dy
    """
    return _Linear.apply(x, weight, bias, True)  # type: ignore[no-any-return]


def normed_linear(
    x: torch.Tensor, norm: Norm, weight: WeightSource, bias: WeightSource | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """y = norm(x) W^T + b, W's rows being output features; and x, for a residual sum.

    x         [T, I]
    weight    [O, I], bias [O]
    returns   [T, O], x [T, I]
    keeps     x, not norm(x)
    backward  dnorm(x) = dy W;  dW += dy^T norm(x);  db += sum_T dy;  what comes back to the
              second result is added to dx where the norm makes that
    """
    return _NormedLinear.apply(x, norm, weight, bias)  # type: ignore[no-any-return]


def linear_inputs(
    x: torch.Tensor, weight: WeightSource, bias: WeightSource | None = None
) -> torch.Tensor:
    """y = x W + b, W's rows being input features.

    x         [T, I]
    weight    [I, O], bias [O]
    returns   [T, O]
    backward  dx = dy W^T;  dW += x^T dy;  db += sum_T dy
    """
    return _Linear.apply(x, weight, bias, False)  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    """Autograd of :func:`linear` and :func:`linear_inputs`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: WeightSource,
        bias: WeightSource | None,
        rows_are_outputs: bool,
    ) -> torch.Tensor:
        """x W^T + b [T, O] of x [T, I] and W [O, I] where ``rows_are_outputs``, else x W + b of W
        [I, O]."""
        ctx.save_for_backward(x)
        ctx.rest = (weight, bias, rows_are_outputs)
        matrix = weight.rows()
        return _product(x, matrix.t() if rows_are_outputs else matrix, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """The gradient of x; those of weight and bias are added to their sums."""
        (x,) = ctx.saved_tensors
        weight, bias, rows_are_outputs = ctx.rest
        matrix = weight.rows()
        dx = grad @ (matrix if rows_are_outputs else matrix.t())
        del matrix
        weight.add_product(*((grad, x) if rows_are_outputs else (x, grad)))
        if bias is not None:
            bias.add(total(grad))
        return dx, None, None, None


class _NormedLinear(torch.autograd.Function):
    """Autograd of :func:`normed_linear`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, norm: Norm, weight: WeightSource, bias: WeightSource | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """norm(x) W^T + b [T, O], keeping x and not its norm; and x, for a residual sum."""
        y, stats = norm.forward(x)
        ctx.save_for_backward(x, *stats)
        ctx.rest = (norm, weight, bias)
        ctx.set_materialize_grads(False)
        return _product(y, weight.rows().t(), bias), x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, passed: torch.Tensor | None) -> Any:  # type: ignore[override]
        """The gradient of x, with ``passed``, that of the residual sum, added; those of weight and
        bias are added to their sums."""
        if grad is None:
            return passed, None, None, None
        x, *stats = ctx.saved_tensors
        norm, weight, bias = ctx.rest
        dx = grad @ weight.rows()
        y = norm.again(x, tuple(stats))
        weight.add_product(grad, y)
        del y
        if bias is not None:
            bias.add(total(grad))
        return norm.backward(dx, x, tuple(stats), passed), None, None, None


def _product(x: torch.Tensor, matrix: torch.Tensor, bias: WeightSource | None) -> torch.Tensor:
    """x [T, I] times matrix [I, O], plus the bias [O] where there is one."""
    return x @ matrix if bias is None else torch.addmm(bias.rows(), x, matrix)


def embed(ids: torch.Tensor, weight: WeightSource, anchor: torch.Tensor) -> torch.Tensor:
    """Rows of an embedding table.

        ids       [T]        int64
        weight    [V, h]
        returns   [T, h]
        backward  dW[ids] += dy

    ``anchor`` is any tensor that requires grad: ids do not, and every member of a group must run
    the backward, tokens or not.
    """
    return _Embed.apply(anchor, ids, weight)  # type: ignore[no-any-return]


class _Embed(torch.autograd.Function):
    """Autograd of :func:`embed`."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, ids: torch.Tensor, weight: WeightSource
    ) -> torch.Tensor:
        """The rows [T, h] of the words ``ids`` [T]; ``anchor`` makes autograd call the
        backward."""
        table = weight.rows()
        ctx.save_for_backward(ids)
        ctx.rest = (weight, table.shape, anchor)
        return table.index_select(0, ids)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """Add the gradients of equal ids up, in at least fp32, into that of the table [V, h]."""
        (ids,) = ctx.saved_tensors
        weight, shape, anchor = ctx.rest
        # An id may occur often: in bf16 a sum of equal rows stops growing at 256 of them.
        wide = torch.promote_types(grad.dtype, torch.float32)
        weight.add(grad.new_zeros(shape, dtype=wide).index_add_(0, ids, grad.to(wide)))
        return torch.zeros_like(anchor), None, None
