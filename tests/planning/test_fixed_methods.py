"""Layer plans whose methods are given."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.costs import (
    FORMULA_METHODS,
    CostModel,
    Linear,
    OptionCost,
    Quadratic,
    synthetic_costs,
)
from headrace.planning.fixed_methods import listed_frontier
from headrace.planning.layer_choice import layer_frontier, layer_table
from headrace.spec import Architecture, LayerOption, LayerPlan
from headrace.spec.layer_plan import RECOMPUTE
from headrace.units import GIB

SMALL = st.integers(0, 9)
METHODS = ("metp", "ulysses_z")


@st.composite
def listed_costs(draw: st.DrawFn) -> tuple[CostModel, list[tuple[LayerOption, ...]]]:
    """Costs of two methods at three levels, where a thriftier level needs more in passing, and
    up to four layers with some levels fixed."""
    options = {}
    for method in METHODS:
        slope, passing = 0, 0
        for level in reversed(RECOMPUTE):
            slope, passing = slope + draw(SMALL), passing + draw(SMALL)
            options[str(LayerOption.of(method, level))] = OptionCost(
                forward=Quadratic(b=draw(SMALL), c=draw(SMALL)),
                backward=Quadratic(),
                kept=Linear(slope=slope),
                transient=Linear(slope=40 - passing),
            )
    layers = draw(st.integers(1, 4))
    costs = synthetic_costs(1, layers=layers)
    costs = costs.replace(
        options={1: options},
        state_bytes=0,
        working_bytes={1: {"replicated": 0, "sharded": 0}},
        ends={
            1: OptionCost(
                forward=Quadratic(),
                backward=Quadratic(),
                kept=Linear(),
                transient=Linear(slope=draw(SMALL)),
            )
        },
        cluster=replace(costs.cluster, memory_bytes=draw(st.integers(1, 1000))),
    )
    slots = []
    for _ in range(layers):
        method, level = draw(st.sampled_from(METHODS)), draw(st.sampled_from([None, *RECOMPUTE]))
        levels = RECOMPUTE if level is None else (level,)
        slots.append(tuple(LayerOption.of(method, each) for each in levels))
    return costs, slots


def frontier_of(costs: CostModel, p: int, slots: list[tuple[LayerOption, ...]]):
    options = dict.fromkeys(option for slot in slots for option in slot)
    return listed_frontier(layer_table(costs, p, "replicated", (), options), slots)


@settings(max_examples=150, deadline=None)
@given(listed_costs(), st.lists(st.integers(1, 20), min_size=1, max_size=3))
def test_no_choice_of_levels_is_better(listed, lengths: list[int]) -> None:
    """Catches a level on the wrong layer of the list, a peak in another order than the list's,
    and levels that are fixed but change: every choice for every layer is tried."""
    costs, slots = listed
    fitting = [
        sum(costs.micro_batch_s(lengths, 1, layers))
        for layers in map(lambda options: LayerPlan(options=options), product(*slots))
        if costs.micro_batch_bytes(sum(lengths), 1, layers) <= costs.capacity_bytes
    ]
    frontier = frontier_of(costs, 1, slots)
    found = frontier.best(sum(n * n for n in lengths), sum(lengths))
    assert (found is None) == (not fitting)
    for i, cap in enumerate(frontier.caps):
        layers = frontier.layer_plan(i)
        assert all(o in slot for o, slot in zip(layers.options, slots, strict=True))
        assert costs.max_tokens(1, layers) == cap
    if found is not None:
        assert found[0] == pytest.approx(min(fitting))


def test_one_method_everywhere_is_the_ordinary_frontier() -> None:
    """Catches a list of equal entries that finds less than the method alone."""
    costs = synthetic_costs(1, layers=6)
    slots = [tuple(LayerOption.of("local", level) for level in RECOMPUTE)] * 6
    listed, free = frontier_of(costs, 1, slots), layer_frontier(costs, 1)
    assert listed.caps == free.caps
    assert listed.b == pytest.approx(free.b)


@pytest.mark.parametrize("kinds", [2, 5, 15])
def test_many_layers_of_many_kinds(kinds: int) -> None:
    """Catches a product over kinds of layers that explodes, and a coarse search that leaves out
    the thriftiest plan or the one that recomputes nothing."""
    architecture = Architecture.preset("llama-8b", layers=30)
    costs = synthetic_costs(
        4, architecture=architecture, memory_bytes=200 * GIB, methods=FORMULA_METHODS, sizes=(4,)
    )
    methods = list(dict.fromkeys(text.partition("+")[0] for text in costs.options[4]))[:kinds]
    slots = [
        tuple(LayerOption.parse(f"{methods[i % kinds]}+{level}") for level in RECOMPUTE)
        for i in range(30)
    ]
    frontier = frontier_of(costs, 4, slots)
    for level, slot in enumerate(RECOMPUTE):
        layers = LayerPlan(options=tuple(slots[i][level] for i in range(30)))
        tokens = costs.max_tokens(4, layers)
        found = frontier.best(float(tokens * 1000), tokens)
        assert found is not None, slot
        seconds = sum(costs.micro_batch_s([1000] * (tokens // 1000), 4, layers))
        assert found[0] <= seconds * 1.01
    assert len(frontier.caps) > 10
