"""A native model as the engine drives it: the executor runs the program of a plan by itself."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from headrace.native.executor import Executor, StepResult
from headrace.native.machine import give_back_memory
from headrace.native.optimizers import Schedule
from headrace.spec.lengths import Lengths
from headrace.spec.measurement import Row
from headrace.spec.plan import Plan

__all__ = ["NativeRunner", "TrainingBatch"]


class TrainingBatch(Protocol):
    """The sequences of one optimizer step, with their tokens."""

    @property
    def epoch(self) -> int:
        """The pass over the corpus that the batch belongs to."""
        ...

    @property
    def lengths(self) -> Lengths:
        """The tokens and ids of its sequences."""
        ...

    @property
    def tokens(self) -> tuple[np.ndarray, ...]:
        """The token numbers of each sequence, int32 [length]."""
        ...

    @property
    def masks(self) -> tuple[np.ndarray | None, ...]:
        """Which tokens of each sequence have a loss, bool [length], None where all have; an empty
        tuple where all tokens of the batch have one."""
        ...

    @property
    def state_after(self) -> Mapping[str, Any]:
        """The sampler's state once the batch is trained."""
        ...


@dataclass(slots=True, kw_only=True)
class NativeRunner:
    """Runs plans of a native model on this rank.

    Attributes:
        executor: Runs this rank's program of a plan, the update too.
        schedule: The learning rate of each step.
        peak_flops_per_s: Peak of one device; None leaves the utilisation out.
        expect: Called with the predicted seconds of each step that begins.
    """

    executor: Executor
    schedule: Schedule
    peak_flops_per_s: float | None = None
    expect: Callable[[float], object] = lambda predicted_s: None
    _result: StepResult | None = field(default=None, init=False)

    @property
    def action(self) -> str:
        """The program action that this rank is executing."""
        return self.executor.action

    def attempt(self, number: int, batch: TrainingBatch, plan: Plan) -> Iterator[None]:
        """Run the program of a plan, from the pulls to the update; yields nothing."""
        self._result = None
        self.expect(plan.predicted_s)
        rate = self.schedule.rate(number)
        self._result = self.executor.run(
            plan, batch.tokens, step=number, lr=rate, masks=batch.masks
        )
        yield from ()

    @property
    def targets(self) -> int:
        """0: the objective of the model counts tokens with a loss, not this runner."""
        return 0

    @property
    def own_loss(self) -> float:
        """The loss of the whole batch, which the update in the program has summed over ranks."""
        return 0.0 if self._result is None else self._result.loss

    def update(self, number: int, loss: float) -> tuple[float, float]:
        """The loss of the batch and the norm of its gradient. Updates nothing: the program has made
        the update, unless one of these is not finite."""
        assert self._result is not None, "the program has run"
        return self._result.loss, self._result.gradient_norm

    def rows(self) -> tuple[Row, ...]:
        """A row for each action of the program."""
        return () if self._result is None else self._result.rows

    def drop_attempt(self) -> None:
        """Free the working weights of a failed step and the cached memory of the device."""
        self.executor.storage.forget_layouts()
        gc.collect()  # a transfer kept by a reference cycle would wait in the old world
        give_back_memory(self.executor.groups.device)

    def abandon(self) -> None:
        """Do nothing: gradients of an unfinished step are not kept."""

    def bytes_now(self) -> int:
        """Bytes of master weights, optimizer state and gradient sums on this rank."""
        return self.executor.storage.bytes_now()

    def metrics(self, number: int, plan: Plan, step_s: float | None) -> dict[str, Any]:
        """Metrics of a step: its learning rate, and the model FLOPs utilisation (MFU)."""
        found: dict[str, Any] = {"lr": self.schedule.rate(number)}
        if step_s is not None:
            found["mfu"] = self._utilisation(plan, step_s)
        return found

    def _utilisation(self, plan: Plan, step_s: float) -> float | None:
        """Model FLOP/s of a step as a fraction of the peak of all devices; None where the peak is
        not known."""
        if not self.peak_flops_per_s:
            return None
        architecture = self.executor.storage.architecture
        flops = sum(n * architecture.flops_per_token(n) for n in plan.lengths.tokens)
        return flops / step_s / (self.peak_flops_per_s * self.executor.groups.ranks)
