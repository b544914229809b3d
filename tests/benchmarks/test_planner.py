"""``benchmarks/planner.py``: as a script, on its smallest parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scripts import run


@pytest.mark.slow
def test_planners_side_by_side(tmp_path: Path) -> None:
    """Would catch a planner that beats ours on a fixture, a fixture that is gone, and seconds that
    grow with the devices although they should not."""
    ended = run(
        "planner.py", "--parts", 1, 5, "--planners", "headrace", "static", "token-balance",
        "--largest", 256, json_in=tmp_path,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert ended.numbers is not None
    rows = ended.numbers["whole planners"]
    steps = {(row["costs"], row["devices"], row["lengths"], row["planner"]): row for row in rows}
    for (*case, planner), row in steps.items():
        ours = steps[(*case, "headrace")]
        assert all(
            mine <= theirs * (1 + 1e-9)
            for mine, theirs in zip(ours["steps_s"], row["steps_s"], strict=True)
        ), (case, planner)
        assert all(low <= s for low, s in zip(row["bounds_s"], row["steps_s"], strict=True))
    small = steps["hydraulis-32b", 64, "commoncrawl-like-200k", "headrace"]
    assert small["mean_s"] <= 3.45
    large = steps["hydraulis-32b", 1024, "commoncrawl-like-3.2m", "headrace"]
    assert large["mean_s"] <= 4.155
    assert [row["devices"] for row in ended.numbers["growth"]] == [64, 256]
    assert "whole planners" in ended.out


@pytest.mark.slow
def test_given_strategies_programs_and_proposals(tmp_path: Path) -> None:
    """Would catch a dispatch that the paper's greedy or an integer program beats, and proofs that
    contradict our plans."""
    ended = run(
        "planner.py", "--parts", 2, 3, 4, "--iterations", 1, "--trials", 20, "--program-s", 2,
        "--largest", 64, json_in=tmp_path,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert ended.numbers is not None
    for row in ended.numbers["given strategies"]:
        assert row["step_s"] <= row["greedy_s"], row["strategy"]
        assert 0 <= row["gap_equation_2"] <= (0.07 if "pp" in row["strategy"] else 0.003)
    for row in ended.numbers["integer programs"]:
        assert row["program_bound_s"] * (1 - 1e-6) <= row["ours_s"] <= row["program_s"] * 1.02
    assert ended.numbers["proposals"][0]["candidates"] > 2
