"""Values shown in notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ["curve_html", "table_html"]

_NAME = 14
"""Columns of a row's name in the texts of plans and runs."""


def table_html(text: str) -> str:
    """A text of rows, a name in the first 14 columns and then its value, as an HTML table."""
    rows = [(line[:_NAME].strip(), line[_NAME:].strip()) for line in text.splitlines()]
    cells = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th>"
        f"<td style='text-align:left'>{escape(value)}</td></tr>"
        for name, value in rows
    )
    return f"<table>{cells}</table>"


def curve_html(values: Sequence[float], title: str, *, width: int = 480, height: int = 80) -> str:
    """A curve of values over their index as an inline SVG of ``width`` x ``height`` pixels, with
    its title and its first and last value below; empty for fewer than two values."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    scale = (height - 2) / (high - low or 1.0)  # a pixel is free at either edge for the line
    points = " ".join(
        f"{i * width / (len(values) - 1):.1f},{1 + (high - value) * scale:.1f}"
        for i, value in enumerate(values)
    )
    return (
        f"<svg width='{width}' height='{height}' role='img'><title>{escape(title)}</title>"
        f"<polyline points='{points}' fill='none' stroke='#3b6fb6' stroke-width='1.5'/></svg>"
        f"<div>{escape(title)}, {values[0]:.4g} to {values[-1]:.4g}</div>"
    )
