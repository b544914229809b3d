"""headrace and other planners over the same batches with the same costs; no torch here.

Every planner is asked for plans, and their predicted seconds are compared. No timeline of all ranks
is simulated, which would take seconds for a thousand of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import inf

from headrace.costs import CostModel
from headrace.costs.pipeline_costs import PipelineCosts
from headrace.engine.plans import PlanningCosts, plan_if_fits, problem_of, rivals, simulate
from headrace.engine.plans import plan as plan_one
from headrace.errors import InfeasiblePlan, SpecError
from headrace.planning import Problem
from headrace.simulator import micro_batch_seconds
from headrace.spec.comparison import Comparison, PlannedBatch, PlannerResult
from headrace.spec.lengths import Lengths
from headrace.spec.plan import Plan

__all__ = ["compare", "compare_plans"]

Progress = Callable[[str, int, int], object]
"""Called as ``progress(what, done, of)``: ``done`` of the ``of`` parts of some work are done."""

_RIVALS = (
    ("best static of each batch", "best static"),
    ("bucket", "bucket"),
    ("packed", "packed"),
)
"""Planners that plan batch by batch: the name of each in a comparison, and its key among the plans
of :func:`rivals`."""

_OWN = ("adaptive", "strategies")
"""Names of the planners whose plans are headrace's."""


def compare(
    batches: Iterable[Lengths | Iterable[int]],
    costs: PlanningCosts,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Comparison:
    """Compare headrace with what else could be done, over several batches.

    Beside headrace stand the best single group size for all batches, as a launch script fixes it
    (groups without stages and tensor blocks);
    the best single size of each batch; bucket parallel and packed parallel, each with the best
    group size of each batch (the two classes that Data-Centric Parallel starts from). All know the
    same costs, methods and memory.

    Args:
        batches: The lengths of each batch.
        costs: What work costs on the devices; or a problem, which restricts the choices of all
            planners.
        seed: Of the search.
        progress: Called as ``progress(what, done, of)`` with the number of batches that are done.

    Returns:
        The predicted seconds of every batch by every planner, and what follows from them.

    Raises:
        InfeasiblePlan: When headrace cannot hold a batch; it names the batch. Other planners that
            cannot hold one have no seconds for it.
        SpecError: For no batches, a batch without lengths, and published costs of pipelines, with
            which bucket and packed parallel have no groups.

    Example:
        >>> model = hr.Architecture.preset("llama-tiny")
        >>> costs = hr.costs.roofline(model, "h100", devices=8)
        >>> batches = hr.lengths.batches("lognormal:median=900,sigma=1.5", 2, tokens="64Ki")
        >>> print(hr.compare(batches, costs))
    """
    problem = problem_of(costs)
    _require_groups(problem)
    given = [batch if isinstance(batch, Lengths) else Lengths.of(batch) for batch in batches]
    plans = list[Plan]()
    for number, lengths in enumerate(given):
        previous = plans[-1] if plans else None
        try:
            plans.append(plan_one(lengths, problem, seed=seed, previous=previous))
        except InfeasiblePlan as error:
            raise InfeasiblePlan(
                f"batch {number}, {error.what}",
                got=error.got,
                wanted=error.wanted,
                hint=error.hint,
            )
        if progress is not None:
            progress("planned batches", len(plans), len(given))
    return compare_plans(plans, problem, seed=seed, progress=progress)


def compare_plans(
    plans: Sequence[Plan], problem: Problem, *, seed: int = 0, progress: Progress | None = None
) -> Comparison:
    """Compare the plans of a problem's planner, one for each batch, with those that other planners
    make of the same batches. Raises SpecError as :func:`compare`."""
    _require_groups(problem)
    others = list[dict[str, Plan]]()  # of each batch
    for made in plans:
        others.append(rivals(problem, made.lengths, seed=seed))
        if progress is not None:
            progress("compared batches", len(others), len(plans))
    fixed, size = _one_size(problem, plans, [found.get("best static") for found in others])
    own_name = "headrace" if problem.planner in _OWN else f"planner {problem.planner}"
    plans_by_name: dict[str, Sequence[Plan | None]] = {own_name: plans}
    for name, key in _RIVALS:
        plans_by_name[name] = [each.get(key) for each in others]
        if name == _RIVALS[0][0]:  # the rows of a comparison stand in this order
            plans_by_name["best static"] = fixed
    return Comparison(
        devices=problem.devices,
        plans=tuple(plans),
        results=tuple(_result(name, made, problem) for name, made in plans_by_name.items()),
        static_size=size,
    )


def _require_groups(problem: Problem) -> None:
    """Raise SpecError for published costs of pipelines."""
    if isinstance(problem.costs, PipelineCosts):
        raise SpecError(
            "costs to compare planners with",
            got="published costs of pipelines",
            wanted="costs of a model, or of groups",
            hint="headrace plan --costs FILE --planner NAME plans with other planners of pipelines",
        )


def _one_size(
    problem: Problem, plans: Sequence[Plan], best: Sequence[Plan | None]
) -> tuple[list[Plan] | list[None], int | None]:
    """Find the group size that, used for every batch, takes the least seconds in all; returns its
    plan of each batch and the size. Where no size holds all batches, returns None for each batch
    and for the size. ``plans`` give the batches by their lengths, ``best`` has for each batch the
    static plan of the size that is best for it alone."""
    none = [None] * len(plans)
    bound_s = 0.0  # each batch with its own best size: no single size takes less
    known = dict[tuple[int, int], Plan]()  # by group size and number of the batch
    for number, made in enumerate(best):
        if made is None:
            return none, None
        bound_s += made.predicted_s
        known[_size(made), number] = made
    # Sizes that are best for the most batches come first, so that others are given up early.
    times_best = Counter(size for size, _ in known)
    best_s, best_plans, best_size = inf, list[Plan](), None
    for size in sorted(problem.static_sizes, key=lambda p: (-times_best[p], p)):
        sized = problem.replace(planner="static", static_size=size, strategies=())
        # Starts at the bound and grows by what each batch loses with this size, so that a size is
        # given up as soon as it cannot become the best.
        total_s, sized_plans = bound_s, list[Plan]()
        for number, best_here in enumerate(best):
            made = known.get((size, number)) or plan_if_fits(sized, plans[number].lengths)
            if made is None or best_here is None:
                break
            total_s += made.predicted_s - best_here.predicted_s
            if total_s >= best_s:
                break
            sized_plans.append(made)
        if len(sized_plans) == len(plans):
            best_s, best_plans, best_size = total_s, sized_plans, size
    return (none, None) if best_size is None else (best_plans, best_size)


def _size(static: Plan) -> int:
    """Ranks of each group of a static plan."""
    return static.strategy.counts[0][0].devices


def _result(name: str, plans: Sequence[Plan | None], problem: Problem) -> PlannerResult:
    """The row of the planner ``name`` in a comparison: predicted seconds, strategy and idle
    fraction of the plan of each batch, None for a batch without a plan."""
    batches = [
        None
        if made is None
        else PlannedBatch(
            seconds=made.predicted_s, strategy=str(made.strategy), idle=_idle(made, problem)
        )
        for made in plans
    ]
    return PlannerResult(name=name, batches=tuple(batches))


def _idle(made: Plan, problem: Problem) -> float | None:
    """The fraction of all devices' time in the step in which they are idle. With the costs of a
    model it is computed from the seconds of micro-batches, as a simulated timeline would take long;
    None for their plans in lockstep, in which the seconds that micro-batches spend on gathering
    weights are not known apart."""
    costs = problem.costs
    if not isinstance(costs, CostModel):
        return simulate(made, costs).idle
    if made.semantics == "lockstep":
        return None
    each_s = micro_batch_seconds(made, costs)
    busy_s = made.devices * costs.exchange_s.update_s * costs.scale  # every device updates
    for seconds, micro in zip(each_s, made.micro_batches, strict=True):
        pipeline = made.pipelines[micro.pipeline]
        # ``seconds`` are summed over the stages, and each stage keeps only its own ranks busy.
        busy_s += seconds * len(pipeline.ranks) / pipeline.scheme.pipeline
    return max(0.0, 1 - busy_s / (made.devices * made.predicted_s))
