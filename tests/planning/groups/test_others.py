"""Planners of others, as their descriptions have them."""

from __future__ import annotations

from random import Random

import pytest

from headrace.costs.group_costs import GroupCosts
from headrace.errors import SpecError
from headrace.planning.groups import GroupPlan, Launch, plan_groups, plans_to_json
from headrace.planning.groups.baselines import BASELINES
from headrace.planning.groups.clock import jobs_s
from headrace.planning.groups.token_balance import karmarkar_karp
from headrace.planning.groups.work import Work
from headrace.spec import Lengths


def costs(**changes) -> GroupCosts:
    kappa = {1: 0.0, 2: 1e-5, 4: 2e-5, 8: 3e-5}
    given = {"a_s": 1e-8, "b_s": 1e-4, "c_s": 0.01, "cap_tokens": 1000, "kappa_s": kappa}
    return GroupCosts(**{**given, **changes})


def launched(planner: str, lengths: list[int], devices: int) -> list[tuple[tuple[int, ...], list]]:
    plan = plan_groups(costs(), lengths, devices, planner=planner)
    return [(x.ranks, [lengths[i] for i in x.sequences]) for x in plan.launches]


@pytest.mark.parametrize("semantics", ["free", "lockstep"])
def test_nobody_beats_what_prunes_them(semantics: str) -> None:
    """Would catch a bound of a baseline above its plan, which would hide a better plan."""
    random = Random(4)
    for devices in (1, 3, 8, 13):
        lengths = [random.randint(1, 900) for _ in range(25)]
        work = Work.of(costs(), Lengths.of(lengths), devices)
        for name, baseline in BASELINES.items():
            seconds = jobs_s(work, baseline.jobs(work, semantics), semantics)
            assert baseline.least_s(work) <= seconds * (1 + 1e-9), name
            assert baseline.meaning


def test_karmarkar_and_karp_balance() -> None:
    """Would catch parts joined heavy with heavy."""
    parts = karmarkar_karp([8, 7, 6, 5, 4], 2)
    assert sorted(i for part in parts for i in part) == list(range(5))
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts) == [14, 16]
    assert karmarkar_karp([5, 5, 5, 5], 4) == [[0], [1], [2], [3]]
    assert karmarkar_karp([3, 1], 1) == [[0, 1]]
    assert karmarkar_karp([], 3) == [[], [], []]


def test_token_balance_respects_memory() -> None:
    """Would catch micro-batches above the cap, which the original makes."""
    for ranks, held in launched("karmarkar-karp", [900, 600, 500, 400, 300, 200, 100], 2):
        assert sum(held) <= 1000 * len(ranks)


def test_static_takes_the_smallest_size_that_fits() -> None:
    """Would catch the best size taken for the one that a user would configure."""
    sizes = {len(ranks) for ranks, _ in launched("static", [1500, 100, 100], 8)}
    assert sizes == {2}
    plan = plan_groups(costs(), [1500], 8, planner="best-static")
    assert plan.strategy == "1*cp8"


def test_dp_balanced_gives_every_group_as_many_packs() -> None:
    """Would catch packs in another order than the batch's, or groups with fewer launches."""
    found = launched("dp-balanced", [600, 300, 300, 500, 100, 2, 3], 4)
    assert found == [((0,), [600, 300]), ((1,), [500, 300, 100]), ((2,), [3]), ((3,), [2])]
    assert len(launched("dp-balanced", [500] * 9, 4)) == 8


def test_hybrid_runs_every_sequence_alone() -> None:
    """Would catch packs, or ranks left idle that could have been lent."""
    found = launched("hybrid-cp", [3000, 800, 700, 600], 8)
    assert all(len(held) == 1 for _, held in found)
    by_length = {held[0]: len(ranks) for ranks, held in found}
    assert by_length[3000] == 4
    assert sum(by_length.values()) > 7


def test_buckets_hold_like_lengths_and_packs_hold_all_that_fits() -> None:
    """Would catch a bucket of unlike lengths, or packs by bucket."""
    lengths = [900, 880, 120, 110, 100, 30, 20]
    for _, held in launched("bucket", lengths, 2):
        assert max(held) <= 2 * min(held)
    assert len(launched("packed", lengths, 2)) == 3


def test_accumulation_counts_devices() -> None:
    """Would catch idle time of a large group counted as that of one rank: eight ranks, a bucket
    that needs four, one of which every group works alone."""
    lengths = [4000, *[500] * 8]
    found = launched("dcp", lengths, 8)
    ranks_of_long = next(ranks for ranks, held in found if held == [4000])
    short = [ranks for ranks, held in found if held != [4000]]
    assert not {rank for ranks in short for rank in ranks} & set(ranks_of_long)
    assert len(set(short)) == 4


def test_plans_are_checked() -> None:
    """Would catch a plan that loses a sequence handed on."""
    plan = plan_groups(costs(), [5, 6], 2)
    fields = {
        "lengths": plan.lengths, "devices": 2, "semantics": "free", "predicted_s": 1.0,
        "lower_bound_s": 1.0, "planner": "none",
    }  # fmt: skip

    def launch(ranks: tuple[int, ...], sequences: tuple[int, ...]) -> Launch:
        return Launch(ranks=ranks, sequences=sequences)

    for launches, text in (
        ([launch((0,), (0,))], r"sequences \[1\] missing or doubled"),
        ([launch((0,), (0, 1)), launch((1,), (1,))], r"sequences \[1\] missing or doubled"),
        ([launch((0, 2), (0, 1))], "ranks of launch 0"),
        ([launch((1, 1), (0, 1))], "ranks of launch 0"),
        ([launch((1,), (0, 1)), launch((0,), ())], "launch 1: got no sequence"),
    ):
        with pytest.raises(SpecError, match=text):
            GroupPlan(**fields, launches=tuple(launches))
    with pytest.raises(SpecError, match="semantics: got 'slow'"):
        GroupPlan(**{**fields, "semantics": "slow"}, launches=plan.launches)


def test_a_plan_file_has_an_iteration_for_every_plan() -> None:
    """Would catch a file that no checker can read."""
    plans = [plan_groups(costs(), lengths, 3) for lengths in ([5], [7, 800])]
    value = plans_to_json(plans, [0.5, 0.25])
    assert (value["kind"], value["devices"], value["semantics"]) == ("groups", 3, "free")
    assert [item["planning_s"] for item in value["iterations"]] == [0.5, 0.25]
    assert [item["predicted_s"] for item in value["iterations"]] == [x.predicted_s for x in plans]
    other = plan_groups(costs(), [5], 4)
    with pytest.raises(SpecError, match="plans of a file: got 2 worlds"):
        plans_to_json([plans[0], other])
