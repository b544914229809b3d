"""The benchmark of what a rank does for a plan besides running it."""

from __future__ import annotations

from pathlib import Path

from overhead import plan_of

from benchmarks.scripts import run
from headrace.spec import check_programs, compile_plan


def test_its_plan_uses_all_ranks_and_is_sound() -> None:
    """Catches a plan that is easier than it says: idle ranks, or pipelines without work."""
    plan = plan_of(64, 3, 64)
    assert str(plan.strategy) == "2*tp8-pp2 + 2*tp4-cp2 + 16*cp1"
    assert {rank for p in plan.pipelines for rank in p.ranks} == set(range(64))
    assert {micro.pipeline for micro in plan.micro_batches} == set(range(20))
    check_programs(compile_plan(plan, 5), plan, 5)


def test_every_part_is_measured(tmp_path: Path) -> None:
    """Catches a script that does not run, and a part that is left out."""
    ran = run("overhead.py", "--ranks", 32, 64, "--layers", 2, "--times", 1, json_in=tmp_path)
    assert ran.code == 0, ran.err
    assert ran.numbers is not None
    assert [(row["ranks"], row["rank"]) for row in ran.numbers["rows"]] == [
        (32, 0),
        (32, 1),
        (32, 31),
        (64, 0),
        (64, 1),
        (64, 63),
    ]
    for row in ran.numbers["rows"]:
        assert all(row[name] > 0 for name in row if name.endswith("_s"))
    assert "to a new one" in ran.out


def test_what_a_rank_does_hardly_grows_with_the_ranks(tmp_path: Path) -> None:
    """Catches what is sent, or called for, once for each other rank: of four times the ranks."""
    ran = run("overhead.py", "--ranks", 64, 256, "--layers", 2, "--times", 1, json_in=tmp_path)
    assert ran.numbers is not None
    small, large = ran.numbers["rows"][:3], ran.numbers["rows"][3:]
    for few, many in zip(small, large, strict=True):
        assert many["row_bytes"] <= few["row_bytes"] + 48, "one micro-batch more"
        assert many["calls"] < 3.5 * few["calls"]


def test_ranks_that_it_cannot_cut_are_refused() -> None:
    """Catches a traceback for a number of ranks that the kinds do not divide."""
    ran = run("overhead.py", "--ranks", 40)
    assert ran.code == 2
    assert "--ranks: got 40, wanted multiples of 32" in ran.err
