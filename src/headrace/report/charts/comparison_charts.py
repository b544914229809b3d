"""Figures of planners compared over several batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import altair as alt

from headrace.report.charts import theme
from headrace.spec.comparison import Comparison, PlannerResult

__all__ = ["gap_of_batches", "mean_steps", "rates", "seconds_of_batches"]

_COLORS = (theme.PREDICTED, theme.STATIC, theme.INK, "#0072B2", "#009E73")
"""Colours of the planners in the order of the results: headrace has that of predictions."""


def _color(comparison: Comparison, *, first: int | None = None, legend: bool = True) -> alt.Color:
    """A colour for each planner, or for the ``first`` ones, the same in all figures."""
    names = [comparison.label(result.name) for result in comparison.results[:first]]
    shown = theme.legend(symbolType="circle", labelLimit=260) if legend else None
    colors = list(_COLORS[: len(names)])
    return alt.Color("planner:N", scale=alt.Scale(domain=names, range=colors), legend=shown)


def _batch_axis() -> alt.X:
    """The axis of the batches' numbers."""
    axis = alt.Axis(format=",d", tickMinStep=1, grid=False)
    return alt.X("batch:Q", title="batch", axis=axis, scale=alt.Scale(nice=False, padding=12))


def _over_batches(
    rows: list[dict[str, Any]], y: alt.Y, color: alt.Color, tooltip: list[Any], height: int
) -> theme.Drawing:
    """The figure of a value of each batch: dots that a line joins, in a colour for each planner."""
    base = alt.Chart(theme.data(rows)).encode(x=_batch_axis(), y=y, color=color, tooltip=tooltip)
    lines = base.mark_line(strokeWidth=1.3, opacity=0.7)
    charts = theme.layered(lines, base.mark_circle(size=42, opacity=0.9))
    return theme.styled(charts.properties(width=theme.FULL - 70, height=height))


def seconds_of_batches(comparison: Comparison) -> theme.Drawing:
    """Predicted seconds of each batch by planner; no dot where a planner cannot hold it."""
    known = [s for result in comparison.results for s in result.seconds if s is not None]
    unit = theme.second_unit(known)
    rows = [
        {
            "batch": number,
            "planner": comparison.label(result.name),
            "took": batch.seconds * unit.factor,
            "strategy": batch.strategy,
        }
        for result in comparison.results
        for number, batch in enumerate(result.batches)
        if batch is not None
    ]
    y = alt.Y("took:Q", title=f"{unit.name} of the step", scale=alt.Scale(zero=True))
    tooltip = [
        "batch:Q",
        "planner:N",
        alt.Tooltip("took:Q", title=unit.name, format=".4~g"),
        "strategy:N",
    ]
    return _over_batches(rows, y, _color(comparison), tooltip, 260)


def mean_steps(comparison: Comparison) -> theme.Drawing:
    """Seconds of a mean step by planner."""
    means = [r.mean_s for r in comparison.results if r.mean_s is not None]
    unit = theme.second_unit(means)

    def value(result: PlannerResult) -> float | None:
        return None if result.mean_s is None else result.mean_s * unit.factor

    return _bars(comparison, value, f"{unit.name} of a mean step", ".3~g")


def rates(comparison: Comparison) -> theme.Drawing:
    """Tokens per second of a device, by planner."""
    return _bars(comparison, lambda r: comparison.tokens_per_s(r.name), "tokens/s a device", ",.0f")


def _bars(
    comparison: Comparison,
    value: Callable[[PlannerResult], float | None],
    title: str,
    number: str,
) -> theme.Drawing:
    """The figure of a bar for each planner, in the order of the results, with the ``value`` beside
    it in the format ``number``. A planner whose value is None, as it holds no batch, has no bar."""
    names = [comparison.label(result.name) for result in comparison.results]
    rows = [
        {"planner": name, "value": planner_value}
        for name, result in zip(names, comparison.results, strict=True)
        if (planner_value := value(result)) is not None
    ]
    base = alt.Chart(theme.data(rows)).encode(
        x=alt.X("value:Q", title=title, axis=alt.Axis(format="~s", grid=False)),
        y=alt.Y("planner:N", title=None, sort=names, axis=alt.Axis(labelLimit=220)),
    )
    bars = base.mark_bar(height=22).encode(
        color=_color(comparison, legend=False),
        tooltip=["planner:N", alt.Tooltip("value:Q", title=title, format=number)],
    )
    text = base.encode(text=alt.Text("value:Q", format=number))
    layers = theme.layered(bars, *theme.label(text, align="left", dx=4))
    return theme.half(layers, 44 * len(names) + 40)


def gap_of_batches(comparison: Comparison) -> theme.Drawing:
    """How far each batch lies above the seconds that no plan beats, for headrace and the best
    single group size of each batch, which are the first two results."""
    rows = [
        {
            "batch": number,
            "planner": comparison.label(result.name),
            "above": seconds / bound_s - 1,
        }
        for result in comparison.results[:2]
        for number, (seconds, bound_s) in enumerate(
            zip(result.seconds, comparison.bounds_s, strict=True)
        )
        if seconds is not None and bound_s > 0
    ]
    y = alt.Y("above:Q", title="above the lower bound", axis=alt.Axis(format=".0%"))
    tooltip = ["batch:Q", "planner:N", alt.Tooltip("above:Q", format=".2%")]
    return _over_batches(rows, y, _color(comparison, first=2), tooltip, 150)
