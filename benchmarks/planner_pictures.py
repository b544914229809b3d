"""Pictures of what benchmarks/planner.py found: steps by planner, effort by size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt

from headrace.report.charts.theme import HALF, INK, MEASURED, STATIC, data, styled

__all__ = ["draw"]


def draw(found: dict[str, Any], folder: Path) -> list[Path]:
    """Write an SVG file for each picture that the parts that ran allow."""
    folder.mkdir(parents=True, exist_ok=True)
    made = list[Path]()
    for name, chart in (("planners", planners), ("growth", growth)):
        rows = found.get("whole planners" if name == "planners" else name)
        if rows:
            path = folder / f"{name}.svg"
            styled(chart(rows)).save(str(path))
            made.append(path)
    return made


def planners(rows: Sequence[dict[str, Any]]) -> alt.Chart:
    """How much longer steps take than the bound of every plan, by planner, case by case."""
    marks = [
        {
            "case": f"{row['costs']}, {row['devices']} devices, {row['lengths']}",
            "planner": row["planner"],
            "of the bound": row["mean_s"] / (sum(row["bounds_s"]) / len(row["bounds_s"])),
        }
        for row in rows
    ]
    names = list(dict.fromkeys(mark["planner"] for mark in marks))
    ours = alt.condition("datum.planner == 'headrace'", alt.value(MEASURED), alt.value(STATIC))
    base = alt.Chart(data(marks)).encode(
        x=alt.X("of the bound:Q", title="mean step / bound of every plan"),
        y=alt.Y("planner:N", sort=names, title=None),
        row=alt.Row("case:N", title=None, header=alt.Header(labelAngle=0, labelAlign="left")),
    )
    return base.mark_bar().encode(color=ours).properties(width=HALF)


def growth(rows: Sequence[dict[str, Any]]) -> alt.LayerChart:
    """Seconds of one iteration's plan, by devices; both logarithmic."""
    marks = [{"devices": row["devices"], "seconds": row["planning_s"]} for row in rows]
    base = alt.Chart(data(marks)).encode(
        x=alt.X("devices:Q", scale=alt.Scale(type="log", base=2), title="devices"),
        y=alt.Y("seconds:Q", scale=alt.Scale(type="log"), title="seconds of planning"),
        color=alt.value(MEASURED),
    )
    rule = alt.Chart(data([{"seconds": 1.0}])).mark_rule(color=INK, strokeDash=[4, 4])
    return alt.layer(
        base.mark_line(), base.mark_point(filled=True), rule.encode(y="seconds:Q")
    ).properties(width=HALF)
