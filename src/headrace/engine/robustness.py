"""How far a plan stays the best when what was assumed of the hardware is off.

A roofline's efficiencies are doubtful, so a plan made with them is asked how much it would lose.
For each doubt (attention or links slower or faster by a share) the costs are made anew; the plan
takes T seconds under them, the plan that is made for them B. The regret is T / B - 1, and the
plan is robust within the largest regret. The plan for the worst is, of all these plans, the one
whose largest seconds over all doubts are least.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from headrace.engine.step_planner import StepPlanner
from headrace.simulator import step_s
from headrace.spec.hardware import Hardware, Link
from headrace.spec.implementation import Efficiency, Implementation
from headrace.spec.plan import Plan
from headrace.spec.step import Planned, PlanRequest
from headrace.units import percent_text

__all__ = ["Robustness", "doubted", "for_the_worst", "robustness"]

DOUBT = 0.2
"""The share by which efficiencies of a roofline are doubted: more than nine tenths of published
runs are forecast within half of it (``benchmarks/forecasts.py``), other kernels may not be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Robustness:
    """How much a plan loses at most.

    Attributes:
        regret: The plan's seconds over those of the plan made for the doubt, less 1: the largest of
            all doubts.
        doubt: The doubt that it is of, such as ``attention x 0.8``.
    """

    regret: float
    doubt: str

    def __str__(self) -> str:
        share = percent_text(max(0.0, self.regret))
        return f"within {share} of the best for +-{DOUBT:.0%} on attention and links ({self.doubt})"


def doubted(
    hardware: Hardware, implementation: Implementation
) -> dict[str, tuple[Hardware, Implementation]]:
    """The hardware and kernels under each doubt, by its name: attention, or links inside and across
    nodes, slower or faster by the share DOUBT."""
    found: dict[str, tuple[Hardware, Implementation]] = {}
    attained = implementation.on_device(hardware.device)
    for factor in (1 - DOUBT, 1 + DOUBT):
        attention = min(1.0, attained.attention * factor)
        other: Efficiency = replace(attained, attention=attention)
        kernels = replace(implementation, on={hardware.device.family: other})
        found[f"attention x {factor:g}"] = hardware, kernels
        links = replace(
            hardware,
            inside=_faster(hardware.inside, factor),
            across=_faster(hardware.across, factor),
        )
        found[f"links x {factor:g}"] = links, implementation
    return found


def robustness(planned: Planned, doubts: Mapping[str, StepPlanner]) -> Robustness:
    """How much a plan loses at most, if the hardware is as one of the doubts has it.

    Args:
        planned: The plan, with its request.
        doubts: A planner with the costs under each doubt, by its name.

    Returns:
        The largest regret, and the doubt it is of.
    """
    assert planned.request is not None, "the first rank knows what was asked for"
    regrets = dict[str, float]()
    for doubt, planner in doubts.items():
        best = planner.plan(planned.request).plan.predicted_s
        regrets[doubt] = _seconds(planned.plan, planner) / best - 1
    worst = max(regrets, key=regrets.__getitem__)
    return Robustness(regret=regrets[worst], doubt=worst)


def for_the_worst(
    request: PlanRequest, planner: StepPlanner, doubts: Mapping[str, StepPlanner]
) -> Planned:
    """Choose the plan that is best in the worst case: of the plans made without doubt and for each
    doubt, the one whose largest seconds over all doubts are least.

    Args:
        request: What to plan.
        planner: Plans without doubt.
        doubts: A planner with the costs under each doubt, by its name.

    Returns:
        The plan, with what it is expected to take without doubt.
    """
    usual = planner.plan(request)
    plans = [usual.plan, *(other.plan(request).plan for other in doubts.values())]
    worst_s = [max(_seconds(plan, other) for other in doubts.values()) for plan in plans]
    best = min(range(len(plans)), key=worst_s.__getitem__)
    if best == 0:
        return usual
    doubt = list(doubts)[best - 1]  # the usual plan is the first of plans
    timed = plans[best].replace(
        predicted_s=_seconds(plans[best], planner),
        lower_bound_s=usual.plan.lower_bound_s,
        why=(f"best in the worst case: made for {doubt}",),
    )
    return planner.expected(timed, request, planning_s=usual.planning_s)


def _seconds(plan: Plan, planner: StepPlanner) -> float:
    """Seconds of a plan under a planner's costs."""
    return step_s(plan, planner.costs)


def _faster(link: Link, factor: float) -> Link:
    """The link with ``factor`` times its bytes per second."""
    return replace(link, bytes_per_s=link.bytes_per_s * factor)
