"""How a user's model holds its weights, and what follows for plans and gradients.

replicated  every rank has all weights, alone or under DDP: groups run whatever they have, and
            gradients are added up once at the end of the step (plans are ``free``)
sharded     FSDP2 gathers weights from all ranks at every layer and scatters gradients over them:
            all ranks run as many micro-batches as any other (plans are ``lockstep``)
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from headrace.adopt.gradients import add_up
from headrace.errors import ModelError
from headrace.spec.plan import Semantics

__all__ = ["HeldWeights", "bytes_now", "state_bytes"]

_STATES = {"SGD": 0, "Adagrad": 1, "RMSprop": 1, "Adam": 2, "AdamW": 2, "RAdam": 2, "Adamax": 2}
"""Tensors of a parameter's size that optimizers keep, by the names of their classes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldWeights:
    """The weights of ``model``, which may be wrapped; ``inner`` is the user's own module."""

    model: torch.nn.Module
    inner: torch.nn.Module
    ranks: int

    @classmethod
    def of(cls, model: torch.nn.Module, ranks: int) -> HeldWeights:
        """Find out how a model's weights are held. Raises ModelError for FSDP1."""
        for module in model.modules():
            if isinstance(module, Fsdp1):
                raise ModelError(
                    "model under FullyShardedDataParallel",
                    got="FSDP1",
                    wanted="fully_shard (FSDP2), DDP, or no wrapper",
                )
        own = model.module if isinstance(model, DistributedDataParallel) else model
        return cls(model=model, inner=own, ranks=ranks)

    @property
    def sharded(self) -> bool:
        """Whether the weights are sharded by FSDP2."""
        return isinstance(self.model, FSDPModule)

    @property
    def semantics(self) -> Semantics:
        """The kind of plan that this model can run."""
        return "lockstep" if self.sharded else "free"

    def step(self) -> AbstractContextManager[Any]:
        """A context around the micro-batches of a step, in which DDP does not synchronize
        gradients."""
        if isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        return nullcontext()

    def shard_again(self) -> None:
        """Drop weights that FSDP2 has gathered: it keeps those of the outermost module after a
        forward without a backward."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def add_up(self) -> None:
        """Sum gradients over all ranks, unless FSDP2 has done so. Collective."""
        if not self.sharded and self.ranks > 1:
            add_up(self.trained)

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """Parameters of the model that require gradients."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def norm(self) -> torch.Tensor:
        """The norm of the full gradient, [], the same on all ranks."""
        gradients = [p.grad for p in self.trained if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def scale_down(self, norm: torch.Tensor, most: float) -> None:
        """Clip the gradient, whose norm is ``norm``, to a norm of at most ``most``."""
        torch.nn.utils.clip_grads_with_norm_(self.trained, most, norm)


def bytes_now(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes on this rank of weights, existing gradients and optimizer state."""
    parameters = list(model.parameters())
    grads = [p.grad for p in parameters if p.grad is not None]
    states = [x for s in optimizer.state.values() for x in s.values() if torch.is_tensor(x)]
    return sum(_local(x).nbytes for x in (*parameters, *model.buffers(), *grads, *states))


def state_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes that this rank always holds: weights, gradients and optimizer state; where there is no
    state yet, what the first step will add."""
    absent = sum(_local(p).nbytes for p in model.parameters() if p.requires_grad and p.grad is None)
    held = bytes_now(model, optimizer) + absent
    if optimizer.state:
        return held
    usual = _STATES.get(type(optimizer).__name__, 2)
    usual += any(group.get("momentum") for group in optimizer.param_groups)
    return held + usual * sum(_local(p).nbytes for p in model.parameters() if p.requires_grad)


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
