"""The lower bound."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.costs import CostModel, ExchangeCost, Speeds, synthetic_costs
from headrace.costs.library import roofline
from headrace.errors import InfeasiblePlan
from headrace.lengths import draw
from headrace.planning import Problem, plan
from headrace.planning.batch import PriceTable, SortedBatch
from headrace.planning.bounds import Bound, BoundRows, allows, lower_bound, step_bound_s
from headrace.planning.explain import require_fit
from headrace.planning.model_source import ModelSource
from headrace.simulator import peak_bytes, step_s
from headrace.spec import Architecture, LayerOption, Lengths, MicroBatch, Pipeline, Plan, Scheme
from headrace.spec.random_plans import random_plan, random_strategy
from headrace.units import GIB
from planning.brute_force import optimum_s
from planning.worlds import batches, worlds

LLAMA_8B = Architecture.preset("llama-8b")


def group_rows(costs: CostModel, lengths: list[int]) -> BoundRows:
    """Rows of groups, with weights replicated or sharded."""
    problem, batch = Problem(costs=costs, planner="static"), SortedBatch.of(Lengths.of(lengths))
    require_fit(problem, batch.tokens[0], batch.order[0])
    found = [
        BoundRows.of(PriceTable(batch, schemes, problem.devices))
        for weights in problem.holding
        if (schemes := problem.pricing.groups(weights))
    ]
    return BoundRows.joined(found)


def bound_s(costs: CostModel, lengths: list[int]) -> float:
    """The bound of groups, with weights whole or sharded."""
    return lower_bound(group_rows(costs, lengths), costs.cluster.devices).seconds


def plan_alone(costs: CostModel, tokens: int) -> Plan:
    """One sequence on one rank."""
    return plan(Problem(costs=costs, devices=1), Lengths(tokens=(tokens,)))


@settings(max_examples=60, deadline=None)
@given(
    devices=st.integers(1, 3),
    memory_gib=st.sampled_from([0.8, 1.2, 3, 40]),
    lengths=st.lists(st.integers(1, 60_000), min_size=1, max_size=3),
)
def test_nothing_beats_the_bound(devices: int, memory_gib: float, lengths: list[int]) -> None:
    """Catches a bound that is no bound: every plan of tiny batches is tried."""
    costs = synthetic_costs(devices, layers=1, memory_bytes=int(memory_gib * GIB))
    best_s = optimum_s(costs, lengths)
    if best_s is not None:
        assert bound_s(costs, lengths) <= best_s


def test_one_rank_and_one_micro_batch_is_exact() -> None:
    """Catches a bound that forgets the constants."""
    costs = synthetic_costs(1)
    lengths = [5000, 300, 7]
    assert bound_s(costs, lengths) == pytest.approx(optimum_s(costs, lengths), rel=2e-5)


def test_the_longest_sequence_binds() -> None:
    """Catches a bound by work alone."""
    costs = synthetic_costs(4)
    assert bound_s(costs, [100_000]) == pytest.approx(optimum_s(costs, [100_000]))


def test_a_size_that_is_too_slow_for_the_bound_does_not_count() -> None:
    """Catches pricing a long sequence at one rank's device-seconds, although one rank alone takes
    longer than the whole step."""
    one = rows(np.array([[10.0], [6.0]]))
    found = lower_bound(one, 4)
    assert found.longest_s == pytest.approx(6)
    assert found.seconds == pytest.approx(6)
    many = rows(np.repeat(np.array([[10.0], [6.0]]), 4, axis=1))
    # Four sequences on two ranks each: 48 device-seconds on 4 ranks; on one rank each: 10 s.
    assert lower_bound(many, 4).seconds == pytest.approx(10, rel=2e-5)
    # On five ranks no two of them share a rank within 10 s, and four need eight ranks.
    assert lower_bound(many, 5).seconds == pytest.approx(10, rel=2e-5)
    assert lower_bound(many, 8).seconds == pytest.approx(6, rel=2e-5)


def rows(seconds: np.ndarray) -> BoundRows:
    """Rows of groups of one and of two ranks without constants."""
    zero = np.zeros((2, 1))
    return BoundRows(
        ranks=np.array([[1.0], [2.0]]),
        stages=zero + 1,
        least_c=zero,
        shared=zero + 1,
        alone=seconds,
        work=seconds,
        spread=seconds,
        counts=np.ones(seconds.shape[1]),
    )


@settings(max_examples=40, deadline=None)
@given(costs=worlds(), lengths=batches(most=12))
def test_a_time_is_allowed_from_the_bound_on(costs: CostModel, lengths: Lengths) -> None:
    """Catches a bound that starts above the least time, and a question with another answer."""
    try:
        found = group_rows(costs, list(lengths.tokens))
    except InfeasiblePlan:
        return
    devices = costs.cluster.devices
    low_s = lower_bound(found, devices).seconds
    assert allows(found, devices, low_s * (1 + 3e-5))
    assert not allows(found, devices, low_s * (1 - 3e-5))


@settings(max_examples=40, deadline=None)
@given(costs=worlds(), lengths=batches(most=12))
def test_more_work_never_lowers_the_bound(costs: CostModel, lengths: Lengths) -> None:
    """Catches a search for the bound that is not monotone."""
    tokens = list(lengths.tokens)
    try:
        less, more = bound_s(costs, tokens), bound_s(costs, [*tokens, min(tokens)])
    except InfeasiblePlan:
        return
    assert less <= more * (1 + 2e-5)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), staged=st.booleans())
def test_no_step_beats_its_bound(seed: int, staged: bool) -> None:
    """Catches pull and push charged in full beside the computations that hide them, a bound that
    misses the costs' scale, and one of plans that all move everything."""
    rng = np.random.default_rng(seed)
    devices, layers = int(rng.integers(1, 9)), int(rng.integers(2, 7))
    pull_s, push_s = 10 ** rng.uniform(-4, 0, 2)
    costs = synthetic_costs(devices, layers).replace(
        exchange_s=ExchangeCost(
            pull_s=pull_s, push_s=push_s, update_s=0.01, sharded_share=rng.uniform()
        ),
        scale=rng.uniform(0.5, 2),
    )
    methods = {p: ("local" if p == 1 else "ulysses_z",) for p in costs.group_sizes}
    lengths = Lengths.of(rng.integers(1, 20_000, int(rng.integers(1, 14))).tolist())
    draw = random_strategy if staged else random_plan
    drawn = draw(lengths, devices, layers, rng, methods=methods)
    compute_s = step_s(drawn, costs.replace(exchange_s=ExchangeCost(), scale=1.0))
    bound = Bound(seconds=compute_s, longest_s=0.0, sharded_s=compute_s)
    assert step_bound_s(costs, bound) <= step_s(drawn, costs) * (1 + 1e-12)


@pytest.mark.parametrize("tokens", [1, 100_000])
def test_the_bound_of_one_micro_batch_is_close(tokens: int) -> None:
    """Catches a bound of computations alone, and one of the exchange alone."""
    wide = Architecture(layers=2, hidden=512, heads=8, kv_heads=8, ffn=2048, vocabulary=50_000)
    costs = synthetic_costs(1, architecture=wide).replace(
        exchange_s=ExchangeCost(pull_s=1e-2, push_s=2e-2, update_s=1e-3)
    )
    made = step_s(plan_alone(costs, tokens), costs)
    compute_s = step_s(plan_alone(costs, tokens), costs.replace(exchange_s=ExchangeCost()))
    bound = step_bound_s(costs, Bound(seconds=compute_s, longest_s=0.0))
    assert bound <= made <= bound * 1.01
    longer = (3e-2, compute_s)[tokens > 1] + 1e-3
    assert bound > longer * 0.999


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), memory_gib=st.sampled_from([0.6, 1.0, 2.0]))
def test_no_pipeline_beats_what_its_stages_take_together(seed: int, memory_gib: float) -> None:
    """Catches constants that are shared among more tokens than stages hold at once, and layers
    that are taken to be as slow as all micro-batches in flight need them."""
    rng = np.random.default_rng(seed)
    depth, layers = int(rng.integers(2, 5)), int(rng.integers(4, 9))
    costs = synthetic_costs(
        depth, layers, memory_bytes=int(memory_gib * GIB), speeds=Speeds(launch_s=1e-3)
    ).replace(exchange_s=ExchangeCost())
    problem = Problem(costs=costs, devices=depth)
    priced = problem.pricing.price(Scheme(pipeline=depth), "replicated")
    if priced is None or priced.stages is None:
        return
    least = [split.least for split in priced.stages.variants]
    tokens = rng.integers(1, least[0].alone.most_tokens + 1, int(rng.integers(1, 12))).tolist()
    lengths = Lengths.of([max(1, int(n * rng.uniform(0, 1) ** 3)) for n in tokens])
    batch = SortedBatch.of(lengths)
    bins = list[list[int]]()
    for i in rng.permutation(len(lengths)).tolist():
        if bins and rng.random() < 0.5:
            bins[-1].append(i)
        else:
            bins.append([i])
    split = priced.splits[int(rng.integers(len(priced.splits)))]
    assert split.stages is not None
    shares = split.stages.shares
    pipeline = Pipeline(scheme=priced.scheme, ranks=tuple(range(depth)), shares=shares)
    plans = [split.layer_plan(int(rng.integers(len(split.frontier.caps)))) for _ in bins]
    drawn = Plan(
        lengths=lengths,
        devices=depth,
        pipelines=(pipeline,),
        micro_batches=tuple(
            MicroBatch(pipeline=0, sequences=tuple(own), layers=layers)
            for own, layers in zip(bins, plans, strict=True)
            if layers is not None
        ),
        predicted_s=0.0,
        lower_bound_s=0.0,
    )
    if max(peak_bytes(drawn, costs)) <= costs.capacity_bytes:
        bound = lower_bound(BoundRows.of_models(batch, least), depth)
        assert bound.seconds <= step_s(drawn, costs) * (1 + 1e-9)


@pytest.mark.parametrize(("layers", "fullest"), [(5, 2), (8, 2), (9, 3)])
def test_layers_are_whole(layers: int, fullest: int) -> None:
    """Catches a bound that cuts a layer in parts: of five layers a stage of four has two."""
    costs = synthetic_costs(4, layers, speeds=Speeds(launch_s=0.0))
    priced = Problem(costs=costs, devices=4).pricing.price(Scheme(pipeline=4), "replicated")
    assert priced is not None
    assert priced.stages is not None
    batch = SortedBatch.of(Lengths.of([1000] * 500))
    seconds = lower_bound(
        BoundRows.of_models(batch, [one.least for one in priced.stages.variants]), 4
    ).seconds
    layer_s = costs.layer_seconds([1000], 1, LayerOption.of("local"))
    assert seconds >= 500 * fullest * sum(layer_s) * (1 - 1e-6)


def test_stages_that_hold_little_pay_constants_often() -> None:
    """Catches a bound that forgets memory: with less of it more micro-batches are needed."""
    found = []
    for memory_gib in (2, 8):
        costs = synthetic_costs(
            2, 8, memory_bytes=int(memory_gib * GIB), speeds=Speeds(launch_s=1e-3)
        )
        priced = Problem(costs=costs, devices=2).pricing.price(Scheme(pipeline=2), "replicated")
        assert priced is not None
        assert priced.stages is not None
        batch = SortedBatch.of(Lengths.of([100] * 2000))
        rows = BoundRows.of_models(batch, [split.least for split in priced.stages.variants])
        found.append(lower_bound(rows, 2).seconds)
    assert found[0] > found[1] * 1.02


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), devices=st.integers(1, 40))
def test_the_least_time_is_found(seed: int, devices: int) -> None:
    """Catches a search that ends where sequences still crowd, or far above the least time."""
    rng = np.random.default_rng(seed)
    work = np.sort(rng.lognormal(0, 1.5, (1, 60)))[:, ::-1] / np.array([[1.0], [1.7]])
    one = rows(np.ascontiguousarray(work))
    seconds = lower_bound(one, devices).seconds
    later_s = seconds * (1 + 3e-5)
    assert one.shares(later_s).min(axis=0).sum() <= devices
    assert seconds >= lower_bound(one, devices + 1).seconds * (1 - 2e-5)


def test_short_sequences_may_run_in_groups_that_do_not_hold_the_longest() -> None:
    """Catches a bound of pipelines with stages alone, where no group without stages holds the
    longest sequence: short ones are in such groups, and the plan was below the bound."""
    model = replace(LLAMA_8B, layers=2, hidden=4080, heads=12, kv_heads=2, ffn=14280)
    costs = roofline(model, "h100", devices=12, memory_bytes=11_790_775_680)
    long = [73550, 47041, 34299, 20945, 19017, 17337, 13131, 12926, 12218, 10065, 9664, 8050, 7475]
    short = [6583, 4919, 4507, 4086, 4029, 3139, 1931, 1611, 1375, 1277, 1082, 1064, 863, 795, 792]
    shorter = [751, 498, 497, 480, 478, 414, 285, 267, 192, 75]
    problem = Problem(costs=costs, sizes=(3,))
    lengths = Lengths.of([*long, *short, *shorter])
    groups = problem.pricing.groups("replicated"), problem.pricing.groups("sharded")
    assert max(group.most_tokens for held in groups for group in held) < lengths.longest
    made = plan(problem, lengths)
    assert made.lower_bound_s <= made.predicted_s
    source = ModelSource(problem=problem, batch=SortedBatch.of(lengths))
    flat = [BoundRows.of(PriceTable(source.batch, held, 12)) for held in groups if held]
    deeper = BoundRows.of_models(
        source.batch,
        [
            split.least
            for weights in problem.holding
            for scheme in problem.pricing.deeper(weights)
            if scheme.stages is not None
            for split in scheme.stages.variants
        ],
    )
    every = lower_bound(BoundRows.joined([*flat, deeper]), 12).seconds
    list(source.offers("any scheme", lambda: inf))
    assert source.bound.seconds <= every * (1 + 1e-9)


def test_the_bound_counts_schemes_that_no_search_looks_at() -> None:
    """Catches pipelines of uneven stages that are taken to need all stages times the slowest: a
    head of a large vocabulary made such a plan 8 % quicker than the bound of all plans."""
    model = replace(
        LLAMA_8B, layers=3, hidden=48, heads=12, kv_heads=6, ffn=168, vocabulary=128_256
    )
    costs = roofline(model, "gh200", devices=3, memory_bytes=115_791_424)
    lengths = Lengths.of([1])
    some, every = Problem(costs=costs, sizes=(1,)), Problem(costs=costs)
    assert plan(every, lengths).lower_bound_s <= plan(some, lengths).predicted_s


@pytest.mark.parametrize("devices", [8, 64])
def test_bounds_by_shape_are_below_those_of_each_scheme(devices: int) -> None:
    """Catches rounded lengths that make a bound tighter than it is, and shapes that lose one."""
    problem = Problem(costs=roofline(LLAMA_8B, "h100", devices=devices))
    batch = SortedBatch.of(draw("lognormal:median=2000,sigma=1.5,max=131072", tokens="1M"))
    schemes = problem.pricing.unlikely("replicated")
    staged = [scheme.stages for scheme in schemes if scheme.stages is not None]
    models = [split.least for stages in staged for split in stages.variants]
    assert len(models) > 4
    each, shapes = BoundRows.of_models(batch, models), BoundRows.of_shapes(batch, models)
    depths = (1 / shapes.shared[:, 0]).round().astype(int).tolist()
    found = dict(
        zip(zip(shapes.ranks[:, 0].tolist(), depths, strict=True), range(99), strict=False)
    )
    for row, model in enumerate(models):
        shape = found[model.width, model.depth]
        for name in ("alone", "work"):
            assert (getattr(shapes, name)[shape] <= getattr(each, name)[row] * (1 + 1e-9)).all()
        # Both sums are bounds, each by the way to count that makes its own the largest.
        assert shapes.spread[shape] @ shapes.counts <= each.spread[row] @ each.counts * 1.001
