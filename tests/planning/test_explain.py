"""Reasons."""

from __future__ import annotations

import pytest

from headrace.costs import FORMULA_METHODS, ExchangeCost, synthetic_costs
from headrace.costs.group_costs import GroupCosts
from headrace.errors import InfeasiblePlan
from headrace.planning import Problem, plan
from headrace.spec import Lengths
from headrace.units import GIB, seconds_text
from planning.worlds import log_normal


def test_the_longest_sequence_binds() -> None:
    """Catches blaming the work when one sequence is the whole step."""
    problem = Problem(costs=synthetic_costs(4), devices=4)
    why = plan(problem, Lengths.of([150_000, 10])).why
    assert why[0].startswith("bound by the longest sequence: 150,000 tokens take")
    assert "on cp4" in why[0]


def test_the_work_binds() -> None:
    """Catches blaming the longest sequence when all ranks are full."""
    problem = Problem(costs=synthetic_costs(2), devices=2)
    made = plan(problem, log_normal(80, 1, longest=4000))
    assert made.why[0].startswith("bound by the total work: ")
    assert "nothing is recomputed: everything fits" in made.why


def test_memory_binds() -> None:
    """Catches hiding that plans recompute."""
    problem = Problem(costs=synthetic_costs(2, memory_bytes=2 * GIB), devices=2)
    made = plan(problem, Lengths.of([6000] * 8))
    levels = {o.recompute for m in made.micro_batches for o in m.layers.options}
    assert levels != {"none"}
    assert made.why[0].startswith("bound by memory: 2 GiB of a rank")
    assert any(text.startswith("recomputes to fit memory: ") for text in made.why)


def test_the_exchange_binds() -> None:
    """Catches blaming the batch for a step that is all pull and push."""
    costs = synthetic_costs(2).replace(exchange_s=ExchangeCost(pull_s=10.0))
    why = plan(Problem(costs=costs, devices=2), Lengths.of([64])).why
    assert why[0] == "bound by pull, push and update: 10 s of every step"


@pytest.mark.parametrize(("count", "told"), [(1, "1 of 3 ranks is idle"), (2, "2 of 3 ranks are")])
def test_idle_ranks_are_counted(count: int, told: str) -> None:
    """Catches a verb for many beside one rank."""
    problem = Problem(costs=synthetic_costs(3, sizes=(1,)), devices=3)
    made = plan(problem, Lengths.of([640] * (3 - count)))
    assert any(text.startswith(told) for text in made.why), made.why


def test_one_device_is_one() -> None:
    """Catches a noun for many beside one device or token."""
    costs = GroupCosts(a_s=0, b_s=1e-4, c_s=1e-3, cap_tokens=1, kappa_s={1: 0.0, 2: 0.0})
    with pytest.raises(InfeasiblePlan, match=r"at most 1 token on 1 device \("):
        plan(Problem(costs=costs, devices=1), Lengths.of([2]))


def test_the_best_static_plan_is_named_with_what_it_costs() -> None:
    """Catches seconds by another clock than the prediction's, and reasons of another plan."""
    costs = synthetic_costs(8).replace(scale=3.0)
    problem, lengths = Problem(costs=costs), Lengths.of([60_000] + [3000] * 40)
    made = plan(problem, lengths)
    steps = {
        p: plan(problem.replace(planner="static", static_size=p), lengths).predicted_s
        for p in problem.group_sizes
    }
    p = min(steps, key=lambda size: steps[size])
    ratio = steps[p] / made.predicted_s
    named = next(text for text in made.why if text.startswith("best static: "))
    assert named == f"best static: cp{p} everywhere, {seconds_text(steps[p])} ({ratio:.3g}x)"
    assert made.explain().count("\n") == len(made.why) - 1


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_that_is_static_says_so(seed: int) -> None:
    """Catches a static plan that claims to be quicker than itself."""
    problem = Problem(costs=synthetic_costs(2, memory_bytes=3 * GIB))
    made = plan(problem, log_normal(6, seed, longest=9000))
    best = plan(problem.replace(planner="static"), log_normal(6, seed, longest=9000))
    text = next(text for text in made.why if "static" in text)
    if made.predicted_s == best.predicted_s:
        assert text.startswith("the best static plan: ")
    else:
        assert text.startswith("best static: ")


def test_methods_are_named_where_there_was_a_choice() -> None:
    """Catches a line that says nothing on problems of one method, and none on those of several."""
    costs = synthetic_costs(4, memory_bytes=3 * GIB, methods=FORMULA_METHODS)
    problem, lengths = Problem(costs=costs, devices=4), Lengths.of([30_000] * 2 + [900] * 9)
    made = plan(problem, lengths)
    line = next(reason for reason in made.why if reason.startswith("layers: "))
    sizes = {len(p.ranks) for p in made.pipelines} - {1}
    for p in sizes:
        used = [m for m in made.micro_batches if len(made.pipelines[m.pipeline].ranks) == p]
        assert any(f"{p} ranks {micro.layers}" in line for micro in used)
    assert "1 rank " not in line, "one rank is always local"
    only = plan(Problem(costs=costs, devices=4, layers=("ulysses_z",)), lengths)
    assert not any("layers: " in reason for reason in only.why)


def test_one_rank_has_no_other_strategy() -> None:
    """Catches another strategy that is the plan itself."""
    made = plan(Problem(costs=synthetic_costs(1), devices=1), Lengths.of([100, 200]))
    assert not any("next strategy" in reason for reason in made.why)
    assert made.gap == pytest.approx(0, abs=0.02)
