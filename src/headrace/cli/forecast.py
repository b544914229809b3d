"""Plans with what is expected of them, made here or in a process that runs ahead; no torch here."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.cli.wiring import best_static, make_problem
from headrace.config.model import PlannerConfig
from headrace.costs import CostModel
from headrace.errors import InfeasiblePlan
from headrace.planning import Problem, plan, static_plan
from headrace.planning.strategies import Schemes, Strategist
from headrace.simulator import peak_bytes, simulate
from headrace.spec.compiler import compile_plan
from headrace.spec.lengths import Lengths
from headrace.spec.measurement import Timeline
from headrace.spec.plan import Plan

__all__ = ["Asked", "Forecast", "Forecaster"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a plan follows from besides costs and options: the lengths and number of the step, how
    far seconds are off so far (``ratio``), and how much memory is left free (``margin``)."""

    lengths: Lengths
    step: int
    ratio: float
    margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A plan, what its ranks' clocks and memories are expected to show, and the best static plan
    beside it among the ``facts``."""

    asked: Asked
    plan: Plan
    predicted: Timeline
    peak_bytes: tuple[int, ...]
    planning_s: float
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Forecaster:
    """Plans what is asked. It can be pickled, to plan in another process, once the strategies to
    choose among are known.

    With ``compare`` the best static plan is made too. Where plans are smoothed, ``before`` is the
    plan of the step before.
    """

    costs: CostModel
    options: PlannerConfig
    seed: int = 0
    compare: bool = True
    strategist: Strategist | None = None
    before: Plan | None = None
    _schemes: Schemes | None = None

    @property
    def schemes(self) -> Schemes:
        """The problem and what its pipelines may be, with these costs."""
        if self._schemes is None:
            self._schemes = Schemes(make_problem(self.costs, self.options))
        return self._schemes

    def use_margin(self, margin: float) -> None:
        """Leave so much of the memory free from now on."""
        if margin != self.costs.memory_margin:
            self.costs = self.costs.replace(memory_margin=margin)
            self._schemes = None

    def __call__(self, asked: Asked) -> Forecast:
        """Plan. Raises InfeasiblePlan when nothing fits."""
        start = time.perf_counter()
        self.use_margin(asked.margin)
        problem = self.schemes.problem.rescaled(asked.ratio)
        if self.strategist is not None:
            self.strategist.steps = asked.step
        chosen = self._choose(problem, asked.lengths)
        if self.options.smoothing:
            self.before = chosen
        planning_s = time.perf_counter() - start
        facts = self._static(problem, asked) if self.compare else {}
        return Forecast(
            asked=asked,
            plan=chosen,
            predicted=self._timeline(chosen, asked.ratio),
            peak_bytes=peak_bytes(chosen, self.costs),
            planning_s=planning_s,
            facts={"memory_margin": self.costs.memory_margin} | facts,
        )

    def require(self, longest: int) -> None:
        """Raise InfeasiblePlan when a sequence of ``longest`` tokens fits nowhere."""
        if self.strategist is not None:
            self.strategist.require(self.schemes, longest)
        else:
            self._choose(self.schemes.problem, Lengths(tokens=(longest,)))

    def fits(self, longest: int, margin: float) -> bool:
        """Whether a sequence would fit with another margin."""
        other = replace(self, costs=self.costs.replace(memory_margin=margin), _schemes=None)
        try:
            other.require(longest)
        except InfeasiblePlan:
            return False
        return True

    def _choose(self, problem: Problem, lengths: Lengths) -> Plan:
        if self.strategist is not None:
            return self.strategist.plan(self.schemes, lengths, problem.costs.scale)
        if self.options.name == "static":
            assert self.options.static_size is not None, "checked by the configuration"
            return static_plan(problem, lengths, self.options.static_size)
        return plan(problem, lengths, seed=self.seed, previous=self.before)

    def _timeline(self, chosen: Plan, ratio: float) -> Timeline:
        programs = compile_plan(chosen, self.costs.shape.bucket_count)
        return simulate(programs, chosen, self.costs.replace(scale=ratio))

    def _static(self, problem: Problem, asked: Asked) -> dict[str, Any]:
        best = best_static(problem, asked.lengths)
        if best is None:
            return {}
        return {
            "best_static": str(best.strategy),
            "best_static_s": best.predicted_s,
            "static_timeline": self._timeline(best, asked.ratio),
        }
