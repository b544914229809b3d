"""Many sequences and devices: runs of equal ones at once, effort, memory, and the bound."""

from __future__ import annotations

import cProfile
import pstats
import tracemalloc
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.costs import CostModel, synthetic_costs
from headrace.costs.pipeline_costs import PipelineCosts
from headrace.errors import InfeasiblePlan
from headrace.planning import Problem, SideBySide, plan
from headrace.planning.batch import PriceTable, SortedBatch
from headrace.planning.bounds import BoundRows, lower_bound
from headrace.planning.filling import Filler, Pipelines, deal, joined
from headrace.planning.generators import Known
from headrace.planning.improvement import Improvement
from headrace.planning.priced import Line
from headrace.spec import Lengths
from headrace.units import GIB
from planning.pipeline_worlds import costs_of, published, small_costs
from planning.tables import bound_s, checked_s, flexsp, group_table, pipeline_table
from planning.worlds import worlds


def some_lengths(rng: np.random.Generator, count: int, kinds: int, longest: int) -> list[int]:
    """Sequences of so many lengths that differ, most of them short."""
    known = np.clip(rng.lognormal(np.log(longest / 20), 1.2, kinds), 1, longest).astype(int)
    return rng.choice(known, count).tolist()


def tables(seed: int) -> PriceTable:
    """Groups with one row and with three, and published pipelines with stages."""
    rng = np.random.default_rng(seed)
    kind, count, kinds = seed % 3, int(rng.integers(1, 200)), int(rng.integers(1, 12))
    if kind == 2:
        lengths = some_lengths(rng, count, kinds, 20_000)
        return pipeline_table(published("hydraulis-7b"), lengths, 32)
    lengths = some_lengths(rng, count, kinds, 30_000)
    return group_table(flexsp(), lengths, 8, rows=1 + 2 * kind)


def lengths_of(table: PriceTable, pipelines: Pipelines) -> list[tuple[int, list[int]]]:
    """Scheme and lengths of each pipeline."""
    return [(k, [table.tokens[i] for i in own]) for k, own in pipelines]


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), factor=st.floats(1.0, 1.6), join_any=st.booleans())
def test_runs_are_filled_as_one_by_one(seed: int, factor: float, join_any: bool) -> None:
    """Catches a run that takes more than fits, that leaves room which one sequence after the other
    finds, or that opens other pipelines."""
    table = tables(seed)
    filler, every = Filler(table), range(len(table.tokens))
    tau = bound_s(table) * factor
    single = filler.fill(tau, list(every), join_any=join_any)
    at_once = filler.fill(tau, join_any=join_any)
    if isinstance(single, float) or isinstance(at_once, float):
        assert at_once == single
        return
    assert sorted(i for _, own in at_once for i in own) == list(every)
    assert lengths_of(table, at_once) == lengths_of(table, single)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    spare_s=st.floats(0, 3),
    need_s=st.sampled_from([0.0, 1.0371e-3, 0.03917]),
    tokens=st.integers(1, 9000),
    count=st.integers(1, 60),
)
def test_a_pipeline_takes_of_a_run_what_it_takes_one_by_one(
    seed: int, spare_s: float, need_s: float, tokens: int, count: int
) -> None:
    """Catches seconds, tokens or constants that are counted otherwise for several at once."""
    rng, table = np.random.default_rng(seed), tables(seed)
    k = int(rng.integers(len(table)))
    tokens = min(tokens, table.cap[k])
    dealt = table.depth[k] > 1 or table.fluid[k]
    room = sorted(rng.integers(0, table.cap[k] + 1, 1 if dealt else 4).tolist())
    one_by_one, left_s, taken = list(room), spare_s, 0
    while taken < count:
        more, rest_s = joined(table, k, left_s, one_by_one, need_s, tokens, 1)
        if not more:
            break
        left_s, taken = rest_s, taken + 1
    at_once = list(room)
    found, rest_s = joined(table, k, spare_s, at_once, need_s, tokens, count)
    assert (found, at_once) == (taken, one_by_one)
    assert rest_s == pytest.approx(left_s, abs=1e-9)
    assert rest_s >= 0


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_dealing_knows_what_pipelines_hold(seed: int) -> None:
    """Catches loads of kept sequences that are not what adding them one by one gives."""
    table, rng = tables(seed), np.random.default_rng(seed)
    flat = [k for k, depth in enumerate(table.depth) if depth == 1 and table.seconds(k)[0] < np.inf]
    if not flat:
        return
    homes = rng.choice(flat, len(table.tokens)).tolist()
    kept = [(k, [i for i, home in enumerate(homes) if home == k]) for k in flat]
    expected_s = []
    for k, own in kept:
        load_s, room = 0.0, list[int]()
        for i in own:
            load_s += table.seconds(k)[i] + table.added_s(k, room, table.room(k)[i])
            table.put(k, room, table.room(k)[i])
        expected_s.append(load_s if own else table.c[k])
    assert deal(table, kept, []) == pytest.approx(max(expected_s))


def test_prices_of_runs_are_those_of_their_sequences() -> None:
    """Catches values of one run given to the positions of another."""
    lengths = [5, 900, 5, 7, 900, 900, 31]
    batch = SortedBatch.of(Lengths.of(lengths))
    assert batch.run_tokens == [900, 31, 7, 5]
    assert batch.counts.tolist() == [3, 1, 1, 2]
    assert batch.listed(batch.run_tokens) == batch.tokens == batch.each(batch.run_values).tolist()
    assert list(batch.turns(None)) == [(0, 0, 3), (1, 3, 1), (2, 4, 1), (3, 5, 2)]
    assert list(batch.turns([4, 0, 6])) == [(2, 4, 1), (0, 0, 1), (3, 6, 1)]


def calls(problem: Problem, lengths: Sequence[int]) -> int:
    """Functions called while a batch is planned."""
    profile = cProfile.Profile()
    plan(problem, Lengths.of([max(lengths)]))  # prices are worked out once for all batches
    profile.enable()
    plan(problem, Lengths.of(lengths))
    profile.disable()
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["pipelines", "model"])
def test_effort_grows_as_sequences_do(kind: str) -> None:
    """Catches effort that grows faster than the sequences: what looks at every pipeline for each,
    or at every sequence for each pipeline."""
    if kind == "pipelines":
        problem = Problem(costs=published("hydraulis-32b"), devices=64)
    else:
        problem = Problem(costs=synthetic_costs(16, 4, memory_bytes=20 * GIB))
    drawn = np.random.default_rng(0).lognormal(np.log(700), 1.05, 16_000)
    lengths = np.clip(drawn.round(), 16, 20_000).astype(int).tolist()
    few, many = calls(problem, lengths[:4000]), calls(problem, lengths)
    assert many <= 4 * 1.3 * few


def test_equal_sequences_are_nearly_free() -> None:
    """Catches a filling that places equal sequences one after the other: eight times as many of
    the same lengths, in eight times the time, are as many runs."""
    rng = np.random.default_rng(1)
    lengths = some_lengths(rng, 500, 100, 20_000)
    made = []
    for times in (1, 8):
        table = pipeline_table(published("hydraulis-32b"), lengths * times, 64)
        filler, tau = Filler(table), bound_s(table) * 1.2
        filler.cheapest(tau)
        profile = cProfile.Profile()
        profile.enable()
        filler.fill(tau)
        profile.disable()
        made.append(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
    assert made[1] <= 3 * made[0]


def test_memory_of_many_sequences() -> None:
    """Catches tables that hold every sequence on every scheme."""
    costs = synthetic_costs(64, 4, memory_bytes=20 * GIB)
    drawn = np.random.default_rng(0).lognormal(np.log(700), 1.05, 30_000)
    lengths = Lengths.of(np.clip(drawn.round(), 16, 8000).astype(int).tolist())
    problem = Problem(costs=costs)
    plan(problem, Lengths.of([8000]))
    tracemalloc.start()
    plan(problem, lengths)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak / len(lengths) < 2000


@settings(max_examples=40, deadline=None)
@given(costs=worlds(), seed=st.integers(0, 2**32))
def test_no_static_schedule_is_missed(costs: CostModel, seed: int) -> None:
    """Catches a bound or a late pipeline for which the best static schedule is left out."""
    rng = np.random.default_rng(seed)
    lengths = Lengths.of(some_lengths(rng, 40, 30, 20_000))
    problem = Problem(costs=costs, planner="static")
    try:
        best = plan(problem, lengths)
    except InfeasiblePlan:
        return
    for size in problem.group_sizes:
        with suppress(InfeasiblePlan):
            one = plan(problem.replace(static_size=size), lengths)
            assert best.predicted_s <= one.predicted_s * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(costs=small_costs(), devices=st.integers(1, 12), seed=st.integers(0, 2**32))
def test_no_schedule_beats_the_bound_of_pipelines_apart(
    costs: PipelineCosts, devices: int, seed: int
) -> None:
    """Catches a bound that asks for more devices than a schedule has."""
    lengths = some_lengths(np.random.default_rng(seed), 12, 12, 12_000)
    if all(cost.scheme.devices > devices for cost in costs.schemes):
        return
    table = pipeline_table(costs, lengths, devices)
    rows = BoundRows.of(table)
    loose = lower_bound(rows, devices)
    tight = lower_bound(rows, devices, apart=True)
    again = lower_bound(rows, devices, apart=True, known_s=loose.seconds)
    assert tight.seconds >= loose.seconds * (1 - 2e-5)
    assert again.seconds == pytest.approx(tight.seconds, rel=4e-5)
    problem = Problem(costs=costs, devices=devices)
    known = Known(problem=problem, bound_s=loose.seconds)
    drafts = list(SideBySide().drafts(table, known))
    if not drafts:
        return
    best = Improvement().scheduled(drafts, [], loose.seconds)[0]
    assert max(tight.seconds, again.seconds) <= checked_s(best) * (1 + 1e-9)


def test_what_no_stage_holds_opens_none() -> None:
    """Catches a sequence that is too long for a pipeline with stages, without constants."""
    line = Line(stages=2, c=0.0, cap=4000, util=1)
    assert line.usable(0.67, float("inf")) == (0.0, 0)


def test_a_pipeline_for_the_longest_has_its_devices() -> None:
    """Catches a bound that gives the longest a part of a pipeline: of 16 devices 8 are in the one
    that holds it, where the rest takes twice the devices."""
    costs = costs_of(("tp8", 0.0, 2e-4, 0.0, 10_000), ("cp1", 0.0, 8e-4, 0.0, 1000), devices=16)
    lengths = [10_000, *[1000] * 4000]
    table = pipeline_table(costs, lengths, 16)
    loose, tight = (lower_bound(BoundRows.of(table), 16, apart=one) for one in (False, True))
    assert loose.seconds == pytest.approx((4e6 * 8e-4 + 1e4 * 16e-4) / 16, rel=1e-4)
    # tp8 takes 2e-4 s a token, the other eight devices 1e-4 s.
    assert tight.seconds == pytest.approx(4_010_000 / (1 / 2e-4 + 1 / 1e-4), rel=1e-3)
    made = plan(Problem(costs=costs, devices=16), Lengths.of(lengths))
    assert made.gap < 0.005


def test_a_formula_plan_has_the_tighter_bound() -> None:
    """Catches plans of pipelines that carry the looser bound."""
    lengths = [30_000, *[400] * 3000]
    made = plan(Problem(costs=published("hydraulis-32b"), devices=64), Lengths.of(lengths))
    table = pipeline_table(published("hydraulis-32b"), lengths, 64)
    assert made.lower_bound_s > bound_s(table) * 1.05
