"""One step drawn as time: every rank, what it did and when it waited."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import altair as alt
import numpy as np

from headrace.report.charts import theme
from headrace.report.records import RecordedStep
from headrace.report.run_summary import share_text
from headrace.simulator import without_waits
from headrace.spec import Row, Timeline
from headrace.units import seconds_text

__all__ = ["BARS", "bars", "gantt"]

BARS = 10_000
"""Bars that a figure holds at most; beyond, rows are aggregated."""

_RANKS = 128  # that a figure shows at most
# Kinds of bars from the lowest layer to the top: a later one hides those below it.
_ORDER = {"idle": 0, "message": 1, "pull": 2, "push": 3, "update": 4, "forward": 5, "backward": 6}
_MESSAGES = ("send", "recv", "exchange")


def gantt(recorded: RecordedStep, static_name: str = "") -> theme.Drawing:
    """The measured step over the predicted one (over the prediction for the best static plan
    ``static_name``), all on one time axis; idle time is the grey ground."""
    panels = [("measured", recorded.measured), ("predicted", recorded.predicted)]
    if recorded.static is not None:
        panels.append((f"best static plan {static_name}".strip() + ", predicted", recorded.static))
    end = max((timeline.seconds for _, timeline in panels), default=0.0) or 1e-6  # axis needs > 0
    unit = theme.second_unit([end])
    limit = BARS // len(panels)
    domain = [0, end * unit.factor]
    seen = {_kind(row) for _, timeline in panels for row in timeline.rows} | {"idle"}
    drawn = [
        _panel(bars(timeline, limit, unit.factor), _title(name, timeline), seen).encode(
            x=_time(unit.name, domain, last=timeline is panels[-1][1])
        )
        for name, timeline in panels
    ]
    # The panels share one x axis, so the first one's zoom moves all.
    zoom = alt.selection_interval(
        bind="scales", encodings=["x"], zoom="wheel![event.shiftKey]", name="zoom"
    )
    drawn = [panel.add_params(zoom) if i == 0 else panel for i, panel in enumerate(drawn)]
    return theme.styled(alt.vconcat(*drawn, spacing=10).resolve_scale(x="shared", color="shared"))


def _time(unit: str, domain: list[float], *, last: bool) -> alt.X:
    """The time axis of a panel, with title and labels under the ``last`` one only."""
    title = f"{unit} since the step began" if last else None
    axis = alt.Axis(title=title, labels=last, ticks=last)
    return alt.X("from:Q", axis=axis, scale=alt.Scale(domain=domain, nice=False))


def _title(name: str, timeline: Timeline) -> str:
    """The heading of a panel: how long the step takes and how much of it is not computation."""
    took, idle = seconds_text(timeline.seconds), share_text(timeline.idle)
    return f"{name}: {took}, {idle} not computing"


def bars(timeline: Timeline, limit: int, factor: float) -> list[dict[str, Any]]:
    """The rows of a timeline's bars, at most ``limit``; times are seconds times ``factor``.

    Each rank has a grey bar over the whole step, on which its actions are drawn. Communication is
    drawn below computation, so that only communication that no computation hides is seen. A forward
    that waits for weights has a bar for each part between the waits.
    """
    ranks = _drawn_ranks(timeline.devices)
    kept = set(ranks)
    rows = without_waits(row for row in timeline.rows if row.rank in kept)
    if len(rows) + len(ranks) > limit:
        rows = _aggregate(rows, timeline.seconds, max(1, limit // len(ranks) - 1))
    rows = sorted(rows, key=lambda row: _ORDER.get(_kind(row), 0))
    ground = [_idle_bar(timeline, rank, factor) for rank in ranks]
    return ground + [_bar(row, factor) for row in rows]


def _kind(row: Row) -> str:
    """The kind of an action's bar: sends, receives and exchanges are one kind, ``message``."""
    return "message" if row.kind in _MESSAGES else row.kind


def _drawn_ranks(devices: int) -> list[int]:
    """All ranks, or ``_RANKS`` of them spread evenly."""
    return sorted(
        set(np.linspace(0, devices - 1, min(devices, _RANKS)).round().astype(int).tolist())
    )


def _idle_bar(timeline: Timeline, rank: int, factor: float) -> dict[str, Any]:
    """The grey bar of a rank over the whole step."""
    return {"rank": rank, "kind": "idle", "from": 0, "to": _short(timeline.seconds * factor)}


def _bar(row: Row, factor: float) -> dict[str, Any]:
    """One action as a bar; ``factor`` turns seconds into the unit of the axis."""
    bar = {
        "rank": row.rank,
        "kind": _kind(row),
        "action": row.action,
        "from": _short(row.start_s * factor),
        "to": _short(row.end_s * factor),
    }
    return bar | ({"tokens": row.tokens, "ranks": row.ranks} if row.tokens else {})


def _short(value: float) -> float:
    """The value with five digits, as more only make the page larger."""
    return float(f"{value:.5g}")


def _aggregate(rows: Sequence[Row], seconds: float, bins: int) -> list[Row]:
    """Fewer rows in place of ``rows``, at most ``bins`` for each rank: the step is cut into equal
    slots, each shows the kind of action that filled most of it, and equal neighbours are joined."""
    kinds = list(_ORDER)
    width = seconds / bins
    # By rank the seconds of each kind in each slot, [bins, kinds].
    filled: dict[int, np.ndarray[Any, np.dtype[np.float64]]] = {}
    for row in rows:
        table = filled.setdefault(row.rank, np.zeros((bins, len(kinds))))
        first, last = int(row.start_s / width), min(bins - 1, int(row.end_s / width))
        for slot in range(min(first, bins - 1), last + 1):
            overlap = min(row.end_s, (slot + 1) * width) - max(row.start_s, slot * width)
            table[slot, _ORDER.get(_kind(row), 0)] += max(0.0, overlap)
    joined: list[Row] = []
    for rank, table in filled.items():
        # Idle, kind 0, is the rest of each slot.
        table[:, 0] = np.maximum(0, width - table[:, 1:].sum(axis=1))
        joined += _join_slots(rank, table.argmax(axis=1), width)
    return joined


def _join_slots(rank: int, winners: Any, width: float) -> list[Row]:
    """The rows of a rank, one for each run of neighbouring slots of the same kind. ``winners``
    [bins] has the index of the kind of each slot of ``width`` seconds. Idle slots, of index 0, have
    no row."""
    kinds = list(_ORDER)
    # Slots at which the kind changes.
    edges = [0, *(np.flatnonzero(np.diff(winners)) + 1).tolist(), len(winners)]
    return [
        Row(
            rank=rank,
            action=f"mostly {kinds[winners[low]]}",
            kind=kinds[winners[low]],
            start_s=low * width,
            end_s=high * width,
        )
        for low, high in pairwise(edges)
        if winners[low]
    ]


def _panel(rows: list[dict[str, Any]], title: str, seen: set[str]) -> alt.Chart:
    """The chart of one timeline's bars; ``seen`` are the kinds that its legend names."""
    ranks = len({row["rank"] for row in rows})
    band = max(3, min(24, 480 // max(1, ranks)))
    border = 0.6 if len(rows) < 1200 else 0.0
    axis = alt.Axis(domain=False, ticks=False, grid=False, labelOverlap=True)
    names = theme.legend(values=[kind for kind in theme.KINDS if kind in seen])
    height = alt.RelativeBandSize(band=0.86 if band > 6 else 1.0)
    chart = alt.Chart(theme.data(rows), title=title).mark_bar(
        height=height, clip=True, stroke="white", strokeWidth=border
    )
    return chart.encode(
        x2="to:Q",
        y=alt.Y("rank:O", title="rank", axis=axis),
        color=alt.Color("kind:N", scale=theme.named_scale(theme.KINDS), legend=names),
        tooltip=_TOOLTIP,
    ).properties(width=theme.FULL - 46, height=band * ranks)


_TOOLTIP = [
    alt.Tooltip("action:N"),
    alt.Tooltip("kind:N"),
    alt.Tooltip("rank:O"),
    alt.Tooltip("tokens:Q", format=","),
    alt.Tooltip("ranks:Q", title="ranks together"),
    alt.Tooltip("from:Q", format=".4~g"),
    alt.Tooltip("to:Q", format=".4~g"),
]
