"""Steps and micro-batches of a user's loop.

    for step in run:                        # one optimizer step, planned
        for micro in step:                  # this rank's micro-batches
            loss = model(**micro.inputs).loss
            micro.backward(loss)

A step is finished, its gradients added up over all ranks and the weights updated, when its last
micro-batch is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from headrace.errors import HeadraceError, ModelError
from headrace.loop.loss_check import check_loss
from headrace.passes.shard import IGNORED
from headrace.runtime.machine import peak_bytes, reset_peak_bytes
from headrace.runtime.step_times import RankTimes
from headrace.runtime.trainer import Planned
from headrace.spec.measurement import Row
from headrace.spec.method_facts import Members
from headrace.spec.plan import Plan
from headrace.spec.program import Backward, Forward

if TYPE_CHECKING:
    from headrace.loop.attached import Attached

__all__ = ["LoopMicroBatch", "LoopStep", "MicroRun", "members_of", "turns_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroRun:
    """What this rank does of a plan in one turn: micro-batch ``index`` with ``ranks``, or nothing
    (None), where other ranks must be met at every layer."""

    index: int | None
    ranks: Members

    @property
    def action(self) -> Forward:
        """Its forward, as programs write it."""
        return Forward(stage=0, micro_batch=self.index or 0, group=self.ranks)


@dataclass(slots=True, kw_only=True, eq=False)
class LoopMicroBatch:
    """One micro-batch on this rank.

    Used in a ``with`` statement, running out of memory ends the attempt at the step, which is then
    planned with less memory and taken again (:mod:`headrace.loop.recovery`).

        inputs    what the model is given: local tokens, their places, labels where it takes them
        labels    [1, s_r]   of the local places, IGNORED (-100) where there is no loss
        tokens    of the micro-batch, on all its ranks, that have a loss
        targets   the same of the whole step: what sums of losses are divided by
    """  # fmt: skip

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor
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

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        """The cross entropy of the local tokens, summed, over the step's ``targets``.

            logits   [1, s_r, V]
        """  # fmt: skip
        total = cross_entropy(
            logits.flatten(0, -2).float() if logits.element_size() < 4 else logits.flatten(0, -2),
            self.labels.flatten(), ignore_index=IGNORED, reduction="sum",
        )  # fmt: skip
        return total / max(1, self.targets)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of this part of the loss. Raises ModelError for a loss that cannot be
        one, and for a second one of the same micro-batch."""
        if self.done:
            raise ModelError(
                "backward of a micro-batch", got="a second one", wanted="one for each",
                hint="add up the parts of a loss before",
            )  # fmt: skip
        self._backward(self, loss)
        self.done = True


@dataclass(slots=True, kw_only=True, eq=False)
class LoopStep:
    """One optimizer step. ``tokens`` says how many tokens of all
    ranks have a loss. Once it is done, ``loss`` is the mean over them, ``gradient_norm`` where
    gradients are clipped, and ``seconds`` what it took here."""

    number: int
    epoch: int
    planned: Planned = field(repr=False)
    waited_s: float = field(repr=False)
    run: Attached = field(repr=False)
    read: Callable[[MicroRun], dict[str, torch.Tensor]] = field(repr=False)
    tokens: int = 0
    loss: float = float("nan")
    gradient_norm: float | None = None
    seconds: float = 0.0
    done: bool = False
    retries: int = 0
    rows: list[Row] = field(default_factory=list, repr=False)
    _failed: bool = field(default=False, repr=False)
    _begun_s: float = field(default=0.0, repr=False)
    _other_bytes: int = field(default=0, repr=False)
    _sum: torch.Tensor | None = field(default=None, repr=False)

    @property
    def plan(self) -> Plan:
        """What all ranks do in it."""
        return self.planned.plan

    def __iter__(self) -> Iterator[LoopMicroBatch]:
        if self._begun_s:
            raise HeadraceError(
                f"step {self.number}", got="a second loop over it", wanted="one",
                hint="each step is trained once",
            )  # fmt: skip
        self._other_bytes = reset_peak_bytes(self.run.device) - self.run.bytes_now()
        self._begun_s = time.perf_counter()
        while True:
            self.run.recovery.begin()
            yield from self._attempt()
            own = 0.0 if self._sum is None else float(self._sum)
            self.loss, exhausted = self.run.recovery.meet(own)
            if exhausted is None:
                break
            self.retries += 1
            self.run.plan_again(self, exhausted)
        self._finish()

    def _attempt(self) -> Iterator[LoopMicroBatch]:
        """The micro-batches of the plan, until one of them runs out of memory."""
        self._sum, self.rows, self._failed = None, list[Row](), False
        turns = turns_of(self.plan, self.run.rank)
        packs = [self.read(turn) for turn in turns]
        own = [int((pack["labels"] != IGNORED).sum()) for pack in packs]
        self.tokens = self.run.total(
            sum(
                count for turn, count in zip(turns, own, strict=True)
                if turn.ranks[0] == self.run.rank
            )
        )  # fmt: skip
        with self.run.held.step():
            for turn, pack, count in zip(turns, packs, own, strict=True):
                micro = self._micro(turn, pack, count)
                yield micro
                if self._failed:
                    return
                if not micro.done:
                    raise HeadraceError(
                        f"micro-batch of step {self.number}", got="no backward",
                        wanted="micro.backward(loss) for each micro-batch",
                    )  # fmt: skip

    def _survives(self, error: BaseException, action: str) -> bool:
        self._failed = self.run.recovery.survives(error, action)
        return self._failed

    def _micro(self, turn: MicroRun, pack: dict[str, torch.Tensor], count: int) -> LoopMicroBatch:
        run = self.run
        shard = run.place(self.plan, turn, pack, self.tokens)
        start = self._now()
        assert shard.labels is not None, "samples have labels"

        def backward(micro: LoopMicroBatch, loss: torch.Tensor) -> None:
            if not self.number and count:
                check_loss(loss, micro.targets)
            middle = self._now()
            loss.backward()
            self._note(turn, start, middle, pack["labels"].shape[1])
            part = loss.detach()
            self._sum = part if self._sum is None else self._sum + part

        return LoopMicroBatch(
            inputs=run.adopted.accepted(shard), labels=shard.labels, tokens=count,
            targets=self.tokens, ranks=turn.ranks, group=shard.placement.group,
            sequences=() if turn.index is None else self.plan.micro_batches[turn.index].sequences,
            _backward=backward, _survives=self._survives,
        )  # fmt: skip

    def _note(self, turn: MicroRun, start: float, middle: float, tokens: int) -> None:
        if turn.index is None:
            return
        rank, group = self.run.rank, turn.ranks
        backward = Backward(stage=0, micro_batch=turn.index, group=group)
        for action, begin, end in ((turn.action, start, middle), (backward, middle, self._now())):
            self.rows.append(
                Row(
                    rank=rank, action=str(action), kind=action.kind, start_s=begin, end_s=end,
                    tokens=tokens, ranks=len(group),
                )
            )  # fmt: skip

    def _finish(self) -> None:
        start = self._now()
        self.gradient_norm = self.run.update(self.loss)
        end = self._now()
        self.rows.append(
            Row(rank=self.run.rank, action="U", kind="update", start_s=start, end_s=end)
        )
        self.seconds, self.done = end, True
        self.run.finished(self)

    def times(self) -> RankTimes:
        """What this rank tells the first of the step."""
        return RankTimes(
            step_s=self.seconds, waited_s=self.waited_s, rows=tuple(self.rows),
            peak_bytes=max(0, peak_bytes(self.run.device) - self._other_bytes),
        )  # fmt: skip

    def metrics(self, rate: float) -> dict[str, Any]:
        """What every rank knows of the step; ``rate`` is the learning rate after it."""
        return {
            "step": self.number, "epoch": self.epoch, "loss": self.loss, "lr": rate,
            "grad_norm": self.gradient_norm, "targets": self.tokens, "mfu": None,
            "out_of_memory": self.retries,
        }  # fmt: skip

    def _now(self) -> float:
        if self.run.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - self._begun_s


def turns_of(plan: Plan, rank: int) -> tuple[MicroRun, ...]:
    """What a rank does of a plan, turn by turn. In lockstep all ranks have as many turns."""
    counts = [0] * plan.devices
    own = dict[int, MicroRun]()
    for index in range(len(plan.micro_batches)):
        members = members_of(plan, index)
        at = max(counts[r] for r in members)
        for r in members:
            counts[r] = at + 1
        if rank in members:
            own[at] = MicroRun(index=index, ranks=members)
    if plan.semantics == "free":
        return tuple(own[at] for at in sorted(own))
    idle = MicroRun(index=None, ranks=(rank,))
    return tuple(own.get(at, idle) for at in range(max(counts)))


def members_of(plan: Plan, index: int) -> Members:
    """The ranks that run a micro-batch: those of its pipeline, as many as it has tokens at most."""
    micro = plan.micro_batches[index]
    return plan.pipelines[micro.pipeline].ranks[: sum(plan.tokens_of(micro))]
