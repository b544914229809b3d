"""The verbs of planning: plan, compare with plans of others, simulate, draw. No torch here.

They serve a Python session and the command line; the steps of a run are planned by
:class:`headrace.engine.step_planner.StepPlanner`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import get_args, overload

from headrace.config.model import PlannerConfig
from headrace.costs import CostModel
from headrace.costs.fingerprint import is_of_hybrid
from headrace.costs.group_costs import GroupCosts
from headrace.costs.pipeline_costs import PipelineCosts
from headrace.errors import ConfigError, InfeasiblePlan, SpecError
from headrace.planning import Generator, Problem, Role
from headrace.planning import plan as plan_batch
from headrace.planning.clock import published_timeline
from headrace.report.plan_drawing import draw_plan_file
from headrace.simulator import draw as timeline_text
from headrace.simulator import peak_bytes as _peak_bytes
from headrace.simulator import simulate as run_programs
from headrace.spec.checker import check_world
from headrace.spec.given import of_kind, path_of, whole
from headrace.spec.known_methods import SINGLE_RANK
from headrace.spec.lengths import Lengths
from headrace.spec.measurement import Timeline
from headrace.spec.plan import Plan, Semantics
from headrace.spec.program import Forward, Program, compile_plan, parse_action
from headrace.spec.strategy import Strategy
from headrace.units import counted

__all__ = [
    "PlanningCosts",
    "baselines",
    "draw",
    "listed_methods",
    "make_problem",
    "peak_bytes",
    "plan",
    "plan_if_fits",
    "problem_of",
    "programs_of",
    "require_costs",
    "rivals",
    "simulate",
    "sizes_left_out",
]

PlanningCosts = CostModel | PipelineCosts | GroupCosts | Problem
"""Inputs that a plan can be made from: costs, or a problem that restricts the choices."""

_PLAN = "hr.plan(lengths, costs) makes one"
_ORDER = "lengths or a plan come first: hr.plan(lengths, costs), hr.simulate(plan, costs)"
_GENERATORS = "generators are values such as hr.planning.Nested(), not names"

_recent: deque[Problem] = deque(maxlen=4)
"""Problems made for the costs used last, kept so that schemes are not priced for every batch."""


def plan(
    lengths: Lengths | Iterable[int],
    costs: PlanningCosts,
    *,
    seed: int = 0,
    previous: Plan | None = None,
    generators: Sequence[Generator] | None = None,
) -> Plan:
    """Plan one batch: which devices work on which sequences, and how.

    The plan is the quickest found. The same arguments give the same plan.

    Args:
        lengths: Tokens of each sequence of the batch.
        costs: What work costs on the devices; or a problem, which restricts the choices and says
            for how many devices published costs are planned with.
        seed: Seed of the search.
        previous: The plan of the step before, whose layer options are kept where that costs no more
            than the share ``smoothing`` of the problem in seconds.
        generators: What drafts schedules, in this order, of :mod:`headrace.planning` or your own;
            left out, those of the problem's planner (``headrace.planners.PLANNERS``).

    Returns:
        The plan: with a lower bound, reasons, and a clock, so that it can be drawn.

    Raises:
        InfeasiblePlan: When a sequence fits nowhere; it says by how much and what would help.
        SpecError: For published costs without a problem, for no lengths, for a planner or
            generators that are not for such costs, and for a seed that is no whole number >= 0.

    Example:
        >>> model = hr.Architecture.preset("llama-tiny")
        >>> costs = hr.costs.roofline(model, "h100", devices=4)
        >>> plan = hr.plan([5000, 400, 300, 20], costs)
        >>> plan.predicted_s >= plan.lower_bound_s
        True
    """
    from headrace.planners import PLANNERS

    problem = problem_of(costs)
    if type(seed) is not int or seed < 0:
        seed = whole("seed", seed)
    if previous is not None:
        of_kind("previous plan", previous, Plan)
    chosen = PLANNERS[problem.planner] if generators is None else tuple(generators)
    for generator in chosen if generators is not None else ():
        of_kind("role of a generator", getattr(generator, "role", None), Role, hint=_GENERATORS)
    batch = _as_lengths(lengths)
    found = plan_batch(problem, batch, seed=seed, previous=previous, generators=chosen)
    return _with_clock(found, problem)


def baselines(lengths: Lengths | Iterable[int], costs: PlanningCosts) -> dict[str, Plan]:
    """Plan one batch with groups of one size, as configured by hand, to compare with.

    Args:
        lengths: Tokens of each sequence of the batch.
        costs: As for :func:`plan`.

    Returns:
        A plan for each group size on which the longest sequence fits, by name (``static-cp8``),
        smallest first; empty when it fits on none.

    Raises:
        SpecError: For published costs without a problem, and for no lengths.
    """
    problem = problem_of(costs)
    return {
        made.planner: _with_clock(made, problem)
        for made in _static_plans(problem, _as_lengths(lengths))
    }


def simulate(plan: Plan, costs: PlanningCosts) -> Timeline:
    """Run a plan on a clock: what every rank does, and when.

    The programs of all ranks are compiled, checked and walked with the seconds of the costs.
    Published costs are formulas of whole micro-batches: with these a micro-batch takes the seconds
    of its formula, and there are no programs.

    Args:
        plan: The plan of one step.
        costs: Those of the plan, or others for the same devices.

    Returns:
        The predicted timeline.

    Raises:
        CostError: When the costs are of other devices or lack what the plan uses.
        SpecError: For arguments in another order.
        ProgramError: When the programs would deadlock or leave something out.
    """
    of_kind("plan", plan, Plan, hint=_PLAN)
    of_kind("costs of a plan", costs, get_args(PlanningCosts), hint=_ORDER)
    given = costs.costs if isinstance(costs, Problem) else costs
    if not isinstance(given, CostModel):
        return published_timeline(plan, given)
    return run_programs(programs_of(plan, given), plan, given)


@overload
def draw(what: Timeline, *, width: int = 80) -> str: ...


@overload
def draw(what: Plan, path: str | Path, timeline: Timeline | None = None) -> None: ...


def draw(
    what: Plan | Timeline,
    path: str | Path | None = None,
    timeline: Timeline | None = None,
    *,
    width: int = 80,
) -> str | None:
    """Draw a plan into a file, or a timeline as text.

    Args:
        what: A plan, or the timeline of one.
        path: The file of a plan's picture, by its ending ``.svg``, ``.png`` or ``.json``
            (Vega-Lite): devices over time, and which lengths went to which scheme.
        timeline: What the plan is simulated with; needed for a plan that was loaded from a file,
            as such a plan has no clock.
        width: Columns of the text of a timeline.

    Returns:
        The text of a timeline, a line for each rank; nothing for a plan.

    Raises:
        SpecError: For a plan without ``path``, for one without a clock or a timeline, and for a
            timeline of another plan.
        ConfigError: For a file of another kind, or one that cannot be written.
        MissingExtra: Without the packages of the extra ``report``.

    Example:
        >>> hr.draw(plan, "plan.svg")
        >>> print(hr.draw(hr.simulate(plan, costs)))
    """
    if isinstance(what, Timeline):
        return timeline_text(what, width)
    if path is None:
        raise SpecError("picture of a plan", got="no file", wanted="hr.draw(plan, path)")
    shown = timeline or (what.clock(what) if what.clock is not None else None)
    if shown is None:
        raise SpecError(
            "picture of a plan",
            got="no clock",
            wanted="a timeline",
            hint="hr.draw(plan, path, hr.simulate(plan, costs))",
        )
    _require_own(what, shown)
    return draw_plan_file(what, shown, path_of("picture of a plan", path))


def _require_own(plan: Plan, timeline: Timeline) -> None:
    """Raise SpecError for a timeline of another plan: of other devices, or one whose forwards are
    not those of the plan's micro-batches on their ranks."""
    if timeline.devices != plan.devices:
        got = counted(timeline.devices, "device")
        raise SpecError("timeline of a plan", got=got, wanted=f"the plan's {plan.devices}")
    wanted = {
        (n, rank): sum(plan.tokens_of(micro))
        for n, micro in enumerate(plan.micro_batches)
        for rank in plan.pipelines[micro.pipeline].ranks
    }
    seen = set[int]()
    for row in timeline.rows:
        action = parse_action(row.action) if row.kind == "forward" else None
        if isinstance(action, Forward):
            seen.add(action.micro_batch)
            tokens = wanted.get((action.micro_batch, row.rank))
            # Rows of published costs are without tokens.
            if tokens is None or row.tokens not in (0, tokens):
                got = f"{row.action} of {counted(row.tokens, 'token')} on rank {row.rank}"
                raise SpecError("timeline of a plan", got=got, wanted="the plan's micro-batches")
    count = len(plan.micro_batches)
    if len(seen) != count:
        got = f"{len(seen)} micro-batches"
        raise SpecError("timeline of a plan", got=got, wanted=f"the plan's {count}")


def peak_bytes(plan: Plan, costs: CostModel | Problem) -> tuple[int, ...]:
    """Predict the peak bytes of each rank over one step.

    A rank holds its state always, from the pull to the push the working weights of every stage in
    which it works, and from forward to backward the activations of its micro-batches: of one at a
    time without stages, of as many as are in flight with them. A rank without work holds its state.

    Args:
        plan: The plan of the step.
        costs: What it costs, of a model; or the problem that it was made for.

    Returns:
        Bytes of each rank.

    Raises:
        CostError: For costs of other devices, and a scheme or a layer option without costs.
        SpecError: For published costs, which know no bytes, and what is no plan.
    """
    of_kind("plan", plan, Plan, hint=_PLAN)
    return _peak_bytes(plan, problem_of(costs).model)


def programs_of(plan: Plan, costs: CostModel) -> tuple[Program, ...]:
    """Compile a plan to the programs of all ranks, in rank order. Raises ProgramError where these
    would deadlock or leave something out."""
    count = costs.shape.bucket_count
    programs = compile_plan(plan, count)
    check_world(programs, plan, count)
    return programs


def rivals(problem: Problem, lengths: Lengths, *, seed: int = 0) -> dict[str, Plan]:
    """Plans of other planners with the same costs: the best static one (``best static``), bucket
    parallel (``bucket``) and packed parallel (``packed``); only those that can hold the batch."""
    planners = {"best static": "static", "bucket": "bucket", "packed": "packed"}
    made = {
        key: plan_if_fits(problem.replace(planner=name, static_size=None), lengths, seed)
        for key, name in planners.items()
    }
    return {key: plan for key, plan in made.items() if plan is not None}


def plan_if_fits(problem: Problem, lengths: Lengths, seed: int = 0) -> Plan | None:
    """The plan that the problem's planner makes, free to choose any strategy; None when the batch
    does not fit."""
    from headrace.planners import PLANNERS

    try:
        free = problem.replace(strategies=())
        return plan_batch(free, lengths, seed=seed, generators=PLANNERS[problem.planner])
    except InfeasiblePlan:
        return None


def _static_plans(problem: Problem, lengths: Lengths) -> list[Plan]:
    """The static plan of each group size of the problem that can hold the batch, smallest first."""
    made = (
        plan_if_fits(problem.replace(planner="static", static_size=size), lengths)
        for size in problem.static_sizes
    )
    return [plan for plan in made if plan is not None]


def problem_of(costs: PlanningCosts) -> Problem:
    """The problem to solve with these costs. A problem is returned as it is; for a cost model it is
    one without restrictions, kept so that its priced schemes are reused. Raises SpecError for
    published costs, which do not say how many devices there are, and for anything else."""
    if isinstance(costs, Problem):
        return costs
    if isinstance(costs, CostModel):
        problem = next((recent for recent in tuple(_recent) if recent.costs is costs), None)
        if problem is None:
            problem = Problem(costs=costs)
            _recent.append(problem)
        return problem
    of_kind("costs of a plan", costs, get_args(PlanningCosts), hint=_ORDER)
    raise SpecError(
        "costs of a plan",
        got="published costs",
        wanted="a problem that says how many devices",
        hint="hr.Problem(costs=costs, devices=64)",
    )


def _as_lengths(lengths: Lengths | Iterable[int]) -> Lengths:
    """The lengths of a batch, made from the tokens of each sequence where they are given so."""
    return lengths if isinstance(lengths, Lengths) else Lengths.of(lengths)


def _with_clock(made: Plan, problem: Problem) -> Plan:
    """The plan with ``clock``, a function that predicts its timeline, which drawing needs."""
    return made.replace(clock=partial(simulate, costs=problem.costs))


def make_problem(
    costs: CostModel, options: PlannerConfig, *, semantics: Semantics = "free", stages: bool = True
) -> Problem:
    """The problem that a configuration poses with these costs. Raises ConfigError for group sizes
    that have no costs, and where the configuration asks for hybrid costs and these are others."""
    require_costs(costs, options)
    sizes = tuple(p for p in options.group_sizes if p <= costs.cluster.devices)
    # Larger sizes are left out, but not all: a configuration with none that fits is refused.
    unknown = [p for p in sizes or options.group_sizes if p not in costs.group_sizes]
    if unknown:
        raise ConfigError(
            "planner.group_sizes",
            got=unknown[0],
            wanted=f"one of {', '.join(map(str, costs.group_sizes))}",
        )
    alone = (SINGLE_RANK,) if 1 in costs.group_sizes else ()  # the method of groups of one rank
    # Where all groups are of one rank there are no other methods to choose between.
    candidates = options.candidates if costs.group_sizes != (1,) else ()
    return Problem(
        costs=costs,
        semantics=semantics,
        stages=stages,
        planner=options.name,
        static_size=options.static_size if options.name == "static" else None,
        strategies=tuple(map(Strategy.parse, options.strategies)),
        sizes=sizes or None,
        methods=(*alone, *candidates) if candidates else None,
        layers=listed_methods(options),
        recompute=options.recompute,
        smoothing=options.smoothing,
        holding=("replicated", "sharded") if options.working == "auto" else (options.working,),
    )


def require_costs(costs: CostModel, options: PlannerConfig) -> None:
    """Raise ConfigError for costs that are not fitted as a configuration says."""
    if options.costs == "hybrid" and not is_of_hybrid(costs.fingerprint):
        raise ConfigError(
            "planner.costs",
            got="'hybrid', and costs that were not fitted so",
            wanted="a profile measured on these ranks",
            hint="headrace profile CONFIG measures one, and so does train",
        )


def sizes_left_out(options: PlannerConfig, ranks: int) -> str:
    """A line for people where a configuration names groups of more ranks than there are; empty
    where it names none."""
    beyond = ", ".join(str(p) for p in options.group_sizes if p > ranks)
    if not beyond:
        return ""
    there = "is 1 rank" if ranks == 1 else f"are {ranks} ranks"
    return f"planner.group_sizes: {beyond} left out, as there {there}"


def listed_methods(options: PlannerConfig) -> tuple[str, ...] | None:
    """The methods that a configuration fixes, one for all layers or one for each; None where the
    choice is the planner's."""
    if options.methods == "auto":
        return None
    return (options.methods,) if isinstance(options.methods, str) else options.methods
