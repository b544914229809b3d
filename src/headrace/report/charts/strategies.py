"""Which strategies the steps ran, and how long they took (Hydraulis, Figure 15a)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import altair as alt

from headrace.report.charts.theme import (
    FIT,
    HALF,
    OPTIONS,
    OTHERS,
    Drawing,
    data,
    legend,
    second_unit,
    styled,
)
from headrace.report.records import Run
from headrace.report.series import every

__all__ = ["strategies_over_steps"]


def strategies_over_steps(run: Run) -> Drawing:
    """Seconds of every step, coloured by its strategy; those that ran least are one colour."""
    counted = Counter(step.planned.strategy for step in run.steps)
    named = [name for name, _ in counted.most_common(len(OPTIONS))]
    several = len(counted) > len(named)
    unit = second_unit(step.step_s for step in run.steps)
    rows: list[dict[str, Any]] = [
        {
            "step": step.step, "took": step.step_s * unit.factor,
            "strategy": step.planned.strategy,
            "shown": step.planned.strategy if step.planned.strategy in named else "others",
        }
        for step in every(run.steps)
    ]  # fmt: skip
    shown = [*named, *(["others"] if several else [])]
    colors = [*OPTIONS[: len(named)], *([OTHERS] if several else [])]
    axis = alt.Axis(format=",d", tickMinStep=1, grid=False)
    chart = alt.Chart(data(rows)).mark_circle(size=40 if len(rows) <= 300 else 8).encode(
        x=alt.X("step:Q", title="step", axis=axis, scale=alt.Scale(nice=False)),
        y=alt.Y("took:Q", title=f"{unit.name} of the step", scale=alt.Scale(zero=True)),
        color=alt.Color("shown:N", scale=alt.Scale(domain=shown, range=colors),
                        legend=legend(columns=2, labelLimit=260)),
        tooltip=["step:Q", "strategy:N", alt.Tooltip("took:Q", title=unit.name, format=".3~g")],
    )  # fmt: skip
    return styled(chart.properties(width=HALF, height=290, autosize=FIT))
