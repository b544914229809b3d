"""Lockstep with layer plans: all ranks meet at every layer, as under full sharding."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.costs import FORMULA_METHODS, CostModel, synthetic_costs
from headrace.errors import InfeasiblePlan
from headrace.planning import Problem, plan
from headrace.simulator import step_s
from headrace.spec import Lengths, Plan
from headrace.units import GIB
from planning.worlds import batches, log_normal, worlds


def waves_s(made: Plan, costs: CostModel) -> float:
    """The sum over the waves of their slowest micro-batch, with the world's gather on each layer,
    worked out from the costs of layers alone."""
    world = max(costs.working_bytes)
    gather_s = sum(costs.gather_s.get(world, (0.0, 0.0))) * costs.scale
    done, waves = [0] * made.devices, list[float]()
    for micro in made.micro_batches:
        ranks = made.pipelines[micro.pipeline].ranks
        seconds = sum(costs.micro_batch_s(made.tokens_of(micro), len(ranks), micro.layers))
        seconds += gather_s * len(micro.layers.options)
        wave = max(done[rank] for rank in ranks)
        waves += [0.0] * (wave + 1 - len(waves))
        waves[wave] = max(waves[wave], seconds)
        for rank in ranks:
            done[rank] = wave + 1
    return sum(waves) + costs.exchange_s.update_s * costs.scale


def check(made: Plan, costs: CostModel) -> None:
    assert made.semantics == "lockstep"
    held = Counter(i for micro in made.micro_batches for i in micro.sequences)
    assert held == Counter(range(len(made.lengths)))
    assert made.predicted_s == pytest.approx(waves_s(made, costs), rel=1e-9)
    assert made.lower_bound_s <= made.predicted_s
    world = max(costs.working_bytes)
    for micro in made.micro_batches:
        p = len(made.pipelines[micro.pipeline].ranks)
        needed = costs.micro_batch_bytes(sum(made.tokens_of(micro)), p, micro.layers, "replicated")
        needed -= costs.working_bytes[p]["replicated"]
        needed += costs.held_bytes({world}, "sharded")
        assert needed <= costs.capacity_bytes
    # What is simulated, drawn and recorded is what was planned.
    assert hr.simulate(made, costs).seconds == pytest.approx(made.predicted_s, rel=1e-9)
    assert step_s(made, costs) == pytest.approx(made.predicted_s, rel=1e-9)
    assert max(hr.peak_bytes(made, costs)) <= costs.capacity_bytes


@settings(max_examples=40, deadline=None)
@given(costs=worlds(), lengths=batches(most=20), seed=st.integers(0, 3))
def test_any_batch_in_any_world(costs: CostModel, lengths: Lengths, seed: int) -> None:
    """Catches waves whose seconds are not their slowest micro-batch's, memory counted as if weights
    were whole, and a plan that a static one in lockstep beats."""
    problem = Problem(costs=costs, semantics="lockstep")
    try:
        made = plan(problem, lengths, seed=seed)
    except InfeasiblePlan:
        return
    check(made, costs)
    for p in problem.group_sizes:
        try:
            static = plan(problem.replace(planner="static", static_size=p), lengths)
        except InfeasiblePlan:
            continue
        check(static, costs)
        assert made.predicted_s <= static.predicted_s * (1 + 1e-9)


def test_levels_follow_the_room_of_each_micro_batch() -> None:
    """Catches waves with one recompute level for all micro-batches."""
    costs = synthetic_costs(4, layers=8, memory_bytes=2 * GIB, methods=FORMULA_METHODS)
    made = plan(Problem(costs=costs, semantics="lockstep"), log_normal(120, 1, longest=30_000))
    check(made, costs)
    assert len({str(micro.layers) for micro in made.micro_batches}) > 1
    levels = {o.recompute for micro in made.micro_batches for o in micro.layers.options}
    assert len(levels) > 1


def test_plenty_of_memory_recomputes_nothing() -> None:
    """Catches rows that are slower taken where the quickest fits."""
    costs = synthetic_costs(4, memory_bytes=400 * GIB)
    made = plan(Problem(costs=costs, semantics="lockstep"), log_normal(60, 2, longest=20_000))
    check(made, costs)
    assert {o.recompute for m in made.micro_batches for o in m.layers.options} == {"none"}


def test_what_fits_nowhere_is_said() -> None:
    """Catches an error from the depths where full sharding leaves no room."""
    costs = synthetic_costs(2, memory_bytes=GIB)
    with pytest.raises(InfeasiblePlan, match="on any group in lockstep"):
        plan(Problem(costs=costs, semantics="lockstep"), Lengths.of([10**6]))
