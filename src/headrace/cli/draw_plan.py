"""``headrace plan --picture FILE``: with a configuration and without."""

from __future__ import annotations

from pathlib import Path

from headrace.cli.display import tell
from headrace.errors import MissingExtra
from headrace.report.plan_bars import PlanBars

__all__ = ["draw_picture", "require_picture"]


def require_picture(path: Path) -> None:
    """Raise, before anything is planned, MissingExtra or ConfigError where no picture could be
    drawn."""
    try:
        from headrace.report.plan_picture import require_place
    except ImportError as error:
        raise MissingExtra(error.name or "altair", extra="report", needed_for="--picture")
    require_place(path)


def draw_picture(bars: PlanBars, name: str, path: Path) -> None:
    """Write the picture of a plan to ``path``. ``name`` is that of its batch or iteration, the one
    of all that were planned which takes longest."""
    from headrace.report.plan_picture import write_plan_picture

    write_plan_picture(bars, name, path)
    tell(f"picture of {name}, the longest, in {path}")
