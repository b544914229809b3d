"""An adopted model as the engine drives it: a loop gets its micro-batches and calls the model.

    for step in run:                        # one optimizer step, planned
        for micro in step:                  # this rank's micro-batches
            loss = model(**micro.inputs).loss
            micro.backward(loss)

Which calls a micro-batch takes is known when its samples are read (a model of several axes takes
clips of one shape at a time). Ranks tell each other, so that every rank has the same table of
packs, compiles its program from it and checks it before the first call.
"""

from __future__ import annotations

import gc
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
import torch.distributed as dist

from headrace.adopt.held_weights import HeldWeights, bytes_now
from headrace.adopt.labels import local_loss
from headrace.adopt.spread_model import BatchPart, Pack, SpreadModel
from headrace.comm.collectives import gather_bytes
from headrace.comm.mesh import Groups
from headrace.engine.loop_costs import ModelProbes
from headrace.engine.loss_check import check_loss
from headrace.engine.recovery import Recovery
from headrace.engine.sample_order import LoopBatch
from headrace.errors import DataError, HeadraceError, ModelError, PlanMismatch
from headrace.native.spans import StepClock, clock_of
from headrace.spec.checker import check_turns
from headrace.spec.measurement import Row
from headrace.spec.method_facts import Members
from headrace.spec.plan import Plan
from headrace.spec.program import Backward, Forward, Idle, Packs, Program, compile_turns

__all__ = ["LoopMicroBatch", "LoopRunner"]


@dataclass(slots=True, kw_only=True, eq=False)
class LoopMicroBatch:
    """One micro-batch on this rank.

    Used in a ``with`` statement, running out of memory ends the attempt at the step, which is then
    planned with less memory and taken again (:mod:`headrace.engine.recovery`).

    Attributes:
        inputs: Arguments of the model: local tokens, position ids, labels where it takes them.
        rest: Fields that the model does not take, of the samples that this rank works on.
        tokens: Tokens of the micro-batch, on all its ranks, that have a loss.
        targets: Tokens of the whole step that have a loss: sums of losses are divided by it.
        sequences: The samples of the micro-batch, by their numbers in the batch.
        ranks: The ranks that work on it together.
        group: The group of these ranks, for collectives of the model's own; None for one rank.
        done: Whether its backward has run.
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
        """The labels of the local places, [1, s_r], IGNORED (-100) where there is no loss; of a
        model of several axes, of the dims of its first input. Raises DataError where samples have
        none."""
        if self.given_labels is None:
            raise DataError("labels of the samples", got="none", wanted="a field of them")
        return self.given_labels

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        """The cross entropy of the local tokens, summed, over the step's ``targets``.

        Args:
            logits: [1, s_r, V], of the local tokens.

        Returns:
            This rank's part of the step's loss, a single number.
        """
        return local_loss(logits, self.labels, self.targets)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of this part of the loss.

        Args:
            loss: A single number: a sum over local tokens, divided by ``targets``.

        Raises:
            ModelError: For a loss that cannot be one, and for a second one of the micro-batch.
        """
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
    """Times of a micro-batch on this rank: marks of its beginning, and of the begin and end of its
    forwards and backwards."""

    forward_action: Forward
    tokens: int
    start: Any
    forward: list[tuple[Any, Any]] = field(default_factory=list)
    backward: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Work:
    """This rank's work in a step: its program, the packs of its micro-batches, and the number of
    tokens of all ranks that have a loss."""

    program: Program
    packs: dict[tuple[int, int], Pack]
    targets: int


@dataclass(slots=True, kw_only=True, eq=False)
class LoopRunner:
    """Hands the micro-batches of plans to a loop on this rank, and makes the update.

    Attributes:
        model: The user's model, spread.
        held: How its weights are held.
        optimizer: The user's.
        groups: The groups of this rank.
        device: The device of the model, as torch names it.
        probes: Set the recompute levels of the layers.
        recovery: Notified when memory runs out within a micro-batch.
        scheduler: Takes one step after each of the optimizer's, where there is one.
        clip: The largest norm of the gradient; None leaves it as it is.
        part: This rank's part of the current micro-batch.
    """

    model: SpreadModel
    held: HeldWeights
    optimizer: torch.optim.Optimizer
    groups: Groups
    device: str
    probes: ModelProbes
    recovery: Recovery
    scheduler: Any = None
    clip: float | None = None
    part: BatchPart | None = field(default=None, init=False)
    targets: int = field(default=0, init=False)
    action: str = field(default="", init=False)
    _clock: StepClock = field(init=False)
    _begun: Any = field(default=None, init=False)
    _update: tuple[Any, Any] | None = field(default=None, init=False)
    _sum: torch.Tensor | None = field(default=None, init=False)
    _spent: dict[int, _Spent] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._clock = clock_of(self.device)

    def attempt(self, number: int, batch: LoopBatch, plan: Plan) -> Iterator[LoopMicroBatch]:
        """Hand out this rank's micro-batches of a plan, until one of them runs out of memory."""
        self._sum, self._update = None, None
        self._spent.clear()
        self._begun = self._clock.mark()
        self.action = "the making of groups"
        work = self._work(batch, plan)
        self.targets = work.targets
        with self.held.step():
            for action in work.program.actions:
                if not isinstance(action, Forward | Idle):
                    continue  # the loop has run the backward; the update comes at the step's end
                self.action = str(action)
                micro = self._handed(number, plan, action, work)
                try:
                    yield micro
                finally:
                    self._release()
                if self.recovery.failed:
                    return
                if not micro.done:
                    raise HeadraceError(
                        f"micro-batch of step {number}",
                        got="no backward",
                        wanted="micro.backward(loss) for each micro-batch",
                    )

    @property
    def own_loss(self) -> float:
        """The sum of this rank's losses. Synchronizes with the device."""
        return 0.0 if self._sum is None else float(self._sum)

    def update(self, number: int, loss: float) -> tuple[float, float]:
        """Add up gradients over ranks, and take one step of optimizer and scheduler, unless the
        loss or the norm of the gradient is not finite. Collective."""
        start, norm = self._clock.mark(), math.nan
        if math.isfinite(loss):
            self.held.add_up()
            whole = self.held.norm()
            norm = float(whole)
            if math.isfinite(norm):
                if self.clip is not None:
                    self.held.scale_down(whole, self.clip)
                self.optimizer.step()
                if self.scheduler is not None:
                    self.scheduler.step()
        self.optimizer.zero_grad()
        self._update = start, self._clock.mark()
        return loss, norm

    def rows(self) -> tuple[Row, ...]:
        """A row for all forwards and one for all backwards of each micro-batch, and the update."""
        return tuple(self._rows())

    def let_go(self) -> None:
        """Drop gradients and records of forwards, as not all ranks have run the same ones."""
        self.optimizer.zero_grad()
        self.model.forget()
        gc.collect()

    def abandon(self) -> None:
        """Drop the gradients of a step that is not finished."""
        self.optimizer.zero_grad()

    def bytes_now(self) -> int:
        """Bytes of the model and its optimizer on this rank."""
        return bytes_now(self.held.model, self.optimizer)

    def metrics(self, number: int, plan: Plan, step_s: float | None) -> dict[str, Any]:
        """Metrics of a step: the learning rate, and the tokens that have a loss."""
        rate = float(self.optimizer.param_groups[0]["lr"])
        found: dict[str, Any] = {"lr": rate, "targets": self.targets}
        return found if step_s is None else found | {"mfu": None}

    def _work(self, batch: LoopBatch, plan: Plan) -> _Work:
        """Read this rank's samples, agree on the packs of all ranks, make their groups, and compile
        and check this rank's program. Collective."""
        me = self.groups.rank
        mine = [
            (index, pack, ranks)
            for index, micro in enumerate(plan.micro_batches)
            if me in plan.pipelines[micro.pipeline].ranks
            for pack, ranks in self._packs(batch, plan, index)
        ]
        led = sum(pack.targets for _, pack, ranks in mine if ranks[0] == me)
        groups_of: dict[int, list[Members]] = {}
        for index, _, ranks in mine:
            groups_of.setdefault(index, []).append(ranks)
        packs, targets = _agreed(led, groups_of, plan, self.groups)
        wanted = sorted({ranks for groups in packs for ranks in groups})
        self.model.prepare(some for ranks in wanted for some in self.model.groups_of(ranks))
        program = compile_turns(plan, packs, me)
        check_turns([program], plan, packs)
        count, numbered = Counter[int](), dict[tuple[int, int], Pack]()
        for index, pack, _ in mine:
            numbered[index, count[index]] = pack
            count[index] += 1
        return _Work(program=program, packs=numbered, targets=targets)

    def _packs(self, batch: LoopBatch, plan: Plan, index: int) -> Iterator[tuple[Pack, Members]]:
        """The packs of a micro-batch, each with the ranks that it can be spread over."""
        micro = plan.micro_batches[index]
        for pack in self.model.packs([batch.read(i) for i in micro.sequences]):
            yield pack, self.model.ranks_for(pack, plan.pipelines[micro.pipeline].ranks)

    def _handed(
        self, number: int, plan: Plan, action: Forward | Idle, work: _Work
    ) -> LoopMicroBatch:
        """The micro-batch of an action; the model is spread for it from now on."""
        if isinstance(action, Forward):
            micro = plan.micro_batches[action.micro_batch]
            pack, ranks = work.packs[action.micro_batch, action.pack], action.group
            options, sequences = micro.layers.options, micro.sequences
            # Some of the ranks may be too many for a pack: it is run as it was planned for all.
            spread = len(plan.pipelines[micro.pipeline].ranks) > 1
            exchange = options[0].attention if spread else None
        else:
            pack, ranks, options, sequences, exchange = (
                self._nothing(),
                (self.groups.rank,),
                (),
                (),
                None,
            )
        spent = self._begin_timing(plan, action, pack)
        self.probes.choose([option.recompute for option in options])
        self.part = part = self.model.place(
            pack.to(self.device).values, ranks, targets=work.targets, exchange=exchange
        )
        self.model.take(part)
        start = self._clock.mark()

        def backward(handed: LoopMicroBatch, loss: torch.Tensor) -> None:
            loss = loss if spent is not None else loss * 0.0
            if not number and pack.targets:
                check_loss(loss, handed.targets, part.tokens)
            middle = self._clock.mark()
            loss.backward()
            if spent is not None:
                spent.forward.append((start, middle))
                spent.backward.append((middle, self._clock.mark()))
            self._release()
            own = loss.detach()
            self._sum = own if self._sum is None else self._sum + own

        return LoopMicroBatch(
            inputs=part.inputs,
            rest=part.rest,
            given_labels=part.labels,
            tokens=pack.targets,
            targets=work.targets,
            ranks=ranks,
            group=part.group,
            sequences=sequences,
            _backward=backward,
            _survives=self.recovery.survives,
        )

    def _release(self) -> None:
        """Make the model plain again."""
        self.part = None
        self.model.release()

    def _nothing(self) -> Pack:
        """A pack of two tokens without a loss, for an idle turn of this rank."""
        pack = self.model.made(self.probes.sample, (2,), 1, document=self.probes.document)
        return replace(pack, targets=0)

    def _begin_timing(self, plan: Plan, action: Forward | Idle, pack: Pack) -> _Spent | None:
        """A new record of times for the micro-batch of an action; None for an idle turn."""
        if isinstance(action, Idle):
            return None
        index = action.micro_batch
        if index not in self._spent:
            ranks = plan.pipelines[plan.micro_batches[index].pipeline].ranks
            forward = Forward(stage=0, micro_batch=index, group=ranks)
            self._spent[index] = _Spent(forward_action=forward, tokens=0, start=self._clock.mark())
        self._spent[index].tokens += pack.tokens
        return self._spent[index]

    def _rows(self) -> Iterator[Row]:
        between, rank = self._clock.between, self.groups.rank
        for spent in self._spent.values():
            forward, begin_s = spent.forward_action, between(self._begun, spent.start)
            backward = Backward(stage=0, micro_batch=forward.micro_batch, group=forward.group)
            for action, marks in ((forward, spent.forward), (backward, spent.backward)):
                end_s = begin_s + sum(between(*pair) for pair in marks)
                yield Row(
                    rank=rank,
                    action=str(action),
                    kind=action.kind,
                    start_s=begin_s,
                    end_s=end_s,
                    tokens=spent.tokens,
                    ranks=len(forward.group),
                )
                begin_s = end_s
        if self._update is not None:
            start_s, end_s = (between(self._begun, mark) for mark in self._update)
            yield Row(rank=rank, action="U", kind="update", start_s=start_s, end_s=end_s)


def _agreed(
    led: int, groups_of: dict[int, list[Members]], plan: Plan, groups: Groups
) -> tuple[Packs, int]:
    """The packs of all micro-batches, by the ranks that share each, and the tokens of all ranks
    that have a loss: this rank leads packs of ``led`` such tokens. Collective.

    Raises PlanMismatch on every rank where ranks of one micro-batch read other samples.
    """
    mine = json.dumps([led, {str(index): some for index, some in groups_of.items()}]).encode()
    said = [json.loads(text) for text in gather_bytes(mine, groups.world)]
    packs: list[list[Members]] = []
    for index, micro in enumerate(plan.micro_batches):
        ranks = plan.pipelines[micro.pipeline].ranks
        views = [said[rank][1].get(str(index)) for rank in ranks]
        other = next(
            (rank for rank, view in zip(ranks, views, strict=True) if view != views[0]), None
        )
        if other is not None:
            raise PlanMismatch(
                f"packs of micro-batch {index} on rank {other}",
                got=f"groups {views[ranks.index(other)]}",
                wanted=f"groups {views[0]}, as on rank {ranks[0]}",
                hint="every rank must read the same samples",
            )
        packs.append([tuple(group) for group in views[0] or ()])
    return packs, sum(targets for targets, _ in said)
