"""Every planner by its name, on any costs: a plan, or a refusal that says for what it is."""

from __future__ import annotations

from functools import cache
from typing import get_args

import pytest

import headrace as hr
from headrace.config.planner_config import PlannerConfig
from headrace.costs import published, synthetic_costs
from headrace.errors import SpecError
from headrace.planners import BASELINES, PLANNERS
from headrace.planning import Problem
from headrace.planning.problem import _PLANNERS as NAMES
from headrace.simulator import peak_bytes, step_s
from headrace.spec import Plan
from headrace.units import GIB

METHODS = ("local", "ulysses_z", "metp")
LENGTHS = [9000, 4000, 3000, 2500, 900, 800, 700, 300, 200, 100, 50, 50, 40]


@cache
def posed(world: str) -> Problem:
    """A problem of every kind of costs, and of steps in lockstep."""
    kind, _, semantics = world.partition(" ")
    return {
        "model": Problem(costs=synthetic_costs(8, 4)),
        "tight": Problem(costs=synthetic_costs(8, 4, memory_bytes=3 * GIB, methods=METHODS)),
        "lists": Problem(
            costs=synthetic_costs(8, 4, methods=METHODS), layers=("ulysses_z", "metp") * 2
        ),
        "groups": Problem(costs=published("flexsp-7b-a100"), devices=16),
        "pipelines": Problem(costs=published("hydraulis-7b"), devices=32),
    }[kind].replace(semantics=semantics or "free")


WORLDS = (
    "model",
    "tight",
    "model lockstep",
    "tight lockstep",
    "groups",
    "groups lockstep",
    "pipelines",
)
REFUSED = {("paradyse", "groups"), ("paradyse", "groups lockstep"), ("paradyse", "pipelines")}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", sorted(PLANNERS))
def test_every_name_plans_any_costs(name: str, world: str) -> None:
    """Catches a planner that knows one kind of costs only, one that loses sequences, exceeds memory
    or is timed by another clock, and one that beats ours by more than a search's luck."""
    problem = posed(world).replace(planner=name)
    if (name, world) in REFUSED:
        with pytest.raises(SpecError, match=f"planner '{name}'.*costs of a model"):
            hr.plan(LENGTHS, problem)
        return
    made = hr.plan(LENGTHS, problem)
    assert made.planner == name
    assert made.semantics == problem.semantics
    held = sorted(i for micro in made.micro_batches for i in micro.sequences)
    assert held == list(range(len(LENGTHS)))
    assert made.lower_bound_s <= made.predicted_s * (1 + 1e-9)
    assert made.predicted_s >= hr.plan(LENGTHS, posed(world)).predicted_s * 0.98
    seconds(problem, made)


def seconds(problem: Problem, made: Plan) -> None:
    """The plan on the clock of its costs, and its memory."""
    if problem.is_published:
        assert hr.simulate(made, problem).seconds == pytest.approx(made.predicted_s)
        return
    if made.semantics == "free":
        assert step_s(made, problem.model) == pytest.approx(made.predicted_s)
        assert max(peak_bytes(made, problem.model)) <= problem.model.capacity_bytes


def test_names_are_one_list() -> None:
    """Catches a planner that a problem or a configuration does not know."""
    assert set(NAMES) == set(PLANNERS)
    annotation = PlannerConfig.model_fields["name"].annotation
    assert set(get_args(annotation)) == set(PLANNERS)
    assert set(BASELINES) - set(PLANNERS) == {"best-static", "switching"}


def test_one_option_for_all_layers() -> None:
    """Catches a planner of sizes alone that mixes layers: within a micro-batch all are alike, and
    on groups of several ranks there is one option for all."""
    made = hr.plan(LENGTHS, posed("tight").replace(planner="flexsp"))
    used = set()
    for micro in made.micro_batches:
        options = {option for option, _ in micro.layers.counts}
        assert len(options) == 1
        if len(made.pipelines[micro.pipeline].ranks) > 1:
            used |= options
    assert len(used) <= 1


def test_layers_of_algorithm_1() -> None:
    """Catches layers that our own mixtures chose: a micro-batch mixes two options at most, on one
    group size."""
    made = hr.plan(LENGTHS, posed("tight").replace(planner="paradyse"))
    assert len({len(pipeline.ranks) for pipeline in made.pipelines}) == 1
    assert all(len(micro.layers.counts) <= 2 for micro in made.micro_batches)


def test_listed_layers() -> None:
    """Catches layers by Algorithm 1, or sizes, that do not keep to a list of methods."""
    problem = posed("lists")
    made = hr.plan(LENGTHS, problem.replace(planner="flexsp"))
    assert all(
        problem.allows(len(made.pipelines[micro.pipeline].ranks), micro.layers)
        for micro in made.micro_batches
    )
    with pytest.raises(hr.errors.InfeasiblePlan, match="planner paradyse"):
        hr.plan(LENGTHS, problem.replace(planner="paradyse", sizes=(2, 4, 8)))
