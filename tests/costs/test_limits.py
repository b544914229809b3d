"""MaxLen and UtilLen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.costs import Quadratic, synthetic_costs
from headrace.costs.cost_model import MOST_TOKENS
from headrace.costs.limits import (
    fastest_option,
    limits_of,
    max_length,
    util_length,
    util_tokens,
    whole_curve,
)
from headrace.errors import CostError
from headrace.spec.layer_plan import RECOMPUTE, LayerOption, LayerPlan
from headrace.units import GIB


def brute_force(curve: Quadratic, threshold: float, longest: int) -> int:
    speeds = [n / curve([n]) if curve([n]) else 1.0 for n in range(1, longest + 1)]
    return next(n for n, x in enumerate(speeds, 1) if x >= threshold * max(speeds) * (1 - 1e-12))


@given(
    a=st.sampled_from([0.0, 1e-12, 1e-9, 1e-7, 1e-3]),
    b=st.sampled_from([0.0, 1e-9, 1e-6, 1e-3]),
    c=st.sampled_from([0.0, 1e-6, 1e-4, 1e-2, 1.0]),
    threshold=st.sampled_from([0.3, 0.5, 0.85, 0.99]),
    longest=st.sampled_from([1, 2, 7, 300, 2000]),
)
def test_the_closed_form_is_the_least_length(a, b, c, threshold, longest) -> None:
    """Catches the larger root, the best length of real numbers taken for one of whole ones, and a
    best that memory puts out of reach."""
    curve = Quadratic(a=a, b=b, c=c)
    found = util_tokens(curve, threshold, longest=longest)
    assert found == brute_force(curve, threshold, longest)


def test_known_values() -> None:
    """Catches a threshold on seconds instead of tokens per second."""
    assert util_tokens(Quadratic(b=1e-6, c=1e-3), 0.5) == 1000
    assert util_tokens(Quadratic(b=1e-6, c=1e-3), 0.85) == 5667
    assert util_tokens(Quadratic(a=1e-9, c=1e-3), 1.0) == 1000
    assert util_tokens(Quadratic(b=1.0), 0.85) == 1
    assert util_tokens(Quadratic(b=1.0, c=1e-9), 1.0) >= 1


@pytest.mark.parametrize(("threshold", "longest"), [(0.0, 9), (1.1, 9), (0.5, 0)])
def test_values_are_checked(threshold: float, longest: int) -> None:
    """Catches a root of a negative number."""
    with pytest.raises(CostError):
        util_tokens(Quadratic(a=1.0, c=1.0), threshold, longest=longest)


COSTS = synthetic_costs(
    4, layers=3, memory_bytes=2 * GIB, methods=("ulysses_z", "megatron_ts", "metp")
)


@pytest.mark.parametrize("working", ["replicated", "sharded"])
@pytest.mark.parametrize("level", RECOMPUTE)
def test_the_longest_document_fits_and_the_next_does_not(level, working) -> None:
    """Catches MaxLen of another holding of the weights, or per rank instead of per group."""
    layers = LayerPlan.uniform(LayerOption.of("ulysses_z", level), 3)
    longest = max_length(COSTS, 2, layers, working)
    room = COSTS.capacity_bytes
    assert COSTS.micro_batch_bytes(longest, 2, layers, working) <= room
    assert COSTS.micro_batch_bytes(longest + 1, 2, layers, working) > room


@pytest.mark.parametrize("working", ["replicated", "sharded"])
def test_the_curve_is_the_micro_batch_s(working) -> None:
    """Catches gathers, ends, the scale or a second option left out of T(l, P)."""
    costs = COSTS.replace(scale=1.7)
    layers = LayerPlan.parse("2*ulysses_z 1*megatron_ts/metp+full")
    curve = whole_curve(costs, 2, layers, working)
    for n in (1, 100, 5000):
        assert curve([n]) == pytest.approx(sum(costs.micro_batch_s([n], 2, layers, working)))


def test_util_length_is_that_of_what_fits() -> None:
    """Catches a best speed that only a document too long for the memory would reach."""
    layers = LayerPlan.uniform(LayerOption.of("local"), 3)
    curve, longest = whole_curve(COSTS, 1, layers), max_length(COSTS, 1, layers)
    assert util_length(COSTS, 1, layers) == brute_force(curve, 0.85, longest)
    assert util_length(COSTS, 1, layers, threshold=0.3) < util_length(COSTS, 1, layers)
    none = COSTS.replace(state_bytes=COSTS.capacity_bytes)
    assert max_length(none, 1, layers) == 0
    assert util_length(none, 1, layers) is None


def test_the_table_by_scheme() -> None:
    """Catches a level left out, one option taken for all levels, and rows of another size."""
    rows = limits_of(COSTS, "sharded", tokens=2000)
    assert [(row.p, row.option.recompute) for row in rows] == [
        (p, level) for p in COSTS.group_sizes for level in RECOMPUTE
    ]
    for row in rows:
        assert str(row.option) == fastest_option(COSTS, row.p, row.option.recompute, 2000)
        layers = LayerPlan.uniform(row.option, 3)
        assert row.max_length == max_length(COSTS, row.p, layers, "sharded")
        assert row.util_length == util_length(COSTS, row.p, layers, "sharded")
        assert 0 < row.util_length < row.max_length < MOST_TOKENS
    seconds = [
        sum(COSTS.layer_seconds([2000], 4, LayerOption.parse(text)))
        for text in COSTS.options[4]
        if LayerOption.parse(text).recompute == "none"
    ]
    best = next(row for row in rows if row.p == 4 and row.option.recompute == "none")
    assert sum(COSTS.layer_seconds([2000], 4, best.option)) == min(seconds)
