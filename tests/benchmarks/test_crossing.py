"""The count of what crosses between nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import crossing
import pytest

from headrace.spec.architecture import Architecture, parameter_count


def test_whole_weights_cross_once_a_node(tmp_path: Path) -> None:
    """Catches a second copy of a row for a node, and a table that disagrees with its file."""
    assert crossing.main(["--nodes", "2", "4", "--json", str(tmp_path / "found.json")]) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    weights = 2 * parameter_count(Architecture.preset("llama-8b"))
    assert [row["two_steps"] for row in rows] == [True, True, False] * 2
    for row in rows:
        others = 1 - 1 / row["nodes"]
        copies = {"whole": 8, "cut by 4": 2, "cut by 8": 1}[row["layout"]]
        assert abs(row["two_steps_bytes"] / (weights * others) - 1) < 1e-3
        assert abs(row["one_step_bytes"] / (weights * others * copies) - 1) < 1e-3
        assert (row["two_steps_s"] < row["one_step_s"]) == row["two_steps"]


@pytest.mark.parametrize("words", ["--nodes 1", "--model nope", "--hardware h1000"])
def test_what_is_not_known_is_said(words: str, capsys: Any) -> None:
    """Catches a traceback for a name that is no preset."""
    with pytest.raises(SystemExit):
        crossing.main(words.split())
    assert "error: " in capsys.readouterr().err
