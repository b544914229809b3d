"""The parts of the planners of groups, each against a plainer way to the same."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.costs.group_costs import GroupCosts
from headrace.planning.groups.bounds import lower_bound
from headrace.planning.groups.chains import chains
from headrace.planning.groups.clock import jobs_s, launches_s
from headrace.planning.groups.drafts import by_deadline, by_target
from headrace.planning.groups.filling import Filler
from headrace.planning.groups.packing import launches_needed, packed
from headrace.planning.groups.scattered import scattered
from headrace.planning.groups.tree import Tree
from headrace.planning.groups.tree_search import improve
from headrace.planning.groups.wave import sorted_into_waves, wave_jobs, waves_s
from headrace.planning.groups.waves import plan_waves
from headrace.planning.groups.work import Work
from headrace.spec import Lengths
from planning.groups.checked import clock_s, launch_s, plain_bound_s


def work_of(lengths: list[int], devices: int, **changes) -> Work:
    given = {"a_s": 5e-9, "b_s": 2e-4, "c_s": 0.02, "cap_tokens": 16384}
    kappa = {1: 0.0, 2: 2e-5, 4: 2e-5, 8: 4e-4}
    costs = GroupCosts(**{**given, "kappa_s": kappa, **changes})
    return Work.of(costs, Lengths.of(lengths), devices)


def long_tailed(sequences: int, seed: int) -> list[int]:
    random = Random(seed)
    return [min(32768, 16 + int(random.lognormvariate(6.5, 1.5))) for _ in range(sequences)]


launches = st.lists(
    st.tuples(st.sets(st.integers(0, 4), min_size=1).map(tuple), st.floats(0.1, 9)), max_size=12
)


@given(launches=launches, semantics=st.sampled_from(["free", "lockstep"]))
def test_the_clock_agrees_with_one_that_runs_queues(launches: list, semantics: str) -> None:
    """Would catch launches that overtake on a shared rank, and steps counted by launch."""
    if launches:
        assert launches_s(5, launches, semantics) == pytest.approx(clock_s(5, launches, semantics))


@given(
    tokens=st.lists(st.integers(1, 100), max_size=40).map(lambda some: sorted(some)[::-1]),
    cap=st.integers(100, 300),
)
def test_packs_hold_everything_in_few_launches(tokens: list[int], cap: int) -> None:
    """Would catch a pack above its cap, a sequence lost, and launches that could be joined."""
    packs = packed(tokens, range(len(tokens)), cap)
    assert sorted(i for pack in packs for i in pack) == list(range(len(tokens)))
    sums = sorted(sum(tokens[i] for i in pack) for pack in packs)
    assert all(total <= cap for total in sums)
    assert all(a + b > cap for a, b in pairwise(sums))
    assert launches_needed(tokens, range(len(tokens)), cap) == len(packs)


def test_work_is_the_formula() -> None:
    """Would catch a batch priced by its order in memory, or sizes beyond the world."""
    lengths = [50, 20000, 700]
    work = work_of(lengths, 5)
    assert work.sizes == (1, 2, 4)
    assert [lengths[i] for i in work.order] == list(work.tokens) == [20000, 700, 50]
    for row, p in enumerate(work.sizes):
        for i, n in enumerate(work.tokens):
            alone_s = launch_s(work.costs, [n], p) if n <= 16384 * p else float("inf")
            assert work.seconds[row, i] + work.c_s == pytest.approx(alone_s)
    assert work.launch_s(2, [0, 2]) == pytest.approx(launch_s(work.costs, [20000, 50], 2))


@pytest.mark.parametrize("devices", [4, 8, 64, 256])
def test_the_bound_is_never_below_the_plain_one(devices: int) -> None:
    """Would catch a bound that forgets the constant, or the longest sequence."""
    for seed in range(5):
        work = work_of(long_tailed(40, seed), devices)
        bound = lower_bound(work)
        plain_s = plain_bound_s(work.costs, work.tokens, devices)
        assert bound.seconds >= plain_s * (1 - 1e-9)
        assert bound.longest_s <= bound.seconds * (1 + 1e-9)


def test_sequences_that_cannot_share_a_rank_raise_the_bound() -> None:
    """Would catch a bound by areas alone: three sequences of one second on two ranks."""
    work = work_of([1000] * 3, 2, a_s=0.0, b_s=1e-3, c_s=0.0, kappa_s={1: 0.0})
    assert lower_bound(work).seconds == pytest.approx(2.0)


def test_chains_are_maximal() -> None:
    """Would catch blocks of sizes that overlap without containing each other."""
    sizes = (1, 2, 3, 4, 6, 12)
    found = [tuple(sizes[row] for row in rows) for rows in chains(sizes)]
    assert found == [(1, 3, 6, 12), (1, 2, 6, 12), (1, 2, 4, 12)]
    assert chains((2, 5)) == [(1,), (0,)]
    assert len(chains(tuple(range(1, 257)))) == 24


@pytest.mark.parametrize("devices", [3, 8, 12, 17])
def test_drafts_and_steps_are_exact(devices: int) -> None:
    """Would catch a tree whose sums are not the clock's, a draft that loses a sequence, and a
    search that makes a schedule worse."""
    work = work_of(long_tailed(60, devices), devices)
    rows, bound_s = range(len(work.sizes)), lower_bound(work).seconds
    for members in (
        by_target(work, rows, bound_s * 1.1),
        by_deadline(work, rows, bound_s * 1.1, range(60))[1],
    ):
        before_s = Tree(work, rows, members).seconds
        seconds, better = improve(work, rows, members, target_s=bound_s, tries=60, random=Random(1))
        assert seconds <= before_s
        for some, wanted in ((members, before_s), (better, seconds)):
            assert sorted(i for held in some.values() for i in held) == list(range(60))
            jobs = [
                (tuple(range(k * p, (k + 1) * p)), launch)
                for p, k in sorted(some, reverse=True)
                for launch in packed(work.tokens, some[p, k], work.costs.cap_tokens * p)
            ]
            assert jobs_s(work, jobs, "free") == pytest.approx(wanted, rel=1e-9)


def test_scattered_groups_leave_no_rank_out() -> None:
    """Would catch groups that wait for a rank that another size keeps busy: two groups of two and
    one of three on seven ranks."""
    kappa = {2: 0.0, 3: 0.0}
    work = work_of([3000, 2000, 2000], 7, a_s=0.0, b_s=1e-3, c_s=0.0, cap_tokens=1000,
                   kappa_s=kappa)  # fmt: skip
    jobs = scattered(work, 1.0)
    assert jobs_s(work, jobs, "free") == pytest.approx(1.0)
    assert sorted(rank for ranks, _ in jobs for rank in ranks) == list(range(7))


def test_groups_are_filled_to_their_time_and_tokens() -> None:
    """Would catch groups beyond their time or their memory, or ranks beyond the world."""
    work = work_of(long_tailed(80, 2), 16)
    filler = Filler.of(work)
    for join_any in (True, False):
        groups, left = filler.fill(2.5, 16, range(80), join_any=join_any, whole=False)
        for some in (groups, filler.levelled(groups, 16)):
            assert sum(work.sizes[row] for row, _ in some) <= 16
            for row, held in some:
                assert sum(work.tokens[i] for i in held) <= 16384 * work.sizes[row]
            placed = sorted(i for _, held in some for i in held)
            assert sorted(placed + left) == list(range(80))
        assert all(filler.group_s(group) <= 2.5 * (1 + 1e-9) for group in groups)
        levelled_s = max(filler.group_s(group) for group in filler.levelled(groups, 16))
        assert levelled_s <= max(filler.group_s(group) for group in groups) * 1.1


@pytest.mark.parametrize("devices", [2, 5, 8, 16])
def test_waves_cost_what_the_clock_says(devices: int) -> None:
    """Would catch waves whose launches the clock puts into later steps."""
    for seed in range(4):
        work = work_of(long_tailed(30, seed), devices)
        filler = Filler.of(work)
        waves = plan_waves(filler, bound_s=lower_bound(work).seconds, seed=0)
        jobs = wave_jobs(work, waves)
        assert jobs_s(work, jobs, "lockstep") <= waves_s(filler, waves) * (1 + 1e-9)


def test_groups_that_fit_no_wave_are_refused() -> None:
    """Would catch a wave with more ranks than the world."""
    work = work_of([100] * 4, 3)
    filler = Filler.of(work)
    pairs = [(1, [i]) for i in range(3)]
    assert sorted_into_waves(filler, pairs, 2) is None
    waves = sorted_into_waves(filler, pairs, 3)
    assert waves is not None
    assert [len(wave) for wave in waves] == [1, 1, 1]
