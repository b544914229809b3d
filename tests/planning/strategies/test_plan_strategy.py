"""Plans of pipelines of different shapes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.costs import FORMULA_METHODS, CostModel, Speeds, synthetic_costs
from headrace.errors import InfeasiblePlan
from headrace.planning import Problem, static_plan
from headrace.planning.strategies import Schemes, plan_strategy
from headrace.planning.strategies.propose import homogeneous
from headrace.simulator import peak_bytes, simulate, step_s
from headrace.spec import Lengths, Plan, Scheme, Strategy, check_programs, compile_plan
from headrace.spec.plan import Working
from headrace.units import GIB
from planning.worlds import log_normal


@st.composite
def worlds(draw: st.DrawFn) -> CostModel:
    """Costs of 1 to 8 ranks, from plenty of memory to hardly any, with launches and links from
    free to dear, of methods with and without tensor parallelism."""
    speeds = Speeds(
        launch_s=draw(st.sampled_from([0.0, 5e-5, 1e-3])),
        link_bytes_per_s=draw(st.sampled_from([1e11, 5e9])),
    )
    return synthetic_costs(
        draw(st.integers(1, 8)), draw(st.sampled_from([1, 3, 4])),
        memory_bytes=int(draw(st.sampled_from([1.5, 3, 10, 40])) * GIB), speeds=speeds,
        methods=draw(st.sampled_from([FORMULA_METHODS, ("local", "megatron_ts"), None])),
    ).replace(memory_margin=draw(st.sampled_from([0.0, 0.07])))  # fmt: skip


def batches() -> st.SearchStrategy[Lengths]:
    length = st.one_of(st.integers(1, 200), st.integers(1, 100_000), st.just(1024))
    return st.lists(length, min_size=1, max_size=12).map(Lengths.of)


def check(made: Plan, costs: CostModel) -> None:
    """Everything that must hold of any plan of strategies."""
    held = Counter(i for micro in made.micro_batches for i in micro.sequences)
    assert held == Counter(range(len(made.lengths)))
    ranks = [rank for pipeline in made.pipelines for rank in pipeline.ranks]
    assert len(set(ranks)) == len(ranks)
    assert max(ranks) < made.devices
    for micro in made.micro_batches:
        scheme = made.pipelines[micro.pipeline].scheme
        width = scheme.tensor * scheme.context
        assert {str(option) for option in micro.layers.options} <= set(costs.options[width])
        assert micro.order == costs.order_of(width, micro.layers)
    assert max(peak_bytes(made, costs)) <= costs.capacity_bytes
    assert 0 < made.lower_bound_s <= made.predicted_s
    assert made.predicted_s == step_s(made, costs)
    programs = compile_plan(made, costs.shape.bucket_count)
    check_programs(programs, made, costs.shape.bucket_count)
    timeline = simulate(programs, made, costs)
    assert timeline.seconds == pytest.approx(made.predicted_s, rel=1e-9)


def best_of_one_scheme(schemes: Schemes, lengths: Lengths) -> list[Plan]:
    """The plans of all strategies of one scheme that hold the batch."""
    plans = []
    for strategy in homogeneous(schemes):
        try:
            plans.append(
                plan_strategy(schemes.problem, lengths, strategies=(strategy,), schemes=schemes)
            )
        except InfeasiblePlan:
            continue
    return plans


@settings(max_examples=30, deadline=None)
@given(costs=worlds(), lengths=batches(), seed=st.integers(0, 3))
def test_any_batch_in_any_world(costs: CostModel, lengths: Lengths, seed: int) -> None:
    """Catches lost sequences, exceeded memory, shared ranks, a bound above the plan, programs that
    deadlock, a plan that one of one scheme or a static one beats, and dice that no seed holds."""
    problem = Problem(costs=costs, devices=costs.cluster.devices)
    schemes = Schemes(problem)
    try:
        made = plan_strategy(problem, lengths, seed=seed, schemes=schemes)
    except InfeasiblePlan:
        assert best_of_one_scheme(schemes, lengths) == []
        return
    check(made, costs)
    assert (made.seed, made.planner) == (seed, "strategies")
    assert 2 <= len(made.why) <= 5
    for other in best_of_one_scheme(schemes, lengths):
        check(other, costs)
        assert made.predicted_s <= other.predicted_s * (1 + 1e-12)
        assert made.lower_bound_s == pytest.approx(other.lower_bound_s)
    listed = plan_strategy(
        problem, lengths, strategies=tuple(homogeneous(schemes)), schemes=schemes
    )
    check(listed, costs)
    for p in problem.group_sizes:
        try:
            static_s = static_plan(problem, lengths, p).predicted_s * (1 + 1e-12)
        except InfeasiblePlan:
            continue
        assert made.predicted_s <= static_s
        assert listed.predicted_s <= static_s
    again = Problem(costs=costs, devices=costs.cluster.devices)
    assert plan_strategy(again, lengths, seed=seed) == made


NAMED = {
    4: ("1*tp2 + 2*cp1", "1*pp2 + 1*cp2", "1*tp2-pp2", "1*pp4", "1*cp2-pp2", "1*tp2 + 1*pp2"),
    8: ("1*tp2-pp2 + 1*cp2 + 2*cp1", "1*tp4 + 2*tp2", "2*tp2-pp2", "1*cp3 + 1*tp2 + 1*pp3"),
}


@pytest.mark.parametrize("memory_gib", [40, 4])
@pytest.mark.parametrize(("devices", "text"), [(n, text) for n in NAMED for text in NAMED[n]])
def test_named_strategies(devices: int, text: str, memory_gib: int) -> None:
    """Catches a plan of another strategy than asked for, and one whose prediction is not the
    simulator's."""
    costs = synthetic_costs(devices, 6, memory_bytes=memory_gib * GIB, methods=FORMULA_METHODS)
    problem, strategy = Problem(costs=costs, devices=devices), Strategy.parse(text)
    made = plan_strategy(problem, log_normal(40, 2, longest=4000), strategies=(strategy,))
    check(made, costs)
    assert made.strategy == strategy


def test_tensor_blocks_stand_at_multiples_of_their_width() -> None:
    """Catches a tensor block across nodes because a pipeline of odd size came before."""
    costs = synthetic_costs(8, 6, methods=FORMULA_METHODS)
    problem = Problem(costs=costs, devices=8)
    strategies = (Strategy.parse("1*cp3 + 1*tp2 + 1*tp2 + 1*cp1"),)
    made = plan_strategy(problem, log_normal(60, 2), strategies=strategies)
    firsts = [p.ranks[0] for p in made.pipelines if p.scheme.tensor == 2]
    assert firsts == [0, 2]


def test_the_last_stage_has_fewer_layers_where_the_head_is_heavy() -> None:
    """Catches stages cut by layers alone, which leave the last one with the head on top."""
    costs = synthetic_costs(2, 8, methods=("local", "megatron_ts"))
    even = plan_strategy(
        Problem(costs=costs, devices=2), Lengths.of([2000] * 16),
        strategies=(Strategy.parse("1*pp2"),),
    )  # fmt: skip
    first, last = even.pipelines[0].shares
    assert first > last
    assert first + last == 8


def test_micro_batches_in_flight_share_the_memory() -> None:
    """Catches a first stage that plans as if it held one micro-batch at a time: with stages less
    may be kept of each."""
    costs = synthetic_costs(4, 8, memory_bytes=2 * GIB, methods=("local",), sizes=(1,))
    problem = Problem(costs=costs, devices=4)
    made = plan_strategy(
        problem, Lengths.of([4500] * 24), strategies=(Strategy.parse("1*pp4"),)
    )  # fmt: skip
    check(made, costs)
    peaks = peak_bytes(made, costs)
    assert max(peaks) > 0.8 * costs.capacity_bytes
    assert len(made.micro_batches) >= 4


def test_schemes_follow_from_what_methods_fetch() -> None:
    """Catches tensor degrees for methods that need all rows of a layer, and none for those that
    work with shards as they lie."""
    both = Schemes(Problem(costs=synthetic_costs(4, methods=FORMULA_METHODS), devices=4))
    plain = Schemes(Problem(costs=synthetic_costs(4, methods=("local", "ulysses_z")), devices=4))
    tensor = {str(scheme) for scheme in both.supported() if scheme.tensor > 1}
    assert tensor == {"tp2", "tp2-pp2", "tp3", "tp4"}
    assert not [scheme for scheme in plain.supported() if scheme.tensor > 1]
    slots = both.slots(Scheme(tensor=2))
    assert {option.attention for slot in slots for option in slot} == {"megatron_ts"}


def with_blocks(costs: CostModel) -> CostModel:
    """The same costs with a method that shares weights in blocks of two of four ranks."""
    cost = costs.options[4]["megatron_ts"]
    blocks = replace(cost, fetched=(1 / 2 - 1 / 4) / (1 - 1 / 4), order="zigzag")
    return costs.replace(options={**costs.options, 4: {**costs.options[4], "in_blocks": blocks}})


@pytest.mark.parametrize("holding", ["whole", "sharded"])
def test_blocks_within_a_group(holding: Working) -> None:
    """Catches a tensor degree beside a context degree with methods that need all rows, with blocks
    of another size, or with memory for weights that ranks do not hold."""
    costs = with_blocks(synthetic_costs(4, 4, memory_bytes=6 * GIB, methods=FORMULA_METHODS))
    problem = Problem(costs=costs, devices=4, holding=(holding,))
    schemes = Schemes(problem)
    assert {str(s) for s in schemes.supported() if s.context > 1 < s.tensor} == {"tp2-cp2"}
    strategies = (Strategy.parse("1*tp2-cp2"),)
    made = plan_strategy(problem, log_normal(30, 3, 20_000), strategies=strategies, schemes=schemes)
    check(made, costs)
    assert made.working == holding
    for micro in made.micro_batches:
        assert {str(option) for option in micro.layers.options} == {"in_blocks"}
        assert micro.order == "zigzag"


def test_what_does_not_fit_says_by_how_much_and_what_would() -> None:
    """Catches a refusal that leaves the user alone with it."""
    costs = synthetic_costs(4, 8, memory_bytes=3 * GIB, methods=FORMULA_METHODS)
    problem = Problem(costs=costs, devices=4)
    lengths = Lengths.of([100, 60_000])
    with pytest.raises(InfeasiblePlan, match=r"sequence 1 of 60,000 tokens.*bytes less.*context"):
        plan_strategy(problem, lengths, strategies=(Strategy.parse("4*cp1"),))
    roomy = synthetic_costs(4, 8, memory_bytes=8 * GIB, methods=FORMULA_METHODS)
    with pytest.raises(InfeasiblePlan, match=r"a strategy with .*which holds it"):
        plan_strategy(
            Problem(costs=roomy, devices=4), Lengths.of([30_000]),
            strategies=(Strategy.parse("4*cp1"),),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("3*tp2", "6 ranks, wanted 1 to 4"),
        ("1*pp4", "3 layers"),
        ("1*tp2-cp2", "planner.candidates"),
    ],
)
def test_strategies_that_nothing_supports(text: str, said: str) -> None:
    """Catches a strategy that fails somewhere inside instead of by its name."""
    costs = synthetic_costs(4, 3, methods=FORMULA_METHODS)
    with pytest.raises(InfeasiblePlan, match=said) as refused:
        plan_strategy(
            Problem(costs=costs, devices=4), Lengths.of([100]),
            strategies=(Strategy.parse(text),),
        )  # fmt: skip
    assert text in str(refused.value)


def test_scale_changes_the_prediction_and_nothing_else() -> None:
    """Catches a correction learnt while training that turns the plan over."""
    costs = synthetic_costs(4, 6, methods=FORMULA_METHODS)
    problem, lengths = Problem(costs=costs, devices=4), log_normal(30, 5)
    schemes = Schemes(problem)
    made = plan_strategy(problem, lengths, schemes=schemes)
    scaled = plan_strategy(problem.rescaled(1.7), lengths, schemes=schemes)
    assert scaled.hash == made.hash
    assert scaled.predicted_s == pytest.approx(1.7 * made.predicted_s)
    assert scaled.lower_bound_s == pytest.approx(1.7 * made.lower_bound_s)


def test_listed_layers_are_kept() -> None:
    """Catches stages and tensor blocks that run a layer by another method than the one fixed."""
    costs = synthetic_costs(4, 4, methods=FORMULA_METHODS)
    layers = ("megatron_ts", "megatron_ts", "ulysses_z", "megatron_ts")
    problem = Problem(costs=costs, devices=4, layers=layers)
    schemes = Schemes(problem)
    assert not [scheme for scheme in schemes.supported() if scheme.tensor > 1]
    strategies = (Strategy.parse("1*cp2-pp2"),)
    made = plan_strategy(problem, log_normal(20, 1), strategies=strategies, schemes=schemes)
    check(made, costs)
    for micro in made.micro_batches:
        assert [option.attention for option in micro.layers.options] == list(layers)


def test_what_is_not_hidden_is_told() -> None:
    """Catches a plan that says nothing of weights that take longer to move than a short batch to
    compute, and one that speaks of them where long sequences hide them."""
    slow = Speeds(link_bytes_per_s=5e9)
    costs = synthetic_costs(4, 4, speeds=slow, methods=FORMULA_METHODS)
    problem, strategies = Problem(costs=costs, devices=4), (Strategy.parse("4*cp1"),)
    short = plan_strategy(problem, Lengths.of([16] * 8), strategies=strategies)
    assert any("are not hidden" in text for text in short.why)
    long = plan_strategy(problem, Lengths.of([60_000] * 8), strategies=strategies)
    assert not any("are not hidden" in text for text in long.why)
