"""What a loop is refused for before its first step, and what all ranks must have alike.

Ranks that begin with different weights or learning rates would train on without an error, each its
own model. So would a model whose optimizer has the parameters of another one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from headrace.errors import ModelError, SpecError

__all__ = [
    "optimizer_text",
    "require_own",
    "require_trainable",
]


def require_trainable(
    model: torch.nn.Module, optimizer: Any, scheduler: Any, *, clip: float | None, update: bool
) -> None:
    """Raise SpecError for an optimizer, scheduler or options that plans cannot drive, and
    ModelError for a model in evaluation mode, or one that lacks parameters of the optimizer.
    ``clip`` and ``update`` are those of :func:`headrace.attach`."""
    if not update and (scheduler is not None or clip is not None):
        raise SpecError(
            "hr.attach(update=False)",
            got="a scheduler" if clip is None else "clip=",
            wanted="neither: the loop clips, and takes the steps",
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        given = type(optimizer).__name__
        raise SpecError("optimizer", got=given, wanted="an optimizer of torch.optim")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise SpecError(
            "optimizer",
            got="LBFGS, which computes the loss again",
            wanted="one whose step() takes no closure",
        )
    accumulated = getattr(getattr(optimizer, "gradient_state", None), "num_steps", 1)
    if update and accumulated > 1:
        raise SpecError(
            "optimizer of Accelerate",
            got=f"gradient_accumulation_steps={accumulated}, by which it leaves steps out",
            wanted="1: a plan has as many micro-batches as it needs, and one step",
            hint="Accelerator(gradient_accumulation_steps=1), and no accelerator.accumulate(model)",
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise SpecError(
            "scheduler",
            got="ReduceLROnPlateau, which takes a step by a metric",
            wanted="one that takes a step after each of the optimizer's, or none",
            hint="leave it out, and call its step(metric) where you evaluate, on all ranks alike",
        )
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise SpecError("scheduler", got=type(scheduler).__name__, wanted="something with step()")
    if _sets_other_rates(scheduler, optimizer):
        raise SpecError(
            "scheduler",
            got="one of another optimizer",
            wanted="one made of the optimizer that hr.attach is given",
        )
    if clip is not None and not clip > 0:
        raise SpecError("clip", got=clip, wanted="a norm above 0")
    if not model.training:
        raise ModelError(
            "model",
            got="evaluation mode",
            wanted="training mode",
            hint="call model.train() before hr.attach",
        )
    require_own(model, optimizer)


def _sets_other_rates(scheduler: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scheduler says that it is of another optimizer. One of the two optimizers may wrap
    the other: then they have the same groups, in which rates are set."""
    scheduler = getattr(scheduler, "scheduler", scheduler)  # Accelerate may have wrapped it
    scheduled = getattr(scheduler, "optimizer", None)
    if not isinstance(scheduled, torch.optim.Optimizer):
        return False
    return list(map(id, scheduled.param_groups)) != list(map(id, optimizer.param_groups))


def require_own(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ModelError for parameters of the optimizer that are not the model's: their gradients
    would not be summed over ranks."""
    of_model = {id(p) for p in model.parameters()}
    optimized = [p for group in optimizer.param_groups for p in group["params"]]
    others = [p for p in optimized if id(p) not in of_model]
    if others:
        raise ModelError(
            "parameters of the optimizer",
            got=f"{len(others)} that the model has not, the first of shape {list(others[0].shape)}",
            wanted="parameters of the model",
            hint="make what is learnt beside the model a parameter of it, so that its gradient is "
            "summed over ranks; make the optimizer after the model is wrapped",
        )


def optimizer_text(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer's class, and the options and parameter shapes of its groups, as JSON: a text to
    compare between ranks."""
    return json.dumps(
        [type(optimizer).__name__, *(_options(group) for group in optimizer.param_groups)]
    )


def _options(group: Mapping[str, Any]) -> list[list[str]]:
    """The options of a parameter group as [name, value] by name, then the shapes of its
    parameters."""
    options = {k: v for k, v in group.items() if k != "params"}
    shapes = [list(p.shape) for p in group["params"]]
    return [
        *([k, repr(_plain_value(v))] for k, v in sorted(options.items())),
        ["params", str(shapes)],
    ]


def _plain_value(value: Any) -> Any:
    """The value of a tensor as a number or nested list; other values as they are. The text of a
    tensor would name its device, which may differ between ranks."""
    return value.tolist() if torch.is_tensor(value) else value
