"""One look for all figures: colours that mean the same everywhere, fonts, units of axes.

The categorical colours are those of Okabe and Ito (2008), which stay apart under the common kinds
of colour blindness; layer options, which a run may have many of, take those of Paul Tol's "muted"
scheme, so that none looks like a kind of action; group sizes follow viridis, whose lightness falls
as groups grow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10
from typing import Any

import altair as alt
from altair.utils.schemapi import debug_mode

from headrace.units import GIB, KIB, MIB

__all__ = [
    "FULL",
    "HALF",
    "INK",
    "KINDS",
    "MEASURED",
    "MUTED",
    "OPTIONS",
    "OTHERS",
    "PREDICTED",
    "RECOMPUTE",
    "STATIC",
    "WARNING",
    "Drawing",
    "Unit",
    "byte_unit",
    "data",
    "group_scale",
    "half",
    "label",
    "layered",
    "legend",
    "log_axis",
    "log_ticks",
    "named_color",
    "named_scale",
    "second_unit",
    "styled",
]

Drawing = alt.Chart | alt.LayerChart | alt.HConcatChart | alt.VConcatChart

_FIT = alt.AutoSizeParams(type="fit", contains="padding")
"""The width of a figure includes its axes and legends (which Vega-Lite cannot do for concatenated
figures)."""

FULL, HALF = 1080, 525
"""Widths of a figure in pixels: alone in its row, or one of two."""

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e8ecf0"
MEASURED, PREDICTED, STATIC, WARNING = "#0072B2", "#E69F00", "#8d99a6", "#D55E00"
KINDS = {
    "forward": "#0072B2",
    "backward": "#56B4E9",
    "pull": "#E69F00",
    "push": "#D55E00",
    "message": "#b8b8b8",
    "update": "#CC79A7",
    "idle": "#e4e7eb",
}
RECOMPUTE = {"none": "#cfe3f1", "attention": "#56B4E9", "full": "#0072B2"}
OPTIONS = ("#332288", "#88CCEE", "#DDCC77", "#CC6677", "#117733", "#AA4499", "#44AA99", "#661100")
OTHERS = "#dfe3e8"
_VIRIDIS = ("#7ad151", "#22a884", "#2a788e", "#414487", "#440154")
_FONT = "system-ui, 'Segoe UI', 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The unit of an axis: values are multiplied by ``factor`` and written with ``name``."""

    name: str
    factor: float


def second_unit(values: Iterable[float]) -> Unit:
    """Seconds, milliseconds or microseconds, whichever writes the largest value well."""
    largest = max((value for value in values if isfinite(value)), default=1.0)
    if largest >= 2:
        return Unit(name="s", factor=1.0)
    return Unit(name="ms", factor=1e3) if largest >= 2e-3 else Unit(name="us", factor=1e6)


def byte_unit(values: Iterable[float]) -> Unit:
    """GiB, MiB or KiB, whichever writes the largest value well."""
    largest = max((value for value in values if isfinite(value)), default=1.0)
    for name, size in (("GiB", GIB), ("MiB", MIB)):
        if largest >= size:
            return Unit(name=name, factor=1 / size)
    return Unit(name="KiB", factor=1 / KIB)


def log_axis(low: float, high: float, number: str, **options: Any) -> alt.Axis:
    """The axis of a log scale from ``low`` to ``high``: powers of ten, with 2 and 5 of each when
    they are few, in the format ``number``."""
    ticks = log_ticks(low, high)
    # On log scales Vega drops the labels of ticks beyond tickCount, even those asked for.
    return alt.Axis(values=ticks, tickCount=4 * len(ticks) + 4, format=number, **options)


def log_ticks(low: float, high: float) -> list[float]:
    """The ticks of :func:`log_axis`; ``0 < low < high``."""
    decades = log10(high / low)
    steps = (1, 2, 5) if decades < 3.2 else (1,)  # of each power of ten
    exponents = range(floor(log10(low)), ceil(log10(high)) + 1)
    ticks = [float(f"{step}e{exponent}") for exponent in exponents for step in steps]
    return [tick for tick in ticks if low <= tick <= high]


def data(rows: Sequence[dict[str, Any]]) -> alt.InlineData:
    """Rows of a figure; NaN and infinity become null, which JSON can say and Vega skips."""
    values = [{key: _plain(value) for key, value in row.items()} for row in rows]
    with debug_mode(False):  # otherwise Altair checks every row against its schema, which is slow
        return alt.InlineData(values=values)


def _plain(value: Any) -> Any:
    """The value, or None for a float that is not finite."""
    return None if isinstance(value, float) and not isfinite(value) else value


def layered(*charts: alt.Chart) -> alt.LayerChart:
    """Charts over each other, the first at the bottom."""
    return alt.LayerChart(layer=list(charts))


def legend(title: str | None = None, **options: Any) -> alt.Legend:
    """A horizontal legend above the figure, so that it takes none of its width."""
    return alt.Legend(title=title, orient="top", direction="horizontal", offset=8, **options)


def label(chart: alt.Chart, **place: Any) -> list[alt.Chart]:
    """The texts of a chart over a white halo, so that they can be read on any ground."""
    halo = chart.mark_text(fontSize=11, stroke="white", strokeWidth=4, opacity=0.85, **place)
    return [halo, chart.mark_text(fontSize=11, color=INK, **place)]


def named_color(names: Mapping[str, str], shown: alt.Legend) -> alt.Color:
    """The colour channel for layers whose rows have a ``name``: names with their colours, and the
    legend ``shown``."""
    return alt.Color("name:N", scale=named_scale(names), legend=shown)


def named_scale(colors: Mapping[str, str]) -> alt.Scale:
    """A scale that gives each name its colour."""
    return alt.Scale(domain=list(colors), range=list(colors.values()))


def group_scale(sizes: Iterable[int]) -> alt.Scale:
    """Colours of group sizes, darker for more ranks. When ``sizes`` are all sizes of a run, a size
    has the same colour in all its figures."""
    known = sorted(set(sizes))
    last = len(_VIRIDIS) - 1
    # Spread evenly over the colours; more sizes than colours share some.
    picked = [round(i * last / max(1, len(known) - 1)) for i in range(len(known))]
    return alt.Scale(domain=known, range=[_VIRIDIS[i] for i in picked])


def half(chart: alt.Chart | alt.LayerChart, height: float = 290) -> Drawing:
    """The figure, styled, for half a row of the page; ``height`` in pixels."""
    return styled(chart.properties(width=HALF, height=height, autosize=_FIT))


def styled(chart: Drawing) -> Drawing:
    """The figure with the report's fonts, grid and colours."""
    return (
        chart.configure(font=_FONT, background="white", padding=4)
        .configure_view(stroke=None)
        .configure_axis(
            labelFontSize=12,
            titleFontSize=12,
            titleFontWeight="normal",
            labelColor=INK,
            titleColor=MUTED,
            gridColor=GRID,
            domainColor="#cbd2d9",
            tickColor="#cbd2d9",
            labelFlush=False,
            titlePadding=8,
            tickCount=6,
        )
        .configure_legend(
            labelFontSize=12,
            titleFontSize=12,
            titleFontWeight="normal",
            labelColor=INK,
            titleColor=MUTED,
            symbolSize=110,
            columnPadding=16,
            titleLimit=400,
            symbolOpacity=1,
        )
        .configure_title(
            fontSize=13, fontWeight=600, color=INK, anchor="start", frame="group", offset=6
        )
    )
