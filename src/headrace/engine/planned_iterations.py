"""Plans of the iterations of a file with published costs, by any planner, and their plan files.

A plan file has the kind of its costs. ``pipelines`` lists pipelines side by side by the scheme's
name, ``groups`` launches on ranks in the order in which they are issued; sequences go by their
number in the iteration's lengths. The form of pipelines knows what runs at once only. Where a
planner changes the strategy within an iteration, every phase is a plan of some of the sequences: it
is written as an iteration of its own, with ``lengths`` beside them, and ``phases`` says of what
iteration each is, which of its sequences it has, and the seconds of the change before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.costs.pipeline_costs import PipelineCosts
from headrace.errors import InfeasiblePlan, SpecError, did_you_mean
from headrace.planners import BASELINES, PLANNERS
from headrace.planners.switching import sequences_of
from headrace.planning.batch import SortedBatch
from headrace.planning.bounds import Bound
from headrace.planning.explain import Candidate, reasons
from headrace.planning.formula_source import bounded, formula_table, plan_of
from headrace.planning.generators import Known
from headrace.planning.problem import Problem
from headrace.planning.schedule import Assignment
from headrace.planning.search import GENERATORS, plan
from headrace.spec import Lengths, Plan, Scheme

__all__ = ["OWN", "PlannedIteration", "plan_iterations", "planner_names", "plans_to_json"]

OWN = "headrace"
"""The name of this planner among others'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedIteration:
    """The plan of an iteration, its strategy by the costs' names, and the seconds of planning.

    Where the strategy changes within the iteration, ``phases`` run one after the other: each is a
    plan of some of its sequences, with the numbers of these in the iteration. All changes together
    take ``switch_s`` of the plan's predicted seconds.
    """

    plan: Plan
    strategy: str
    planning_s: float = field(default=0.0, compare=False)
    phases: tuple[tuple[PlannedIteration, tuple[int, ...]], ...] = ()
    switch_s: float = 0.0


Make = Callable[[int, Lengths], PlannedIteration]
"""Plans an iteration by its number and lengths."""


def planner_names(problem: Problem) -> tuple[str, ...]:
    """Names of the planners that can plan with a problem's costs and semantics: this library's own,
    then those of others."""
    baselines = (name for name, baseline in BASELINES.items() if baseline.role.covers(problem))
    # Those in GENERATORS are this planner's own, for which OWN stands.
    others = (
        name
        for name, generators in PLANNERS.items()
        if name not in BASELINES and name not in GENERATORS
        if any(generator.role.covers(problem) for generator in generators)
    )
    return (OWN, *baselines, *others)


def plan_iterations(
    problem: Problem, iterations: Sequence[Sequence[int]], *, planner: str = OWN, seed: int = 0
) -> list[PlannedIteration]:
    """Plan iterations, ``iterations[i]`` being the tokens of each sequence of iteration i.

    Same arguments, same plans. Raises SpecError for an unknown planner or an invalid length;
    InfeasiblePlan, naming the iteration, for a sequence that no scheme holds.
    """
    known = planner_names(problem)
    if planner not in known and planner not in PLANNERS:
        raise SpecError(
            "planner",
            got=repr(planner),
            wanted=f"one of {', '.join(known)}",
            hint=did_you_mean(planner, known),
        )
    batches = [Lengths(tokens=tuple(tokens)) for tokens in iterations]
    if planner in BASELINES and planner in known:
        make = _baseline_maker(problem, batches, planner, seed)
    else:
        name = "adaptive" if planner == OWN else planner
        make = _search_each(problem.replace(planner=name), seed)
    found = list[PlannedIteration]()
    for number, lengths in enumerate(batches):
        began = time.perf_counter()
        with _IterationInErrors(number):
            made = make(number, lengths)
        found.append(replace(made, planning_s=time.perf_counter() - began))
    return found


class _IterationInErrors:
    """Context that adds the number of the iteration to the text of an InfeasiblePlan raised in it,
    except for a lack of devices, which does not depend on the iteration."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise an InfeasiblePlan anew with the number of the iteration; let others pass."""
        if isinstance(error, InfeasiblePlan) and error.what != "devices":
            raise InfeasiblePlan(
                f"iteration {self.number}, {error.what}",
                got=error.got,
                wanted=error.wanted,
                hint=error.hint,
            )


def _search_each(problem: Problem, seed: int) -> Make:
    """A function that plans one iteration with the generators of the problem's planner, whatever
    the other iterations are."""
    names = {one.scheme: str(one) for one in problem.published_schemes}

    def make(_: int, lengths: Lengths) -> PlannedIteration:
        """The plan of an iteration with these lengths; raises InfeasiblePlan where it has none."""
        made = plan(problem, lengths, seed=seed, generators=PLANNERS[problem.planner])
        text = " + ".join(f"{count}*{names[scheme]}" for scheme, count in made.strategy.counts)
        return PlannedIteration(plan=made, strategy=text)

    return make


def _baseline_maker(problem: Problem, batches: Sequence[Lengths], planner: str, seed: int) -> Make:
    """A function that plans the iteration of a number as the baseline ``planner`` does, which
    others published. All iterations are priced first, as some baselines look at all of them."""
    tables = []  # the prices of each iteration
    for number, lengths in enumerate(batches):
        with _IterationInErrors(number):
            tables.append(formula_table(problem, SortedBatch.of(lengths)))
    baseline = BASELINES[planner]
    plan_prepared = None  # plans one iteration, for a baseline that has to see all of them first
    if baseline.prepare is not None and isinstance(problem.published, PipelineCosts):
        plan_prepared = baseline.prepare(tables, seed, problem.parameters)

    def make(number: int, _: Lengths) -> PlannedIteration:
        """The plan of iteration ``number`` (from 0); raises InfeasiblePlan where the planner finds
        none."""
        table = tables[number]
        if plan_prepared is not None:
            made: Assignment | None = plan_prepared(number, table)
        else:
            known = Known(problem=problem, bound_s=0.0, seed=seed)
            schedules = baseline.drafts(table, known)
            made = min(schedules, key=lambda one: one.seconds, default=None)
        if made is None:
            raise InfeasiblePlan(f"a plan by {planner}", got="none that holds the batch")
        bound = bounded(table)
        phases = tuple(
            (
                PlannedIteration(plan=plan_of(one, bounded(one.table)), strategy=one.names),
                tuple(sequences_of(made, one)),
            )
            for one in made.phases
        )
        return PlannedIteration(
            plan=_plan_of_schedule(problem, made, bound, planner, seed),
            phases=phases,
            switch_s=made.switch_s,
            strategy=" then ".join(one.names for one in made.phases) or made.names,
        )

    return make


def _plan_of_schedule(
    problem: Problem, assignment: Assignment, bound: Bound, planner: str, seed: int
) -> Plan:
    """The plan of a schedule that the baseline ``planner`` made, with the first two of its
    reasons."""
    tried = [Candidate(schedule=assignment, seconds=assignment.seconds)]
    plan = plan_of(assignment, bound)
    why = reasons(problem, bound, tried, plan)[:2]
    return plan.replace(planner=planner, seed=seed, why=why)


def plans_to_json(
    problem: Problem, found: Sequence[PlannedIteration], *, planner: str = OWN, seed: int = 0
) -> dict[str, Any]:
    """The plan file of some iterations, as JSON. Raises SpecError where pipelines run one after the
    other on the same ranks: a file of pipelines can only have them side by side."""
    if isinstance(problem.published, PipelineCosts):
        _require_side_by_side(found, planner)
        head = {"kind": "pipelines", "planner": planner, "seed": seed, "devices": problem.devices}
        return {**head, **_file_entries(problem, found)}
    items = [
        {
            "planner": planner,
            "seed": seed,
            "predicted_s": one.plan.predicted_s,
            "lower_bound_s": one.plan.lower_bound_s,
            "why": list(one.plan.why),
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
    ]
    return {
        "kind": "groups",
        "devices": problem.devices,
        "semantics": problem.semantics,
        "iterations": items,
    }


def _file_entries(problem: Problem, planned: Sequence[PlannedIteration]) -> dict[str, Any]:
    """The entries of a file of pipelines that depend on the plans: ``iterations``, the JSON of each
    plan. Where any iteration has several phases, ``iterations`` has an item for each phase, and so
    have two more entries: ``lengths``, its tokens, and ``phases``, the iteration that it belongs
    to, its sequences there, and the seconds of the change of strategy before it."""
    names = {one.scheme: str(one) for one in problem.published_schemes}
    if not any(one.phases for one in planned):
        return {"iterations": [_plan_json(one, names) for one in planned]}
    items, lengths, phases = list[Any](), list[list[int]](), list[dict[str, Any]]()
    for number, one in enumerate(planned):
        all_sequences = tuple(range(len(one.plan.lengths)))
        parts = one.phases or ((one, all_sequences),)
        for at, (phase, sequences) in enumerate(parts):
            planning_s = one.planning_s / len(parts)
            items.append(_plan_json(replace(phase, planning_s=planning_s), names))
            lengths.append(list(phase.plan.lengths.tokens))
            # Changes are between phases: none before the first, the same seconds for each other.
            change_s = one.switch_s / (len(parts) - 1) if at else 0.0
            phases.append({"iteration": number, "sequences": list(sequences), "switch_s": change_s})
    return {"iterations": items, "lengths": {"iterations": lengths}, "phases": phases}


def _plan_json(planned: PlannedIteration, names: Mapping[Scheme, str]) -> dict[str, Any]:
    """The JSON of one plan: its strategy, each pipeline's micro-batches as sequence indices, and
    its seconds. ``names`` has the name of each scheme in the file of costs."""
    made = planned.plan
    return {
        "strategy": planned.strategy,
        "pipelines": [
            {
                "scheme": names[pipeline.scheme],
                "micro_batches": [
                    list(micro.sequences)
                    for micro in made.micro_batches
                    if micro.pipeline == number
                ],
            }
            for number, pipeline in enumerate(made.pipelines)
        ],
        "predicted_s": made.predicted_s,
        "lower_bound_s": made.lower_bound_s,
        "planning_s": planned.planning_s,
        "why": list(made.why),
    }


def _require_side_by_side(planned: Sequence[PlannedIteration], planner: str) -> None:
    """Raise SpecError where pipelines of a plan, or of one phase of it, share ranks."""
    for number, one in enumerate(planned):
        for made in [phase.plan for phase, _ in one.phases] or [one.plan]:
            ranks = [rank for pipeline in made.pipelines for rank in pipeline.ranks]
            if len(ranks) > len(set(ranks)):
                raise SpecError(
                    f"plan file of pipelines, iteration {number}",
                    got=f"pipelines of {planner} one after the other on the same ranks",
                    wanted="pipelines side by side",
                    hint="without --json the plan is printed",
                )
