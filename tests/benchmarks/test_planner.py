"""``benchmarks/planner.py``: its parts on small inputs, and once as a script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import planner
import pytest
from beside import Earlier

from benchmarks.scripts import run


@pytest.fixture
def two_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "CASES", (planner.CASES[0], planner.CASES[4]))


@pytest.mark.usefixtures("two_cases")
def test_no_planner_is_ahead_of_ours() -> None:
    """Would catch a planner that beats ours on a fixture, a bound that a plan beats, and steps
    that were shorter before."""
    o = planner.options(["--planners", "headrace", "static", "token-balance"])
    rows = planner.whole_planners(o)
    steps = {(row["costs"], row["planner"]): row for row in rows}
    for (costs, _), row in steps.items():
        for mine, theirs, low in zip(
            steps[costs, "headrace"]["steps_s"], row["steps_s"], row["bounds_s"], strict=True
        ):
            assert low <= mine <= theirs * (1 + 1e-9), row["planner"]
        assert row["cpu_s"] > 0
    assert steps["hydraulis-32b", "headrace"]["mean_s"] <= 3.45
    assert steps["hydraulis-7b", "headrace"]["mean_s"] <= 0.89


def test_given_strategies_are_dispatched_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a dispatch that the paper's greedy beats, a strategy read wrongly, and bounds
    that contradict our plans."""
    one = planner.CASES[0]
    monkeypatch.setattr(planner, "CASES", [one])
    rows = planner.given_strategies(planner.options(["--iterations", "1", "--trials", "20"]))
    assert [row["strategy"] for row in rows][1:3] == ["1*tp16 + 6*tp8", "1*tp16 + 12*tp4"]
    for row in rows:
        assert row["step_s"] <= row["greedy_s"], row["strategy"]
        assert row["gap"] >= 0
        assert 0 <= row["gap_equation_2"] <= (0.08 if "pp" in row["strategy"] else 0.003)


def test_integer_programs_prove_ours_good() -> None:
    """Would catch a packing or a dispatch that an integer program beats, and proofs that
    contradict our plans."""
    rows = planner.programs(planner.options(["--program-s", "1"]))
    assert len(rows) == 5
    for row in rows:
        assert row["program_bound_s"] * (1 - 1e-6) <= row["ours_s"] <= row["program_s"] * 1.02


def test_strategies_beside_the_dynamic_program() -> None:
    """Would catch strategies that are worse than the paper's, and sizes beyond the largest."""
    (row,) = planner.strategies(planner.options(["--largest", "64"]))
    assert row["step_s"] <= row["program_step_s"]
    assert row["tried"] > 2


def test_plans_for_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a preparation that every plan pays, and gaps of plans that are not there."""
    monkeypatch.setattr(planner, "TRAINING", ((8, 1), (64, 1)))
    (row,) = planner.training(planner.options(["--largest", "8"]))
    assert row["devices"] == 8
    assert row["preparation_s"] > row["cpu_s"]
    assert len(row["steps_s"]) == len(row["bounds_s"]) == len(row["strategies"]) == 3
    assert 0 < row["gap"] < 0.3


def test_numbers_beside_an_earlier_run() -> None:
    """Would catch a row that is compared with another one's, and rows that were not there."""
    earlier = Earlier([{"a": 1, "b": 1, "x_s": 2.0}, {"a": 1, "b": 2, "x_s": 8.0}], ("a", "b"))
    texts = [
        earlier.text(row, "x_s", str)
        for row in ({"a": 1, "b": 2, "x_s": 4.0}, {"a": 2, "b": 2, "x_s": 4.0})
    ]
    assert texts == ["4.0 (0.500x)", "4.0"]


@pytest.mark.slow
def test_the_script_compares_its_runs(tmp_path: Path) -> None:
    """Would catch numbers that are not written, not printed, or not found in an earlier file."""
    before = tmp_path / "before.json"
    grown: list[dict[str, Any]] = planner.growth(planner.options(["--largest", "64"]))
    before.write_text(json.dumps({"growth": grown}))
    ended = run("planner.py", "--parts", 5, "--largest", 64, "--beside", before, json_in=tmp_path)
    assert ended.code == 0, ended.err
    assert ended.numbers is not None
    assert ended.numbers["growth"][0]["steps_s"] == grown[0]["steps_s"]
    assert "s (1.000x)" in ended.out
