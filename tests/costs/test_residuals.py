"""Rows of a step against predicted rows: what is compared with what."""

from __future__ import annotations

import math

import pytest

from headrace.costs import synthetic_costs
from headrace.costs.calibration import (
    Residual,
    common_factor,
    micro_batch_residuals,
    rank_differences,
)
from headrace.spec import LayerPlan, Lengths, MicroBatch, Pipeline, Plan, Scheme

COSTS = synthetic_costs(2, layers=2)
LAYERS = LayerPlan.parse("1*ulysses_z+full 1*ulysses_z")
PLAN = Plan(
    lengths=Lengths.of([300, 40]),
    devices=2,
    predicted_s=1.0,
    lower_bound_s=0.5,
    pipelines=(
        Pipeline(scheme=Scheme(context=2), ranks=(0, 1)),
        Pipeline(scheme=Scheme(context=1), ranks=(1,)),
    ),
    micro_batches=(
        MicroBatch(pipeline=0, sequences=(0,), layers=LAYERS),
        MicroBatch(pipeline=1, sequences=(1,), layers=LayerPlan.parse("2*local")),
    ),
)


PREDICTED = (6.0, 3.0)


def residual(ranks: tuple[int, ...], factor: float, predicted_s: float = 1.0) -> Residual:
    return Residual(
        ranks=ranks, predicted_s=predicted_s, measured_s=predicted_s * factor, shares={"x": 1.0}
    )


def test_micro_batches_are_compared_one_by_one() -> None:
    """Would catch a micro-batch that is compared with another one's seconds."""
    first, second = micro_batch_residuals(PLAN, PREDICTED, {1: 6.0, 0: 7.5}, COSTS)
    assert (first.ranks, first.predicted_s, first.measured_s) == ((0, 1), 6.0, 7.5)
    assert (second.ranks, second.predicted_s, second.measured_s) == ((1,), 3.0, 6.0)
    assert second.log == pytest.approx(math.log(2))


def test_shares_are_those_of_predicted_layer_seconds() -> None:
    """Would catch a residual laid to all options alike, or counted by layers."""
    first, second = micro_batch_residuals(PLAN, PREDICTED, dict(enumerate(PREDICTED)), COSTS)
    full, none = (sum(COSTS.layer_seconds((300,), 2, option)) for option in LAYERS.options)
    assert full > none
    assert first.shares == pytest.approx(
        {"cp2 ulysses_z+full": full / (full + none), "cp2 ulysses_z": none / (full + none)}
    )
    assert second.shares == {"cp1 local": 1.0}


def test_what_was_not_measured_is_left_out() -> None:
    """Would catch a logarithm of zero that ends a run."""
    assert micro_batch_residuals(PLAN, PREDICTED, {1: 0.0}, COSTS) == ()
    assert common_factor(()) == 0.0
    assert rank_differences(()) == {}


def test_a_rank_is_compared_with_the_others() -> None:
    """Would catch a slow rank that is compared with a mean it has itself moved."""
    found = rank_differences([residual((r,), 1.5 if r == 2 else 1.0) for r in range(4)])
    assert found == pytest.approx({0: 0, 1: 0, 2: math.log(1.5), 3: 0})
    two = rank_differences([residual((0,), 1.0), residual((1,), 1.5)])
    assert two == pytest.approx({0: -math.log(1.5), 1: math.log(1.5)})


def test_groups_are_compared_with_groups_of_their_size() -> None:
    """Would catch a badly predicted group size told as slow ranks."""
    steps = [residual((0, 1), 1.8, 9.0), residual((0,), 1.0), residual((1,), 1.0)]
    steps += [residual((2, 3), 1.8), residual((4, 5), 1.8)]
    assert rank_differences(steps) == pytest.approx(dict.fromkeys(range(6), 0))


def test_one_slow_rank_of_two_is_not_a_slow_machine() -> None:
    """Would catch 'everything is slower' said of one slow rank."""
    assert common_factor([residual((0,), 1.0), residual((1,), 3.0)]) == pytest.approx(0)
    assert common_factor([residual((0,), 2.0), residual((1,), 3.0)]) == pytest.approx(math.log(2))
