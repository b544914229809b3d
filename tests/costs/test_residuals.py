"""Rows of a step against predicted rows: what is compared with what."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from headrace.costs import synthetic_costs
from headrace.costs.learning.residuals import (
    Residual,
    common_factor,
    micro_batch_residuals,
    rank_differences,
)
from headrace.spec import LayerPlan, Lengths, MicroBatch, Pipeline, Plan, Row, Scheme, Timeline

COSTS = synthetic_costs(2, layers=2)
LAYERS = LayerPlan.parse("1*ulysses_z+full 1*ulysses_z")
PLAN = Plan(
    lengths=Lengths.of([300, 40]), devices=2, predicted_s=1.0, lower_bound_s=0.5,
    pipelines=(
        Pipeline(scheme=Scheme(context=2), ranks=(0, 1)),
        Pipeline(scheme=Scheme(context=1), ranks=(1,)),
    ),
    micro_batches=(
        MicroBatch(pipeline=0, sequences=(0,), layers=LAYERS),
        MicroBatch(pipeline=1, sequences=(1,), layers=LayerPlan.parse("2*local")),
    ),
)  # fmt: skip


def row(rank: int, action: str, seconds: float) -> Row:
    kind = {"F": "forward", "B": "backward", "P": "pull"}.get(action.lstrip("01")[0], "update")
    return Row(rank=rank, action=action, kind=kind, start_s=1.0, end_s=1.0 + seconds)


def timeline(*rows: Row) -> Timeline:
    return Timeline(source="measured", rows=rows, devices=2)


PREDICTED = timeline(
    row(0, "P0", 9.0), row(0, "0F0[0,1]", 2.0), row(1, "0F0[0,1]", 2.0), row(0, "0B0[0,1]", 4.0),
    row(1, "0B0[0,1]", 4.0), row(1, "0F1[1]", 1.0), row(1, "0B1[1]", 2.0), row(0, "U", 5.0),
)  # fmt: skip


def residual(ranks: tuple[int, ...], factor: float, predicted_s: float = 1.0) -> Residual:
    return Residual(
        ranks=ranks, predicted_s=predicted_s, measured_s=predicted_s * factor, shares={"x": 1.0}
    )


def test_stages_add_up_and_waits_do_not_count() -> None:
    """Would catch a wait for weights taken for slow work, members of a group told apart by the
    pushes in their backwards, and stages of which only one counts."""
    staged = PLAN.replace(
        pipelines=(
            Pipeline(scheme=Scheme(pipeline=2), ranks=(0, 1)),
            Pipeline(scheme=Scheme(context=2), ranks=(2, 3)),
        ),
        devices=4,
        micro_batches=(
            MicroBatch(pipeline=0, sequences=(0,), layers=LayerPlan.parse("2*local")),
            MicroBatch(pipeline=1, sequences=(1,), layers=LAYERS),
        ),
    )

    def step(wait: float) -> Timeline:
        first = replace(row(0, "0F0[0]", 2.0 + wait), waited_s=wait)
        return timeline(
            first, row(1, "1F0[1]", 1.0), row(1, "1B0[1]{3,2}", 2.0), row(0, "0B0[0]{1,0}", 4.0),
            row(2, "0F1[2,3]", 1.0), row(3, "0F1[2,3]", 1.0), row(2, "0B1[2,3]", 2.5),
            row(3, "0B1[2,3]{3,2,1,0}", 2.0),
        )  # fmt: skip

    first, second = micro_batch_residuals(staged, step(0.0), step(7.0), COSTS)
    assert (first.predicted_s, first.measured_s) == (9.0, 9.0)
    assert (second.predicted_s, second.measured_s) == (3.0, 3.0)
    assert first.shares == {"cp1 local": 1.0}


def test_a_group_is_as_slow_as_its_last_member_not_as_its_first() -> None:
    """Would catch the waiting of a rank that came early counted as work."""
    measured = timeline(
        row(0, "0F0[0,1]", 3.0), row(1, "0F0[0,1]", 2.5), row(0, "0B0[0,1]", 5.0),
        row(1, "0B0[0,1]", 6.0), row(1, "0F1[1]", 2.0), row(1, "0B1[1]", 4.0), row(0, "P0", 1.0),
    )  # fmt: skip
    first, second = micro_batch_residuals(PLAN, PREDICTED, measured, COSTS)
    assert (first.ranks, first.predicted_s, first.measured_s) == ((0, 1), 6.0, 7.5)
    assert (second.ranks, second.predicted_s, second.measured_s) == ((1,), 3.0, 6.0)
    assert second.log == pytest.approx(math.log(2))


def test_shares_are_those_of_predicted_layer_seconds() -> None:
    """Would catch a residual laid to all options alike, or counted by layers."""
    first, second = micro_batch_residuals(PLAN, PREDICTED, PREDICTED, COSTS)
    full, none = (sum(COSTS.layer_seconds((300,), 2, option)) for option in LAYERS.options)
    assert full > none
    assert first.shares == pytest.approx(
        {"cp2 ulysses_z+full": full / (full + none), "cp2 ulysses_z": none / (full + none)}
    )
    assert second.shares == {"cp1 local": 1.0}


def test_what_was_not_measured_is_left_out() -> None:
    """Would catch a logarithm of zero that ends a run."""
    measured = timeline(row(1, "0F1[1]", 0.0), row(1, "0B1[1]", 0.0))
    assert micro_batch_residuals(PLAN, PREDICTED, measured, COSTS) == ()
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
