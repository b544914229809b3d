"""Pages of one HTML file that needs no network: what the report and the comparison have in
common."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from headrace.errors import DataError, MissingExtra

__all__ = ["VEGA_LITE", "DrawnFigure", "extra_module", "html_page", "sections_of", "write_page"]

VEGA_LITE = "6.4"
"""The version of Vega-Lite in which figures are drawn."""

_SVG_BYTES = 150_000
"""Specifications above this are drawn on a canvas: a browser is slow with many marks of SVG."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnFigure:
    """A figure of a page: its id, title and sentence, the section that it stands in, and its
    Vega-Lite specification. ``wide`` ones stand alone in their row."""

    name: str
    title: str
    section: str
    caption: str
    spec: dict[str, Any]
    wide: bool = False


def extra_module(name: str, needed_for: str) -> ModuleType:
    """A module of an optional package; raises MissingExtra, saying what it was ``needed_for``,
    where it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = {"vl_convert": "vl-convert-python"}.get(str(error.name), str(error.name))
        raise MissingExtra(package, extra="report", needed_for=needed_for)


def html_page(template: str, *, converter: ModuleType, **values: Any) -> str:
    """The HTML of a template of this package, filled with ``values`` and with the JavaScript that
    draws its figures, which comes from ``converter``, the module vl_convert."""
    environment = Environment(
        loader=PackageLoader("headrace.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["tight"] = _tight
    bundle = converter.javascript_bundle(vl_version=VEGA_LITE)
    return environment.get_template(template).render(bundle=bundle, **values)


def write_page(page: Path, html: str, what: str) -> None:
    """Write a page, and the folders above it. Raises DataError where that is impossible."""
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(html, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{what} {page}", got=str(error), wanted="a place that can be written")


def _tight(text: str) -> str:
    """The text with a no-break space between each number and its unit, so that they stay on one
    line."""
    return re.sub(r"(?<=\d) (?=(?:%|ms|us|s|B|[KMGT]iB)\b|%)", "\u00a0", text)


def sections_of(figures: Iterable[DrawnFigure]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Pairs (section, its figures) in order; a figure is a dict of the values that the template
    uses."""
    sections: dict[str, list[dict[str, Any]]] = {}
    for figure in figures:
        text = _script_text({key: value for key, value in figure.spec.items() if key != "$schema"})
        sections.setdefault(figure.section, []).append(
            {
                "name": figure.name,
                "title": figure.title,
                "wide": figure.wide,
                "spec": text,
                "caption": figure.caption,
                "renderer": "svg" if len(text) < _SVG_BYTES else "canvas",
            }
        )
    return list(sections.items())


def _script_text(value: Any) -> str:
    """JSON text that is safe inside a script element: ``<``, ``>`` and ``&`` are escaped, so that
    no text of it ends the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
