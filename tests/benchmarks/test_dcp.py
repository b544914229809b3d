"""The benchmark of Data-Centric Parallel, small."""

from __future__ import annotations

import json
from pathlib import Path

import dcp
import pytest


def test_nothing_is_quicker_than_the_planner(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Catches tables whose rows are not of the same batches, and a planner that others beat."""
    out = tmp_path / "rows.json"
    arguments = ["--devices", "8", "--data", "balanced", "corpus", "--steps", "1"]
    assert dcp.main([*arguments, "--tokens", "32768", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    for name in ("balanced", "corpus"):
        own = {r["planner"]: r["tokens_per_s"] for r in rows if r["data"] == name}
        assert set(own) == set(dcp.PLANNERS)
        assert own["headrace"] == max(own.values())
    assert "over bucket" in capsys.readouterr().out


def test_data_sets_are_what_their_names_say() -> None:
    """Catches a mixture drawn the wrong way round."""
    longest = {
        name: sum(n * n for n in dcp.lengths_of(name, 1 << 22, 0).tokens if n > 1 << 15)
        / sum(n * n for n in dcp.lengths_of(name, 1 << 22, 0).tokens)
        for name in dcp.EXPONENTS
    }
    assert longest["short"] < longest["balanced"] < longest["long"]
    assert dcp.lengths_of("short", 1 << 20, 1) == dcp.lengths_of("short", 1 << 20, 1)


@pytest.mark.slow
def test_real_loops_hardly_wait_for_their_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a loop that plans while nobody trains, and rows without numbers."""
    monkeypatch.setattr(dcp, "CONTENDERS", {"headrace": {"planner": "adaptive"}})
    (row,) = dcp.looped(6)
    assert row["tokens_per_s"] > 0
    assert 0 < row["planning_s"] < 0.1
    assert row["strategies"]
