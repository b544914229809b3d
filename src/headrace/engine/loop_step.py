"""Steps and micro-batches of a user's loop.

    for step in run:                        # one optimizer step, planned
        for micro in step:                  # this rank's micro-batches
            loss = model(**micro.inputs).loss
            micro.backward(loss)

A step is finished, its gradients added up over all ranks and the weights updated, when its last
micro-batch is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.distributed as dist

from headrace.adopt.labels import local_loss
from headrace.engine.loop_runner import StepRunner, Work
from headrace.engine.loss_check import check_loss
from headrace.engine.sample_order import LoopBatch
from headrace.engine.turns import Turn
from headrace.errors import DataError, HeadraceError, ModelError
from headrace.native.machine import peak_bytes, reset_peak_bytes
from headrace.native.spans import StepClock, clock_of
from headrace.spec.measurement import Row
from headrace.spec.method_facts import Members
from headrace.spec.plan import Plan
from headrace.spec.program import Backward
from headrace.spec.step import Planned, RankTimes

__all__ = ["LoopMicroBatch", "LoopStep"]


@dataclass(slots=True, kw_only=True, eq=False)
class LoopMicroBatch:
    """One micro-batch on this rank.

    Used in a ``with`` statement, running out of memory ends the attempt at the step, which is then
    planned with less memory and taken again (:mod:`headrace.engine.loop_recovery`).

        inputs    what the model is given: local tokens, their places, labels where it takes them
        labels    [1, s_r]   of the local places, IGNORED (-100) where there is no loss
        rest      fields that the model does not take, of the samples that this rank works on
        tokens    of the micro-batch, on all its ranks, that have a loss
        targets   the same of the whole step: what sums of losses are divided by

    Labels of a model of several axes have the dims of its first input.
    """

    inputs: dict[str, torch.Tensor]
    rest: dict[str, torch.Tensor]
    given_labels: torch.Tensor | None = field(repr=False)
    tokens: int
    targets: int
    sequences: tuple[int, ...]
    ranks: Members
    group: dist.ProcessGroup | None
    _backward: Callable[[LoopMicroBatch, torch.Tensor], None] = field(repr=False)
    _survives: Callable[[BaseException, str], bool] = field(repr=False)
    done: bool = field(default=False, init=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        return error is not None and self._survives(error, f"micro-batch {self.sequences}")

    @property
    def labels(self) -> torch.Tensor:
        """Those of the local places. Raises DataError where samples have none."""
        if self.given_labels is None:
            raise DataError("labels of the samples", got="none", wanted="a field of them")
        return self.given_labels

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        """The cross entropy of the local tokens, summed, over the step's ``targets``.

        logits   [1, s_r, V]
        """
        return local_loss(logits, self.labels, self.targets)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of this part of the loss. Raises ModelError for a loss that cannot be
        one, and for a second one of the same micro-batch."""
        if self.done:
            raise ModelError(
                "backward of a micro-batch",
                got="a second one",
                wanted="one for each",
                hint="add up the parts of a loss before",
            )
        self._backward(self, loss)
        self.done = True


@dataclass(slots=True, kw_only=True)
class _Spent:
    """A turn: marks of when it began, and of when its forwards and backwards did and ended."""

    turn: Turn | None
    tokens: int
    start: Any
    forward: list[tuple[Any, Any]] = field(default_factory=list)
    backward: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True, eq=False)
class LoopStep:
    """One optimizer step. ``tokens`` of all ranks have a loss. Once it is done, ``loss`` is the
    mean over them, ``gradient_norm`` that before gradients were clipped, where they are, and
    ``seconds`` what it took here; ``retries`` says how often memory ran out."""

    number: int
    batch: LoopBatch = field(repr=False)
    planned: Planned = field(repr=False)
    waited_s: float = field(repr=False)
    runner: StepRunner = field(repr=False)
    finished: Callable[[LoopStep], None] = field(repr=False)
    tokens: int = 0
    loss: float = float("nan")
    gradient_norm: float | None = None
    seconds: float = 0.0
    done: bool = False
    retries: int = 0
    _spent: list[_Spent] = field(default_factory=list, repr=False)
    _failed: bool = field(default=False, repr=False)
    _measured: tuple[Row, ...] = field(default=(), repr=False)
    _clock: StepClock = field(init=False, repr=False)
    _begun: Any = field(default=None, repr=False)
    _other_bytes: int = field(default=0, repr=False)
    _sum: torch.Tensor | None = field(default=None, repr=False)

    @property
    def epoch(self) -> int:
        """The pass over the data."""
        return self.batch.epoch

    @property
    def plan(self) -> Plan:
        """What all ranks do in it."""
        return self.planned.plan

    def __iter__(self) -> Iterator[LoopMicroBatch]:
        if self._begun is not None:
            raise HeadraceError(
                f"step {self.number}",
                got="a second loop over it",
                wanted="one",
                hint="each step is trained once",
            )
        self._other_bytes = reset_peak_bytes(self.runner.setup.device) - self.runner.bytes_now()
        self._clock = clock_of(self.runner.setup.device)
        self._begun = self._clock.mark()
        while True:
            self.runner.recovery.begin()
            try:
                yield from self._attempt()
            except BaseException:  # the loop is left: nothing of the step stays
                self.runner.setup.optimizer.zero_grad()
                raise
            own = 0.0 if self._sum is None else float(self._sum)
            self.loss, exhausted = self.runner.recovery.meet(own)
            if exhausted is None:
                break
            self.retries += 1
            self.planned = self.runner.plan_again(self.batch, self.plan, exhausted)
        self._finish()

    def _attempt(self) -> Iterator[LoopMicroBatch]:
        """The micro-batches of the plan, until one of them runs out of memory."""
        self._sum, self._spent, self._failed = None, list[_Spent](), False
        turns, self.tokens = self.runner.work(self.batch, self.plan)
        if not self.retries:
            self._begun = self._clock.mark()  # groups are made
        with self.runner.setup.held.step():
            for some in turns:
                own = [work for work in some if work.turn.index is not None]
                spent = _Spent(
                    turn=own[0].turn if own else None,
                    tokens=sum(work.pack.tokens for work in own),
                    start=self._clock.mark(),
                )
                for work in some:
                    micro = self._micro(work, spent)
                    yield micro
                    if self._failed:
                        return
                    if not micro.done:
                        raise HeadraceError(
                            f"micro-batch of step {self.number}",
                            got="no backward",
                            wanted="micro.backward(loss) for each micro-batch",
                        )
                if own:
                    self._spent.append(spent)

    def _survives(self, error: BaseException, action: str) -> bool:
        self._failed = self.runner.recovery.survives(error, action)
        return self._failed

    def _micro(self, work: Work, spent: _Spent) -> LoopMicroBatch:
        part, turn, count = self.runner.place(self.plan, work, self.tokens), work.turn, work.pack
        start = self._clock.mark()

        def backward(micro: LoopMicroBatch, loss: torch.Tensor) -> None:
            loss = loss if turn.index is not None else loss * 0.0
            if not self.number and count.targets:
                check_loss(loss, micro.targets, part.tokens)
            middle = self._clock.mark()
            loss.backward()
            spent.forward.append((start, middle))
            spent.backward.append((middle, self._clock.mark()))
            own = loss.detach()
            self._sum = own if self._sum is None else self._sum + own

        return LoopMicroBatch(
            inputs=part.inputs,
            rest=part.rest,
            given_labels=part.labels,
            tokens=count.targets,
            targets=self.tokens,
            ranks=work.ranks,
            group=part.group,
            sequences=() if turn.index is None else self.plan.micro_batches[turn.index].sequences,
            _backward=backward,
            _survives=self._survives,
        )

    def _rows(self) -> Iterator[Row]:
        """Rows of the turns: all forwards of its packs, then all backwards. On a device they are
        read when the step is over: nobody waits for it before."""
        between, rank = self._clock.between, self.runner.rank
        for spent in self._spent:
            turn, begin_s = spent.turn, between(self._begun, spent.start)
            assert turn is not None, "turns without work are not kept"
            assert turn.index is not None, "nor those of others"
            backward = Backward(stage=0, micro_batch=turn.index, group=turn.ranks)
            for action, marks in ((turn.action, spent.forward), (backward, spent.backward)):
                end_s = begin_s + sum(between(*pair) for pair in marks)
                yield Row(
                    rank=rank,
                    action=str(action),
                    kind=action.kind,
                    start_s=begin_s,
                    end_s=end_s,
                    tokens=spent.tokens,
                    ranks=len(turn.ranks),
                )
                begin_s = end_s

    def _finish(self) -> None:
        start = self._clock.mark()
        self.gradient_norm = self.runner.update(self.number, self.loss)
        end = self._clock.mark()
        start_s, self.seconds = (self._clock.between(self._begun, mark) for mark in (start, end))
        update = Row(
            rank=self.runner.rank, action="U", kind="update", start_s=start_s, end_s=self.seconds
        )
        self._measured, self.done = (*self._rows(), update), True
        self.runner.finished(self._metrics(), self.planned, self._times())
        self.finished(self)

    def _times(self) -> RankTimes:
        """What this rank tells the first of the step."""
        return RankTimes(
            step_s=self.seconds,
            waited_s=self.waited_s,
            rows=self._measured,
            peak_bytes=max(0, peak_bytes(self.runner.setup.device) - self._other_bytes),
        )

    def _metrics(self) -> dict[str, Any]:
        """What every rank knows of the step."""
        return {
            "step": self.number,
            "epoch": self.epoch,
            "loss": self.loss,
            "grad_norm": self.gradient_norm,
            "targets": self.tokens,
            "mfu": None,
            "out_of_memory": self.retries,
        }
