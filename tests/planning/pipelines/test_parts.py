"""Bound, estimate, dispatch, packing, references: the parts of the planner of pipelines."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import accumulate, product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.costs.pipeline_costs import PipelineCosts
from headrace.planning.pipelines.batch import Batch
from headrace.planning.pipelines.bounds import Relaxation
from headrace.planning.pipelines.climb import climb, filled, rounded
from headrace.planning.pipelines.differencing import differenced
from headrace.planning.pipelines.dispatch import dispatch, estimate_s
from headrace.planning.pipelines.dynamic_program import proposed
from headrace.planning.pipelines.fluid import fluid
from headrace.planning.pipelines.head import opened
from headrace.planning.pipelines.local import improve
from headrace.planning.pipelines.packing import pack, pigeons_s
from headrace.planning.pipelines.paper import greedy
from headrace.planning.pipelines.programs import dispatch_program, packing_program
from headrace.planning.pipelines.proposal import propose
from headrace.planning.pipelines.solution import packed, solved
from headrace.planning.pipelines.strategy_bound import strategy_bound_s
from headrace.planning.pipelines.world import Counts, World
from planning.pipelines.worlds import batches, costs_of, log_normal, published, small_costs

BIG = World.of(published("hydraulis-32b"), 64)


def counts_of(world: World, **wanted: int) -> Counts:
    """``tp4_pp2=3`` is three pipelines of tp4-pp2."""
    names = {name.replace("_", "-"): n for name, n in wanted.items()}
    assert set(names) <= {pipe.name for pipe in world.pipes}
    return tuple(names.get(pipe.name, 0) for pipe in world.pipes)


STRATEGIES = (
    counts_of(BIG, tp16=4),
    counts_of(BIG, tp16=1, tp8=6),
    counts_of(BIG, tp16=1, tp8=2, tp4=8),
    counts_of(BIG, tp16=1, tp8_pp2=1, tp4_pp2=4),
    counts_of(BIG, tp16=1, tp2_pp4=6),
)


@pytest.mark.parametrize("counts", STRATEGIES, ids=BIG.text)
def test_dispatch_beats_the_papers_greedy(counts: Counts) -> None:
    """Catches a dispatch that a hundred random trials beat, and an estimate far from it."""
    for seed in range(3):
        batch = Batch(BIG, log_normal(200_000, seed))
        theirs = packed(batch, counts, greedy(batch, counts, seed=seed, trials=20))
        ours = solved(batch, counts, steps=12)
        assert ours is not None
        assert ours.seconds <= theirs.seconds * (1 + 1e-9)
        assert ours.seconds <= fluid(batch, counts).seconds * 1.1


@pytest.mark.parametrize("counts", STRATEGIES[:3], ids=BIG.text)
def test_dispatch_without_stages_is_within_a_few_thousandths(counts: Counts) -> None:
    """Catches a search that stops early: work alone, without constants, levels to 0.2 %."""
    free = World(devices=64, pipes=tuple(
        type(pipe)(name=pipe.name, devices=pipe.devices, stages=pipe.stages, a=pipe.a, b=pipe.b,
                   c=0.0, cap=pipe.cap, util=1) for pipe in BIG.pipes))  # fmt: skip
    for seed in range(3):
        batch = Batch(free, log_normal(200_000, seed))
        found = dispatch(batch, counts, fluid(batch, counts))
        improve(batch, found, steps=60, target_s=0.0)
        least = sum(load for load in found.loads) / len(found.loads)
        assert found.seconds <= least * 1.002


def test_no_greedy_trial_is_lost() -> None:
    """Catches sequences that trials side by side mix up, or put where they do not fit."""
    batch = Batch(BIG, log_normal(100_000, 1))
    counts = STRATEGIES[3]
    found = greedy(batch, counts, seed=0, trials=7)
    assert sorted(i for own in found.members for i in own) == list(range(len(batch)))
    for k, own in zip(found.pipes, found.members, strict=True):
        assert all(batch.tokens[i] <= BIG.pipes[k].cap for i in own)


@settings(max_examples=80, deadline=None)
@given(costs=small_costs(1), lengths=batches(14, longest=3000))
def test_packing_holds_and_is_no_worse_than_its_bound(
    costs: PipelineCosts, lengths: list[int]
) -> None:
    """Catches micro-batches over the room, lost sequences, and seconds that are not theirs."""
    world = World.of(costs, 4) if costs.schemes[0].scheme.devices <= 4 else World.of(costs, 6)
    pipe = world.pipes[0]
    batch = Batch(world, [min(tokens, pipe.cap) for tokens in lengths])
    members = range(len(batch))
    seconds, bins = pack(batch, 0, members)
    assert sorted(i for own in bins for i in own) == list(members)
    assert all(sum(batch.tokens[i] for i in own) <= pipe.cap for own in bins)
    times = [sum(batch.seconds(0)[i] for i in own) + pipe.c for own in bins]
    assert seconds == pytest.approx(sum(times) + (pipe.stages - 1) * max(times))


@settings(max_examples=60, deadline=None)
@given(costs=small_costs(1), lengths=batches(16, longest=3000), part=st.floats(0.9, 1.3))
def test_packing_that_is_good_enough(costs: PipelineCosts, lengths: list[int], part: float) -> None:
    """Catches a search that stops before it is good enough, and micro-batches that are not the
    ones it tells the seconds of."""
    world = World.of(costs, 4)
    pipe = world.pipes[0]
    batch = Batch(world, [min(tokens, pipe.cap) for tokens in lengths])
    best_s, _ = pack(batch, 0, range(len(batch)))
    seconds, bins = pack(batch, 0, range(len(batch)), enough_s=best_s * part)
    assert seconds <= best_s * max(1.0, part) * (1 + 1e-9)
    assert sorted(i for own in bins for i in own) == list(range(len(batch)))
    times = [sum(batch.seconds(0)[i] for i in own) + pipe.c for own in bins]
    assert seconds == pytest.approx(pipe.pipeline_s(times))


def test_good_enough_by_hand() -> None:
    """Catches an improvement that stops too soon or never: longest first is 17 and 13 seconds, two
    of them at once 47; a move makes it 46, another 45."""
    world = World.of(costs_of(("pp2", 0.0, 1e-2, 0.0, 2000)), 2)
    two = World(devices=2, pipes=(replace(world.pipes[0], util=1500),))
    batch = Batch(two, [800, 700, 600, 500, 400])
    assert pack(batch, 0, range(5))[0] == pytest.approx(45)
    assert pack(batch, 0, range(5), enough_s=47.01) == (pytest.approx(47), [[0, 3, 4], [1, 2]])
    assert pack(batch, 0, range(5), enough_s=46.01)[0] < 46.02


def test_runs_fill_pipelines_one_after_the_other() -> None:
    """Catches pipelines that end later than they may or could have taken more, work and tokens
    that are not their members', and sequences that nobody has."""
    batch = Batch(BIG, log_normal(200_000, 2, longest=6000))
    counts = counts_of(BIG, tp2_pp4=5)
    [k] = [k for k, n in enumerate(counts) if n]
    begun = opened(batch, counts, ((k, 0),))
    left = begun.run(k, range(len(batch)), 4.0)
    assert sorted([*left, *(i for own in begun.members for i in own)]) == list(range(len(batch)))
    assert len(left) > 0
    ends = dict((q, load) for load, q in begun.ready[k])
    for q, own in enumerate(begun.members):
        assert own == list(range(own[0], own[-1] + 1))
        assert begun.work[q] == pytest.approx(sum(batch.seconds(k)[i] for i in own))
        assert begun.held[q] == sum(batch.tokens[i] for i in own)
        assert 3.4 < ends[q] <= 4.0
        assert begun.load_with(q, own[-1] + 1) > 3.5


@settings(max_examples=100, deadline=None)
@given(weights=st.lists(st.integers(1, 99), min_size=1, max_size=6), v=st.integers(1, 4))
def test_pigeons_are_a_bound(weights: list[int], v: int) -> None:
    """Catches a count of pigeons that is one too many: no way to fill ``v`` micro-batches gets the
    largest below it."""
    weights.sort(reverse=True)
    sums = [0.0, *accumulate(map(float, weights))]
    least = min(
        max(sum(w for w, home in zip(weights, homes, strict=True) if home == b) for b in range(v))
        for homes in product(range(v), repeat=len(weights))
    )
    assert pigeons_s(sums, 0, len(weights), v) <= least


def test_pigeons_by_hand() -> None:
    """Catches a bound that is true and useless: five alike in two micro-batches are three in one;
    in a run that begins later the sums before it play no part."""
    assert pigeons_s([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], 0, 5, 2) == 6
    assert pigeons_s([7.0, 11.0, 14.0, 16.0], 0, 3, 2) == 5
    assert pigeons_s([1.0, 9.0, 13.0, 16.0, 18.0], 1, 4, 2) == 5
    assert pigeons_s([0.0, 5.0], 0, 1, 1) == 0


def test_a_run_of_whole_sequences() -> None:
    """Catches runs told as if sequences could be cut: three of a second on two stages, where two
    micro-batches are the most that keep devices busy, take 3 + 2, not 3 + 1.5."""
    world = World.of(costs_of(("pp2", 0.0, 1e-3, 0.0, 2000)), 2)
    pipe = replace(world.pipes[0], util=1500)
    sums = [0.0, 1.0, 2.0, 3.0]
    assert pipe.run_s(sums, 0, 3, 0.0, 3000, 1.0) == pytest.approx(5.0)
    assert pipe.load_s(3.0, 3000, 1.0) == pytest.approx(4.5)


@settings(max_examples=60, deadline=None)
@given(costs=small_costs(3), lengths=batches(30), numbers=st.tuples(*[st.integers(0, 3)] * 3))
def test_a_strategy_is_not_ruled_out_by_what_it_does(
    costs: PipelineCosts, lengths: list[int], numbers: tuple[int, int, int]
) -> None:
    """Catches a bound that closes a strategy at a time that a plan of it reaches: the others would
    not be looked at where they are better."""
    world = World.of(costs, 24)
    counts = numbers[: len(world.pipes)]
    batch = Batch(world, [min(tokens, world.pipes[0].cap) for tokens in lengths])
    ours = solved(batch, counts, steps=20) if any(counts) else None
    if ours is not None:
        relaxation = Relaxation(batch)
        assert not relaxation.closed(counts, relaxation.shares(ours.seconds * (1 + 1e-9)))


def test_strategies_are_ruled_out() -> None:
    """Catches a bound that closes nothing: one small pipeline cannot be as quick as sixteen, nor
    can a single one hold all the long sequences in the time of four."""
    batch = Batch(BIG, log_normal(200_000, 0))
    relaxation = Relaxation(batch)
    shares = relaxation.shares(4.0)
    assert relaxation.closed(counts_of(BIG, tp16=4), shares)
    assert not relaxation.closed(counts_of(BIG, tp16=1, tp4=12), shares)
    long = Batch(BIG, [30_000] * 8 + [300] * 20)
    relaxation = Relaxation(long)
    assert relaxation.closed(counts_of(BIG, tp16=1, tp4=12), relaxation.shares(15.0))
    assert not relaxation.closed(counts_of(BIG, tp16=4), relaxation.shares(15.0))


def test_a_few_long_ones_among_very_many() -> None:
    """Catches pipelines with stages that are filled by length only, one of them with all the short
    sequences, where dealing them out is better."""
    world = World.of(costs_of(("pp2", 1e-9, 1e-4, 0.0, 5000)), 64)
    batch = Batch(world, [5000] * 3 + [1] * 3000)
    ours = solved(batch, (32,), steps=0)
    assert ours is not None
    assert ours.seconds == pytest.approx(world.pipes[0].alone_s(5000))


def test_pipelines_with_stages_are_planned_in_milliseconds() -> None:
    """Catches packing that tries everything for every pipeline; the limits leave a factor of ten
    for slow machines."""
    for devices, tokens, limit_s in ((64, 200_000, 0.015), (1024, 3_200_000, 0.1)):
        world = World.of(published("hydraulis-32b"), devices)
        batch = Batch(world, log_normal(tokens, 1))
        names = {"tp16": devices // 64, "tp2-pp4": devices // 64 * 6}
        counts = tuple(names.get(pipe.name, 0) for pipe in world.pipes)
        spent = list[float]()
        for _ in range(3):
            before = time.process_time()
            ours = solved(batch, counts, steps=12)
            spent.append(time.process_time() - before)
        assert ours is not None
        assert ours.seconds <= strategy_bound_s(batch, counts) * 1.1
        assert min(spent) < limit_s


@pytest.mark.parametrize("name", ["tp8", "tp4-pp2", "tp2-pp4"])
def test_packing_is_close_to_the_integer_program(name: str) -> None:
    """Catches a heuristic that loses more than a percent or two, and one that beats what is
    proved, which would be a wrong program."""
    k = [pipe.name for pipe in BIG.pipes].index(name)
    lengths = [2900, 2400, 1900, 1500, 900, 700, 400, 300, 200]
    batch = Batch(BIG, lengths)
    answer = packing_program(batch, k, range(len(batch)), limit_s=2.0)
    seconds, _ = pack(batch, k, range(len(batch)))
    assert answer.members is not None
    assert answer.bound_s * (1 - 1e-6) <= seconds <= answer.seconds * 1.02


def test_dispatch_is_close_to_the_integer_program() -> None:
    """Catches a dispatch that a solver beats by more than a percent where pipelines have one
    stage, and a program whose proof our plan contradicts."""
    batch = Batch(BIG, [9000, 5000, 4000, 3000, 2000, 1500, 1200, 900, 500, 300])
    counts = counts_of(BIG, tp8=1, tp4=2)
    answer = dispatch_program(batch, counts, limit_s=5.0)
    ours = solved(batch, counts, steps=40)
    assert answer.members is not None
    assert ours is not None
    assert sorted(i for own in answer.members for i in own) == list(range(len(batch)))
    assert answer.bound_s * (1 - 1e-6) <= ours.seconds <= answer.seconds * 1.01


@settings(max_examples=60, deadline=None)
@given(costs=small_costs(), lengths=batches(12))
def test_more_devices_and_fewer_sequences_lower_the_bound(
    costs: PipelineCosts, lengths: list[int]
) -> None:
    """Catches a bisection that ends at the wrong side."""
    world = World.of(costs, 8)
    fits = [min(tokens, world.pipes[0].cap) for tokens in lengths]
    bound_s = Relaxation(Batch(world, fits)).bound().seconds
    wider = World(devices=16, pipes=world.pipes)
    assert Relaxation(Batch(wider, fits)).bound().seconds <= bound_s * (1 + 2e-4)
    assert Relaxation(Batch(world, fits[:1])).bound().seconds <= bound_s * (1 + 2e-4)


@settings(max_examples=40, deadline=None)
@given(costs=small_costs(2), lengths=batches(30), numbers=st.tuples(*[st.integers(0, 3)] * 2))
def test_nothing_beats_the_bound_of_a_strategy(
    costs: PipelineCosts, lengths: list[int], numbers: tuple[int, int]
) -> None:
    """Catches pigeons and shares that are no bound."""
    world = World.of(costs, 24)
    counts = numbers[: len(world.pipes)]
    batch = Batch(world, [min(tokens, world.pipes[0].cap) for tokens in lengths])
    ours = solved(batch, counts, steps=20) if any(counts) else None
    if ours is not None:
        assert strategy_bound_s(batch, counts) <= ours.seconds * (1 + 1e-9)


def test_two_long_sequences_for_one_pipeline() -> None:
    """Catches a bound of a strategy that lets one pipeline's load flow to those that cannot hold
    it."""
    world = World.of(costs_of(("tp2", 0.0, 1e-3, 0.5, 9000), ("cp1", 0.0, 1e-3, 0.0, 1000)), 64)
    batch = Batch(world, [8000, 7000, 500])
    assert strategy_bound_s(batch, (1, 60)) == pytest.approx(15 + 0.5 * 15 / 9, rel=1e-3)
    assert strategy_bound_s(batch, (2, 60)) == pytest.approx(8.5)


def test_the_longest_sequence_binds() -> None:
    """Catches a bound by work alone, and one that forgets the stages."""
    world = World.of(costs_of(("pp2", 0.0, 1e-4, 0.1, 4000), ("tp4", 0.0, 4e-5, 0.0, 9000)), 400)
    bound = Relaxation(Batch(world, [8000, 100])).bound()
    assert bound.by_longest
    assert bound.seconds == pytest.approx(0.32)
    short = Relaxation(Batch(world, [3000])).bound()
    assert short.seconds == pytest.approx(0.12), "tp4; with two stages 0.8"


def test_the_estimate_knows_what_does_not_fit() -> None:
    """Catches strategies ranked first because they cannot hold the longest sequence."""
    batch = Batch(BIG, [20_000, 300])
    assert fluid(batch, counts_of(BIG, tp4=16)).seconds == inf
    assert fluid(batch, counts_of(BIG, tp16=1)).seconds < inf
    assert estimate_s(batch, counts_of(BIG, tp16=1), 1e-3) == inf


def test_pruning_by_a_limit_changes_no_estimate() -> None:
    """Catches a shortcut that rejects strategies below the limit."""
    batch = Batch(BIG, log_normal(200_000, 4))
    for counts in STRATEGIES:
        whole = fluid(batch, counts).seconds
        assert fluid(batch, counts, below_s=whole * 1.01).seconds == pytest.approx(whole, rel=2e-3)
        assert fluid(batch, counts, below_s=whole * 0.99).seconds == inf


def test_climbing_finds_the_better_mixture() -> None:
    """Catches exchanges that never change the sizes, or leave devices idle."""
    batch = Batch(BIG, log_normal(200_000, 5))
    start = counts_of(BIG, tp16=4)

    def score(counts: Counts, below_s: float) -> float:
        return fluid(batch, counts, below_s=below_s).seconds

    seconds, best, path = climb(BIG, start, score(start, inf), score, range(len(start)), 200)
    assert seconds < 0.7 * path[0][0]
    assert BIG.used(best) <= 64
    assert path[-1] == (seconds, best)


def test_rounding_keeps_a_pipe_for_the_longest() -> None:
    """Catches strategies that lost the one pipeline that holds the longest sequence."""
    amounts = [0.0] * len(BIG.pipes)
    amounts[[pipe.name for pipe in BIG.pipes].index("tp4")] = 16.0
    amounts[0] = 0.2
    counts = rounded(BIG, amounts, 30_000)
    assert counts[0] == 1
    assert BIG.used(counts) <= 64
    assert BIG.used(filled(BIG, counts, range(len(counts)))) == 64


def test_proposals_serve_every_longest_sequence() -> None:
    """Catches candidates for the longest batches only, and a choice that no seed holds."""
    iterations = [log_normal(100_000, seed) for seed in range(7)]
    made = propose(BIG, iterations, 3)
    assert made == propose(BIG, iterations, 3)
    assert all(BIG.used(counts) <= 64 for counts in made.candidates)
    for longest, counts in made.classes:
        assert any(n and p.cap >= longest for n, p in zip(counts, BIG.pipes, strict=True))
    assert [longest for longest, _ in made.classes] == sorted(x for x, _ in made.classes)


@pytest.mark.parametrize("relaxed", [False, True])
def test_the_papers_proposal(relaxed: bool) -> None:
    """Catches strategies over the devices, and a longest sequence that none of them holds."""
    lengths = [tokens for seed in range(2) for tokens in log_normal(100_000, seed)]
    found = proposed(BIG, lengths, relaxed=relaxed, bins=16, units=64)
    assert len(found) > 2
    assert all(0 < BIG.used(counts) <= 64 for counts in found)
    longest = max(lengths)
    assert any(
        n and pipe.cap >= longest
        for counts in found for n, pipe in zip(counts, BIG.pipes, strict=True)
    )  # fmt: skip


def test_the_dynamic_program_by_hand() -> None:
    """Catches a table that mixes up devices and pipelines: short sequences on single devices, the
    long one on the only scheme that holds it."""
    world = World.of(costs_of(("cp1", 0.0, 1.0, 0.0, 10), ("tp2", 0.0, 0.9, 0.0, 100)), 4)
    found = proposed(world, [10] * 18 + [100], relaxed=False, bins=10)
    assert found[0] == (0, 4)
    assert found[-1] == (1, 2)


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.integers(1, 500), max_size=30), parts=st.integers(1, 9))
def test_differencing_loses_nothing(weights: list[int], parts: int) -> None:
    """Catches sets that lose or double numbers when they are joined."""
    sets = differenced(weights, parts)
    assert len(sets) == parts
    assert sorted(i for own in sets for i in own) == list(range(len(weights)))
    sums = [sum(weights[i] for i in own) for own in sets]
    assert max(sums) - min(sums) <= max(weights, default=0)


def test_differencing_by_hand() -> None:
    """Catches greedy filling in its place: 8 7 6 5 4 in two sets is 16 and 14 by differencing."""
    sets = differenced([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in own) for own in sets) == [14, 16]
