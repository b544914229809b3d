"""Whether anything but the backwards of micro-batches writes to the gradients of a step.

A loop that leaves a line such as ``clip_grad_norm_`` or ``zero_grad()`` beside ``micro.backward``
would change sums that are not complete: other micro-batches and other ranks still add to them. So
where a gradient is and how often it was written to is noted after each backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch.distributed.tensor import DTensor

from headrace.adopt.gradients import written
from headrace.errors import HeadraceError

__all__ = ["KeptGradients"]

_FEW, _ELEMENTS = 8, 64
"""About so many sharded gradients are kept, and of each so many elements at most."""

_Written: TypeAlias = tuple[int, int] | None
"""Where the data of a gradient is and how often it was written to; None for no gradient."""


class KeptGradients:
    """The gradients of a step, as its last backward has left them."""

    def __init__(self) -> None:
        """No gradient is noted yet."""
        self._noted = list[tuple[torch.nn.Parameter, _Written]]()
        self._changed = 0  # parameters whose gradients were changed in this step
        # Of a few shards the first bytes as noted, and whether such bytes were changed, []: on the
        # device, which is waited for at the end of the step alone.
        self._shards = list[tuple[torch.nn.Parameter, torch.Tensor]]()
        self._shards_differ: torch.Tensor | None = None
        self._begun = False

    def begin(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Note the gradients as a step begins: zeros, or none."""
        self._changed, self._shards_differ = 0, None
        self.note(parameters)
        self._begun = False

    def note(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Note the gradients that a backward has just added to."""
        # The parameters are kept: those of a model that FSDP2 has gathered are other tensors.
        self._noted = [(p, _written(p.grad)) for p in parameters]
        self._begun = True
        # Not all writes to shards are counted.
        sharded = [p for p, _ in self._noted if isinstance(p.grad, DTensor)]
        every = max(1, len(sharded) // _FEW)
        self._shards = [(p, _bytes(p.grad).clone()) for p in sharded[::every]]

    def look(self) -> None:
        """Look whether gradients were changed since they were noted. Waits for the device where a
        gradient has come before the first backward."""
        changed = [(p, written) for p, written in self._noted if _written(p.grad) != written]
        if all(self._was_empty(written) and _is_empty(p.grad) for p, written in changed):
            changed.clear()
        self._changed = max(self._changed, len(changed))
        for p, before in self._shards if self._begun and not changed else ():
            differs = (_bytes(p.grad) != before).any()
            self._shards_differ = (
                differs if self._shards_differ is None else self._shards_differ | differs
            )

    def error(self) -> HeadraceError | None:
        """The error for gradients that were changed within this step by anything but backwards of
        micro-batches; None where there are none. Waits for the device where they are sharded."""
        if not self._changed and (self._shards_differ is None or not bool(self._shards_differ)):
            return None
        return HeadraceError(
            "gradients within a step",
            got="a change by the loop beside micro.backward",
            wanted="none: other micro-batches and ranks still add to them",
            hint="leave zero_grad() out and clip by hr.attach(clip=...); with update=False the "
            "loop may change gradients after the last micro-batch. Give all parts of a loss to "
            "one micro.backward",
        )

    def _was_empty(self, written: _Written) -> bool:
        """Whether a gradient that was noted was missing, or zeros as a step begins."""
        return written is None or not self._begun


def _written(gradient: torch.Tensor | None) -> _Written:
    """Return where a gradient is and how often it was written to."""
    return None if gradient is None else written(gradient)


def _bytes(gradient: torch.Tensor | None) -> torch.Tensor:
    """The first bytes of this rank's shard of a gradient; none where there is no gradient."""
    if not isinstance(gradient, DTensor):
        return torch.empty(0, dtype=torch.uint8)
    local = gradient._local_tensor  # noqa: SLF001
    return local.reshape(-1)[:_ELEMENTS].view(torch.uint8)


def _is_empty(gradient: torch.Tensor | None) -> bool:
    """Whether there is no gradient, or one of zeros alone."""
    return gradient is None or not bool(gradient.any())
