"""The report of a run: one HTML file that needs no network, and its figures as pictures."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from headrace.errors import DataError, MissingExtra
from headrace.report.facts import (
    config_rows,
    fact_groups,
    plan_rows,
    started_text,
    trust_rows,
    trust_text,
)
from headrace.report.headline import cards
from headrace.report.run_reader import read_run
from headrace.report.run_summary import RunSummary, summed_up
from headrace.report.warnings import warnings

__all__ = ["write_report"]

_VEGA_LITE = "6.4"
_SVG_BYTES = 150_000


def write_report(run: Path, out: Path | None = None, *, pictures: bool = True) -> Path:
    """Write the report of the run folder ``run`` and return the path of the page.

    ``out`` is the page's file, ``report.html`` in the run folder when left out; ``pictures``
    also writes every figure as a PNG into ``pictures/`` beside it.
    Raises DataError when the folder cannot be read or the page not be written, MissingExtra
    when the packages of the extra ``report`` are absent.
    """
    figures, converter = _extra("headrace.report.charts.figures"), _extra("vl_convert")
    of = summed_up(read_run(run))
    page = out if out is not None else run / "report.html"
    drawn = [
        (figure, _compact(figure.draw(of.run).to_dict()))
        for figure in figures.FIGURES
        if figure.known(of.run)
    ]
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(_page(of, drawn, converter, figures.TRUST_HEADING), encoding="utf-8")
        if pictures:
            _write_pictures(page.parent / "pictures", drawn, converter)
    except OSError as error:
        raise DataError(f"report {page}", got=str(error), wanted="a place that can be written")
    return page


def _extra(name: str) -> ModuleType:
    """A module of an optional package; raises MissingExtra where it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = {"vl_convert": "vl-convert-python"}.get(str(error.name), str(error.name))
        raise MissingExtra(package, extra="report", needed_for="the report")


def _compact(spec: dict[str, Any]) -> dict[str, Any]:
    """The specification without the address of its schema, which nobody reads."""
    return {key: value for key, value in spec.items() if key != "$schema"}


def _write_pictures(folder: Path, drawn: list[tuple[Any, dict[str, Any]]], vl: ModuleType) -> None:
    folder.mkdir(exist_ok=True)
    for figure, spec in drawn:
        picture = vl.vegalite_to_png(spec, vl_version=_VEGA_LITE, scale=2)
        (folder / f"{figure.name}.png").write_bytes(picture)


def _page(
    summary: RunSummary,
    drawn: list[tuple[Any, dict[str, Any]]],
    converter: ModuleType,
    trust_heading: str,
) -> str:
    """The HTML of a report, of figures ``drawn`` as pairs of a figure and its Vega-Lite
    specification."""
    environment = Environment(
        loader=PackageLoader("headrace.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["tight"] = _tight
    run = summary.run
    config = [("profile", run.facts.costs.fingerprint), *config_rows(run.facts.config)]
    return environment.get_template("page.html.j2").render(
        facts=run.facts,
        started=started_text(run),
        steps=len(run.steps),
        cards=cards(summary),
        warnings=warnings(run),
        sections=_sections(summary, drawn),
        groups=fact_groups(run),
        config=config,
        trust=trust_rows(run),
        trust_text=trust_text(run),
        trust_heading=trust_heading,
        longest=run.longest_step,
        plan=run.plan,
        micro_batches=plan_rows(run.longest_step),
        bundle=converter.javascript_bundle(vl_version=_VEGA_LITE),
    )


def _tight(text: str) -> str:
    """Numbers stay on one line with their units."""
    return re.sub(r"(?<=\d) (?=(?:%|ms|us|s|B|[KMGT]iB)\b|%)", "\u00a0", text)


def _sections(
    summary: RunSummary, drawn: list[tuple[Any, dict[str, Any]]]
) -> list[tuple[str, list[dict[str, Any]]]]:
    """Figures by section, in order, each as what the template needs of it."""
    sections: dict[str, list[dict[str, Any]]] = {}
    for figure, spec in drawn:
        text = _script_text(spec)
        sections.setdefault(figure.section, []).append(
            {
                "name": figure.name,
                "title": figure.title,
                "wide": figure.wide,
                "spec": text,
                "caption": figure.caption(summary),
                "renderer": "svg" if len(text) < _SVG_BYTES else "canvas",
            }
        )
    return list(sections.items())


def _script_text(value: Any) -> str:
    """JSON that may stand inside a script element, keys in their own order."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
