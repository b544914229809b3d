"""Polynomials whose degree AIC chooses."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headrace.costs.paradyse.polynomial import Polynomial, fit_polynomial
from headrace.errors import CostError

LADDER = [round(64 * 1.4**k) for k in range(14)]


def noisy(true: Polynomial, seed: int, share: float = 0.02) -> list[float]:
    rng = np.random.default_rng(seed)
    return list(true(LADDER) * rng.normal(1.0, share, size=len(LADDER)))


TRUE = {
    1: Polynomial(coefficients=(1e-3, 5e-2), unit=4096.0),
    2: Polynomial(coefficients=(1e-3, 5e-2, 4e-1), unit=4096.0),
    3: Polynomial(coefficients=(1e-3, 5e-2, 1e-2, 9e-1), unit=4096.0),
}


@pytest.mark.parametrize("degree", TRUE)
def test_the_degree_of_noisy_data_is_found(degree: int) -> None:
    """Catches plain AIC, which takes a cubic through lines, and a criterion with the wrong sign."""
    found = [fit_polynomial(LADDER, noisy(TRUE[degree], seed))[0].degree for seed in range(40)]
    assert found.count(degree) >= 30
    assert max(found.count(d) for d in (1, 2, 3)) == found.count(degree)


@pytest.mark.parametrize("degree", TRUE)
def test_exact_data_come_back_and_ties_go_to_the_lower_degree(degree: int) -> None:
    """Catches bad scaling (powers of 1e5 tokens), and the logarithm of a rounding error, by which
    any degree could win."""
    found, error = fit_polynomial(LADDER, list(TRUE[degree](LADDER)))
    assert found.degree == degree
    assert error.worst < 1e-9
    assert found([50_000])[0] == pytest.approx(TRUE[degree]([50_000])[0], rel=1e-6)


def test_errors_are_relative() -> None:
    """Catches numpy.polyfit's plain squares, under which short documents may be off by any
    factor."""
    values = [1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1.0]
    _, error = fit_polynomial([64, 128, 256, 512, 1024, 2048], values)
    assert error.median < 0.5


def test_few_points_are_lines() -> None:
    """Catches a cubic through four points, and a criterion that divides by zero."""
    curve = [1.0, 4.0, 9.0, 16.0, 25.0, 36.0]
    lengths = [1, 2, 3, 4, 5, 6]
    for count in (2, 3, 4, 5):
        assert fit_polynomial(lengths[:count], curve[:count])[0].degree == 1
    assert fit_polynomial(lengths, curve)[0].degree == 2
    assert fit_polynomial([1, 1, 1, 2, 2, 2, 2], [1.0, 1, 1, 2, 2, 2, 2])[0].degree == 1


def test_what_falls_beyond_is_not_taken() -> None:
    """Catches a cubic that turns down behind its last point: the longest documents would be free,
    and fit into any memory."""
    bent = Polynomial(coefficients=(0.1, 1.0, 0.2, -0.45), unit=float(LADDER[-1]))
    found, _ = fit_polynomial(LADDER, list(bent(LADDER)))
    far = found(np.geomspace(LADDER[-1], 1000 * LADDER[-1], 200))
    assert (np.diff(far) >= 0).all()
    assert far[0] > 0.3
    falling, _ = fit_polynomial(LADDER, [10.0 - x / LADDER[-1] for x in LADDER])
    assert falling.coefficients[1:] == (0.0,)
    assert 9.0 < falling(10**6) < 10.0


@pytest.mark.parametrize(
    ("coefficients", "rises"),
    [
        ((0.0, 1.0), True),
        ((0.0, -1.0), False),
        ((1.0, 0.0), True),
        ((0.0, -2.0, 1.0), True),
        ((0.0, -2.1, 1.0), False),
        ((0.0, 9.0, -1.0), False),
        ((0.0, 4.0, -3.0, 1.0), True),
        ((0.0, 12.0, -9.0, 2.0), False),
        ((0.0, 1.0, 1.0, -1e-6), False),
        ((0.0, 1.0, 1.0, 0.0), True),
    ],
)
def test_rising_from_one_on(coefficients: tuple[float, ...], rises: bool) -> None:
    """Catches looking at the slope where the fit ends only: (0, 12, -9, 2) rises there and falls
    from 1 to 2."""
    curve = Polynomial(coefficients=coefficients)
    assert curve.rises_from(1.0) == rises
    far = curve([1.0, 1.2, 1.5, 1.9, 3.0, 100.0, 1e7])
    assert (np.diff(far) >= 0).all() or not rises


def test_nothing_is_below_zero() -> None:
    """Catches negative seconds before the shortest length."""
    assert Polynomial(coefficients=(-1.0, 1.0))([0.5, 3.0]).tolist() == [0.0, 2.0]
    found, error = fit_polynomial([1, 2, 4], [0.0, 0.0, 0.0])
    assert found([1, 100]).tolist() == [0.0, 0.0]
    assert error.worst == 0


def test_points_are_checked() -> None:
    """Catches a NaN in every coefficient, and one length that is fitted by a line."""
    with pytest.raises(CostError, match=r"1 different lengths.*512 tokens"):
        fit_polynomial([256, 256], [1.0, 2.0])
    with pytest.raises(CostError, match="0 different lengths"):
        fit_polynomial([], [])
    for bad in (math.nan, math.inf, -1.0):
        with pytest.raises(CostError, match="pack of 2 tokens"):
            fit_polynomial([1, 2, 3], [1.0, bad, 2.0])


def test_json() -> None:
    """Catches digits lost on the way, and numbers that are none."""
    found, _ = fit_polynomial(LADDER, noisy(TRUE[3], 1))
    assert Polynomial.from_json(found.to_json()) == found
    for bad in ((1.0,), (1.0,) * 5, (1.0, math.nan), (1.0, "2"), (1.0, True)):
        with pytest.raises(CostError):
            Polynomial(coefficients=bad)
    with pytest.raises(CostError):
        Polynomial(coefficients=(1.0, 1.0), unit=0.0)
