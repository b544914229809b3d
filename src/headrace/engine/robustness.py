"""How far a plan stays the best when what was assumed of the hardware is off.

A roofline's efficiencies are doubtful, so a plan made with them is asked how much it would lose.
For each doubt (attention or links slower or faster by a share) the costs are made anew; the plan
takes T seconds under them, the plan that is made for them B. The regret is T / B - 1, and the
plan is robust within the largest regret. The plan for the worst is, of all these plans, the one
whose largest seconds over all doubts are least.

A first plan under each doubt takes as long as the plan itself, so those for many devices are made
by other processes, beside it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from headrace.comm.workers import PlanAhead
from headrace.engine.step_planner import StepPlanner
from headrace.errors import LaunchError
from headrace.simulator import step_s
from headrace.spec.hardware import Hardware, Link
from headrace.spec.implementation import Efficiency, Implementation
from headrace.spec.lengths import Lengths
from headrace.spec.plan import Plan
from headrace.spec.step import Planned, PlanRequest
from headrace.units import percent_text

__all__ = ["DoubtedPlans", "Robustness", "doubted", "for_the_worst", "robustness"]

DOUBT = 0.2
"""The share by which efficiencies of a roofline are doubted: more than nine tenths of published
runs are forecast within half of it (``benchmarks/forecasts.py``), other kernels may not be."""

_MANY = 32
"""Devices from which on plans under doubts take longer than starting a process: with 64 devices
``headrace plan`` took 7 s on two cores instead of 12."""


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


class DoubtedPlans:
    """The plans of some batches under each doubt. Where devices are many, processes that make them
    are started at once, and end with this object. Each batch is planned as if none came before:
    its plan is not smoothed by that of another.

    Args:
        batches: Tokens of the sequences of each batch.
        doubts: A planner with the costs under each doubt, by its name.
    """

    def __init__(self, batches: Sequence[Lengths], doubts: Mapping[str, StepPlanner]) -> None:
        self.doubts = doubts
        self._made: list[dict[str, Plan]] = []  # of the first batches
        requests = [PlanRequest(lengths=each, step=step) for step, each in enumerate(batches)]
        self._plans = _plans(requests, list(doubts.values()))

    def of(self, batch: int) -> Mapping[str, Plan]:
        """The plan of a batch, given by its number, under each doubt, by the doubt's name."""
        while len(self._made) <= batch:
            self._made.append({doubt: next(self._plans) for doubt in self.doubts})
        return self._made[batch]


def _plans(requests: Sequence[PlanRequest], planners: Sequence[StepPlanner]) -> Iterator[Plan]:
    """The plan of each request by each planner, in this order."""
    plan_one, processes = partial(_planned_under, planners), min(len(planners), _cores())
    if processes > 1 and planners[0].costs.cluster.devices >= _MANY:
        work = product(requests, range(len(planners)))
        with suppress(LaunchError):  # no process can be started: they are made here
            return PlanAhead(plan_one, work, producers=processes, depth=len(planners))
    return map(plan_one, product(requests, range(len(planners))))


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _planned_under(planners: Sequence[StepPlanner], work: tuple[PlanRequest, int]) -> Plan:
    """The plan of a request by the planner of the given number."""
    request, number = work
    return planners[number].plan(request).plan


def robustness(
    plan: Plan, doubts: Mapping[str, StepPlanner], made: Mapping[str, Plan]
) -> Robustness:
    """How much a plan loses at most, if the hardware is as one of the doubts has it.

    Args:
        plan: The plan.
        doubts: A planner with the costs under each doubt, by its name.
        made: The plan that is made for each doubt (:class:`DoubtedPlans`).

    Returns:
        The largest regret, and the doubt it is of.
    """
    regrets = {
        doubt: _seconds(plan, planner) / made[doubt].predicted_s - 1
        for doubt, planner in doubts.items()
    }
    worst = max(regrets, key=regrets.__getitem__)
    return Robustness(regret=regrets[worst], doubt=worst)


def for_the_worst(
    usual: Planned,
    planner: StepPlanner,
    doubts: Mapping[str, StepPlanner],
    made: Mapping[str, Plan],
) -> Planned:
    """Choose the plan that is best in the worst case: of the plans made without doubt and for each
    doubt, the one whose largest seconds over all doubts are least.

    Args:
        usual: The plan that is made without doubt, with its request.
        planner: Plans without doubt.
        doubts: A planner with the costs under each doubt, by its name.
        made: The plan that is made for each doubt (:class:`DoubtedPlans`).

    Returns:
        The plan, with what it is expected to take without doubt.
    """
    assert usual.request is not None, "the first rank knows what was asked for"
    plans = {"": usual.plan, **made}
    worst_s = {
        doubt: max(_seconds(plan, other) for other in doubts.values())
        for doubt, plan in plans.items()
    }
    best = min(worst_s, key=worst_s.__getitem__)
    if not best:
        return usual
    timed = plans[best].replace(
        predicted_s=_seconds(plans[best], planner),
        lower_bound_s=usual.plan.lower_bound_s,
        why=(f"best in the worst case: made for {best}",),
    )
    return planner.expected(timed, usual.request, planning_s=usual.planning_s)


def _seconds(plan: Plan, planner: StepPlanner) -> float:
    """Seconds of a plan under a planner's costs."""
    return step_s(plan, planner.costs)


def _faster(link: Link, factor: float) -> Link:
    """The link with ``factor`` times its bytes per second."""
    return replace(link, bytes_per_s=link.bytes_per_s * factor)
