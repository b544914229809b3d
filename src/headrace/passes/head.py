"""Losses without logits: the head of a model of transformers and its loss, a chunk at a time.

The logits of a long sequence are larger than all that its layers keep: of a vocabulary of 128,256,
and in single precision as losses are computed, 1.5 MB a token forward and backward, against 4 KB
for each of the layers of 2,048 features that are computed again. Where a loss is all that is
wanted, the head makes it: it gives back the loss in the place of logits, and whatever stands
between the head and the model's result (wrappers, hooks of FSDP2) passes it on.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from headrace.errors import ModelError
from headrace.ops.fused import widened
from headrace.ops.loss import head_loss
from headrace.passes.labels import local_loss
from headrace.spec.model_shape import HEAD_CHUNK_TOKENS

__all__ = ["LossHead"]


class LossHead:
    """The head of ``model``, which makes the loss where one is expected. Raises ModelError for
    models without a linear head."""

    def __init__(self, model: Any) -> None:
        find = getattr(model, "get_output_embeddings", None)
        head = find() if callable(find) else None
        if not isinstance(head, torch.nn.Linear):
            raise ModelError(
                f"logits=False of {type(model).__name__}",
                got=f"{type(head).__name__} as its head",
                wanted="a linear one (get_output_embeddings of transformers)",
                hint="leave logits=False out, or sum the losses of chunks in its forward",
            )
        self._head = cast("Any", head)
        self._forward = head.forward
        self._labels: torch.Tensor | None = None
        self._targets: int | None = None
        self._made: torch.Tensor | None = None
        self._trusted = False
        self._head.forward = self._instead

    def remove(self) -> None:
        """Leave the model as it was."""
        self._head.forward = self._forward

    def expect(self, labels: torch.Tensor | None, targets: int | None) -> None:
        """Make the loss of ``labels`` [b, s_r] in the next forward; logits where they are None."""
        self._labels, self._targets, self._made = labels, targets, None

    def take(self, logits: torch.Tensor) -> torch.Tensor:
        """The loss that stands in the place of ``logits``. Raises ModelError where the model did
        something to them."""
        loss, made = logits.flatten()[0], self._made
        self._labels = self._made = None
        if not self._trusted and not isinstance(loss, FakeTensor):
            if made is None or float(loss.detach()) != float(made):
                raise ModelError(
                    "logits=False",
                    got="logits that the model changes after its head",
                    wanted="those of its head",
                    hint="leave it out",
                )
            self._trusted = True
        return loss

    @torch.compiler.disable
    def _instead(self, x: torch.Tensor) -> torch.Tensor:
        """x [b, s_r, h] to logits [b, s_r, V], or to the loss [b, s_r, 1] everywhere."""
        if self._labels is None:
            return self._forward(x)
        weight, bias = self._head.weight, self._head.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
        flat, labels = x.flatten(0, -2), self._labels.flatten()
        if torch.is_grad_enabled():
            scale = 1 / max(1, self._targets or 0)
            loss = _HeadLoss.apply(flat, weight, bias, labels, scale)
        else:
            loss = torch.stack(
                [
                    local_loss(torch.nn.functional.linear(part, weight, bias), own, self._targets)
                    for part, own in zip(
                        flat.split(HEAD_CHUNK_TOKENS), labels.split(HEAD_CHUNK_TOKENS), strict=True
                    )
                ]
            ).sum()
        self._made = loss.detach()
        return loss.expand(*x.shape[:-1], 1)


class _HeadLoss(torch.autograd.Function):
    """The loss with its gradients, which are made in the same pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        own, added = _Gradient(weight), None if bias is None else _Gradient(bias)
        loss, dx = head_loss(x, labels, own, scale, HEAD_CHUNK_TOKENS, added)
        ctx.save_for_backward(dx, own.grad, None if added is None else added.grad)
        return loss.to(torch.promote_types(x.dtype, torch.float32))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = [None if x is None else (x * grad).to(x.dtype) for x in ctx.saved_tensors]
        return *grads, None, None


class _Gradient:
    """A weight whose gradient is kept aside."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight.detach()
        self.grad = torch.empty(0)

    def rows(self) -> torch.Tensor:
        return self._weight

    def sums(self) -> torch.Tensor:
        return torch.zeros_like(self._weight, dtype=widened(self._weight[:0]).dtype)

    def add(self, grad: torch.Tensor) -> None:
        self.grad = grad.to(self._weight.dtype)

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.add(left.t() @ right)
