"""Planners of others, as their descriptions have them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.costs.group_costs import GroupCosts
from headrace.costs.pipeline_costs import PipelineCosts
from headrace.errors import InfeasiblePlan
from headrace.planners import BASELINES
from headrace.planners.differencing import differenced
from headrace.planners.dynamic_program import proposed
from headrace.planners.groups import is_groups
from headrace.planners.hydraulis import greedy, hydraulis_candidates
from headrace.planners.launched import dealt
from headrace.planners.switching import sequences_of, switch_s
from headrace.planning.batch import PriceTable
from headrace.planning.packing import pack
from headrace.planning.schedule import Assignment, placed
from headrace.planning.static import best_static
from headrace.spec.plan import Semantics
from planning.group_worlds import batches, launch_s, world_costs
from planning.pipeline_worlds import batches as short_batches
from planning.pipeline_worlds import costs_of, log_normal, published, small_costs
from planning.tables import bound_s, checked_s, fixture, flexsp, group_table, pipeline_table
from references.programs import dispatch_program, packing_program
from references.strategy_bound import strategy_bound_s

BEFORE = json.loads((Path(__file__).parent / "others.json").read_text())
GROUPS = [name for name, own in BASELINES.items() if not own.staged or name == "static"]
STAGED = [name for name, own in BASELINES.items() if own.staged]


def costs(**changes) -> GroupCosts:
    kappa = {1: 0.0, 2: 1e-5, 4: 2e-5, 8: 3e-5}
    given = {"a_s": 1e-8, "b_s": 1e-4, "c_s": 0.01, "cap_tokens": 1000, "kappa_s": kappa}
    return GroupCosts(**{**given, **changes})


def launched(planner: str, lengths: list[int], devices: int) -> list[tuple[tuple[int, ...], list]]:
    table = group_table(costs(), lengths, devices)
    made = BASELINES[planner].schedules(table, "free", 0)
    assert made is not None
    return [
        (ranks, [table.tokens[i] for i in held])
        for (_, ranks, _), own in zip(made.groups, made.packs, strict=True)
        for held in own.bins
    ]


def prepared(planner: str, tables: list[PriceTable], seed: int = 0) -> list[Assignment]:
    prepare = BASELINES[planner].prepare
    assert prepare is not None
    one = prepare(tables, seed, None)
    return [one(number, table) for number, table in enumerate(tables)]


@settings(max_examples=40, deadline=None)
@given(
    costs=world_costs(),
    lengths=batches(),
    devices=st.integers(1, 17),
    semantics=st.sampled_from(["free", "lockstep"]),
    rows=st.sampled_from([1, 1, 3]),
)
def test_planners_of_groups_in_any_world(
    costs: GroupCosts, lengths: list[int], devices: int, semantics: Semantics, rows: int
) -> None:
    """Would catch a sequence lost or doubled, memory exceeded, a wrong prediction, and a bound of a
    baseline above its schedule, which would hide a better plan."""
    if devices < costs.sizes[0]:
        return
    table = group_table(costs, lengths, devices, rows=rows)
    fits = bool(np.isfinite(table.alone[:, 0]).any())
    for name in GROUPS:
        made = BASELINES[name].schedules(table, semantics, 0)
        assert (made is not None) == fits, name
        if made is not None:
            assert made.semantics == semantics, name
            assert checked_s(made) == pytest.approx(made.seconds, rel=1e-9), name
            least_s = BASELINES[name].least_s(table)
            assert least_s <= made.seconds * (1 + 1e-9), name
            assert bound_s(table) <= made.seconds * (1 + 1e-9), name
    assert all(own.meaning for own in BASELINES.values())


@settings(max_examples=30, deadline=None)
@given(costs=small_costs(), devices=st.integers(4, 12), lengths=short_batches(40, 3000))
def test_planners_of_pipelines_in_any_world(
    costs: PipelineCosts, devices: int, lengths: list[int]
) -> None:
    """Would catch schedules that no checker would pass, bounds above them, and strategies chosen
    for one batch that do not hold another."""
    table = pipeline_table(costs, lengths, devices)
    tables = [table, pipeline_table(costs, lengths[:1], devices)]
    for name in STAGED:
        for made, own in zip(prepared(name, tables), tables, strict=True):
            assert checked_s(made) == pytest.approx(made.seconds, rel=1e-9), name
            if name != "switching":
                assert bound_s(own) <= made.seconds * (1 + 1e-9), name
        alone = BASELINES[name].schedules(table, "free", 0)
        assert alone is not None
        assert BASELINES[name].least_s(table) <= alone.seconds * (1 + 1e-9), name


@pytest.mark.parametrize("case", sorted(BEFORE["groups"]))
def test_groups_are_planned_as_before(case: str) -> None:
    """Would catch a planner of others that is no longer theirs."""
    tokens, number, devices = case.split("/")
    lengths = fixture(f"longtail-32k-{tokens}")[int(number)]
    table = group_table(flexsp(), lengths, int(devices))
    for key, seconds in BEFORE["groups"][case].items():
        name, semantics = key.split("/")
        made = BASELINES[name].schedules(table, semantics, 0)
        assert made is not None
        if "static" in name:
            assert made.seconds <= seconds * (1 + 2e-4), key
        else:
            assert made.seconds == pytest.approx(seconds, rel=1e-12), key


@pytest.mark.parametrize("case", sorted(BEFORE["pipelines"]))
def test_pipelines_are_planned_as_before(case: str) -> None:
    """Would catch a planner of others that is no longer theirs."""
    name, devices, lengths, planner = case.split("/")
    before = BEFORE["pipelines"][case]
    every = fixture(lengths)[:3]  # what was planned together
    tables = [pipeline_table(published(name), own, int(devices)) for own in every]
    made = prepared(planner, tables)[: len(before)]
    assert [one.seconds for one in made] == pytest.approx(before, rel=1e-4)


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.integers(1, 500), max_size=30), parts=st.integers(1, 9))
def test_differencing_loses_nothing(weights: list[int], parts: int) -> None:
    """Would catch sets that lose or double numbers when they are joined."""
    sets = differenced(weights, parts)
    assert len(sets) == parts
    assert sorted(i for own in sets for i in own) == list(range(len(weights)))
    sums = [sum(weights[i] for i in own) for own in sets]
    assert max(sums) - min(sums) <= max(weights, default=0)


def test_differencing_by_hand() -> None:
    """Would catch greedy filling in its place: 8 7 6 5 4 in two sets is 16 and 14."""
    sets = differenced([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in own) for own in sets) == [14, 16]
    assert sorted(differenced([5, 5, 5, 5], 4)) == [[0], [1], [2], [3]]
    assert differenced([3, 1], 1) == [[0, 1]]
    assert differenced([], 3) == [[], [], []]


def test_token_balance_respects_memory() -> None:
    """Would catch micro-batches above the cap, which the original makes."""
    for ranks, held in launched("karmarkar-karp", [900, 600, 500, 400, 300, 200, 100], 2):
        assert sum(held) <= 1000 * len(ranks)


def test_static_takes_the_smallest_size_that_fits() -> None:
    """Would catch the best size taken for the one that a user would configure, and one that holds
    the first batch only."""
    assert {len(ranks) for ranks, _ in launched("static", [1500, 100, 100], 8)} == {2}
    assert [len(ranks) for ranks, _ in launched("best-static", [1500], 8)] == [8]
    tables = [group_table(costs(), lengths, 8) for lengths in ([100], [1500, 9])]
    assert is_groups(tables[0])
    for made in prepared("static", tables):
        assert {len(ranks) for _, ranks, _ in made.groups} == {2}


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
    found = launched("bucket", lengths, 2)
    assert sorted((n for _, held in found for n in held), reverse=True) == lengths
    for _, held in found:
        assert max(held) <= 2 * min(held)
    assert len(launched("packed", lengths, 2)) == 3


def by_time_s(costs: GroupCosts, lengths: list[int], groups: int, most_s: float) -> float:
    """Bucket parallel on groups of one rank by its description, with batches of ``most_s``."""
    launches = list[float]()
    ordered = sorted(lengths, reverse=True)
    for number in sorted({(n - 1).bit_length() for n in lengths}, reverse=True):
        held = [n for n in ordered if (n - 1).bit_length() == number]
        most = max(1, costs.cap_tokens // held[0])
        sizes = [n for n in range(1, most + 1) if launch_s(costs, held[:1] * n, 1) <= most_s]
        count = -(-len(held) // max(sizes, default=1))
        each, more = divmod(len(held), count)
        for launch in range(count):
            size = each + (launch < more)
            launches.append(launch_s(costs, held[:size], 1))
            held = held[size:]
    ends = [0.0] * groups
    for seconds in sorted(launches, reverse=True):
        ends[ends.index(min(ends))] += seconds
    return max(ends)


@pytest.mark.parametrize("seed", range(6))
def test_bucket_parallel_has_the_best_batches(seed: int) -> None:
    """Would catch batch sizes that a user of buckets would not keep: those of one launch time where
    another is quicker."""
    random = Random(seed)
    lengths = [min(900, int(random.lognormvariate(4, 1)) + 1) for _ in range(30)]
    priced = costs(kappa_s={1: 0.0}, c_s=random.choice([0.001, 0.01, 0.1]))
    made = BASELINES["bucket"].schedules(group_table(priced, lengths, 4), "free", 0)
    assert made is not None
    times = [priced.c_s * 1.05**n for n in range(200)]
    best_s = min(by_time_s(priced, lengths, 4, most_s) for most_s in times)
    assert made.seconds <= best_s * (1 + 2e-3)


def by_size_s(costs: GroupCosts, lengths: list[int], groups: int, most: int) -> float:
    """Packed parallel on groups of one rank by its description, with packs of ``most`` tokens."""
    packs = list[list[int]]()
    for tokens in sorted(lengths, reverse=True):
        holding = [held for held in packs if sum(held) + tokens <= most]
        max(holding, key=sum).append(tokens) if holding else packs.append([tokens])
    ends = [0.0] * groups
    for seconds in sorted((launch_s(costs, held, 1) for held in packs), reverse=True):
        ends[ends.index(min(ends))] += seconds
    return max(ends)


@pytest.mark.parametrize("seed", range(6))
def test_packed_parallel_has_the_best_packs(seed: int) -> None:
    """Would catch packs that fill memory although few of them leave groups without work."""
    random = Random(seed)
    lengths = [min(900, int(random.lognormvariate(4, 1)) + 1) for _ in range(30)]
    priced = costs(kappa_s={1: 0.0}, c_s=random.choice([0.001, 0.01, 0.1]))
    made = BASELINES["packed"].schedules(group_table(priced, lengths, 4), "free", 0)
    assert made is not None
    sizes = np.unique(np.geomspace(max(lengths), priced.cap_tokens, 24).astype(int)).tolist()
    best_s = min(by_size_s(priced, lengths, 4, most) for most in sizes)
    assert made.seconds <= best_s * (1 + 2e-3)
    full_s = by_size_s(priced, lengths, 4, int(priced.cap_tokens))
    assert made.seconds < full_s * 0.95


@pytest.mark.parametrize("semantics", ["free", "lockstep"])
@pytest.mark.parametrize("count", [300, 5000])
@pytest.mark.parametrize("name", ["bucket", "packed"])
def test_many_equal_sequences_fill_launches(semantics: Semantics, count: int, name: str) -> None:
    """Would catch launches of one sequence each where all are short: nothing is as slow as the
    longest, so the constants of the launches were most of the step."""
    table = group_table(costs(), [20] * count, 8)
    seconds = dict[str, float]()
    for tried in (name, "best-static"):
        made = BASELINES[tried].schedules(table, semantics, 0)
        assert made is not None
        seconds[tried] = made.seconds
    assert seconds[name] <= 1.05 * seconds["best-static"]


@settings(max_examples=40, deadline=None)
@given(launch_s=st.lists(st.floats(0.1, 9), min_size=1, max_size=20), groups=st.integers(1, 5))
def test_launches_are_dealt_to_the_first_free_group(launch_s: list[float], groups: int) -> None:
    """Would catch launches for busy groups, and seconds other than those of the dealing."""
    group_of, end_s = dealt(launch_s, groups, "free")
    free = [0.0] * groups
    for seconds, group in zip(launch_s, group_of, strict=True):
        assert free[group] == min(free)
        free[group] += seconds
    assert end_s == max(free)
    in_turn, end_s = dealt(launch_s, groups, "lockstep")
    assert in_turn == [n % groups for n in range(len(launch_s))]
    rounds = [launch_s[n : n + groups] for n in range(0, len(launch_s), groups)]
    assert end_s == pytest.approx(sum(map(max, rounds)))


def test_accumulation_counts_devices() -> None:
    """Would catch idle time of a large group counted as that of one rank: eight ranks, a bucket
    that needs four, one of which every group works alone."""
    found = launched("dcp", [4000, *[500] * 8], 8)
    ranks_of_long = next(ranks for ranks, held in found if held == [4000])
    short = [ranks for ranks, held in found if held != [4000]]
    assert not {rank for ranks in short for rank in ranks} & set(ranks_of_long)
    assert len(set(short)) == 4


def of_names(table: PriceTable, **wanted: int) -> tuple[int, ...]:
    """``tp4_pp2=3`` is three pipelines of tp4-pp2."""
    names = {name.replace("_", "-"): n for name, n in wanted.items()}
    assert set(names) <= {str(scheme) for scheme in table.schemes}
    return tuple(names.get(str(scheme), 0) for scheme in table.schemes)


def test_no_greedy_trial_is_lost() -> None:
    """Would catch sequences that trials side by side mix up, or put where they do not fit."""
    table = pipeline_table(published("hydraulis-32b"), log_normal(100_000, 1), 64)
    counts = of_names(table, tp16=1, tp8_pp2=1, tp4_pp2=4)
    found = greedy(table, counts, seed=0, trials=7)
    assert sorted(i for _, own in found for i in own) == list(range(len(table.tokens)))
    assert all(table.tokens[i] <= table.cap[k] for k, own in found for i in own)
    more = greedy(table, counts, seed=0, trials=40)
    loads = [
        max(
            sum(table.seconds(k)[i] for i in own)
            + (table.depth[k] - 1) * max([table.seconds(k)[i] for i in own], default=0.0)
            for k, own in some
        )
        for some in (found, more)
    ]
    assert loads[1] <= loads[0]


def test_tuned_trials_have_one_with_the_longest_first() -> None:
    """Would catch ties that go to the first pipeline, and a first order that is drawn: two equal
    pipelines, the long sequence first, then the short ones all beside it."""
    made = costs_of(("cp1", 0.0, 1.0, 0.0, 100))
    table = pipeline_table(made, [40, 10, 10, 10, 10], 2)
    found = greedy(table, (2,), seed=0, trials=1, tuned=True)
    assert sorted(sorted(own) for _, own in found) == [[0], [1, 2, 3, 4]]
    # Until a long one has come, any pipeline keeps the slowest one alike.
    table = pipeline_table(made, [40] + [10] * 6, 3)
    loads = sorted(len(own) for _, own in greedy(table, (3,), seed=0, trials=1, tuned=True))
    assert loads == [1, 3, 3]


def test_the_tuned_planner_is_never_behind_static() -> None:
    """Would catch strategies of one scheme that are no candidates, or that are dispatched worse
    than ``static`` does, and candidates of the paper's form that are lost."""
    theirs_s, tuned_s = 0.0, 0.0
    for name, devices in (("hydraulis-7b", 16), ("hydraulis-13b", 32)):
        lengths = [log_normal(150_000, seed, sigma=1.3) for seed in range(3)]
        tables = [pipeline_table(published(name), own, devices) for own in lengths]
        assert set(hydraulis_candidates(tables)) <= set(hydraulis_candidates(tables, tuned=True))
        for table, made, theirs in zip(
            tables,
            prepared("hydraulis-tuned", tables),
            prepared("hydraulis", tables),
            strict=True,
        ):
            static = best_static(table)
            assert static is not None
            assert made.seconds <= static.seconds * (1 + 1e-9)
            theirs_s, tuned_s = theirs_s + theirs.seconds, tuned_s + made.seconds
    assert tuned_s < 0.95 * theirs_s


def test_idle_devices_of_a_candidate_are_filled() -> None:
    """Would catch strategies that leave room for one more of their pipelines."""
    lengths = [tokens for seed in range(2) for tokens in log_normal(100_000, seed)]
    table = pipeline_table(published("hydraulis-32b"), lengths, 64)
    found = set(hydraulis_candidates([table], tuned=True))
    short = [counts for counts in found if idle(table, counts) >= min(widths(table, counts))]
    assert short
    for counts in short:
        fuller = [
            other for other in found if all(a >= b for a, b in zip(other, counts, strict=True))
        ]
        assert any(idle(table, other) < min(widths(table, counts)) for other in fuller)


def widths(table: PriceTable, counts: tuple[int, ...]) -> list[int]:
    return [width for n, width in zip(counts, table.width, strict=True) if n]


def idle(table: PriceTable, counts: tuple[int, ...]) -> int:
    return table.devices - sum(n * w for n, w in zip(counts, table.width, strict=True))


def test_constants_are_paid_per_micro_batch() -> None:
    """Would catch the amortized program that still pays c for every sequence: of two schemes with
    the same device-seconds a token, the wide one has the larger constant and by far the larger
    micro-batches, so that only the constant for each sequence keeps it out."""
    lengths = [10] * 100
    made = costs_of(("cp1", 0.0, 1.0, 1.0, 10), ("tp2", 0.0, 0.5, 2.0, 1000))
    table = pipeline_table(made, lengths, 4)
    assert proposed(table, lengths, relaxed=False) == [(4, 0)]
    assert proposed(table, lengths, relaxed=False, amortized=True) == [(0, 2)]


@pytest.mark.parametrize("relaxed", [False, True])
def test_the_papers_proposal(relaxed: bool) -> None:
    """Would catch strategies over the devices, and a longest sequence that none of them holds."""
    lengths = [tokens for seed in range(2) for tokens in log_normal(100_000, seed)]
    table = pipeline_table(published("hydraulis-32b"), lengths, 64)
    found = proposed(table, lengths, relaxed=relaxed, bins=16, units=64)
    assert len(found) > 2
    for counts in found:
        assert 0 < sum(n * w for n, w in zip(counts, table.width, strict=True)) <= 64
    assert any(
        n and scheme.most_tokens >= max(lengths)
        for counts in found
        for n, scheme in zip(counts, table.schemes, strict=True)
    )
    first = hydraulis_candidates([table])[0]
    assert np.isfinite(table.alone[first.index(max(first)), 0])


def test_the_dynamic_program_by_hand() -> None:
    """Would catch a table that mixes up devices and pipelines: short sequences on single devices,
    the long one on the only scheme that holds it."""
    lengths = [10] * 18 + [100]
    made = costs_of(("cp1", 0.0, 1.0, 0.0, 10), ("tp2", 0.0, 0.9, 0.0, 100))
    found = proposed(pipeline_table(made, lengths, 4), lengths, relaxed=False, bins=10)
    assert found[0] == (4, 0)
    assert found[-1] == (2, 1)


def test_phases_pay_for_every_change() -> None:
    """Would catch strategies in turn as if changing were free, sequences numbered by the wrong
    list, and phases that run at once."""
    lengths = [log_normal(700_000, seed, sigma=1.5) for seed in range(2)]
    tables = [pipeline_table(published("hydraulis-13b"), own, 32) for own in lengths]
    made = prepared("switching", tables)
    assert any(len(one.phases) > 1 for one in made)
    for table, one in zip(tables, made, strict=True):
        changes_s = max(0, len(one.phases) - 1) * switch_s(None)
        assert one.switch_s == pytest.approx(changes_s)
        assert one.seconds == pytest.approx(sum(x.seconds for x in one.phases) + changes_s)
        held = [sequences_of(one, phase) for phase in one.phases]
        assert sorted(i for own in held for i in own) == list(range(len(table.tokens)))
        for own, phase in zip(held, one.phases, strict=True):
            given = table.batch.lengths.tokens
            assert tuple(given[i] for i in own) == phase.table.batch.lengths.tokens
    assert switch_s(12 * 60 * 6656**2) == pytest.approx(2.19 / 2)


def test_no_strategy_for_all_batches_is_named() -> None:
    """Would catch a traceback where a batch fits nowhere."""
    made = costs_of(("cp1", 0.0, 1e-4, 0.0, 1000))
    tables = [pipeline_table(made, [5], 1)]
    tables.append(PriceTable(group_table(costs(), [2000], 8).batch, tables[0].schemes, 1))
    for name in ("static", "max-length", "token-balance", "switching"):
        with pytest.raises(InfeasiblePlan, match="no homogeneous strategy"):
            prepared(name, tables)


@pytest.mark.parametrize("name", ["tp8", "tp4-pp2", "tp2-pp4"])
def test_packing_is_close_to_the_integer_program(name: str) -> None:
    """Would catch a heuristic that loses more than a percent or two, and one that beats what is
    proved, which would be a wrong program."""
    lengths = [2900, 2400, 1900, 1500, 900, 700, 400, 300, 200]
    table = pipeline_table(published("hydraulis-32b"), lengths, 64)
    k = [str(scheme) for scheme in table.schemes].index(name)
    answer = packing_program(table, k, range(len(lengths)), limit_s=2.0)
    seconds = pack(table, k, range(len(lengths))).seconds
    assert answer.members is not None
    assert answer.bound_s * (1 - 1e-6) <= seconds <= answer.seconds * 1.02


def test_dispatch_programs_prove_less_than_any_schedule() -> None:
    """Would catch a program whose proof a schedule contradicts."""
    lengths = [9000, 5000, 4000, 3000, 2000, 1500, 1200, 900, 500, 300]
    table = pipeline_table(published("hydraulis-32b"), lengths, 64)
    counts = of_names(table, tp8=1, tp4=2)
    answer = dispatch_program(table, counts, limit_s=5.0)
    assert answer.members is not None
    assert sorted(i for own in answer.members for i in own) == list(range(len(lengths)))
    theirs = Assignment.of(table, placed(table, greedy(table, counts, seed=0)), "hydraulis")
    assert answer.bound_s * (1 - 1e-6) <= theirs.seconds
    assert answer.seconds <= theirs.seconds * (1 + 1e-6)
    assert strategy_bound_s(table, counts) <= answer.seconds * (1 + 1e-6)


def test_nothing_beats_the_bound_of_a_strategy() -> None:
    """Would catch pigeons and shares that are no bound, or are hardly one."""
    random = Random(1)
    made = costs_of(("tp2", 0.0, 1e-3, 0.5, 9000), ("cp1", 0.0, 1e-3, 0.0, 1000))
    table = pipeline_table(made, [8000, 7000, 500], 64)
    assert strategy_bound_s(table, (60, 1)) == pytest.approx(15 + 0.5 * 15 / 9, rel=1e-3)
    assert strategy_bound_s(table, (60, 2)) == pytest.approx(8.5)
    for _ in range(10):
        lengths = [random.randint(1, 9000) for _ in range(12)]
        table = pipeline_table(made, lengths, 64)
        counts = (random.randint(1, 4), random.randint(1, 4))
        theirs = Assignment.of(table, placed(table, greedy(table, counts, seed=0)), "hydraulis")
        assert strategy_bound_s(table, counts) <= theirs.seconds * (1 + 1e-9)
