"""Static plans: what a user configures by hand, to compare with and never to be worse than.

A static plan of p cuts the ranks into groups of exactly p (ranks that are left over stay idle),
gives the longest sequence first to the group that is free first, and packs what each group got.
"""

from __future__ import annotations

from headrace.errors import SpecError
from headrace.planning.bounds import lower_bound
from headrace.planning.dispatch import list_schedule
from headrace.planning.feasible import require_fit, widest_table
from headrace.planning.problem import Arena, Problem
from headrace.planning.sizing import Batch, SizeTable
from headrace.planning.solution import Solution, planned
from headrace.spec import Lengths, Plan

__all__ = ["best_static", "max_length_static", "static_plan"]


def static_plan(problem: Problem, lengths: Lengths, p: int) -> Plan:
    """Every sequence on groups of exactly ``p`` ranks; whole weights if the longest sequence fits
    beside them, else sharded. Raises SpecError for a size without costs, InfeasiblePlan when the
    longest sequence does not fit."""
    if p not in problem.group_sizes:
        known = ", ".join(map(str, problem.group_sizes))
        raise SpecError("group size", got=p, wanted=f"one of {known}")
    batch = Batch.of(lengths)
    require_fit(problem, batch, p)
    bound = lower_bound(widest_table(problem, batch), problem.devices)
    solution = _static(problem, batch, p)
    why = (f"static: {problem.devices // p} groups of {p}, as asked",)
    return planned(
        problem, solution, batch, bound_s=bound.seconds, planner=f"static-cp{p}", why=why
    )


def max_length_static(problem: Problem, longest: int) -> int:
    """The smallest group size that fits a sequence of ``longest`` tokens: what a careful user
    configures for a whole corpus. Raises InfeasiblePlan when none does."""
    batch = Batch.of(Lengths(tokens=(longest,)))
    require_fit(problem, batch)
    return next(p for p in problem.group_sizes if _arena(problem, p, longest) is not None)


def best_static(problem: Problem, batch: Batch) -> Solution:
    """The static solution with the least seconds (ties: the smaller size), of a batch whose
    longest sequence fits some size. Sizes whose bound is no better than what is found are left
    out."""
    bounds = []
    for p in problem.group_sizes:
        arena = _arena(problem, p, batch.tokens[0])
        if arena is not None:
            bounds.append((_bound_s(SizeTable.of(arena.frontiers, batch), problem.devices // p), p))
    bounds.sort()
    best = _static(problem, batch, bounds[0][1])
    for bound_s, p in bounds[1:]:
        if bound_s < best.seconds:
            solution = _static(problem, batch, p)
            if solution.seconds < best.seconds:
                best = solution
    return best


def _arena(problem: Problem, p: int, longest: int) -> Arena | None:
    """Groups of p alone, with whole weights if they leave room for the longest sequence."""
    for arena in (problem.arena("whole", (p,)), problem.arena("sharded", (p,))):
        if arena.most_tokens >= longest:
            return arena
    return None


def _static(problem: Problem, batch: Batch, p: int) -> Solution:
    arena = _arena(problem, p, batch.tokens[0])
    assert arena is not None, "asked only when it fits"
    table = SizeTable.of(arena.frontiers, batch)
    chosen = [0] * len(batch.tokens)
    _, members = list_schedule(
        problem.devices, (p,), chosen, table.spread.tolist(), table.opening.tolist()
    )
    return Solution.of(arena, batch, problem.devices, members)


def _bound_s(table: SizeTable, groups: int) -> float:
    """What groups of one size cannot beat: the bound of :mod:`headrace.planning.bounds` with
    groups in place of ranks."""
    busy_s = max(table.spread.sum() / groups, table.work.sum() / groups + table.opening[0])
    return float(max(busy_s, table.alone.max()))
