"""The page as a file: whole, alone, safe, and drawn by a browser."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import DataError, MissingExtra
from headrace.report import summary_text, write_report
from headrace.report.facts import started_text
from headrace.report.run_reader import read_run
from headrace.report.run_summary import summed_up
from report.fake_run import fake_run, layered_run
from report.html_pages import CHROMIUM, Tags, chromium

pytest.importorskip("altair")
from headrace.report.charts.figures import FIGURES


def test_every_figure_is_there_with_title_and_caption(page: Path, folder: Path) -> None:
    """Catches a figure under the heading of another."""
    html, run = page.read_text(), read_run(folder)
    blocks = re.findall(r'<figure id="figure-(\w+)".*?</figure>', html, re.DOTALL)
    assert blocks == [figure.name for figure in FIGURES]
    for figure in FIGURES:
        block = html[html.index(f'id="figure-{figure.name}"') :].split("</figure>")[0]
        assert f"<h3>{figure.title}</h3>" in block
        spec = json.loads(re.findall(r'application/json">(.*?)</script>', block, re.DOTALL)[0])
        wanted = json.loads(json.dumps(figure.draw(run).to_dict()))
        assert spec["datasets"] == wanted["datasets"]
    shown = " ".join(" ".join(Tags(html).text).replace("\u00a0", " ").split())
    for figure in FIGURES:
        assert figure.caption(summed_up(run)) in shown


def test_the_page_needs_no_network(page: Path) -> None:
    """Catches a script, style, font or picture from elsewhere."""
    for tag, attributes in Tags(page.read_text()).tags:
        for key in ("src", "href", "srcset", "action", "data"):
            assert key not in attributes, (tag, attributes)
    assert "default-src 'none'" in page.read_text()
    assert "@import" not in page.read_text().split("</style>")[0]


def test_sizes(page: Path) -> None:
    """Catches the libraries being inlined once per figure."""
    assert page.stat().st_size < 1.3e6
    assert page.read_text().count("vegaEmbed=") == 1


def test_facts_and_cards_are_there(page: Path) -> None:
    """Catches a page that does not say where its numbers come from."""
    text = " ".join(Tags(page.read_text()).text)
    parts = (
        "Example 7000",
        "2.13.0+cpu",
        "tokens/s",
        "peak memory",
        "stories",
        "3f9a1c77",
        "data.context",
        "4,000",
        "not fit fewer ranks",
        "best static choice",
    )
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    "evil", ["</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "{{ 7*7 }} &lt;"]
)
def test_texts_of_the_run_are_only_text(tmp_path: Path, evil: str) -> None:
    """Catches names of files that become part of the page."""
    there = fake_run(tmp_path / "run", steps=2, ranks=1, name=evil, corpus=evil)
    facts = json.loads((there / "run.json").read_text())
    facts["config"]["data"]["path"] = evil
    facts["costs"]["points"][0]["option"] = evil
    facts["machine"]["host_cpu"] = evil
    (there / "run.json").write_text(json.dumps(facts))
    rows = [json.loads(line) for line in (there / "metrics.jsonl").read_text().splitlines()]
    rows[1]["strategy"] = rows[1]["micro_batches"][0]["order"] = evil
    rows[1]["micro_batches"][0]["layers"] = "8*" + "".join(evil.split())
    for row in rows:
        row["longest"] = row["step"]  # the plan of the last step is shown
    (there / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    html = write_report(there, pictures=False).read_text()
    parsed = Tags(html)
    assert not [tag for tag, attributes in parsed.tags if tag == "img" or "onerror" in attributes]
    assert sum(tag == "script" for tag, _ in parsed.tags) == len(FIGURES) + 2
    assert parsed.text.count(evil) >= 4
    assert "8*" + "".join(evil.split()) in parsed.text


def test_pictures_stand_beside_the_page(page: Path, folder: Path, tmp_path: Path) -> None:
    """Catches pictures left out, empty, or written when not asked for."""
    pictures = page.parent / "pictures"
    assert sorted(p.stem for p in pictures.iterdir()) == sorted(f.name for f in FIGURES)
    for picture in pictures.iterdir():
        assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert picture.stat().st_size > 20_000
    out = write_report(folder, tmp_path / "deep" / "page.html", pictures=False)
    assert out == tmp_path / "deep" / "page.html"
    assert [p.name for p in out.parent.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("started", "shown"),
    [
        ("2026-11-21T07:10:00", "21 Nov 2026, 07:10"),
        ("2026-11-21T07:10:00+00:00", "21 Nov 2026, 07:10 UTC"),
        ("yesterday", "yesterday"),
    ],
)
def test_times_are_for_people(folder: Path, started: str, shown: str) -> None:
    """Catches times of another zone passed off as local, and a crash on a text."""
    run = read_run(folder)
    assert started_text(replace(run, facts=replace(run.facts, started=started))) == shown


def test_the_page_lies_in_the_run_folder_when_no_place_is_named(tmp_path: Path) -> None:
    there = fake_run(tmp_path / "run", steps=1, ranks=1)
    assert write_report(there, pictures=False) == there / "report.html"


def test_a_place_that_cannot_be_written_is_an_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="report"):
        write_report(folder, tmp_path / "file" / "report.html", pictures=False)


@pytest.mark.parametrize(
    ("module", "package"), [("vl_convert", "vl-convert-python"), ("altair", "altair")]
)
def test_missing_packages_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, package: str
) -> None:
    """Catches a bare ModuleNotFoundError."""
    for name in [name for name in sys.modules if name.startswith("headrace.report.charts")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"{package}; pip install 'headrace\[report\]'"):
        write_report(folder)


def test_reading_and_summing_up_need_no_extra() -> None:
    """Catches an import that makes every command slow, or drags torch into the planning side."""
    code = (
        "import sys, headrace.report;"
        "print(sorted({'altair', 'vl_convert', 'torch', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_summary_tells_the_run_in_lines(folder: Path, tmp_path: Path) -> None:
    """Catches a summary that hides a warning, or fails on the smallest run."""
    text = summary_text(folder)
    assert "40 steps on 4 ranks (cpu)" in text
    assert "3 documents were skipped" in text
    assert all(len(line) < 200 for line in text.splitlines())
    small = summary_text(fake_run(tmp_path / "run", steps=1, ranks=1, nan_at=(0,)))
    assert "1 step on 1 rank" in small
    assert "never a number" in small


@pytest.mark.parametrize(
    ("steps", "line"),
    [
        ([[(None, 4)]], "not recorded"),
        ([[("4*a+full", 4)]], "a+full 100 % of token-layers; no switches"),
        (
            [[("3*a 1*b", 4)], [("4*a/b", 12)]],
            "a/b 75 %, a 19 %, b 6.2 % of token-layers; 1 switch between layers, 1 between steps",
        ),
        (
            [[("4*a", 1)], [("4*b", 1)]],
            "a 50 %, b 50 % of token-layers; 0 switches between layers, 1 between steps",
        ),
        (
            [[("4*a 3*b 2*c 1*d", 1)]],
            "a 40 %, b 30 %, c 20 %, 1 other 10 % of token-layers; 3 switches between layers, 0 "
            "between steps",
        ),
        (
            [[("5*a 4*b 3*c 2*d 2*e+full", 1)]],
            "a 31 %, b 25 %, c 19 %, 2 others 25 % of token-layers; 4 switches between layers, 0 "
            "between steps",
        ),
    ],
)
def test_summary_names_the_methods(tmp_path: Path, steps: Any, line: str) -> None:
    """Catches shares of micro-batches instead of tokens, and switches mixed up."""
    text = summary_text(layered_run(tmp_path / "run", *steps))
    assert [row for row in text.splitlines() if row.startswith("methods")] == [
        f"methods       {line}"
    ]


def test_the_plan_is_shown_with_orders_and_layers(page: Path, folder: Path) -> None:
    """Catches columns under the heading of another, and numbers set as text."""
    html, longest = page.read_text(), read_run(folder).longest_step
    table = html[html.index('<table class="batches">') :].split("</table>")[0]
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in table.split("<tr>")[1:]]
    assert rows[0] == ["ranks", "sequences", "longest", "tokens", "order", "layers"]
    wanted = [
        [str(m.ranks), str(m.sequences), f"{m.longest:,}", f"{m.tokens:,}", m.order, m.layers]
        for m in longest.micro_batches
    ]
    assert sorted(rows[1:]) == sorted(wanted)
    assert table.count('<td class="number">') == 4 * len(wanted)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("how", [{}, {"steps": 1, "ranks": 1}, {"steps": 8, "ranks": 64}])
def test_a_browser_draws_every_figure(tmp_path: Path, how: dict[str, int]) -> None:
    """Catches a page that is whole but blank, one that lacks a figure of which the run has all that
    it shows, and one with a figure of which it has nothing."""
    there = fake_run(tmp_path / "run", **how)  # type: ignore[arg-type]
    dom, run = chromium(write_report(there, pictures=False), tmp_path / "profile"), read_run(there)
    for figure in FIGURES:
        if not figure.known(run):
            assert f'id="figure-{figure.name}"' not in dom
            continue
        block = dom[dom.index(f'id="figure-{figure.name}"') :].split("</figure>")[0]
        drawn = block.split("</script>")[0]
        assert re.search(r"<(svg|canvas)\b", drawn), figure.name
        assert "cannot be drawn" not in drawn


@pytest.mark.long
def test_thirty_thousand_steps_make_a_small_page(tmp_path: Path) -> None:
    """Catches what grows with the length of a run."""
    there = fake_run(tmp_path / "run", steps=20)
    for name in ("metrics.jsonl", "plans.jsonl"):
        rows = [json.loads(line) for line in (there / name).read_text().splitlines()]
        with (there / name).open("w") as file:
            for step in range(30_000):
                file.write(json.dumps({**rows[step % 20], "step": step}) + "\n")
    assert write_report(there, pictures=False).stat().st_size < 3e6
