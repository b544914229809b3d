"""The executor: runs this rank's program of a plan, action by action, and measures each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from headrace.comm.collectives import agree, gather_floats
from headrace.comm.mesh import Groups
from headrace.comm.waiting import check
from headrace.errors import PlanMismatch
from headrace.layouts.transfer import Pending
from headrace.models.transformer import Transformer
from headrace.runtime.clocks import StepClock, clock_of
from headrace.runtime.micro_batch import MicroBatchRun, sources
from headrace.runtime.plan_groups import PlanGroups
from headrace.runtime.spans import Spans
from headrace.runtime.step_state import StepState
from headrace.runtime.storage import Storage
from headrace.spec.measurement import Row
from headrace.spec.own_program import OwnPrograms
from headrace.spec.plan import Plan
from headrace.spec.program import (
    Action,
    Backward,
    Exchange,
    Forward,
    Program,
    Pull,
    Push,
    Recv,
    Send,
    Update,
)
from headrace.spec.walk import messages_of
from headrace.spec.weights import bucket_count

__all__ = ["Executor", "StepResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step gave: the batch's mean loss (the same on all ranks), the gradient's norm
    before clipping, and this rank's measured rows, seconds from the start of the step."""

    loss: float
    gradient_norm: float
    rows: tuple[Row, ...]


class Executor:
    """Runs plans on this rank.

    ``entered`` is told each action before it starts (the watcher publishes it), and before the
    update those that the device has not ended; ``checked`` looks for values that are not finite
    after each layer, and names the layer. ``clock`` is that of ``device`` unless told. Nothing of
    the storage is written before the update: a step that fails leaves the weights as they were.
    Pulls, and pushes, have at most ``in_flight_bytes`` under way, or one at a time: the next waits
    for the first of them. Without ``overlap`` nothing is computed while weights arrive or gradients
    leave: for comparison.
    ``action`` is where a step that failed was, ``prepared`` whether its groups were made, and
    ``written`` whether it had come to write.
    """

    def __init__(
        self,
        storage: Storage,
        groups: Groups,
        *,
        seed: int,
        device: str = "cpu",
        checked: bool = False,
        overlap: bool = True,
        in_flight_bytes: float = float("inf"),
        clock: StepClock | None = None,
        entered: Callable[[str], None] = lambda action: None,
    ) -> None:
        self.storage, self.groups = storage, groups
        self.model = Transformer(storage.architecture)
        self.buckets = bucket_count(storage.architecture)
        self._seed, self._device, self._entered = seed, device, entered
        self._checked, self._overlap = checked, overlap
        self._in_flight_bytes = in_flight_bytes
        self._clock = clock or clock_of(device)
        self._programs = OwnPrograms(rank=groups.rank, bucket_count=self.buckets, overlap=overlap)
        self._plan_groups = PlanGroups(storage.architecture)
        self.action, self.prepared, self.written = "", False, False

    def prepare(self, plan: Plan) -> Program:
        """Agree on the plan, make its groups and this rank's program, which is checked where there
        was none of its kind before.

        Raises PlanMismatch when ranks hold different plans, or the plan is for other semantics,
        another number of ranks or another number of layers; SpecError when a stage cannot run a
        method of its layers; ProgramError when it would deadlock.
        """
        agree("hash of the plan", plan.hash, self.groups.world)
        if plan.semantics != "free" or plan.devices != self.groups.ranks:
            raise PlanMismatch(
                "plan",
                got=f"{plan.semantics} for {plan.devices} ranks",
                wanted=f"free for {self.groups.ranks}",
            )
        layers = self.storage.architecture.layers
        for number, micro in enumerate(plan.micro_batches):
            if len(micro.layers.options) != layers:
                raise PlanMismatch(
                    f"layers of micro-batch {number}", got=len(micro.layers.options), wanted=layers
                )
        program = self._programs.of(plan)
        self.action = "the making of groups"
        self.groups.prepare(self._plan_groups.of(plan))
        if any(pipeline.scheme.pipeline > 1 for pipeline in plan.pipelines):
            self.groups.prepare_messages(
                {m.peer for action in program.actions for m in messages_of(action)}
            )
        return program

    def run(
        self, plan: Plan, tokens: tuple[np.ndarray, ...], *, step: int, lr: float
    ) -> StepResult:
        """One optimizer step of ``plan`` at rate ``lr``; ``tokens[i]`` are sequence i's ids.

        Raises what :meth:`prepare` does, and PlanMismatch when the sequences are not as long as
        the plan says: their packs would be cut elsewhere, and the loss divided by another count.
        """
        self.prepared, self.written, self.action = False, False, "the agreement on the plan"
        program = self.prepare(plan)
        self.prepared, self.action = True, "the making of working weights"
        found, planned = map(len, tokens), plan.lengths.tokens
        for i, (got, wanted) in enumerate(zip_longest(found, planned, fillvalue="none")):
            if got != wanted:
                raise PlanMismatch(f"tokens of sequence {i}", got=got, wanted=wanted)
        working = self.storage.working(plan)
        working.begin()
        state = StepState(
            plan=plan,
            tokens=tokens,
            number=step,
            lr=lr,
            working=working,
            spans=Spans(self._clock, self.groups.rank),
        )
        for action in program.actions:
            self.action = str(action)
            self._entered(self.action)
            check()
            self._do(action, state)
        self._entered("between steps")
        return StepResult(loss=state.loss, gradient_norm=state.norm, rows=state.spans.rows())

    def _do(self, action: Action, state: StepState) -> None:
        if not self._overlap and not isinstance(action, Pull):
            self._await(list(state.pulls), state)
        match action:
            case Pull(bucket=bucket):
                self._pull(bucket, state)
            case Forward():
                self._timed(action, state, lambda: self._forward(action, state))
            case Backward():
                self._await(list(state.pulls), state)  # those that only others need
                self._timed(action, state, lambda: self._backward(action, state))
            case Push(bucket=bucket):
                self._push(bucket, state)
            case Send() | Recv() | Exchange():
                self._timed(action, state, lambda: self._traffic(action, state))
            case Update():
                self._await(list(state.pulls), state)
                if self._staged(state.plan):
                    self.groups.messages.settle()
                self._wait("G", list(state.pushes), state.pushes, state)
                state.spans.reach(self._entered)
                check()  # what was summed may be what aborted transfers left
                self._timed(action, state, lambda: self._update(state))

    @staticmethod
    def _staged(plan: Plan) -> bool:
        return any(pipeline.scheme.pipeline > 1 for pipeline in plan.pipelines)

    def _pull(self, bucket: int, state: StepState) -> None:
        """Issue a pull."""
        self._make_room("P", bucket, state.pulls, state)
        with self._issuing("P", bucket, state):
            issued = state.working.pull(bucket)
        if issued is not None:
            state.pulls[bucket] = issued

    def _push(self, bucket: int, state: StepState) -> None:
        """Issue a push."""
        self._make_room("G", bucket, state.pushes, state)
        with self._issuing("G", bucket, state):
            issued = state.working.push(bucket)
        if issued is not None:
            state.pushes[bucket] = issued

    @contextmanager
    def _issuing(self, letter: str, bucket: int, state: StepState) -> Iterator[None]:
        """A row of its own where issuing waits for a first step."""
        if not state.working.waits:
            yield
            return
        with state.spans.wait(), self._moving(letter, bucket, state):
            yield

    def _make_room(
        self, letter: str, bucket: int, pending: dict[int, Pending], state: StepState
    ) -> None:
        """Wait for the first of those under way until one more may be. Nobody waits for ever: all
        ranks issue what they share in one order, and what was issued before needs nothing more."""
        most = self._in_flight_bytes - state.working.buffer_bytes(bucket)
        while pending and sum(transfer.nbytes for transfer in pending.values()) > most:
            with state.spans.wait():
                self._wait(letter, [next(iter(pending))], pending, state)

    def _await(self, buckets: Sequence[int], state: StepState) -> None:
        """Wait for pulls that are under way."""
        due = [bucket for bucket in buckets if bucket in state.pulls]
        if due:
            with state.spans.wait():
                self._wait("P", due, state.pulls, state)

    def _wait(
        self, letter: str, buckets: Sequence[int], pending: dict[int, Pending], state: StepState
    ) -> None:
        """Wait for issued transfers, in the order given; one row each."""
        for bucket in buckets:
            with self._moving(letter, bucket, state):
                pending.pop(bucket).wait()

    def _moving(self, letter: str, bucket: int, state: StepState) -> AbstractContextManager[None]:
        kind = "pull" if letter == "P" else "push"
        return state.spans.action(f"{letter}{bucket}", kind, ranks=self.groups.ranks)

    def _timed(self, action: Action, state: StepState, work: Callable[[], None]) -> None:
        tokens, ranks = 0, self.groups.ranks
        if isinstance(action, Forward | Backward):
            tokens = sum(state.plan.tokens_of(state.plan.micro_batches[action.micro_batch]))
            ranks = len(action.group)
        elif isinstance(action, Send | Recv | Exchange):
            tokens, ranks = sum(message.rows for message in messages_of(action)), 2
        with state.spans.action(str(action), action.kind, tokens=tokens, ranks=ranks):
            work()

    def _forward(self, action: Forward, state: StepState) -> None:
        index = action.micro_batch
        micro = state.plan.micro_batches[index]
        if micro.pipeline not in state.views:
            pipeline = state.plan.pipelines[micro.pipeline]
            state.views[micro.pipeline] = sources(
                self.storage.table, state.working, state.plan, pipeline, self.groups
            )
        run = MicroBatchRun.of(
            self.model,
            state.plan,
            micro,
            state.tokens,
            state.views[micro.pipeline],
            self.groups,
            seed=self._seed,
            step=state.number,
            dtype=self.storage.working_dtype,
            device=self._device,
            checked=self._checked,
        )
        run.forward(state.arrived.pop(index, None), lambda bucket: self._await([bucket], state))
        state.losses.append(run.loss)
        state.runs[index] = run

    def _backward(self, action: Backward, state: StepState) -> None:
        index, due = action.micro_batch, set(action.pushes)

        def done(bucket: int) -> None:
            if bucket in due:
                self._push(bucket, state)

        run = state.runs[index]
        run.backward(state.returned.pop(index, None), done)
        if run.stage.first:
            del state.runs[index]

    def _traffic(self, action: Send | Recv | Exchange, state: StepState) -> None:
        """Send what a micro-batch leaves, put what arrives where its next action finds it."""
        messages, device = self.groups.messages, self._device
        hidden, dtype = self.storage.architecture.hidden, self.storage.working_dtype
        match action:
            case Send(message=out):
                messages.send(state.leaving(out), out.peer)
            case Recv(message=back):
                arrived = messages.receive((back.rows, hidden), dtype, device, back.peer)
                state.arrive(back, arrived)
            case Exchange(send=Send(message=out), recv=Recv(message=back)):
                leaving = state.leaving(out)
                state.arrive(back, messages.exchange(leaving, (back.rows, hidden), out.peer))

    def _update(self, state: StepState) -> None:
        own = sum(map(float, state.losses))
        state.loss = sum(row[0] for row in gather_floats([own], self.groups.world))
        state.norm = self.storage.gradient_norm()
        self.written = True  # every rank has come as far, so each will write
        self.storage.update(state.lr, state.norm)
