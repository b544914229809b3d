"""Static plans, and batches that do not fit."""

from __future__ import annotations

import pytest

from headrace.costs import Exchange, synthetic_costs
from headrace.errors import InfeasiblePlan, SpecError
from headrace.planning import Problem, max_length_static, plan, static_plan
from headrace.planning.baselines import best_static
from headrace.planning.sizing import Batch
from headrace.simulator import step_s
from headrace.spec import Architecture, Lengths
from headrace.units import GIB


def test_every_sequence_on_groups_of_exactly_p() -> None:
    """Catches a baseline that is smarter than a user's configuration, or that overlaps groups."""
    problem = Problem(costs=synthetic_costs(7), devices=7)
    made = static_plan(problem, Lengths.of([100] * 20 + [9000]), 3)
    assert {p.ranks for p in made.pipelines} == {(0, 1, 2), (3, 4, 5)}
    assert made.planner == "static-cp3"
    loads = [0, 0]
    for micro in made.micro_batches:
        loads[micro.pipeline] += len(micro.sequences)
    assert sorted(loads) == [1, 20], "longest first, to the group that is free first"
    with pytest.raises(SpecError, match="group size: got 9"):
        static_plan(problem, Lengths.of([3]), 9)


def test_the_careful_user_takes_the_smallest_size_that_fits() -> None:
    """Catches the largest size, or one that cannot hold the longest sequence of the corpus."""
    problem = Problem(costs=synthetic_costs(8, memory_bytes=8 * GIB), devices=8)
    p = max_length_static(problem, 100_000)
    assert 1 < p < 8
    static_plan(problem, Lengths.of([100_000]), p)
    with pytest.raises(InfeasiblePlan):
        static_plan(problem, Lengths.of([100_000]), p - 1)
    assert max_length_static(problem, 10) == 1


def test_the_best_static_plan_is_the_best_of_all() -> None:
    """Catches pruning by a bound that is no bound."""
    for memory_gib, longest in ((2, 20_000), (40, 150_000)):
        problem = Problem(costs=synthetic_costs(6, memory_bytes=memory_gib * GIB), devices=6)
        batch = Batch.of(Lengths.of([longest, *range(50, 3000, 90)]))
        found = best_static(problem, batch)
        bare, seconds = problem.costs.replace(exchange_s=Exchange()), []
        for p in problem.group_sizes:
            try:
                seconds.append(step_s(static_plan(problem, batch.lengths, p), bare))
            except InfeasiblePlan:
                continue
        assert found.seconds == pytest.approx(min(seconds))


def test_what_does_not_fit_says_by_how_much_and_what_would() -> None:
    """Catches an error from which nobody learns what to change."""
    problem = Problem(costs=synthetic_costs(4, memory_bytes=3 * GIB), devices=4)
    with pytest.raises(InfeasiblePlan) as caught:
        plan(problem, Lengths.of([50, 400_000, 60]))
    text = str(caught.value)
    assert text.startswith("sequence 1 of 400,000 tokens does not fit: got ")
    assert "GiB on cp4 with ulysses_z+full and sharded weights, wanted at most 3 GiB" in text
    limit = int(text.split("context of at most ")[1].split(" ")[0].replace(",", ""))
    plan(problem, Lengths.of([50, limit, 60]))
    with pytest.raises(InfeasiblePlan):
        plan(problem, Lengths.of([50, limit + 1, 60]))
    ranks = int(text.split("about ")[1].split(" ")[0])
    wider = synthetic_costs(ranks, memory_bytes=3 * GIB, sizes=(1, ranks))
    plan(Problem(costs=wider, devices=ranks), Lengths.of([50, 400_000, 60]))
    assert "recompute" not in text


def test_forbidden_recomputation_is_a_way_out() -> None:
    """Catches advice to buy ranks where recomputing would do."""
    costs = synthetic_costs(2, layers=16, memory_bytes=16 * GIB)
    problem = Problem(costs=costs, devices=2, recompute=("none",))
    with pytest.raises(InfeasiblePlan, match="recompute 'full'"):
        plan(problem, Lengths.of([60_000]))
    plan(Problem(costs=costs, devices=2), Lengths.of([60_000]))


def test_a_model_that_does_not_fit_by_itself() -> None:
    """Catches advice to shorten the context when not even one token fits."""
    problem = Problem(costs=synthetic_costs(2, memory_bytes=GIB // 4), devices=2)
    with pytest.raises(InfeasiblePlan, match="a smaller model") as caught:
        plan(problem, Lengths.of([10]))
    assert "context" not in str(caught.value)


def test_positions_limit_the_context() -> None:
    """Catches planning sequences that the model has no positions for."""
    architecture = Architecture.preset("gpt-tiny", positions=512)
    problem = Problem(costs=synthetic_costs(2, architecture=architecture), devices=2)
    plan(problem, Lengths.of([512]))
    with pytest.raises(InfeasiblePlan, match=r"513 positions, wanted at most the model's 512"):
        plan(problem, Lengths.of([5, 513]))
