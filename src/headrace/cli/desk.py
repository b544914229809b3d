"""The planning desk of a run: costs in, plans out, measurements back.

It is the one place where the wing that plans and the wing that runs meet: the trainer asks it for
plans as ``runtime.trainer.Planner`` and knows nothing of how they are made.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.cli.wiring import best_static, make_problem
from headrace.config.model import PlannerConfig
from headrace.costs import CostModel
from headrace.planning import Problem, plan, static_plan
from headrace.runtime.trainer import Planned
from headrace.simulator import peak_bytes, simulate
from headrace.spec.compiler import compile_plan
from headrace.spec.lengths import Lengths
from headrace.spec.measurement import Timeline
from headrace.spec.plan import Plan
from headrace.spec.weights import bucket_count

__all__ = ["Desk"]

_MEMORY = 0.9  # of the old ratio, at each step


@dataclass(slots=True, kw_only=True)
class Desk:
    """Plans batches and learns how far predictions are off.

    ``ratio`` is a running mean of measured over predicted seconds. It corrects what is shown,
    and is uniform, so it never changes which plan is best: the plans of a run follow from its
    costs and its lengths alone, and a resumed run plans as the uninterrupted one.
    ``static_size`` is the group size of the static plan to compare with, found once per batch.
    """

    costs: CostModel
    options: PlannerConfig
    seed: int = 0
    compare: bool = True
    ratio: float = 1.0
    observed: int = 0
    _problem: Problem = field(init=False)
    _before: Plan | None = None

    def __post_init__(self) -> None:
        self._problem = make_problem(self.costs, self.options)

    def plan(self, lengths: Lengths) -> Planned:
        """The plan of a batch, what its ranks' clocks and memories are expected to show, and the
        best static plan beside it."""
        start = time.perf_counter()
        problem = self._problem.rescaled(self.ratio)
        chosen = self._choose(problem, lengths)
        if self.options.smoothing:
            self._before = chosen
        planning_s = time.perf_counter() - start
        return Planned(
            plan=chosen,
            predicted=self._timeline(chosen),
            peak_bytes=peak_bytes(chosen, self.costs),
            planning_s=planning_s,
            facts=self._static(problem, lengths) if self.compare else {},
        )

    def check(self, longest: int) -> None:
        """Raise InfeasiblePlan now when a sequence of ``longest`` tokens will fit nowhere."""
        self._choose(self._problem, Lengths(tokens=(longest,)))

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """Take a finished step into the running mean."""
        if predicted_s <= 0 or measured_s <= 0:
            return
        seen = self.ratio * measured_s / predicted_s
        self.observed += 1
        weight = max(1 - _MEMORY, 1 / self.observed)
        self.ratio += weight * (seen - self.ratio)

    def state(self) -> dict[str, Any]:
        """Costs, correction and seed: what a resumed run needs to plan alike."""
        before = {"before": self._before.to_json()} if self._before else {}
        return {
            **before,
            "costs": self.costs.to_json(),
            "ratio": self.ratio,
            "observed": self.observed,
            "seed": self.seed,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the correction of an earlier run, and its last plan where plans are smoothed."""
        if "before" in state:
            self._before = Plan.from_json(state["before"])
        self.ratio, self.observed = float(state["ratio"]), int(state["observed"])

    def _choose(self, problem: Problem, lengths: Lengths) -> Plan:
        if self.options.name == "static":
            assert self.options.static_size is not None, "checked by the configuration"
            return static_plan(problem, lengths, self.options.static_size)
        return plan(problem, lengths, seed=self.seed, previous=self._before)

    def _timeline(self, chosen: Plan) -> Timeline:
        programs = compile_plan(chosen, bucket_count(self.costs.architecture))
        return simulate(programs, chosen, self.costs.replace(scale=self.ratio))

    def _static(self, problem: Problem, lengths: Lengths) -> dict[str, Any]:
        best = best_static(problem, lengths)
        if best is None:
            return {}
        return {
            "best_static": str(best.strategy),
            "best_static_s": best.predicted_s,
            "static_timeline": self._timeline(best),
        }
