"""``benchmarks/families.py``: what it says of types of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import families

from benchmarks.scripts import run

RESULTS = Path(families.__file__).parent / "results" / "families.json"


def test_what_is_refused_is_told_from_what_is_exact(tmp_path: Path) -> None:
    """Catches codes of the command that are taken for others, and an error that is lost."""
    ran = run("families.py", "mamba", "gpt2", json_in=tmp_path)
    assert ran.code == 0, ran.err
    assert ran.numbers is not None
    mamba, gpt2 = ran.numbers["types"]
    assert (mamba["type"], mamba["verdict"], mamba["worst"]) == ("mamba", "refused", None)
    assert "linear_attention" in mamba["why"]
    assert (gpt2["type"], gpt2["verdict"]) == ("gpt2", "exact")
    assert gpt2["worst"] < 1e-5
    assert "mamba" in ran.out


def test_a_command_that_is_killed_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a type that takes more memory than there is and stands for exact or refused."""
    monkeypatch.setattr(families, "headrace", lambda _: families.os.kill(families.os.getpid(), 9))
    assert families.verdict("gpt2", 2, 20)["verdict"] == "no answer"


def test_the_results_are_of_all_types() -> None:
    """Catches results of some types that are kept as whole, and types that get worse."""
    found = json.loads(RESULTS.read_text())["types"]
    assert len(found) > 200
    for row in found:
        assert (row["verdict"] == "exact") <= ((row["worst"] or 0) <= 1e-5)
        assert (row["verdict"] == "refused") <= bool(row["why"])
    assert sum(row["verdict"] == "exact" for row in found) >= 110
