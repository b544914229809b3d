"""One planner beside each paper's decisions alone."""

from __future__ import annotations

import pytest
from paper_planner import LAWS, RESTRICTIONS, World, problem_of

from benchmarks.scripts import Ran, run

SMALL = (
    "--models",
    "8b",
    "--devices",
    "8",
    "--laws",
    "crawl",
    "long",
    "--tokens",
    "4096",
    "--seeds",
    "0",
)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run("paper_planner.py", *SMALL, json_in=tmp_path_factory.mktemp("planner"))


@pytest.mark.slow
def test_no_restricted_planner_is_ahead(ran: Ran) -> None:
    """Catches a search that misses what a part of it finds, and bounds above plans."""
    assert ran.code == 0, ran.err
    assert ran.numbers is not None
    worlds = ran.numbers["worlds"]
    assert [world["law"] for world in worlds] == ["crawl", "long"]
    for world in worlds:
        assert set(world["seconds"]) == set(RESTRICTIONS)
        held = [seconds for seconds in world["seconds"].values() if seconds is not None]
        assert len(held) >= 6
        assert min(held) >= world["step_s"] * 0.995
        assert world["bound_s"] <= world["step_s"]


@pytest.mark.slow
def test_every_paper_is_a_row(ran: Ran) -> None:
    """Catches a restriction that is planned and not told."""
    assert ran.numbers is not None
    rows = ran.numbers["claims"]
    assert len(rows) == len(RESTRICTIONS) + 1
    assert all(row["how"] == "simulated" for row in rows)
    assert all(row["verdict"] != "behind" for row in rows[:-1])


def test_restrictions_allow_less() -> None:
    """Catches a restriction that is none, or that forbids everything."""
    problem = problem_of("8b", 8)
    for restriction in RESTRICTIONS.values():
        made = [problem.replace(**change) for change in restriction.changes]
        assert all(own != problem for own in made if own.planner == "adaptive")
    world = World(model="8b", devices=8, law="code", seed=0, tokens=1 << 16)
    assert RESTRICTIONS["sizes"].seconds(world.lengths, problem) is not None


@pytest.mark.parametrize("law", LAWS)
def test_batches_are_cut_to_what_all_hold(law: str) -> None:
    """Catches a law that no longer draws, and batches that only some planners hold."""
    world = World(model="8b", devices=8, law=law, seed=0, tokens=1 << 16)
    assert world.lengths.longest <= 1 << 15
    assert world.lengths.total >= 1 << 14
