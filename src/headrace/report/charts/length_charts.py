"""Figures of the data: how long sequences are, and where they were run."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import altair as alt

from headrace.report.captions import tokens_share
from headrace.report.charts import theme
from headrace.report.records import CorpusStatistics, Run
from headrace.units import count_text

__all__ = ["Assigned", "length_histogram", "placement_map", "size_map"]

Assigned = Mapping[tuple[int, int], int]
"""Counts of sequences by their length bin (b holds ``(2**(b - 1), 2**b]`` tokens) and ranks."""

_DOCUMENTS, _TOKENS = "#9fb3c8", "#009E73"


def length_histogram(corpus: CorpusStatistics, noun: str = "document") -> theme.Drawing:
    """Share of documents, or what else has a length (bars), and of tokens (area) over the length of
    one, log axis, with the median, 90 % and 99 % quantiles and the context as rules."""
    rows = _bins(corpus)
    axis = _length_axis(rows[0]["from"], max([rows[-1]["to"], *_finite(corpus.context)]), noun)
    names = {f"{noun}s": _DOCUMENTS, "tokens": _TOKENS}
    color = theme.named_color(names, theme.legend("share of all", symbolType="square"))
    tooltip = [
        alt.Tooltip("from:Q", format=",.0f"),
        alt.Tooltip("to:Q", format=",.0f"),
        alt.Tooltip("count:Q", title=f"{noun}s", format=","),
        alt.Tooltip("documents:Q", title=f"share of {noun}s", format=".1%"),
        alt.Tooltip("tokens:Q", title="share of tokens", format=".1%"),
    ]
    base = alt.Chart(theme.data(rows)).encode(x=alt.X("from:Q", **axis), tooltip=tooltip)
    y = alt.Y("documents:Q", title=None, axis=alt.Axis(format=".0%"))
    bars = (
        base.transform_calculate(name=f"'{noun}s'")
        .mark_rect(stroke="white", strokeWidth=0.5)
        .encode(x2="to:Q", y=y, y2=alt.datum(0), color=color)
    )
    area = (
        base.transform_calculate(name="'tokens'")
        .mark_area(opacity=0.25, line=alt.OverlayMarkDef(color=_TOKENS, strokeWidth=2))
        .encode(x=alt.X("middle:Q", **axis), y=alt.Y("tokens:Q", title=None), color=color)
    )
    layers = theme.layered(bars, area, *_rules(corpus, axis))
    return theme.half(layers, 380)


def _finite(*values: float) -> list[float]:
    """Those of the values that are finite."""
    return [value for value in values if isfinite(value)]


def _length_axis(low: float, high: float, noun: str) -> dict[str, Any]:
    """Title, axis and scale of the lengths. All layers of the histogram are given the same, as
    Vega-Lite would merge different ones."""
    high = max(high, 1.01 * low)
    return {
        "title": f"length of a {noun}, tokens",
        "axis": theme.log_axis(low, high, "~s", grid=False),
        "scale": alt.Scale(type="log", domain=[low, high], nice=False),
    }


def _bins(corpus: CorpusStatistics) -> list[dict[str, Any]]:
    """A row per bin of the histogram, without the empty bins at both ends."""
    total = sum(corpus.counts) or 1
    tokens = tokens_share(corpus)
    rows: list[dict[str, Any]] = []
    for i, count in enumerate(corpus.counts):
        low, high = max(corpus.edges[i], 1.0), max(corpus.edges[i + 1], 1.0)
        rows.append(
            {
                "from": low,
                "to": high,
                "middle": (low * high) ** 0.5,  # on a log axis
                "count": count,
                "documents": count / total,
                "tokens": tokens[i],
            }
        )
    filled = [i for i, row in enumerate(rows) if row["count"]]
    return rows[filled[0] : filled[-1] + 1]


def _rules(corpus: CorpusStatistics, axis: dict[str, Any]) -> list[alt.Chart]:
    """Vertical rules at the quantiles and at the context. Each label is lower than the one before,
    so that neighbours do not overlap."""
    marks = [("median", corpus.median), ("p90", corpus.p90), ("p99", corpus.p99)]
    rows: list[dict[str, Any]] = [
        {"at": at, "text": f"{name} {count_text(at)}", "color": theme.MUTED}
        for name, at in marks
        if isfinite(at) and at >= 1
    ]
    if isfinite(corpus.context):
        text = f"context {count_text(corpus.context)}"
        rows.append({"at": corpus.context, "text": text, "color": theme.WARNING})
    charts: list[alt.Chart] = []
    for i, row in enumerate(sorted(rows, key=lambda row: row["at"])):
        base = alt.Chart(theme.data([row])).encode(x=alt.X("at:Q", **axis))
        dash = [1, 0] if row["color"] == theme.WARNING else [4, 3]
        charts.append(base.mark_rule(color=row["color"], strokeDash=dash, strokeWidth=1.3))
        text = base.encode(text="text:N", y=alt.value(8 + 16 * i))
        charts += theme.label(text, align="right", dx=-5)
    return charts


def size_map(assigned: Assigned) -> theme.Drawing:
    """Length bins against group sizes, coloured by the share of a bin's sequences that ran in
    groups of that size."""
    bins = sorted({b for b, _ in assigned})
    bins = list(range(bins[0], bins[-1] + 1)) if bins else []
    return theme.styled(_cells(assigned, bins, _bin_axis(bins, labels=True)))


def placement_map(run: Run) -> theme.Drawing:
    """Length bins against group sizes, coloured by the share of a bin's sequences that ran in
    groups of that size; below, when plans were read, what their layers recompute."""
    if not run.recomputed:
        return size_map(run.assigned)
    bins = sorted({b for b, _ in run.assigned} | {b for b, _ in run.recomputed})
    bins = list(range(bins[0], bins[-1] + 1))
    top = _cells(run.assigned, bins, _bin_axis(bins, labels=False))
    strip = _recompute_strip(run, bins, _bin_axis(bins, labels=True))
    return theme.styled(
        alt.vconcat(top, strip, spacing=10).resolve_scale(color="independent", x="shared")
    )


def _bin_axis(bins: list[int], *, labels: bool) -> alt.X:
    """The axis of bins of lengths, with labels under the lowest chart only."""
    names = [bin_label(b) for b in bins]
    axis = alt.Axis(
        labelAngle=0,
        labelOverlap=True,
        grid=False,
        domain=False,
        ticks=False,
        labels=labels,
        title=_LENGTHS if labels else None,
    )
    return alt.X("length:O", sort=names, scale=alt.Scale(domain=names), axis=axis)


_LENGTHS = "length of a sequence, tokens up to (K = 1,024)"
_PLOT = theme.HALF - 75


def bin_label(b: int) -> str:
    """The upper end of a length bin: ``512``, ``4K``, ``1M``."""
    for shift, unit in ((20, "M"), (10, "K")):
        if b >= shift:
            return f"{2 ** (b - shift)}{unit}"
    return str(2**b)


def _cells(assigned: Assigned, bins: list[int], x: alt.X) -> theme.Drawing:
    """A heat map: for each bin of lengths (along ``x``) the share of its sequences that ran on each
    number of ranks."""
    sizes = sorted({ranks for _, ranks in assigned})
    totals = {b: sum(n for (other, _), n in assigned.items() if other == b) for b in bins}
    rows = [
        {
            "length": bin_label(b),
            "ranks": size,
            "sequences": assigned.get((b, size), 0),
            "share": assigned.get((b, size), 0) / totals[b],
        }
        for b in bins
        for size in sizes
        if totals[b]
    ]
    height = max(34, min(60, 200 // max(1, len(sizes)))) * len(sizes)
    base = (
        alt.Chart(theme.data(rows))
        .encode(
            x=x,
            y=alt.Y("ranks:O", sort="descending", title="ranks", axis=_plain()),
            tooltip=[
                "length:O",
                "ranks:O",
                alt.Tooltip("sequences:Q", format=","),
                alt.Tooltip("share:Q", format=".1%"),
            ],
        )
        .properties(width=_PLOT, height=height)
    )
    fill = alt.Color(
        "share:Q",
        scale=alt.Scale(domain=[0, 1], range=["#f3f6f9", "#2a788e", "#440154"]),
        legend=theme.legend(
            "share of the sequences of that length", format=".0%", gradientLength=140
        ),
    )
    text = (
        base.mark_text(fontSize=11)
        .transform_filter("datum.share >= 0.005")
        .encode(
            text=alt.Text("share:Q", format=".0%"),
            color=alt.condition("datum.share > 0.35", alt.value("white"), alt.value(theme.INK)),
        )
    )
    return theme.layered(base.mark_rect(stroke="white", strokeWidth=1.5).encode(color=fill), text)


def _share_axis() -> alt.Axis:
    return alt.Axis(format=".0%", values=[0, 0.5, 1], grid=False)


def _plain() -> alt.Axis:
    """An axis with labels, and without ticks and lines."""
    return alt.Axis(grid=False, domain=False, ticks=False, labelAngle=0)


def _recompute_strip(run: Run, bins: list[int], x: alt.X) -> alt.Chart:
    """Stacked bars: for each bin of lengths the shares of its layers by recompute level."""
    rows = [
        {
            "length": bin_label(b),
            "recompute": level,
            "layers": run.recomputed.get((b, level), 0),
            "order": order,
        }
        for b in bins
        for order, level in enumerate(theme.RECOMPUTE)
    ]
    return (
        alt.Chart(theme.data(rows))
        .mark_bar(stroke="white", strokeWidth=1)
        .encode(
            x=x,
            y=alt.Y("layers:Q", stack="normalize", title="layers", axis=_share_axis()),
            order="order:Q",
            color=alt.Color(
                "recompute:N",
                scale=theme.named_scale(theme.RECOMPUTE),
                legend=theme.legend("recompute in backward"),
            ),
            tooltip=["length:O", "recompute:N", alt.Tooltip("layers:Q", format=",")],
        )
        .properties(width=_PLOT, height=56)
    )
