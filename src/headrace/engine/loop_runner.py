"""What a step of a loop needs: its plan and its packs, the model made ready for each, the update.

:class:`headrace.engine.loop_step.LoopStep` says in which order; here is what each rank does.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from headrace.comm.collectives import gather_bytes
from headrace.costs import CostModel
from headrace.engine.held import bytes_now
from headrace.engine.loop_planning import LoopSetup, ModelCosts, planner_of
from headrace.engine.loop_record import LoopRecord
from headrace.engine.loop_recovery import LoopRecovery
from headrace.engine.run_planner import RunPlanner
from headrace.engine.sample_order import LoopBatch
from headrace.engine.spread_model import LoopPart, Pack
from headrace.engine.trainer import told_to_first
from headrace.engine.turns import Turn, turns_of
from headrace.errors import HeadraceError
from headrace.spec.method_facts import Members
from headrace.spec.plan import Plan
from headrace.spec.step import Exhausted, Planned, RankTimes, Step, plan_metrics

__all__ = ["StepRunner", "Work"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """A pack of a turn, on the ranks that it can be spread over."""

    turn: Turn
    ranks: Members
    pack: Pack


@dataclass(slots=True, kw_only=True, eq=False)
class StepRunner:
    """One rank's. Of the steps in ``drawn`` the rows of all ranks are written down; ``part`` is at
    work."""

    setup: LoopSetup
    found: ModelCosts
    scheduler: Any
    clip: float | None
    drawn: Container[int]
    record: LoopRecord | None
    planner: RunPlanner = field(init=False)
    recovery: LoopRecovery = field(init=False)
    part: LoopPart | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        on_host = dist.get_backend() == "gloo" and self.setup.groups.device.type == "cpu"
        possible = on_host and not self.setup.held.sharded
        self.recovery = LoopRecovery(groups=self.setup.groups, possible=possible)
        self.planner = planner_of(self.setup, self.found.costs, self.drawn)

    @property
    def rank(self) -> int:
        """This one, of the world."""
        return self.setup.groups.rank

    def plan(self, batch: LoopBatch) -> Planned:
        """The plan of a batch. Collective."""
        return self.planner.plan(batch.lengths)

    def plan_again(self, batch: LoopBatch, plan: Plan, exhausted: Exhausted) -> Planned:
        """A thriftier plan of a batch, with nothing left of the attempt before. Collective. Raises
        InfeasiblePlan when there is none."""
        self.setup.optimizer.zero_grad()
        self.setup.model.forget()
        gc.collect()
        planned = self.planner.replan(batch.lengths, plan, exhausted)
        self.setup.say(f"{exhausted}: the step is taken again as {planned.plan.strategy}")
        return planned

    def work(self, batch: LoopBatch, plan: Plan) -> tuple[list[list[Work]], int]:
        """What this rank does in each turn, its groups made, and the tokens of all ranks that have
        a loss. Collective."""
        found = [list(self._packs(batch, plan, turn)) for turn in turns_of(plan, self.rank)]
        led = [work for some in found for work in some if work.ranks[0] == self.rank]
        mine = [
            sum(work.pack.targets for work in led),
            [len(some) for some in found],
            sorted({work.ranks for work in led}),
        ]
        said = gather_bytes(json.dumps(mine).encode(), self.setup.groups.world)
        counts, lengths, groups = zip(*map(json.loads, said), strict=True)
        model = self.setup.model
        wanted = sorted({tuple(ranks) for some in groups for ranks in some})
        model.prepare(some for ranks in wanted for some in model.groups_of(ranks))
        if plan.semantics == "lockstep":
            rounds = [max(column) for column in zip(*lengths, strict=True)]
            found = [self._filled(some, n) for some, n in zip(found, rounds, strict=True)]
        else:
            found = [[work for work in some if self.rank in work.ranks] for some in found]
        return found, sum(counts)

    def _packs(self, batch: LoopBatch, plan: Plan, turn: Turn) -> Iterator[Work]:
        """The packs of a turn, those too that this rank has no part in."""
        if turn.index is None:
            return
        model = self.setup.model
        samples = [batch.read(i) for i in plan.micro_batches[turn.index].sequences]
        for pack in model.packs(samples):
            ranks = model.ranks_for(pack, turn.ranks)
            yield Work(turn=turn, ranks=ranks, pack=pack)

    def _filled(self, some: list[Work], count: int) -> list[Work]:
        """Work of a turn in which all ranks meet at every layer: ``count`` packs, of two tokens
        without a loss where this rank has no part."""
        probes, me = self.found.probes, (self.rank,)
        pack = self.setup.model.made(probes.sample, (2,), 1, document=probes.document)
        nothing = Work(turn=Turn(index=None, ranks=me), ranks=me, pack=replace(pack, targets=0))
        mine = [work if self.rank in work.ranks else nothing for work in some]
        return mine + [nothing] * (count - len(mine))

    def place(self, plan: Plan, work: Work, targets: int) -> LoopPart:
        """This rank's part of a pack, which the model works on from here on."""
        index = work.turn.index
        options = () if index is None else plan.micro_batches[index].layers.options
        # Some of the ranks may be too many for a pack: it is run as it was planned for all.
        exchange = options[0].attention if len(work.turn.ranks) > 1 else None
        self.found.probes.choose([option.recompute for option in options])
        self.part = self.setup.model.place(
            work.pack.to(self.setup.device), work.ranks, targets=targets, exchange=exchange
        )
        return self.part

    def bytes_now(self) -> int:
        """What this rank holds of the model and its optimizer."""
        return bytes_now(self.setup.held.model, self.setup.optimizer)

    def update(self, number: int, loss: float) -> float | None:
        """Add up gradients, and take one step of optimizer and scheduler; returns the norm of the
        gradient, where it is clipped. Collective. Raises HeadraceError for a ``loss`` that is not
        finite, with the weights as they were."""
        if not math.isfinite(loss):
            raise HeadraceError(
                f"loss of step {number}",
                got=loss,
                wanted="a finite number",
                hint="lower the learning rate and go on from the last checkpoint",
            )
        held, optimizer = self.setup.held, self.setup.optimizer
        held.add_up()
        norm = float(held.norm(self.clip)) if self.clip is not None else None
        optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        optimizer.zero_grad()
        return norm

    def finished(self, metrics: Mapping[str, Any], planned: Planned, times: RankTimes) -> None:
        """Write down a step that is done, and learn from it. Collective."""
        number = int(metrics["step"])
        step, rows = told_to_first(times, self.setup.groups, drawn=number in self.drawn)
        if step is None or self.record is None:
            return
        self.planner.observe(planned.plan.predicted_s, step.step_s)
        rate = float(self.setup.optimizer.param_groups[0]["lr"])
        done = Step(
            number=number,
            metrics={**metrics, "lr": rate} | plan_metrics(planned, step),
            plan=planned.plan,
            times=step,
            measured=rows,
            micro_batch_s=planned.micro_batch_s,
            predicted=planned.predicted,
        )
        notices = self.planner.learn(done)
        done = self.planner.compared(done)
        self.record.step(done, notices)
        self.setup.heard(done)

    def plan_as(self, state: Mapping[str, Any]) -> None:
        """Plan with the costs and the corrections of before."""
        costs = CostModel.from_json(state["costs"]).replace(cluster=self.found.costs.cluster)
        self.planner = planner_of(self.setup, costs, self.drawn)
        self.planner.restore(state)
