"""Anyone's training loop, driven by plans (Data-Centric Parallel).

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

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from headrace.comm.collectives import agree, gather_floats
from headrace.comm.launch import join_world
from headrace.comm.mesh import Groups
from headrace.config.model import PlannerConfig, cache_folder
from headrace.costs import CostModel
from headrace.data.order import SamplerOptions
from headrace.errors import CheckpointError, DataError, HeadraceError, SpecError
from headrace.loop.held import HeldWeights, bytes_now
from headrace.loop.order import DrawnOrder, Item, LoopBatch, SampleOrder, StreamOrder
from headrace.loop.planning import LoopSetup, measured, planner_of
from headrace.loop.record import EarlyAndRare, LoopRecord
from headrace.loop.recovery import LoopRecovery
from headrace.loop.samples import LengthSource, Samples, packed
from headrace.loop.saved import LoopCheckpoints
from headrace.loop.step import LoopStep, MicroRun, members_of
from headrace.passes.adopted import compile as adopt
from headrace.passes.placement import Exchange
from headrace.passes.recompute import recomputed
from headrace.passes.shard import IGNORED, Labels, LocalBatch, predicted
from headrace.runtime.recovery import Exhausted
from headrace.runtime.trainer import Planned, Step, plan_metrics, told_to_first
from headrace.spec.method import RECOMPUTE, Recompute
from headrace.spec.plan import Plan
from headrace.training.drawn_steps import DrawnSteps
from headrace.training.listener import ProgressLines, tell
from headrace.units import parse_bytes, parse_count

__all__ = ["Attached", "attach"]

_DRAWN = 8
"""Steps of which the rows of all ranks are recorded, where it is known how many there are."""

Budget = int | str
"""Tokens, or their number as a text: ``"64Ki"``."""


def attach(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, dataset: Any, *,
    lengths: LengthSource = None, batch_tokens: Budget | None = None,
    batch_sequences: int | None = None, scheduler: Any = None, clip: float | None = None,
    epochs: int = 1, steps: int | None = None, shuffle: bool = True, seed: int = 0,
    labels: Labels | None = None, tokens: str | None = None, label_name: str = "labels",
    backend: str | None = None,
    planner: Literal["adaptive", "static", "bucket", "packed", "dcp"] = "adaptive",
    static_size: int | None = None,
    sizes: Sequence[int] = (), exchange: Exchange | None = None,
    recompute: Sequence[Recompute] = RECOMPUTE, longest: Budget | None = None,
    memory: str | None = None, memory_margin: float | None = None, costs: CostModel | None = None,
    cache: str | Path | None = None, out: str | Path | None = None,
    say: Callable[[str], None] = tell,
) -> Attached:  # fmt: skip
    """Drive a training loop by plans. Collective: every rank calls it alike, under torchrun or in
    a process of its own, and it begins torch.distributed where nobody has. Arguments::

        model       a model of transformers, or one that calls scaled_dot_product_attention; alone,
                    under DDP, or sharded by FSDP2; in training mode, on its device
        dataset     items are dicts of token values [n] (``input_ids``, ``labels``), tuples of
                    tokens and labels, or tokens; by number, or an iterable
        lengths     tokens of each item: numbers, a column's name, a function of an item; every item
                    is read once where it is left out
        batch_*     samples of one optimizer step: a budget of tokens, or a number of samples
        scheduler   takes one step after each of the optimizer's
        clip        largest norm of the gradient
        shuffle     draw samples at random; else they come in their order, as those of a stream do
        epochs      passes over the data, unless ``steps`` says how many steps to take
        labels      whether they are of the ``next`` token or of the ``same`` place
        planner     ``adaptive`` decides for each step, ``static`` has groups of ``static_size``;
                    to compare with: ``bucket`` and ``packed`` parallel, and the accumulation of
                    Data-Centric Parallel (``dcp``)
        sizes       group sizes to consider; all where it is left out
        exchange    how attention meets other ranks' tokens; the quickest measured where left out
        recompute   levels that a plan may choose for each layer, where the model can
        longest     tokens of the longest sample of a stream; of its first one where left out
        memory      of a rank ("8GiB"); 80 % of what is free where it is left out
        costs       of the model on these ranks, as ``run.found.costs`` of another loop; measured
                    where they are left out, and kept in the folder ``cache``
        out         folder for metrics and plans, which ``headrace report`` reads

    Raises ModelError for models that cannot be spread over ranks, DataError for data without
    tokens, InfeasiblePlan where the longest sample fits nowhere, and says what would help.
    """  # fmt: skip
    device = _device_of(model)
    join_world(device)
    groups = Groups()
    adopted = adopt(model, backend=backend, labels=labels, tokens=tokens, label_name=label_name,
                    groups=groups, exchange=exchange)  # fmt: skip
    kind, adopted.labels = adopted.labels, "same"
    order = _order(dataset, lengths, adopted.tokens, kind, batch_tokens, batch_sequences, seed,
                   shuffle=shuffle)  # fmt: skip
    agree("data of the loop", order.fingerprint, groups.world)
    document = order.longest or (_tokens(longest) if longest else len(order.first()["labels"]))
    most = min(order.total, _tokens(batch_tokens)) if batch_tokens else order.total
    held = HeldWeights.of(model, groups.ranks)
    quiet = groups.rank > 0
    setup = LoopSetup(
        adopted=adopted, held=held, optimizer=optimizer, groups=groups, device=device,
        exchanges=(exchange,) if exchange else ("ulysses", "ring"), seed=seed,
        options=PlannerConfig(
            name=planner, static_size=static_size, group_sizes=tuple(sizes), ahead=0,
            recompute=tuple(recompute), memory_margin=memory_margin,
        ),
        document=document, longest=max(document, most // groups.ranks), cache=cache_folder(cache),
        memory_bytes=parse_bytes(memory) if memory else None, costs=costs,
        say=(lambda text: None) if quiet else say,
        progress=(lambda what, done, of: None) if quiet else ProgressLines(say),
    )  # fmt: skip
    return Attached(
        setup=setup, order=order, scheduler=scheduler, clip=clip, steps=steps, epochs=epochs,
        out=out, kind=kind, label_name=label_name,
    )  # fmt: skip


class Attached:
    """A loop over planned steps, and what a step needs.

    ``number`` is that of the next step; ``planner`` makes the plans.
    """

    def __init__(
        self, *, setup: LoopSetup, order: SampleOrder, scheduler: Any, clip: float | None,
        steps: int | None, epochs: int, out: str | Path | None, kind: Labels, label_name: str,
    ) -> None:  # fmt: skip
        self._kind: Labels = kind
        self._label_name = label_name
        self.adopted, self.held, self.device = setup.adopted, setup.held, setup.device
        self.rank, self.number = setup.groups.rank, 0
        self._setup, self._order, self._groups = setup, order, setup.groups
        self._scheduler, self._clip = scheduler, clip
        self._steps, self._epochs = steps, epochs
        self.recovery = LoopRecovery(
            groups=self._groups,
            possible=not self.held.sharded and dist.get_backend() == "gloo",
        )  # fmt: skip
        self._shard: LocalBatch | None = None
        self._batch: LoopBatch | None = None
        self._state = order.state()
        sample = order.first()
        self.adopted.probe({k: v.to(self.device) for k, v in packed([sample]).items()})
        self._first = self.adopted.first_place({})
        self._restore = self.adopted.install()
        self.found = measured(setup, sample)
        self._drawn = EarlyAndRare() if steps is None else DrawnSteps(wanted=_DRAWN, steps=steps)
        self.planner = planner_of(setup, self.found.costs, self._drawn)
        self._record = LoopRecord(out, setup) if self.rank == 0 else None
        self._begun = False
        if order.longest is not None:
            self.planner.check(order.longest)

    def __iter__(self) -> Iterator[LoopStep]:
        """The steps that are left, planned one by one."""
        if self._record is not None and not self._begun:
            self._record.begin(self.number, self._order, self.found)
        self._begun = True
        while self._more():
            asked_s = time.perf_counter()
            batch = self._batch = self._order.next_batch()
            planned = self.planner.plan(batch.lengths)
            step = self._step(batch, planned, time.perf_counter() - asked_s)
            yield step
            if not step.done:
                raise HeadraceError(
                    f"step {step.number}", got="micro-batches that were not trained",
                    wanted="a loop over all of them: for micro in step",
                )  # fmt: skip

    def _more(self) -> bool:
        if self._steps is not None:
            return self.number < self._steps
        return self._order.epoch < self._epochs

    def _step(self, batch: LoopBatch, planned: Planned, waited_s: float) -> LoopStep:
        return LoopStep(
            number=self.number, epoch=batch.epoch, planned=planned, waited_s=waited_s, run=self,
            read=self._prepared(batch, planned.plan),
        )  # fmt: skip

    def _read(self, batch: LoopBatch, plan: Plan, turn: MicroRun) -> dict[str, torch.Tensor]:
        """The pack of a turn; where there is nothing to do, two tokens without a loss."""
        if turn.index is None:
            nothing = torch.zeros(2, dtype=torch.int64)
            row = packed([{self.adopted.tokens: nothing, "labels": nothing + IGNORED}])
        else:
            row = packed([batch.read(i) for i in plan.micro_batches[turn.index].sequences])
        row["position_ids"] = row["position_ids"] + self._first
        return {name: value.to(self.device) for name, value in row.items()}

    def place(
        self, plan: Plan, turn: MicroRun, pack: Mapping[str, torch.Tensor], targets: int
    ) -> LocalBatch:
        """This rank's part of a pack, which the model works on from here on."""
        exchange: Exchange | None = None
        options = () if turn.index is None else plan.micro_batches[turn.index].layers.options
        if len(turn.ranks) > 1:
            exchange = cast(Exchange, options[0].attention)
        self.found.probes.choose([option.recompute for option in options])
        self._shard = self.adopted.place(pack, turn.ranks, targets=targets, exchange=exchange)
        return self._shard

    def bytes_now(self) -> int:
        """What this rank holds of the model and its optimizer."""
        return bytes_now(self.held.model, self._setup.optimizer)

    def total(self, count: int) -> int:
        """The sum of a number over all ranks. Collective."""
        return int(sum(row[0] for row in gather_floats([float(count)], self._groups.world)))

    def update(self, loss: float) -> float | None:
        """Add up gradients, and take one step of optimizer and scheduler; returns the norm of the
        gradient, where it is clipped. Collective. Raises HeadraceError for a ``loss`` that is not
        finite, with the weights as they were."""
        if not math.isfinite(loss):
            raise HeadraceError(
                f"loss of step {self.number}", got=loss, wanted="a finite number",
                hint="lower the learning rate and go on from the last checkpoint",
            )  # fmt: skip
        self.held.add_up()
        norm = float(self.held.norm(self._clip)) if self._clip is not None else None
        self._setup.optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        self._setup.optimizer.zero_grad()
        return norm

    def plan_again(self, step: LoopStep, exhausted: Exhausted) -> None:
        """Give a step a thriftier plan of its batch, with nothing of the attempt before it.
        Collective. Raises InfeasiblePlan when there is none."""
        assert self._batch is not None, "of a step"
        self._setup.optimizer.zero_grad()
        gc.collect()
        step.planned = self.planner.replan(self._batch.lengths, step.plan, exhausted)
        step.read = self._prepared(self._batch, step.plan)
        self._setup.say(f"{exhausted} of step {step.number}: taken again as {step.plan.strategy}")

    def _prepared(self, batch: LoopBatch, plan: Plan) -> Callable[[MicroRun], Item]:
        """Make the groups of a plan; returns what reads the packs of its turns. Collective."""
        self.adopted.prepare({members_of(plan, i) for i in range(len(plan.micro_batches))})
        return partial(self._read, batch, plan)

    def finished(self, step: LoopStep) -> None:
        """Write down a step that is done, and learn from it. Collective."""
        assert self._batch is not None, "of a step"
        self.number += 1
        self._state = dict(self._batch.state_after)
        times, rows = told_to_first(
            step.times(), self._groups, drawn=step.number in self._drawn
        )  # fmt: skip
        online = self.planner.planner
        if times is None or online is None or self._record is None:
            return
        self.planner.observe(step.plan.predicted_s, times.step_s)
        metrics = step.metrics(self._rate()) | plan_metrics(step.planned, times)
        done = Step(
            number=step.number, metrics=metrics, plan=step.plan, times=times, measured=rows,
            micro_batch_s=step.planned.micro_batch_s, predicted=step.planned.predicted,
            facts=step.planned.facts,
        )  # fmt: skip
        self._record.step(done, online.learn(done))

    def _rate(self) -> float:
        """The learning rate of the first group of parameters."""
        return float(self._setup.optimizer.param_groups[0]["lr"])

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of the micro-batch at work, for collectives of the model's own; None where this
        rank works alone."""
        return self._shard.placement.group if self._shard is not None else None

    def recompute(self, layer: Callable[..., Any], *inputs: Any) -> Any:
        """``layer(*inputs)``, computed again in the backward but for its attention."""
        return recomputed(layer, *inputs)

    def shard(self, batch: Mapping[str, torch.Tensor]) -> LocalBatch:
        """This rank's part of a batch [b, S] that all ranks have alike, spread over all of them, to
        evaluate the model: call it with the ``inputs``. The losses of all ranks add up to the mean.
        Collective; not within a step."""
        given, name = dict(batch), self._label_name
        if name in given:
            given[name] = predicted(given[name], self._kind)
        self.found.probes.choose([])
        return self.adopted.shard(given)

    def save(self, folder: str | Path, *, keep: int = 3) -> Path:
        """Write a checkpoint into a folder of its own within ``folder``, of which the last ``keep``
        stay: weights, optimizer, scheduler, the place in the data, and what plans follow from.
        Collective. Raises CheckpointError on every rank when any could not write it."""
        scheduler = None if self._scheduler is None else self._scheduler.state_dict()
        extra = {
            "loop": 1, "step": self.number, "ranks": self._groups.ranks, "data": self._state,
            "scheduler": scheduler, "planner": self.planner.state(),
        }  # fmt: skip
        if self._record is not None and self.planner.planner is not None:
            self._record.keep(self.planner.planner)
        return self._checkpoints().save(Path(folder), self.number, extra, keep=keep)

    def load(self, folder: str | Path) -> bool:
        """Go on from the newest whole checkpoint in ``folder``, or from ``folder`` itself where it
        is one; False, with everything as it is, where there is none yet. Collective, before the
        first step. On as many ranks as before plans are made as they would have been.

        Raises CheckpointError for a checkpoint of another model, or where all are damaged, and
        DataError for one of other data.
        """
        extra = self._checkpoints().load(Path(folder))
        if extra is None:
            return False
        if extra.get("loop") != 1:
            raise CheckpointError(f"checkpoint in {folder}", got="of a run", wanted="of a loop")
        self._order.restore(extra["data"])
        self.number, self._state = int(extra["step"]), dict(extra["data"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(extra["scheduler"])
        if extra["ranks"] == self._groups.ranks:
            self._plan_as(extra["planner"])
        self._setup.say(f"going on with step {self.number}, saved by {extra['ranks']} ranks")
        return True

    def _plan_as(self, state: Mapping[str, Any]) -> None:
        """Plan with the costs and the corrections of before."""
        costs = CostModel.from_json(state["costs"]).replace(cluster=self.found.costs.cluster)
        self.planner = planner_of(self._setup, costs, self._drawn)
        if self.planner.planner is not None:
            self.planner.planner.restore(state)

    def _checkpoints(self) -> LoopCheckpoints:
        return LoopCheckpoints(
            model=self.held.inner, optimizer=self._setup.optimizer, groups=self._groups
        )

    def report(self, out: str | Path = "report.html") -> Path | None:
        """Write the report of the steps so far, one HTML file with pictures; its path on the first
        rank, None on others. Raises MissingExtra without the packages of the extra ``report``."""
        return None if self._record is None else self._record.run.report(out)

    def detach(self) -> None:
        """Give the model back, without what was put in its place, and close what is open."""
        self._restore()
        if self._record is not None:
            self._record.close()


def _order(
    dataset: Any, lengths: LengthSource, tokens: str, kind: Labels, budget: Budget | None,
    sequences: int | None, seed: int, *, shuffle: bool,
) -> SampleOrder:  # fmt: skip
    many = None if budget is None else _tokens(budget)
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        samples = Samples.of(dataset, lengths, tokens=tokens, kind=kind)
        options = SamplerOptions(
            batch_tokens=many,
            batch_sequences=sequences,
            too_long="refuse",
            min_tokens=1,
            seed=seed,
            shuffle=shuffle,
        )
        return DrawnOrder(samples, options)
    if not hasattr(dataset, "__iter__"):
        raise DataError(
            "data set", got=type(dataset).__name__, wanted="items by number, or a stream"
        )
    if many is None:
        raise SpecError("batch_tokens", got="none", wanted="a budget, as samples come one by one")
    return StreamOrder(dataset, tokens=tokens, kind=kind, batch_tokens=many)


def _tokens(value: Budget) -> int:
    return parse_count(value) if isinstance(value, str) else int(value)


def _device_of(model: torch.nn.Module) -> str:
    first = next(model.parameters(), None)
    if first is None:
        raise SpecError("model", got="no parameters", wanted="at least one")
    return str(first.device.type if first.device.type == "cpu" else first.device)
