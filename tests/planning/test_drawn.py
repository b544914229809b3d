"""Plans drawn at random: valid, varied, and the same from the same seed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.spec import Lengths, Plan
from headrace.spec.layer_plan import RECOMPUTE
from headrace.spec.random_plans import random_plan

lengths = st.lists(st.integers(1, 999), min_size=1, max_size=25).map(Lengths.of)
seeds = st.integers(0, 2**32)


@settings(deadline=None)
@given(lengths, st.integers(1, 9), st.integers(1, 5), seeds, st.integers(1, 9))
def test_a_drawn_plan_is_one_the_runtime_takes(
    batch: Lengths, devices: int, layers: int, seed: int, largest: int
) -> None:
    """Catches blocks that are not aligned, sizes above the limit, and methods that a group of
    that size does not know. (That each sequence is there once the plan itself checks.)"""
    rng = np.random.default_rng(seed)
    plan = random_plan(batch, devices, layers, rng, largest=largest)
    assert plan.lengths == batch
    assert plan.devices == devices
    assert {micro.pipeline for micro in plan.micro_batches} == set(range(len(plan.pipelines)))
    assert len({pipeline.ranks for pipeline in plan.pipelines}) == len(plan.pipelines)
    for pipeline in plan.pipelines:
        first, size = pipeline.ranks[0], len(pipeline.ranks)
        assert pipeline.ranks == tuple(range(first, first + size))
        assert first % size == 0
        assert size <= min(largest, devices)
        assert pipeline.ranks[-1] < devices
    for micro in plan.micro_batches:
        size = len(plan.pipelines[micro.pipeline].ranks)
        method = "local" if size == 1 else "ulysses_z"
        assert len(micro.layers.options) == layers
        assert {(o.attention, o.feed_forward) for o in micro.layers.options} == {(method, method)}
    sizes = [len(plan.pipelines[micro.pipeline].ranks) for micro in plan.micro_batches]
    assert all(a >= b for a, b in pairwise(sizes)), "larger groups come first"


@given(lengths, st.integers(1, 9), seeds)
def test_the_same_seed_draws_the_same_plan(batch: Lengths, devices: int, seed: int) -> None:
    """Catches randomness from elsewhere: every rank draws the plan for itself."""

    def draw() -> Plan:
        return random_plan(batch, devices, 2, np.random.default_rng(seed))

    assert draw() == draw()


def _many(devices: int) -> list[Plan]:
    batch = Lengths.of(range(1, 13))
    return [random_plan(batch, devices, 3, np.random.default_rng(i)) for i in range(200)]


@pytest.mark.parametrize("devices", [1, 3, 4, 6])
def test_every_kind_of_plan_is_drawn(devices: int) -> None:
    """Catches a draw that never reaches some size, block, level, packing or kind of weights:
    verification would prove nothing about it."""
    plans = _many(devices)
    groups = {pipeline.ranks for plan in plans for pipeline in plan.pipelines}
    assert groups == {
        tuple(range(block * size, (block + 1) * size))
        for size in range(1, devices + 1)
        for block in range(devices // size)
    }
    micros = [micro for plan in plans for micro in plan.micro_batches]
    assert {o.recompute for micro in micros for o in micro.layers.options} == set(RECOMPUTE)
    assert any(len(micro.layers.counts) > 1 for micro in micros)
    assert {plan.working for plan in plans} == {"replicated", "sharded"}
    assert {min(3, len(micro.sequences)) for micro in micros} == {1, 2, 3}
    assert any(list(m.sequences) != sorted(m.sequences) for m in micros), "packed in any order"


def test_methods_are_drawn_for_each_branch_of_each_layer() -> None:
    """Catches a draw that never reaches some pair, some order or a size that has methods, and one
    that gives a group methods of another size: verification would prove nothing, or fail."""
    methods = {1: ("local",), 3: ("metp", "ulysses_z"), 4: (), 9: ("metp",)}
    batch = Lengths.of(range(1, 9))
    plans = [random_plan(batch, 4, 3, np.random.default_rng(i), methods=methods) for i in range(60)]
    pairs: dict[int, set[tuple[str, str]]] = {}
    orders: dict[int, set[str]] = {}
    for plan in plans:
        for micro in plan.micro_batches:
            size = len(plan.pipelines[micro.pipeline].ranks)
            pairs.setdefault(size, set()).update(
                (o.attention, o.feed_forward) for o in micro.layers.options
            )
            orders.setdefault(size, set()).add(micro.order)
    assert pairs == {
        1: {("local", "local")},
        3: {(a, f) for a in methods[3] for f in methods[3]},
    }
    assert orders == {1: {"natural"}, 3: {"natural", "zigzag"}}
    with pytest.raises(SpecError, match="methods of a random plan"):
        random_plan(batch, 2, 3, np.random.default_rng(0), methods={3: ("metp",)})


@pytest.mark.parametrize("working", ["replicated", "sharded"])
def test_the_kind_of_weights_can_be_given(working) -> None:
    """Catches an option that does nothing."""
    batch = Lengths.of([5, 6, 7])
    plans = [random_plan(batch, 4, 2, np.random.default_rng(i), working=working) for i in range(20)]
    assert {plan.working for plan in plans} == {working}
