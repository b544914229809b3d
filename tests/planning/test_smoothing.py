"""Layers of the step before."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.costs import CostModel, ExchangeCost, synthetic_costs
from headrace.errors import InfeasiblePlan
from headrace.planning import Problem, plan
from headrace.simulator import peak_bytes, step_s
from headrace.spec import LayerPlan, Lengths, Plan
from headrace.units import GIB
from planning.worlds import batches, worlds


def one_rank(gamma: float) -> Problem:
    costs = synthetic_costs(1, layers=8, memory_bytes=5 * GIB)
    return Problem(costs=costs, devices=1, smoothing=gamma)


def layers_of(made: Plan) -> list[str]:
    return [str(micro.layers) for micro in made.micro_batches]


def step(problem: Problem, tokens: int, previous: Plan | None = None) -> Plan:
    return plan(problem, Lengths(tokens=(tokens,)), previous=previous)


def test_layers_stay_while_others_are_hardly_quicker() -> None:
    """Catches layers that change with every batch, and layers that stay however slow they are."""
    none, some = one_rank(0.0), one_rank(0.05)
    frontier = none.frontier(1, "replicated")
    long = step(none, frontier.caps[1])
    assert layers_of(long) != ["8*local"]
    short = step(none, frontier.caps[0])
    assert layers_of(short) == ["8*local"]
    assert layers_of(step(none, frontier.caps[0], long)) == ["8*local"], "no smoothing"
    assert layers_of(step(some, frontier.caps[0], None)) == ["8*local"], "nothing before"
    kept = step(some, frontier.caps[0], long)
    assert layers_of(kept) == layers_of(long)
    assert kept.why[-1] == "keeps layers of the step before in 1 of 1 micro-batches"
    assert short.predicted_s < kept.predicted_s <= short.predicted_s * 1.05
    thrifty = step(none, frontier.most_tokens)
    assert layers_of(step(some, frontier.caps[0], thrifty)) == ["8*local"], "too slow by now"


def test_layers_that_no_longer_fit_or_are_no_longer_allowed_go() -> None:
    """Catches a step that runs out of memory for the sake of its predecessor."""
    some = one_rank(0.9)
    frontier = some.frontier(1, "replicated")
    short = step(some, 100)
    longer = step(some, frontier.caps[0] + 1, short)
    assert layers_of(longer) != ["8*local"]
    assert layers_of(longer) == layers_of(step(one_rank(0.0), frontier.caps[0] + 1))
    other = replace(some, recompute=("full",))
    assert layers_of(step(other, 100, short)) == ["8*local+full"]
    foreign = short.replace(
        micro_batches=(replace(short.micro_batches[0], layers=LayerPlan.parse("4*local")),)
    )
    assert layers_of(step(some, 100, foreign)) == ["8*local"], "another model's"


def test_the_quickest_of_the_layers_before_stays() -> None:
    """Catches the first one found in place of the best."""
    some = one_rank(0.5)
    layers = [LayerPlan.parse(t) for t in ("8*local+full", "1*local+full 7*local", "8*local+full")]
    three = plan(some, Lengths(tokens=(10, 10, 10)))
    before = three.replace(
        micro_batches=tuple(
            replace(three.micro_batches[0], sequences=(i,), layers=each)
            for i, each in enumerate(layers)
        )
    )
    assert layers_of(step(some, 1000, before)) == ["1*local+full 7*local"]


@settings(max_examples=30, deadline=None)
@given(worlds(), batches(most=10), batches(most=10), st.sampled_from([0.05, 0.5]))
def test_at_most_gamma_is_lost(
    costs: CostModel, first: Lengths, second: Lengths, gamma: float
) -> None:
    """Catches plans over memory, in the wrong token order or slower than allowed, and a result
    that depends on more than the plan before."""
    problem = Problem(costs=costs, devices=costs.cluster.devices, smoothing=gamma)
    try:
        before, free = plan(problem, first), plan(problem, second)
    except InfeasiblePlan:
        return
    made = plan(problem, second, previous=before)
    again = plan(replace(problem), second, previous=Plan.from_json(before.to_json()))
    assert made == again
    bare = costs.replace(exchange_s=ExchangeCost())
    assert step_s(made, bare) <= step_s(free, bare) * (1 + gamma) * 1.000001
    assert made.lower_bound_s <= made.predicted_s
    assert max(peak_bytes(made, costs)) <= costs.capacity_bytes
    for micro in made.micro_batches:
        width = made.pipelines[micro.pipeline].scheme.width
        assert micro.order == costs.order_of(width, micro.layers)


def test_a_plan_is_its_own_successor() -> None:
    """Catches smoothing that changes what it should keep."""
    some = one_rank(0.1)
    made = step(some, some.frontier(1, "replicated").caps[2])
    again = step(some, made.lengths.longest, made)
    assert again.micro_batches == made.micro_batches
    assert again.why == made.why
    assert made.predicted_s == pytest.approx(again.predicted_s)
