"""What one step holds while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from headrace.errors import PlanMismatch
from headrace.layouts.transfer import Pending
from headrace.methods.weights import Weight
from headrace.runtime.micro_batch import MicroBatchRun
from headrace.runtime.spans import Spans
from headrace.runtime.storage import Working
from headrace.spec.plan import Plan
from headrace.spec.program import Message

__all__ = ["StepState"]


@dataclass(slots=True, kw_only=True)
class StepState:
    """The state of one step of a plan on one rank.

    ``arrived`` are the activations and ``returned`` the gradients that wait for their micro-batch;
    ``losses`` are this rank's, where they were computed: to look at one is to wait for it.
    """

    plan: Plan
    tokens: tuple[np.ndarray, ...]
    number: int
    lr: float
    working: Working
    spans: Spans
    pulls: dict[int, Pending] = field(default_factory=dict)
    pushes: dict[int, Pending] = field(default_factory=dict)
    runs: dict[int, MicroBatchRun] = field(default_factory=dict)
    arrived: dict[int, torch.Tensor] = field(default_factory=dict)
    returned: dict[int, torch.Tensor] = field(default_factory=dict)
    views: dict[int, dict[str, Weight]] = field(default_factory=dict)
    losses: list[torch.Tensor | float] = field(default_factory=list)
    loss: float = 0.0
    norm: float = 0.0

    def leaving(self, message: Message) -> torch.Tensor:
        """The activations or gradients of a message, which their micro-batch lets go of.

        Raises PlanMismatch when there are more or fewer rows than the program says.
        """
        run = self.runs[message.micro_batch]
        if message.what == "a":
            value, run.leaving = run.leaving, None
        else:
            value = self.runs.pop(message.micro_batch).returning
        assert value is not None, "the checker saw that it is there"
        if len(value) != message.rows:
            raise PlanMismatch(
                f"rows of micro-batch {message.micro_batch} for rank {message.peer}",
                got=len(value),
                wanted=message.rows,
            )
        return value

    def arrive(self, message: Message, value: torch.Tensor) -> None:
        """Keep what arrived for the micro-batch's next action."""
        waiting = self.arrived if message.what == "a" else self.returned
        waiting[message.micro_batch] = value
