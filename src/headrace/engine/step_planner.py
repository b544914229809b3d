"""The plan of a step with what is expected of it, made here or in a process that runs ahead; no
torch here."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from headrace.costs.calibration import raised_margin
from headrace.costs.library import memory_margin_of
from headrace.engine.plans import ConfiguredPlanner
from headrace.errors import InfeasiblePlan
from headrace.simulator import micro_batch_seconds, peak_bytes, simulate
from headrace.spec.lengths import Lengths
from headrace.spec.measurement import Timeline
from headrace.spec.plan import Plan
from headrace.spec.program import compile_plan
from headrace.units import bytes_text, percent_text

__all__ = [
    "MemoryMargin",
    "PlanRequest",
    "PlannedStep",
    "StepPlanner",
]


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


Found = TypeVar("Found")

# Of what a plan that ran out of memory was expected to take: the next that can be had.
_THRIFTIER = (0.9, 0.97, 0.995)
_FINER = 0.05  # by which a margin is lowered until the longest sequence fits


@dataclass(slots=True, kw_only=True)
class MemoryMargin:
    """The memory margin of a planner, where the configuration leaves it out: it is raised when a
    peak came too near to the memory, as far as the longest sequence of the run allows. Where the
    configuration gives it, only a step that runs out of memory raises it.

    A margin that was learnt in earlier runs never refuses what would fit without it.
    """

    planner: ConfiguredPlanner
    longest: int = 1
    _refused: float = 0.0

    @property
    def value(self) -> float:
        """The fraction of a rank's memory that plans leave free."""
        return self.planner.costs.memory_margin

    @property
    def _fixed(self) -> bool:
        return self.planner.options.memory_margin is not None

    def require(self, longest: int) -> None:
        """Raise InfeasiblePlan when a sequence of ``longest`` tokens will fit nowhere; a learnt
        margin is lowered first, to the least that a run without any experience begins with."""
        self.longest = max(1, longest)
        usual = memory_margin_of(self.planner.costs.cluster.device)
        while not self._fixed and self.value > usual:
            if self.planner.fits(longest, self.value):
                return
            self.planner.use_margin(max(usual, self.value - _FINER))
        self.planner.require(longest)

    def plan_after_failure(
        self, peak_bytes: int, failure: object, plan: Callable[[float], Found]
    ) -> Found:
        """What ``plan`` finds, given a margin, for a batch whose plan ran out of memory: expected
        to take a tenth less than that one's ``peak_bytes``, or as much less as can be had. Later
        batches leave as much free as far as the longest sequence of the run allows.

        Raises InfeasiblePlan, naming the ``failure``, when the plan that failed was the thriftiest.
        """
        old, memory = self.value, self.planner.costs.cluster.memory_bytes
        none = ""
        for thriftier in _THRIFTIER:
            margin = max(old, 1 - thriftier * peak_bytes / memory)
            try:
                found = plan(margin)
            except InfeasiblePlan as error:
                none = str(error)
                continue
            self.planner.use_margin(self._fitting(old, margin))
            return found
        self.planner.use_margin(old)
        raise InfeasiblePlan(
            f"memory of {bytes_text(memory)}",
            got=failure,
            wanted=f"enough for a plan that takes less than {bytes_text(peak_bytes)} ({none})",
            hint="other processes take it, or devices.memory is more than there is",
        )

    def _fitting(self, old: float, margin: float) -> float:
        """The margin, lowered until the longest sequence fits, to ``old`` at most."""
        while margin > old and not self.planner.fits(self.longest, margin):
            margin = max(old, margin - _FINER)
        return margin

    def raise_after_step(
        self, step: int, predicted: Sequence[int], measured: Sequence[int]
    ) -> tuple[str, ...]:
        """Leave more memory free after a peak that came too near, as far as the longest sequence
        allows; returns what a user should be told. Peaks are bytes of every rank."""
        old, memory = self.value, self.planner.costs.cluster.memory_bytes
        wanted = raised_margin(old, predicted, measured, memory)
        if self._fixed or wanted <= max(old, self._refused):
            return ()
        margin = self._fitting(old, wanted)
        if margin < wanted:
            self._refused = wanted
        if margin == old:
            return ()
        self.planner.use_margin(margin)
        rank = max(range(len(measured)), key=measured.__getitem__)
        return (
            f"memory margin raised from {percent_text(old)} to {percent_text(margin)}: "
            f"in step {step} rank {rank} took {bytes_text(measured[rank])} of "
            f"{bytes_text(memory)}, {bytes_text(predicted[rank])} were predicted",
        )
