"""Pictures of what benchmarks/hetero.py found: steps by scenario, the ablation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt

from headrace.report.charts.theme import (
    HALF,
    INK,
    MEASURED,
    PREDICTED,
    STATIC,
    data,
    styled,
)

__all__ = ["draw"]


def draw(found: dict[str, Any], folder: Path) -> list[Path]:
    """Write an SVG file for each picture that the sections that ran allow."""
    folder.mkdir(parents=True, exist_ok=True)
    made = list[Path]()
    for name, chart in (("scenarios", scenarios), ("ablation", ablation)):
        if name in found:
            path = folder / f"hetero-{name}.svg"
            styled(chart(found[name]["rows"])).save(str(path))
            made.append(path)
    return made


def scenarios(rows: Sequence[dict[str, Any]]) -> alt.LayerChart:
    """Mean steps over ours, scenario by scenario; the rule is ours. What is like DeepSpeed is no
    quicker than what is like Megatron, and left out."""
    names = ("megatron-like", "hotspa-like", "static", "hydraulis-tuned")
    marks = [
        {
            "scenario": row["scenario"],
            "planner": name,
            "over ours": row["mean_s"][name] / row["mean_s"]["headrace"],
        }
        for row in rows
        for name in names
    ]
    scale = alt.Scale(domain=list(names), range=[STATIC, PREDICTED, INK, MEASURED])
    base = alt.Chart(data(marks)).encode(
        x=alt.X("over ours:Q", title="mean step / ours", scale=alt.Scale(zero=False)),
        y=alt.Y(
            "scenario:N",
            sort=[row["scenario"] for row in rows],
            title=None,
            axis=alt.Axis(labelLimit=0),
        ),
        color=alt.Color("planner:N", scale=scale, title=None),
    )
    rule = alt.Chart(data([{"x": 1.0}])).mark_rule(color=INK, strokeDash=[4, 4]).encode(x="x:Q")
    return alt.layer(base.mark_point(filled=True, size=60), rule).properties(width=HALF)


def ablation(rows: Sequence[dict[str, Any]]) -> alt.Chart:
    """Throughput over the base's, step by step."""
    marks = [
        {"workload": row["workload"], "step": name, "throughput": ratio}
        for row in rows
        for name, ratio in row["throughput"].items()
    ]
    steps = list(dict.fromkeys(mark["step"] for mark in marks))
    ours = alt.condition("datum.step == 'd'", alt.value(MEASURED), alt.value(STATIC))
    base = alt.Chart(data(marks)).encode(
        x=alt.X("throughput:Q", title="throughput / base"),
        y=alt.Y("step:N", sort=steps, title=None),
        row=alt.Row("workload:N", title=None, header=alt.Header(labelAngle=0, labelAlign="left")),
    )
    return base.mark_bar().encode(color=ours).properties(width=HALF)
