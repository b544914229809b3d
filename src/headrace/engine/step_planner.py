"""The planner of one step, and the memory that its plans leave free; no torch here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from headrace.config.model import PlannerConfig
from headrace.costs import CostModel
from headrace.costs.calibration import raised_margin
from headrace.costs.forward import forward_costs
from headrace.costs.library import memory_margin_of
from headrace.engine.plans import make_problem
from headrace.errors import InfeasiblePlan
from headrace.planning import Problem
from headrace.planning import plan as plan_batch
from headrace.simulator import micro_batch_seconds, peak_bytes, simulate
from headrace.spec.lengths import Lengths
from headrace.spec.measurement import Timeline
from headrace.spec.plan import Plan, Semantics
from headrace.spec.program import compile_plan
from headrace.spec.step import BestStatic, Planned, PlanRequest
from headrace.units import bytes_text, percent_text

__all__ = ["MemoryMargin", "StepPlanner"]

_PROBLEMS = 4
"""Number of problems that are cached: of steps and of forwards alone, each with the current memory
margin and one that is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlanner:
    """Plans one step, or forwards alone: the same request gives the same plan, whatever was asked
    before.

    It can be pickled, to plan in another process.

    Args:
        costs: What layers, exchanges and updates cost.
        options: What a configuration asks of plans.
        seed: The seed of the search.
        semantics: ``free`` groups start when their ranks are free; in ``lockstep`` all ranks meet
            at every layer.
        stages: Whether pipelines may have stages.

    Example:
        >>> planner = StepPlanner(costs=costs, options=PlannerConfig(smoothing=0.05))
        >>> first = planner.plan(PlanRequest(lengths=lengths))
        >>> after = planner.plan(PlanRequest(lengths=others, step=1, previous=first.plan))
    """

    costs: CostModel
    options: PlannerConfig
    seed: int = 0
    semantics: Semantics = "free"
    stages: bool = True
    _problems: dict[tuple[float, bool], Problem] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def plan(self, request: PlanRequest) -> Planned:
        """The plan of a step, or of forwards alone, with what it is expected to take.

        Raises:
            InfeasiblePlan: When nothing fits, saying by how much and what would help.
        """
        if request.forward:
            # Where no plan of forwards alone is known to fit, that of a step serves.
            with suppress(InfeasiblePlan):
                return self._plan(request)
            request = replace(request, forward=False)
        return self._plan(request)

    def _plan(self, request: PlanRequest) -> Planned:
        """The plan of exactly what is requested. Raises InfeasiblePlan when nothing fits."""
        # A loop need not load planners of others before its first plan.
        from headrace.planners import PLANNERS

        start = time.perf_counter()
        problem = self._problem_of(request)
        if self.options.rotate and problem.strategies:
            # Strategies take turns, one for each step.
            strategy = problem.strategies[request.step % len(problem.strategies)]
            problem = problem.replace(strategies=(strategy,))
        previous = request.previous if self.options.smoothing else None
        made = plan_batch(
            problem,
            request.lengths,
            seed=self.seed,
            previous=previous,
            generators=PLANNERS[problem.planner],
        )
        return self.expected(made, request, planning_s=time.perf_counter() - start)

    def expected(self, made: Plan, request: PlanRequest, *, planning_s: float = 0.0) -> Planned:
        """The plan ``made``, by whatever planner, with what it is expected to take: seconds of its
        micro-batches, peak bytes of the ranks, and for a step that is drawn the timeline.
        ``planning_s`` are the seconds that making the plan took."""
        costs = self._problem_of(request).model
        return Planned(
            request=request,
            plan=made,
            micro_batch_s=micro_batch_seconds(made, costs),
            predicted=_timeline(made, costs) if request.drawn else None,
            peak_bytes=peak_bytes(made, costs),
            planning_s=planning_s,
        )

    def best_static(self, request: PlanRequest) -> BestStatic | None:
        """The fastest plan of one group size for a step; None when no single size fits, and for
        forwards alone, with which nothing is compared."""
        if request.forward:
            return None
        problem = self._problem_of(request)
        static = problem.replace(planner="static", static_size=None, strategies=())
        try:
            made = plan_batch(static, request.lengths)
        except InfeasiblePlan:
            return None
        return BestStatic(
            strategy=str(made.strategy),
            seconds=made.predicted_s,
            predicted=_timeline(made, problem.model) if request.drawn else None,
        )

    def require(self, longest: int, margin: float | None = None, *, forward: bool = False) -> None:
        """Raise InfeasiblePlan when a sequence of ``longest`` tokens fits on no group with a memory
        margin. Where the strategies of a configuration take turns, it has to fit each of them.
        ``forward`` asks for forwards alone in the place of steps."""
        lengths = Lengths(tokens=(longest,))
        turns = len(self.options.strategies) if self.options.rotate else 1
        for step in range(max(1, turns)):  # each strategy has its turn once
            self.plan(PlanRequest(lengths=lengths, step=step, margin=margin, forward=forward))

    def fits(self, longest: int, margin: float, *, forward: bool = False) -> bool:
        """Whether :meth:`require` accepts a sequence of ``longest`` tokens with a memory margin."""
        try:
            self.require(longest, margin, forward=forward)
        except InfeasiblePlan:
            return False
        return True

    def problem(self, margin: float | None = None, *, forward: bool = False) -> Problem:
        """The problem that plans of steps, or of forwards alone, solve with a memory margin, that
        of the costs when left out. The last few problems are kept."""
        margin = self.costs.memory_margin if margin is None else margin
        found = self._problems.get((margin, forward))
        if found is None:
            costs = forward_costs(self.costs) if forward else self.costs
            if margin != costs.memory_margin:
                costs = costs.replace(memory_margin=margin)
            found = make_problem(costs, self.options, semantics=self.semantics, stages=self.stages)
            if len(self._problems) == _PROBLEMS:
                del self._problems[next(iter(self._problems))]
            self._problems[margin, forward] = found
        return found

    def _problem_of(self, request: PlanRequest) -> Problem:
        """The problem of a request: with its memory margin, and with all seconds multiplied by its
        ratio."""
        problem = self.problem(request.margin, forward=request.forward)
        return problem if request.ratio is None else problem.rescaled(request.ratio)


def _timeline(made: Plan, costs: CostModel) -> Timeline:
    """What the clocks of all ranks are expected to show of a plan."""
    return simulate(compile_plan(made, costs.shape.bucket_count), made, costs)


Found = TypeVar("Found")

_THRIFTIER = (0.9, 0.97, 0.995)
"""Fractions of the predicted peak bytes of a plan that ran out of memory which the plan in its
place may take, tried in this order."""

_MARGIN_STEP = 0.05
"""A margin is lowered by this fraction of memory at a time until the longest sequence fits."""


@dataclass(slots=True, kw_only=True)
class MemoryMargin:
    """The memory margin of a run's plans, where the configuration leaves it out: it is raised when
    a peak came too near to the memory, as far as the longest sequence of the run allows. Where the
    configuration gives it, only a step that runs out of memory raises it.

    A margin that was learnt in earlier runs never refuses what would fit without it.

    Args:
        planner: Says what fits.
        value: The fraction of a rank's memory that plans leave free.
        forward: Whether it is that of forwards alone.
        longest: Tokens of the longest sequence of the run, which must go on to fit.
    """

    planner: StepPlanner
    value: float
    forward: bool = False
    longest: int = 1
    _refused: float = 0.0  # the highest margin wanted that the longest sequence did not allow

    @property
    def _is_configured(self) -> bool:
        """Whether the configuration gives the margin."""
        return self.planner.options.memory_margin is not None

    def require(self, longest: int) -> None:
        """Note the longest sequence of the run, in tokens, and raise InfeasiblePlan when it fits
        nowhere. A margin that was learnt is lowered first as far as needed, but not below the one
        that a run without any experience begins with."""
        self.longest = max(1, longest)
        usual = memory_margin_of(self.planner.costs.cluster.device)
        while not self._is_configured and self.value > usual:
            if self.planner.fits(longest, self.value):
                return
            self.value = max(usual, self.value - _MARGIN_STEP)
        self.planner.require(longest, self.value)

    def plan_after_failure(
        self, peak_bytes: int, failure: object, plan: Callable[[float], Found]
    ) -> Found:
        """Plan a batch again whose plan ran out of memory on a rank with predicted ``peak_bytes``.

        Calls ``plan(margin)`` with margins that allow 90, 97 and 99.5 % of these bytes, ``margin =
        1 - fraction * peak_bytes / memory``, and returns the first plan that there is. The margin
        of the run is raised to that one, as far as its longest sequence allows, so that later
        batches leave as much free. Raises InfeasiblePlan, naming the ``failure``, where no plan
        fits.
        """
        old, memory = self.value, self.planner.costs.cluster.memory_bytes
        refusal = ""
        for thriftier in _THRIFTIER:
            margin = max(old, 1 - thriftier * peak_bytes / memory)
            try:
                found = plan(margin)
            except InfeasiblePlan as error:
                refusal = str(error)
                continue
            self.value = self._fitting(old, margin)
            return found
        raise InfeasiblePlan(
            f"memory of {bytes_text(memory)}",
            got=failure,
            wanted=f"enough for a plan that takes less than {bytes_text(peak_bytes)} ({refusal})",
            hint="other processes take it, or devices.memory is more than there is",
        )

    def _fitting(self, old: float, margin: float) -> float:
        """``margin``, lowered until the longest sequence fits, but not below ``old``."""
        while margin > old and not self.planner.fits(self.longest, margin, forward=self.forward):
            margin = max(old, margin - _MARGIN_STEP)
        return margin

    def raise_after_step(
        self, step: int, predicted: Sequence[int], measured: Sequence[int]
    ) -> tuple[str, ...]:
        """Raise the margin after a step in which a peak came too near to the memory, as far as the
        longest sequence allows; returns a warning for the user where it was raised. ``predicted``
        and ``measured`` are the peak bytes of every rank."""
        old, memory = self.value, self.planner.costs.cluster.memory_bytes
        wanted = raised_margin(old, predicted, measured, memory)
        if self._is_configured or wanted <= max(old, self._refused):
            return ()
        margin = self._fitting(old, wanted)
        if margin < wanted:
            self._refused = wanted  # so that it is not tried again after every step
        if margin == old:
            return ()
        self.value = margin
        rank = max(range(len(measured)), key=measured.__getitem__)
        return (
            f"memory margin raised from {percent_text(old)} to {percent_text(margin)}: "
            f"in step {step} rank {rank} took {bytes_text(measured[rank])} of "
            f"{bytes_text(memory)}, {bytes_text(predicted[rank])} were predicted",
        )
