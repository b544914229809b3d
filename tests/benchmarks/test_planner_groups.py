"""The benchmark of sizing runs, and its numbers are those of the goals."""

from __future__ import annotations

from pathlib import Path

from benchmarks.scripts import run

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "planner_groups.json"


def test_planners_are_compared_in_one_cell(tmp_path: Path) -> None:
    """Would catch a ratio below one, a planner left out, JSON without its numbers, or an earlier
    run that is not found."""
    ran = run(
        "planner_groups.py",
        "--tokens",
        "1000k",
        "--devices",
        64,
        "--semantics",
        "free",
        "--rounds",
        1,
        "--beside",
        RESULTS,
        json_in=tmp_path,
    )
    assert ran.code == 0, ran.err
    assert "seconds over the plain bound" in ran.out
    assert "(1.000x)" in ran.out
    assert ran.numbers is not None
    (cell,) = ran.numbers["cells"]
    ratios = {x["planner"]: x["ratio"] for x in cell["planners"]}
    assert 1 <= ratios["headrace"] <= 1.03
    assert min(ratios.values()) == ratios["headrace"]
    assert len(ratios) == 14


def test_long_tails_in_lockstep_are_near_the_bound(tmp_path: Path) -> None:
    """Would catch waves, or a bound of them, that lose what lengths up to 128 Ki allow."""
    ran = run(
        "planner_groups.py",
        "--tokens",
        "4000k-128k",
        "--devices",
        64,
        256,
        "--semantics",
        "lockstep",
        "--planners",
        "headrace",
        "best-static",
        "--rounds",
        1,
        json_in=tmp_path,
    )
    assert ran.code == 0, ran.err
    assert ran.numbers is not None
    for cell in ran.numbers["cells"]:
        ours, static = cell["planners"]
        assert 0 < ours["gap"] <= 0.04
        assert static["ratio"] >= 1.2 * ours["ratio"]
