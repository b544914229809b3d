"""The exact layer plans."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.costs import (
    FORMULA_METHODS,
    CostModel,
    ExchangeCost,
    Linear,
    OptionCost,
    Quadratic,
    synthetic_costs,
)
from headrace.planning.layer_choice import best_layers, layer_frontier
from headrace.spec import Architecture, Cluster, LayerOption
from headrace.units import GIB
from planning.brute_force import layer_plans

SMALL = st.integers(0, 9)
CHOICES = (
    ("local",),
    ("local", "local+full"),
    ("local", "local+attention", "local+full"),
    ("local", "metp", "local/metp", "metp/local", "local+full"),
)


@st.composite
def layer_costs(draw: st.DrawFn) -> CostModel:
    """One rank, one to four layers, up to five methods or levels with arbitrary costs."""

    def option() -> OptionCost:
        return OptionCost(
            forward=Quadratic(a=draw(SMALL) / 100, b=draw(SMALL), c=draw(SMALL)),
            backward=Quadratic(c=1),
            kept=Linear(slope=draw(SMALL), constant=draw(SMALL)),
            transient=Linear(slope=draw(SMALL), constant=10 * draw(SMALL)),
        )

    names = draw(st.sampled_from(CHOICES))
    return CostModel(
        shape=Architecture(
            layers=draw(st.integers(1, 4)), hidden=4, heads=2, kv_heads=2, ffn=4, vocabulary=9
        ).shape,
        cluster=Cluster(devices=1, memory_bytes=draw(st.integers(1, 2000))),
        fingerprint="",
        options={1: {name: option() for name in names}},
        ends={1: option()},
        exchange_s=ExchangeCost(),
        state_bytes=draw(SMALL),
        working_bytes={1: {"replicated": draw(SMALL), "sharded": 0}},
    )


@settings(max_examples=200, deadline=None)
@given(costs=layer_costs(), lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_no_order_of_options_is_better(costs: CostModel, lengths: list[int]) -> None:
    """Catches a wrong peak, an order that is not the best, a count or a pair of methods left out,
    an option that is dropped too early: every sequence of at most three options over the layers
    is tried."""
    fitting = [
        (sum(costs.micro_batch_s(lengths, 1, layers)), layers)
        for layers in layer_plans(costs, 1)
        if len(set(layers.options)) <= 3
        and costs.micro_batch_bytes(sum(lengths), 1, layers) <= costs.capacity_bytes
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


@pytest.mark.parametrize(
    "names",
    [("local", "local+attention", "local+full"), ("megatron_ts", "ulysses_z/metp", "metp+full")],
)
def test_an_optimum_can_mix_three_options(names: tuple[str, str, str]) -> None:
    """Catches a solver that mixes two options only, as ParaDySe's Algorithm 1 does, or only those
    of one method: three layers keep 6, 4 or 1 bytes and take 1, 2 or 4 seconds, and 11 bytes are
    free."""
    costs = _constant(dict(zip(names, ((1, 6), (2, 4), (4, 1)), strict=True)), 3, 11)
    layers = best_layers(costs, [5], 1)
    assert layers is not None
    assert sorted(map(str, layers.options)) == sorted(names)


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
    assert levels[2] >= 7  # what is kept of the last layer is in passing where it is recomputed
    assert levels[3] is None


def test_largest_transient_first() -> None:
    """Catches an order that peaks higher than need be."""
    costs = synthetic_costs(1, layers=4)
    frontier = layer_frontier(costs, 1)
    passing = costs.options[1]
    for i in range(len(frontier.caps)):
        slopes = [passing[str(o)].transient.slope for o in frontier.layer_plan(i).options]
        assert slopes == sorted(slopes, reverse=True)


def _constant(options: dict[str, tuple[float, float]], layers: int, free: int) -> CostModel:
    """Costs of (seconds, kept bytes) whatever the pack, and ``free`` bytes."""
    nothing = OptionCost(
        forward=Quadratic(), backward=Quadratic(), kept=Linear(), transient=Linear()
    )
    return synthetic_costs(1, layers=layers).replace(
        options={
            1: {
                text: replace(nothing, forward=Quadratic(c=seconds), kept=Linear(constant=kept))
                for text, (seconds, kept) in options.items()
            }
        },
        ends={1: nothing},
        state_bytes=0,
        working_bytes={1: {"replicated": 0, "sharded": 0}},
        cluster=Cluster(devices=1, memory_bytes=free),
    )


def test_options_can_be_restricted() -> None:
    """Catches a restriction that is ignored, and two equal options that both stay."""
    costs = synthetic_costs(2, layers=3)
    ulysses = costs.options[2]
    other = {text.replace("ulysses_z", "megatron_cz"): cost for text, cost in ulysses.items()}
    both = costs.replace(options={**costs.options, 2: {**ulysses, **other}})
    assert len(layer_frontier(both, 2).caps) == len(layer_frontier(costs, 2).caps)
    only = layer_frontier(both, 2, options=[LayerOption.of("megatron_cz", "full")])
    assert [str(only.layer_plan(i)) for i in range(len(only.caps))] == ["3*megatron_cz+full"]


def noisy(costs: CostModel, seed: int) -> CostModel:
    """Costs as if measured: every coefficient up to a tenth off, so that few options are beaten
    in everything."""
    rng = np.random.default_rng(seed)

    def quadratic(x: Quadratic) -> Quadratic:
        off = rng.uniform(0.9, 1.1, 3).tolist()
        return Quadratic(a=x.a * off[0], b=x.b * off[1], c=x.c * off[2])

    def line(x: Linear) -> Linear:
        return Linear(slope=x.slope * rng.uniform(0.95, 1.05), constant=x.constant)

    options = {
        p: {
            text: replace(
                cost,
                forward=quadratic(cost.forward),
                backward=quadratic(cost.backward),
                kept=line(cost.kept),
                transient=line(cost.transient),
            )
            for text, cost in by_text.items()
        }
        for p, by_text in costs.options.items()
    }
    return costs.replace(options=options)


def many_options(layers: int, seed: int) -> CostModel:
    """45 options on four ranks, of which some thirty are not beaten."""
    architecture = Architecture.preset("llama-8b", layers=layers)
    costs = synthetic_costs(
        4,
        architecture=architecture,
        memory_bytes=(60 + 8 * layers) * GIB,
        methods=FORMULA_METHODS,
        sizes=(4,),
    )
    return noisy(costs, seed)


@pytest.mark.parametrize("seed", range(3))
def test_many_options_lose_little(seed: int) -> None:
    """Catches a thinning that drops what is needed: among thirty options and twelve layers every
    mixture of three is tried here for single packs, which the frontier cannot."""
    costs = many_options(12, seed)
    frontier = layer_frontier(costs, 4)
    assert len(frontier.options) > 20
    losses = []
    for share in (0.5, 0.85, 0.97):
        tokens = int(frontier.most_tokens * share)
        for length in (1000, tokens):
            squares = float(length * tokens)
            found = frontier.best(squares, tokens)
            assert found is not None
            losses.append(found[0] / best_of_three(costs, 4, squares, tokens) - 1)
    assert min(losses) >= -1e-9
    assert np.mean(losses) < 0.01
    assert max(losses) < 0.03


def best_of_three(costs: CostModel, p: int, squares: float, tokens: int) -> float:
    """Seconds of the quickest fitting mixture of three options for one pack, by counts alone."""
    layers, ends = costs.shape.layers, costs.ends[p]
    room = costs.capacity_bytes - costs.state_bytes - costs.held_bytes({p}, "replicated")
    room -= ends.kept(tokens)
    rated = sorted(
        (
            -x.transient(tokens),
            x.kept(tokens),
            (x.forward + x.backward).of_sums(squares, tokens),
        )
        for x in costs.options[p].values()
    )
    unbeaten = [
        one
        for one in rated
        if not any(
            other != one
            and all(x <= y for x, y in zip(other[1:], one[1:], strict=True))
            and -other[0] <= -one[0]
            for other in rated
        )
    ]
    passing, kept, seconds = np.array(unbeaten).T
    counts = np.array(
        [(i, j, layers - i - j) for i in range(layers + 1) for j in range(layers + 1 - i)]
    )
    best = np.inf
    for some in combinations(range(len(unbeaten)), 3):
        held = np.cumsum(counts * kept[[*some]], axis=1)
        peak = np.where(counts > 0, held - passing[[*some]], 0.0).max(axis=1)
        fits = np.maximum(peak, held[:, -1] + ends.transient(tokens)) <= room + 1e-3
        if fits.any():
            best = min(best, float((counts[fits] @ seconds[[*some]]).min()))
    return best + (ends.forward + ends.backward).of_sums(squares, tokens)


@pytest.mark.parametrize("layers", [32, 80])
def test_many_options_take_little_time(layers: int) -> None:
    """Catches an enumeration that explodes (all counts of 45 options are astronomical) and a
    frontier on which planning would crawl. On a quiet core it takes less than 0.1 s."""
    costs = many_options(layers, 0)
    started = time.process_time()
    frontier = layer_frontier(costs, 4)
    assert time.process_time() - started < 1.0
    assert 0 < len(frontier.caps) < 3000
    assert list(frontier.caps) == sorted(frontier.caps)
    for i in range(0, len(frontier.caps), 50):
        assert costs.max_tokens(4, frontier.layer_plan(i)) == frontier.caps[i]
        seconds = sum(costs.micro_batch_s([5000, 10], 4, frontier.layer_plan(i)))
        a, b, c = frontier.rows[i]
        assert seconds == pytest.approx(a * (5000**2 + 100) + b * 5010 + c)


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


@pytest.mark.parametrize("seed", range(3))
def test_what_is_looked_up_is_close_to_the_best(seed: int) -> None:
    """Catches packs that are taken to be alike and are not, and a plan that does not hold them."""
    frontier, rng = layer_frontier(many_options(12, seed), 4), np.random.default_rng(seed)
    lost = []
    for _ in range(2000):
        tokens = int(np.exp(rng.uniform(0, np.log(frontier.most_tokens))))
        squares = tokens ** rng.uniform(1, 2)
        close, best = frontier.nearly_best(squares, tokens), frontier.best(squares, tokens)
        assert close is not None
        assert best is not None
        assert frontier.caps[close[1]] >= tokens
        lost.append(close[0] / best[0] - 1)
    assert min(lost) >= -1e-12
    assert max(lost) < 0.01
    assert np.mean(lost) < 2e-4
    assert frontier.nearly_best(1.0, frontier.most_tokens + 1) is None
