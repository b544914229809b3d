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

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from headrace.adopt.block_recompute import recomputed
from headrace.engine.drawn_steps import DrawnSteps, EarlyAndRare
from headrace.engine.loop_checkpoint import LoopCheckpoints
from headrace.engine.loop_planning import LoopSetup, measured
from headrace.engine.loop_record import LoopRecord
from headrace.engine.loop_runner import StepRunner
from headrace.engine.loop_step import LoopStep
from headrace.engine.sample_order import SampleOrder
from headrace.engine.spread_model import Item, LoopPart
from headrace.errors import HeadraceError
from headrace.native.checkpoint import BackgroundWriter

__all__ = ["Attached"]

_DRAWN = 8
"""Steps of which the rows of all ranks are recorded, where it is known how many there are."""


class Attached:
    """A loop over planned steps; ``number`` is that of the next one.

    ``found`` is what was measured of the model, ``found.costs`` what it costs.
    """

    def __init__(
        self,
        *,
        setup: LoopSetup,
        order: SampleOrder,
        scheduler: Any,
        clip: float | None,
        steps: int | None,
        epochs: int,
        out: str | Path | None,
    ) -> None:
        sample = order.first()
        self._setup, self._order = setup, order
        self._steps, self._epochs = steps, epochs
        self._state = order.state()
        self._begun, self.number = False, 0
        self._writer = BackgroundWriter()
        self._restore = setup.model.begin(sample, setup.device)
        try:
            self._prepare(sample, scheduler, clip, out)
        except BaseException:
            self._restore()
            raise

    def _prepare(
        self, sample: Item, scheduler: Any, clip: float | None, out: str | Path | None
    ) -> None:
        """Measure the model, and make what takes its steps."""
        setup, order, steps = self._setup, self._order, self._steps
        self.found = measured(setup, sample)
        self.runner = StepRunner(
            setup=setup,
            found=self.found,
            scheduler=scheduler,
            clip=clip,
            drawn=EarlyAndRare() if steps is None else DrawnSteps(wanted=_DRAWN, steps=steps),
            record=LoopRecord(out, setup) if setup.groups.rank == 0 else None,
        )
        if order.longest is not None:
            self.runner.planner.check(order.longest)

    @property
    def model(self) -> Module:
        """The user's, as he calls it."""
        return self._setup.held.model

    @property
    def rank(self) -> int:
        """This one, of the world."""
        return self.runner.rank

    def __iter__(self) -> Iterator[LoopStep]:
        """The steps that are left, planned one by one."""
        runner = self.runner
        if runner.record is not None and not self._begun:
            runner.record.begin(self.number, self._order, self.found)
        self._begun = True
        self._plan_ahead()
        while self._more():
            asked_s = time.perf_counter()
            batch = self._order.next_batch()
            planned = runner.plan(batch)
            step = LoopStep(
                number=self.number,
                batch=batch,
                planned=planned,
                runner=runner,
                waited_s=time.perf_counter() - asked_s,
                finished=self._finished,
            )
            yield step
            if not step.done:
                raise HeadraceError(
                    f"step {step.number}",
                    got="micro-batches that were not trained",
                    wanted="a loop over all of them: for micro in step",
                )
        self.finish_saving()

    def _plan_ahead(self) -> None:
        """Have coming batches planned by a process beside, where it is known which they are."""
        depth = self._setup.options.ahead
        if self.rank or not depth:
            return
        left = None if self._steps is None else self._steps - self.number
        coming = self._order.coming(self._epochs if left is None else None)
        if coming is not None:
            self.runner.planner.plan_ahead(islice(coming, left), depth=depth)

    def _more(self) -> bool:
        if self._steps is not None:
            return self.number < self._steps
        return self._order.epoch < self._epochs

    def _finished(self, step: LoopStep) -> None:
        self.number = step.number + 1
        self._state = dict(step.batch.state_after)
        self._writer.look(self._checkpoints().gather)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of the micro-batch at work, for collectives of the model's own; None where this
        rank works alone."""
        return self.runner.part.group if self.runner.part is not None else None

    def recompute(self, layer: Callable[..., Any], *inputs: Any) -> Any:
        """``layer(*inputs)``, computed again in the backward but for its attention."""
        return recomputed(layer, *inputs)

    def shard(self, batch: Mapping[str, Tensor]) -> LoopPart:
        """This rank's part of a batch [b, S] that all ranks have alike, spread over all of them, to
        evaluate the model: call it with the ``inputs``. The losses of all ranks add up to the mean.
        Collective; not within a step."""
        self.found.probes.choose([])
        return self._setup.model.shard(batch)

    def save(self, folder: str | Path, *, keep: int = 3, background: bool = False) -> Path:
        """Write a checkpoint into a folder of its own within ``folder``, of which the last ``keep``
        stay: weights, optimizer, scheduler, the place in the data, and what plans follow from.

        In the ``background`` it is copied to the host's memory and written from there while the
        loop goes on; it is there at the end of the step in which all ranks have written, after the
        last step, or after :meth:`finish_saving`, which a loop that is left by ``break`` has to
        call. Collective. Raises CheckpointError on every
        rank when any could not write it, which a later step may then raise too."""
        runner = self.runner
        scheduler = None if runner.scheduler is None else runner.scheduler.state_dict()
        extra = {
            "step": self.number,
            "ranks": self._setup.groups.ranks,
            "data": self._state,
            "scheduler": scheduler,
            "planner": runner.planner.state(),
        }
        if runner.record is not None:
            runner.record.keep(runner.planner.calibration)
        self.finish_saving()
        writer = self._writer if background else None
        return self._checkpoints().save(Path(folder), self.number, extra, keep=keep, writer=writer)

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is written in the background. Collective; raises as
        :meth:`save`."""
        self._writer.finish(self._checkpoints().gather)

    def load(self, folder: str | Path) -> bool:
        """Go on from the newest whole checkpoint in ``folder``, or from ``folder`` itself where it
        is one; False, with everything as it is, where there is none yet. Collective, before the
        first step. On as many ranks as before plans are made as they would have been.

        Raises CheckpointError for a checkpoint of another model, or where all are damaged, and
        DataError for one of other data.
        """
        self.finish_saving()
        extra = self._checkpoints().load(Path(folder))
        if extra is None:
            return False
        self._order.restore(extra["data"])
        self.number, self._state = int(extra["step"]), dict(extra["data"])
        if self.runner.scheduler is not None:
            self.runner.scheduler.load_state_dict(extra["scheduler"])
        if extra["ranks"] == self._setup.groups.ranks:
            self.runner.plan_as(extra["planner"])
        self._setup.say(f"going on with step {self.number}, saved by {extra['ranks']} ranks")
        return True

    def _checkpoints(self) -> LoopCheckpoints:
        return LoopCheckpoints(
            model=self._setup.held.inner,
            optimizer=self._setup.optimizer,
            groups=self._setup.groups,
        )

    def report(self, out: str | Path = "report.html") -> Path | None:
        """Write the report of the steps so far, one HTML file with pictures; its path on the first
        rank, None on others. Raises MissingExtra without the packages of the extra ``report``."""
        record = self.runner.record
        return None if record is None else record.run.report(out)

    def detach(self) -> None:
        """Give the model back, without what was put in its place, and close what is open."""
        self._restore()
        if self._writer.busy:
            self._setup.say(
                "the last checkpoint is not published: run.finish_saving() was not called"
            )
        self.runner.planner.close()
        if self.runner.record is not None:
            self.runner.record.close()
