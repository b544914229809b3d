"""Gradients of adopted models: sums over all ranks, whatever wraps the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from headrace.comm.waiting import Transfer

__all__ = ["add_plainly", "add_up", "gradient_error", "is_wrapped", "summed_loss"]

_BUCKET_BYTES = 32 << 20
_FLOOR = 1e-3
"""Of the largest gradient: below it rounding may be all that a tensor holds."""
_WRAPPERS = (DistributedDataParallel, FSDPModule)


def is_wrapped(model: torch.nn.Module) -> bool:
    """Whether DDP or FSDP2 adds up the gradients of a model."""
    return isinstance(model, _WRAPPERS)


def summed_loss(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    """The loss to start the backward from so that gradients are sums over ranks: DDP divides its
    sums by the number of ranks."""
    averaged = isinstance(model, DistributedDataParallel)
    return loss * dist.get_world_size() if averaged else loss


def add_plainly(model: torch.nn.Module) -> None:
    """Have FSDP2 add up gradients without dividing them: a factor that is no power of two, even if
    it is undone before, rounds what models compute in single precision."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def add_up(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Sum the gradients of all ranks in place; a parameter that none of them used stays without
    one, so that optimizers pass it over as they would in one process. Collective."""
    for bucket in _buckets(p for p in parameters if p.requires_grad):
        used = bucket[0].new_tensor([float(p.grad is not None) for p in bucket])
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([*(grad.reshape(-1) for grad in grads), used])
        Transfer(dist.all_reduce(flat, async_op=True), None, flat).wait()
        *parts, used = flat.split([*(p.numel() for p in bucket), len(bucket)])
        for parameter, grad, part, some in zip(bucket, grads, parts, used.tolist(), strict=True):
            if some:
                parameter.grad = grad.copy_(part.view_as(grad))


def gradient_error(
    found: Iterable[torch.Tensor | None], wanted: Iterable[torch.Tensor | None]
) -> float:
    """The largest relative error of gradients, tensor by tensor: relative to the largest value of
    each, at least ``_FLOOR`` of the largest of all, so that no tensor hides the error of a smaller
    one. A gradient that is missing counts as zeros; one that is not finite gives infinity."""
    pairs = list(zip(found, wanted, strict=True))
    floor = _FLOOR * max((_largest(w) for _, w in pairs), default=0.0)
    errors = [_largest(_difference(f, w)) / (max(_largest(w), floor) or 1.0) for f, w in pairs]
    return max(errors, default=0.0)


def _difference(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return b if a is None else a if b is None else a - b


def _largest(x: torch.Tensor | None) -> float:
    """The largest absolute value, infinity where one is not finite."""
    if x is None or not x.numel():
        return 0.0
    value = float(x.detach().abs().max())
    return value if math.isfinite(value) else math.inf


def _buckets(parameters: Iterable[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Parameters of one type and device that are added up at once."""
    bucket, held = list[torch.nn.Parameter](), 0
    for parameter in parameters:
        other = bool(bucket) and _kind(bucket[0]) != _kind(parameter)
        if bucket and (other or held + parameter.nbytes > _BUCKET_BYTES):
            yield bucket
            bucket, held = list[torch.nn.Parameter](), 0
        bucket.append(parameter)
        held += parameter.nbytes
    if bucket:
        yield bucket


def _kind(parameter: torch.nn.Parameter) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device
