"""Bound, estimate, dispatch, packing, references: the parts of the planner of pipelines."""

from __future__ import annotations

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
from headrace.planning.pipelines.dispatch import dispatch, estimate_s
from headrace.planning.pipelines.fluid import fluid
from headrace.planning.pipelines.head import opened
from headrace.planning.pipelines.local import improve
from headrace.planning.pipelines.packing import pack, pigeons_s
from headrace.planning.pipelines.proposal import propose
from headrace.planning.pipelines.solution import solved
from headrace.planning.pipelines.world import Counts, World
from planning.pipeline_worlds import batches, costs_of, log_normal, published, small_costs

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
