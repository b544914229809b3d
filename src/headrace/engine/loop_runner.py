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
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist

from headrace.adopt.gradients import require_known_wrapper, require_made
from headrace.adopt.held_weights import AlikeWeights, HeldWeights, bytes_now, require_linear_hooks
from headrace.adopt.labels import local_loss
from headrace.adopt.own_losses import functions_of
from headrace.adopt.spread_model import BatchPart, Pack, SpreadModel
from headrace.comm.collectives import gather_bytes
from headrace.comm.mesh import Groups
from headrace.engine.kept_gradients import KeptGradients
from headrace.engine.loop_costs import ModelProbes
from headrace.engine.loop_start import require_own
from headrace.engine.loss_check import (
    LossCheck,
    Trial,
    require_loss,
    scaled_error,
    set_aside,
    share_factor,
)
from headrace.engine.recovery import Recovery
from headrace.engine.sample_order import LoopBatch
from headrace.engine.sequence_sums import SequenceSums
from headrace.errors import DataError, HeadraceError, ModelError, PlanMismatch
from headrace.native.spans import StepClock, clock_of
from headrace.ops.loss import IGNORED
from headrace.spec.checker import check_turns
from headrace.spec.lengths import Lengths
from headrace.spec.measurement import Row
from headrace.spec.method_facts import Members
from headrace.spec.plan import Plan
from headrace.spec.program import Backward, Forward, Idle, Packs, Program, compile_turns

__all__ = ["LoopMicroBatch", "LoopRunner", "Work", "checksum_of"]

_STEPPED_NOW: WeakSet[torch.optim.Optimizer] = WeakSet()
"""Optimizers that a run takes a step of at the moment: several runs may share one, and each must
know the others' steps from those of the loop."""


@dataclass(slots=True, kw_only=True, eq=False)
class LoopMicroBatch:
    """One micro-batch on this rank.

    Used in a ``with`` statement, running out of memory ends the attempt at the step, which is then
    planned with less memory and taken again (:mod:`headrace.engine.recovery`).

    Attributes:
        inputs: Arguments of the model: local tokens, position ids, labels where it takes them.
        rest: Fields that the model does not take, of the samples that this rank works on.
        given_labels: The labels of the local places; None where samples have none.
        tokens: Tokens of the micro-batch, on all its ranks, that have a loss.
        targets: Tokens of the whole step that have a loss: sums of losses are divided by it.
        sequences: The samples of the micro-batch, by their numbers in the batch, in the order of
            its tokens.
        ranks: The ranks that work on it together.
        group: The group of these ranks, for collectives of the model's own; None for one rank.
        done: Whether its backward has run.
        weighed: Whether :attr:`share` was asked for, by which terms of the loss may be weighed.
        checking: Whether the loss is only looked at: in the first step, the first after a ``load``,
            and one after a step whose loss other functions made, the loop gets some micro-batches
            three times more, with other targets and with some labels ignored, to see that the loss
            is a sum. Nothing of these counts.
    """

    inputs: dict[str, torch.Tensor]
    rest: dict[str, torch.Tensor]
    given_labels: torch.Tensor | None = field(repr=False)
    # ``share``, where it does not depend on labels: of an idle turn, or of places.
    known_share: float | None = field(repr=False)
    tokens: int
    targets: int
    sequences: tuple[int, ...]
    ranks: Members
    group: dist.ProcessGroup | None
    # Called by `backward` with this micro-batch and its loss [].
    _backward: Callable[[LoopMicroBatch, torch.Tensor], None] = field(repr=False)
    # Whether an error, in the named action, ends just this attempt at the step: memory ran out.
    _survives: Callable[[BaseException, str], bool] = field(repr=False)
    _sums: SequenceSums = field(repr=False)
    checking: bool = False
    done: bool = field(default=False, init=False)
    weighed: bool = field(default=False, init=False, repr=False)

    def __enter__(self) -> Self:
        """Return this micro-batch; nothing has to be set up."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        """Whether to suppress ``error``: so it is where memory ran out, as the step is tried
        again."""
        return error is not None and self._survives(error, f"micro-batch {self.sequences}")

    @property
    def labels(self) -> torch.Tensor:
        """The labels of the local places, [1, s_r], IGNORED (-100) where there is no loss; of a
        model of several axes, of the dims of its first input. Raises DataError where samples have
        none."""
        if self.given_labels is None:
            raise DataError("labels of the samples", got="none", wanted="a field of them")
        return self.given_labels

    @property
    def share(self) -> torch.Tensor:
        """The fraction of the step's labels that this rank has in this micro-batch, of a model of
        several axes that of its places, []; fractions add up to 1 over the micro-batches of all
        ranks. Multiply a term of the loss that does not depend on tokens by it:
        ``micro.loss(logits) + micro.share * penalty``. Raises DataError where samples have no
        labels of tokens."""
        self.weighed = True
        if self.known_share is not None:
            device = next(iter(self.inputs.values())).device
            return torch.full((), self.known_share, dtype=torch.float64, device=device)
        return (self.labels != IGNORED).sum().double() / self.targets

    @property
    def sequence_share(self) -> torch.Tensor:
        """The weight of each sequence in this rank's loss, [k]: 1 / (ranks of the micro-batch *
        sequences of the step). Weights add up to 1 over the micro-batches of all ranks, so losses
        of sequences times their weights add up to the mean over the sequences of the step. Raises
        ModelError for a model of several axes."""
        return self._sums.share()

    def per_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """Sum values of tokens by sequence, over all ranks of the micro-batch; gradients flow
        through the sum. Collective among these ranks: all call it alike.

        Args:
            values: [1, s_r] or [s_r], of the local tokens.

        Returns:
            [k], in the order of ``sequences``, the same on all ranks of the micro-batch. A loss
            made of it is computed on each of these ranks and summed over them, so multiply it by
            ``sequence_share``.

        Raises:
            ModelError: For values of other tokens, and for a model of several axes.

        Example:
            >>> ratios = (micro.per_sequence(logp - old) / micro.per_sequence(kept)).exp()
            >>> micro.backward(-(ratios * advantages * micro.sequence_share).sum())
        """
        return self._sums.add_up(values)

    @property
    def uses_sequences(self) -> bool:
        """Whether :meth:`per_sequence` was called for this micro-batch."""
        return self._sums.used

    @property
    def leaks(self) -> list[torch.Tensor]:
        """The largest gradient, [], that reached a sequence whose share is 0, for each call of
        :meth:`per_sequence`; filled in trials of the loss alone."""
        return self._sums.leaks

    @property
    def local_index(self) -> np.ndarray:
        """Where the local tokens are in the row of the micro-batch, [s_r] int64. Raises ModelError
        for a model of several axes."""
        return self._sums.local_index()

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        """The sum of the cross entropies of the local tokens, divided by the step's ``targets``.

        Args:
            logits: [1, s_r, V], of the local tokens.

        Returns:
            This rank's part of the step's loss, a single number.
        """
        return local_loss(logits, self.labels, self.targets)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of this rank's part of the loss, which adds to the gradients.

        Args:
            loss: A single number: a sum over local tokens divided by ``targets``, or over
                sequences, each times its ``sequence_share``, or both added up.

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
        require_made(loss, "loss given to micro.backward")
        self._backward(self, loss)
        self.done = True


@dataclass(slots=True, kw_only=True)
class _MicroBatchTimes:
    """Clock marks of a micro-batch on this rank: its start, and (begin, end) of the forward and of
    the backward of each of its packs; ``tokens`` of all its packs. ``forward_action`` names the
    micro-batch in the rows of a report: its forward on all ranks of its pipeline, whichever of
    them a pack runs on."""

    forward_action: Forward
    tokens: int
    start: Any
    forward: list[tuple[Any, Any]] = field(default_factory=list)
    backward: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """The work of this rank in a step.

    Attributes:
        program: Its actions, in order.
        packs: Its packs, by (micro-batch of the plan, number of the pack within it).
        targets: Tokens of all ranks that have a loss.
        checked: The indices in ``program.actions`` of the forwards whose loss is checked, in steps
            that check losses.
    """

    program: Program
    packs: dict[tuple[int, int], Pack]
    targets: int
    checked: frozenset[int]


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
        updates: Whether the optimizer's step is taken here; else gradients are added up and left.
        check_losses: Whether losses are looked at, in the steps that :attr:`check` says; False for
            a step by gradients, whose loss is no sum over labels.
        part: This rank's part of the current micro-batch.
        targets: Tokens of the step that have a loss; in trials of the loss, a multiple of it.
        action: What this rank is doing in the step, in words.
        check: Whether losses are checked in the step at hand.
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
    updates: bool = True
    check_losses: bool = True
    part: BatchPart | None = field(default=None, init=False)
    targets: int = field(default=0, init=False)
    action: str = field(default="", init=False)
    _clock: StepClock = field(init=False)
    _step_start: Any = field(default=None, init=False)  # a mark of the clock
    _update: tuple[Any, Any] | None = field(default=None, init=False)  # marks (begin, end)
    _loss_sum: torch.Tensor | None = field(default=None, init=False)  # this rank's part, []
    # By the number of the micro-batch in the plan.
    _times: dict[int, _MicroBatchTimes] = field(default_factory=dict, init=False)
    _checks: list[LossCheck] = field(default_factory=list, init=False)  # with all losses known
    check: bool = field(default=True, init=False)
    _watched: bool = field(default=False, init=False)  # whether the loss at hand is one of those
    # The functions of the losses that were checked, and whether others were seen since.
    _functions: frozenset[str] = field(default=frozenset(), init=False)
    _looks_again: bool = field(default=False, init=False)
    _scaler_sought: bool = field(default=False, init=False)  # for a loss, that of a GradScaler
    # What the scheduler's last step here has made; None before it.
    _scheduler_state: tuple[int | None, list[float]] | None = field(default=None, init=False)
    _hook: Any = field(default=None, init=False)  # that of the optimizer, to remove it
    _kept: KeptGradients = field(default_factory=KeptGradients, init=False)
    _alike: AlikeWeights = field(init=False)
    _sharded: bool = field(init=False)  # whether FSDP2 had sharded the model at first
    # How many parameters of the optimizer were seen to be the model's.
    _parameter_count: int = field(init=False)
    # Hooks on gradients that were looked at, by id.
    _hooks_seen: dict[int, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Start the clock, and refuse calls of ``optimizer.step()`` where plans make the steps."""
        self._clock, self._alike = clock_of(self.device), AlikeWeights(self.held.inner)
        self._sharded = self.held.sharded
        self.check, self._parameter_count = self.check_losses, _count_parameters(self.optimizer)
        if self.updates:
            self._hook = _unwrapped(self.optimizer).register_step_pre_hook(_refuse_steps)

    def detach(self) -> None:
        """Leave the optimizer to the user again."""
        if self._hook is not None:
            self._hook.remove()

    def attempt(self, number: int, batch: LoopBatch, plan: Plan) -> Iterator[LoopMicroBatch]:
        """Hand out this rank's micro-batches of a plan, until one of them runs out of memory. Those
        whose losses are checked are handed out for each trial before they count."""
        self._loss_sum, self._update = None, None
        self._times.clear()
        self._checks.clear()
        self._step_start = self._clock.mark()
        self.action = "the making of groups"
        self._require_no_gradients(number)
        self._kept.begin(self.held.trained)
        work = self.work(number, batch, plan)
        self.targets = work.targets
        with self.held.step():
            for index, action in enumerate(work.program.actions):
                if not isinstance(action, Forward | Idle):
                    continue  # the loop has run the backward; the update comes at the step's end
                self.action = str(action)
                check, self._watched = None, self.check_losses and index in work.checked
                if self.check and self._watched:
                    check = LossCheck(part=self.placed(batch, plan, action, work))
                    for trial in check.trials:
                        with set_aside(self.held.model, self.device):
                            yield from self._hand_out(
                                number, batch, plan, action, work, check, trial
                            )
                        if self.recovery.failed:
                            return
                yield from self._hand_out(number, batch, plan, action, work, check)
                if self.recovery.failed:
                    return
        self.recovery.refuse(self._kept.error())

    def _hand_out(
        self,
        number: int,
        batch: LoopBatch,
        plan: Plan,
        action: Forward | Idle,
        work: Work,
        check: LossCheck | None,
        trial: Trial | None = None,
    ) -> Iterator[LoopMicroBatch]:
        """Yield the micro-batch of an action once, for its loss or for a ``trial`` of it. Raises
        HeadraceError where the loop did not run its backward, unless memory ran out."""
        self.targets = work.targets * (1 if check is None else check.times(trial))
        micro = self._start_micro_batch(batch, plan, action, work, check, trial)
        try:
            yield micro
        finally:
            self.release()
            self.targets = work.targets
        if not self.recovery.failed and not micro.done:
            raise HeadraceError(
                f"micro-batch of step {number}",
                got="no backward",
                wanted="micro.backward(loss) for each micro-batch",
            )
        if trial is None and not self.recovery.failed:
            self._kept.look()

    @property
    def own_loss(self) -> float:
        """The sum of this rank's losses in the step. Synchronizes with the device."""
        return 0.0 if self._loss_sum is None else float(self._loss_sum)

    def update(self, number: int, loss: float) -> tuple[float, float]:
        """Add up gradients over ranks, and take one step of optimizer and scheduler, unless that is
        left to the loop, or the loss or the norm of the gradient is not finite: then no gradient is
        left, which a loop might make a step of. Collective.

        Returns ``loss``, that of the whole step, and the norm of its gradient, before it is clipped
        and of all trained parameters: NaN where the loss is not finite.
        """
        start = self._clock.mark()
        norm = math.nan
        if self.check and self.check_losses:
            self._require_sums()
            self.check = not math.isfinite(loss)  # a loss of inf or NaN could not be checked
        if math.isfinite(loss):
            self.held.add_up(self.groups.world)
            norm_tensor = self.held.norm()
            norm = float(norm_tensor)
            if self.updates and math.isfinite(norm):
                self._clip_and_step(norm_tensor)
        if not math.isfinite(norm):
            self._drop_gradients()
        elif self.updates:
            self.optimizer.zero_grad()
        self._update = start, self._clock.mark()
        return loss, norm

    def _clip_and_step(self, norm: torch.Tensor) -> None:
        """Clip the gradient, whose norm is ``norm`` [], and take one step."""
        if self.clip is not None:
            self.held.scale_down(norm, self.clip)
        self._step()

    def rows(self) -> tuple[Row, ...]:
        """The measured seconds of this rank's step: for each micro-batch a row of its forwards and
        one of its backwards, then one of the update."""
        return tuple(self._rows())

    def drop_attempt(self) -> None:
        """Drop the gradients of an attempt that ran out of memory, and the model's records of its
        forwards: ranks had not run the same ones when it ended."""
        self._drop_gradients()
        self.model.forget()
        gc.collect()

    def abandon(self) -> None:
        """Drop the gradients of a step that is not finished."""
        self._drop_gradients()

    def bytes_now(self) -> int:
        """Bytes of the model and its optimizer on this rank."""
        return bytes_now(self.held.model, self.optimizer)

    def metrics(self, number: int, plan: Plan, step_s: float | None) -> dict[str, Any]:
        """Metrics of a step: the learning rate ``lr``, and ``targets``, the tokens that have a
        loss. A step whose seconds were measured has the model FLOPs utilization ``mfu`` too, which
        is None, as the FLOPs of a user's model are not known."""
        rate = float(self.optimizer.param_groups[0]["lr"])
        metrics: dict[str, Any] = {"lr": rate, "targets": self.targets}
        return metrics if step_s is None else metrics | {"mfu": None}

    def skip(self, number: int, batch: LoopBatch, plan: Plan) -> None:
        """Leave a step out. Collective: raises PlanMismatch on every rank where any trains it."""
        batch.bring(plan)  # as the ranks do that train the step
        _agreed_reports(self._report(f"skips step {number}", batch), self.groups)

    def work(self, number: int, batch: LoopBatch, plan: Plan) -> Work:
        """Read this rank's samples, agree on the packs of all ranks, make their groups, and compile
        and check this rank's program. Collective."""
        me = self.groups.rank
        batch.bring(plan)
        own_packs = list[_OwnPack]()
        failure: Exception | None = None
        try:
            self._require_own_parameters()
            require_known_wrapper(self.held.model, static=True)
            if self.held.sharded != self._sharded:
                raise ModelError(
                    type(self.held.inner).__name__,
                    got="fully_shard since the loop began",
                    wanted="fully_shard before hr.attach",
                )
            require_linear_hooks(self.held.model, self._hooks_seen)
            if self.check_losses:
                self.model.look_again()
            own_packs = self._read_packs(batch, plan)
        except Exception as error:  # told to all ranks, which would wait for this one
            failure = error
        report = self._report(f"trains step {number}", batch, own_packs, failure)
        reports = _agreed_reports(report, self.groups, failure)
        if self.check_losses and any(report.looks_again for report in reports):
            self.check, self._looks_again = True, False
        packs, targets = _packs_of(reports, plan, learned=batch.learned)
        # Sorted, as every rank must make the same process groups in the same order.
        sharing = sorted({ranks for groups in packs for ranks in groups})
        self.model.prepare(group for ranks in sharing for group in self.model.groups_of(ranks))
        program = compile_turns(plan, packs, me)
        check_turns([program], plan, packs)
        checked = _checked_actions(program, packs, plan)
        return Work(program=program, packs=_by_number(own_packs), targets=targets, checked=checked)

    def _report(
        self,
        does: str,
        batch: LoopBatch,
        own_packs: Sequence[_OwnPack] = (),
        failure: Exception | None = None,
    ) -> _RankReport:
        """What this rank tells all others before a step: what its loop ``does`` with the step, its
        packs, and the error of reading them, if any."""
        packs = dict[str, list[list[Any]]]()
        for own in own_packs:
            of_micro_batch = packs.setdefault(str(own.micro_batch), [])
            of_micro_batch.append([list(own.ranks), checksum_of(own.pack.values)])
        # The first rank of each pack counts its targets, so that each is counted once.
        led = (own.pack.targets for own in own_packs if own.ranks[0] == self.groups.rank)
        return _RankReport(
            led_targets=sum(led),
            must_match={
                "loop": does,
                "optimizer": f"learning rates {self._rates()}",
                "samples": _samples_text(batch.lengths),
                "weights and buffers": self._alike.text() if self.groups.ranks > 1 else "",
            },
            packs=packs,
            looks_again=self._looks_again,
            failure=None if failure is None else f"{type(failure).__name__}: {failure}",
        )

    def _read_packs(self, batch: LoopBatch, plan: Plan) -> list[_OwnPack]:
        """Read the samples of the micro-batches that this rank works on; returns their packs, in
        the order of the plan."""
        return [
            _OwnPack(micro_batch=index, pack=pack, ranks=ranks)
            for index, micro in enumerate(plan.micro_batches)
            if self.groups.rank in plan.pipelines[micro.pipeline].ranks
            for pack, ranks in self._packs(batch, plan, index)
        ]

    def _step(self) -> None:
        """Take one step of the optimizer, and one of the scheduler. Raises HeadraceError where the
        loop has stepped the scheduler since the last one."""
        optimizer = _unwrapped(self.optimizer)
        _STEPPED_NOW.add(optimizer)
        try:
            self.optimizer.step()
        finally:
            _STEPPED_NOW.discard(optimizer)
        if self.scheduler is None:
            return
        if self._scheduler_state not in (None, self._state_of_scheduler()):
            raise HeadraceError(
                "scheduler.step()",
                got="a step by the loop",
                wanted="none: the run takes one after each of the optimizer's",
                hint="leave scheduler.step() out, or give hr.attach no scheduler",
            )
        self.scheduler.step()
        self._scheduler_state = self._state_of_scheduler()

    def _state_of_scheduler(self) -> tuple[int | None, list[float]]:
        """What a step of the scheduler changes: its ``last_epoch``, beside which a loop may set
        rates of its own; the learning rates where it does not count its steps."""
        epoch = getattr(self.scheduler, "last_epoch", None)
        return epoch, self._rates() if epoch is None else []

    def _rates(self) -> list[float]:
        """The learning rate of each of the optimizer's groups of parameters."""
        return [float(group.get("lr") or 0) for group in self.optimizer.param_groups]

    def _require_own_parameters(self) -> None:
        """Raise ModelError where the optimizer was given parameters that are not the model's since
        the loop began."""
        count = _count_parameters(self.optimizer)
        if count != self._parameter_count:
            self.held.shard_again()  # what FSDP2 has gathered are other tensors
            require_own(self.held.model, self.optimizer)
            self._parameter_count = count

    def _drop_gradients(self) -> None:
        """Drop the gradients of the optimizer's parameters, and those of the model that it has
        not: what is left would be summed over ranks once more."""
        self.optimizer.zero_grad()
        for parameter in self.held.trained:
            parameter.grad = None

    def _require_no_gradients(self, number: int) -> None:
        """Drop what gradients are left from the step before, which are sums over ranks and would be
        summed over ranks again: of parameters that another optimizer has. Raises HeadraceError for
        any where the loop takes the optimizer's steps."""
        if self.updates:
            self._drop_gradients()
            return
        if any(p.grad is not None and bool(p.grad.any()) for p in self.held.trained):
            raise HeadraceError(
                f"gradients of step {number}",
                got="some that are there before it",
                wanted="none",
                hint="call optimizer.zero_grad() after optimizer.step(), or model.zero_grad() "
                "where the optimizer has a part of the model: a step has the gradients of all its "
                "samples, however many micro-batches it takes",
            )

    def resumed(self) -> None:
        """Note that a checkpoint was loaded: check losses in the next step, and forget how often
        the scheduler was stepped, which the checkpoint has set anew."""
        self.check, self._scheduler_state = self.check_losses, None

    def _require_sums(self) -> None:
        """Raise ModelError on every rank where any has a loss that is no sum over the labels of the
        step, with weights and optimizer as they were. Collective."""
        errors = [check.error() for check in self._checks]
        own_error = next((error for error in errors if error is not None), None)
        fields = None
        if own_error is not None:
            fields = [own_error.what, own_error.got, own_error.wanted, own_error.hint]
        fields_by_rank = gather_bytes(json.dumps(fields).encode(), self.groups.world)
        for rank, data in enumerate(fields_by_rank):
            error_fields = json.loads(data)
            if error_fields is not None:
                self.abandon()
                what, got, wanted, hint = error_fields
                where = f" on rank {rank}" if len(fields_by_rank) > 1 else ""
                raise ModelError(f"{what}{where}", got=got, wanted=wanted, hint=hint)

    def _packs(self, batch: LoopBatch, plan: Plan, index: int) -> Iterator[tuple[Pack, Members]]:
        """The packs of the plan's micro-batch ``index``, each with the ranks that it is spread
        over: those of the plan, or fewer where the pack is too small for all."""
        micro = plan.micro_batches[index]
        for pack in self.model.packs([batch.read(i) for i in micro.sequences]):
            yield pack, self.model.ranks_for(pack, plan.pipelines[micro.pipeline].ranks)

    def _pack_of(
        self, batch: LoopBatch, plan: Plan, action: Forward | Idle, work: Work
    ) -> tuple[Pack, Members, str | None]:
        """What an action works on: a pack, the ranks that share it, and the attention method by
        which they exchange tokens; None where the plan gives it to one rank."""
        if isinstance(action, Idle):
            return self._idle_pack(batch), (self.groups.rank,), None
        micro = plan.micro_batches[action.micro_batch]
        # A short pack may be left to fewer ranks, even one: the method stays that of the plan.
        spread = len(plan.pipelines[micro.pipeline].ranks) > 1
        exchange = micro.layers.options[0].attention if spread else None
        return work.packs[action.micro_batch, action.pack], action.group, exchange

    def placed(
        self,
        batch: LoopBatch,
        plan: Plan,
        action: Forward | Idle,
        work: Work,
        targets: int | None = None,
        model: SpreadModel | None = None,
    ) -> BatchPart:
        """This rank's part of the micro-batch of an action.

        ``targets`` takes the place of ``work.targets`` where it is given, and ``model``, another
        model of the same kind, that of the loop.
        """
        pack, ranks, exchange = self._pack_of(batch, plan, action, work)
        model = self.model if model is None else model
        return model.place(pack.values, ranks, targets=targets or work.targets, exchange=exchange)

    def _start_micro_batch(
        self,
        batch: LoopBatch,
        plan: Plan,
        action: Forward | Idle,
        work: Work,
        check: LossCheck | None,
        trial: Trial | None,
    ) -> LoopMicroBatch:
        """Set the recompute levels of the layers for the micro-batch of an action, spread the model
        over it, and return it for the loop to run. Its loss is added to the step's unless this is a
        ``trial``, and is noted in ``check`` where there is one."""
        pack, _, _ = self._pack_of(batch, plan, action, work)
        idle = isinstance(action, Idle)
        micro = None if isinstance(action, Idle) else plan.micro_batches[action.micro_batch]
        times = None if trial is not None else self._begin_timing(plan, action, pack)
        if self.probes.levels is not None:
            options = () if micro is None else micro.layers.options
            self.probes.levels.choose([option.recompute for option in options])
        self.part = part = self.placed(batch, plan, action, work, self.targets)
        if check is not None and trial is not None:
            self.part = part = check.changed(part, trial)
        if check is not None:
            self.model.watch(check.watching(trial))
        elif self._watched:
            self.model.watch(lambda _: None)  # results are noted, of which functions are told
        self.model.take(part)
        forward_start = self._clock.mark()

        def backward(handed_out: LoopMicroBatch, loss: torch.Tensor) -> None:
            """The backward of the micro-batch: times it, adds its loss [] to the rank's sum, and
            notes for the check of losses what this loss depended on."""
            if self.check and self.check_losses:
                require_loss(loss)
            if idle:
                loss = loss * 0.0  # the backward must run for its collectives, but adds nothing
            if trial is None:
                self._kept.look()
                if self.updates and not self._scaler_sought:
                    self.recovery.refuse(scaled_error(loss))
                    self._scaler_sought = True
            backward_start = self._clock.mark()
            self.held.sum_shards()
            if check is not None and trial == check.looked_at and not idle:
                weighed = handed_out.weighed
                check.seen = self.model.checked_backward(loss, weighed=weighed)
            else:
                loss.backward()
            if trial is None:
                self._kept.note(self.held.trained)
            if self._watched and trial is None and not idle:
                self._compare_functions(loss)
            if times is not None:
                times.forward.append((forward_start, backward_start))
                times.backward.append((backward_start, self._clock.mark()))
            self.release()
            own_loss = loss.detach()
            if check is not None and not idle:
                check.losses[trial or "whole"] = own_loss
                check.by_sequence |= handed_out.uses_sequences
                check.leaks += handed_out.leaks
                if trial is None:
                    self._checks.append(check)
            if trial is None:
                self._loss_sum = own_loss if self._loss_sum is None else self._loss_sum + own_loss

        return self.micro_batch(batch, plan, action, work, part, backward, check, trial)

    def _compare_functions(self, loss: torch.Tensor) -> None:
        """Note where a loss [] is made by other functions than those that were checked, so that all
        ranks check theirs in the next step."""
        functions = functions_of(loss)
        self._looks_again |= not self.check and not functions <= self._functions
        self._functions |= functions

    def micro_batch(
        self,
        batch: LoopBatch,
        plan: Plan,
        action: Forward | Idle,
        work: Work,
        part: BatchPart,
        backward: Callable[[LoopMicroBatch, torch.Tensor], None],
        check: LossCheck | None = None,
        trial: Trial | None = None,
    ) -> LoopMicroBatch:
        """The micro-batch of an action, for a caller that runs the model on ``part``, this rank's
        part of it; ``backward(micro, loss)`` is called by ``micro.backward(loss)``. ``check`` says
        what a ``trial`` of the loss changes."""
        pack, ranks, _ = self._pack_of(batch, plan, action, work)
        planned = (
            () if isinstance(action, Idle) else plan.micro_batches[action.micro_batch].sequences
        )
        # A planned sequence is one sample, or several that were given to stay together. These have
        # the same factor, as a trial leaves out all of them or none.
        samples, factors = list[int](), list[float]()
        for at, sequence in enumerate(planned):
            factor = 1.0 if check is None else check.share_of(at, trial)
            for sample in batch.members(sequence):
                samples.append(sample)
                factors.append(factor)
        share_divisor = len(ranks) * len(batch.tokens)  # ranks that add the loss, samples of a step
        parameter = next(self.held.model.parameters())
        known_share = 0.0 if isinstance(action, Idle) else None
        if known_share is None and part.by_places:
            known_share = share_factor(trial, self.groups.rank) * part.tokens / self.targets
        return LoopMicroBatch(
            inputs=part.inputs,
            rest=part.rest,
            given_labels=part.labels,
            known_share=known_share,
            tokens=pack.targets,
            targets=self.targets,
            ranks=ranks,
            group=part.group,
            sequences=tuple(samples),
            checking=trial is not None,
            _backward=backward,
            _survives=self.recovery.survives,
            _sums=SequenceSums(
                lengths=[batch.tokens[sample] for sample in samples],
                shares=[factor / share_divisor for factor in factors],
                placed=part.placed,
                group=part.group,
                dtype=torch.promote_types(parameter.dtype, torch.float32),
                device=self.device,
            ),
        )

    def release(self) -> None:
        """Make the model the user's plain one again, which works on no micro-batch."""
        self.part = None
        self.model.watch(None)
        self.model.release()

    def _idle_pack(self, batch: LoopBatch) -> Pack:
        """A pack of two tokens without a loss, for an idle turn of this rank."""
        sample = self.probes.sample if batch.like is None else batch.like()
        pack = self.model.made(sample, (2,), 1, document=self.probes.document)
        return replace(pack, targets=0)

    def _begin_timing(
        self, plan: Plan, action: Forward | Idle, pack: Pack
    ) -> _MicroBatchTimes | None:
        """The times of the micro-batch of an action, a new record with its first pack, to which
        ``pack`` adds its tokens; None for an idle turn."""
        if isinstance(action, Idle):
            return None
        index = action.micro_batch
        if index not in self._times:
            # An action has the ranks of one pack; the rows are of the whole micro-batch.
            ranks = plan.pipelines[plan.micro_batches[index].pipeline].ranks
            forward = Forward(stage=0, micro_batch=index, group=ranks)
            self._times[index] = _MicroBatchTimes(
                forward_action=forward, tokens=0, start=self._clock.mark()
            )
        self._times[index].tokens += pack.tokens
        return self._times[index]

    def _rows(self) -> Iterator[Row]:
        """Yield the rows of :meth:`rows`, in seconds since the step began. In truth each pack of a
        micro-batch runs its forward and then its backward; the two rows of a micro-batch show all
        of its forwards first, then all of its backwards."""
        between, rank = self._clock.between, self.groups.rank
        for times in self._times.values():
            forward, begin_s = times.forward_action, between(self._step_start, times.start)
            backward = Backward(stage=0, micro_batch=forward.micro_batch, group=forward.group)
            for action, marks in ((forward, times.forward), (backward, times.backward)):
                end_s = begin_s + sum(between(*pair) for pair in marks)
                yield Row(
                    rank=rank,
                    action=str(action),
                    kind=action.kind,
                    start_s=begin_s,
                    end_s=end_s,
                    tokens=times.tokens,
                    ranks=len(forward.group),
                )
                begin_s = end_s
        if self._update is not None:
            start_s, end_s = (between(self._step_start, mark) for mark in self._update)
            yield Row(rank=rank, action="U", kind="update", start_s=start_s, end_s=end_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _OwnPack:
    """A pack that this rank works on, the number of its micro-batch in the plan, and the ranks that
    it is spread over."""

    micro_batch: int
    pack: Pack
    ranks: Members


def _by_number(own_packs: Sequence[_OwnPack]) -> dict[tuple[int, int], Pack]:
    """The packs by (micro-batch of the plan, number of the pack within it)."""
    count, packs = Counter[int](), dict[tuple[int, int], Pack]()
    for own in own_packs:
        packs[own.micro_batch, count[own.micro_batch]] = own.pack
        count[own.micro_batch] += 1
    return packs


def _checked_actions(program: Program, packs: Packs, plan: Plan) -> frozenset[int]:
    """The indices of a program's actions whose losses are checked, at least one on every rank and
    alike on all ranks of a pack: in lockstep the first turn of each rank, else the packs that have
    a rank which no earlier pack had."""
    actions = enumerate(program.actions)
    turns = [(index, turn) for index, turn in actions if isinstance(turn, Forward | Idle)]
    if plan.semantics == "lockstep":  # all ranks take part in a turn, so all repeat the same one
        return frozenset(index for index, _ in turns[:1])
    seen, chosen = set[int](), set[tuple[int, int]]()
    for micro_batch, groups in enumerate(packs):
        for pack, ranks in enumerate(groups):
            if not seen.issuperset(ranks):
                seen.update(ranks)
                chosen.add((micro_batch, pack))
    return frozenset(
        index
        for index, turn in turns
        if isinstance(turn, Forward) and (turn.micro_batch, turn.pack) in chosen
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankReport:
    """What a rank tells all others before a step, as JSON.

    Attributes:
        led_targets: The sum of the targets of the packs whose first rank it is.
        must_match: Texts that must be the same on all ranks, by what they describe.
        packs: [ranks, checksum] of each of its packs, by the number of the micro-batch as text.
        looks_again: Whether its loss is made by other functions than those that were checked.
        failure: The error of reading its samples; None where there was none.
    """

    led_targets: int
    must_match: dict[str, str]
    packs: dict[str, list[list[Any]]]
    looks_again: bool
    failure: str | None


def _count_parameters(optimizer: torch.optim.Optimizer) -> int:
    """The number of parameters in all groups of an optimizer."""
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _samples_text(lengths: Lengths) -> str:
    """How many samples of how many tokens a step has, with a CRC-32 of their lengths and ids."""
    checksum = zlib.crc32(repr((lengths.tokens, lengths.ids)).encode())
    return f"{len(lengths)} of {sum(lengths.tokens):,} tokens, checksum {checksum:08x}"


def checksum_of(values: Mapping[str, torch.Tensor]) -> int:
    """The CRC-32 of the names, types, shapes and bits of tensors."""
    checksum = 0
    for name in sorted(values):
        value = values[name].detach().cpu().contiguous()
        checksum = zlib.crc32(f"{name} {value.dtype} {list(value.shape)}".encode(), checksum)
        checksum = zlib.crc32(value.view(-1).view(torch.uint8).numpy().data, checksum)
    return checksum


def _agreed_reports(
    own: _RankReport, groups: Groups, failure: Exception | None = None
) -> list[_RankReport]:
    """Gather the reports of all ranks and compare them; ``failure`` is this rank's. Collective.

    Raises on every rank: HeadraceError where one could not read its samples, and PlanMismatch where
    ranks skip and train a step, or have other learning rates, samples or weights.
    """
    messages = gather_bytes(json.dumps(asdict(own)).encode(), groups.world)
    reports = [_RankReport(**json.loads(message)) for message in messages]
    for rank, report in enumerate(reports):
        # First, as a rank that has other samples than those of the plan may fail to read these.
        for what, text in report.must_match.items():
            if text != reports[0].must_match[what]:
                raise PlanMismatch(
                    f"{what} of rank {rank}",
                    got=text,
                    wanted=f"{reports[0].must_match[what]}, as on rank 0",
                    hint="load weights on all ranks alike: run.load, or load_state_dict on each"
                    if what == "weights and buffers"
                    else "ranks must set the same rate, read the same data in the same order, and "
                    "call step.skip() alike",
                )
        if report.failure is not None:
            if failure is not None:  # this rank failed too: raise its own error, with its trace
                raise failure
            raise HeadraceError(f"samples of rank {rank}", got=report.failure, wanted="its samples")
    return reports


def _packs_of(reports: Sequence[_RankReport], plan: Plan, *, learned: bool) -> tuple[Packs, int]:
    """The ranks of each pack of each micro-batch, and the tokens of all ranks that have a loss, by
    the reports of all ranks. ``learned`` says whether the step must have such a token. Raises
    PlanMismatch where ranks of one micro-batch have other samples, and DataError for a step without
    a token that has a loss, where one is needed."""
    packs = [_ranks_of_packs(index, reports, plan) for index in range(len(plan.micro_batches))]
    targets = sum(report.led_targets for report in reports)
    if not targets and learned:
        raise DataError(
            "labels of the step",
            got=f"all of {sum(plan.lengths.tokens):,} tokens IGNORED (-100)",
            wanted="at least one token with a loss",
        )
    return packs, targets


def _ranks_of_packs(index: int, reports: Sequence[_RankReport], plan: Plan) -> list[Members]:
    """The ranks that each pack of the plan's micro-batch ``index`` is spread over, from the
    ``reports`` of all ranks. Raises PlanMismatch where the ranks of the micro-batch, which have all
    read its samples, report different packs."""
    micro = plan.micro_batches[index]
    ranks = plan.pipelines[micro.pipeline].ranks
    packs_by_rank = [reports[rank].packs.get(str(index), []) for rank in ranks]
    for rank, packs in zip(ranks, packs_by_rank, strict=True):
        if packs != packs_by_rank[0]:
            raise PlanMismatch(
                f"samples {list(micro.sequences)[:8]} of the step on rank {rank}",
                got=f"checksums {[checksum for _, checksum in packs]}",
                wanted=f"{[checksum for _, checksum in packs_by_rank[0]]}, as on rank {ranks[0]}",
                hint="every rank must read the same samples",
            )
    return [tuple(pack_ranks) for pack_ranks, _ in packs_by_rank[0]]


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer of torch within the wrapper that Accelerate may have put around it."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


def _refuse_steps(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Pre-hook of ``optimizer.step()``: raise HeadraceError for a step that the user's loop takes,
    which this run takes itself. Steps that a run takes are let through."""
    if optimizer not in _STEPPED_NOW:
        raise HeadraceError(
            "optimizer.step()",
            got="a call by the loop",
            wanted="none: the run takes one step when the last micro-batch is done",
            hint="leave optimizer.step() and optimizer.zero_grad() out",
        )
