"""The planner: sizes by a target time, blocks by longest first, packs, then local search.

Data        lengths l_i; for every group size p seconds and capacity of its layer plans; N ranks.
Variables   the size p_i of every sequence, its block, its micro-batch, the layer plan of each.
Constraint  every micro-batch fits the memory of its ranks; a rank does one thing at a time.
Objective   minimise the time at which the last rank is free.

Solve.
1. Drafts. For a target time tau, a sequence takes the size with the least device-seconds among
   those that run it within tau: a small tau buys short critical paths with device-seconds. For a
   row of tau upwards from the lower bound the sequences are list-scheduled, size by size from the
   largest; then sizes that cost more than they bring are dropped.
2. Where the best draft stays away from the bound (few sequences, many ranks), sizes are chosen
   while scheduling, to meet a deadline, and the deadline is bisected.
3. The best drafts and the best static plan are packed exactly and improved by local search.
4. All this with whole weights and, where memory binds, with shards.
What computes for the shortest time wins, unless the simulated step of the best static plan, with
its exchange, is shorter: a plan is never worse than a static one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from random import Random

import numpy as np
from numpy.typing import NDArray

from headrace.planning.baselines import best_static
from headrace.planning.bounds import lower_bound
from headrace.planning.dispatch import Members, deadline_schedule, list_schedule
from headrace.planning.explain import Candidate, reasons
from headrace.planning.feasible import widest_table
from headrace.planning.problem import Arena, Problem
from headrace.planning.search import Effort, improve
from headrace.planning.sizing import Batch, SizeTable
from headrace.planning.solution import Solution, planned
from headrace.spec import Lengths, Plan

__all__ = ["plan"]

_TARGETS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.4, 1.7, 2.2, 3.0, float("inf"))
_PACKED_EXACTLY = 3
_DEADLINES = 5
_DEADLINE_GAP = 1.01  # closer to the bound than this, deadlines are not worth their time
_CLOSE_ENOUGH = 1 + 5e-4  # of the bound: no search beyond it

Rows = NDArray[np.int64]


def plan(
    problem: Problem, lengths: Lengths, *, seed: int = 0, previous: Plan | None = None
) -> Plan:
    """The quickest plan found for one batch.

    Deterministic in ``lengths``, ``seed``, which feeds the local search, and ``previous``, the
    plan of the step before: where the problem smooths, its layers stay if others would hardly be
    quicker (:mod:`headrace.planning.smoothing`). Raises InfeasiblePlan
    when a sequence fits no group of ranks, saying by how much and what would help.
    """
    batch = Batch.of(lengths)
    bound = lower_bound(widest_table(problem, batch), problem.devices)
    random = Random(seed)
    static = best_static(problem, batch)
    found = [Candidate(solution=static, name=str(static.strategy))]
    for arena in _arenas(problem, batch):
        table = SizeTable.of(arena.frontiers, batch)
        best_s = min(candidate.solution.seconds for candidate in found)
        if lower_bound(table, problem.devices).seconds < best_s:
            starts = _starts(problem, batch, arena, table, bound.seconds, static)
            found += _improved(batch, table, starts, bound.seconds, random)
    found.sort(key=lambda candidate: candidate.solution.seconds)
    why = reasons(problem, batch, bound, found, static)

    def made(solution: Solution) -> Plan:
        return planned(
            problem, solution, batch, bound_s=bound.seconds, planner="adaptive", seed=seed,
            why=why, previous=previous,
        )  # fmt: skip

    best = made(found[0].solution)
    if found[0].solution is static:
        return best
    # What computes for less time may hide less of the exchange: the whole step decides.
    plain = made(static)
    return plain if plain.predicted_s < best.predicted_s else best


def _arenas(problem: Problem, batch: Batch) -> Iterator[Arena]:
    """Whole weights with all sizes; then, where memory binds, shards with one size or two. A rank
    holds the shards of every size in which it works, so more sizes soon hold as much as whole
    weights."""
    sizes, longest = problem.group_sizes, batch.tokens[0]
    whole = problem.arena("whole", sizes)
    if whole.most_tokens >= longest:
        yield whole
        if all(f.caps[0] >= sum(batch.tokens) for f in whole.frontiers.values()):
            return
    costs = problem.costs
    for few in (*((p,) for p in sizes if p > 1), *combinations(sizes, 2)):
        if few[-1] % few[0] == 0 and (
            costs.held_bytes(few, "sharded") < costs.held_bytes(few, "whole")
        ):
            sharded = problem.arena("sharded", few)
            if sharded.most_tokens >= longest:
                yield sharded


def _starts(
    problem: Problem,
    batch: Batch,
    arena: Arena,
    table: SizeTable,
    bound_s: float,
    static: Solution,
) -> list[Solution]:
    """The best drafts, packed exactly, and the best static plan under this arena; best first."""
    drafts = sorted(_drafts(table, problem.devices, bound_s), key=lambda draft: draft[0])
    chosen = [members for _, members in drafts[:_PACKED_EXACTLY]]
    p = static.arena.sizes[0]
    if p in arena.frontiers and arena.frontiers[p].most_tokens >= batch.tokens[0]:
        chosen.append(static.members)
    solutions = [Solution.of(arena, batch, problem.devices, members) for members in chosen]
    best_s = min(solution.seconds for solution in solutions)
    solutions += _by_deadline(problem, batch, arena, table, bound_s, best_s)
    return sorted(solutions, key=lambda solution: solution.seconds)


def _by_deadline(
    problem: Problem, batch: Batch, arena: Arena, table: SizeTable, low_s: float, high_s: float
) -> Iterator[Solution]:
    """Solutions of deadlines between a bound and the best known seconds, by bisection."""
    for _ in range(_DEADLINES):
        if high_s <= low_s * _DEADLINE_GAP:
            break
        deadline_s = (low_s + high_s) / 2
        members = deadline_schedule(problem.devices, table, deadline_s)
        solution = Solution.of(arena, batch, problem.devices, members)
        if solution.seconds <= deadline_s * _DEADLINE_GAP:
            high_s = min(deadline_s, solution.seconds)
        else:
            low_s = deadline_s
        yield solution


def _drafts(table: SizeTable, devices: int, bound_s: float) -> list[tuple[float, Members]]:
    """(estimated seconds, blocks) for a row of target times, and for the best without some of
    its sizes."""
    seconds, opening = table.spread.tolist(), table.opening.tolist()
    seen: dict[bytes, tuple[float, Members]] = {}

    def draft(rows: Rows) -> float:
        key = rows.tobytes()
        if key not in seen:
            seen[key] = list_schedule(devices, table.sizes, rows.tolist(), seconds, opening)
        return seen[key][0]

    everything = np.ones(len(table.sizes), dtype=np.bool_)
    timed = []
    for factor in _TARGETS:
        rows = _sizes(table, bound_s * factor, everything)
        timed.append((draft(rows), factor, rows))
    best_s, factor, rows = min(timed, key=lambda item: item[:2])
    allowed, dropping = everything, True
    while dropping:
        dropping = False
        for row in np.unique(rows).tolist():
            fewer = allowed.copy()
            fewer[row] = False
            if not np.isfinite(table.alone[fewer]).any(axis=0).all():
                continue
            without = _sizes(table, bound_s * factor, fewer)
            if draft(without) < best_s:
                best_s, rows, allowed, dropping = draft(without), without, fewer, True
                break
    return list(seen.values())


def _sizes(table: SizeTable, target_s: float, allowed: NDArray[np.bool_]) -> Rows:
    """The row of each sequence: the least device-seconds within ``target_s``, else the quickest."""
    ranks = np.array(table.sizes, dtype=np.float64)[:, None]
    closed = ~allowed[:, None] | (table.alone > target_s)
    cheapest = np.where(closed, np.inf, ranks * table.spread)
    quickest = np.where(allowed[:, None], table.alone, np.inf)
    late = closed.all(axis=0)
    return np.where(late, quickest.argmin(axis=0), cheapest.argmin(axis=0))


def _improved(
    batch: Batch, table: SizeTable, starts: list[Solution], bound_s: float, random: Random
) -> list[Candidate]:
    """The starts and what local search makes of the best."""
    effort = Effort(tries=_tries(len(batch.tokens)))
    seconds = {p: row for p, row in zip(table.sizes, table.spread.tolist(), strict=True)}
    best = improve(
        starts, batch, seconds,
        target_s=bound_s * _CLOSE_ENOUGH, effort=effort, random=random,
    )  # fmt: skip
    return [Candidate(solution=s, name=str(s.strategy)) for s in (best, *starts[1:])]


def _tries(sequences: int) -> int:
    """Effort that keeps planning within milliseconds: much for a few sequences, where drafts are
    coarse; little for many, which fill every gap by themselves."""
    return max(10, min(200, 1000 // sequences))
