"""Waves: valid for any world, close to the bound, no worse than they were."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.costs.group_costs import GroupCosts
from headrace.planning import Problem, plan
from headrace.planning.batch import PriceTable
from headrace.planning.exact_waves import exact_waves
from headrace.planning.schedule import Assignment, launch_s
from headrace.planning.wave_bounds import wave_bound_s
from headrace.planning.waves import WaveFiller, Waves, sorted_into_waves, waves
from headrace.spec import Lengths
from planning.group_worlds import batches, best_by_force, world_costs
from planning.tables import bound_s, checked_s, fixture, flexsp, group_table
from spread import whole

BEFORE = json.loads((Path(__file__).parent / "others.json").read_text())["waves"]


def planned(table: PriceTable, seed: int = 0) -> Assignment:
    found = waves(table, bound_s(table), seed=seed, effort=Waves().effort)
    assert found is not None
    assert found.semantics == "lockstep"
    assert checked_s(found) == pytest.approx(found.seconds, rel=1e-9)
    assert bound_s(table) <= found.seconds * (1 + 1e-9)
    assert wave_bound_s(table, 0.0, 3 * found.seconds) <= found.seconds * (1 + 1e-9)
    return found


@settings(max_examples=50, deadline=None)
@given(
    costs=world_costs(),
    lengths=batches(),
    devices=st.integers(1, 17),
    rows=st.sampled_from([1, 1, 3]),
)
def test_waves_of_any_world(costs: GroupCosts, lengths: list[int], devices: int, rows: int) -> None:
    """Would catch a sequence lost or doubled, memory exceeded, a rank in two places, a wrong
    prediction, and a bound above it."""
    table = group_table(costs, lengths, devices, rows=rows) if devices >= costs.sizes[0] else None
    if table is None:
        return
    if not np.isfinite(table.alone[:, 0]).any():
        assert waves(table, 1.0, seed=0, effort=Waves().effort) is None
        return
    planned(table)


@settings(max_examples=20, deadline=None)
@given(lengths=batches(), devices=st.integers(1, 17), rows=st.sampled_from([1, 3]))
def test_memory_that_binds(lengths: list[int], devices: int, rows: int) -> None:
    """Would catch packs that overflow, or a search without an end, where hardly more than the
    longest sequence fits."""
    most = max(p for p in (1, 2, 4, 8, 16) if p <= devices)
    costs = GroupCosts(
        a_s=5e-9,
        b_s=2e-4,
        c_s=0.02,
        kappa_s={p: 1e-5 for p in (1, 2, 4, 8, 16)},
        cap_tokens=-(-max(lengths) // most),
    )
    planned(group_table(costs, lengths, devices, rows=rows))


def test_the_same_seed_gives_the_same_waves() -> None:
    """Would catch effort counted in time."""
    one, two = (
        planned(group_table(flexsp(), fixture("longtail-32k-100k")[0], 64), 3) for _ in range(2)
    )
    assert (one.groups, one.seconds) == (two.groups, two.seconds)


@pytest.mark.parametrize("seed", [0, 1, 2, *map(whole, range(3, 6))])
def test_tiny_batches_are_planned_as_well_as_by_force(seed: int) -> None:
    """Would catch a dynamic program that misses an arrangement."""
    random = np.random.default_rng(seed)
    costs = GroupCosts(
        a_s=5e-9,
        b_s=2e-4,
        c_s=float(random.choice([0.0, 0.02, 0.5])),
        cap_tokens=3000,
        kappa_s={1: 0.0, 2: 2e-5, 3: 4e-5},
    )
    lengths = random.integers(1, 3000, size=4).tolist()
    optimum_s = best_by_force(costs, lengths, 3, "lockstep")
    found = planned(group_table(costs, lengths, 3))
    assert found.seconds == pytest.approx(optimum_s, rel=1e-9)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_waves_of_few_sequences_are_the_best(seed: int, rows: int) -> None:
    """Would catch a wave, or a launch of several sequences, that the program leaves out; and a
    search of more sequences that solves nothing anew: the same sequences and one that hardly
    matters are hardly slower."""
    random = np.random.default_rng([seed, 1])
    costs = GroupCosts(
        a_s=5e-9,
        b_s=2e-4,
        c_s=float(random.choice([0.0, 0.02, 0.5])),
        cap_tokens=3000,
        kappa_s={1: 0.0, 2: 2e-5, 3: 4e-5, 4: 5e-5},
    )
    devices = int(random.integers(2, 9))
    lengths = np.exp(random.normal(7.0, 0.8, 8)).clip(20, 3000).round().astype(int).tolist()
    table = group_table(costs, lengths, devices, rows=rows)
    kinds = [k for k in range(len(table)) if table.width[k] <= devices]
    exact = exact_waves(table, kinds, range(len(lengths)))
    assert exact is not None
    assert planned(table).seconds == pytest.approx(exact[0], rel=1e-9)
    more = planned(group_table(costs, [*lengths, 1], devices, rows=rows))
    filler = WaveFiller(table, kinds)
    one_s = min(filler.alone_s(k, 7) for k in kinds)
    assert exact[0] * (1 - 1e-9) <= more.seconds <= exact[0] + one_s


def test_six_sequences_on_seven_ranks() -> None:
    """Catches a search that misses the best waves: it found 0.735 s where 0.648 is the optimum."""
    kappa_s = {1: 0.0, 2: 2e-5, 3: 2e-4}
    costs = GroupCosts(a_s=1e-6, b_s=2e-4, c_s=0.02, cap_tokens=700, kappa_s=kappa_s)
    lengths = Lengths.of([481, 1104, 507, 358, 1009, 312])
    made = plan(Problem(costs=costs, devices=7, semantics="lockstep"), lengths)
    assert made.predicted_s == pytest.approx(0.64752, rel=1e-6)
    assert made.lower_bound_s == made.predicted_s
    assert "no plan of so few sequences is quicker" in made.why[0]


@pytest.mark.parametrize("case", sorted(BEFORE))
def test_waves_are_no_worse_than_they_were(case: str) -> None:
    """Would catch a loss of quality on long-tailed batches: more than 0.2 % on one."""
    tokens, number, devices = case.split("/")
    lengths = fixture(f"longtail-32k-{tokens}")[int(number)]
    assert planned(group_table(flexsp(), lengths, int(devices))).seconds <= BEFORE[case] * 1.002


def long_tailed(seed: int) -> list[int]:
    """Four million tokens of lengths up to 128 Ki: LogNormal(ln 700, 1.5)."""
    draws = np.random.default_rng(seed).lognormal(np.log(700), 1.5, 8000)
    lengths = np.clip(draws, 16, 131_072).round().astype(int)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), 4_000_000)) + 1].tolist()


@pytest.mark.parametrize(
    ("seed", "devices", "gap"), [(0, 64, 0.02), (0, 256, 0.02), (1, 64, 0.08), (2, 256, 0.04)]
)
def test_very_long_tails(seed: int, devices: int, gap: float) -> None:
    """Would catch waves as long as the longest sequence that nothing else can fill."""
    table = group_table(flexsp(), long_tailed(seed), devices)
    assert planned(table).seconds <= bound_s(table) * (1 + gap)


@pytest.mark.parametrize("seed", [0, 31, 33])
def test_a_number_of_waves_that_fits_badly_does_not_take_all_effort(seed: int) -> None:
    """Would catch a search that raises the time of a number of waves, whose estimate was too low,
    until it succeeds, and has no effort left for beginnings that are better: many sequences of the
    same, greatest length were planned 9 % above their bound."""
    draws = np.random.default_rng(seed).lognormal(np.log(2000), 2.0, 8000)
    lengths = np.clip(draws, 4, 8192).astype(int)
    some = lengths[: int(np.searchsorted(np.cumsum(lengths), 6_000_000)) + 1].tolist()
    table = group_table(flexsp(), some, 256)
    assert planned(table).seconds <= bound_s(table) * 1.02


def test_a_giant_does_not_stretch_every_wave() -> None:
    """Would catch waves of one time where one sequence needs the whole world for long."""
    costs = GroupCosts(a_s=0.0, b_s=1e-3, c_s=0.0, cap_tokens=1000, kappa_s={1: 0.0, 4: 0.0})
    assert planned(group_table(costs, [4000, *[250] * 4], 4)).seconds == pytest.approx(1.25)


def test_launches_that_take_as_long_are_paired() -> None:
    """Would catch two short launches beside one long one, which cost two steps."""
    costs = GroupCosts(a_s=0.0, b_s=1e-3, c_s=0.0, cap_tokens=1000, kappa_s={1: 0.0})
    table = group_table(costs, [1000, 1000, 500, 500, 600, 400], 2)
    assert planned(table).seconds == pytest.approx(2.0)


def test_more_memory_at_a_price_is_used() -> None:
    """Would catch waves by the usual row alone: a sequence that only the slowest row holds."""
    costs = GroupCosts(a_s=0.0, b_s=1e-3, c_s=0.0, cap_tokens=1000, kappa_s={1: 0.0})
    found = planned(group_table(costs, [4000, 900, 900], 2, rows=3))
    assert found.seconds >= 4.0 * 1.1**2


def test_what_a_scheme_does_not_hold_is_not_dealt_to_it() -> None:
    """Would catch a short launch levelled onto ranks whose memory it exceeds, where schemes have
    several rows: a sequence counts for at most what the usual row holds."""
    costs = GroupCosts(
        a_s=0.0, b_s=2e-4, c_s=0.5, cap_tokens=300, kappa_s={p: 0.0 for p in (1, 2, 4, 8, 16)}
    )
    planned(group_table(costs, [2085, 2423, 2210], 26, rows=3))


def test_groups_are_filled_to_their_time_and_tokens() -> None:
    """Would catch groups beyond their time or their memory, or ranks beyond the world."""
    table = group_table(flexsp(), fixture("longtail-32k-100k")[0], 16)
    filler, everyone = WaveFiller(table, range(len(table))), list(range(len(table.tokens)))
    for join_any in (True, False):
        groups, left = filler.fill(2.5, 16, everyone, join_any=join_any, whole=False)
        assert sum(table.width[k] for k, _ in groups) <= 16
        for k, held in groups:
            assert sum(table.tokens[i] for i in held) <= table.cap[k]
            assert launch_s(table, k, held) <= 2.5 * (1 + 1e-9)
        assert sorted([i for _, held in groups for i in held] + left) == everyone


def test_groups_that_fit_no_wave_are_refused() -> None:
    """Would catch a wave with more ranks than the world."""
    filler = WaveFiller(group_table(flexsp(), [100] * 4, 3), [0, 1])
    pairs = [(1, [i]) for i in range(3)]
    assert sorted_into_waves(filler, pairs, 2) is None
    found = sorted_into_waves(filler, pairs, 3)
    assert found is not None
    seconds, waves = found
    assert [len(wave) for wave in waves] == [1, 1, 1]
    assert seconds == pytest.approx(3 * launch_s(filler.table, *pairs[0]))
