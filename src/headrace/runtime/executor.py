"""The executor: runs this rank's program of a plan, action by action, and measures each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from headrace.comm.collectives import agree, gather_floats
from headrace.comm.mesh import Groups
from headrace.errors import PlanMismatch
from headrace.layouts.transfer import Pending
from headrace.methods.registry import subgroups
from headrace.methods.weights import Weight
from headrace.models.transformer import Transformer
from headrace.runtime.micro_batch import MicroBatchRun, sources
from headrace.runtime.storage import Storage, Working
from headrace.spec.checker import check_programs
from headrace.spec.compiler import compile_plan
from headrace.spec.measurement import Row
from headrace.spec.plan import Plan
from headrace.spec.program import Action, Backward, Forward, Program, Pull, Push, Update
from headrace.spec.weights import bucket_count

__all__ = ["Executor", "StepResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step gave: the batch's mean loss (the same on all ranks), the gradient's norm
    before clipping, and this rank's measured rows, seconds from the start of the step."""

    loss: float
    gradient_norm: float
    rows: tuple[Row, ...]


@dataclass(slots=True, kw_only=True)
class _Step:
    """What one step holds while it runs."""

    plan: Plan
    tokens: tuple[np.ndarray, ...]
    number: int
    lr: float
    working: Working
    started_s: float
    pulls: dict[int, Pending] = field(default_factory=dict)
    pushes: dict[int, Pending] = field(default_factory=dict)
    runs: dict[int, MicroBatchRun] = field(default_factory=dict)
    views: dict[tuple[int, ...], dict[str, Weight]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    loss: float = 0.0
    norm: float = 0.0


class Executor:
    """Runs plans on this rank.

    ``entered`` is told each action before it starts (the watcher publishes it); ``checked`` looks
    for values that are not finite after each layer, and names the layer. Nothing of the
    storage is written before the update: a step that fails leaves the weights as they were.
    """

    def __init__(
        self,
        storage: Storage,
        groups: Groups,
        *,
        seed: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        checked: bool = False,
        entered: Callable[[str], None] = lambda action: None,
    ) -> None:
        self.storage, self.groups = storage, groups
        self.model = Transformer(storage.architecture)
        self.buckets = bucket_count(storage.architecture)
        self._seed, self._dtype, self._device, self._entered = seed, dtype, device, entered
        self._checked = checked

    def prepare(self, plan: Plan) -> Program:
        """Agree on the plan, check its programs, make its groups; returns this rank's program.

        Raises PlanMismatch when ranks hold different plans, or the plan is for other semantics or
        another number of ranks; ProgramError when it would deadlock.
        """
        agree("hash of the plan", plan.hash, self.groups.world)
        if plan.semantics != "free" or plan.devices != self.groups.ranks:
            raise PlanMismatch(
                "plan", got=f"{plan.semantics} for {plan.devices} ranks",
                wanted=f"free for {self.groups.ranks}",
            )  # fmt: skip
        programs = compile_plan(plan, self.buckets)
        check_programs(programs, plan, self.buckets)
        self.groups.prepare(self._groups_of(plan))
        return programs[self.groups.rank]

    def _groups_of(self, plan: Plan) -> set[tuple[int, ...]]:
        """The groups of all pipelines and those that methods need within them."""
        wanted = {tuple(sorted(pipeline.ranks)) for pipeline in plan.pipelines}
        for micro in plan.micro_batches:
            ranks = tuple(sorted(plan.pipelines[micro.pipeline].ranks))
            for option in set(micro.layers.options):
                for members in subgroups(option, self.storage.architecture, len(ranks)):
                    wanted.add(tuple(ranks[member] for member in members))
        return wanted

    def run(
        self, plan: Plan, tokens: tuple[np.ndarray, ...], *, step: int, lr: float
    ) -> StepResult:
        """One optimizer step of ``plan`` at rate ``lr``; ``tokens[i]`` are sequence i's ids."""
        program = self.prepare(plan)
        working = self.storage.working(plan)
        working.begin()
        state = _Step(
            plan=plan, tokens=tokens, number=step, lr=lr, working=working,
            started_s=time.perf_counter(),
        )  # fmt: skip
        for action in program.actions:
            self._entered(str(action))
            self._do(action, state)
        self._entered("between steps")
        return StepResult(loss=state.loss, gradient_norm=state.norm, rows=tuple(state.rows))

    def _do(self, action: Action, state: _Step) -> None:
        match action:
            case Pull(bucket=bucket):
                self._issue(state.pulls, bucket, state.working.pull(bucket))
            case Forward():
                self._wait("P", state.pulls, state)
                self._timed(action, state, lambda: self._forward(action, state))
            case Backward(micro_batch=index):
                self._timed(action, state, state.runs.pop(index).backward)
            case Push(bucket=bucket):
                self._wait("P", state.pulls, state)
                self._issue(state.pushes, bucket, state.working.push(bucket))
            case Update():
                self._wait("G", state.pushes, state)
                self._timed(action, state, lambda: self._update(state))

    @staticmethod
    def _issue(pending: dict[int, Pending], bucket: int, issued: Pending | None) -> None:
        if issued is not None:
            pending[bucket] = issued

    def _wait(self, letter: str, pending: dict[int, Pending], state: _Step) -> None:
        """Wait for all issued transfers, in the order of their issue; one row each."""
        kind = "pull" if letter == "P" else "push"
        for bucket in list(pending):
            start = time.perf_counter()
            pending.pop(bucket).wait()
            self._record(f"{letter}{bucket}", kind, start, state, ranks=self.groups.ranks)

    def _timed(self, action: Action, state: _Step, work: Callable[[], None]) -> None:
        start = time.perf_counter()
        work()
        if self._device != "cpu":
            torch.cuda.synchronize()
        tokens, ranks = 0, self.groups.ranks
        if isinstance(action, Forward | Backward):
            tokens = sum(state.plan.tokens_of(state.plan.micro_batches[action.micro_batch]))
            ranks = len(action.group)
        self._record(str(action), action.kind, start, state, tokens=tokens, ranks=ranks)

    def _record(
        self, text: str, kind: str, start: float, state: _Step, *, tokens: int = 0, ranks: int = 1
    ) -> None:
        state.rows.append(
            Row(
                rank=self.groups.rank, action=text, kind=kind, start_s=start - state.started_s,
                end_s=time.perf_counter() - state.started_s, tokens=tokens, ranks=ranks,
            )
        )  # fmt: skip

    def _forward(self, action: Forward, state: _Step) -> None:
        micro = state.plan.micro_batches[action.micro_batch]
        views = state.views.get(action.group)
        if views is None:
            views = sources(
                self.storage.table, state.working, state.plan, action.group, self.groups
            )
            state.views[action.group] = views
        run = MicroBatchRun.of(
            self.model, state.plan, micro, state.tokens, views, self.groups,
            seed=self._seed, step=state.number, dtype=self._dtype, device=self._device,
            checked=self._checked,
        )  # fmt: skip
        state.loss += run.forward()
        state.runs[action.micro_batch] = run

    def _update(self, state: _Step) -> None:
        state.loss = sum(row[0] for row in gather_floats([state.loss], self.groups.world))
        state.norm = self.storage.update(state.lr)
