"""The page of planners compared: whole, alone, safe, with everyone's numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("altair")

import headrace as hr
from headrace.costs import synthetic_costs
from headrace.errors import DataError
from headrace.report.comparison_page import write_comparison
from headrace.spec.comparison import Comparison
from headrace.units import seconds_text
from report.html_pages import CHROMIUM, Tags, chromium

FIGURES = ["seconds", "means", "rates", "gap", "lengths", "placement"]


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    """Two batches, of which the second fits no single group."""
    costs = synthetic_costs(4, 12, memory_bytes=int(2.3 * 2**30))
    problem = hr.Problem(costs=costs, holding=("replicated",))
    return hr.compare([[1000, 1000, 500, 20], [10_000, 10, 10]], problem)


def written(comparison: Comparison, page: Path, name: str = "my-run") -> str:
    write_comparison(
        comparison, page, name=name, assumed="4 x synthetic", costs="by formula", version="0.0"
    )
    return page.read_text()


@pytest.fixture(scope="module")
def html(comparison: Comparison, tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(comparison, tmp_path_factory.mktemp("page") / "page.html")


def cells(html: str, section: str) -> list[list[str]]:
    """The rows of the table of a section."""
    part = html[html.index(f'id="{section}"') :].split("</table>")[0].replace("\u00a0", " ")
    rows = re.findall(r"<tr>(.*?)</tr>", part, re.DOTALL)
    return [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in rows]


def test_everyone_has_its_numbers(comparison: Comparison, html: str) -> None:
    """Catches a planner that is left out, numbers in the row of another, and a batch that a planner
    cannot hold but has seconds for."""
    head, *rows = cells(html, "planners")
    assert head[0] == "planner"
    assert [tuple(row) for row in rows] == comparison.rows()
    _, *batches = cells(html, "batches")
    for number, row in enumerate(batches):
        plan = comparison.plans[number]
        wanted = [
            "does not fit" if seconds is None else seconds_text(seconds)
            for seconds in (result.seconds[number] for result in comparison.results)
        ]
        assert row[5:-1] == wanted
        assert row[-1] == str(plan.strategy)
        assert row[3] == f"{plan.lengths.longest:,}"
    assert batches[1].count("does not fit") == 4
    assert "no group size holds all batches" in html
    text = " ".join(Tags(html).text)
    for part in ("4 x synthetic", "by formula", "2 batches, 7 sequences", "my-run"):
        assert part in text


def test_figures_show_the_same_numbers(comparison: Comparison, html: str) -> None:
    """Catches a figure of other seconds, a dot for a batch that does not fit, sequences that are
    drawn on other ranks than the plans', and figures that are lost."""
    blocks = re.findall(r'<figure id="figure-(\w+)".*?json">(.*?)</script>', html, re.DOTALL)
    assert [name for name, _ in blocks] == FIGURES
    data = {
        name: [row for rows in json.loads(spec)["datasets"].values() for row in rows]
        if "datasets" in json.loads(spec)
        else json.loads(spec)["layer"][0]["data"]["values"]
        for name, spec in blocks
    }
    shown = {(row["planner"], row["batch"]): row["took"] for row in data["seconds"]}
    known = {
        (comparison.label(result.name), number): seconds
        for result in comparison.results
        for number, seconds in enumerate(result.seconds)
        if seconds is not None
    }
    assert shown.keys() == known.keys()
    ratio = next(iter(shown.values())) / next(iter(known.values()))
    for key, took in shown.items():
        assert took == pytest.approx(known[key] * ratio)
    rates = {row["planner"]: row["value"] for row in data["rates"] if "planner" in row}
    for result in comparison.results:
        rate = comparison.tokens_per_s(result.name)
        assert rates.get(comparison.label(result.name)) == (rate and pytest.approx(rate))
    placed = sum(row["sequences"] for row in data["placement"])
    assert placed >= 7
    assert placed % 7 == 0, "each sequence once in each copy of the figure's rows"


def test_the_page_needs_no_network(html: str) -> None:
    """Catches a script, style, font or picture from elsewhere."""
    for tag, attributes in Tags(html).tags:
        for key in ("src", "href", "srcset", "action", "data"):
            assert key not in attributes, (tag, attributes)
    assert "default-src 'none'" in html
    own = re.sub(r'<script type="module">.*?</script>', "", html, flags=re.DOTALL)
    assert "://" not in own, "no address outside the libraries"
    assert len(html) < 1.3e6


@pytest.mark.parametrize("evil", ["</script><script>alert(1)</script>", "<img src=x onerror=a()>"])
def test_names_are_only_text(comparison: Comparison, tmp_path: Path, evil: str) -> None:
    """Catches a configuration's name that becomes part of the page."""
    parsed = Tags(written(comparison, tmp_path / "page.html", evil))
    assert not [tag for tag, attributes in parsed.tags if tag == "img" or "onerror" in attributes]
    assert sum(tag == "script" for tag, _ in parsed.tags) == len(FIGURES) + 2
    assert parsed.text.count(evil) >= 1


def test_one_batch_of_one_device(tmp_path: Path) -> None:
    """Catches axes or cells that divide by nothing."""
    found = hr.compare([[64]], synthetic_costs(1))
    assert "1 batch, 1 sequence" in written(found, tmp_path / "page.html")


def test_a_place_that_cannot_be_written(comparison: Comparison, tmp_path: Path) -> None:
    """Catches a traceback at the very end."""
    with pytest.raises(DataError, match="a place that can be written"):
        written(comparison, tmp_path)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_draws_every_figure(comparison: Comparison, tmp_path: Path) -> None:
    """Catches a page that is whole but blank."""
    written(comparison, tmp_path / "page.html")
    dom = chromium(tmp_path / "page.html", tmp_path / "profile")
    for name in FIGURES:
        block = dom[dom.index(f'id="figure-{name}"') :].split("</figure>")[0]
        drawn = block.split("</script>")[0]
        assert re.search(r"<(svg|canvas)\b", drawn), name
        assert "cannot be drawn" not in drawn
