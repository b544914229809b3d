"""The picture of a plan: devices over time, micro-batches by their longest sequence, and which
lengths went where. Importing this module needs the packages of the extra ``report``."""

from __future__ import annotations

import json
from pathlib import Path

import altair as alt
import vl_convert as vl

from headrace.errors import ConfigError
from headrace.report.charts.theme import FULL, KINDS, Drawing, data, log_axis, second_unit, styled
from headrace.report.plan_bars import PlanBars
from headrace.spec import given
from headrace.units import percent_text, seconds_text

__all__ = ["FORMATS", "draw_plan", "require_place", "write_plan_picture"]

FORMATS = (".svg", ".png", ".json")
"""By the ending of the file: pictures, and the Vega-Lite specification."""

_LANES = 260  # pixels of the height of all devices


def draw_plan(plan: PlanBars, title: str) -> Drawing:
    """Devices over time above the lengths that each scheme or group size got."""
    unit = second_unit([plan.seconds])
    rows = [
        {
            "from": bar.start_s * unit.factor,
            "to": bar.end_s * unit.factor,
            "low": bar.first,
            "high": bar.last + 1,
            "where": bar.where,
            "longest": bar.longest or None,
            "tokens": bar.tokens,
            "sequences": bar.sequences,
        }
        for bar in plan.bars
    ]
    longest = max(length for lengths in plan.placed.values() for length in lengths)
    shortest = min(length for lengths in plan.placed.values() for length in lengths)
    color = alt.Color(
        "longest:Q",
        title="longest sequence",
        scale=alt.Scale(
            type="log",
            scheme="viridis",
            reverse=True,
            domain=[shortest, max(longest, shortest + 1)],
        ),
    )
    shown = alt.condition("datum.longest === null", alt.value(KINDS["idle"]), color)
    x = alt.X(
        "from:Q",
        title=unit.name,
        axis=alt.Axis(grid=False),
        scale=alt.Scale(domain=[0, plan.seconds * unit.factor], nice=False),
    )
    y = alt.Y(
        "low:Q",
        title="device",
        axis=alt.Axis(grid=False, tickMinStep=1),
        scale=alt.Scale(domain=[0, plan.devices], nice=False, reverse=True),
    )
    stroke = 0.5 if plan.devices <= 128 else 0
    bars = (
        alt.Chart(data(rows))
        .mark_rect(stroke="white", strokeWidth=stroke)
        .encode(
            x=x,
            x2="to:Q",
            y=y,
            y2="high:Q",
            color=shown,
            tooltip=["where:N", "longest:Q", "tokens:Q", "sequences:Q"],
        )
    )
    head = (
        f"{title}: {seconds_text(plan.seconds)}, bound {seconds_text(plan.lower_bound_s)}, gap "
        f"{percent_text(plan.gap)}"
    )
    gantt = bars.properties(width=FULL, height=_LANES, title=head)
    return styled(alt.vconcat(gantt, _map(plan, shortest, longest), spacing=14))


def _map(plan: PlanBars, shortest: int, longest: int) -> alt.Chart:
    """The chart with a stroke for each sequence at its length, in a row for each scheme or group
    size that sequences went to."""
    rows = [
        {"where": where, "length": length}
        for where, lengths in plan.placed.items()
        for length in lengths
    ]
    order = sorted(plan.placed, key=lambda where: -max(plan.placed[where]))  # longest on top
    high = max(longest, shortest + 1)
    x = alt.X(
        "length:Q",
        title="tokens of a sequence",
        axis=log_axis(shortest, high, "~s"),
        scale=alt.Scale(type="log", domain=[shortest, high], nice=False),
    )
    y = alt.Y("where:N", title=None, sort=order)
    chart = alt.Chart(data(rows)).mark_tick(thickness=1, opacity=0.5, color=KINDS["forward"])
    return chart.encode(x=x, y=y).properties(width=FULL, height=24 * len(order))


def require_place(path: Path) -> None:
    """Raise ConfigError for another ending than those of FORMATS, and for no place for a file."""
    if path.suffix not in FORMATS:
        raise ConfigError(
            f"picture {path}", got=f"ending {path.suffix!r}", wanted=", ".join(FORMATS)
        )
    given.require_place(f"picture {path}", path, error=ConfigError)


def write_plan_picture(plan: PlanBars, title: str, path: Path) -> None:
    """Write the picture in the format of the file's ending.

    Raises ConfigError as :func:`require_place`, or where the file cannot be written.
    """
    require_place(path)
    spec = draw_plan(plan, title).to_json()
    content: str | bytes = spec
    if path.suffix == ".svg":
        content = vl.vegalite_to_svg(json.loads(spec))
    elif path.suffix == ".png":
        content = vl.vegalite_to_png(json.loads(spec), scale=2)
    try:
        if isinstance(content, str):
            path.write_text(content)
        else:
            path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"picture {path}", got=error.strerror, wanted="a writable file")
