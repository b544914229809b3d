"""The plan of a step with what is expected of it, made here or in a process that runs ahead; no
torch here."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.simulator import micro_batch_seconds, peak_bytes, simulate
from headrace.spec.compiler import compile_plan
from headrace.spec.lengths import Lengths
from headrace.spec.measurement import Timeline
from headrace.spec.plan import Plan
from headrace.training.planning import ConfiguredPlanner

__all__ = ["PlanRequest", "PlannedStep", "StepPlanner"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What a plan follows from besides costs and options: the lengths and number of the step, how
    far seconds are off so far (``ratio``), and how much memory is left free (``margin``)."""

    lengths: Lengths
    step: int
    ratio: float
    margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A plan, the seconds of its micro-batches, what its ranks' clocks (where the step is drawn)
    and memories are expected to show, and the best static plan beside it among the ``facts``."""

    request: PlanRequest
    plan: Plan
    micro_batch_s: tuple[float, ...]
    predicted: Timeline | None
    peak_bytes: tuple[int, ...]
    planning_s: float
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class StepPlanner:
    """Plans what is requested; with ``compare`` the best static plan is made too. The steps
    ``drawn`` come with timelines, which take longer the more ranks there are. It can be pickled, to
    plan in another process."""

    planner: ConfiguredPlanner
    compare: bool = True
    drawn: Container[int] = ()

    def __call__(self, request: PlanRequest) -> PlannedStep:
        """Plan. Raises InfeasiblePlan when nothing fits."""
        planner, start = self.planner, time.perf_counter()
        planner.use_margin(request.margin)
        made = planner.plan(request.lengths, step=request.step, scale=request.ratio)
        planning_s = time.perf_counter() - start
        return PlannedStep(
            request=request,
            plan=made,
            micro_batch_s=micro_batch_seconds(made, planner.costs.replace(scale=request.ratio)),
            predicted=self._timeline(made, request),
            peak_bytes=peak_bytes(made, planner.costs),
            planning_s=planning_s,
            facts={"memory_margin": planner.costs.memory_margin} | self._static(request),
        )

    def _static(self, request: PlanRequest) -> dict[str, Any]:
        if not self.compare:
            return {}
        best = self.planner.best_static(request.lengths, scale=request.ratio)
        if best is None:
            return {}
        return {
            "best_static": str(best.strategy),
            "best_static_s": best.predicted_s,
            "static_s": self.planner.static_s(request.lengths, scale=request.ratio),
            "static_timeline": self._timeline(best, request),
        }

    def _timeline(self, made: Plan, request: PlanRequest) -> Timeline | None:
        if request.step not in self.drawn:
            return None
        costs = self.planner.costs.replace(scale=request.ratio)
        return simulate(compile_plan(made, costs.shape.bucket_count), made, costs)
