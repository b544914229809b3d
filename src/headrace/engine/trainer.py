"""The trainer: one loop over batches, each planned for, executed, measured and written down."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from headrace.comm.collectives import gather_to_first
from headrace.comm.mesh import Groups
from headrace.engine.native_recovery import Recovery
from headrace.errors import HeadraceError
from headrace.native.executor import Executor, StepResult
from headrace.native.machine import peak_bytes, reset_peak_bytes
from headrace.native.optimizers import Schedule
from headrace.spec.lengths import Lengths
from headrace.spec.measurement import Timeline
from headrace.spec.plan import Plan
from headrace.spec.step import (
    Exhausted,
    Planned,
    RankTimes,
    Step,
    StepTimes,
    packed_rows,
    plan_metrics,
    rows_of_packed,
)

__all__ = ["Planner", "Trainer", "TrainingBatch", "told_to_first"]


class TrainingBatch(Protocol):
    """What the loop needs of a batch: its lengths, token ids, epoch, and the state after it."""

    @property
    def epoch(self) -> int:
        """The pass over the corpus that the batch belongs to."""

    @property
    def lengths(self) -> Lengths:
        """Tokens and ids of its sequences."""

    @property
    def tokens(self) -> tuple[np.ndarray, ...]:
        """Ids of each sequence, int32."""

    @property
    def state_after(self) -> Mapping[str, Any]:
        """The sampler's state once the batch is trained."""


class Planner(Protocol):
    """Whoever decides: given lengths, a plan; told what steps really took."""

    def plan(self, lengths: Lengths) -> Planned:
        """The plan of the next step, the same on every rank."""

    def replan(self, lengths: Lengths, failed: Plan, exhausted: Exhausted) -> Planned:
        """A thriftier plan of a batch whose plan ``failed`` ran out of memory, the same on every
        rank. Raises InfeasiblePlan when there is none."""

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """A step's seconds, of all ranks; told on the first one."""

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to plan alike, as JSON."""


@dataclass(slots=True, kw_only=True)
class Trainer:
    """Trains until ``steps`` are done.

    ``finished`` is called on every rank after each step (progress, journal, checkpoints);
    ``entered`` is told what is done between the actions of two steps.
    The rows of all ranks are gathered in the steps ``drawn``, the same on every rank.
    ``peak_flops_per_s`` of one device gives the utilisation; None leaves it out. With a
    ``recovery`` a step that runs out of memory is planned and taken again, which ``tell`` says.
    """

    executor: Executor
    groups: Groups
    planner: Planner
    schedule: Schedule
    device: str = "cpu"
    peak_flops_per_s: float | None = None
    finished: Callable[[Step, TrainingBatch], None] = lambda step, batch: None
    recovery: Recovery | None = None
    drawn: Container[int] = ()
    tell: Callable[[str], None] = lambda text: None
    entered: Callable[[str], None] = lambda action: None

    def train(self, batches: Iterator[TrainingBatch], first_step: int, steps: int) -> None:
        """Take the steps ``first_step`` to ``steps - 1``.

        Raises HeadraceError when the loss stops being finite: nothing of that step is written.
        """
        for number in range(first_step, steps):
            self.entered(f"reading and planning the batch of step {number}")
            asked_s = time.perf_counter()
            batch = next(batches)
            planned = self.planner.plan(batch.lengths)
            waited_s = time.perf_counter() - asked_s
            step = self._step(number, batch, planned, waited_s)
            self.entered(f"writing down step {number}")
            self.finished(step, batch)

    def _step(self, number: int, batch: TrainingBatch, planned: Planned, waited_s: float) -> Step:
        held = self.executor.storage.bytes_now()
        other = reset_peak_bytes(self.device) - held
        start = time.perf_counter()
        planned, result, retries = self._run(number, batch, planned)
        step_s = time.perf_counter() - start
        if not math.isfinite(result.loss) or not math.isfinite(result.gradient_norm):
            raise HeadraceError(
                f"loss of step {number}",
                got=f"{result.loss} with gradient norm {result.gradient_norm}",
                wanted="finite numbers",
                hint="lower optimizer.lr and continue from the last checkpoint with --resume",
            )
        mine = RankTimes(
            step_s=step_s,
            waited_s=waited_s,
            rows=result.rows,
            peak_bytes=max(0, peak_bytes(self.device) - other),
        )
        times, measured = told_to_first(mine, self.groups, drawn=number in self.drawn)
        metrics: dict[str, Any] = {
            "step": number,
            "epoch": batch.epoch,
            "loss": result.loss,
            "grad_norm": result.gradient_norm,
            "lr": self.schedule.rate(number),
            "out_of_memory": retries,
        }
        if times is not None:
            self.planner.observe(planned.plan.predicted_s, times.step_s)
            metrics |= plan_metrics(planned, times) | {"mfu": self._utilisation(planned, times)}
        return Step(
            number=number,
            metrics=metrics,
            plan=planned.plan,
            times=times,
            measured=measured,
            micro_batch_s=planned.micro_batch_s,
            predicted=planned.predicted,
        )

    def _run(
        self, number: int, batch: TrainingBatch, planned: Planned
    ) -> tuple[Planned, StepResult, int]:
        """The step, taken again with thriftier plans while it runs out of memory; the plan that
        was run and how many failed before it."""
        rate, retries = self.schedule.rate(number), 0
        while True:
            try:
                result = self.executor.run(planned.plan, batch.tokens, step=number, lr=rate)
                return planned, result, retries
            except Exception as error:
                recovery = self.recovery
                if recovery is None or not recovery.possible(error, self.executor):
                    raise
            # Out of the handler: what the failed step held is let go of before anything is made.
            exhausted = recovery.meet(self.executor)
            planned = self.planner.replan(batch.lengths, planned.plan, exhausted)
            retries += 1
            self.tell(f"{exhausted} of step {number}: taken again as {planned.plan.strategy}")

    def _utilisation(self, planned: Planned, times: StepTimes) -> float | None:
        """The model's FLOP/s as a part of what all devices can do."""
        if not self.peak_flops_per_s:
            return None
        a = self.executor.storage.architecture
        flops = sum(n * a.flops_per_token(n) for n in planned.plan.lengths.tokens)
        return flops / times.step_s / (self.peak_flops_per_s * self.groups.ranks)


def told_to_first(
    mine: RankTimes, groups: Groups, *, drawn: bool
) -> tuple[StepTimes | None, Timeline | None]:
    """What the first rank gets to know of a step from all ranks, of those that are ``drawn`` the
    rows too; nothing on the others. Collective."""
    times = gather_to_first(mine.to_bytes(), groups.world)
    rows = gather_to_first(packed_rows(mine.rows), groups.world) if drawn else None
    measured = (
        None
        if rows is None
        else Timeline(
            source="measured",
            devices=groups.ranks,
            rows=tuple(row for rank, told in enumerate(rows) for row in rows_of_packed(told, rank)),
        )
    )
    return None if times is None else StepTimes.of(times), measured
