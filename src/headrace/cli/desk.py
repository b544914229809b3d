"""The planning desk of a run: costs in, plans out, measurements back.

It is the one place where the wing that plans and the wing that runs meet: the trainer asks it for
plans as ``runtime.trainer.Planner`` and knows nothing of how they are made.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.cli.wiring import best_static, make_problem, memory_margin_of
from headrace.config.model import PlannerConfig
from headrace.costs import CostModel
from headrace.costs.calibration import Calibration
from headrace.costs.drift import Drift
from headrace.costs.peaks import raised_margin
from headrace.costs.residuals import micro_batch_residuals
from headrace.errors import InfeasiblePlan
from headrace.planning import Problem, plan, static_plan
from headrace.runtime.trainer import Planned, Step
from headrace.simulator import peak_bytes, simulate
from headrace.spec.compiler import compile_plan
from headrace.spec.lengths import Lengths
from headrace.spec.measurement import Timeline
from headrace.spec.plan import Plan
from headrace.spec.weights import bucket_count
from headrace.units import bytes_text, percent_text

__all__ = ["Desk"]

_MEMORY = 0.9  # of the old ratio, at each step
_FINER = 0.05  # by which a margin is lowered until the longest sequence fits


@dataclass(slots=True, kw_only=True)
class Desk:
    """Plans batches and learns how far predictions are off.

    ``ratio`` is a running mean of measured over predicted seconds. It corrects what is shown,
    and is uniform, so it never changes which plan is best: the plans of a run follow from its
    costs and its lengths alone, and a resumed run plans as the uninterrupted one.
    The one thing learnt that changes plans is the memory margin, where the configuration leaves it
    out: a run begins with what earlier runs learnt, and raises it when a peak came too near to the
    memory. It is part of the costs in :meth:`state`.

    ``calibration`` takes the residuals of every step; ``drift``, where there is one, watches them.
    """

    costs: CostModel
    options: PlannerConfig
    seed: int = 0
    compare: bool = True
    ratio: float = 1.0
    observed: int = 0
    calibration: Calibration = field(default_factory=lambda: Calibration(fingerprint=""))
    drift: Drift | None = None
    _problem: Problem = field(init=False)
    _before: Plan | None = None
    _planned_ratio: float = 1.0
    _warm: bool = False
    _longest: int = 0
    _refused: float = 0.0

    def __post_init__(self) -> None:
        self._problem = make_problem(self.costs, self.options)
        if not self.calibration.fingerprint:
            self.calibration = Calibration(fingerprint=self.costs.fingerprint)

    def plan(self, lengths: Lengths) -> Planned:
        """The plan of a batch, what its ranks' clocks and memories are expected to show, and the
        best static plan beside it."""
        start = time.perf_counter()
        problem = self._problem.rescaled(self.ratio)
        chosen = self._choose(problem, lengths)
        if self.options.smoothing:
            self._before = chosen
        planning_s = time.perf_counter() - start
        self._planned_ratio = self.ratio
        return Planned(
            plan=chosen,
            predicted=self._timeline(chosen),
            peak_bytes=peak_bytes(chosen, self.costs),
            planning_s=planning_s,
            facts={"memory_margin": self.costs.memory_margin}
            | (self._static(problem, lengths) if self.compare else {}),
        )

    def check(self, longest: int) -> None:
        """Raise InfeasiblePlan now when a sequence of ``longest`` tokens will fit nowhere.

        A learnt margin never refuses what would fit without it: it is lowered, to the least that
        a run without any experience begins with.
        """
        self._longest = longest
        usual = memory_margin_of(self.costs.cluster.device)
        while self.options.memory_margin is None and self.costs.memory_margin > usual:
            if self._fits(self.costs.memory_margin):
                return
            self._use_margin(max(usual, self.costs.memory_margin - _FINER))
        self._choose(self._problem, Lengths(tokens=(longest,)))

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """Take a finished step into the running mean."""
        if predicted_s <= 0 or measured_s <= 0:
            return
        seen = self.ratio * measured_s / predicted_s
        self.observed += 1
        weight = max(1 - _MEMORY, 1 / self.observed)
        self.ratio += weight * (seen - self.ratio)

    def learn(self, step: Step) -> tuple[str, ...]:
        """Take the rows and peaks of a finished step; returns what a user should be told, a
        sentence each: drift, where it is watched, and a raised margin.

        The first step of a process warms up and says nothing. Plans of the same step, rows and
        peaks make the same margin, so that all ranks go on with the same one.
        """
        if not self._warm:
            self._warm = True
            return ()
        predicted, measured = step.metrics["predicted_peak_bytes"], step.metrics["peak_bytes"]
        memory = self.costs.cluster.memory_bytes
        residuals = micro_batch_residuals(step.plan, step.predicted, step.measured, self.costs)
        known = self.calibration
        known.observe(residuals)
        known.peaks = known.peaks.after(predicted, measured, memory)
        found = self._raise_margin(step.number, predicted, measured)
        if self.drift is not None:
            return (*self.drift.observe(step.number, residuals, self._planned_ratio), *found)
        return found

    def state(self) -> dict[str, Any]:
        """Costs, correction, seed and what was learnt: what a resumed run needs to plan alike."""
        before = {"before": self._before.to_json()} if self._before else {}
        return {
            **before,
            "costs": self.costs.to_json(),
            "ratio": self.ratio,
            "observed": self.observed,
            "seed": self.seed,
            "calibration": self.calibration.to_json(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the correction of an earlier run, what it learnt of these costs, and its last plan
        where plans are smoothed."""
        if "before" in state:
            self._before = Plan.from_json(state["before"])
        self.ratio, self.observed = float(state["ratio"]), int(state["observed"])
        if "calibration" in state:
            learnt = Calibration.from_json(state["calibration"])
            if learnt.fingerprint == self.costs.fingerprint:
                self.calibration = learnt

    def _raise_margin(
        self, step: int, predicted: Sequence[int], measured: Sequence[int]
    ) -> tuple[str, ...]:
        """Leave more memory free after a peak that came too near, as far as the longest sequence
        allows."""
        old, memory = self.costs.memory_margin, self.costs.cluster.memory_bytes
        wanted = raised_margin(old, predicted, measured, memory)
        if self.options.memory_margin is not None or wanted <= max(old, self._refused):
            return ()
        margin = wanted
        while margin > old and not self._fits(margin):
            self._refused, margin = wanted, max(old, margin - _FINER)
        if margin == old:
            return ()
        self._use_margin(margin)
        rank = max(range(len(measured)), key=measured.__getitem__)
        return (
            f"memory margin raised from {percent_text(old)} to {percent_text(margin)}: "
            f"in step {step} rank {rank} took {bytes_text(measured[rank])} of "
            f"{bytes_text(memory)}, {bytes_text(predicted[rank])} were predicted",
        )

    def _use_margin(self, margin: float) -> None:
        self.costs = self.costs.replace(memory_margin=margin)
        self._problem = make_problem(self.costs, self.options)

    def _fits(self, margin: float) -> bool:
        problem = make_problem(self.costs.replace(memory_margin=margin), self.options)
        try:
            self._choose(problem, Lengths(tokens=(max(1, self._longest),)))
        except InfeasiblePlan:
            return False
        return True

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
