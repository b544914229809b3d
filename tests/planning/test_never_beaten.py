"""No static plan is quicker than the plan; no planner of others by more than a fiftieth and, for
few sequences, no draft that a generator makes for longer times. The problems drawn are
always the same: what a heuristic promises is measured, not proved."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, log
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from headrace.costs import CostModel, synthetic_costs
from headrace.costs.group_costs import GroupCosts
from headrace.costs.pipeline_costs import PipelineCosts
from headrace.errors import InfeasiblePlan
from headrace.planners import BASELINES, PLANNERS
from headrace.planning import Known, Nested, Problem, SideBySide, plan
from headrace.planning.batch import PriceTable, SortedBatch
from headrace.planning.bounds import BoundRows, lower_bound
from headrace.planning.formula_source import formula_table
from headrace.planning.schedule import Assignment
from headrace.spec import Lengths
from headrace.spec.plan import Semantics
from headrace.units import GIB
from planning.group_worlds import batches as group_batches
from planning.group_worlds import world_costs
from planning.pipeline_worlds import batches as pipeline_batches
from planning.pipeline_worlds import published, small_costs
from planning.tables import flexsp
from planning.worlds import batches, statics, worlds

pytestmark = pytest.mark.timeout(900)

_ROUNDING = 1e-9
_LUCK = 0.02
_FEW = 140


def drawn(count: int, **strategies: st.SearchStrategy) -> Callable:
    """The property on so many problems."""
    quiet = settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=True,
        phases=[Phase.generate],
    )
    return lambda holds: quiet(given(**strategies)(holds))


def drafts_s(problem: Problem, table: PriceTable) -> list[tuple[str, float]]:
    """What every generator makes of a table, packed."""
    low_s = lower_bound(BoundRows.of(table), table.devices).seconds
    known = Known(problem=problem, bound_s=low_s)
    found = [*SideBySide().drafts(table, known), *Nested().drafts(table, known)]
    made = (Assignment.of(table, draft.groups, draft.source) for draft in found)
    return [(one.source, one.seconds) for one in made]


def of_formulas(
    costs: GroupCosts | PipelineCosts, tokens: list[int], devices: int, semantics: Semantics
) -> None:
    """The plan of published costs against all that others plan."""
    problem = Problem(costs=costs, devices=devices, semantics=semantics)
    try:
        made = plan(problem, Lengths(tokens=tuple(tokens)), generators=PLANNERS["adaptive"])
    except InfeasiblePlan:
        return
    table = formula_table(problem, SortedBatch.of(made.lengths))
    others = [
        (name, found.seconds)
        for name, baseline in BASELINES.items()
        if baseline.staged == isinstance(costs, PipelineCosts)
        if (found := baseline.schedules(table, semantics, 0)) is not None
        if found.semantics == semantics
        if not found.phases  # changing pipelines within a step is free here, and nobody's plan
    ]
    if semantics == "free" and isinstance(costs, GroupCosts) and len(tokens) <= _FEW:
        others += drafts_s(problem, table)
    assert others
    name, seconds = min(others, key=lambda other: other[1])
    assert made.predicted_s <= seconds * (1 + _LUCK), f"{name} is quicker"
    best = "static" if isinstance(costs, PipelineCosts) else "best-static"
    static_s = min((own_s for own, own_s in others if own == best), default=inf)
    assert made.predicted_s <= static_s * (1 + _ROUNDING)


def of_groups(costs: GroupCosts, tokens: list[int], devices: int, semantics: Semantics) -> None:
    of_formulas(costs, tokens, devices, semantics)


def of_pipelines(costs: PipelineCosts, tokens: list[int], devices: int) -> None:
    of_formulas(costs, tokens, devices, "free")


def of_models(costs: CostModel, lengths: Lengths) -> None:
    problem = Problem(costs=costs)
    found = statics(problem, lengths)
    if found:
        best_s = min(static.predicted_s for static in found)
        assert plan(problem, lengths).predicted_s <= best_s * (1 + _ROUNDING)


def of_many_devices(seed: int) -> None:
    """Long-tailed batches on 8 to 64 devices, by costs that were measured or by formula."""
    random = Random(seed)
    kind, devices = random.choice(["groups", "pipelines", "model"]), random.choice([8, 16, 32, 64])
    sigma, middle = random.choice([1.0, 1.5]), log(random.choice([700, 2000, 6000]))
    most = 32_768 if kind == "pipelines" else 131_072
    tokens = [
        min(most, max(16, round(random.lognormvariate(middle, sigma))))
        for _ in range(random.choice([5, 20, 60, 150, 400]))
    ]
    if kind == "groups":
        of_formulas(flexsp(), tokens, devices, random.choice(["free", "lockstep"]))
    elif kind == "pipelines":  # which list what fits from 32 devices on
        costs = published(f"hydraulis-{random.choice(['7b', '13b', '32b'])}")
        of_formulas(costs, tokens, max(32, devices), "free")
    else:
        memory_bytes = random.choice([10, 40, 80]) * GIB
        costs = synthetic_costs(devices, random.choice([4, 32]), memory_bytes=memory_bytes)
        of_models(costs, Lengths.of(tokens))


GROUPS = {
    "costs": world_costs(),
    "tokens": group_batches(40),
    "devices": st.integers(1, 17),
    "semantics": st.sampled_from(["free", "lockstep"]),
}
PIPELINES = {
    "costs": small_costs(),
    "tokens": pipeline_batches(40, 3000),
    "devices": st.integers(4, 12),
}
MODELS = {"costs": worlds(), "lengths": batches()}

test_a_few_plans_of_groups = drawn(25, **GROUPS)(of_groups)
test_a_few_plans_of_pipelines = drawn(25, **PIPELINES)(of_pipelines)
test_a_few_plans_of_models = drawn(25, **MODELS)(of_models)

test_a_few_plans_for_many_devices = drawn(6, seed=st.integers(0, 10**6))(of_many_devices)

test_plans_of_groups = pytest.mark.slow(drawn(800, **GROUPS)(of_groups))
test_plans_of_pipelines = pytest.mark.slow(drawn(800, **PIPELINES)(of_pipelines))
test_plans_of_models = pytest.mark.slow(drawn(400, **MODELS)(of_models))
test_plans_for_many_devices = pytest.mark.slow(
    drawn(60, seed=st.integers(0, 10**6))(of_many_devices)
)
