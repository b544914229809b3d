"""Optimizers of stored rows.

Each rank updates its rows of every weight, whatever other rows do: so any *elementwise* optimizer
serves, whose update of an element depends on this element's gradients, state and weight alone.
Those that look at whole matrices (Muon, Adafactor, Shampoo) or at all parameters at once (L-BFGS)
would see pieces and are not offered; nor those with state beside steps and tensors of a weight's
shape (NAdam's product, Rprop's steps), which a checkpoint by rows would not hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from headrace.errors import SpecError, did_you_mean

__all__ = [
    "AdamW",
    "ELEMENTWISE",
    "Elementwise",
    "OptimizerOptions",
    "Schedule",
    "state_names",
]

Groups = list[dict[str, Any]]
"""Parameter groups, as torch's optimizers take them."""


class OptimizerOptions(Protocol):
    """What the storage needs of an optimizer: how to make it, its weight decay, and the norm to
    which gradients are clipped."""

    @property
    def decay(self) -> float:
        """Weight decay of matrices; other weights do not decay."""

    @property
    def clip(self) -> float:
        """Largest norm of the whole gradient; 0 for no clipping."""

    def make(self, groups: Groups) -> torch.optim.Optimizer:
        """Make the optimizer of parameter groups, each of which has its own ``weight_decay``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """Options of AdamW; ``decay`` applies to matrices only."""

    lr: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    decay: float = 0.1
    clip: float = 1.0

    def make(self, groups: Groups) -> torch.optim.Optimizer:
        """torch's AdamW; on a device the fused one, which allocates no temporary tensors."""
        on_gpu = all(x.is_cuda for group in groups for x in group["params"])
        return torch.optim.AdamW(
            groups, lr=self.lr, betas=(self.beta1, self.beta2), eps=self.eps, fused=on_gpu or None
        )


ELEMENTWISE: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "radam": torch.optim.RAdam,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}
"""torch's elementwise optimizers by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elementwise:
    """Options of any of torch's elementwise optimizers, by its ``name`` in :data:`ELEMENTWISE`;
    ``options`` are further keyword arguments of torch's class. Raises SpecError for an unknown
    name, for ``options`` that are fields here, and, in :meth:`make`, for ``options`` that the
    optimizer does not take."""

    name: str
    lr: float = 1e-3
    decay: float = 0.0
    clip: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise SpecError for an optimizer that is not elementwise, and for options that have keys
        of their own."""
        if self.name not in ELEMENTWISE:
            hint = did_you_mean(self.name, ELEMENTWISE) or f"known are {', '.join(ELEMENTWISE)}"
            raise SpecError("optimizer", got=repr(self.name), wanted="elementwise", hint=hint)
        for given, own in (("lr", "lr"), ("weight_decay", "decay")):
            if given in self.options:
                wanted = f"optimizer.{own}, which would overrule it"
                raise SpecError(f"options of {self.name}", got=given, wanted=wanted)

    def make(self, groups: Groups) -> torch.optim.Optimizer:
        """torch's optimizer for these parameter groups. Raises SpecError where it does not take
        the options."""
        try:
            return ELEMENTWISE[self.name](groups, lr=self.lr, **self.options)
        except (TypeError, ValueError) as error:
            raise SpecError(f"options of {self.name}", got=dict(self.options), hint=str(error))


def state_names(options: OptimizerOptions, dtype: torch.dtype) -> tuple[str, ...]:
    """The names of the state tensors that an optimizer keeps for each element of a weight (AdamW:
    exp_avg, exp_avg_sq). They are found by a trial: one step of a weight of two elements."""
    probe = torch.zeros(2, dtype=dtype)
    optimizer = options.make([{"params": [probe], "weight_decay": 0.0}])
    probe.grad = torch.ones_like(probe)
    optimizer.step()
    return tuple(_elementwise_names(optimizer.state[probe], probe))


def _elementwise_names(state: Mapping[str, Any], weight: torch.Tensor) -> Sequence[str]:
    """The names of the entries of ``state``, which an optimizer keeps for ``weight``, that are
    tensors of the weight's shape: these are sharded by rows as the weight is."""
    return [
        name
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.shape == weight.shape
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Linear warm-up over ``warmup_steps``, then a cosine from ``lr`` to ``floor * lr`` at
    ``steps``."""

    lr: float
    steps: int
    warmup_steps: int = 0
    floor: float = 0.1

    def __post_init__(self) -> None:
        """Raise SpecError for a schedule without steps, or of a negative warm-up."""
        if self.steps < 1 or self.warmup_steps < 0:
            raise SpecError("schedule", got=f"{self.steps} steps", wanted=">= 1, warm-up >= 0")

    def rate(self, step: int) -> float:
        """The learning rate of step ``step`` (the first is 0)."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        # half a cosine: from 1 at the end of the warm-up to 0 at the last step
        span = max(1, self.steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        return self.lr * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress)))
