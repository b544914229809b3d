"""The exact layer plans."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.costs import CostModel, Exchange, Linear, OptionCost, Quadratic, synthetic_costs
from headrace.planning import best_layers
from headrace.planning.layers import layer_frontier
from headrace.spec import Architecture, Cluster, LayerOption
from planning.brute_force import layer_plans

SMALL = st.integers(0, 9)


@st.composite
def layer_costs(draw: st.DrawFn) -> CostModel:
    """One rank, one to four layers, up to three levels with arbitrary costs."""

    def option() -> OptionCost:
        return OptionCost(
            forward=Quadratic(a=draw(SMALL) / 100, b=draw(SMALL), c=draw(SMALL)),
            backward=Quadratic(c=1),
            kept=Linear(slope=draw(SMALL), constant=draw(SMALL)),
            transient=Linear(slope=draw(SMALL), constant=10 * draw(SMALL)),
        )  # fmt: skip

    levels = draw(st.sampled_from([("none",), ("none", "full"), ("none", "attention", "full")]))
    return CostModel(
        architecture=Architecture(
            layers=draw(st.integers(1, 4)), hidden=4, heads=2, kv_heads=2, ffn=4, vocabulary=9
        ),
        cluster=Cluster(devices=1, memory_bytes=draw(st.integers(1, 2000))),
        fingerprint="",
        options={1: {str(LayerOption.of("local", level)): option() for level in levels}},
        ends={1: option()},
        exchange_s=Exchange(),
        state_bytes=draw(SMALL),
        working_bytes={1: {"whole": draw(SMALL), "sharded": 0}},
    )


@settings(max_examples=300, deadline=None)
@given(costs=layer_costs(), lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_no_order_of_options_is_better(costs: CostModel, lengths: list[int]) -> None:
    """Catches a wrong peak, an order that is not the best, a count left out: every sequence of
    options over the layers is tried."""
    fitting = [
        (sum(costs.micro_batch_s(lengths, 1, layers)), layers)
        for layers in layer_plans(costs, 1)
        if costs.micro_batch_bytes(sum(lengths), 1, layers) <= costs.capacity_bytes
    ]
    found = best_layers(costs, lengths, 1)
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert costs.micro_batch_bytes(sum(lengths), 1, found) <= costs.capacity_bytes
    least = min(seconds for seconds, _ in fitting)
    assert sum(costs.micro_batch_s(lengths, 1, found)) == pytest.approx(least)


@settings(deadline=None)
@given(costs=layer_costs())
def test_capacities_are_those_of_the_cost_model(costs: CostModel) -> None:
    """Catches a frontier that promises tokens which the cost model denies."""
    frontier = layer_frontier(costs, 1)
    assert list(frontier.caps) == sorted(frontier.caps)
    for i, cap in enumerate(frontier.caps):
        assert costs.max_tokens(1, frontier.layer_plan(i)) == cap


def test_an_optimum_can_mix_three_options() -> None:
    """Catches a solver that mixes two options only, as ParaDySe's Algorithm 1 does: three layers
    keep 6, 4 or 1 bytes and take 1, 2 or 4 seconds, and 11 bytes are free."""
    options = {
        str(LayerOption.of("local", level)): OptionCost(
            forward=Quadratic(c=seconds), backward=Quadratic(), kept=Linear(constant=kept),
            transient=Linear(),
        )
        for level, seconds, kept in (("none", 1, 6), ("attention", 2, 4), ("full", 4, 1))
    }  # fmt: skip
    free = OptionCost(forward=Quadratic(), backward=Quadratic(), kept=Linear(), transient=Linear())
    costs = synthetic_costs(1, layers=3).replace(
        options={1: options}, ends={1: free}, state_bytes=0,
        working_bytes={1: {"whole": 0, "sharded": 0}},
        cluster=Cluster(devices=1, memory_bytes=11),
    )  # fmt: skip
    layers = best_layers(costs, [5], 1)
    assert layers is not None
    assert sorted(option.recompute for option in layers.options) == ["attention", "full", "none"]


def test_memory_decides_how_much_is_recomputed() -> None:
    """Catches recomputation where everything fits, or none where little does."""
    costs = synthetic_costs(1, layers=8)
    caps = layer_frontier(costs, 1).caps
    levels = []
    for tokens in (caps[0], caps[0] + 1, caps[-1], caps[-1] + 1):
        layers = best_layers(costs, [tokens], 1)
        levels.append(
            None if layers is None else sum(o.recompute != "none" for o in layers.options)
        )
    assert levels[0] == 0
    assert levels[1] == 1
    assert levels[2] == 8
    assert levels[3] is None


def test_largest_transient_first() -> None:
    """Catches an order that peaks higher than need be."""
    costs = synthetic_costs(1, layers=4)
    frontier = layer_frontier(costs, 1)
    passing = costs.options[1]
    for i in range(len(frontier.caps)):
        slopes = [passing[str(o)].transient.slope for o in frontier.layer_plan(i).options]
        assert slopes == sorted(slopes, reverse=True)


def test_layers_of_a_plan_share_their_method() -> None:
    """Catches mixtures that no profile has costs for."""
    costs = synthetic_costs(2, layers=3)
    ulysses = costs.options[2]
    other = {text.replace("ulysses_z", "megatron_cz"): cost for text, cost in ulysses.items()}
    both = costs.replace(options={**costs.options, 2: {**ulysses, **other}})
    frontier = layer_frontier(both, 2)
    methods = [
        {option.attention for option in frontier.layer_plan(i).options}
        for i in range(len(frontier.caps))
    ]
    assert all(len(names) == 1 for names in methods)
    assert set.union(*methods) == {"ulysses_z", "megatron_cz"}
    only = layer_frontier(both, 2, options=[LayerOption.of("megatron_cz", "full")])
    assert [str(only.layer_plan(i)) for i in range(len(only.caps))] == ["3*megatron_cz+full"]


def test_best_is_the_quickest_of_all_that_hold_the_pack() -> None:
    """Catches the short cut past the search when a plan rules all later ones."""
    frontier = layer_frontier(synthetic_costs(1, layers=6), 1)
    for cap, share in product(frontier.caps, (1, 7, 1000)):
        squares = cap * cap / share
        found = frontier.best(squares, cap)
        assert found is not None
        least = min(
            a * squares + b * cap + c
            for (a, b, c), most in zip(frontier.rows, frontier.caps, strict=True)
            if most >= cap
        )
        assert found[0] == pytest.approx(least)
    assert frontier.best(1.0, frontier.most_tokens + 1) is None
