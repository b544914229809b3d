"""Plans on groups: valid for any world, never below the bound, never worse than any baseline."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from random import Random
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.costs.group_costs import GroupCosts
from headrace.errors import InfeasiblePlan, SpecError
from headrace.planning.groups import GROUP_PLANNERS, plan_groups
from headrace.planning.groups.clock import Semantics
from planning.groups.checked import (
    batches,
    best_by_force,
    checked_s,
    plain_bound_s,
    world_costs,
)

_BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
_SEMANTICS = st.sampled_from(["free", "lockstep"])


@cache
def flexsp() -> GroupCosts:
    return GroupCosts.load(_BENCHMARKS / "published/flexsp-7b-a100.json")


def drawn(tokens: str) -> list[list[int]]:
    return json.loads((_BENCHMARKS / f"fixtures/longtail-32k-{tokens}.json").read_text())[
        "iterations"
    ]


def planned_s(costs: GroupCosts, lengths: list[int], devices: int, **options) -> float:
    """Seconds by the checker, which must be those predicted and not below the bound."""
    plan = plan_groups(costs, lengths, devices, **options)
    seconds = checked_s(costs, lengths, plan.to_json())
    assert seconds == pytest.approx(plan.predicted_s, rel=1e-9)
    assert plan.lower_bound_s <= seconds
    return seconds


@settings(max_examples=60)
@given(costs=world_costs(), lengths=batches(), devices=st.integers(1, 17), semantics=_SEMANTICS)
def test_plans_are_valid_and_never_worse(
    costs: GroupCosts, lengths: list[int], devices: int, semantics: Semantics
) -> None:
    """Would catch a sequence lost or doubled, memory exceeded, a rank in two places, a wrong
    prediction, a bound above a plan, and a plan that a baseline beats."""
    if costs.most_tokens(devices) < max(lengths):
        with pytest.raises(InfeasiblePlan):
            plan_groups(costs, lengths, devices, semantics=semantics)
        return
    best_s = planned_s(costs, lengths, devices, semantics=semantics)
    for planner in GROUP_PLANNERS[1:]:
        theirs_s = planned_s(costs, lengths, devices, semantics=semantics, planner=planner)
        assert best_s <= theirs_s * (1 + 1e-9), planner


@settings(max_examples=25)
@given(costs=world_costs(), lengths=batches(), devices=st.integers(1, 17), semantics=_SEMANTICS)
def test_memory_that_binds(
    costs: GroupCosts, lengths: list[int], devices: int, semantics: Semantics
) -> None:
    """Would catch packs that overflow, or a planner that ends without a plan, where hardly more
    than the longest sequence fits."""
    most = max(p for p in costs.sizes if p <= devices) if min(costs.sizes) <= devices else 0
    if not most:
        return
    tight = GroupCosts(
        a_s=costs.a_s, b_s=costs.b_s, c_s=costs.c_s, kappa_s=costs.kappa_s,
        cap_tokens=-(-max(lengths) // most),
    )  # fmt: skip
    planned_s(tight, lengths, devices, semantics=semantics)


@settings(max_examples=20)
@given(lengths=batches(), devices=st.integers(1, 17), semantics=_SEMANTICS)
def test_the_same_seed_gives_the_same_plan(
    lengths: list[int], devices: int, semantics: Semantics
) -> None:
    """Would catch effort counted in time, and sets whose order is chance."""
    costs = GroupCosts(
        a_s=5e-9, b_s=2e-4, c_s=0.02, cap_tokens=10**6, kappa_s={p: 1e-5 for p in range(1, 9)}
    )
    one = plan_groups(costs, lengths, devices, semantics=semantics, seed=3)
    assert plan_groups(costs, list(lengths), devices, semantics=semantics, seed=3) == one


@pytest.mark.parametrize("seed", range(24))
def test_tiny_batches_are_planned_as_well_as_by_force(seed: int) -> None:
    """Would catch a planner that misses an arrangement, and a bound above the optimum."""
    random = Random(seed)
    sizes = random.choice([(1, 2), (1, 2, 3), (1,), (2,)])
    devices = random.randint(min(sizes), 3)
    link = random.choice([0, 2e-5, 4e-4])
    costs = GroupCosts(
        a_s=random.choice([0, 5e-9]), b_s=random.choice([2e-4, 1e-5]),
        c_s=random.choice([0, 0.02, 0.5]), cap_tokens=random.choice([3000, 10**6]),
        kappa_s={p: link * (1 - 1 / p) for p in sizes},
    )  # fmt: skip
    lengths = [random.choice([random.randint(1, 3000), 1024]) for _ in range(random.randint(1, 4))]
    for semantics in ("free", "lockstep"):
        optimum_s = best_by_force(costs, lengths, devices, semantics)
        plan = plan_groups(costs, lengths, devices, semantics=semantics)
        assert plan.lower_bound_s <= optimum_s * (1 + 1e-9)
        assert plan.predicted_s == pytest.approx(optimum_s, rel=1e-9)


@pytest.mark.parametrize(
    ("tokens", "devices", "free", "lockstep"),
    [
        ("100k", 8, 1.02, 1.02),
        ("100k", 64, 1.31, 1.31),
        ("100k", 256, 1.80, 1.805),
        ("1000k", 8, 1.03, 1.06),
        ("1000k", 64, 1.03, 1.06),
        ("1000k", 256, 1.20, 1.20),
        ("4000k", 8, 1.03, 1.06),
        ("4000k", 64, 1.03, 1.06),
        ("4000k", 256, 1.03, 1.06),
    ],
)
def test_long_tailed_batches_stay_close_to_the_plain_bound(
    tokens: str, devices: int, free: float, lockstep: float
) -> None:
    """Would catch a planner that has become worse on 100 thousand to 4 million tokens."""
    costs, some = flexsp(), drawn(tokens)[: 1 if tokens == "4000k" else 3]
    limits: dict[Semantics, float] = {"free": free, "lockstep": lockstep}
    for semantics, limit in limits.items():
        ratios = [
            planned_s(costs, lengths, devices, semantics=semantics)
            / plain_bound_s(costs, lengths, devices)
            for lengths in some
        ]
        assert mean(ratios) <= limit, semantics


def test_sizes_that_are_no_powers_of_two_are_used() -> None:
    """Would catch a planner that leaves the world's remainder idle."""
    costs = GroupCosts(
        a_s=0.0, b_s=1e-3, c_s=0.0, cap_tokens=1000, kappa_s={p: 0.0 for p in range(1, 8)}
    )
    for semantics in ("free", "lockstep"):
        assert planned_s(costs, [5000], 7, semantics=semantics) == pytest.approx(5 / 7)
        assert planned_s(costs, [3000, 2000, 2000], 7, semantics=semantics) == pytest.approx(1.0)


def test_lockstep_pairs_launches_that_take_as_long() -> None:
    """Would catch the free planner under lockstep: two short launches beside one long one cost
    two steps."""
    costs = GroupCosts(a_s=0.0, b_s=1e-3, c_s=0.0, cap_tokens=1000, kappa_s={1: 0.0})
    lengths = [1000, 1000, 500, 500, 600, 400]
    assert planned_s(costs, lengths, 2, semantics="lockstep") == pytest.approx(2.0)


def test_a_giant_does_not_stretch_every_wave() -> None:
    """Would catch waves of one time where one sequence needs the whole world for long."""
    costs = GroupCosts(a_s=0.0, b_s=1e-3, c_s=0.0, cap_tokens=1000, kappa_s={1: 0.0, 4: 0.0})
    lengths = [4000, *[250] * 4]
    assert planned_s(costs, lengths, 4, semantics="lockstep") == pytest.approx(1.25)


def test_work_that_costs_nothing_is_planned() -> None:
    """Would catch a division by zero."""
    costs = GroupCosts(a_s=0.0, b_s=0.0, c_s=0.0, cap_tokens=10, kappa_s={1: 0.0, 2: 0.0})
    for semantics in ("free", "lockstep"):
        for planner in GROUP_PLANNERS:
            plan = plan_groups(costs, [20, 1, 3], 3, semantics=semantics, planner=planner)
            assert checked_s(costs, [20, 1, 3], plan.to_json()) == 0.0
            assert plan.gap == 0.0


@pytest.mark.parametrize(
    ("lengths", "devices", "options", "error", "text"),
    [
        ([], 8, {}, SpecError, "lengths of a batch: got none"),
        ([5, 0], 8, {}, SpecError, "length of sequence 1: got 0, wanted an int >= 1"),
        ([5, -3], 8, {}, SpecError, "length of sequence 1: got -3"),
        ([5], 0, {}, SpecError, "devices: got 0, wanted a whole number >= 1"),
        ([9, 32769, 9], 2, {}, InfeasiblePlan,
         "sequence 1 of 32,769 tokens: wanted at most 32,768 tokens on 2 devices (16,384 per "
         "device); 4 devices would hold it"),
        ([4194305], 999, {}, InfeasiblePlan,
         "sequence 0 of 4,194,305 tokens: wanted at most 4,194,304 tokens on 999 devices (16,384 "
         "per device); it takes 257 devices, and groups of so many have no costs"),
        ([5], 8, {"planner": "static-best"}, SpecError, "planner: got 'static-best'"),
        ([5], 8, {"semantics": "lockstp"}, SpecError,
         "semantics: got 'lockstp', wanted free or lockstep; did you mean 'lockstep'"),
    ],
)  # fmt: skip
def test_bad_input_is_named(
    lengths: list[int], devices: int, options: dict, error: type[Exception], text: str
) -> None:
    """Would catch a traceback, or an error that names neither the entry nor a way out."""
    with pytest.raises(error) as caught:
        plan_groups(flexsp(), lengths, devices, **options)
    assert str(caught.value).startswith(text)


def test_a_world_smaller_than_every_group_is_named() -> None:
    """Would catch a world that no group fits taken for one without memory."""
    costs = GroupCosts(a_s=0.0, b_s=1e-3, c_s=0.0, cap_tokens=1000, kappa_s={4: 0.0})
    with pytest.raises(InfeasiblePlan, match="devices: got 3, wanted at least 4"):
        plan_groups(costs, [10], 3)


def test_plans_say_what_binds() -> None:
    """Would catch reasons that do not follow the batch."""
    long = plan_groups(flexsp(), [32768, 50], 8)
    assert long.why[0].startswith("bound by the longest sequence: 32,768 tokens take 1.55 s")
    much = plan_groups(flexsp(), [4000] * 64, 8)
    assert much.why[0].startswith("bound by the total work")
    small = plan_groups(flexsp(), [16] * 64, 8)
    assert small.why[0].startswith("bound by what a launch costs whatever it holds: 20 ms each")
    apart = plan_groups(flexsp(), drawn("100k")[1], 64)
    assert apart.why[0].startswith("bound by long sequences")
    for plan in (long, much, small, apart):
        assert "best static: cp" in plan.explain()
        assert "% idle" in plan.explain()
        assert "gap" in str(plan)
