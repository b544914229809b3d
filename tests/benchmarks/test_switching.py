"""``benchmarks/switching.py``: as a script on two ranks, its parts on four, and its arithmetic."""

from __future__ import annotations

import argparse
from collections import Counter
from itertools import pairwise, permutations
from typing import Any

import pytest
import switching
from measured import settled

from benchmarks.scripts import Ran, run
from headrace.spec import Architecture
from ranks import run_ranks

METHODS = ("ulysses_z", "megatron_ts", "metp")
SMALL = argparse.Namespace(layers=2, hidden=64, heads=4, tokens=16)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run(
        "switching.py",
        "--ranks",
        2,
        "--tokens",
        16,
        "--hidden",
        32,
        "--heads",
        2,
        "--layers",
        1,
        "--restarts",
        1,
        "--methods",
        *METHODS,
        json_in=tmp_path_factory.mktemp("switching"),
    )


@pytest.mark.long
def test_a_change_moves_nothing_and_a_restart_takes_longer(two: Ran) -> None:
    """Would catch a change of method that lays weights or tokens out anew, an untried pair, and a
    restart that is not one; whole numbers and orders of magnitude only."""
    assert two.code == 0, two.err
    assert two.numbers is not None
    (world,) = two.numbers["worlds"]
    names = {row["method"] for row in world["changes"]}
    assert names == set(METHODS)
    pairs = {(row["before"], row["after"]): row for row in world["pairs"]}
    assert set(pairs) == set(permutations(names, 2))
    for row in pairs.values():
        assert row["changed_bytes"] == row["same_bytes"] > 0
        assert all(len(row[key]) == 1 for key in ("changed_s", "same_s", "again_s"))
    assert all(row["sent_bytes"] == 0 for row in world["changes"])
    assert world["changed_bytes"] == 0
    s = world["summary"]
    assert 0 < s["look_up_s"] < s["change_s"] < s["same_step_s"] < s["restart_s"]
    assert s["change_s"] * 100 < s["restart_s"]


@pytest.mark.long
def test_the_parts_of_a_restart_are_its_time(two: Ran) -> None:
    """Would catch a part that is counted twice, and clocks of processes that do not agree."""
    assert two.numbers is not None
    (world,) = two.numbers["worlds"]
    (restart,) = world["restarts"]
    assert set(restart) == set(switching.PARTS)
    assert all(spent > 0 for spent in restart.values())
    assert world["summary"]["restart_s"] == pytest.approx(sum(restart.values()))
    assert restart["import torch"] > restart["ranks, rendezvous, groups"]


@pytest.mark.long
def test_tables_go_to_stdout_and_progress_to_stderr(two: Ran) -> None:
    """Would catch progress in a piped table, and the paper's number passed off as measured."""
    assert two.numbers is not None
    assert {"machine", "rounds", "paper", "worlds"} == set(two.numbers)
    assert two.numbers["machine"]["host_cpu"] in two.out
    assert "a change of method on 2 ranks: gpt 1x32" in two.out
    assert "a restart on 2 ranks, median of 1" in two.out
    assert "quoted: ParaDySe, Case Study" in two.out
    assert "restart 1/1" not in two.out
    for line in (
        "look-ups and groups",
        "counting bytes, change 1/",
        "round 1/1, change 1/",
        "restart 1/1",
    ):
        assert f"2 ranks: {line}" in two.err
    assert "─" not in two.err


def _composites() -> dict[str, Any]:
    names = ("local", "ulysses_ring", "megatron_cz")
    job = switching.Job.of(switching.architecture_of(SMALL), SMALL.tokens, names)
    assert job.methods == names[1:]
    with settled():
        return {name: switching.changes(job, name, times=2) for name in job.methods}


def test_only_a_composite_makes_groups() -> None:
    """Would catch first changes that find the groups of an earlier try, so that the cost of making
    them is hidden; two blocks of two, two rings of two on four ranks."""
    for found in run_ranks(4, _composites):
        ring, plain = found["ulysses_ring"], found["megatron_cz"]
        assert (ring["groups"], plain["groups"]) == (4, 0)
        assert ring["sent_bytes"] == plain["sent_bytes"] == 0
        assert min(ring["first_s"]) > max(ring["later_s"])


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_tour_meets_every_ordered_pair_once(count: int) -> None:
    """Would catch a pair left out, or timed twice."""
    names = [f"m{i}" for i in range(count)]
    met = Counter(pairwise(switching.tour(names)))
    assert met == Counter(permutations(names, 2))


def _found() -> dict[str, Any]:
    def pair(changed: float, same: float, again: float) -> dict[str, Any]:
        return {
            "before": "a",
            "after": "b",
            "changed_s": [changed],
            "same_s": [same],
            "again_s": [again],
            "changed_bytes": 5.0,
            "same_bytes": 5.0,
        }

    def change(groups: int, first: float, later: float) -> dict[str, Any]:
        return {
            "method": "a",
            "groups": groups,
            "look_up_s": [later / 8, later / 4, 9.0],
            "first_s": [first] * 3,
            "later_s": [later] * 3,
            "sent_bytes": 0.0,
        }

    return {
        "ranks": 2,
        "tokens": 16,
        "architecture": switching.architecture_of(SMALL).to_json(),
        "changes": [change(0, 7.0, 2.0), change(4, 3.0, 1.0)],
        "pairs": [pair(2.0, 1.0, 1.0), pair(4.0, 4.0, 2.0), pair(9.0, 3.0, 3.0)],
        "restarts": [dict.fromkeys(switching.PARTS, float(i)) for i in (1, 2, 9)],
    }


def test_the_summary_is_of_medians() -> None:
    """Would catch first changes of methods without groups mixed in, the fastest method's look-up
    reported, and ratios of medians where pairs differ."""
    s = switching.summary(_found())
    assert s == {
        "look_up_s": 0.5,
        "change_s": 2.0,
        "first_change_s": 3.0,
        "changed_step_s": 4.0,
        "same_step_s": 3.0,
        "changed_ratio": 2.0,
        "same_ratio": 1.0,
        "changes": 3,
        "restart_s": 12.0,
    }


def test_bytes_moved_by_a_change_are_not_reported_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch a change that moves bytes in one direction of one pair only."""
    found = _found()
    found["pairs"][1]["changed_bytes"] = 4.0
    monkeypatch.setattr(switching, "measured", lambda ranks, o: found)
    assert switching.main(["--ranks", "2"]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert "got 1 bytes moved, wanted none" in err
    found["pairs"][1]["changed_bytes"] = 5.0
    assert switching.main(["--ranks", "2"]) == 0
    out, _ = capsys.readouterr()
    assert "24x" in out.split("look-up", 1)[1].splitlines()[0]
    assert "6x" in out.split("change of all layers", 1)[1].splitlines()[0]
    assert "4x" in out.split("first change", 1)[1].splitlines()[0]


@pytest.mark.slow
def test_a_restart_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a wait without end for a job that never gets to its first step."""
    a = switching.architecture_of(SMALL)
    monkeypatch.setattr(Architecture, "to_json", lambda self: {"layers": 1})
    with pytest.raises(SystemExit, match="a restarted job: got exit code"):
        switching.restarted(2, a)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", "1", "2"], "--ranks: at least 2"),
        (["--rounds", "0"], "--rounds, --restarts, --layers: at least 1"),
        (["--restarts", "0"], "--rounds, --restarts, --layers: at least 1"),
        (["--tokens", "3"], "--tokens and --heads of at least 4"),
        (["--ranks", "3", "--heads", "2"], "--tokens and --heads of at least 3"),
        (["--hidden", "20"], "--hidden a multiple of --heads"),
        (["--methods", "local", "metp"], "--methods: at least two that 2 ranks can run"),
        (["--methods", "ulysses"], "invalid choice: 'ulysses'"),
        (["--round", "x"], "invalid int value: 'x'"),
    ],
)
def test_bad_options_are_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch a wrong size found out by ranks that crash."""
    with pytest.raises(SystemExit) as left:
        switching.options(options)
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert said in err
    assert not out


def test_the_script_refuses_before_it_starts() -> None:
    """Would catch an exit code that does not reach the shell."""
    ran = run("switching.py", "--ranks", 2, "--restarts", -1)
    assert (ran.code, ran.out) == (2, "")
    assert "at least 1" in ran.err
    assert "Traceback" not in ran.err
