"""Numbers over the steps of a run, thin enough to draw and robust to gaps (NaN)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from headrace.report.records import Run, Step

__all__ = ["LIMIT", "Point", "Value", "every", "finite", "mean", "median", "series"]

LIMIT = 2000
"""Points that a line holds at most."""

Value = Callable[[Step], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """``value`` is the mean of the steps from ``step`` up to the next point, ``smooth`` its
    smoothed neighbourhood; None where nothing was written."""

    step: int
    value: float | None
    smooth: float | None


def finite(values: Iterable[float]) -> npt.NDArray[np.float64]:
    """The finite values, in order."""
    array = np.fromiter(values, dtype=np.float64)
    return array[np.isfinite(array)]


def median(values: Iterable[float]) -> float:
    """The median of the finite values, NaN when there is none."""
    kept = finite(values)
    return float(np.median(kept)) if kept.size else float("nan")


def mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted mean over the finite values, NaN when their weights sum to nothing."""
    value, weight = np.asarray(values, dtype=float), np.asarray(weights, dtype=float)
    kept = np.isfinite(value) & np.isfinite(weight)
    total = float(weight[kept].sum())
    return float((value[kept] * weight[kept]).sum()) / total if total > 0 else float("nan")


def every(steps: Sequence[Step], limit: int = LIMIT) -> Sequence[Step]:
    """At most ``limit`` of the steps, evenly spread, the last among them."""
    if len(steps) <= limit:
        return steps
    picked = np.linspace(0, len(steps) - 1, limit).round().astype(int)
    return [steps[i] for i in picked]


def series(run: Run, value: Value, limit: int = LIMIT) -> list[Point]:
    """``value`` over the steps of a run, averaged down to at most ``limit`` points."""
    values = np.array([value(step) for step in run.steps], dtype=np.float64)
    edges = np.linspace(0, len(values), min(limit, len(values)) + 1).astype(int)
    means = [_mean(values[low:high]) for low, high in pairwise(edges)]
    smooth = _smoothed(means)
    return [
        Point(step=run.steps[low].step, value=_rounded(means[i]), smooth=_rounded(smooth[i]))
        for i, low in enumerate(edges[:-1])
    ]


def _smoothed(values: Sequence[float]) -> list[float]:
    """The running mean of the running median: outliers do not show, steps are not jagged."""
    window = max(2, len(values) // 30) if len(values) > 12 else 0
    spans = [slice(max(0, i - window), i + window + 1) for i in range(len(values))]
    medians = np.array([median(values[span]) for span in spans])
    return [_mean(medians[span]) for span in spans]


def _mean(values: npt.NDArray[np.float64]) -> float:
    kept = values[np.isfinite(values)]
    return float(kept.mean()) if kept.size else float("nan")


def _rounded(value: float) -> float | None:
    """Five significant digits are more than a picture shows and a third of the bytes."""
    return float(f"{value:.5g}") if np.isfinite(value) else None
