"""The trainer: one loop over batches, each planned for, executed, measured and written down."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from headrace.comm.collectives import gather_bytes
from headrace.comm.mesh import Groups
from headrace.errors import HeadraceError
from headrace.runtime.executor import Executor, StepResult
from headrace.runtime.machine import is_out_of_memory, peak_bytes, reset_peak_bytes
from headrace.runtime.recovery import Exhausted, Recovery
from headrace.runtime.schedule import Schedule
from headrace.spec.lengths import Lengths
from headrace.spec.measurement import Row, Timeline
from headrace.spec.plan import Plan

__all__ = ["Planned", "Planner", "Step", "Trainer", "TrainingBatch"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan and what its planner expects of it. ``facts`` go into the step's metrics."""

    plan: Plan
    predicted: Timeline
    peak_bytes: tuple[int, ...]
    planning_s: float
    facts: Mapping[str, Any] = field(default_factory=dict)


class Planner(Protocol):
    """Whoever decides: given lengths, a plan; told what steps really took."""

    def plan(self, lengths: Lengths) -> Planned:
        """The plan of the next step, the same on every rank."""

    def replan(self, lengths: Lengths, failed: Plan, exhausted: Exhausted) -> Planned:
        """A thriftier plan of a batch whose plan ``failed`` ran out of memory, the same on every
        rank. Raises InfeasiblePlan when there is none."""

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """A step's seconds, agreed by all ranks."""

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to plan alike, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A finished step, on every rank alike: its metrics, plan and timelines."""

    number: int
    metrics: Mapping[str, Any]
    plan: Plan
    measured: Timeline
    predicted: Timeline
    facts: Mapping[str, Any]

    @property
    def loss(self) -> float:
        """The mean loss of the batch's tokens, before the step."""
        return float(self.metrics["loss"])

    @property
    def seconds(self) -> float:
        """What the step took, on the slowest rank."""
        return float(self.metrics["step_s"])


@dataclass(slots=True, kw_only=True)
class Trainer:
    """Trains until ``steps`` are done.

    ``finished`` is called on every rank after each step (progress, journal, checkpoints);
    ``entered`` is told what is done between the actions of two steps.
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
        everyone = self._everyone(result, step_s, waited_s, other)
        measured = Timeline(
            source="measured", devices=self.groups.ranks,
            rows=tuple(Row(**row) for rank in everyone for row in rank["rows"]),
        )  # fmt: skip
        longest_s = max(rank["step_s"] for rank in everyone)
        self.planner.observe(planned.plan.predicted_s, longest_s)
        metrics = self._metrics(number, batch, planned, result, measured, everyone)
        metrics["out_of_memory"] = retries
        return Step(
            number=number, metrics=metrics, plan=planned.plan, measured=measured,
            predicted=planned.predicted, facts=planned.facts,
        )  # fmt: skip

    def _run(
        self, number: int, batch: TrainingBatch, planned: Planned
    ) -> tuple[Planned, StepResult, int]:
        """The step, taken again with thriftier plans while it runs out of memory; the plan that
        was run and how many failed before it."""
        rate, retries = self.schedule.rate(number), 0
        while True:
            mine: str | None = None
            try:
                result = self.executor.run(planned.plan, batch.tokens, step=number, lr=rate)
                return planned, result, retries
            except Exception as error:
                recovery = self.recovery
                if recovery is None or not recovery.possible(error, self.executor):
                    raise
                if is_out_of_memory(error):
                    mine = self.executor.action
            # Out of the handler: what the failed step held is let go of before anything is made.
            exhausted = recovery.meet(self.executor, mine)
            planned = self.planner.replan(batch.lengths, planned.plan, exhausted)
            retries += 1
            self.tell(f"{exhausted} of step {number}: taken again as {planned.plan.strategy}")

    def _everyone(
        self, result: StepResult, step_s: float, waited_s: float, other_bytes: int
    ) -> list[dict[str, Any]]:
        rows = [{k: getattr(row, k) for k in Row.__dataclass_fields__} for row in result.rows]
        mine = {
            "rows": rows, "step_s": step_s, "waited_s": waited_s,
            "peak_bytes": max(0, peak_bytes(self.device) - other_bytes),
        }  # fmt: skip
        payloads = gather_bytes(json.dumps(mine).encode(), self.groups.world)
        return [json.loads(payload) for payload in payloads]

    def _metrics(
        self, number: int, batch: TrainingBatch, planned: Planned, result: StepResult,
        measured: Timeline, everyone: list[dict[str, Any]],
    ) -> dict[str, Any]:  # fmt: skip
        plan, step_s = planned.plan, max(rank["step_s"] for rank in everyone)
        waited_s = max(rank["waited_s"] for rank in everyone)
        a = self.executor.storage.architecture
        flops = sum(n * a.flops_per_token(n) for n in plan.lengths.tokens)
        peak = self.peak_flops_per_s
        return {
            "step": number,
            "epoch": batch.epoch,
            "loss": result.loss,
            "tokens": plan.lengths.total,
            "sequences": len(plan.lengths),
            "longest": plan.lengths.longest,
            "lr": self.schedule.rate(number),
            "grad_norm": result.gradient_norm,
            "step_s": step_s,
            "tokens_per_s": plan.lengths.total / (step_s + waited_s),
            "idle": measured.idle,
            "mfu": flops / step_s / (peak * self.groups.ranks) if peak else None,
            "strategy": str(plan.strategy),
            "working": plan.working,
            "predicted_s": plan.predicted_s,
            "lower_bound_s": plan.lower_bound_s,
            "gap": plan.gap,
            "planning_s": planned.planning_s,
            "waited_s": waited_s,
            "waited": waited_s / (step_s + waited_s),
            "plan_hash": plan.hash,
            "peak_bytes": [rank["peak_bytes"] for rank in everyone],
            "predicted_peak_bytes": list(planned.peak_bytes),
            "micro_batches": [
                {
                    "ranks": len(plan.pipelines[m.pipeline].ranks),
                    "tokens": sum(plan.tokens_of(m)),
                    "longest": max(plan.tokens_of(m)),
                    "sequences": len(m.sequences),
                    "layers": str(m.layers),
                    "order": m.order,
                }
                for m in plan.micro_batches
            ],
            "assignment": [
                [plan.lengths.tokens[i], len(plan.pipelines[m.pipeline].ranks)]
                for m in plan.micro_batches
                for i in m.sequences
            ],
        } | {k: v for k, v in planned.facts.items() if not isinstance(v, Timeline)}
