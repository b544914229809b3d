"""Figures over the steps of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import isfinite
from typing import Any

import altair as alt
import numpy as np
import numpy.typing as npt

from headrace.report.charts import theme
from headrace.report.records import Run, StepMetrics
from headrace.report.run_summary import finite, median

__all__ = [
    "Point",
    "every",
    "gap_to_bound",
    "loss_curve",
    "ratio_over_steps",
    "series",
    "strategies_over_steps",
    "throughput",
]

LIMIT = 2000
"""Points that a line holds at most."""

Value = Callable[[StepMetrics], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A point of a line over steps. ``value`` is the mean of the steps from ``step`` up to the next
    point, ``smooth`` the same after smoothing over neighbouring points. Both are None where the
    run wrote no value."""

    step: int
    value: float | None
    smooth: float | None


def every(steps: Sequence[StepMetrics], limit: int = LIMIT) -> Sequence[StepMetrics]:
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
    smooth = _smooth(means)
    return [
        Point(step=run.steps[low].step, value=_round(means[i]), smooth=_round(smooth[i]))
        for i, low in enumerate(edges[:-1])
    ]


def _smooth(values: Sequence[float]) -> list[float]:
    """The running mean of the running median: the median removes outliers, the mean the jumps of
    the median. A window is a fifteenth of the values; up to 12 values stay as they are."""
    window = max(2, len(values) // 30) if len(values) > 12 else 0
    spans = [slice(max(0, i - window), i + window + 1) for i in range(len(values))]
    medians = np.array([median(values[span]) for span in spans])
    return [_mean(medians[span]) for span in spans]


def _mean(values: npt.NDArray[np.float64]) -> float:
    """The mean of the finite values, NaN when there is none."""
    kept = finite(values)
    return float(kept.mean()) if kept.size else float("nan")


def _round(value: float) -> float | None:
    """The value with five significant digits, as more make a page larger and cannot be seen; None
    where it is not finite."""
    return float(f"{value:.5g}") if np.isfinite(value) else None


def _step_axis() -> alt.X:
    """The axis of step numbers."""
    axis = alt.Axis(format=",d", tickMinStep=1, grid=False)
    return alt.X("step:Q", title="step", axis=axis, scale=alt.Scale(nice=False))


def _rows(run: Run, value: Value) -> list[dict[str, Any]]:
    """The points of a value over the steps as rows of a figure: ``step``, ``value``, ``smooth``."""
    return [asdict(point) for point in series(run, value)]


def _curve(
    rows: list[dict[str, Any]],
    y: alt.Y,
    color: str,
    name: str,
    number: str,
    x: alt.X | None = None,
) -> list[alt.Chart]:
    """The layers of a curve: dots for the values, a line for the smoothed ones, a gap where there
    are none. ``number`` is the format of values in the tooltip, where they are called ``name``."""
    base = alt.Chart(theme.data(rows)).encode(x=x or _step_axis())
    tooltip = ["step:Q", alt.Tooltip("value:Q", title=name, format=number)]
    size = 22 if len(rows) <= 300 else 5
    dots = base.mark_circle(size=size, color=color, opacity=0.5).encode(y=y, tooltip=tooltip)
    line = base.mark_line(color=color, strokeWidth=2).encode(y="smooth:Q")
    return [dots, line]


def loss_curve(run: Run) -> theme.Drawing:
    """Loss of every step, and smoothed; steps whose loss is not a number are marked
    at the foot."""
    rows = _rows(run, lambda step: step.loss)
    y = alt.Y(
        "value:Q", title="loss per token", scale=alt.Scale(zero=False), axis=_number_axis("~g")
    )
    layers = _curve(rows, y, theme.MEASURED, "loss", ".4f")
    lost = [{"step": s.step} for s in every([s for s in run.steps if not isfinite(s.loss)])]
    if lost:
        layers.append(
            alt.Chart(theme.data(lost))
            .mark_tick(color=theme.WARNING, thickness=2, size=14)
            .encode(x=_step_axis(), y=alt.YValue("height"), tooltip=["step:Q"])
        )
    return theme.half(theme.layered(*layers))


def _number_axis(number_format: str) -> alt.Axis:
    """An axis whose labels are written in a number format of d3, such as ``~s``."""
    return alt.Axis(format=number_format)


def _percent(ticks: int) -> alt.Axis:
    """An axis of fractions in percent, with about so many ticks."""
    return alt.Axis(format=".0%", tickCount=ticks)


def _from_zero(largest: float) -> alt.Scale:
    """A scale from 0 to just above ``largest``, at least to 5 %, so that tiny shares look tiny."""
    return alt.Scale(domain=[0, max(0.05, 1.05 * largest)], clamp=True)


def throughput(run: Run) -> theme.Drawing:
    """Tokens per second above, idle share of all ranks' time below, on one step axis."""
    rate = alt.Y("value:Q", title="tokens/s", axis=_number_axis("~s"), scale=alt.Scale(zero=True))
    most = max(finite(step.idle for step in run.steps), default=0.0)
    idle = alt.Y("value:Q", title="idle", axis=_percent(3), scale=_from_zero(float(most)))
    bare = _step_axis()
    bare = bare.axis(labels=False, ticks=False, title=None, grid=False)
    rows = _rows(run, lambda s: s.tokens_per_s)
    top = theme.layered(*_curve(rows, rate, theme.MEASURED, "tokens/s", ",.0f", bare))
    low = theme.layered(*_curve(_rows(run, lambda s: s.idle), idle, theme.MUTED, "idle", ".1%"))
    width = theme.HALF - 70
    return theme.styled(
        alt.vconcat(
            top.properties(width=width, height=168),
            low.properties(width=width, height=64),
            spacing=8,
        ).resolve_scale(x="shared")
    )


def ratio_over_steps(run: Run) -> theme.Drawing:
    """Predicted over measured seconds of every step around 1, log axis, with the band of 10 %;
    what lies beyond the axis is drawn at its end."""
    rows = _rows(run, lambda step: step.ratio)
    known = finite(step.ratio for step in run.warm)
    # The axis covers 0.8 to 1.25 at least and 0.25 to 4 at most.
    low = max(0.25, min(0.8, float(known.min()) * 0.95)) if known.size else 0.8
    high = min(4.0, max(1.25, float(known.max()) * 1.05)) if known.size else 1.25
    ticks = [
        t
        for t in (0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 4)
        if low <= t <= high
    ]
    y = alt.Y(
        "value:Q",
        title="predicted / measured",
        axis=alt.Axis(values=ticks, tickCount=60, format="~g"),
        scale=alt.Scale(type="log", domain=[low, high], clamp=True, nice=False),
    )
    span = {"step": run.steps[0].step, "end": run.steps[-1].step, "low": 0.9, "high": 1.1}
    ground = alt.Chart(theme.data([span]))
    band = ground.mark_rect(color=theme.PREDICTED, opacity=0.12).encode(
        x=_step_axis(), x2="end:Q", y=alt.Y("low:Q"), y2="high:Q"
    )
    one = alt.Chart(theme.data([{"at": 1}])).mark_rule(color=theme.INK).encode(y="at:Q")
    layers = [band, one, *_curve(rows, y, theme.PREDICTED, "predicted / measured", ".3f")]
    return theme.half(theme.layered(*layers))


def gap_to_bound(run: Run) -> theme.Drawing:
    """How far the plans that ran and the best static plans lie above the lower bound of their
    batch, as a share of the bound; both predicted."""

    def above(seconds: float, step: StepMetrics) -> float:
        """The share of the step's lower bound by which ``seconds`` are above it; NaN where the
        bound is not known."""
        bound = step.planned.lower_bound_s
        return seconds / bound - 1 if bound > 0 else float("nan")

    groups = {
        "plan that ran": _rows(run, lambda s: above(s.planned.predicted_s, s)),
        "best static plan": _rows(run, lambda s: above(s.planned.best_static_s, s)),
    }
    rows = [
        {**row, "plan": name}
        for name, group in groups.items()
        for row in group
        if row["value"] is not None
    ]
    color = alt.Color(
        "plan:N",
        scale=alt.Scale(domain=list(groups), range=[theme.PREDICTED, theme.STATIC]),
        legend=theme.legend(symbolType="circle", symbolOpacity=1),
    )
    base = alt.Chart(theme.data(rows)).encode(x=_step_axis(), color=color)
    most = max((float(row["value"]) for row in rows), default=0.0)
    y = alt.Y("value:Q", title="above the lower bound", axis=_percent(6), scale=_from_zero(most))
    tooltip = ["step:Q", "plan:N", alt.Tooltip("value:Q", title="above the bound", format=".1%")]
    size = 26 if len(rows) <= 600 else 6
    dots = base.mark_circle(size=size, opacity=0.45).encode(y=y, tooltip=tooltip)
    line = base.mark_line(strokeWidth=2).encode(y="smooth:Q")
    return theme.half(theme.layered(dots, line), 300)


def strategies_over_steps(run: Run) -> theme.Drawing:
    """Seconds of every step, coloured by its strategy (Hydraulis, Figure 15a); strategies that ran
    least share one colour."""
    counted = Counter(step.planned.strategy for step in run.steps)
    named = [name for name, _ in counted.most_common(len(theme.OPTIONS))]
    several = len(counted) > len(named)
    unit = theme.second_unit(step.step_s for step in run.steps)
    rows: list[dict[str, Any]] = [
        {
            "step": step.step,
            "took": step.step_s * unit.factor,
            "strategy": step.planned.strategy,
            "shown": step.planned.strategy if step.planned.strategy in named else "others",
        }
        for step in every(run.steps)
    ]
    shown = [*named, *(["others"] if several else [])]
    colors = [*theme.OPTIONS[: len(named)], *([theme.OTHERS] if several else [])]
    chart = (
        alt.Chart(theme.data(rows))
        .mark_circle(size=40 if len(rows) <= 300 else 8)
        .encode(
            x=_step_axis(),
            y=alt.Y("took:Q", title=f"{unit.name} of the step", scale=alt.Scale(zero=True)),
            color=alt.Color(
                "shown:N",
                scale=alt.Scale(domain=shown, range=colors),
                legend=theme.legend(columns=2, labelLimit=260),
            ),
            tooltip=["step:Q", "strategy:N", alt.Tooltip("took:Q", title=unit.name, format=".3~g")],
        )
    )
    return theme.half(chart)
