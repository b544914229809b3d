"""Figures that hold predictions against measurements."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import altair as alt

from headrace.report.charts import theme
from headrace.report.charts.step_charts import every
from headrace.report.records import CostPoint, Run, StepMetrics
from headrace.units import bytes_text

__all__ = ["cost_fit", "memory_by_rank", "predicted_against_measured"]


_PLAIN = ",~r"


def predicted_against_measured(run: Run) -> theme.Drawing:
    """One dot per step: measured seconds against predicted ones, the diagonal and its band of
    10 %; coloured by the largest group of the step."""
    steps = every([s for s in run.warm if isfinite(s.ratio) and s.ratio > 0])
    unit = theme.second_unit(s.step_s for s in steps)
    rows = [_dot(step, unit.factor) for step in steps]
    values = [row[key] for row in rows for key in ("predicted", "measured")] or [1.0]
    low, high = min(values) / 1.08, max(values) * 1.08
    wide = high / low > 8  # then both axes are logarithmic
    low = low if wide else 0.0
    scale = alt.Scale(type="log" if wide else "linear", domain=[low, high], nice=False)
    axis = theme.log_axis(low, high, _PLAIN) if wide else alt.Axis()
    x = alt.X("predicted:Q", title=f"predicted, {unit.name}", scale=scale, axis=axis)
    y = alt.Y("measured:Q", title=f"measured, {unit.name}", scale=scale, axis=axis)
    # The two ends of the diagonal, and of its band.
    line = [{"predicted": v, "measured": v, "low": v * 0.9, "high": v * 1.1} for v in (low, high)]
    ground = alt.Chart(theme.data(line)).encode(x=x)
    band = ground.mark_area(color=theme.PREDICTED, opacity=0.12, clip=True).encode(
        y=alt.Y("low:Q", scale=scale, title=f"measured, {unit.name}"), y2="high:Q"
    )
    diagonal = ground.mark_line(color=theme.MUTED, strokeWidth=1.2).encode(y=y)
    shown = theme.legend("largest group, ranks")
    dots = (
        alt.Chart(theme.data(rows))
        .mark_circle(size=44, opacity=0.75)
        .encode(
            x=x,
            y=y,
            tooltip=_DOT_TOOLTIP,
            color=alt.Color("group:O", scale=theme.group_scale(group_sizes(run)), legend=shown),
        )
    )
    layers = theme.layered(band, diagonal, dots)
    return theme.half(layers)


_DOT_TOOLTIP = [
    alt.Tooltip("step:Q"),
    alt.Tooltip("strategy:N"),
    alt.Tooltip("predicted:Q", format=".4~g"),
    alt.Tooltip("measured:Q", format=".4~g"),
    alt.Tooltip("longest:Q", title="longest sequence", format=","),
]


def _dot(step: StepMetrics, factor: float) -> dict[str, Any]:
    """One step as a dot; ``factor`` turns seconds into the unit of the axes."""
    return {
        "step": step.step,
        "strategy": step.planned.strategy,
        "group": step.largest_group,
        "predicted": float(f"{step.planned.predicted_s * factor:.5g}"),
        "measured": float(f"{step.step_s * factor:.5g}"),
        "longest": step.longest,
    }


def group_sizes(run: Run) -> set[int]:
    """All group sizes of a run and of its profile, so that a size has one colour everywhere."""
    sizes = {step.largest_group for step in run.steps}
    return sizes | {p for _, p in run.assigned} | {point.p for point in run.facts.costs.points}


def memory_by_rank(run: Run) -> theme.Drawing:
    """The highest measured peak of each rank over the run (bars), the highest predicted one
    (ticks) and the capacity (rule, when it is within four times the peaks)."""
    measured = _highest([step.peak_bytes for step in run.steps])
    predicted = _highest([step.planned.peak_bytes for step in run.steps])
    capacity = run.facts.capacity_bytes
    largest = max(measured + predicted, default=1.0)
    near = capacity <= 4 * largest
    top = max(largest, capacity) if near else largest
    unit = theme.byte_unit([top])
    scale = alt.Scale(domain=[0, 1.12 * top * unit.factor], nice=False)
    color = theme.named_color(
        {"measured peak": theme.MEASURED, "predicted peak": theme.PREDICTED},
        theme.legend(symbolType="square"),
    )
    base = alt.Chart().encode(
        x=alt.X("rank:O", axis=alt.Axis(labelAngle=0, labelOverlap=True, grid=False)),
        y=alt.Y("peak:Q", title=unit.name, scale=scale),
        color=color,
        tooltip=["rank:O", alt.Tooltip("peak:Q", title=f"peak, {unit.name}", format=".4~g")],
    )
    width = max(3, min(46, 0.7 * (theme.HALF - 60) / max(1, len(measured))))
    bars = base.transform_calculate(name="'measured peak'").mark_bar()
    ticks = base.transform_calculate(name="'predicted peak'").mark_tick(thickness=3, size=width)
    layers = [
        bars.properties(data=_peak_rows(measured, unit)),
        ticks.properties(data=_peak_rows(predicted, unit)),
    ]
    if near:
        layers += _capacity_rule(capacity, capacity * unit.factor)
    return theme.half(theme.layered(*layers))


def _peak_rows(peaks: list[float], unit: theme.Unit) -> alt.InlineData:
    """Rows of rank and peak from the peak bytes of each rank."""
    return theme.data(
        [{"rank": rank, "peak": peak * unit.factor} for rank, peak in enumerate(peaks)]
    )


def _highest(steps: Sequence[tuple[float, ...]]) -> list[float]:
    """The highest value of each rank over all steps, of which each has values by rank. A rank
    without a finite value has 0."""
    ranks = max(map(len, steps), default=0)
    return [
        max((s[rank] for s in steps if rank < len(s) and isfinite(s[rank])), default=0.0)
        for rank in range(ranks)
    ]


def _capacity_rule(capacity_bytes: float, at: float) -> list[alt.Chart]:
    """A line at the capacity of a rank's memory, ``at`` in the unit of the axis, with its label."""
    rows = theme.data([{"at": at, "text": f"capacity {bytes_text(capacity_bytes)}"}])
    base = alt.Chart(rows).encode(y="at:Q")
    text = base.encode(x=alt.value(0), text="text:N")
    rule = base.mark_rule(color=theme.WARNING, strokeWidth=1.5)
    return [rule, *theme.label(text, align="left", dx=5, dy=-8)]


def cost_fit(run: Run) -> theme.Drawing:
    """Seconds of a layer over the tokens of its pack, log-log: profiled points as dots, the fitted
    costs as lines, in a column for each part. Colours are numbers of ranks, shapes of dots are
    methods, dashes of lines are recompute levels."""
    points = run.facts.costs.points
    unit = theme.second_unit(p.measured_s for p in points)
    parts = list(dict.fromkeys(point.part for point in points))
    rows = [_fit_row(p, unit.factor) for p in points]
    values = [row[key] for row in rows for key in ("measured", "predicted")]
    known = [value for value in values if isfinite(value) and value > 0] or [1.0]
    low, high = min(known) / 1.3, max(known) * 1.3
    y = alt.Y(
        "predicted:Q",
        title=unit.name,
        scale=alt.Scale(type="log", domain=[low, high], nice=False),
        axis=theme.log_axis(low, high, _PLAIN),
    )
    colors = theme.group_scale(group_sizes(run))
    width = theme.FULL // max(2, len(parts)) - 68
    columns = [
        _fit_panel([row for row in rows if row["part"] == part], y, colors).properties(
            width=width, height=260, title=part
        )
        for part in parts
    ]
    return theme.styled(alt.hconcat(*columns, spacing=24).resolve_scale(y="shared"))


def _fit_row(point: CostPoint, factor: float) -> dict[str, Any]:
    """One measured point of a fit; ``single`` where its pack has one document only. Options are
    texts such as ``megatron_cz+full``, a method and perhaps a recompute level."""
    method, _, recompute = point.option.partition("+")
    longest = point.longest or point.tokens
    return {
        "p": point.p,
        "part": point.part,
        "method": method,
        "recompute": recompute or "none",
        "tokens": point.tokens,
        "longest": longest,
        "single": longest == point.tokens,
        "measured": point.measured_s * factor,
        "predicted": point.predicted_s * factor,
    }


def _fit_panel(rows: list[dict[str, Any]], y: alt.Y, colors: alt.Scale) -> alt.LayerChart:
    """The chart of one part's fits over tokens: lines are predicted, marks measured. Packs of
    several documents have hollow marks and no line, as tokens alone do not fix their seconds."""
    tokens = [row["tokens"] for row in rows]
    low, high = min(tokens) / 1.15, max(tokens) * 1.15
    x = alt.X(
        "tokens:Q",
        title="tokens of the pack",
        scale=alt.Scale(type="log", domain=[low, high], nice=False),
        axis=theme.log_axis(low, high, "~s"),
    )
    dash = alt.StrokeDash(
        "recompute:N", sort=list(theme.RECOMPUTE), legend=theme.legend("recompute", padding=8)
    )
    shape = alt.Shape("method:N", legend=theme.legend("method", padding=8))
    base = alt.Chart(theme.data(rows)).encode(
        x=x, color=alt.Color("p:O", scale=colors, legend=theme.legend("ranks", padding=8))
    )
    single = base.transform_filter("datum.single")
    lines = single.mark_line(strokeWidth=1.6).encode(y=y, strokeDash=dash, detail="method:N")
    dots = single.mark_point(size=42, filled=True, opacity=0.85)
    packs = base.transform_filter("!datum.single").mark_point(size=36, strokeWidth=1.2)
    marks = [
        mark.encode(y="measured:Q", shape=shape, tooltip=_FIT_TOOLTIP) for mark in (packs, dots)
    ]
    return theme.layered(lines, *marks)


_FIT_TOOLTIP = [
    alt.Tooltip("p:O", title="ranks"),
    alt.Tooltip("method:N"),
    alt.Tooltip("recompute:N"),
    alt.Tooltip("tokens:Q", format=","),
    alt.Tooltip("longest:Q", format=","),
    alt.Tooltip("measured:Q", format=".4~g"),
    alt.Tooltip("predicted:Q", format=".4~g"),
]
