"""``headrace report``: the page of a run, or its summary."""

from __future__ import annotations

from pathlib import Path

from headrace.cli.display import tell
from headrace.report import summary_text, write_report

__all__ = ["report"]


def report(run: Path, *, out: Path | None, text: bool) -> int:
    """Write the report and print its path, or print the summary."""
    if text:
        print(summary_text(run))
        return 0
    tell(f"writing the report of {run}")
    print(write_report(run, out))
    return 0
