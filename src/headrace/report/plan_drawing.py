"""The picture of a plan in a file, where the packages for pictures are installed."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import MissingExtra
from headrace.report.plan_bars import bars_of_plan
from headrace.spec.measurement import Timeline
from headrace.spec.plan import Plan

__all__ = ["draw_plan_file"]


def draw_plan_file(plan: Plan, timeline: Timeline, path: Path) -> None:
    """Draw what the ranks of a plan do on the clock into a file, by its ending.

    Raises MissingExtra without the packages of the extra ``report``, ConfigError for another
    ending or a file that cannot be written.
    """
    try:
        from headrace.report.plan_picture import write_plan_picture
    except ImportError as error:
        raise MissingExtra(error.name or "altair", extra="report", needed_for="a picture of a plan")
    write_plan_picture(bars_of_plan(plan, timeline), str(plan.strategy), path)
