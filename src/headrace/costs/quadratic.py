"""Seconds as a quadratic and bytes as a line, and how both are fitted to measurements.

Hydraulis (appendix C) models one stage on one scheme by ``a l^2 + b l + c``: attention grows with
the square of a sequence, everything else with its tokens, and launching costs a constant. Packed
sequences do not see each other, so the squares are summed per sequence, and the constant is paid
once per micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from headrace.errors import CostError
from headrace.units import percent_text

__all__ = ["FitError", "Linear", "Quadratic", "check_points", "fit_linear", "fit_quadratic"]

Floats = NDArray[np.float64]
Pack = int | Sequence[int]


def _check_coefficients(what: str, values: dict[str, float]) -> None:
    """Raise CostError for a coefficient, by its name, that is negative or no finite number."""
    for name, value in values.items():
        if not isfinite(value) or value < 0:
            raise CostError(f"{what}.{name}", got=value, wanted="a finite number >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quadratic:
    """Seconds of one micro-batch: T(lengths) = sum(a l^2 + b l) + c.

    Attributes:
        a: Seconds per squared token of a sequence.
        b: Seconds per token.
        c: Seconds per micro-batch.

    Raises:
        CostError: For a negative or non-finite coefficient.
    """

    a: float = 0.0
    b: float = 0.0
    c: float = 0.0

    def __post_init__(self) -> None:
        """Raise CostError for a coefficient that is negative or not finite."""
        _check_coefficients("quadratic", {"a": self.a, "b": self.b, "c": self.c})

    def __call__(self, lengths: Iterable[int]) -> float:
        """Seconds of a micro-batch that packs sequences of ``lengths`` tokens."""
        tokens = tuple(lengths)
        return self.of_sums(sum(length * length for length in tokens), sum(tokens))

    def of_sums(self, squares: float, tokens: float) -> float:
        """Seconds of a micro-batch from its sums over sequences.

        Args:
            squares: sum(l^2), in squared tokens.
            tokens: sum(l), in tokens.

        Returns:
            Seconds.
        """
        return self.a * squares + self.b * tokens + self.c

    def __add__(self, added: Quadratic) -> Quadratic:
        """The seconds of both together, as of two layers that the same micro-batch runs."""
        return Quadratic(a=self.a + added.a, b=self.b + added.b, c=self.c + added.c)

    def __mul__(self, factor: float) -> Quadratic:
        """The seconds times ``factor``, for any micro-batch."""
        return Quadratic(a=self.a * factor, b=self.b * factor, c=self.c * factor)

    def to_json(self) -> list[float]:
        """The coefficients as JSON.

        Returns:
            The list ``[a, b, c]``.
        """
        return [self.a, self.b, self.c]


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Bytes of one rank for a micro-batch: slope * tokens + constant.

    Attributes:
        slope: Bytes per token.
        constant: Bytes per micro-batch.

    Raises:
        CostError: For a negative or non-finite coefficient.
    """

    slope: float = 0.0
    constant: float = 0.0

    def __post_init__(self) -> None:
        """Raise CostError for a coefficient that is negative or not finite."""
        _check_coefficients("line", {"slope": self.slope, "constant": self.constant})

    def __call__(self, tokens: float) -> float:
        """Bytes of a rank for a pack of ``tokens`` tokens."""
        return self.slope * tokens + self.constant

    def to_json(self) -> list[float]:
        """The coefficients as JSON.

        Returns:
            The list ``[slope, constant]``.
        """
        return [self.slope, self.constant]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """Relative errors |fitted / measured - 1| of a fit over its own points.

    Attributes:
        median: The median error, as a fraction.
        worst: The largest error, as a fraction.
        points: Points that were fitted.
    """

    median: float
    worst: float
    points: int

    def __str__(self) -> str:
        """Median and worst error in percent, and the number of points."""
        return (
            f"median {percent_text(self.median)}, worst {percent_text(self.worst)}"
            f" of {self.points} points"
        )


def fit_quadratic(lengths: Sequence[Pack], seconds: Sequence[float]) -> tuple[Quadratic, FitError]:
    """Fit the non-negative quadratic with the least sum of squared *relative* errors.

    A fit of absolute errors would let the longest pack decide alone.

    Args:
        lengths: Measured micro-batches: the tokens of the only sequence of each, or those of all
            its sequences.
        seconds: What each took.

    Returns:
        The quadratic, and its errors over these points.

    Raises:
        CostError: For points that are not finite and positive, and for points that do not determine
            three coefficients; it names lengths to add.

    Example:
        >>> line, error = hr.costs.fit_quadratic([100, 200, 400], [0.2, 0.5, 1.7])
        >>> round(line.c, 6), error.points
        (0.1, 3)
    """
    packs = [(pack,) if isinstance(pack, int) else tuple(pack) for pack in lengths]
    check_points("fit of seconds", packs, seconds, zero_allowed=False)
    features = np.array(
        [[sum(n * n for n in pack), sum(pack), 1.0] for pack in packs], dtype=np.float64
    ).reshape(-1, 3)
    if _rank(features) < 3:
        longest = max((n for pack in packs for n in pack), default=256)
        raise CostError(
            "fit of seconds",
            got=f"{len({tuple(row) for row in features})} different packs",
            wanted="packs that tell squares, tokens and the constant apart",
            hint=f"measure sequences of {2 * longest:,} and {4 * longest:,} tokens too",
        )
    measured = np.asarray(seconds, dtype=np.float64)
    coefficients = _non_negative(features, measured, weights=1 / measured)
    a, b, c = map(float, coefficients)
    return Quadratic(a=a, b=b, c=c), _error(features @ coefficients, measured)


def fit_linear(tokens: Sequence[int], byte_counts: Sequence[float]) -> tuple[Linear, FitError]:
    """Fit the non-negative line with the least sum of squared relative errors.

    Args:
        tokens: Tokens of each measured pack.
        byte_counts: Bytes that each needed. Counts below a thousandth of the largest weigh like
            that thousandth, so that zeros are allowed.

    Returns:
        The line, and its errors over these points.

    Raises:
        CostError: For points that are not finite or are negative, and for fewer than two different
            token counts.
    """
    packs = [(count,) for count in tokens]
    check_points("fit of bytes", packs, byte_counts, zero_allowed=True)
    features = np.array([[count, 1.0] for count in tokens], dtype=np.float64).reshape(-1, 2)
    if _rank(features) < 2:
        raise CostError(
            "fit of bytes",
            got=f"{len(set(tokens))} different packs",
            wanted="at least two",
            hint=f"measure a pack of {2 * max(tokens, default=256):,} tokens too",
        )
    measured = np.asarray(byte_counts, dtype=np.float64)
    floor = max(float(measured.max()) / 1000, 1.0)
    coefficients = _non_negative(features, measured, weights=1 / np.maximum(measured, floor))
    line = Linear(slope=float(coefficients[0]), constant=float(coefficients[1]))
    return line, _error(features @ coefficients, np.maximum(measured, floor), measured)


def check_points(
    what: str, packs: Sequence[Sequence[int]], values: Sequence[float], *, zero_allowed: bool
) -> None:
    """Raise CostError, naming ``what``, unless every pack has lengths in tokens and a finite value
    that is above 0, or is 0 where that is allowed."""
    if len(packs) != len(values):
        raise CostError(what, got=f"{len(packs)} packs and {len(values)} values", wanted="a pair")
    for pack, value in zip(packs, values, strict=True):
        if not pack or min(pack) < 1:
            raise CostError(f"{what}, pack", got=list(pack), wanted="lengths >= 1")
        if not isfinite(value) or value < 0 or (value == 0 and not zero_allowed):
            wanted = "a finite number >= 0" if zero_allowed else "a finite number > 0"
            raise CostError(f"{what}, pack of {sum(pack)} tokens", got=value, wanted=wanted)


def _rank(features: Floats) -> int:
    """The rank of the matrix of features [points, coefficients]; below the number of coefficients
    the points do not determine them."""
    if not len(features):
        return 0
    # Columns are scaled to at most 1, as squared tokens are far larger than the constant.
    return int(np.linalg.matrix_rank(features / features.max(axis=0), tol=1e-9))


def _non_negative(features: Floats, measured: Floats, *, weights: Floats) -> Floats:
    """Coefficients >= 0 [coefficients] with the least weighted squared errors, from features
    [points, coefficients], measured values and weights [points].

    The optimum is the unconstrained fit to the columns whose coefficients are positive in it. With
    at most three columns there are at most seven subsets of them, so all are tried.
    """
    # Columns are scaled to at most 1, as squared tokens are far larger than the constant.
    unit = features.max(axis=0)
    scaled = features / unit * weights[:, None]
    target = measured * weights
    columns = features.shape[1]
    # Start with all coefficients 0, which leave the squared target as their error.
    best, best_error = np.zeros(columns), float(target @ target)
    for count in range(columns, 0, -1):
        for subset in combinations(range(columns), count):
            fitted = np.linalg.lstsq(scaled[:, subset], target, rcond=None)[0]
            if (fitted < 0).any():
                continue
            residuals = scaled[:, subset] @ fitted - target
            error = float(residuals @ residuals)
            if error < best_error * (1 - 1e-12):  # better by more than rounding
                best, best_error = np.zeros(columns), error
                best[list(subset)] = fitted
    return best / unit  # ``features`` were divided by the units, so coefficients are too large


def _error(fitted: Floats, divisor: Floats, measured: Floats | None = None) -> FitError:
    """The relative errors of fitted values: |fitted - measured| / divisor. ``measured`` is the
    divisor itself where it is None; all are [points]."""
    errors = np.abs(fitted - (divisor if measured is None else measured)) / divisor
    return FitError(median=float(np.median(errors)), worst=float(errors.max()), points=len(errors))
