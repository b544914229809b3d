"""What a step of a loop needs: its plan and its packs, the model made ready for each, the update.

:class:`headrace.loop.step.LoopStep` says in which order; here is what each rank does.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist

from headrace.comm.collectives import gather_floats
from headrace.costs import CostModel
from headrace.errors import HeadraceError
from headrace.loop.held import bytes_now
from headrace.loop.order import LoopBatch
from headrace.loop.planning import LoopSetup, ModelCosts, planner_of
from headrace.loop.record import LoopRecord
from headrace.loop.recovery import LoopRecovery
from headrace.loop.samples import packed
from headrace.loop.turns import Turn, members_of
from headrace.ops.loss import IGNORED
from headrace.passes.placement import Exchange
from headrace.passes.shard import LocalBatch
from headrace.runtime.recovery import Exhausted
from headrace.runtime.step_times import RankTimes
from headrace.runtime.trainer import Planned, Step, plan_metrics, told_to_first
from headrace.spec.plan import Plan
from headrace.training.broadcast import BroadcastPlanner

__all__ = ["StepRunner"]


@dataclass(slots=True, kw_only=True, eq=False)
class StepRunner:
    """One rank's. ``first`` is the place that the model counts the first token of a pack as; of the
    steps in ``drawn`` the rows of all ranks are written down; ``shard`` is at work."""

    setup: LoopSetup
    found: ModelCosts
    scheduler: Any
    clip: float | None
    first: int
    drawn: Container[int]
    record: LoopRecord | None
    planner: BroadcastPlanner = field(init=False)
    recovery: LoopRecovery = field(init=False)
    shard: LocalBatch | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        possible = not self.setup.held.sharded and dist.get_backend() == "gloo"
        self.recovery = LoopRecovery(groups=self.setup.groups, possible=possible)
        self.planner = planner_of(self.setup, self.found.costs, self.drawn)

    @property
    def rank(self) -> int:
        """This one, of the world."""
        return self.setup.groups.rank

    def plan(self, batch: LoopBatch) -> Planned:
        """The plan of a batch, with its groups made. Collective."""
        return self._prepared(self.planner.plan(batch.lengths))

    def plan_again(self, batch: LoopBatch, plan: Plan, exhausted: Exhausted) -> Planned:
        """A thriftier plan of a batch, with nothing left of the attempt before. Collective. Raises
        InfeasiblePlan when there is none."""
        self.setup.optimizer.zero_grad()
        gc.collect()
        planned = self.planner.replan(batch.lengths, plan, exhausted)
        self.setup.say(f"{exhausted}: the step is taken again as {planned.plan.strategy}")
        return self._prepared(planned)

    def _prepared(self, planned: Planned) -> Planned:
        plan = planned.plan
        self.setup.adopted.prepare({members_of(plan, i) for i in range(len(plan.micro_batches))})
        return planned

    def read(self, batch: LoopBatch, plan: Plan, turn: Turn) -> dict[str, torch.Tensor]:
        """The pack of a turn; where there is nothing to do, two tokens without a loss."""
        if turn.index is None:
            nothing = torch.zeros(2, dtype=torch.int64)
            row = packed([{self.setup.adopted.tokens: nothing, "labels": nothing + IGNORED}])
        else:
            row = packed([batch.read(i) for i in plan.micro_batches[turn.index].sequences])
        row["position_ids"] = row["position_ids"] + self.first
        return {name: value.to(self.setup.device) for name, value in row.items()}

    def place(
        self, plan: Plan, turn: Turn, pack: Mapping[str, torch.Tensor], targets: int
    ) -> LocalBatch:
        """This rank's part of a pack, which the model works on from here on."""
        exchange: Exchange | None = None
        options = () if turn.index is None else plan.micro_batches[turn.index].layers.options
        if len(turn.ranks) > 1:
            exchange = cast(Exchange, options[0].attention)
        self.found.probes.choose([option.recompute for option in options])
        adopted = self.setup.adopted
        self.shard = adopted.place(pack, turn.ranks, targets=targets, exchange=exchange)
        return self.shard

    def bytes_now(self) -> int:
        """What this rank holds of the model and its optimizer."""
        return bytes_now(self.setup.held.model, self.setup.optimizer)

    def total(self, count: int) -> int:
        """The sum of a number over all ranks. Collective."""
        return int(sum(row[0] for row in gather_floats([float(count)], self.setup.groups.world)))

    def update(self, number: int, loss: float) -> float | None:
        """Add up gradients, and take one step of optimizer and scheduler; returns the norm of the
        gradient, where it is clipped. Collective. Raises HeadraceError for a ``loss`` that is not
        finite, with the weights as they were."""
        if not math.isfinite(loss):
            raise HeadraceError(
                f"loss of step {number}", got=loss, wanted="a finite number",
                hint="lower the learning rate and go on from the last checkpoint",
            )  # fmt: skip
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
        online = self.planner.planner
        if step is None or online is None or self.record is None:
            return
        self.planner.observe(planned.plan.predicted_s, step.step_s)
        rate = float(self.setup.optimizer.param_groups[0]["lr"])
        done = Step(
            number=number, metrics={**metrics, "lr": rate} | plan_metrics(planned, step),
            plan=planned.plan, times=step, measured=rows, micro_batch_s=planned.micro_batch_s,
            predicted=planned.predicted, facts=planned.facts,
        )  # fmt: skip
        self.record.step(done, online.learn(done))

    def plan_as(self, state: Mapping[str, Any]) -> None:
        """Plan with the costs and the corrections of before."""
        costs = CostModel.from_json(state["costs"]).replace(cluster=self.found.costs.cluster)
        self.planner = planner_of(self.setup, costs, self.drawn)
        if self.planner.planner is not None:
            self.planner.planner.restore(state)
