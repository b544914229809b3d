"""Baselines that are planners by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

import headrace as hr
from headrace.errors import InfeasiblePlan, SpecError
from headrace.planners import BASELINES
from headrace.planning.batch import PriceTable
from headrace.planning.schedule import Assignment
from headrace.simulator import step_s
from headrace.spec.plan import Semantics

NAMES = ("bucket", "packed", "dcp")


@pytest.fixture(scope="module")
def problem() -> hr.Problem:
    model = hr.Architecture.preset("llama-8b")
    costs = hr.costs.roofline(model, "h100", devices=8)
    return hr.Problem(costs=costs, stages=False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("semantics", ["free", "lockstep"])
def test_a_baseline_is_planned(problem: hr.Problem, name: str, semantics: str) -> None:
    """Catches a name that plans something else, a baseline that beats the planner, seconds of
    another clock than ours, and sequences lost between launches."""
    lengths = hr.Lengths.of([30_000, 9_000, 800, 700, 400, 300, 200, 100] * 3)
    other = hr.plan(lengths, problem.replace(planner=name, semantics=semantics))
    own = hr.plan(lengths, problem.replace(semantics=semantics))
    assert other.planner == name
    assert other.semantics == semantics
    assert own.predicted_s <= other.predicted_s * (1 + 1e-9)
    if semantics == "free":
        assert other.predicted_s == pytest.approx(step_s(other, problem.model))
    done = sorted(i for micro in other.micro_batches for i in micro.sequences)
    assert done == list(range(len(lengths)))
    scaled = hr.plan(lengths, problem.replace(planner=name, semantics=semantics).rescaled(2.0))
    assert scaled.predicted_s == pytest.approx(2 * other.predicted_s)


@pytest.mark.parametrize("name", ["bucket", "packed"])
def test_groups_of_one_size(problem: hr.Problem, name: str) -> None:
    """Catches a pipeline for every launch, and a size that another would beat."""
    lengths = hr.lengths.draw("lognormal:median=400,sigma=1.5,max=65536", tokens="1Mi", seed=3)
    asked = problem.replace(planner=name)
    made = hr.plan(lengths, asked)
    assert len({len(pipeline.ranks) for pipeline in made.pipelines}) == 1
    assert (
        len({pipeline.ranks for pipeline in made.pipelines})
        == len(made.pipelines)
        < len(made.micro_batches)
    )
    for p in asked.group_sizes:
        try:
            one = hr.plan(lengths, asked.replace(sizes=(p,)))
        except InfeasiblePlan:
            continue
        assert made.predicted_s <= one.predicted_s * (1 + 1e-9)


@pytest.mark.parametrize("name", ["bucket", "packed"])
def test_sizes_that_bounds_rule_out_are_not_planned(problem: hr.Problem, name: str) -> None:
    """Catches groups of all sizes planned for many short sequences, which are quickest on the
    smallest by far: it took longer than our own plan."""
    asked = problem.replace(planner=name)
    planned = list[int]()

    def schedules(table: PriceTable, semantics: Semantics, seed: int) -> Assignment | None:
        planned.extend(table.width)
        return BASELINES[name].schedules(table, semantics, seed)

    counting = replace(BASELINES[name].named(name), schedules=schedules)
    made = hr.plan([512] * 2000, asked, generators=[counting])
    assert made.predicted_s == hr.plan([512] * 2000, asked).predicted_s
    assert len(planned) < len(asked.group_sizes) == 8


@pytest.mark.parametrize("name", NAMES)
def test_what_fits_nowhere_is_said(problem: hr.Problem, name: str) -> None:
    """Catches a traceback from within a baseline."""
    for semantics in ("free", "lockstep"):
        with pytest.raises(InfeasiblePlan, match="10,000,000 tokens"):
            hr.plan([10_000_000], problem.replace(planner=name, semantics=semantics))


def test_only_what_runs_in_one_piece(problem: hr.Problem) -> None:
    """Catches stages where a problem has none."""
    plan = hr.plan([60_000] * 4 + [500] * 50, problem)
    assert all(p.scheme.pipeline == 1 for p in plan.pipelines)
    with pytest.raises(SpecError, match="planner"):
        problem.replace(planner="buckets")
