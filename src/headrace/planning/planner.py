"""The planner: schedules of several generators, the best of them timed by the clock that counts.

Data        lengths l_i; priced schemes (seconds, tokens and layer plans of a micro-batch); N
            devices.
Variables   the pipelines and their ranks; the pipeline and micro-batch of each sequence; the layers
            and order of each micro-batch.
Constraint  a micro-batch holds at most the tokens of its layers; a rank does one thing at a time.
Objective   minimise the step: of published costs when the last rank is free, of a model's costs the
            end of the simulated step with its exchange.

Solve.
1. A lower bound (:mod:`headrace.planning.bounds`), and the best static schedule.
2. Drafts of pipelines side by side and of nested groups (:mod:`headrace.planning.generators`); of a
   model's costs with weights replicated, then, where that promises more, sharded.
3. Schemes with tensor blocks and stages, which leave more room, where memory makes a difference:
   where the bound without them is above one that knows no memory.
4. The best drafts, by when gradients are sent, are packed exactly and improved. The best of them
   and the best static schedule are timed; the quicker is the plan, so no plan is worse than a
   static one.

In lockstep schedules are waves (:mod:`headrace.planning.waves`).
"""

from __future__ import annotations

from headrace.planning.batch import SortedBatch
from headrace.planning.formula_search import FormulaSearch
from headrace.planning.generators import SearchLimits
from headrace.planning.model_search import ModelSearch
from headrace.planning.problem import Problem
from headrace.spec import Lengths, Plan

__all__ = ["plan"]


def plan(
    problem: Problem,
    lengths: Lengths,
    *,
    seed: int = 0,
    previous: Plan | None = None,
    limits: SearchLimits | None = None,
) -> Plan:
    """The quickest plan found for one batch.

    Deterministic in ``lengths``, ``seed``, which feeds the search, and ``previous``, the plan of
    the step before: where the problem smooths, its layers stay if others would hardly be quicker
    (:mod:`headrace.planning.smoothing`). ``limits`` say what a search spends. Raises InfeasiblePlan
    when a sequence fits no pipeline, saying by how much and what would help.
    """
    batch = SortedBatch.of(lengths)
    spent = (limits or SearchLimits()).of(len(batch))
    if problem.is_published or problem.semantics == "lockstep":
        return FormulaSearch(problem=problem, batch=batch, seed=seed, limits=spent).plan()
    return ModelSearch(problem=problem, batch=batch, seed=seed, limits=spent).plan(previous)
