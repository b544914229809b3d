"""What others' planners make of a batch with a model's costs, timed as our own plans are."""

from __future__ import annotations

from headrace.planning.baselines import BASELINES
from headrace.planning.batch import PriceTable, SortedBatch
from headrace.planning.layout import laid_out
from headrace.planning.problem import Problem
from headrace.planning.schedule import Assignment
from headrace.spec import Lengths, Plan
from headrace.spec.plan import Working

__all__ = ["rival_plan"]


def rival_plan(problem: Problem, lengths: Lengths, name: str, *, seed: int = 0) -> Plan | None:
    """The plan of the planner ``name`` of BASELINES (``bucket``, ``packed``) for one batch.

    It has the one group size and the way to hold weights that are quickest for that planner, is
    timed by the simulator as every plan, and has no lower bound. None where no size holds the
    batch. Raises SpecError for published costs, KeyError for an unknown name.
    """
    costs, made = problem.model.replace(scale=1.0), list[Plan]()
    for weights in problem.holding:
        schedule = _quickest(problem, SortedBatch.of(lengths), name, weights, seed)
        if schedule is not None:
            made.append(laid_out(_together(schedule), costs))
    if not made:
        return None
    best = min(made, key=lambda plan: plan.predicted_s)
    scale = problem.model.scale
    return best.replace(predicted_s=best.predicted_s * scale, planner=name, seed=seed)


def _quickest(
    problem: Problem, batch: SortedBatch, name: str, weights: Working, seed: int
) -> Assignment | None:
    """By computing, over all group sizes."""
    tables = (
        PriceTable(batch, [scheme], problem.devices)
        for scheme in problem.pricing.groups(weights)
        if scheme.most_tokens >= batch.tokens[0]
    )
    tried = (BASELINES[name].schedules(table, "free", seed) for table in tables)
    found = (schedule for schedule in tried if schedule is not None)
    return min(found, key=lambda schedule: schedule.seconds, default=None)


def _together(schedule: Assignment) -> Assignment:
    """The launches of a group as micro-batches of one pipeline."""
    bins: dict[tuple[int, tuple[int, ...]], list[list[int]]] = {}
    for (k, ranks, _), packed in zip(schedule.groups, schedule.packs, strict=True):
        bins.setdefault((k, ranks), []).extend(map(list, packed.bins))
    given = ((k, ranks, own) for (k, ranks), own in bins.items())
    return Assignment.of_bins(schedule.table, given, schedule.source)
