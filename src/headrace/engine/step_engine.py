"""The engine of a step, whatever the model: ask for a plan, run it, recover, update, learn, record.

    engine.next_step(number, batches)   reads a batch and asks for its plan
    for micro in step: ...              runs it; memory that runs out is recovered from
    (the step's end)                    update, times of all ranks, what is learnt, the record

What differs between models is behind one protocol, :class:`PlanRunner`. A native model runs the
program of a plan by itself, so its step yields nothing. An adopted model is called by a loop, which
the step hands its micro-batches to.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

from headrace.comm.collectives import gather_to_first
from headrace.comm.mesh import Groups
from headrace.engine.record import RunRecord
from headrace.engine.recovery import Recovery
from headrace.errors import HeadraceError
from headrace.native.machine import outside_bytes, peak_bytes, reset_peak_bytes
from headrace.spec.lengths import Lengths
from headrace.spec.measurement import Row, Timeline
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

__all__ = [
    "Engine",
    "PlanRunner",
    "RunningStep",
    "Stage",
    "StepBatch",
    "StepPlans",
    "told_to_first",
]

Stage: TypeAlias = Literal["planned", "at work", "left", "failed", "done"]
"""Where a step is: ``planned`` until a loop over it begins, ``at work`` within the loop, ``left``
where the loop ended half way, ``failed`` by an error of the step itself, ``done`` once it is
finished or skipped."""


class StepBatch(Protocol):
    """The sequences of one optimizer step."""

    @property
    def epoch(self) -> int:
        """The pass over the data that the batch belongs to."""
        ...

    @property
    def lengths(self) -> Lengths:
        """The tokens of its sequences."""
        ...

    @property
    def state_after(self) -> Mapping[str, Any]:
        """The state of the data's order once the batch is trained, as JSON."""
        ...


Batch = TypeVar("Batch", bound=StepBatch)
Handed = TypeVar("Handed", covariant=True)


class StepPlans(Protocol):
    """The planner as the engine uses it: makes plans, and learns from steps that ran."""

    def plan(self, lengths: Lengths) -> Planned:
        """The plan of the next step, the same on every rank. Collective."""
        ...

    def plan_forward(self, lengths: Lengths) -> Planned:
        """A plan of forwards alone, the same on every rank: nothing is learnt of it. Collective."""
        ...

    def replan_forward(self, lengths: Lengths, failed: Plan, exhausted: Exhausted) -> Planned:
        """A thriftier plan of forwards whose plan ``failed`` ran out of memory. Collective. Raises
        InfeasiblePlan on every rank when there is none."""
        ...

    def replan(self, lengths: Lengths, failed: Plan, exhausted: Exhausted) -> Planned:
        """A thriftier plan of a batch whose plan ``failed`` ran out of memory. Collective. Raises
        InfeasiblePlan on every rank when there is none."""
        ...

    def observe(self, predicted_s: float, measured_s: float, *, retries: int = 0) -> None:
        """Take the seconds of a finished step, predicted and measured, to correct later
        predictions; ``retries`` is how often it was taken again as memory ran out. On the first
        rank, the only one that knows them."""
        ...

    def learn(self, step: Step) -> tuple[str, ...]:
        """Learn from a finished step on the first rank; returns warnings for the user."""
        ...

    def compared(self, step: Step) -> Step:
        """The step with the best static plan of its batch added, to compare with; unchanged where
        that plan is not known."""
        ...


class PlanRunner(Protocol[Batch, Handed]):
    """A model and its optimizer on this rank, as the engine drives them."""

    @property
    def action(self) -> str:
        """The action that this rank is in, described for other ranks."""
        ...

    def attempt(self, number: int, batch: Batch, plan: Plan) -> Iterator[Handed]:
        """Run forwards and backwards of this rank's part of a plan.

        Args:
            number: The step.
            batch: Its sequences.
            plan: What all ranks do.

        Yields:
            Micro-batches for a loop that calls the model; nothing where the model runs by itself.
        """
        ...

    @property
    def targets(self) -> int:
        """Tokens with a loss in the step under way, summed over all ranks; 0 where they are not
        counted."""
        ...

    @property
    def own_loss(self) -> float:
        """This rank's part of the loss of the attempt that has ended."""
        ...

    def update(self, number: int, loss: float) -> tuple[float, float]:
        """Add up the gradients of all ranks, then take one step of the optimizer. No step is taken,
        and weights and optimizer stay as they were, where the loop takes it itself, or where the
        loss or the gradient's norm is not finite. Collective.

        Args:
            number: The step.
            loss: The loss of the batch, as far as the ranks knew it when the forwards and backwards
                had ended.

        Returns:
            The loss of the batch and the norm of its gradient before clipping, the same on all
            ranks.
        """
        ...

    def rows(self) -> tuple[Row, ...]:
        """When this rank began and ended each action of the step, in seconds since the step's
        start. Waits for the device."""
        ...

    def drop_attempt(self) -> None:
        """Free the memory of an attempt that ran out of memory, so that another can be made."""
        ...

    def abandon(self) -> None:
        """Drop the gradients of a step that will not be finished."""
        ...

    def bytes_now(self) -> int:
        """Bytes of weights, gradients and optimizer state that this rank holds between steps."""
        ...

    def metrics(self, number: int, plan: Plan, step_s: float | None) -> dict[str, Any]:
        """Metrics that the engine does not know: ``lr``, and where ``step_s`` is known those that
        follow from it (``mfu``)."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class Engine(Generic[Batch, Handed]):
    """Takes the steps of a run on this rank.

    Attributes:
        runner: The model and its optimizer.
        planner: Asked for the plan of every step.
        recovery: Repeats a step where memory runs out.
        groups: The groups of this rank.
        device: The device of the model, as torch names it.
        drawn: Numbers of the steps that are drawn as timelines: for these the measured actions
            (:class:`Row`) of all ranks are gathered. The same on every rank.
        record: The files of the run, on the first rank.
        finished: Called with every step once it is done, on all ranks.
        skipped: Called with a step that the loop leaves out, before it counts as done.
        heard: Called with every finished step and sentences for the user, on the first rank.
        tell: Called with a line for people.
        entered: Called with the action that this rank begins between two steps.
        advice: The hint of the error for a loss that is not finite.
    """

    runner: PlanRunner[Batch, Handed]
    planner: StepPlans
    recovery: Recovery
    groups: Groups
    device: str
    drawn: Container[int] = ()
    record: RunRecord | None = None
    finished: Callable[[RunningStep[Batch, Handed]], object] = lambda step: None
    skipped: Callable[[RunningStep[Batch, Handed]], object] = lambda step: None
    heard: Callable[[Step, tuple[str, ...]], object] = lambda step, notices: None
    tell: Callable[[str], object] = lambda text: None
    entered: Callable[[str], object] = lambda action: None
    advice: str = "lower the learning rate and go on from the last checkpoint"
    _outside_bytes_at_first: int = field(init=False)  # before communicators of plans were made

    def __post_init__(self) -> None:
        """Note what is held outside of torch's allocator before the first step."""
        self._outside_bytes_at_first = outside_bytes(self.device)

    def grown_outside_bytes(self) -> int:
        """Bytes that communicators and libraries have taken of the device since the run began,
        which no tensor can have."""
        return max(0, outside_bytes(self.device) - self._outside_bytes_at_first)

    def next_step(self, number: int, read: Callable[[], Batch]) -> RunningStep[Batch, Handed]:
        """Read a batch and ask for its plan. Collective.

        Args:
            number: The step, from 0.
            read: Called once, gives the batch of the step.

        Returns:
            The step, which runs as it is looped over.

        Raises:
            InfeasiblePlan: On every rank, when the batch fits nowhere.
        """
        self.entered(f"reading and planning the batch of step {number}")
        asked_s = time.perf_counter()
        batch = read()
        planned = self.planner.plan(batch.lengths)
        waited_s = time.perf_counter() - asked_s
        return RunningStep(
            engine=self, number=number, batch=batch, planned=planned, waited_s=waited_s
        )


@dataclass(slots=True, kw_only=True, eq=False)
class RunningStep(Generic[Batch, Handed]):
    """A step of a run, which a loop over it runs.

    Attributes:
        number: The step, from 0.
        batch: Its sequences.
        planned: What all ranks do, and what is expected of it.
        waited_s: Seconds that this rank waited for batch and plan.
        forward: Whether it runs forwards alone, as for an evaluation: no backward, no update.
        stage: Where the step is.
        loss: The mean loss over all tokens of the batch that have one; nan before it is done.
        gradient_norm: The norm of the gradient before it was clipped; nan before the step is done.
        seconds: What the step took on this rank.
        retries: How often it was taken again as memory ran out.
    """

    engine: Engine[Batch, Handed] = field(repr=False)
    number: int
    batch: Batch = field(repr=False)
    planned: Planned = field(repr=False)
    waited_s: float
    forward: bool = False
    stage: Stage = field(default="planned", init=False)
    loss: float = field(default=math.nan, init=False)
    gradient_norm: float = field(default=math.nan, init=False)
    seconds: float = field(default=0.0, init=False)
    retries: int = field(default=0, init=False)
    _targets: int = field(default=0, init=False)

    @property
    def epoch(self) -> int:
        """The pass over the data that the step's batch belongs to."""
        return self.batch.epoch

    @property
    def plan(self) -> Plan:
        """What all ranks do in the step."""
        return self.planned.plan

    @property
    def tokens(self) -> int:
        """Tokens of the step that have a loss, of all ranks; known from its first micro-batch
        on."""
        return self._targets if self.done else self.engine.runner.targets

    def run(self) -> None:
        """Run a step whose runner calls the model by itself and hands out no micro-batches.
        Collective. Raises what a loop over the step raises."""
        for _ in self:
            pass

    @property
    def begun(self) -> bool:
        """Whether a loop over it has begun."""
        return self.stage != "planned"

    @property
    def done(self) -> bool:
        """Whether the step is finished."""
        return self.stage == "done"

    def again(self) -> RunningStep[Batch, Handed]:
        """Make a step anew that a loop left half way.

        Returns:
            A step of the same number, batch and plan, which has not begun.
        """
        return RunningStep(
            engine=self.engine,
            number=self.number,
            batch=self.batch,
            planned=self.planned,
            waited_s=self.waited_s,
        )

    def skip(self) -> None:
        """Leave the batch out: nothing is trained, no step is taken, and the run goes on with the
        next batch. Collective.

        Raises:
            HeadraceError: For a step that a loop has begun.
            PlanMismatch: On every rank where another trains the step.
        """
        if self.begun:
            raise HeadraceError(
                f"step {self.number}", got="skip() after its loop began", wanted="one or the other"
            )
        self.engine.skipped(self)
        self.stage = "done"
        self.engine.finished(self)

    def __iter__(self) -> Iterator[Handed]:
        """Run the step: its micro-batches, then the update.

        Raises:
            HeadraceError: For a second loop over the step, and on all ranks for a loss or a
                gradient that is not finite, with weights and optimizer as they were.
            InfeasiblePlan: When memory ran out and no thriftier plan is left.
        """
        if self.begun:
            raise HeadraceError(
                f"step {self.number}",
                got="a second loop over it",
                wanted="one",
                hint="each step is trained once",
            )
        self.stage = "at work"
        try:
            yield from self._train()
        except Exception:  # of the step itself: an error in the loop's body does not come here
            self.stage = "failed"
            raise
        finally:
            if not self.done and self.stage != "failed":
                self.stage = "left"

    def _train(self) -> Iterator[Handed]:
        """Yield the micro-batches of the step, then update the weights and learn from the step;
        sets ``loss``, ``gradient_norm`` and ``seconds``. Raises HeadraceError on all ranks where
        the loss or the norm is not finite."""
        engine, runner = self.engine, self.engine.runner
        # What this process holds besides weights, gradients and optimizer state is no part of the
        # peak that plans predict.
        held_bytes = reset_peak_bytes(engine.device)
        other_bytes = held_bytes - runner.bytes_now()
        start_s = time.perf_counter()
        loss = yield from self.attempts()
        self.loss, self.gradient_norm = runner.update(self.number, loss)
        rows = runner.rows()
        self.seconds = time.perf_counter() - start_s
        if not (math.isfinite(self.loss) and math.isfinite(self.gradient_norm)):
            raise HeadraceError(
                f"loss of step {self.number}",
                got=f"{self.loss} with gradient norm {self.gradient_norm}",
                wanted="finite numbers",
                hint=engine.advice,
            )
        peak = max(0, peak_bytes(engine.device) - other_bytes) + engine.grown_outside_bytes()
        self._finish(
            RankTimes(step_s=self.seconds, waited_s=self.waited_s, rows=rows, peak_bytes=peak)
        )

    def attempts(self) -> Generator[Handed, None, float]:
        """Run the plan, and thriftier ones while memory runs out, without an update.

        Yields:
            The micro-batches of each attempt, for a loop that calls the model.

        Returns:
            The sum of all ranks' losses, where ranks meet at the end of every attempt; else what
            this rank knows of it.
        """
        engine, runner, recovery = self.engine, self.engine.runner, self.engine.recovery
        while True:
            recovery.begin()
            try:
                yield from runner.attempt(self.number, self.batch, self.plan)
            except BaseException as error:
                if not recovery.survives(error, runner.action):
                    runner.abandon()
                    raise
            # Outside of the handler, so that the memory of the failed attempt is freed first.
            loss, exhausted = recovery.meet(runner.own_loss, runner.drop_attempt)
            if exhausted is None:
                return loss
            planner = engine.planner
            replan = planner.replan_forward if self.forward else planner.replan
            self.planned = replan(self.batch.lengths, self.plan, exhausted)
            self.retries += 1
            strategy = self.plan.strategy
            engine.tell(f"{exhausted} of step {self.number}: taken again as {strategy}")

    def _finish(self, mine: RankTimes) -> None:
        """Send what this rank measured of the step to the first rank, which learns from it and
        records the step; then mark the step as done. Collective."""
        engine, number, plan = self.engine, self.number, self.plan
        times, measured = told_to_first(mine, engine.groups, drawn=number in engine.drawn)
        step_s = None if times is None else times.step_s
        metrics: dict[str, Any] = {
            "step": number,
            "epoch": self.epoch,
            "loss": self.loss,
            "grad_norm": self.gradient_norm,
            "out_of_memory": self.retries,
            **engine.runner.metrics(number, plan, step_s),
        }
        if times is not None:
            engine.planner.observe(plan.predicted_s, times.step_s, retries=self.retries)
            metrics |= plan_metrics(self.planned, times)
        step = Step(
            number=number,
            metrics=metrics,
            plan=plan,
            times=times,
            measured=measured,
            micro_batch_s=self.planned.micro_batch_s,
            predicted=self.planned.predicted,
        )
        engine.entered(f"writing down step {number}")
        if times is not None:
            notices = engine.planner.learn(step)
            step = engine.planner.compared(step)
            if engine.record is not None:
                engine.record.step(step, notices)
            engine.heard(step, notices)
        self._targets, self.stage = engine.runner.targets, "done"
        engine.finished(self)


def told_to_first(
    mine: RankTimes, groups: Groups, *, drawn: bool
) -> tuple[StepTimes | None, Timeline | None]:
    """Gather on the first rank what all ranks measured of a step. Collective.

    Args:
        mine: What this rank measured.
        groups: The groups of this rank.
        drawn: Whether the rows of all ranks are gathered too.

    Returns:
        The times of all ranks, and their rows as a timeline, None where the step is not drawn; two
        None on other ranks.
    """
    times = gather_to_first(mine.to_bytes(), groups.world)
    packed = gather_to_first(packed_rows(mine.rows), groups.world) if drawn else None
    measured = None
    if packed is not None:
        rows = tuple(row for rank, one in enumerate(packed) for row in rows_of_packed(one, rank))
        measured = Timeline(source="measured", devices=groups.ranks, rows=rows)
    return None if times is None else StepTimes.of(times), measured
