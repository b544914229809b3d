"""Seconds or bytes over tokens as a polynomial of degree 1 to 3, the degree chosen by AIC.

ParaDySe extrapolates by it (Eq. 9): beyond the longest length that was profiled a forest can only
repeat its last value. The degrees are fitted one by one and compared by Akaike's criterion with
the correction for small samples,

    AICc = m ln(R / m) + 2 k + 2 k (k + 1) / (m - k - 1),    k = degree + 2,

of m points with R the sum of squared errors; k counts the coefficients and the variance. A profile
has a dozen points, where plain AIC takes the cubic too often. Of equal degrees the lower counts,
and exact data make all degrees equal: R is not taken for less than rounding.

Errors are relative, as in the quadratic's fit: noise grows with what is measured, and a plain fit
(``numpy.polyfit``, as in the paper) would let the longest point decide alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.costs.quadratic import FitError, check_points
from headrace.errors import CostError

__all__ = ["DEGREES", "Polynomial", "fit_polynomial"]

Floats = NDArray[np.float64]

DEGREES = (1, 2, 3)

_LEAST_ERROR = 1e-9  # relative; less is rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Polynomial:
    """``max(0, sum of coefficients[k] (tokens / unit)^k)``, of seconds or bytes.

    Coefficients may be negative. ``unit`` is the longest fitted length, so that all powers are at
    most 1 where it was fitted. Raises CostError for numbers that are not finite.
    """

    coefficients: tuple[float, ...]
    unit: float = 1.0

    def __post_init__(self) -> None:
        """Raise CostError for a degree out of range and for numbers that are not finite."""
        numbers = (*self.coefficients, self.unit)
        if not 2 <= len(self.coefficients) <= 1 + max(DEGREES):
            got = f"{len(self.coefficients)} coefficients"
            raise CostError("polynomial", got=got, wanted=f"2 to {1 + max(DEGREES)}")
        if not all(map(_is_number, numbers)) or self.unit <= 0:
            raise CostError("polynomial", got=numbers, wanted="finite numbers and a unit > 0")

    @property
    def degree(self) -> int:
        """The highest power of tokens that it has."""
        return len(self.coefficients) - 1

    def __call__(self, tokens: ArrayLike) -> Floats:
        """Values [n] at ``tokens`` [n], by Horner's scheme."""
        x = np.asarray(tokens, dtype=np.float64) / self.unit
        values = np.full_like(x, self.coefficients[-1])
        for coefficient in self.coefficients[-2::-1]:
            values = values * x + coefficient
        return np.maximum(values, 0.0)

    def rises_from(self, tokens: float) -> bool:
        """Whether the polynomial falls nowhere from ``tokens`` on: its slope b + 2 c x + 3 d x^2 is
        not below zero where it is least there."""
        _, b, c, d = (*self.coefficients, 0.0, 0.0)[:4]  # absent powers have the coefficient 0
        if d < 0 or (d == 0 and c < 0):  # the slope goes to minus infinity
            return False
        x = tokens / self.unit
        # The slope is least at its vertex -c / 3 d, or at x where that lies before it.
        lowest = max(x, -c / (3 * d)) if d > 0 else x
        return b + 2 * c * lowest + 3 * d * lowest**2 >= 0

    def to_json(self) -> dict[str, Any]:
        """A JSON object that :meth:`from_json` reads back."""
        return {"coefficients": list(self.coefficients), "unit": self.unit}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Polynomial:
        """Read the polynomial that :meth:`to_json` gave."""
        return cls(coefficients=tuple(value["coefficients"]), unit=value["unit"])


def fit_polynomial(
    lengths: Sequence[int], values: Sequence[float], *, degrees: Sequence[int] = DEGREES
) -> tuple[Polynomial, FitError]:
    """Fit a polynomial to ``values[i]`` at ``lengths[i]`` tokens, of the degree with the least
    AICc. Returns it and its relative errors over these points.

    Degree 1 takes two different lengths; a higher one ``degree`` + 4 points, with which the
    correction of AICc is finite. A polynomial that falls somewhere beyond the longest length is not
    taken, as it would predict long documents to be free; where degree 1 falls, the mean is taken.
    Values below a thousandth of the largest weigh like that thousandth, so that zeros are allowed.
    Raises CostError for points that are not finite or are negative, and for fewer than two lengths.
    """
    check_points("fit of a polynomial", [(n,) for n in lengths], values, zero_allowed=True)
    if len(set(lengths)) < 2:
        longest = max(lengths, default=256)
        raise CostError(
            "fit of a polynomial",
            got=f"{len(set(lengths))} different lengths",
            wanted="at least two",
            hint=f"measure a document of {2 * longest:,} tokens too",
        )
    x, y = np.asarray(lengths, dtype=np.float64), np.asarray(values, dtype=np.float64)
    floor = np.maximum(y, max(float(y.max()) / 1000, 1e-12))
    best, least = _mean(x, y, floor), math.inf
    for degree in sorted(degrees):
        if len(set(lengths)) <= degree or (degree > 1 and len(x) < degree + 4):
            continue
        fitted = _fit_degree(x, y, floor, degree)
        criterion = _criterion(fitted, x, y, floor)
        if criterion < least and fitted.rises_from(x.max()):
            best, least = fitted, criterion
    errors = np.abs(best(x) - y) / floor
    fit = FitError(median=float(np.median(errors)), worst=float(errors.max()), points=len(x))
    return best, fit


def _fit_degree(x: Floats, y: Floats, floor: Floats, degree: int) -> Polynomial:
    """The polynomial of one degree with the least squared errors relative to ``floor``, which is y
    but for small values; x (tokens), y (values) and floor are [n]."""
    unit = float(x.max())
    powers = (x / unit)[:, None] ** np.arange(degree + 1)
    coefficients = np.linalg.lstsq(powers / floor[:, None], y / floor, rcond=None)[0]
    return Polynomial(coefficients=tuple(map(float, coefficients)), unit=unit)


def _mean(x: Floats, y: Floats, floor: Floats) -> Polynomial:
    """The constant with the least squared errors relative to ``floor``, as a line of slope 0;
    arguments as for :func:`_fit_degree`."""
    weights = floor**-2
    return Polynomial(
        coefficients=(float((weights * y).sum() / weights.sum()), 0.0), unit=float(x.max())
    )


def _criterion(fitted: Polynomial, x: Floats, y: Floats, floor: Floats) -> float:
    """AICc of a fitted polynomial by the formula in the module's docstring, where R / m is the mean
    of the squared errors relative to ``floor``. Its correction is left out where it is not finite:
    degree 1 is then the only candidate."""
    m, k = len(x), fitted.degree + 2
    error = float((((fitted(x) - y) / floor) ** 2).mean())
    correction = 2 * k * (k + 1) / (m - k - 1) if m > k + 1 else 0.0
    return m * math.log(max(error, _LEAST_ERROR**2)) + 2 * k + correction


def _is_number(value: object) -> bool:
    """Whether a value is a finite number, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
