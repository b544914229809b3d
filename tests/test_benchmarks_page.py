"""What the documentation says of results is what the files of results hold."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FILES = sorted((RESULTS / "papers").glob("*.json"))
README = (ROOT / "README.md").read_text()
RATIO = re.compile(r"\d\.\d+ times")


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/make_benchmarks.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    spec = importlib.util.spec_from_file_location("pages", ROOT / "docs/make_benchmarks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def claims(file: Path) -> list[dict[str, Any]]:
    """The rows of a paper."""
    found: list[dict[str, Any]] = json.loads(file.read_text())["claims"]
    return found


def test_page_and_readme_say_what_the_results_say(generator, monkeypatch, capsys) -> None:
    """Catches a number that somebody wrote by hand, and results that nobody put in the pages."""
    monkeypatch.setattr(sys, "argv", ["make_benchmarks.py", "--check"])
    assert generator.main() == 0, capsys.readouterr().out


def test_a_changed_result_changes_readme(generator, monkeypatch, tmp_path: Path) -> None:
    """Catches numbers of the page that are not read from the files."""
    for file in (*RESULTS.glob("*.json"), *FILES):
        own = tmp_path / file.relative_to(RESULTS)
        own.parent.mkdir(exist_ok=True)
        own.write_text(file.read_text())
    job = json.loads((tmp_path / "main_job.json").read_text())
    job["side_by_side"]["tokens"] *= 10
    (tmp_path / "main_job.json").write_text(json.dumps(job))
    before = generator.readme()
    monkeypatch.setattr(generator, "RESULTS", tmp_path)
    assert generator.readme() != before


def test_readme_quotes_no_ratio_beside_the_results() -> None:
    """Catches a ratio in README that no file of results holds."""
    text = re.sub(r"<!-- (\w+) -->.*?<!-- end of \1 -->", "", README, flags=re.DOTALL)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert RATIO.findall(text) == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_rows_that_are_behind_say_why(file: Path) -> None:
    """Catches a row that is behind without a reason, and quick results that are kept as whole."""
    found = json.loads(file.read_text())
    assert found["quick"] is False
    for row in found["claims"]:
        assert row["verdict"] != "behind" or row["why"], row
        assert (row["theirs"] is None) == (row["ratio"] is None)


def test_every_paper_has_its_rows(generator) -> None:
    """Catches a paper without results, and results without a script."""
    names = {file.stem for file in FILES}
    assert names == {*generator.PAPERS, "planner"}
    scripts = (ROOT / "benchmarks").glob("paper_*.py")
    assert names == {script.stem.removeprefix("paper_") for script in scripts}
