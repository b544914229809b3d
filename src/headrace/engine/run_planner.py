"""The planner of a run: costs in, plans out, measurements back.

It is where the side that plans and the side that runs meet: the trainer asks it for plans as
``runtime.trainer.Planner`` and knows nothing of how they are made. Only the first rank has one; see
:mod:`headrace.engine.broadcast`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.comm.workers import PlanAhead
from headrace.config.model import PlannerConfig
from headrace.costs import CostModel
from headrace.costs.calibration import Calibration, micro_batch_residuals
from headrace.costs.drift import Drift
from headrace.engine.plans import ConfiguredPlanner
from headrace.engine.step_planner import MemoryMargin, PlannedStep, PlanRequest, StepPlanner
from headrace.simulator import peak_bytes
from headrace.spec.lengths import Lengths
from headrace.spec.plan import Plan, Semantics
from headrace.spec.step import Exhausted, Planned, Step

__all__ = ["OnlinePlanner"]

_MEMORY = 0.9  # of the old ratio, at each step


@dataclass(slots=True, kw_only=True)
class OnlinePlanner:
    """Plans batches and learns how far predictions are off.

    ``ratio`` is a running mean of measured over predicted seconds. It corrects what is shown,
    and is uniform, so it never changes which plan is best: the plans of a run follow from its
    costs and its lengths alone, and a resumed run plans as the uninterrupted one. The one thing
    learnt that changes plans is the memory margin, part of the costs in :meth:`state`.

    ``costs`` are those that the run begins with. ``calibration`` takes the residuals of every step;
    ``drift``, where there is one, watches them. ``semantics`` and ``stages`` as in Problem.
    ``compare`` has the best static plan made beside each. The steps ``drawn`` get timelines.
    ``tell`` gets a line when a planning process has died.
    """

    costs: CostModel
    options: PlannerConfig
    seed: int = 0
    compare: bool = True
    drawn: Container[int] = ()
    ratio: float = 1.0
    observed: int = 0
    calibration: Calibration = field(default_factory=lambda: Calibration(fingerprint=""))
    drift: Drift | None = None
    semantics: Semantics = "free"
    stages: bool = True
    tell: Callable[[str], None] = lambda text: None
    steps: StepPlanner = field(init=False)
    margin: MemoryMargin = field(init=False)
    _step: int = 0
    _ahead: PlanAhead[PlanRequest, PlannedStep] | None = None
    _planned_ratio: float = 1.0
    _warm: bool = False

    def __post_init__(self) -> None:
        planner = ConfiguredPlanner(
            costs=self.costs,
            options=self.options,
            seed=self.seed,
            semantics=self.semantics,
            stages=self.stages,
        )
        self.steps = StepPlanner(planner=planner, compare=self.compare, drawn=self.drawn)
        self.margin = MemoryMargin(planner=planner)
        if not self.calibration.fingerprint:
            self.calibration = Calibration(fingerprint=self.costs.fingerprint)

    def plan(self, lengths: Lengths) -> Planned:
        """The plan of a batch, what its ranks' clocks and memories are expected to show, and the
        best static plan beside it: made ahead, if it was for this batch and this margin."""
        request = self._request(lengths)
        found = next(self._ahead, None) if self._ahead is not None else None
        wanted = (lengths, request.margin)
        if found is None or (found.request.lengths, found.request.margin) != wanted:
            found = self.steps(request)
        return self._planned(found)

    def plan_ahead(self, coming: Iterable[Lengths], *, depth: int) -> None:
        """Have the plans of the batches to come made by a process of their own, at most ``depth``
        ahead. Where plans are smoothed each waits for the one before: they are made here."""
        if self.options.smoothing:
            return
        made = replace(self.steps, planner=copy.copy(self.steps.planner))
        items = (self._request(lengths, step) for step, lengths in enumerate(coming, self._step))
        self._ahead = PlanAhead(made, items, depth=depth, tell=self.tell)

    def close(self) -> None:
        """End the process that plans ahead."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _request(self, lengths: Lengths, step: int | None = None) -> PlanRequest:
        """What is asked for a step, the next one unless told."""
        return PlanRequest(
            lengths=lengths,
            step=self._step if step is None else step,
            ratio=self.ratio,
            margin=self.margin.value,
        )

    def _planned(self, found: PlannedStep) -> Planned:
        """What the trainer gets; the plan after it is the next step's."""
        self._planned_ratio = found.request.ratio
        self._step += 1
        return Planned(
            plan=found.plan,
            micro_batch_s=found.micro_batch_s,
            predicted=found.predicted,
            peak_bytes=found.peak_bytes,
            planning_s=found.planning_s,
            facts=found.facts,
        )

    def replan(self, lengths: Lengths, failed: Plan, exhausted: Exhausted) -> Planned:
        """A plan of the same batch that is expected to take a tenth less memory than ``failed`` did
        where it ran out, or as much less as can be had; the margin stays as high for the rest of
        the run, as far as its longest sequence allows, and is learnt."""
        costs = self.current_costs
        memory, predicted = costs.cluster.memory_bytes, peak_bytes(failed, costs)
        measured = [memory if r in exhausted.ranks else p for r, p in enumerate(predicted)]
        self.calibration.peaks = self.calibration.peaks.after(predicted, measured, memory)
        self._step -= 1  # the same step
        request = self._request(lengths)
        found = self.margin.plan_after_failure(
            max(predicted[r] for r in exhausted.ranks),
            exhausted,
            lambda margin: self.steps(replace(request, margin=margin)),
        )
        return self._planned(found)

    @property
    def current_costs(self) -> CostModel:
        """The costs with the memory margin in force."""
        return self.steps.planner.costs

    def check(self, longest: int) -> None:
        """Raise InfeasiblePlan now when a sequence of ``longest`` tokens will fit nowhere."""
        self.margin.require(longest)

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """Take a finished step into the running mean. Plans made ahead are predicted with a ratio
        that is no longer the last one."""
        self.steps.planner.steps = self._step
        if predicted_s <= 0 or measured_s <= 0:
            return
        seen = self._planned_ratio * measured_s / predicted_s
        self.observed += 1
        weight = max(1 - _MEMORY, 1 / self.observed)
        self.ratio += weight * (seen - self.ratio)

    def learn(self, step: Step) -> tuple[str, ...]:
        """Take the times and peaks of a finished step; returns what a user should be told, a
        sentence each: drift, where it is watched, and a raised margin.

        The first step of a process warms up and says nothing.
        """
        if not self._warm:
            self._warm = True
            return ()
        predicted, measured = step.metrics["predicted_peak_bytes"], step.metrics["peak_bytes"]
        costs, known = self.current_costs, self.calibration
        found = step.times.micro_batches if step.times is not None else {}
        residuals = micro_batch_residuals(step.plan, step.micro_batch_s, found, costs)
        known.observe(residuals)
        known.peaks = known.peaks.after(predicted, measured, costs.cluster.memory_bytes)
        told = self.margin.raise_after_step(step.number, predicted, measured)
        if self.drift is not None:
            return (*self.drift.observe(step.number, residuals, self._planned_ratio), *told)
        return told

    def state(self) -> dict[str, Any]:
        """Costs, correction, seed and what was learnt: what a resumed run needs to plan alike."""
        return self.steps.planner.state() | {
            "costs": self.current_costs.to_json(),
            "ratio": self.ratio,
            "observed": self.observed,
            "seed": self.seed,
            "calibration": self.calibration.to_json(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the correction of an earlier run, what it learnt of these costs, and its last plan
        where plans are smoothed."""
        self.steps.planner.restore(state)
        self._step = self.steps.planner.steps
        self.ratio, self.observed = float(state["ratio"]), int(state["observed"])
        if "calibration" in state:
            learnt = Calibration.from_json(state["calibration"])
            if learnt.fingerprint == self.costs.fingerprint:
                self.calibration = learnt
