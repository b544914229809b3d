"""The report of a run: one HTML file that needs no network, and its figures as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from headrace.errors import DataError
from headrace.report.facts import (
    config_rows,
    fact_groups,
    plan_rows,
    started_text,
    trust_rows,
    trust_text,
)
from headrace.report.headline import cards
from headrace.report.html_page import (
    VEGA_LITE,
    DrawnFigure,
    extra_module,
    html_page,
    sections_of,
    write_page,
)
from headrace.report.run_reader import read_run
from headrace.report.run_summary import RunSummary, summed_up
from headrace.report.warnings import warnings

__all__ = ["write_report"]


def write_report(run: Path, out: Path | None = None, *, pictures: bool = True) -> Path:
    """Write the report of the run folder ``run`` and return the path of the page.

    ``out`` is the page's file, ``report.html`` in the run folder when left out; ``pictures``
    also writes every figure as a PNG into ``pictures/`` beside it.
    Raises DataError when the folder cannot be read or the page not be written, MissingExtra
    when the packages of the extra ``report`` are absent.
    """
    figures = extra_module("headrace.report.charts.figures", "the report")
    converter = extra_module("vl_convert", "the report")
    summary = summed_up(read_run(run))
    page = out if out is not None else run / "report.html"
    drawn = [
        DrawnFigure(
            name=figure.name,
            title=figure.title,
            section=figure.section,
            caption=figure.caption(summary),
            spec=figure.draw(summary.run).to_dict(),
            wide=figure.wide,
        )
        for figure in figures.FIGURES
        if figure.known(summary.run)
    ]
    write_page(page, _page(summary, drawn, converter, figures.TRUST_HEADING), "report")
    if pictures:
        _write_pictures(page.parent / "pictures", drawn, converter)
    return page


def _write_pictures(folder: Path, drawn: Sequence[DrawnFigure], converter: ModuleType) -> None:
    """Write every figure into a folder; raises DataError where it cannot be written."""
    try:
        folder.mkdir(exist_ok=True)
        for figure in drawn:
            picture = converter.vegalite_to_png(figure.spec, vl_version=VEGA_LITE, scale=2)
            (folder / f"{figure.name}.png").write_bytes(picture)
    except OSError as error:
        raise DataError(f"report {folder}", got=str(error), wanted="a place that can be written")


def _page(
    summary: RunSummary, drawn: Sequence[DrawnFigure], converter: ModuleType, trust_heading: str
) -> str:
    """The HTML of a report with the figures ``drawn``, those of the section ``trust_heading``
    beside the table of what was learnt about the costs."""
    run = summary.run
    return html_page(
        "page.html.j2",
        converter=converter,
        title=f"{run.facts.name} - headrace report",
        version=run.facts.version,
        facts=run.facts,
        started=started_text(run),
        steps=len(run.steps),
        cards=cards(summary),
        warnings=warnings(run),
        sections=sections_of(drawn),
        groups=fact_groups(run),
        config=[("profile", run.facts.costs.fingerprint), *config_rows(run.facts.config)],
        trust=trust_rows(run),
        trust_text=trust_text(run),
        trust_heading=trust_heading,
        longest=run.longest_step,
        plan=run.plan,
        micro_batches=plan_rows(run.longest_step),
    )
