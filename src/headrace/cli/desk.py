"""The planning desk of a run: costs in, plans out, measurements back.

It is the one place where the wing that plans and the wing that runs meet: the trainer asks it for
plans as ``runtime.trainer.Planner`` and knows nothing of how they are made. Only the first rank has
one; see :mod:`headrace.cli.shared`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.cli.forecast import Asked, Forecast, Forecaster
from headrace.cli.wiring import make_strategist, memory_margin_of
from headrace.config.model import PlannerConfig
from headrace.costs import CostModel
from headrace.costs.learning.calibration import Calibration
from headrace.costs.learning.drift import Drift
from headrace.costs.learning.memory_margin import raised_margin
from headrace.costs.learning.residuals import micro_batch_residuals
from headrace.errors import InfeasiblePlan
from headrace.planning.ahead import PlanAhead
from headrace.runtime.recovery import Exhausted
from headrace.runtime.trainer import Planned, Step
from headrace.simulator import peak_bytes
from headrace.spec.lengths import Lengths
from headrace.spec.plan import Plan
from headrace.units import bytes_text, percent_text

__all__ = ["Desk"]

_MEMORY = 0.9  # of the old ratio, at each step
_THRIFTIER = 0.9  # of what a plan that ran out of memory was expected to take
_HIGHEST_MARGIN = 0.95
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
    ``samples`` gives lengths of batches to come, from which strategies are proposed; ``tell`` gets
    a line when a process that plans has died.
    """

    costs: CostModel
    options: PlannerConfig
    seed: int = 0
    compare: bool = True
    ratio: float = 1.0
    observed: int = 0
    calibration: Calibration = field(default_factory=lambda: Calibration(fingerprint=""))
    drift: Drift | None = None
    samples: Callable[[], Sequence[Sequence[int]]] = tuple
    tell: Callable[[str], None] = lambda text: None
    forecaster: Forecaster = field(init=False)
    _step: int = 0
    _ahead: PlanAhead[Asked, Forecast] | None = None
    _planned_ratio: float = 1.0
    _warm: bool = False
    _longest: int = 0
    _refused: float = 0.0

    def __post_init__(self) -> None:
        strategist = None
        if self.options.name == "strategies":
            strategist = make_strategist(self.options, self.seed, self.samples)
        self.forecaster = Forecaster(
            costs=self.costs, options=self.options, seed=self.seed, compare=self.compare,
            strategist=strategist,
        )  # fmt: skip
        if not self.calibration.fingerprint:
            self.calibration = Calibration(fingerprint=self.costs.fingerprint)

    def plan(self, lengths: Lengths) -> Planned:
        """The plan of a batch, what its ranks' clocks and memories are expected to show, and the
        best static plan beside it: made ahead, if it was for this batch and this margin."""
        asked = self._asked(lengths)
        found = next(self._ahead, None) if self._ahead is not None else None
        if found is None or (found.asked.lengths, found.asked.margin) != (lengths, asked.margin):
            found = self.forecaster(asked)
        return self._planned(found)

    def plan_ahead(self, coming: Iterable[Lengths], *, depth: int) -> None:
        """Have the plans of the batches to come made by a process of their own, at most ``depth``
        ahead. Where plans are smoothed each waits for the one before: they are made here."""
        if self.options.smoothing:
            return
        strategist = self.forecaster.strategist
        if strategist is not None and not strategist.strategies:
            batch = Lengths(tokens=(max(1, self._longest),))
            strategist.candidates(self.forecaster.schemes, batch)  # once, for all processes
        made = replace(self.forecaster)
        if strategist is not None:
            made.strategist = replace(strategist, samples=tuple)
        items = (self._asked(lengths, step) for step, lengths in enumerate(coming, self._step))
        self._ahead = PlanAhead(made, items, depth=depth, tell=self.tell)

    def close(self) -> None:
        """End the process that plans ahead."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _asked(self, lengths: Lengths, step: int | None = None) -> Asked:
        """What is asked for a step, the next one unless told."""
        return Asked(
            lengths=lengths, step=self._step if step is None else step, ratio=self.ratio,
            margin=self.costs.memory_margin,
        )  # fmt: skip

    def _planned(self, found: Forecast) -> Planned:
        """What the trainer gets; the plan after it is the next step's."""
        self._planned_ratio = found.asked.ratio
        self._step += 1
        return Planned(
            plan=found.plan, predicted=found.predicted, peak_bytes=found.peak_bytes,
            planning_s=found.planning_s, facts=found.facts,
        )  # fmt: skip

    def replan(self, lengths: Lengths, failed: Plan, exhausted: Exhausted) -> Planned:
        """A plan of the same batch that is expected to take a tenth less memory than ``failed`` did
        where it ran out; the margin stays as high for the rest of the run, and is learnt."""
        memory, predicted = self.costs.cluster.memory_bytes, peak_bytes(failed, self.costs)
        most = max(predicted[rank] for rank in exhausted.ranks)
        measured = [memory if r in exhausted.ranks else p for r, p in enumerate(predicted)]
        self.calibration.peaks = self.calibration.peaks.after(predicted, measured, memory)
        if self.costs.memory_margin >= _HIGHEST_MARGIN:
            raise InfeasiblePlan(
                f"memory of {bytes_text(memory)}", got=exhausted,
                wanted=f"enough for a plan that leaves {percent_text(_HIGHEST_MARGIN)} of it free",
                hint="other processes take it, or devices.memory is more than there is",
            )  # fmt: skip
        margin = max(1 - _THRIFTIER * most / memory, self.costs.memory_margin + _FINER)
        self._use_margin(min(margin, _HIGHEST_MARGIN))
        self._step -= 1  # the same step
        return self._planned(self.forecaster(self._asked(lengths)))

    def check(self, longest: int) -> None:
        """Raise InfeasiblePlan now when a sequence of ``longest`` tokens will fit nowhere.

        A learnt margin never refuses what would fit without it: it is lowered, to the least that
        a run without any experience begins with.
        """
        self._longest = longest
        usual = memory_margin_of(self.costs.cluster.device)
        while self.options.memory_margin is None and self.costs.memory_margin > usual:
            if self.forecaster.fits(longest, self.costs.memory_margin):
                return
            self._use_margin(max(usual, self.costs.memory_margin - _FINER))
        self.forecaster.require(longest)

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """Take a finished step into the running mean. Plans made ahead are predicted with a ratio
        that is no longer the last one."""
        if self.forecaster.strategist is not None:
            self.forecaster.strategist.steps = self._step
        if predicted_s <= 0 or measured_s <= 0:
            return
        seen = self._planned_ratio * measured_s / predicted_s
        self.observed += 1
        weight = max(1 - _MEMORY, 1 / self.observed)
        self.ratio += weight * (seen - self.ratio)

    def learn(self, step: Step) -> tuple[str, ...]:
        """Take the rows and peaks of a finished step; returns what a user should be told, a
        sentence each: drift, where it is watched, and a raised margin.

        The first step of a process warms up and says nothing.
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
        before, strategist = self.forecaster.before, self.forecaster.strategist
        return {
            **({"before": before.to_json()} if before else {}),
            **({"strategist": strategist.state()} if strategist else {}),
            "costs": self.costs.to_json(),
            "ratio": self.ratio,
            "observed": self.observed,
            "seed": self.seed,
            "calibration": self.calibration.to_json(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the correction of an earlier run, what it learnt of these costs, its last plan
        where plans are smoothed, and the strategies it chose among."""
        if "before" in state:
            self.forecaster.before = Plan.from_json(state["before"])
        strategist = self.forecaster.strategist
        if "strategist" in state and strategist is not None:
            strategist.restore(state["strategist"], self.costs.cluster.devices)
            self._step = strategist.steps
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
        longest = max(1, self._longest)
        while margin > old and not self.forecaster.fits(longest, margin):
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
        self.forecaster.use_margin(margin)
        self.costs = self.forecaster.costs
