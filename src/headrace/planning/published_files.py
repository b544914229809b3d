"""Plans of the iterations of a file with published costs, by any planner, and their plan files.

A plan file has the kind of its costs. ``pipelines`` lists pipelines side by side by the scheme's
name, ``groups`` launches on ranks in the order in which they are issued; sequences go by their
number in the iteration's lengths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.costs.pipeline_costs import PipelineCosts
from headrace.errors import InfeasiblePlan, SpecError, did_you_mean
from headrace.planning.baselines import BASELINES
from headrace.planning.batch import Batch
from headrace.planning.planner import plan
from headrace.planning.problem import Problem
from headrace.planning.published_search import bounded, plan_of, published_table, reasons
from headrace.planning.schedule import Schedule
from headrace.spec import Lengths, Plan

__all__ = ["OWN", "PlannedIteration", "plan_iterations", "planner_names", "plans_to_json"]

OWN = "headrace"
"""The name of this planner among others'."""

Make = Callable[[int, Lengths], tuple[Plan, str, tuple[Plan, ...], float]]
"""From the number and lengths of an iteration to its plan, its strategy by the costs' names, its
phases where it has several, and the seconds of changing between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedIteration:
    """The plan of an iteration. Where the strategy changes within it, ``phases`` are the plans
    that run one after the other, and changing takes ``switch_s`` of the seconds."""

    plan: Plan
    strategy: str
    planning_s: float = field(compare=False)
    phases: tuple[Plan, ...] = ()
    switch_s: float = 0.0


def planner_names(problem: Problem) -> tuple[str, ...]:
    """Names of the planners for a problem's costs."""
    staged = isinstance(problem.published, PipelineCosts)
    return (OWN, *(name for name, one in BASELINES.items() if name == "static"
                   or one.staged == staged))  # fmt: skip


def plan_iterations(
    problem: Problem, iterations: Sequence[Sequence[int]], *, planner: str = OWN, seed: int = 0
) -> list[PlannedIteration]:
    """Plan iterations, ``iterations[i]`` being the tokens of each sequence of iteration i.

    Same arguments, same plans. Raises SpecError for an unknown planner or a length that is none;
    InfeasiblePlan, naming the iteration, for a sequence that no scheme holds.
    """
    known = planner_names(problem)
    if planner not in known:
        raise SpecError("planner", got=repr(planner), wanted=f"one of {', '.join(known)}",
                        hint=did_you_mean(planner, known))  # fmt: skip
    batches = [Lengths(tokens=tuple(tokens)) for tokens in iterations]
    make = _own(problem, seed) if planner == OWN else _others(problem, batches, planner, seed)
    found = list[PlannedIteration]()
    for number, lengths in enumerate(batches):
        began = time.perf_counter()
        with _Named(number):
            made, strategy, phases, switch_s = make(number, lengths)
        found.append(
            PlannedIteration(
                plan=made, strategy=strategy, planning_s=time.perf_counter() - began,
                phases=phases, switch_s=switch_s,
            )
        )  # fmt: skip
    return found


class _Named:
    """Names the iteration in an InfeasiblePlan."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, InfeasiblePlan) and error.what != "devices":
            raise InfeasiblePlan(
                f"iteration {self.number}, {error.what}", got=error.got, wanted=error.wanted,
                hint=error.hint,
            )  # fmt: skip


def _own(problem: Problem, seed: int) -> Make:
    names = {one.scheme: str(one) for one in problem.published_schemes}

    def make(_: int, lengths: Lengths) -> tuple[Plan, str, tuple[Plan, ...], float]:
        made = plan(problem, lengths, seed=seed)
        text = " + ".join(f"{count}*{names[scheme]}" for scheme, count in made.strategy.counts)
        return made, text, (), 0.0

    return make


def _others(
    problem: Problem, batches: Sequence[Lengths], planner: str, seed: int
) -> Make:
    tables = []
    for number, lengths in enumerate(batches):
        with _Named(number):
            tables.append(published_table(problem, Batch.of(lengths)))
    baseline = BASELINES[planner]
    prepared = None
    if baseline.prepare is not None and isinstance(problem.published, PipelineCosts):
        prepared = baseline.prepare(tables, seed, problem.parameters)

    def make(number: int, _: Lengths) -> tuple[Plan, str, tuple[Plan, ...], float]:
        table = tables[number]
        if prepared is not None:
            made: Schedule | None = prepared(number, table)
        else:
            made = baseline.schedules(table, problem.semantics, seed)
        if made is None:
            raise InfeasiblePlan(f"a plan by {planner}", got="none that holds the batch")
        bound = bounded(table)
        phases = tuple(plan_of(phase, bounded(phase.table)) for phase in made.phases)
        chosen = plan_of(made, bound).replace(
            planner=planner, seed=seed, why=reasons([made], bound)[:2]
        )
        names = " then ".join(phase.names for phase in made.phases) or made.names
        return chosen, names, phases, made.switch_s

    return make


def plans_to_json(
    problem: Problem, found: Sequence[PlannedIteration], *, planner: str = OWN, seed: int = 0
) -> dict[str, Any]:
    """The plan file of some iterations."""
    if isinstance(problem.published, PipelineCosts):
        names = {one.scheme: str(one) for one in problem.published_schemes}
        items = [_pipelines(one, names) for one in found]
        head = {"kind": "pipelines", "planner": planner, "seed": seed, "devices": problem.devices}
        return {**head, "iterations": items}
    items = [
        {
            "planner": planner, "seed": seed, "predicted_s": one.plan.predicted_s,
            "lower_bound_s": one.plan.lower_bound_s, "why": list(one.plan.why),
            "planning_s": one.planning_s,
            "launches": [
                {
                    "ranks": list(one.plan.pipelines[micro.pipeline].ranks),
                    "sequences": list(micro.sequences),
                }
                for micro in one.plan.micro_batches
            ],
        }
        for one in found
    ]  # fmt: skip
    return {
        "kind": "groups", "devices": problem.devices, "semantics": problem.semantics,
        "iterations": items,
    }  # fmt: skip


def _pipelines(one: PlannedIteration, names: Mapping[object, str]) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    for phase, made in enumerate(one.phases or (one.plan,)):
        for number, pipeline in enumerate(made.pipelines):
            micro_batches = [
                list(micro.sequences) for micro in made.micro_batches if micro.pipeline == number
            ]
            part = {"scheme": names[pipeline.scheme], "micro_batches": micro_batches}
            parts.append({**part, "phase": phase} if phase else part)
    value = {
        "strategy": one.strategy, "pipelines": parts, "predicted_s": one.plan.predicted_s,
        "lower_bound_s": one.plan.lower_bound_s, "planning_s": one.planning_s,
        "why": list(one.plan.why),
    }  # fmt: skip
    return {**value, "switch_s": one.switch_s} if one.switch_s else value
