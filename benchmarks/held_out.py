"""How well fits predict what they did not see.

Of the lengths of a ladder the two longest are held out, to be predicted from shorter ones
("beyond"), and of the others every third between the ends ("inside"). Every model is fitted to the
rest, and asked for both.

    quadratic     least relative squares with coefficients >= 0; for bytes the line
    polynomial    degree 1 to 3 by AIC, everywhere
    forest        everywhere, so flat beyond the longest length
    hybrid        the forest within, the polynomial beyond
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from headrace.costs.paradyse.hybrid import LEAST_LENGTHS, TARGETS, Target, fit_pair, measured
from headrace.costs.quadratic import FitError, fit_linear, fit_quadratic
from headrace.costs.sources.measured import points_by_option
from headrace.errors import CostError
from headrace.spec.profile import Profile

__all__ = [
    "MODELS",
    "HeldOut",
    "Model",
    "Where",
    "error_of",
    "held_out",
    "relative_errors",
    "split",
]

Floats = NDArray[np.float64]
Curve = Callable[[Sequence[int]], Floats]
Model = Literal["quadratic", "polynomial", "forest", "hybrid"]
Where = Literal["inside", "beyond"]
MODELS: tuple[Model, ...] = get_args(Model)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Relative errors |predicted / measured - 1| of one model, where it was not fitted."""

    p: int
    option: str
    target: Target
    model: str
    where: Where
    lengths: tuple[int, ...]
    errors: tuple[float, ...]


def split(lengths: Iterable[int]) -> dict[Where, tuple[int, ...]]:
    """The lengths to hold out; none inside where fewer than three would be left."""
    ordered = sorted(set(lengths))
    within, beyond = ordered[:-2], ordered[-2:]
    inside = within[1:-1:3] if len(within) > 3 else []
    return {"inside": tuple(inside), "beyond": tuple(beyond)}


def held_out(profile: Profile) -> list[HeldOut]:
    """The errors of all models for everything that was measured of single documents.

    A ladder too short to be split is left out; raises CostError when all are, naming lengths to
    add, and MissingExtra without scikit-learn.
    """
    found: list[HeldOut] = []
    for (p, option), points in points_by_option(profile).items():
        held = split(point.lengths[0] for point in points if len(point.lengths) == 1)
        for target in TARGETS:
            lengths, values = measured(points, target)
            rest = [
                (n, value)
                for n, value in zip(lengths, values, strict=True)
                if n not in (*held["inside"], *held["beyond"])
            ]
            if len({n for n, _ in rest}) < LEAST_LENGTHS[target]:
                continue
            curves = [*_curves([n for n, _ in rest], [value for _, value in rest], target)]
            for where, out in held.items():
                asked = [x for x in zip(lengths, values, strict=True) if x[0] in out]
                for name, curve in curves if asked else ():
                    errors = relative_errors(
                        curve([n for n, _ in asked]), [value for _, value in asked], max(values)
                    )
                    found.append(
                        HeldOut(
                            p=p,
                            option=option,
                            target=target,
                            model=name,
                            where=where,
                            lengths=tuple(n for n, _ in asked),
                            errors=errors,
                        )
                    )
    if not found:
        longest = max((x.lengths[0] for x in profile.points if len(x.lengths) == 1), default=256)
        raise CostError(
            "profile to hold lengths out of",
            got="ladders too short to be split",
            hint=f"measure documents of {2 * longest:,} and {4 * longest:,} tokens too",
        )
    return found


def relative_errors(
    predicted: Floats, values: Sequence[float], largest: float
) -> tuple[float, ...]:
    """|predicted / measured - 1|; what is below a thousandth of the largest value counts as
    that, so that zeros can be predicted."""
    wanted = np.asarray(values, dtype=np.float64)
    divisor = np.maximum(wanted, max(largest / 1000, 1e-12))
    return tuple((np.abs(predicted - wanted) / divisor).tolist())


def error_of(rows: Iterable[HeldOut]) -> FitError:
    """Median and worst of all errors of ``rows``. Raises CostError without any."""
    errors = np.array([error for row in rows for error in row.errors])
    if not len(errors):
        raise CostError("held-out errors", got="none", wanted="at least one")
    return FitError(median=float(np.median(errors)), worst=float(errors.max()), points=len(errors))


def _curves(
    lengths: list[int], values: list[float], target: Target
) -> Iterator[tuple[Model, Curve]]:
    pair = fit_pair(lengths, values)
    yield "quadratic", _quadratic(lengths, values, target)
    yield "polynomial", pair.polynomial
    yield "forest", pair.steps
    yield "hybrid", pair


def _quadratic(lengths: list[int], values: list[float], target: Target) -> Curve:
    if target.endswith("_bytes"):
        line, _ = fit_linear(lengths, values)
        return lambda asked: np.array([line(n) for n in asked])
    curve, _ = fit_quadratic(lengths, [max(1e-9, value) for value in values])
    return lambda asked: np.array([curve((n,)) for n in asked])
