"""The first batch on all ranks against the plain model on one: losses, and norms of gradients.

Probes look at a model on parts of its tokens or places, in one process. This looks at what ranks do
together, kernels, exchanges and sums, with the batch as it is, and takes a forward and a backward
of the whole batch on every rank. Where memory does not suffice for that it is left out, and said.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from headrace.adopt.gradients import is_wrapped
from headrace.adopt.held_still import held_still
from headrace.comm.collectives import gather_bytes
from headrace.comm.mesh import Groups
from headrace.errors import ModelError

__all__ = ["FirstStep", "compare_first_step", "ranks_that_add_up"]

FirstStep = Literal["first step"]

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-3}
"""Relative differences of norms that sums in another order may have; 5 % in half types."""
_FLOOR = 1e-3
"""Of the largest norm: below it rounding may be all that a tensor holds."""

Numbers = tuple[float, list[float]]
"""A loss, and the norm of each parameter's gradient."""


def compare_first_step(
    model: torch.nn.Module,
    groups: Groups | None,
    *,
    spread: Callable[[], torch.Tensor],
    plain: Callable[[], torch.Tensor],
) -> None:
    """Compare a model that is spread with the plain one. ``spread()`` runs forward and backward and
    gives the loss of all ranks; ``plain()`` those of the whole batch on this rank. Gradients, what
    is drawn next and all that a forward leaves are as before afterwards. Collective.

    Raises:
        ModelError: On every rank where any differs.
    """
    first = next(p for p in model.parameters() if p.requires_grad)
    with _aside(model), held_still(model, training=model.training):
        found = _numbers(model, spread)
        fits, wanted = True, found
        try:
            wanted = _numbers(model, plain)
        except (torch.OutOfMemoryError, MemoryError):
            fits = False
    mine = json.dumps([fits, _difference(found, wanted, first.dtype)])
    said = [mine.encode()]
    if groups is not None:
        said = gather_bytes(said[0], groups.world)
    told = [json.loads(text) for text in said]
    if not all(fit for fit, _ in told):
        text = "the first step is not compared with one process, which needs more memory"
        warnings.warn(text, stacklevel=4)
        return
    for rank, (_, wrong) in enumerate(told):
        if wrong:
            raise ModelError(
                f"first step of {type(model).__name__} on rank {rank}",
                got=wrong,
                wanted="those of one process",
                hint="headrace verify compares a small model of its type; without check= this is "
                "left out",
            )


def _difference(found: Numbers, wanted: Numbers, dtype: torch.dtype) -> str:
    """What differs; empty where nothing does."""
    limit = _TOLERANCES.get(dtype, 5e-2)
    (loss, norms), (other, others) = found, wanted
    if not abs(loss - other) <= limit * abs(other):
        return f"a loss of {loss:.6g}, not {other:.6g}"
    largest = max(others, default=0.0)
    for at, (mine, theirs) in enumerate(zip(norms, others, strict=True)):
        if not abs(mine - theirs) <= limit * max(theirs, _FLOOR * largest):
            return f"a gradient of norm {mine:.6g} of parameter {at}, not {theirs:.6g}"
    return ""


def _numbers(model: torch.nn.Module, run: Callable[[], torch.Tensor]) -> Numbers:
    """The loss of ``run``, and the norm of each parameter's gradient after it."""
    for parameter in model.parameters():
        parameter.grad = None
    loss = float(run())
    return loss, [_norm(p.grad) for p in model.parameters()]


def _norm(gradient: torch.Tensor | None) -> float:
    """The norm of a whole gradient, put together from its shards where it has some; 0 for None and
    infinity for what is not finite."""
    if gradient is None:
        return 0.0
    whole = getattr(gradient, "full_tensor", lambda: gradient)()
    value = float(torch.linalg.vector_norm(whole.detach().double()))
    return value if math.isfinite(value) else math.inf


@contextmanager
def _aside(model: torch.nn.Module) -> Iterator[None]:
    """Leave gradients as they were before the block."""
    kept = [p.grad for p in model.parameters()]
    try:
        yield
    finally:
        # FSDP2's parameters may be others once a backward is done.
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            parameter.grad = gradient


def ranks_that_add_up(model: torch.nn.Module, groups: Groups | None) -> int:
    """How many equal gradients a wrapper adds up in the backward of a plain model: FSDP2's sums, as
    they are told to be; DDP takes means."""
    if groups is None or not is_wrapped(model) or hasattr(model, "module"):
        return 1
    return groups.ranks
