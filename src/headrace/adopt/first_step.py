"""The first batch on all ranks against the plain model on one: losses, and norms of gradients.

Probes test a model on parts of its tokens or places, in one process. This test compares what ranks
do together, kernels, exchanges and sums, on the batch as it is; it costs a forward and a backward
of the whole batch on every rank. Where memory does not suffice for that, it is left out with a
warning.
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
"""The value of the option ``check`` that asks for this comparison."""

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-3}
"""Relative differences of norms that sums in another order may have, by the dtype of the weights;
5 % in half types."""
_FLOOR = 1e-3
"""The fraction of the largest gradient's norm below which a gradient may be rounding alone."""

Numbers = tuple[float, list[float]]
"""A loss, and the norm of each parameter's gradient."""


def compare_first_step(
    model: torch.nn.Module,
    groups: Groups | None,
    *,
    spread: Callable[[], torch.Tensor],
    plain: Callable[[], torch.Tensor],
) -> None:
    """Compare loss and gradients of a model that is spread with those of the plain one.

    ``spread()`` runs forward and backward on all ranks and returns the loss [] of all ranks
    together; ``plain()`` does the same for the whole batch on this rank alone. Afterwards the
    gradients, the states of random generators and all that a forward changes in the model are as
    before. Warns and returns where any rank lacks memory for the plain model. Collective.

    Raises:
        ModelError: On every rank where any rank's numbers differ.
    """
    first_trained = next(p for p in model.parameters() if p.requires_grad)
    with _gradients_kept(model), held_still(model, training=model.training):
        found = _loss_and_norms(model, spread)
        fits, wanted = True, found
        try:
            wanted = _loss_and_norms(model, plain)
        except (torch.OutOfMemoryError, MemoryError):
            fits = False
    own = json.dumps([fits, _difference(found, wanted, first_trained.dtype)]).encode()
    of_all_ranks = [own] if groups is None else gather_bytes(own, groups.world)
    # (whether the plain model fitted in memory, what differs) of each rank.
    verdicts = [json.loads(text) for text in of_all_ranks]
    if not all(fitted for fitted, _ in verdicts):
        text = "the first step is not compared with one process, which needs more memory"
        warnings.warn(text, stacklevel=4)
        return
    for rank, (_, difference) in enumerate(verdicts):
        if difference:
            raise ModelError(
                f"first step of {type(model).__name__} on rank {rank}",
                got=difference,
                wanted="those of one process",
                hint="headrace verify compares a small model of its type; without check= this is "
                "left out",
            )


def _difference(found: Numbers, wanted: Numbers, dtype: torch.dtype) -> str:
    """The first difference between the numbers ``found`` and ``wanted``, as text for an error;
    empty where there is none. Tolerances are those of weights of ``dtype``."""
    limit = _TOLERANCES.get(dtype, 5e-2)
    (loss, norms), (wanted_loss, wanted_norms) = found, wanted
    # "not <=" counts NaN as different.
    if not abs(loss - wanted_loss) <= limit * abs(wanted_loss):
        return f"a loss of {loss:.6g}, not {wanted_loss:.6g}"
    largest = max(wanted_norms, default=0.0)
    for number, (norm, wanted_norm) in enumerate(zip(norms, wanted_norms, strict=True)):
        if not abs(norm - wanted_norm) <= limit * max(wanted_norm, _FLOOR * largest):
            return f"a gradient of norm {norm:.6g} of parameter {number}, not {wanted_norm:.6g}"
    return ""


def _loss_and_norms(model: torch.nn.Module, run: Callable[[], torch.Tensor]) -> Numbers:
    """(the loss that ``run`` returns, the norm of each parameter's gradient after it). Gradients
    are dropped before it runs."""
    for parameter in model.parameters():
        parameter.grad = None
    loss = float(run())
    return loss, [_norm(p.grad) for p in model.parameters()]


def _norm(gradient: torch.Tensor | None) -> float:
    """The 2-norm of a whole gradient, gathered from all ranks where it is sharded (collective);
    0 for None, and infinity where the norm is not finite."""
    if gradient is None:
        return 0.0
    whole = getattr(gradient, "full_tensor", lambda: gradient)()
    value = float(torch.linalg.vector_norm(whole.detach().double()))
    return value if math.isfinite(value) else math.inf


@contextmanager
def _gradients_kept(model: torch.nn.Module) -> Iterator[None]:
    """Context at whose end every parameter has the gradient that it had at its beginning, or
    none."""
    kept = [p.grad for p in model.parameters()]
    try:
        yield
    finally:
        # Listed anew: FSDP2 may have put other parameter objects in their place.
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            parameter.grad = gradient


def ranks_that_add_up(model: torch.nn.Module, groups: Groups | None) -> int:
    """By what factor the gradients of the plain model come out too large, when all ranks run its
    backward on the same batch: the number of ranks under FSDP2, which is told to sum them; 1 under
    DDP, which averages them, and without a wrapper."""
    if groups is None or not is_wrapped(model) or hasattr(model, "module"):  # DDP has a module
        return 1
    return groups.ranks
