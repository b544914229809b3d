"""The pictures of docs/benchmarks.md, from rows that docs/make_benchmarks.py has read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import vl_convert

from headrace.report.charts.theme import INK, MEASURED, PREDICTED, data, styled

__all__ = ["one_planner"]

_VEGA_LITE = "6.4"


def one_planner(marks: Sequence[dict[str, Any]], order: Sequence[str]) -> str:
    """An SVG of each restricted planner's steps over the whole one's, a panel for each model.

    Args:
        marks: Rows with ``what``, ``model``, ``least``, ``mean`` and ``most``.
        order: The planners from top to bottom.

    Returns:
        The text of the file.
    """
    y = alt.Y("what:N", sort=list(order), title=None, axis=alt.Axis(labelLimit=0))
    scale = alt.Scale(type="log", zero=False, nice=False)
    base = alt.Chart().encode(y=y)
    spread = base.mark_rule(color=PREDICTED, strokeWidth=3).encode(
        x=alt.X("least:Q", title="step / ours", scale=scale), x2="most:Q"
    )
    mean = base.mark_point(color=MEASURED, filled=True, size=60, opacity=1).encode(
        x=alt.X("mean:Q", title="step / ours", scale=scale)
    )
    ours = alt.Chart().mark_rule(color=INK, strokeDash=[4, 4]).encode(x=alt.datum(1.0))
    models = list(dict.fromkeys(mark["model"] for mark in marks))
    panels = alt.layer(spread, mean, ours, data=data(list(marks))).properties(width=150)
    chart = panels.facet(column=alt.Column("model:N", sort=models, title=None))
    svg: str = vl_convert.vegalite_to_svg(styled(chart).to_dict(), vl_version=_VEGA_LITE)
    return svg
