"""``headrace papers``: which scripts it runs, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.test_hardware import call
from headrace.cli import paper_claims

SCRIPT = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true")
parser.add_argument("--json", type=pathlib.Path)
o = parser.parse_args()
o.json.write_text(json.dumps([__file__, o.quick]))
raise SystemExit({code})
"""


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like a clone, with two papers, of which the first fails where the file says so."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    for name, code in (("one", 3), ("two", 0)):
        (folder / f"paper_{name}.py").write_text(SCRIPT.replace("{code}", str(code)))
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "site-packages" / "headrace" / "__init__.py"
    monkeypatch.setattr(paper_claims.headrace, "__file__", str(package))
    return tmp_path


def test_one_paper_runs_its_script(clone: Path, capsys) -> None:
    """Catches another script, options that are lost, and exit codes that are."""
    code, _, _ = call(capsys, "papers", "two", "--quick", "--out", clone)
    assert code == 0
    assert json.loads((clone / "two.json").read_text())[1] is True
    assert call(capsys, "papers", "one", "--out", clone)[0] == 3
    assert json.loads((clone / "one.json").read_text())[1] is False


def test_the_first_that_fails_ends_all(clone: Path, capsys) -> None:
    """Catches a failed paper that nobody hears of."""
    assert call(capsys, "papers", "--out", clone)[0] == 3
    assert not (clone / "two.json").exists()


def test_unknown_papers_and_missing_scripts_are_refused(clone: Path, capsys) -> None:
    """Catches a traceback where a name is wrong or there is no clone."""
    code, _, err = call(capsys, "papers", "three")
    assert code == 2
    assert "one, two" in err
    file = clone / "benchmarks" / "paper_one.py"
    code, _, err = call(capsys, "papers", "two", "--out", file)
    assert code == 2
    assert "--out" in err
    for script in (clone / "benchmarks").iterdir():
        script.unlink()
    code, _, err = call(capsys, "papers")
    assert code == 2
    assert "clone" in err
