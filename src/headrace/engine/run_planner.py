"""The planner of a run: costs in, plans out, measurements back, one for all ranks.

It connects planning and execution: the engine of a step asks it for plans as
:class:`headrace.engine.step_engine.StepPlans` and knows nothing of how they are made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.comm.collectives import from_first
from headrace.comm.mesh import Groups
from headrace.comm.workers import PlanAhead
from headrace.config.model import PlannerConfig
from headrace.costs import CostModel
from headrace.costs.calibration import Calibration, micro_batch_residuals
from headrace.costs.drift import Drift
from headrace.engine.announced_plans import Ahead, AnnouncedPlans
from headrace.engine.plans import require_costs
from headrace.engine.step_planner import MemoryMargin, StepPlanner
from headrace.errors import InfeasiblePlan
from headrace.planning import Problem
from headrace.simulator import peak_bytes
from headrace.spec.lengths import Lengths
from headrace.spec.plan import Plan, Semantics
from headrace.spec.step import Exhausted, Planned, PlanRequest, Step

__all__ = ["RunPlanner", "Stopped"]

_OLD_WEIGHT = 0.9
"""Weight of the old ratio in the running mean of measured over predicted seconds, at each step."""

_PLAN, _REFUSED, _STOP = b"p", b"r", b"s"
"""First byte of a message of the first rank: a plan, a refusal, or the end of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _HandedOut:
    """The step's plan that was handed out last: its ``request``, and as ``maker`` the process that
    made it ahead, None where it was made in this process or kept from an earlier request."""

    request: PlanRequest
    maker: Ahead | None


def _alike(one: PlanRequest, other: PlanRequest) -> bool:
    """Whether the plan for one request serves the other: both are of the same batch and memory
    margin. Their ratios may differ, as these change no plan."""
    return (one.lengths, one.margin) == (other.lengths, other.margin)


class Stopped(Exception):
    """No step is planned any more, as the first rank was asked to stop: raised on every rank that
    asks for the plan of that step."""


class RunPlanner:
    """Plans batches for all ranks, and learns how far predictions are off.

    What is planned, learnt and remembered is the first rank's business alone, so ranks cannot
    differ, and a cluster plans once and not as often as it has ranks. All ranks have one and ask in
    the same order; on others than the first a plan comes without what is expected of it.

    ``ratio`` is a running mean of measured over predicted seconds. It corrects the seconds that are
    shown: all are multiplied by it, so it never changes which plan is best. The plans of a run
    follow from its costs and its lengths alone, and a resumed run plans as the uninterrupted one.
    The one thing learnt that changes plans is the memory margin, part of the costs in
    :meth:`state`.

    Where ``options.compare`` asks for it, the best static plan of each batch is made too, once the
    plan is handed out: no step waits for it and no plan depends on it.

    Args:
        costs: Those that the run begins with.
        options: What the configuration asks of plans.
        groups: The groups of this rank; without, plans are made for this process alone.
        seed: The seed of the search.
        drawn: The steps that are drawn: clocks of all ranks are predicted for them.
        calibration: What is known of the costs; takes the residuals of every step.
        drift: Watches the residuals, where it is there.
        semantics: ``free`` groups start when their ranks are free; in ``lockstep`` all ranks meet
            at every layer.
        stages: Whether pipelines may have more than one stage.
        tell: Gets a line when a process that plans ahead has died.

    Attributes:
        steps: Plans the single steps.
        ratio: Measured over predicted seconds; known on the first rank.
        calibration: What was learnt of the costs; known on the first rank.
    """

    def __init__(
        self,
        *,
        costs: CostModel,
        options: PlannerConfig,
        groups: Groups | None = None,
        seed: int = 0,
        drawn: Container[int] = (),
        calibration: Calibration | None = None,
        drift: Drift | None = None,
        semantics: Semantics = "free",
        stages: bool = True,
        tell: Callable[[str], object] = lambda text: None,
    ) -> None:
        """A planner for ``groups`` (None: one process), whose first rank plans; of the steps
        in ``drawn`` all ranks' clocks are predicted."""
        require_costs(costs, options)  # on all ranks, as the others wait for the first one's plans
        self.steps = StepPlanner(
            costs=costs, options=options, seed=seed, semantics=semantics, stages=stages
        )
        self.ratio = 1.0
        self.calibration = calibration or Calibration(fingerprint=costs.fingerprint)
        self._margin = MemoryMargin(planner=self.steps, value=costs.memory_margin)
        self._forward_margin = MemoryMargin(
            planner=self.steps, value=costs.memory_margin, forward=True
        )
        self._groups, self._drawn, self._drift, self._tell = groups, drawn, drift, tell
        self._first = groups is None or groups.rank == 0
        self._observed = 0  # steps in the running mean
        self._step, self._done = 0, 0  # number of the next step to plan, steps observed
        self._previous: Plan | None = None  # of the step before, where plans are smoothed
        self._ahead: Ahead | None = None  # plans the batches of a data set, in their order
        self._announced: AnnouncedPlans | None = None  # of loops that are given batches
        self._handed: _HandedOut | None = None
        self._warm = False  # whether the first step of this process is over
        self._stop_asked: Callable[[], bool] = lambda: False

    def stop_when(self, asked: Callable[[], bool]) -> None:
        """Have :meth:`plan` raise Stopped on every rank from when ``asked`` is true on the
        first."""
        self._stop_asked = asked

    @property
    def margin(self) -> float:
        """The fraction of a rank's memory that plans leave free; known on the first rank."""
        return self._margin.value

    @property
    def costs(self) -> CostModel:
        """The costs with the memory margin in force; known on the first rank."""
        return self.steps.problem(self.margin).model

    def plan(self, lengths: Lengths) -> Planned:
        """The plan of the next step. It is the one made ahead by another process, if that was made
        for this batch and this memory margin. For a step that is drawn it comes with the predicted
        timeline of all ranks. Collective.

        Raises:
            InfeasiblePlan: On every rank, when nothing fits.
            Stopped: On every rank, when the first was asked to stop.
        """
        return self._decide_on_first(lambda: self._plan(lengths), stop=self._stop_asked())

    def plan_forward(self, lengths: Lengths) -> Planned:
        """A plan of the forwards of a batch, which is no step of the run: no step's plan depends on
        it. Collective.

        Raises:
            InfeasiblePlan: On every rank, when nothing fits.
        """
        return self._decide_on_first(lambda: self._plan_forward(lengths))

    def replan_forward(self, lengths: Lengths, failed: Plan, exhausted: Exhausted) -> Planned:
        """A plan of forwards alone that takes less memory than ``failed``, as :meth:`replan` makes
        for a step. Forwards have a memory margin of their own. Collective.

        Raises:
            InfeasiblePlan: On every rank, when the plan that failed was the thriftiest.
        """
        return self._decide_on_first(lambda: self._replan_forward(lengths, failed, exhausted))

    def replan(self, lengths: Lengths, failed: Plan, exhausted: Exhausted) -> Planned:
        """A plan of the same batch that needs less memory than ``failed``, which ran out of it: a
        tenth less than was predicted of the ranks that ran out, or where there is no such plan 3 %
        or 0.5 % less. The memory margin is raised so that later plans leave as much free, as far
        as the longest sequence of the run allows. Collective.

        Raises:
            InfeasiblePlan: On every rank, when the plan that failed was the thriftiest.
        """
        return self._decide_on_first(lambda: self._replan(lengths, failed, exhausted))

    def check(self, longest: int) -> None:
        """Check that a sequence of ``longest`` tokens will fit, before it comes. Collective.

        Raises:
            InfeasiblePlan: On every rank, when it fits nowhere.
        """
        payload = _PLAN
        if self._first:
            try:
                self._margin.require(longest)
                self._forward_margin.longest = self._margin.longest
            except InfeasiblePlan as error:
                payload = _REFUSED + str(error).encode()
        self._from_first(payload)

    def agreed_problem(self) -> Problem:
        """The problem that plans solve with the memory margin in force, the same on every rank.
        Collective."""
        margin = json.loads(self._from_first(_PLAN + json.dumps(self.margin).encode()))
        return self.steps.problem(float(margin))

    def plan_ahead(self, coming: Iterable[Lengths], *, depth: int) -> None:
        """Have the plans of the batches to come made by another process, at most ``depth`` ahead,
        and by up to ``depth`` processes where steps wait for plans; on the first rank. Does nothing
        where plans are smoothed, as each then depends on the plan before it: they are made in this
        process when they are asked for."""
        if not self._first or self.steps.options.smoothing:
            return
        items = (self._request(lengths, step) for step, lengths in enumerate(coming, self._step))
        self._ahead = PlanAhead(
            self.steps.plan,
            items,
            after=self.steps.best_static if self.steps.options.compare else None,
            most=depth,
            depth=depth,
            tell=self._tell,
        )

    def announce(self, lengths: Lengths) -> None:
        """Have the plans of a batch that comes later made by another process, one for its forwards
        alone and one for its step; on the first rank. Where plans are smoothed only that for
        forwards is made ahead, and where ``options.ahead`` is 0 none. A plan is made anew when it
        is asked for if what it follows from has changed by then, such as the memory margin."""
        if self._first:
            requests = [self._forward_request(lengths), self._request(lengths)]
            self._announced_plans().announce(requests)

    def close(self) -> None:
        """End the processes that plan ahead."""
        if self._announced is not None:
            self._announced.close()
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def observe(self, predicted_s: float, measured_s: float, *, retries: int = 0) -> None:
        """Take the seconds of a finished step into ``ratio``: the mean over the first ten steps,
        then a running mean in which each new step weighs a tenth.

        The first step of a process warms up, so it counts until the second one is known, and not at
        all where a run goes on; nor does a step whose batch was taken again as memory ran out.
        """
        self._done = self._step
        if predicted_s <= 0 or measured_s <= 0 or retries or (self._observed and not self._warm):
            return
        # ``predicted_s`` was multiplied by the ratio that its plan was requested with: take it out.
        seen = self._planned_ratio * measured_s / predicted_s
        self._observed += self._warm
        weight = max(1 - _OLD_WEIGHT, 1 / max(1, self._observed))
        self.ratio += weight * (seen - self.ratio)

    def learn(self, step: Step) -> tuple[str, ...]:
        """Take the seconds of micro-batches and the peak bytes of a finished step into the
        calibration, and raise the memory margin where a peak came too near to the memory. Returns
        warnings for the user, a sentence each: of drift, where it is watched, and of a raised
        margin. On the first rank only.

        Nothing is learnt of the first step of a process, which warms up.
        """
        if not self._first:
            return ()
        if not self._warm:
            self._warm = True
            return ()
        predicted, measured = step.metrics["predicted_peak_bytes"], step.metrics["peak_bytes"]
        costs, known = self.costs, self.calibration
        measured_s = step.times.micro_batches if step.times is not None else {}
        residuals = micro_batch_residuals(step.plan, step.micro_batch_s, measured_s, costs)
        known.observe(residuals)
        known.peaks = known.peaks.after(predicted, measured, costs.cluster.memory_bytes)
        warnings = self._margin.raise_after_step(step.number, predicted, measured)
        if self._drift is not None:
            return (*self._drift.observe(step.number, residuals, self._planned_ratio), *warnings)
        return warnings

    def compared(self, step: Step) -> Step:
        """The step just finished, with the best static plan of its batch beside it. Returned as it
        is on other ranks than the first, where no comparison is asked for, and where the process
        that plans ahead has not made that plan yet: it is not waited for."""
        handed = self._handed
        if not self._first or not self.steps.options.compare or handed is None:
            return step
        if handed.maker is None:
            best = self.steps.best_static(handed.request)
        else:
            best = handed.maker.made_after()
            # A plan announced for another step may lack the timeline, or have one too many.
            if best is not None and handed.request.drawn != (best.predicted is not None):
                best = self.steps.best_static(handed.request)
        return step if best is None else step.compared_with(best)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to plan alike, as JSON: costs, correction, seed and what was
        learnt. Empty on other ranks than the first."""
        if not self._first:
            return {}
        before = {"before": self._previous.to_json()} if self._previous is not None else {}
        return before | {
            "steps": self._done,
            "costs": self.costs.to_json(),
            "ratio": self.ratio,
            "observed": self._observed,
            "seed": self.steps.seed,
            "calibration": self.calibration.to_json(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the correction of an earlier run, what it learnt of these costs, and its last plan
        where plans are smoothed; on the first rank."""
        if not self._first:
            return
        if "before" in state:
            self._previous = Plan.from_json(state["before"])
        self._step = self._done = int(state.get("steps", 0))
        self.ratio, self._observed = float(state["ratio"]), int(state["observed"])
        if "calibration" in state:
            learnt = Calibration.from_json(state["calibration"])
            if learnt.fingerprint == self.steps.costs.fingerprint:
                self.calibration = learnt

    @property
    def _planned_ratio(self) -> float:
        """The ratio by which the predicted seconds of the last step's plan were corrected."""
        ratio = self._handed.request.ratio if self._handed is not None else None
        return 1.0 if ratio is None else ratio

    def _plan(self, lengths: Lengths) -> Planned:
        """The plan of the next step, on the first rank: the first that there is of one from the
        process that plans ahead in the data's order, one that was announced or made before for the
        same batch (:class:`AnnouncedPlans`), and one made now."""
        request = self._request(lengths)
        maker = self._ahead
        planned = next(maker, None) if maker is not None else None
        made_for = planned.request if planned is not None else None
        if planned is not None and made_for is not None and _alike(made_for, request):
            return self._handed_out(planned, made_for, maker)
        announced = self._announced
        if announced is None or not announced.serves(request):
            return self._handed_out(self.steps.plan(request), request, None)
        known = announced.take(request)
        if known is not None:
            planned, maker = known
            return self._handed_out(planned, planned.request or request, maker)
        planned = self.steps.plan(request)
        announced.keep(request, planned)
        return self._handed_out(planned, request, None)

    def _announced_plans(self) -> AnnouncedPlans:
        """Keeps the plans of batches that a loop gives, as they are often asked for more than once,
        and makes announced ones ahead. Created at the first call."""
        if self._announced is None:
            self._announced = AnnouncedPlans(steps=self.steps, tell=self._tell)
        return self._announced

    def _plan_forward(self, lengths: Lengths) -> Planned:
        """The plan of forwards alone, on the first rank: one that was announced or made before for
        the same batch, else one made now."""
        request, announced = self._forward_request(lengths), self._announced_plans()
        known = announced.take(request)
        if known is not None:
            return known[0]
        planned = self.steps.plan(request)
        announced.keep(request, planned)
        return planned

    def _replan(self, lengths: Lengths, failed: Plan, exhausted: Exhausted) -> Planned:
        """A thriftier plan of the same batch, on the first rank. The peaks of the failed attempt
        are learnt: ranks that ran out took all of their memory."""
        costs = self.costs
        memory, predicted = costs.cluster.memory_bytes, peak_bytes(failed, costs)
        measured = [memory if r in exhausted.ranks else p for r, p in enumerate(predicted)]
        self.calibration.peaks = self.calibration.peaks.after(predicted, measured, memory)
        self._step -= 1  # the plan that failed has advanced it: plan the same step again
        request = self._request(lengths)
        planned = self._margin.plan_after_failure(
            max(predicted[r] for r in exhausted.ranks),
            exhausted,
            lambda margin: self.steps.plan(replace(request, margin=margin)),
        )
        return self._handed_out(planned, planned.request or request, None)

    def _replan_forward(self, lengths: Lengths, failed: Plan, exhausted: Exhausted) -> Planned:
        """A thriftier plan of the same forwards, on the first rank."""
        request = self._forward_request(lengths)
        predicted = peak_bytes(failed, self.steps.problem(request.margin, forward=True).model)
        self._forward_margin.value = self._margin_of_forwards  # at least that of steps
        return self._forward_margin.plan_after_failure(
            max(predicted[r] for r in exhausted.ranks),
            exhausted,
            lambda margin: self.steps.plan(replace(request, margin=margin)),
        )

    @property
    def _margin_of_forwards(self) -> float:
        """The fraction of a rank's memory that plans of forwards leave free: their own margin, but
        never less than that of steps."""
        return max(self.margin, self._forward_margin.value)

    def _forward_request(self, lengths: Lengths) -> PlanRequest:
        """The request for the plan of forwards."""
        return PlanRequest(
            lengths=lengths,
            step=self._step,
            ratio=self.ratio,
            margin=self._margin_of_forwards,
            forward=True,
        )

    def _request(self, lengths: Lengths, step: int | None = None) -> PlanRequest:
        """The request for the plan of a step, by default the next one."""
        number = self._step if step is None else step
        return PlanRequest(
            lengths=lengths,
            step=number,
            ratio=self.ratio,
            margin=self.margin,
            previous=self._previous,
            drawn=number in self._drawn,
        )

    def _handed_out(self, planned: Planned, request: PlanRequest, maker: Ahead | None) -> Planned:
        """Return ``planned``, the plan of a step, after noting its request and the process that
        made it, and advance to the next step."""
        self._handed = _HandedOut(request=request, maker=maker)
        self._step += 1
        if self.steps.options.smoothing:
            self._previous = planned.plan
        return planned

    def _decide_on_first(self, decide: Callable[[], Planned], *, stop: bool = False) -> Planned:
        """Call ``decide`` on the first rank and send its plan to every rank; other ranks get the
        plan without predictions of seconds and bytes. Collective. Raises InfeasiblePlan on every
        rank where ``decide`` does. Where ``stop`` is true on the first rank, ``decide`` is not
        called and every rank raises Stopped."""
        planned, payload = None, _STOP
        if self._first and not stop:
            try:
                planned = decide()
                payload = _PLAN + (planned.plan.to_bytes() if self._is_shared else b"")
            except InfeasiblePlan as error:
                payload = _REFUSED + str(error).encode()
        received = self._from_first(payload)
        if planned is not None:
            return planned
        plan = Plan.from_bytes(received)
        return Planned(plan=plan, predicted=None, peak_bytes=(), planning_s=0.0)

    @property
    def _is_shared(self) -> bool:
        """Whether there are other ranks to send plans to."""
        return self._groups is not None and self._groups.ranks > 1

    def _from_first(self, payload: bytes) -> bytes:
        """Send the first rank's ``payload`` to all; returns it without its first byte, the kind of
        message. Collective. Raises InfeasiblePlan or Stopped where that byte says so."""
        world = self._groups.world if self._groups is not None and self._groups.ranks > 1 else None
        message = from_first(payload, world)
        kind, rest = message[:1], message[1:]
        if kind == _REFUSED:
            raise InfeasiblePlan(rest.decode())
        if kind == _STOP:
            raise Stopped
        return rest
