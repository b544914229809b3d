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

import json
import signal
import weakref
import zlib
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
from headrace.adopt.held_weights import HeldWeights, share_weights
from headrace.adopt.spread_model import BatchPart, Item, SampleReader, SpreadModel
from headrace.adopt.token_model import compile as adopt
from headrace.comm.collectives import agree, agree_each, from_first
from headrace.comm.gpus import make_current
from headrace.comm.launch import join_world
from headrace.comm.loop_watch import LoopWatch, watched_beginning
from headrace.comm.mesh import Groups
from headrace.comm.variables import under_torchrun
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
from headrace.engine.former_values import FormerValues, repeated_error
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
from headrace.engine.loop_runner import LoopMicroBatch, LoopRunner, checksum_of
from headrace.engine.loop_start import optimizer_text, require_trainable
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

_COMPARED = 8192
"""Values at the beginning of each field of a stream's items that ranks compare."""

_SHOWN = 80
"""Characters of what ranks have read of a stream that an error shows, where they differ."""

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
        clip: The largest norm of the gradient of all trained parameters of the model.
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
        The run: a loop over its steps, or without a data set, an object whose ``step(samples)``
        takes one.

    Raises:
        SpecError: For options that have no effect, as ``steps`` without a data set.
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
    # Options for runs without a data set, None where not given, and those for runs with one.
    own = {"samples.own": True if samples.own else None}
    for_given = {"longest": longest, "example": example, **own}
    for_drawn = {
        "batch_sequences": batch_sequences,
        "epochs": epochs != 1,
        "steps": steps,
    }
    require_fitting(dataset, for_given, for_drawn)
    if samples.iterations is not None:
        _require_drawable(dataset, samples, budget, batch_sequences)
    return begin(
        model,
        optimizer,
        lambda reader: (
            given_order(reader, longest or samples.longest, budget, example, own=samples.own)
            if dataset is None
            else _order_of_dataset(dataset, reader, samples, budget, batch_sequences, seed)
        ),
        config={"loop": "attached"},
        budget=budget,
        sequences=batch_sequences,
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


_ALIKE_SAMPLE_OPTIONS = (
    "tokens",
    "labels",
    "label_name",
    "label_place",
    "longest",
    "iterations",
    "shuffle",
)
"""Options of samples that must be alike on all ranks, and whose difference no other comparison of
ranks would find."""


def begin(
    model: Module | AxisModel,
    optimizer: torch.optim.Optimizer,
    order_of: Callable[[SpreadModel], SampleOrder],
    *,
    config: Mapping[str, Any],
    budget: int | None,
    sequences: int | None = None,
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
    """Attach a model to plans for any order of samples; :func:`attach` makes the order of a data
    set and calls this.

    Args:
        model: As for :func:`attach`, as are all arguments that are not named here.
        optimizer: Of the model's parameters.
        order_of: Makes the order of samples, given the spread model, which reads them.
        config: What the report shows as the configuration of the run.
        budget: Tokens of one optimizer step; None where it has no budget.
        sequences: Samples of one optimizer step; None where it has no number of them.

    Returns:
        The run.
    """
    module = model.model if isinstance(model, AxisModel) else model
    device = _device_of(module)
    refused: HeadraceError | None = None
    try:
        require_trainable(module, optimizer, scheduler, clip=clip, update=update)
    except HeadraceError as error:
        if not (dist.is_initialized() or under_torchrun()):
            raise
        refused = error  # raised where the other ranks are told of it
    make_current(device)
    join_world(device)
    groups = Groups(device=device)
    with watched_beginning(groups) as watch:
        if refused is not None:
            raise refused
        held = HeldWeights.of(module, groups.ranks)
        quiet = groups.rank > 0  # lines for people come from the first rank alone
        agree("optimizer of the loop", optimizer_text(optimizer), groups.world)
        agree("SampleOptions(own=...) of hr.attach", str(samples.own), groups.world)
        asked = {
            "batch_tokens": budget,
            "batch_sequences": sequences,
            "epochs": epochs,
            "steps": steps,
            "clip": clip,
            "update": update,
            "check_loss": check_loss,
            "seed": seed,
            "planner": planner,
            "spread": spread,
            **{f"samples.{name}": getattr(samples, name) for name in _ALIKE_SAMPLE_OPTIONS},
            "measure.memory": measure.memory,
            "measure.costs": None if measure.costs is None else measure.costs.to_json(),
        }
        agree_each("hr.attach", {name: repr(value) for name, value in asked.items()}, groups.world)
        share_weights(held, groups, (lambda text: None) if quiet else say)
        # Kept as a function, as `Attached.map` spreads other models in the same way.
        spread_model = partial(_spread, options=samples, spread=spread, groups=groups)
        model_on_ranks = spread_model(model)
        order = order_of(model_on_ranks)
        agree("data of the loop", order.fingerprint, groups.world)
        document = order.longest
        if document is None:  # a stream: what the user said counts, or else its first sample
            given = samples.longest
            document = model_on_ranks.length(order.first()) if given is None else _tokens(given)
        step_tokens = order.total if budget is None else min(order.total, budget)
        setup = LoopSetup(
            model=model_on_ranks,
            held=held,
            optimizer=optimizer,
            groups=groups,
            device=device,
            options=planner,
            document=document,
            # Packs must be measured up to a whole sample, and up to a rank's even part of a step.
            longest=max(document, step_tokens // groups.ranks),
            memory_bytes=parse_bytes(measure.memory) if measure.memory else None,
            cache=cache_folder(measure.cache),
            costs=measure.costs,
            say=(lambda text: None) if quiet else say,
            progress=(lambda what, done, of: None) if quiet else ProgressLines(say),
        )
        return Attached(
            setup=setup,
            watch=watch,
            spread_model=spread_model,
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
        found: The probes and costs of the model (``ModelCosts``): ``found.costs`` can be given
            to another run as ``hr.MeasureOptions(costs=...)``.
        engine: Plans, runs and records the steps.
    """

    def __init__(
        self,
        *,
        setup: LoopSetup,
        watch: LoopWatch | None,
        spread_model: Callable[[Module], SpreadModel],
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
        """Measure the model's costs on a first sample and make planner, record and engine. Where
        that fails the user's model is restored. ``watch`` is that over the other ranks, which the
        loop keeps, None where there are none; ``spread_model`` spreads a model of the same kind
        over ranks; ``scheduler`` to ``on_step`` are as for :func:`attach`. Collective."""
        sample = order.first()
        self._setup, self._order, self._seed, self._config = setup, order, seed, config
        self._steps, self._epochs = steps, epochs
        self._state = order.state()  # the place in the data after the last step that was done
        self._begun, self.number = False, 0
        self._open: LoopStep | None = None  # the step that was handed out and is not done
        self._spread_model = spread_model
        self._other_models = dict[int, tuple[SpreadModel, HeldWeights]]()  # of map(model=), by id
        self._former = FormerValues()
        self._writer: BackgroundWriter | None = None
        self._stop_asked: Callable[[], bool] = lambda: False
        self._restore = setup.model.begin(sample, setup.device)
        try:
            self.found = measured(setup, sample)
            setup.held.shard_again()  # the model has the parameters of before, for a late group
            self._record = RunRecord(out) if setup.groups.rank == 0 else None
            # The steps whose timelines are recorded.
            self._drawn = (
                EarlyAndRare() if steps is None else DrawnSteps(wanted=_DRAWN, steps=steps)
            )
            self._planner = self._make_planner(self.found.costs)
            self.engine = self._engine(scheduler, clip, on_step, update=update, checks=check_loss)
            self._check_and_price()
            self._watch = watch
            if watch is not None:
                self._keep(watch)
        except BaseException:
            self._restore()
            raise

    @property
    def model(self) -> Module:
        """The user's model, as the user calls it."""
        return self._setup.held.model

    @property
    def predicts_next(self) -> bool:
        """Whether label i of a sample is predicted at token i - 1, as causal models of transformers
        take labels, so that the run moves labels by one place; else it is predicted at token i."""
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
            self._order.next_batch()  # raises: there is no data set to loop over
        if not self._begun:
            self._begin()
            self._plan_ahead()
        while self._open is not None or self._has_next_step():
            unfinished_step = self._open  # of a loop that was left by break
            if self._watch is not None:
                self._watch.enter()
            if unfinished_step is None:
                step = self.engine.next_step(self.number, self._next_batch)
            else:
                step = unfinished_step.again() if unfinished_step.begun else unfinished_step
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
        :meth:`plan_ahead`, :meth:`map` and :meth:`backward`: every rank gives the same samples. Or
        each rank gives its own, perhaps none, under ``hr.SampleOptions(own=True)``: then the batch
        has those of rank 0 first.

        Args:
            samples: Items as those of a data set; fields may differ from those of other steps.
            together: Groups of samples, each by the positions of its samples in ``samples``. A
                group stays in one micro-batch, one sample behind the other, so that a loss of
                ``micro.per_sequence`` may compare them.

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
        """Start to plan samples that come later, in a process beside the loop. :meth:`step`,
        :meth:`map` and :meth:`backward` use these plans when they get samples of the same lengths.
        It saves time and changes no result. Nothing is planned ahead under
        ``hr.PlannerConfig(ahead=0)``, nor are steps where plans are smoothed; and plans made ahead
        are dropped where more memory must be left free meanwhile. Collective.

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
        """Compute values of samples by forwards without gradients, such as log-probabilities. They
        are planned as forwards: a rank can hold more tokens where nothing is kept for a backward.
        Collective.

        Args:
            samples: Items as those of a data set; they need no labels.
            fn: Called as ``fn(outputs, micro)`` with the model's outputs, without gradients;
                returns floating numbers of the local tokens [1, s_r, ...], or of the sequences [k]
                (``micro.per_sequence``). A model that can be called without labels gets none.
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
            pass  # the runner calls the model itself, and hands out nothing
        values = runner.gathered(batch)
        if spread is self._setup.model:
            first = 0 if batch.starts is None else batch.starts[self.rank]
            own_samples = [batch.read(first + at) for at in range(len(values))]
            self._former.keep(fn, more, own_samples, values)
        self._between_batches(True)
        return values

    def backward(
        self,
        samples: Iterable[Any],
        fn: ValuesOf,
        gradients: Sequence[Any],
        *,
        more: MoreInputs | None = None,
    ) -> LoopStep:
        """Take a step for a loss of the values that :meth:`map` gave, given the gradients of that
        loss by these values: forward, backward of the sum of values times gradients, and a step of
        the optimizer. Collective.

        Args:
            samples: Those of :meth:`map`.
            fn: That of :meth:`map`. The model must give the same values again: without dropout, and
                with the same weights.
            gradients: Of the loss by each value, in the order of the samples: [n, ...] or [] as the
                values are, None for zero.
            more: As for :meth:`map`.

        Returns:
            The step that was taken; its ``loss`` is the sum of values times gradients.

        Raises:
            DataError: On every rank for gradients of another shape, and as :meth:`step`.
            HeadraceError: On every rank where values are others than the last maps by ``fn`` gave
                of these samples, with weights and optimizer as they were.

        Example:
            >>> values = [v.requires_grad_() for v in run.map(samples, fn)]
            >>> contrastive(torch.stack(values)).backward()
            >>> step = run.backward(samples, fn, [v.grad for v in values])
        """
        asks = f"step {self.number} by gradients"

        def beside(items: Sequence[Item], counts: Sequence[int]) -> list[Item]:
            """The gradient of each sample, and the values that maps gave of it."""
            given = zip(gradients_of(gradients, counts), items, strict=True)
            return [one | self._former.beside(fn, more, item) for one, item in given]

        batch = self._given_batch(asks, samples, beside=beside, learned=False)
        step, runner, spread = self._step_of_batch(batch), self._runner, self._setup.model
        # Values times gradients are no sum over labels, so the check of losses waits for a step.
        checks, runner.check_losses = runner.check_losses, False
        try:
            for micro in step:
                with micro:
                    added: Mapping[str, Any] = {} if more is None else more(micro)
                    outputs = self.model(**inputs_of(runner.part, spread), **added)
                    if micro.sequences:
                        values = fn(outputs, micro)
                        loss = weighted(values, micro, batch)
                        dtype = self._setup.held.computes_in
                        runner.recovery.refuse(repeated_error(values, micro, batch, dtype))
                    else:
                        loss = spread.number(outputs)  # an idle turn: any scalar, times 0 later
                    micro.backward(loss)
        except BaseException:
            self._open = None  # the user has no loop to leave
            raise
        finally:
            runner.check_losses = checks
        return step

    def __len__(self) -> int:
        """The number of steps of the whole loop, with those that are done. Raises TypeError for a
        stream of samples without ``steps``, whose length is not known."""
        if self._steps is not None:
            return self._steps
        coming = self._order.coming(self._epochs)
        if coming is None:
            raise TypeError("a stream of samples has no length; give hr.attach steps=")
        # A step that was handed out and is not done is neither counted nor coming.
        return self.number + (self._open is not None) + sum(1 for _ in coming)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of the micro-batch at work, for collectives of the model's own; None where this
        rank works alone."""
        part = self._runner.part
        return None if part is None else part.group

    def recompute(self, layer: Callable[..., Any], *inputs: Any) -> Any:
        """Run a layer with activation checkpointing: its backward computes all of it again but its
        attention.

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
        self.found.probes.choose([])  # no layer recomputes, whatever the last step chose
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
            # The number of the signal that any rank has got, 0 for none: all end alike.
            number = max(map(int, self._checkpoints().gather(b"%d" % stop.number)))
            if number:
                self._leave(number, folder, keep)
        finally:
            stop.close()
            self._stop_when(lambda: False)

    def _stop_when(self, asked: Callable[[], bool]) -> None:
        """Have the planner raise Stopped before the next step once ``asked()`` is true."""
        self._stop_asked = asked
        self._planner.stop_when(asked)

    def _leave(self, number: int, folder: str | Path, keep: int) -> NoReturn:
        """Write a checkpoint, then raise what ends the program as signal ``number`` would:
        KeyboardInterrupt for Ctrl-C, else SystemExit. Collective."""
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
        """Write a checkpoint: weights, optimizer, scheduler, the place in the data, and the state
        of the planner. Collective.

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
        self.finish_saving()  # of the one before, which may still be written
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
        """Go on from a checkpoint. Collective, before the first step. On as many ranks as before,
        plans, random numbers and the order of samples are those of a run without a break; on
        another number of ranks the order of samples is.

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
        # A stream is read up to this place, in which a rank may fail alone.
        failure = self._failure_of(partial(self._order.restore, extra["data"]))
        self._require_agreement("a stream that goes on", failure)
        self._open = None
        self.number, self._state = int(extra["step"]), dict(extra["data"])
        if self._runner.scheduler is not None:
            self._runner.scheduler.load_state_dict(extra["scheduler"])
        if extra["ranks"] == self._setup.groups.ranks:
            self._restore_planner(extra["planner"])
        self._runner.resumed()
        ranks = counted(extra["ranks"], "rank")
        self._setup.say(f"going on with step {self.number}, saved by {ranks}")
        return True

    def planner_state(self) -> dict[str, Any]:
        """The state of the planner and the number of the next step, as JSON, for checkpoints that
        the loop writes by itself.

        Returns:
            What :meth:`go_on` takes.
        """
        ranks = self._setup.groups.ranks
        return {"step": self.number, "ranks": ranks, "planner": self._planner.state()}

    def go_on(self, step: int, state: Mapping[str, Any] | None = None) -> None:
        """Go on from a checkpoint that the loop has loaded by itself: set the number of the next
        step, and the state of the planner. Collective. On as many ranks as before plans are those
        of a run without a break.

        Args:
            step: The number of the step that comes next.
            state: What :meth:`planner_state` gave; that of the first rank is taken on all.
        """
        self._meet_to(f"step {step}, to go on with")
        self.number = step
        # A rank may have no file to read it from, such as one on another node.
        state = json.loads(from_first(json.dumps(state).encode(), self._setup.groups.world))
        if state is not None and state["ranks"] == self._setup.groups.ranks:
            self._restore_planner(state["planner"])
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
        """Restore the user's model, and end all files, threads and processes of the run."""
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
        """Where samples are given step by step, check that all ranks make the same call, which
        ``asks`` names; errors name a rank that makes another. Collective."""
        if isinstance(self._order, GivenOrder):
            meet_to(asks, self._setup.groups)

    def _begin(self) -> None:
        """Begin the record of the run, before its first step."""
        if self._record is not None:
            self._record.begin(self.number, self._facts())
        self._begun = True

    def _given_batch(self, asks: str, samples: Iterable[Any], **more: Any) -> LoopBatch:
        """The batch of samples that all ranks give to the call that ``asks`` names; ``more`` is
        passed to :meth:`GivenOrder.batch`. Raises HeadraceError where the step before is not done.
        Collective."""
        order, before = self._given_order(asks), self._open
        if before is not None and before.stage != "at work":
            self._open = None  # refused once: after the error the loop may go on without that step
        if self._watch is not None:
            self._watch.enter()
        batch = order.batch(asks, samples, self._setup.groups, open_step=unfinished(before), **more)
        self._between_batches(False)
        return batch

    def _between_batches(self, now: bool) -> None:
        """Note whether this rank is between two batches that are given, where it may end."""
        if self._watch is not None and isinstance(self._order, GivenOrder):
            self._watch.may_end = now

    def _given_order(self, asks: str) -> GivenOrder:
        """The order of a run whose samples are given. Raises SpecError, which names the call
        ``asks``, for a run with a data set."""
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
        """``model`` spread over ranks, and how its weights are held; the run's own for None. It is
        kept for later calls. Collective for a new one. Raises ModelError unless it is of the class
        of the run's model, on its device and held alike."""
        setup = self._setup
        if model is None or model is setup.held.model or model is setup.held.inner:
            return setup.model, setup.held
        if id(model) in self._other_models:
            return self._other_models[id(model)]
        held = HeldWeights.of(model, setup.groups.ranks)
        self._require_same_kind(held)
        share_weights(held, setup.groups, setup.say)
        spread = self._spread_model(model)
        restore_others = self._restore
        restore_this = spread.begin(self._order.first(), setup.device)

        def restore_all() -> None:
            """Restore this model, then the run's and those that came before."""
            restore_this()
            restore_others()

        self._restore, self._other_models[id(model)] = restore_all, (spread, held)
        return spread, held

    def _require_same_kind(self, held: HeldWeights) -> None:
        """Raise ModelError for another model that is not of the class of the run's model, or not on
        its device, or not sharded as it is."""
        setup = self._setup
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

    @property
    def _runner(self) -> LoopRunner:
        """The part of the engine that runs the steps of this loop on this rank."""
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
        # When a rank runs out of memory the others can leave a collective that they wait in only on
        # a CPU with gloo, and not where weights are sharded over all of them.
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
            skipped=lambda step: self._runner.skip(step.number, step.batch, step.plan),
            heard=lambda step, notices: on_step(step),
            tell=setup.say,
        )

    def _keep(self, watch: LoopWatch) -> None:
        """Have the watch over the other ranks say in which step this rank is. It holds this object
        by a weak reference, and is closed when this object is collected, but not at the exit of the
        interpreter."""
        watch.describe(partial(_whereabouts, weakref.ref(self)))
        watch.may_end = isinstance(self._order, GivenOrder)
        finalizer: Any = weakref.finalize(self, watch.leave)
        finalizer.atexit = False

    def _note_step_done(self, step: LoopStep) -> None:
        """Count a step as done as soon as it is, since the loop may save before it asks for the
        next one. The engine calls it."""
        self._between_batches(True)
        self.number, self._open = step.number + 1, None
        self._state = dict(step.batch.state_after)
        if self._writer is not None:
            # Publish the checkpoint in the background once all ranks have written it.
            self._writer.look(self._checkpoints().gather)

    def _make_planner(self, costs: CostModel) -> RunPlanner:
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
        """Raise InfeasiblePlan where the longest sample fits nowhere, and give the planner's costs
        to an order whose steps follow from costs. Collective."""
        if self._order.longest is not None:
            self._planner.check(self._order.longest)
        if isinstance(self._order, PricedOrder):
            self._order.price(self._planner.agreed_problem())

    def _restore_planner(self, state: Mapping[str, Any]) -> None:
        """Plan with the costs and the calibration of a checkpoint from now on, but with the memory
        of the ranks that are here."""
        costs = CostModel.from_json(state["costs"]).replace(cluster=self.found.costs.cluster)
        self._planner.close()
        self.engine.planner = self._planner = self._make_planner(costs)
        self._planner.restore(state)
        self._check_and_price()

    def _plan_ahead(self) -> None:
        """Have coming batches planned by another process, where their lengths are known: those of
        the steps that are left, or of the epochs where no number of steps was given."""
        depth = self._setup.options.ahead  # how many batches to plan ahead; 0 for none
        steps_left = None if self._steps is None else self._steps - self.number
        epochs = self._epochs if steps_left is None else None
        coming = self._order.coming(epochs) if depth else None
        # Another planner may have been put in the place of the run's own, as tests do.
        if coming is not None and self.engine.planner is self._planner:
            self._planner.plan_ahead(islice(coming, steps_left), depth=depth)

    def _has_next_step(self) -> bool:
        """Whether another step follows. Collective for a stream without a number of steps: whether
        it goes on must be the same on all ranks."""
        if self._steps is not None:
            return self.number < self._steps
        more, order = False, self._order
        failure = self._failure_of(lambda: order.epoch)
        if failure is None:
            more = order.epoch < self._epochs
        self._require_agreement(
            f"{'more' if more else 'the end'} before step {self.number}", failure
        )
        return more

    def _next_batch(self) -> LoopBatch:
        """The samples of the next step, whose lengths are the same on every rank. Collective where
        ranks might read or draw other ones: for a stream, and where costs decide what is drawn."""
        batches = list[LoopBatch]()  # one, unless reading it fails
        failure = self._failure_of(lambda: batches.append(self._order.next_batch()))
        shown = ""  # what no other rank sees, unless the data is a stream
        if isinstance(self._order, StreamOrder) and failure is None:
            shown = _text_of_stream(batches[0])
        self._require_agreement(shown, failure)
        if isinstance(self._order, PricedOrder):
            # Seconds decide what is drawn, and processors may round them differently.
            drawn = f"samples {batches[0].lengths.ids}"
            agree("samples of the iteration", drawn, self._setup.groups.world)
        return batches[0]

    def _failure_of(self, read: Callable[[], object]) -> Exception | None:
        """Call ``read``. Where the data is a stream, return the error that this raises, or None, so
        that the other ranks can be told. Any other data is the same on all ranks and fails on all
        of them alike, so its errors are simply raised."""
        if not isinstance(self._order, StreamOrder):
            read()
            return None
        try:
            read()
        except Exception as error:  # raised on all ranks, which wait for this one
            return error
        return None

    def _require_agreement(self, text: str, failure: Exception | None) -> None:
        """Raise on every rank where any has failed to read its stream (``failure`` is this rank's
        error), or where ranks describe what they read by different ``text``. Collective for a
        stream; does nothing for other data."""
        if not isinstance(self._order, StreamOrder):
            return
        read_text = text if failure is None else f"{type(failure).__name__}: {failure}"
        try:
            agree(
                "stream of samples",
                read_text,
                self._setup.groups.world,
                shown=_SHOWN,
                hint="all ranks must read the same items in the same order: what shuffles them "
                "needs a random generator of its own, with the same seed on all ranks",
            )
        except PlanMismatch:
            if failure is not None:  # this rank knows its own error better
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


def _text_of_stream(batch: LoopBatch) -> str:
    """The samples of a batch in a short text to compare, with a CRC-32 of their lengths and of the
    beginnings of all fields that are in the memory of the host, so that no device is waited for and
    long clips take no longer than texts."""
    contents = [
        checksum_of(
            {
                name: value.reshape(-1)[:_COMPARED]
                for name, value in batch.read(i).items()
                if value.device.type == "cpu"
            }
        )
        for i in range(len(batch.lengths))
    ]
    checksum = zlib.crc32(repr((batch.lengths.tokens, contents)).encode())
    return f"{len(contents)} samples of {batch.lengths.total:,} tokens, checksum {checksum:08x}"


def _whereabouts(run: weakref.ref[Attached]) -> str:
    """The step and the action that a run is in, in words; empty where the run was freed."""
    attached = run()
    if attached is None:
        return ""
    action = attached.engine.runner.action
    return f"step {attached.number}" + (f", {action}" if action else "")


def _spread(
    model: Module | AxisModel, options: SampleOptions, spread: SpreadOptions, groups: Groups
) -> SpreadModel:
    """Prepare a user's model to be spread over the ranks of a loop: a model of several axes joins
    the loop, any other one is compiled by :func:`headrace.compile`."""
    if isinstance(model, AxisModel):
        model.join(groups, label_name=options.label_name)
        return model
    token_model = adopt(
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
    token_model.label_place = options.label_place
    return token_model


def _order_of_dataset(
    dataset: Any,
    reader: SampleReader,
    options: SampleOptions,
    budget: int | None,
    sequences: int | None,
    seed: int,
) -> SampleOrder:
    """The order in which a loop gets the samples of a data set: iterations that choose their own
    samples where ``options`` say so, random draws from a map-style data set, or the order of a
    stream. A step has ``budget`` tokens, or ``sequences`` samples."""
    if options.iterations is not None:
        from headrace.engine.iteration_order import IterationOrder  # what it draws with is large

        samples = Samples.of(dataset, options.lengths, reader)
        seeded = replace(options.iterations, seed=seed)
        return IterationOrder(samples, seeded, workers=options.workers)
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
    """Whether a data set is map-style: it gives its items by number."""
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


def _require_drawable(
    dataset: Any, options: SampleOptions, budget: int | None, sequences: int | None
) -> None:
    """Raise SpecError where iterations that choose their own samples cannot do so: with an option
    that fixes what a step holds, or without a map-style data set."""
    conflicts = {
        "no data set": dataset is None,
        "batch_tokens": budget is not None,
        "batch_sequences": sequences is not None,
        "shuffle=False": not options.shuffle,
        "a stream of samples": not _by_number(dataset),
    }
    for got in (name for name, given in conflicts.items() if given):
        raise SpecError(
            "SampleOptions(iterations=...)",
            got=got,
            wanted="a data set by number, whose steps are as large as ranks and costs make them",
            hint="leave one of them out",
        )


def _tokens(value: int | str) -> int:
    """A number of tokens, given as such or as text (``"8Ki"``)."""
    return parse_count(value) if isinstance(value, str) else int(value)


def _device_of(model: Module) -> str:
    """The device of a model's first parameter as torch names it: ``cpu``, or ``cuda:0``."""
    first = next(model.parameters(), None)
    if first is None:
        raise SpecError("model", got="no parameters", wanted="at least one")
    return str(first.device.type if first.device.type == "cpu" else first.device)
