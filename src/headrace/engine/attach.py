"""A user's training loop, driven by plans (Data-Centric Parallel).

    run = headrace.attach(model, optimizer, dataset, batch_tokens="64Ki", scheduler=scheduler)
    for step in run:
        for micro in step:
            loss = model(**micro.inputs).loss
            micro.backward(loss)
    run.save("checkpoint")

The user keeps model, optimizer, scheduler and data set. Every step is planned by its lengths: which
ranks work on which samples together, how they are packed, and what is computed again. Gradients are
those of one process over the same samples, and optimizer and scheduler take one step.
"""

from __future__ import annotations

import signal
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from headrace.adopt.axis_model import AxisModel
from headrace.adopt.block_recompute import recomputed
from headrace.adopt.held_weights import HeldWeights
from headrace.adopt.spread_model import BatchPart, SampleReader, SpreadModel
from headrace.adopt.token_model import compile as adopt
from headrace.comm.collectives import agree
from headrace.comm.launch import join_world
from headrace.comm.loop_watch import LoopWatch
from headrace.comm.mesh import Groups
from headrace.config.model import PlannerConfig, cache_folder
from headrace.costs import CostModel
from headrace.data.sampler import Sampler, SamplerOptions
from headrace.engine.adopted_costs import LoopSetup, measured
from headrace.engine.attach_options import (
    MeasureOptions,
    SampleOptions,
    SpreadOptions,
    refuse_former,
)
from headrace.engine.forward_pass import (
    ForwardRunner,
    MoreInputs,
    ValuesOf,
    gradients_of,
    inputs_of,
    weighted,
)
from headrace.engine.given_batches import (
    GivenOrder,
    given_order,
    meet_to,
    require_fitting,
    unfinished,
)
from headrace.engine.listener import ProgressLines, tell
from headrace.engine.loop_checkpoint import LoopCheckpoints
from headrace.engine.loop_runner import LoopMicroBatch, LoopRunner
from headrace.engine.loop_start import optimizer_text, require_trainable, share_weights
from headrace.engine.record import DrawnSteps, EarlyAndRare, RunRecord, run_facts
from headrace.engine.recovery import LeaveGroups, Recovery
from headrace.engine.run_planner import RunPlanner, Stopped
from headrace.engine.sample_order import (
    DrawnOrder,
    LoopBatch,
    PricedOrder,
    SampleOrder,
    Samples,
    StreamOrder,
)
from headrace.engine.step_engine import Engine, RunningStep
from headrace.errors import (
    CostError,
    DataError,
    HeadraceError,
    ModelError,
    PlanMismatch,
    SpecError,
)
from headrace.native.checkpoint import BackgroundWriter
from headrace.native.machine import machine_facts
from headrace.spec.step import Step
from headrace.units import counted, parse_bytes, parse_count

__all__ = ["Attached", "attach", "begin"]

_DRAWN = 8
"""Number of steps whose timelines of all ranks are recorded, where the total is known."""

LoopStep: TypeAlias = RunningStep[LoopBatch, LoopMicroBatch]


def attach(
    model: Module | AxisModel,
    optimizer: torch.optim.Optimizer,
    dataset: Any = None,
    *,
    longest: int | str | None = None,
    example: Any = None,
    batch_tokens: int | str | None = None,
    batch_sequences: int | None = None,
    epochs: int = 1,
    steps: int | None = None,
    scheduler: Any = None,
    clip: float | None = None,
    update: bool = True,
    check_loss: bool = True,
    seed: int = 0,
    planner: Literal["adaptive", "bucket", "packed", "dcp"] | PlannerConfig = "adaptive",
    samples: SampleOptions | None = None,
    spread: SpreadOptions | None = None,
    measure: MeasureOptions | None = None,
    out: str | Path | None = None,
    on_step: Callable[[Step], object] = lambda step: None,
    say: Callable[[str], object] = tell,
    **former: Any,
) -> Attached:
    """Drive a training loop by plans. Collective: every rank calls it alike, under torchrun or in
    a process of its own, and it begins torch.distributed where nobody has.

    Args:
        model: A model of transformers, or one that calls scaled_dot_product_attention; alone, under
            DDP, or sharded by FSDP2; in training mode, on its device. Or what ``hr.adapt`` made of
            a model of several axes.
        optimizer: Of the model's parameters.
        dataset: Items are dicts of token values [n] (``input_ids``, ``labels``), tuples of tokens
            and labels, or tokens; by number, or an iterable. Of several axes: dicts of the inputs
            of one sample, and ``labels`` of the places. Without one the samples of every step are
            given: ``for micro in run.step(samples)``.
        longest: Tokens of the longest sample that will be given (``"8Ki"``), without a data set.
        example: A sample as those that will be given, to look at: needed without a data set, but
            for a model of transformers.
        batch_tokens: Tokens of one optimizer step (``"64Ki"``), as a budget.
        batch_sequences: Samples of one optimizer step, in the place of a budget.
        epochs: Passes over the data, unless ``steps`` says how many steps to take.
        steps: Steps to take.
        scheduler: Takes one step after each of the optimizer's.
        clip: The largest norm of the gradient.
        update: Whether a step ends with that of the optimizer. Where False it ends with the
            gradients of all ranks added up: the loop clips, takes the optimizer's and the
            scheduler's step, and calls ``zero_grad()``, on all ranks alike.
        check_loss: Whether the loss is checked in the first step, and the first after a ``load``:
            it must be a sum over the labels, divided by ``micro.targets``, as the loss of a model
            of transformers is when it is called with ``micro.inputs``, or over sequences, each
            times its ``micro.sequence_share``. For this the loop gets one
            micro-batch of each rank three times more (``micro.checking`` is true).
        seed: Of the order of samples and of the planner.
        planner: ``adaptive`` decides for each step; to compare with, ``bucket`` and ``packed``
            parallel, and the accumulation of Data-Centric Parallel (``dcp``); or all options of a
            planner, as ``hr.PlannerConfig(name="static", static_size=2)``.
        samples: How samples are read and drawn.
        spread: How a model of tokens is spread over ranks.
        measure: The memory of a rank, and where costs come from.
        out: The folder for metrics and plans, which ``headrace report`` reads.
        on_step: Called with every finished step, its plan and its times, on the first rank.
        say: Called with lines for people, on the first rank.
        former: Former names of options, which are refused with their new ones.

    Returns:
        The run: a loop over its steps, or without a data set what takes them.

    Raises:
        SpecError: For options that say nothing, as ``steps`` without a data set.
        ModelError: For models that cannot be spread over ranks.
        DataError: For data without tokens.
        InfeasiblePlan: Where the longest sample fits nowhere; it says what would help.

    Example:
        >>> run = hr.attach(model, optimizer, dataset, batch_tokens="64Ki")
        >>> for step in run:
        ...     for micro in step:
        ...         micro.backward(model(**micro.inputs).loss)
    """
    refuse_former(former)
    samples = samples or SampleOptions()
    budget = None if batch_tokens is None else _tokens(batch_tokens)
    asked = {
        "batch_sequences": batch_sequences,
        "epochs": epochs != 1,
        "steps": steps,
    }
    own = {"samples.own": True if samples.own else None}
    require_fitting(dataset, {"longest": longest, "example": example, **own}, asked)
    if samples.iterations is not None:
        _require_drawable(dataset, samples, budget, batch_sequences)
    return begin(
        model,
        optimizer,
        lambda model: (
            given_order(model, longest or samples.longest, budget, example, own=samples.own)
            if dataset is None
            else _order(dataset, model, samples, budget, batch_sequences, seed)
        ),
        config={"loop": "attached"},
        budget=budget,
        epochs=epochs,
        steps=steps,
        scheduler=scheduler,
        clip=clip,
        update=update,
        check_loss=check_loss,
        seed=seed,
        planner=planner if isinstance(planner, PlannerConfig) else PlannerConfig(name=planner),
        samples=samples,
        spread=spread or SpreadOptions(),
        measure=measure or MeasureOptions(),
        out=out,
        on_step=on_step,
        say=say,
    )


def begin(
    model: Module | AxisModel,
    optimizer: torch.optim.Optimizer,
    order_of: Callable[[SpreadModel], SampleOrder],
    *,
    config: Mapping[str, Any],
    budget: int | None,
    epochs: int = 1,
    steps: int | None,
    scheduler: Any,
    clip: float | None,
    update: bool = True,
    check_loss: bool,
    seed: int,
    planner: PlannerConfig,
    samples: SampleOptions,
    spread: SpreadOptions,
    measure: MeasureOptions,
    out: str | Path | None,
    on_step: Callable[[Step], object],
    say: Callable[[str], object],
) -> Attached:
    """:func:`attach` for samples that come in any order.

    Args:
        model: As for :func:`attach`, as are all that are not named here.
        optimizer: Of the model's parameters.
        order_of: Makes the order of samples for a reader of the model.
        config: What the report shows as the configuration of the run.
        budget: Tokens of one optimizer step, where it has a budget.
    """
    module = model.model if isinstance(model, AxisModel) else model
    require_trainable(module, optimizer, scheduler, clip=clip, update=update)
    device = _device_of(module)
    join_world(device)
    groups = Groups(device=device)
    held = HeldWeights.of(module, groups.ranks)
    quiet = groups.rank > 0
    agree("optimizer of the loop", optimizer_text(optimizer), groups.world)
    asked = [budget, epochs, steps, clip, update, seed, str(planner), str(spread), measure.memory]
    agree("SampleOptions(own=...) of hr.attach", str(samples.own), groups.world)
    agree("arguments of hr.attach", repr(asked), groups.world)
    share_weights(held, groups, (lambda text: None) if quiet else say)
    adopted = partial(_spread, options=samples, spread=spread, groups=groups)
    driven = adopted(model)
    order = order_of(driven)
    agree("data of the loop", order.fingerprint, groups.world)
    document = order.longest
    if document is None:
        given = samples.longest
        document = driven.length(order.first()) if given is None else _tokens(given)
    most = order.total if budget is None else min(order.total, budget)
    setup = LoopSetup(
        model=driven,
        held=held,
        optimizer=optimizer,
        groups=groups,
        device=device,
        options=planner,
        document=document,
        longest=max(document, most // groups.ranks),
        memory_bytes=parse_bytes(measure.memory) if measure.memory else None,
        cache=cache_folder(measure.cache),
        costs=measure.costs,
        say=(lambda text: None) if quiet else say,
        progress=(lambda what, done, of: None) if quiet else ProgressLines(say),
    )
    return Attached(
        setup=setup,
        adopted=adopted,
        order=order,
        config=config,
        seed=seed,
        scheduler=scheduler,
        clip=clip,
        update=update,
        check_loss=check_loss,
        steps=steps,
        epochs=epochs,
        out=out,
        on_step=on_step,
    )


class Attached:
    """A loop over planned steps.

    Attributes:
        number: The step that comes next.
        found: What was measured of the model; ``found.costs`` is what it costs.
    """

    def __init__(
        self,
        *,
        setup: LoopSetup,
        adopted: Callable[[Module], SpreadModel],
        order: SampleOrder,
        config: Mapping[str, Any],
        seed: int,
        scheduler: Any,
        clip: float | None,
        update: bool,
        check_loss: bool,
        steps: int | None,
        epochs: int,
        out: str | Path | None,
        on_step: Callable[[Step], object],
    ) -> None:
        """Measure the model's costs on a first sample and make planner, record and engine; an error
        gives the user the plain model back. Collective."""
        sample = order.first()
        self._setup, self._order, self._seed, self._config = setup, order, seed, config
        self._steps, self._epochs = steps, epochs
        self._state = order.state()
        self._begun, self.number = False, 0
        self._open: LoopStep | None = None
        self._adopted, self._others = adopted, dict[int, tuple[SpreadModel, HeldWeights]]()
        self._writer: BackgroundWriter | None = None
        self._stop_asked: Callable[[], bool] = lambda: False
        self._restore = setup.model.begin(sample, setup.device)
        try:
            self.found = measured(setup, sample)
            self._record = RunRecord(out) if setup.groups.rank == 0 else None
            self._drawn = (
                EarlyAndRare() if steps is None else DrawnSteps(wanted=_DRAWN, steps=steps)
            )
            self._planner = self._planner_of(self.found.costs)
            self.engine = self._engine(scheduler, clip, on_step, update=update, checks=check_loss)
            self._check_and_price()
            self._watch = self._start_watch() if setup.groups.ranks > 1 else None
        except BaseException:
            self._restore()
            raise

    @property
    def model(self) -> Module:
        """The user's model, as the user calls it."""
        return self._setup.held.model

    @property
    def predicts_next(self) -> bool:
        """Whether labels of samples are of the next token: a run moves them to the places that
        predict them."""
        return getattr(self._setup.model, "labels", "same") == "next"

    @property
    def rank(self) -> int:
        """The number of this process among all."""
        return self._setup.groups.rank

    def __iter__(self) -> Iterator[LoopStep]:
        """The steps that are left, planned one by one. A loop that is left by ``break`` goes on in
        the next one with the same batch, unless it was trained or skipped (``step.skip()``).

        Raises:
            HeadraceError: For a step whose micro-batches were not all trained.
            PlanMismatch: On every rank where ranks read other lengths of a stream, or one ends.
            PeerLost: Where another rank has failed or ended: it names the rank and its step.
        """
        if isinstance(self._order, GivenOrder):
            self._order.next_batch()
        if not self._begun:
            self._begin()
            self._plan_ahead()
        while self._open is not None or self._has_next_step():
            left = self._open
            if self._watch is not None:
                self._watch.enter()
            if left is None:
                step = self.engine.next_step(self.number, self._next_batch)
            else:
                step = left.again() if left.begun else left
            self._open = step
            yield step
            if not step.done:
                raise HeadraceError(
                    f"step {step.number}",
                    got="micro-batches that were not trained",
                    wanted="a loop over all of them: for micro in step, or step.skip()",
                )
        self.finish_saving()
        if self._watch is not None:
            self._watch.rest()

    def step(self, samples: Iterable[Any], *, together: Iterable[Sequence[int]] = ()) -> LoopStep:
        """The next step, of samples that are given: ``for micro in run.step(samples)``. It is
        planned now, and the optimizer takes its step after the last micro-batch. Collective, as are
        the following three: every rank gives the same samples; or its own, perhaps none, under
        ``hr.SampleOptions(own=True)``: then the batch has those of rank 0 first.

        Args:
            samples: Items as those of a data set; fields may differ from those of other steps.
            together: The numbers of samples that stay in one micro-batch, of each group: a loss of
                ``micro.per_sequence`` may compare them, which follow each other there. They count
                what this rank gives.

        Returns:
            The step: a loop over this rank's micro-batches; its ``loss`` is known afterwards.

        Raises:
            DataError: On every rank for samples that cannot be read, or are longer than the run was
                made for.
            PlanMismatch: On every rank where ranks give other samples, or ask for something else.
            HeadraceError: On every rank where the step before was left half way.
            InfeasiblePlan: On every rank where the samples fit nowhere.

        Example:
            >>> for micro in run.step(samples):
            ...     micro.backward(micro.loss(model(**micro.inputs).logits))
        """
        asks = f"step {self.number}"
        return self._step_of_batch(self._given_batch(asks, samples, together=together))

    def plan_ahead(self, samples: Iterable[Any], *, together: Iterable[Sequence[int]] = ()) -> None:
        """Have the plans of samples that come later made now, by a process of their own: those of
        their step and of their forwards, which :meth:`step`, :meth:`map` and :meth:`backward` use
        when they get samples of these lengths. Nothing else depends on it. Where plans must change
        meanwhile, as more memory is to be left free, they are made when they are needed; so they
        are under ``hr.PlannerConfig(ahead=0)``, and those of steps where plans are smoothed.
        Collective.

        Args:
            samples: As for :meth:`step`; of these only the lengths count.
            together: As for :meth:`step`.

        Raises:
            DataError: As :meth:`step`.
            PlanMismatch: On every rank where ranks give samples of other lengths.

        Example:
            >>> run.plan_ahead(coming)
            >>> for micro in run.step(samples):
            ...     micro.backward(micro.loss(model(**micro.inputs).logits))
        """
        asks, order = f"plans made ahead before step {self.number}", self._given_order("plan_ahead")
        lengths = order.lengths(asks, samples, self._setup.groups, together=together)
        self._planner.announce(lengths)

    def map(
        self,
        samples: Iterable[Any],
        fn: ValuesOf,
        *,
        model: Module | None = None,
        more: MoreInputs | None = None,
    ) -> list[Tensor]:
        """Values of samples by forwards alone, planned as such: where nothing is kept for a
        backward, ranks hold more. Collective.

        Args:
            samples: Items as those of a data set; nobody needs labels.
            fn: Called with the model's outputs and the micro-batch, without gradients; gives
                floating numbers of the local tokens [1, s_r, ...], or of the sequences [k]
                (``micro.per_sequence``). Labels are not given to a model that needs none.
            model: Another model of the same class, such as a frozen reference; that of the run
                where it is None. It is adopted when it first comes.
            more: Called with the micro-batch; gives arguments of the model beside its inputs.

        Returns:
            In the order of the samples that this rank gave: the values [n, ...] of their tokens,
            or [].

        Raises:
            ModelError: For values of another shape, and for another kind of model.
            HeadraceError: On every rank where ``fn`` failed on any, and as :meth:`step`.

        Example:
            >>> old = run.map(samples, lambda outputs, micro: logp(outputs.logits, micro))
        """
        asks = f"a map before step {self.number}"
        batch = self._given_batch(asks, samples, learned=False)
        spread, held = self._model_for(model)
        runner = ForwardRunner(loop=self._runner, model=spread, held=held, fn=fn, more=more)
        step = RunningStep(
            engine=replace(self.engine, runner=runner),
            number=self.number,
            batch=batch,
            planned=self.engine.planner.plan_forward(batch.lengths),
            waited_s=0.0,
            forward=True,
        )
        for _ in step.attempts():
            pass
        return runner.gathered(batch)

    def backward(
        self,
        samples: Iterable[Any],
        fn: ValuesOf,
        gradients: Sequence[Any],
        *,
        more: MoreInputs | None = None,
    ) -> LoopStep:
        """A step with the gradients of values that :meth:`map` gave, of whatever loss: forward and
        backward of the sum of values times gradients, and a step of the optimizer. Collective.

        Args:
            samples: Those of :meth:`map`.
            fn: That of :meth:`map`. The model must give the same values again: without dropout.
            gradients: Of the loss by each value, in the order of the samples: [n, ...] or [] as the
                values are, None for zero.
            more: As for :meth:`map`.

        Returns:
            The step that was taken; its ``loss`` is the sum of values times gradients.

        Raises:
            DataError: On every rank for gradients of another shape, and as :meth:`step`.

        Example:
            >>> values = [v.requires_grad_() for v in run.map(samples, fn)]
            >>> contrastive(torch.stack(values)).backward()
            >>> step = run.backward(samples, fn, [v.grad for v in values])
        """
        asks = f"step {self.number} by gradients"
        beside = partial(gradients_of, gradients)
        batch = self._given_batch(asks, samples, beside=beside, learned=False)
        step, runner, spread = self._step_of_batch(batch), self._runner, self._setup.model
        checked, runner.check = runner.check, False
        try:
            for micro in step:
                with micro:
                    added: Mapping[str, Any] = {} if more is None else more(micro)
                    outputs = self.model(**inputs_of(runner.part, spread), **added)
                    if micro.sequences:
                        loss = weighted(fn(outputs, micro), micro, batch)
                    else:
                        loss = spread.number(outputs)
                    micro.backward(loss)
        except BaseException:
            self._open = None  # the user has no loop to leave
            raise
        finally:
            runner.check = checked
        return step

    def __len__(self) -> int:
        """The steps of the whole loop. Raises TypeError where it is a stream of some epochs."""
        if self._steps is not None:
            return self._steps
        left = self._order.coming(self._epochs)
        if left is None:
            raise TypeError("a stream of samples has no length; give hr.attach steps=")
        return self.number + sum(1 for _ in left)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of the micro-batch at work, for collectives of the model's own; None where this
        rank works alone."""
        part = self._runner.part
        return None if part is None else part.group

    def recompute(self, layer: Callable[..., Any], *inputs: Any) -> Any:
        """Run a layer so that its backward computes it again, all but its attention.

        Args:
            layer: The layer, or any function.
            inputs: Its inputs.

        Returns:
            ``layer(*inputs)``.
        """
        return recomputed(layer, *inputs)

    @contextmanager
    def shard(self, batch: Mapping[str, Tensor]) -> Iterator[BatchPart]:
        """Spread the model over all ranks for a batch, to evaluate it: ``with run.shard(batch) as
        part: loss = model(**part.inputs).loss``. Collective; not within a step.

        Args:
            batch: Values [b, S] that all ranks have alike.

        Yields:
            This rank's part: call the model with its ``inputs``. The losses of all ranks add up to
            the mean.
        """
        self.found.probes.choose([])
        part = self._setup.model.shard(batch)
        self._setup.model.take(part)
        try:
            yield part
        finally:
            self._setup.model.release()

    @contextmanager
    def stoppable(
        self, folder: str | Path, *, keep: int = 3, grace_s: float = 25.0
    ) -> Iterator[None]:
        """Within it a signal that ends a job (Ctrl-C, SIGTERM, SIGHUP, SIGUSR1), to whichever rank,
        ends the loop after the step under way, with a checkpoint: ``with run.stoppable("saved"):``
        around the loop. Collective at its end; in the main thread.

        Args:
            folder: As for :meth:`save`; ``run.load(folder)`` goes on from there.
            keep: How many of the last checkpoints stay there.
            grace_s: Seconds after which the process is ended all the same, as by a second signal;
                torchrun and many schedulers kill 30 s after their signal.

        Yields:
            Nothing.

        Raises:
            KeyboardInterrupt: On every rank after Ctrl-C, once the checkpoint is written.
            SystemExit: On every rank after another signal, with 128 and its number.
            SpecError: Outside of the main thread.

        Example:
            >>> with run.stoppable("checkpoint"):
            ...     for step in run:
            ...         for micro in step:
            ...             micro.backward(model(**micro.inputs).loss)
        """
        from headrace.engine.loop_stop import LoopStop

        watch = self._watch
        stop = LoopStop(
            rank=self.rank,
            grace_s=grace_s,
            ask=(lambda number: True) if watch is None else watch.ask_stop,
            where=partial(_whereabouts, weakref.ref(self)),
        )
        self._stop_when(lambda: bool(stop.number) or (watch is not None and watch.stop_asked()))
        try:
            with suppress(Stopped):
                yield
            number = max(map(int, self._checkpoints().gather(b"%d" % stop.number)))
            if number:
                self._leave(number, folder, keep)
        finally:
            stop.close()
            self._stop_when(lambda: False)

    def _stop_when(self, asked: Callable[[], bool]) -> None:
        self._stop_asked = asked
        self._planner.stop_when(asked)

    def _leave(self, number: int, folder: str | Path, keep: int) -> NoReturn:
        """Write a checkpoint and end the loop as a signal does. Collective."""
        saved = self.save(folder, keep=keep)
        if self._watch is not None:
            self._watch.rest()
        self._setup.say(
            f"stopped after step {self.number}; checkpoint {saved}; continue with "
            f"run.load({str(folder)!r})"
        )
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    def save(self, folder: str | Path, *, keep: int = 3, background: bool = False) -> Path:
        """Write a checkpoint: weights, optimizer, scheduler, the place in the data, and what plans
        follow from. Collective.

        Args:
            folder: The checkpoint gets a folder of its own within it.
            keep: How many of the last checkpoints stay there.
            background: Whether it is copied to the host's memory and written from there while the
                loop goes on. It is there at the end of the step in which all ranks have written,
                after the last step, or after :meth:`finish_saving`, which a loop that is left by
                ``break`` has to call.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: On every rank when any could not write it; in the background, a later
                step may raise it too.
        """
        self._meet_to(f"a checkpoint before step {self.number}")
        scheduler = self._runner.scheduler
        extra = {
            "step": self.number,
            "ranks": self._setup.groups.ranks,
            "data": self._state,
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "planner": self._planner.state(),
        }
        if self._record is not None:
            try:
                self._record.keep(self._planner.calibration)
            except CostError as error:
                self._setup.say(f"what was learnt about costs is not kept ({error})")
        self.finish_saving()
        if background and self._writer is None:
            self._writer = BackgroundWriter()
        writer = self._writer if background else None
        return self._checkpoints().save(Path(folder), self.number, extra, keep=keep, writer=writer)

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is written in the background. Collective; raises as
        :meth:`save`."""
        if self._writer is not None:
            self._writer.finish(self._checkpoints().gather)

    def load(self, folder: str | Path) -> bool:
        """Go on from a checkpoint. Collective, before the first step. With the same number of ranks
        plans and random numbers are those of a run without a break; with another, the order of the
        samples is.

        Args:
            folder: A checkpoint, or a folder of which the newest whole one is taken.

        Returns:
            False, with everything as it is, where there is no checkpoint yet.

        Raises:
            CheckpointError: For a checkpoint of another model, or where all are damaged.
            DataError: For one of other data.
        """
        self._meet_to("a load of a checkpoint")
        self.finish_saving()
        extra = self._checkpoints().load(Path(folder), self._setup.say)
        if extra is None:
            return False
        self._order.restore(extra["data"])
        self._open = None
        self.number, self._state = int(extra["step"]), dict(extra["data"])
        if self._runner.scheduler is not None:
            self._runner.scheduler.load_state_dict(extra["scheduler"])
        if extra["ranks"] == self._setup.groups.ranks:
            self._plan_as(extra["planner"])
        self._runner.resumed()
        ranks = counted(extra["ranks"], "rank")
        self._setup.say(f"going on with step {self.number}, saved by {ranks}")
        return True

    def planner_state(self) -> dict[str, Any]:
        """What plans follow from, as JSON, for checkpoints that the loop writes by itself.

        Returns:
            What :meth:`go_on` takes.
        """
        ranks = self._setup.groups.ranks
        return {"step": self.number, "ranks": ranks, "planner": self._planner.state()}

    def go_on(self, step: int, state: Mapping[str, Any] | None = None) -> None:
        """Count on from a step whose weights the loop has loaded by itself. Collective. On as many
        ranks as before plans are those of a run without a break.

        Args:
            step: The number of the step that comes next.
            state: What :meth:`planner_state` gave.
        """
        self._meet_to(f"step {step}, to go on with")
        self.number = step
        if state is not None and state["ranks"] == self._setup.groups.ranks:
            self._plan_as(state["planner"])
        self._runner.resumed()

    def report(self, out: str | Path = "report.html") -> Path | None:
        """Write the report of the steps so far, one HTML file with pictures.

        Args:
            out: The file.

        Returns:
            Its path on the first rank, None on others.

        Raises:
            MissingExtra: Without the packages of the extra ``report``.
        """
        return None if self._record is None else self._record.run.report(out)

    def detach(self) -> None:
        """Restore the user's model and close all files."""
        self._restore()
        if self._watch is not None:
            self._watch.rest()
            self._watch.close()
        self._runner.detach()
        if self._writer is not None and self._writer.busy:
            self._setup.say(
                "the last checkpoint is not published: run.finish_saving() was not called"
            )
        self._planner.close()
        self._order.close()
        if self._record is not None:
            self._record.close()

    def _meet_to(self, asks: str) -> None:
        """Have ranks that take other steps named, where no data set counts them. Collective."""
        if isinstance(self._order, GivenOrder):
            meet_to(asks, self._setup.groups)

    def _begin(self) -> None:
        """Begin the record with the first step."""
        if self._record is not None:
            self._record.begin(self.number, self._facts())
        self._begun = True

    def _given_batch(self, asks: str, samples: Iterable[Any], **more: Any) -> LoopBatch:
        """The batch of samples that all ranks give; refused where the step before is still open.
        Collective."""
        order, left = self._given_order(asks), self._open
        if left is not None and left.stage != "at work":
            self._open = None  # it is refused once
        return order.batch(asks, samples, self._setup.groups, open_step=unfinished(left), **more)

    def _given_order(self, asks: str) -> GivenOrder:
        """The order of samples that are given. Raises SpecError where a data set has them."""
        if not isinstance(self._order, GivenOrder):
            raise SpecError(
                asks,
                got="a run with a data set",
                wanted="for step in run",
                hint="attach without a data set takes batches that are given",
            )
        return self._order

    def _step_of_batch(self, batch: LoopBatch) -> LoopStep:
        """The next step, of a batch that was given."""
        if not self._begun:
            self._begin()
        step = self._open = self.engine.next_step(self.number, lambda: batch)
        return step

    def _model_for(self, model: Module | None) -> tuple[SpreadModel, HeldWeights]:
        """A model of the same kind as that of the run, spread, and how its weights are held.
        Collective where it is a new one. Raises ModelError for other kinds."""
        setup = self._setup
        if model is None or model is setup.held.model or model is setup.held.inner:
            return setup.model, setup.held
        if id(model) in self._others:
            return self._others[id(model)]
        held = HeldWeights.of(model, setup.groups.ranks)
        for what, other, own in (
            ("class", type(held.inner).__name__, type(setup.held.inner).__name__),
            ("sharded weights", held.sharded, setup.held.sharded),
            ("device", _device_of(held.inner), setup.device),
        ):
            if other != own:
                raise ModelError(
                    f"{what} of model=",
                    got=other,
                    wanted=f"{own}, as the model of the run: plans follow from its costs",
                )
        share_weights(held, setup.groups, setup.say)
        spread = self._adopted(model)
        restore, before = self._restore, spread.begin(self._order.first(), setup.device)

        def both() -> None:
            before()
            restore()

        self._restore, self._others[id(model)] = both, (spread, held)
        return spread, held

    @property
    def _runner(self) -> LoopRunner:
        runner = self.engine.runner
        assert isinstance(runner, LoopRunner), "the engine was made here"
        return runner

    def _engine(
        self,
        scheduler: Any,
        clip: float | None,
        on_step: Callable[[Step], object],
        *,
        update: bool,
        checks: bool,
    ) -> Engine[LoopBatch, LoopMicroBatch]:
        """The engine that plans, runs and records the steps of this loop."""
        setup = self._setup
        groups, held = setup.groups, setup.held
        on_host = dist.get_backend() == "gloo" and groups.device.type == "cpu"
        leave = LeaveGroups(groups=groups, possible_here=on_host and not held.sharded)
        recovery = Recovery(way=leave, groups=groups)
        return Engine(
            runner=LoopRunner(
                model=setup.model,
                held=held,
                optimizer=setup.optimizer,
                groups=groups,
                device=setup.device,
                probes=self.found.probes,
                recovery=recovery,
                scheduler=scheduler,
                clip=clip,
                updates=update,
                check_losses=checks,
            ),
            planner=self._planner,
            recovery=recovery,
            groups=groups,
            device=setup.device,
            drawn=self._drawn,
            record=self._record,
            finished=self._note_step_done,
            heard=lambda step, notices: on_step(step),
            tell=setup.say,
        )

    def _start_watch(self) -> LoopWatch:
        """The watch over the other ranks, which holds this object no longer than others do."""
        watch = LoopWatch(self._setup.groups, partial(_whereabouts, weakref.ref(self)))
        ending: Any = weakref.finalize(self, watch.close)
        ending.atexit = False
        return watch

    def _note_step_done(self, step: LoopStep) -> None:
        """Note that a step is done: it may be saved before the loop asks for the next."""
        self.number, self._open = step.number + 1, None
        self._state = dict(step.batch.state_after)
        if self._writer is not None:
            self._writer.look(self._checkpoints().gather)

    def _planner_of(self, costs: CostModel) -> RunPlanner:
        """A planner for this run with these costs."""
        setup = self._setup
        planner = RunPlanner(
            costs=costs,
            options=setup.options,
            groups=setup.groups,
            seed=self._seed,
            drawn=self._drawn,
            semantics=setup.held.semantics,
            stages=False,
            tell=setup.say,
        )
        planner.stop_when(self._stop_asked)
        return planner

    def _check_and_price(self) -> None:
        """Look whether the longest sample fits, and draw by the planner's costs from now on where
        these decide what a step holds. Collective."""
        if self._order.longest is not None:
            self._planner.check(self._order.longest)
        if isinstance(self._order, PricedOrder):
            self._order.price(self._planner.agreed_problem())

    def _plan_as(self, state: Mapping[str, Any]) -> None:
        """Plan with the costs and the calibration of a checkpoint."""
        costs = CostModel.from_json(state["costs"]).replace(cluster=self.found.costs.cluster)
        self._planner.close()
        self.engine.planner = self._planner = self._planner_of(costs)
        self._planner.restore(state)
        self._check_and_price()

    def _plan_ahead(self) -> None:
        """Have coming batches planned by another process, where their lengths are known."""
        depth = self._setup.options.ahead
        left = None if self._steps is None else self._steps - self.number
        coming = self._order.coming(self._epochs if left is None else None) if depth else None
        if coming is not None and self.engine.planner is self._planner:
            self._planner.plan_ahead(islice(coming, left), depth=depth)

    def _has_next_step(self) -> bool:
        """Whether another step follows; where it depends on the data set's epoch, all ranks agree
        on it."""
        if self._steps is not None:
            return self.number < self._steps
        more, order = False, self._order
        failure = self._failing(lambda: order.epoch)
        if failure is None:
            more = order.epoch < self._epochs
        self._require_agreement(
            f"{'more' if more else 'the end'} before step {self.number}", failure
        )
        return more

    def _next_batch(self) -> LoopBatch:
        """The samples of the next step, as long on every rank. Collective for a stream."""
        found = list[LoopBatch]()
        failure = self._failing(lambda: found.append(self._order.next_batch()))
        lengths = found[0].lengths.tokens if found else ()
        self._require_agreement(
            f"{len(lengths)} samples of {sum(lengths):,} tokens: {lengths}", failure
        )
        if isinstance(self._order, PricedOrder):
            # Seconds decide what is drawn, and processors may round them differently.
            drawn = f"samples {found[0].lengths.ids}"
            agree("samples of the iteration", drawn, self._setup.groups.world)
        return found[0]

    def _failing(self, read: Callable[[], object]) -> Exception | None:
        """What reading a stream raises; a data set that is drawn from is alike on all ranks."""
        if not isinstance(self._order, StreamOrder):
            read()
            return None
        try:
            read()
        except Exception as error:  # raised on all ranks, which wait for this one
            return error
        return None

    def _require_agreement(self, text: str, failure: Exception | None) -> None:
        """Raise on every rank where one failed to read a stream, or read other lengths."""
        if not isinstance(self._order, StreamOrder):
            return
        told = text if failure is None else f"{type(failure).__name__}: {failure}"
        try:
            agree("stream of samples", told, self._setup.groups.world)
        except PlanMismatch:
            if failure is not None:
                raise failure from None
            raise
        if failure is not None:
            raise failure

    def _facts(self) -> dict[str, Any]:
        """The facts of the run for its report."""
        setup, costs = self._setup, self.found.costs
        return run_facts(
            name="",
            machine=machine_facts(setup.device),
            ranks=setup.groups.ranks,
            seed=self._seed,
            config={"model": {"name": costs.shape.name}, **self._config},
            parameters=costs.shape.elements,
            corpus=self._order.facts(),
            fingerprint=costs.fingerprint,
            profile=self.found.profile,
            memory_bytes=costs.cluster.memory_bytes,
            compared=self.found.compared,
        )

    def _checkpoints(self) -> LoopCheckpoints:
        """The saver of the model's and the optimizer's state over these ranks."""
        return LoopCheckpoints(
            model=self._setup.held.inner,
            optimizer=self._setup.optimizer,
            groups=self._setup.groups,
        )


def _whereabouts(run: weakref.ref[Attached]) -> str:
    """The step and the action that a run is in; nothing where it is gone."""
    found = run()
    if found is None:
        return ""
    action = found.engine.runner.action
    return f"step {found.number}" + (f", {action}" if action else "")


def _spread(
    model: Module | AxisModel, options: SampleOptions, spread: SpreadOptions, groups: Groups
) -> SpreadModel:
    """The model of a loop, spread over ranks."""
    if isinstance(model, AxisModel):
        model.join(groups, label_name=options.label_name)
        return model
    adopted = adopt(
        model,
        backend=spread.backend,
        labels=options.labels,
        tokens=options.tokens,
        groups=groups,
        label_name=options.label_name,
        exchange=spread.exchange,
        logits=spread.logits,
        check=spread.check,
    )
    adopted.label_place = options.label_place
    return adopted


def _order(
    dataset: Any,
    reader: SampleReader,
    options: SampleOptions,
    budget: int | None,
    sequences: int | None,
    seed: int,
) -> SampleOrder:
    """The order in which samples come: drawn by number, or as a stream gives them."""
    if options.iterations is not None:
        from headrace.engine.iteration_order import IterationOrder  # what it draws with is large

        samples = Samples.of(dataset, options.lengths, reader)
        drawn = replace(options.iterations, seed=seed)
        return IterationOrder(samples, drawn, workers=options.workers)
    if _by_number(dataset):
        batches = SamplerOptions(
            batch_tokens=budget,
            batch_sequences=sequences,
            too_long="refuse",
            min_tokens=1,
            seed=seed,
            shuffle=options.shuffle,
        )
        samples = Samples.of(dataset, options.lengths, reader)
        return DrawnOrder(samples, Sampler(samples, batches), workers=options.workers)
    if options.workers:
        raise SpecError(
            "SampleOptions(workers=...)",
            got="a stream of samples",
            wanted="a data set by number",
            hint="give a DataLoader(dataset, batch_size=None, num_workers=...) as the data set",
        )
    if not hasattr(dataset, "__iter__"):
        raise DataError(
            "data set", got=type(dataset).__name__, wanted="items by number, or a stream"
        )
    if budget is None:
        raise SpecError("batch_tokens", got="none", wanted="a budget, as samples come one by one")
    return StreamOrder(dataset, reader, batch_tokens=budget)


def _by_number(dataset: Any) -> bool:
    """Whether a data set gives its items by number."""
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


def _require_drawable(
    dataset: Any, options: SampleOptions, budget: int | None, sequences: int | None
) -> None:
    """Raise SpecError for what iterations that choose their own samples cannot keep to."""
    wrong = {
        "no data set": dataset is None,
        "batch_tokens": budget is not None,
        "batch_sequences": sequences is not None,
        "shuffle=False": not options.shuffle,
        "a stream of samples": not _by_number(dataset),
    }
    for got in (name for name, there in wrong.items() if there):
        raise SpecError(
            "SampleOptions(iterations=...)",
            got=got,
            wanted="a data set by number, whose steps are as large as ranks and costs make them",
            hint="leave one of them out",
        )


def _tokens(value: int | str) -> int:
    return parse_count(value) if isinstance(value, str) else int(value)


def _device_of(model: Module) -> str:
    first = next(model.parameters(), None)
    if first is None:
        raise SpecError("model", got="no parameters", wanted="at least one")
    return str(first.device.type if first.device.type == "cpu" else first.device)
