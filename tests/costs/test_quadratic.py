"""Quadratics, lines and their fits."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.costs import Linear, Quadratic, fit_linear, fit_quadratic
from headrace.errors import CostError

LADDER = (64, 256, 1024, 4096, 16384)


def test_packed_sequences_pay_one_constant_and_their_own_squares() -> None:
    """Catches squaring the pack's tokens, or paying c per sequence."""
    curve = Quadratic(a=1.0, b=10.0, c=1000.0)
    assert curve([3, 4]) == 9 + 16 + 70 + 1000
    assert curve([7]) == 49 + 70 + 1000


@given(
    a=st.sampled_from([0.0, 1e-9, 5e-9]),
    b=st.sampled_from([0.0, 1e-6, 2e-4]),
    c=st.sampled_from([0.0, 1e-4, 2e-2]),
)
def test_a_fit_finds_the_curve_it_was_drawn_from(a: float, b: float, c: float) -> None:
    """Catches an active set that cannot leave a coefficient at zero, and bad scaling."""
    true = Quadratic(a=a, b=b, c=c + 1e-7)
    packs = [*([n] for n in LADDER), [1024, 64], [256] * 5]
    found, error = fit_quadratic(packs, [true(pack) for pack in packs])
    assert error.worst < 1e-6
    assert found([9000, 12]) == pytest.approx(true([9000, 12]), rel=1e-4)


def test_coefficients_are_never_negative_and_optimal() -> None:
    """Catches clipping a free fit at zero: a grid around the result must not be better."""
    random = Random(0)
    seconds = [3e-4 + 1e-7 * n * random.uniform(0.7, 1.3) for n in LADDER]
    found, _ = fit_quadratic(LADDER, seconds)

    def loss(curve: Quadratic) -> float:
        return sum((curve([n]) / s - 1) ** 2 for n, s in zip(LADDER, seconds, strict=True))

    assert min(found.a, found.b, found.c) >= 0
    steps = (0.0, 0.9, 0.99, 1.0, 1.01, 1.1)
    for fa, fb, fc in product(steps, repeat=3):
        near = Quadratic(a=found.a * fa + 1e-15, b=found.b * fb + 1e-12, c=found.c * fc + 1e-9)
        assert loss(found) <= loss(near) * (1 + 1e-9)


def test_the_fit_weighs_relative_errors() -> None:
    """Catches plain least squares, under which the longest pack decides alone."""
    seconds = [1e-3, 1e-3, 1e-3, 1e-3, 1.3]
    _, error = fit_quadratic(LADDER, seconds)
    assert error.median < 0.01
    assert error.worst < 1, "a plain fit is 80 times too high at 4096"
    assert error.points == 5
    assert "median" in str(error)


def test_too_few_points_name_lengths_to_add() -> None:
    """Catches a fit of three coefficients to two lengths."""
    with pytest.raises(CostError, match=r"2 different packs.*1,024 and 2,048"):
        fit_quadratic([256, 512, 512], [1.0, 2.0, 2.0])
    with pytest.raises(CostError, match="0 different packs"):
        fit_quadratic([], [])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
def test_seconds_must_be_finite_and_positive(bad: float) -> None:
    """Catches a NaN that spreads into every coefficient."""
    with pytest.raises(CostError, match="pack of 1024 tokens"):
        fit_quadratic(LADDER, [1.0, 2.0, bad, 3.0, 4.0])


def test_malformed_points_are_refused() -> None:
    """Catches silently zipping lists of different lengths, and empty packs."""
    with pytest.raises(CostError, match="5 packs and 2 values"):
        fit_quadratic(LADDER, [1.0, 2.0])
    with pytest.raises(CostError, match="lengths >= 1"):
        fit_quadratic([[], [2], [3]], [1.0, 2.0, 3.0])


def test_lines() -> None:
    """Catches a line that drops its constant or goes below zero."""
    line, error = fit_linear([100, 200, 400], [1100.0, 2100.0, 4100.0])
    assert (line.slope, line.constant) == (pytest.approx(10), pytest.approx(100))
    assert error.worst < 1e-9
    assert fit_linear([100, 200], [0.0, 0.0])[0] == Linear(slope=0.0, constant=0.0)
    falling, _ = fit_linear([100, 200], [200.0, 100.0])
    assert falling.slope == 0
    assert falling.constant > 0
    with pytest.raises(CostError, match=r"at least two.*400 tokens"):
        fit_linear([200, 200], [1.0, 1.0])
    with pytest.raises(CostError, match="0 different packs"):
        fit_linear([], [])


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_coefficients_are_checked(bad: float) -> None:
    """Catches a negative cost that would make planners prefer longer packs."""
    with pytest.raises(CostError, match=r"quadratic\.b"):
        Quadratic(b=bad)
    with pytest.raises(CostError, match=r"line\.slope"):
        Linear(slope=bad)
