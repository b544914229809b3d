"""``headrace simulate`` as a user types it, in this process."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.costs import synthetic_costs
from headrace.spec import Architecture, Plan, Program, Timeline, check_programs, compile_plan
from headrace.spec.program import pushes_of

CONFIG = """
[data]
paths = ["corpus"]
context = 256
batch_tokens = 1500
cache = "{cache}"
[model]
layers = 2
hidden = 32
heads = 4
[devices]
ranks = 3
memory = "64MiB"
"""
BUCKETS = 4
DRAWN = ("--lengths", "lognormal:median=60,sigma=1,max=256")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """A configuration of a tiny corpus."""
    folder = tmp_path_factory.mktemp("simulate")
    (folder / "corpus").mkdir()
    for i in range(30):
        (folder / "corpus" / f"{i:02d}.txt").write_text("a race " * (1 + i * i // 17))
    path = folder / "tiny.toml"
    path.write_text(CONFIG.format(cache=folder / "cache"))
    return path


def call(capsys, *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of ``headrace simulate``."""
    try:
        code = main(["simulate", *map(str, arguments)])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else -1
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("drawn", [(), DRAWN], ids=["corpus", "drawn"])
def test_a_line_for_every_rank(config: Path, capsys, drawn: tuple[str, ...]) -> None:
    """Catches a rank that is not drawn, and a batch without its numbers."""
    code, out, err = call(capsys, config, "--batches", 2, *drawn)
    assert code == 0, err
    blocks = out.split("\n\n")
    assert len(blocks) == 2
    for number, block in enumerate(blocks):
        lines = block.splitlines()
        head = rf"batch {number}: \d+ sequences, [\d,]+ tokens, .*cp\d.*, programs checked"
        assert re.fullmatch(head, lines[0])
        assert [line.split("|")[0].strip() for line in lines[1:4]] == ["0", "1", "2"]
        assert re.search(r"^peak .+ of 64 MiB \(rank [012]\)$", block, re.MULTILINE)
    assert "costs by formula" in err


def test_programs_are_printed_and_run(config: Path, capsys) -> None:
    """Catches programs of another plan than the one that is shown."""
    code, out, err = call(capsys, config, "--programs", *DRAWN)
    assert code == 0, err
    programs = [Program.parse(line) for line in out.splitlines() if line.startswith("rank ")]
    assert [program.rank for program in programs] == [0, 1, 2]
    [batch] = json.loads(call(capsys, config, "--json", *DRAWN)[1])["batches"]
    plan = Plan.from_json(batch["plan"])
    check_programs(programs, plan, BUCKETS)
    assert "rank 0: " not in call(capsys, config, *DRAWN)[1], "only when asked for"


def test_json_reads_back(config: Path, capsys) -> None:
    """Catches anything but JSON on stdout, a timeline of another plan, memory above the limit."""
    code, out, err = call(capsys, config, "--batches", 2, "--json")
    assert code == 0, err
    value = json.loads(out)
    assert len(value["batches"]) == 2
    assert "formula" in value["costs"]
    for batch in value["batches"]:
        plan, timeline = Plan.from_json(batch["plan"]), Timeline.from_json(batch["timeline"])
        done = sorted(i for micro in plan.micro_batches for i in micro.sequences)
        assert done == list(range(len(plan.lengths)))
        programs = compile_plan(plan, BUCKETS)
        assert batch["programs"] == [str(program) for program in programs]
        ran = {(row.rank, row.action) for row in timeline.rows}
        acted = {(p.rank, str(a)) for p in programs for a in p.actions}
        pushed = {(p.rank, f"G{b}") for p in programs for a in p.actions for b in pushes_of(a)}
        assert ran == acted | pushed
        assert timeline.source == "predicted"
        assert timeline.seconds == pytest.approx(plan.predicted_s)
        assert len(batch["peak_bytes"]) == 3
        assert all(0 < peak <= 64 * 2**20 for peak in batch["peak_bytes"])


def trace_of(config: Path, capsys, path: Path, *more: object) -> list[dict[str, Any]]:
    code, _, err = call(capsys, config, "--trace", path, *DRAWN, *more)
    assert code == 0, err
    assert str(path) in err
    value = json.loads(path.read_text())
    assert set(value) == {"traceEvents"}
    events = value["traceEvents"]
    assert f"trace of {len(events)} actions" in err
    return events


def test_the_trace_is_one_that_viewers_open(config: Path, capsys, tmp_path: Path) -> None:
    """Catches an event without a field of the format, and actions of one rank that overlap."""
    events = trace_of(config, capsys, tmp_path / "step.json")
    for event in events:
        assert event["ph"] == "X"
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert isinstance(event["name"], str)
        assert isinstance(event["cat"], str)
        assert event["pid"] == "predicted"
        assert event["tid"] in (0, 1, 2)
        assert event["args"]["step"] == 0
    assert {event["tid"] for event in events} == {0, 1, 2}
    assert not overlaps(events)


def overlaps(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of forwards, backwards and updates of one rank that run at once."""
    found = []
    for rank in {event["tid"] for event in events}:
        kinds = ("forward", "backward", "update")
        rows = [e for e in events if e["tid"] == rank and e["cat"] in kinds]
        rows.sort(key=lambda event: event["ts"])
        for one, other in pairwise(rows):
            if other["ts"] < one["ts"] + one["dur"] - 1e-3:
                found.append((one["name"], other["name"]))
    return found


def test_the_trace_holds_all_batches(config: Path, capsys, tmp_path: Path) -> None:
    """Catches a trace of the last batch, or events that do not say theirs."""
    events = trace_of(config, capsys, tmp_path / "steps.json", "--batches", 2)
    assert {event["args"]["step"] for event in events} == {0, 1}


def test_batches_of_a_trace_follow_each_other(config: Path, capsys, tmp_path: Path) -> None:
    """Catches steps drawn on top of each other."""
    assert not overlaps(trace_of(config, capsys, tmp_path / "steps.json", "--batches", 2))


def test_a_trace_that_cannot_be_written_is_one_message(config: Path, capsys, tmp_path) -> None:
    """Catches a traceback after all the work."""
    code, _, err = call(capsys, config, *DRAWN, "--trace", tmp_path / "nowhere" / "step.json")
    assert code == 2
    assert "step.json" in err


def test_costs_of_a_file_are_used(config: Path, capsys, tmp_path: Path) -> None:
    """Catches a clock that runs on other costs than the plan."""
    model = Architecture(layers=2, hidden=32, heads=4, kv_heads=4, ffn=128, vocabulary=257)
    costs = synthetic_costs(3, architecture=model)
    seconds = []
    for scale in (1.0, 3.0):
        costs.replace(scale=scale).save(tmp_path / "costs.json")
        code, out, err = call(capsys, config, "--json", "--costs", tmp_path / "costs.json", *DRAWN)
        assert (code, err) == (0, "")
        [batch] = json.loads(out)["batches"]
        timeline = Timeline.from_json(batch["timeline"])
        assert timeline.seconds == pytest.approx(batch["plan"]["predicted_s"])
        seconds.append(timeline.seconds)
    assert seconds[1] == pytest.approx(3 * seconds[0])


BAD: dict[str, tuple[list[str], str]] = {
    "no file": (["nowhere.toml"], "nowhere.toml: got No such file"),
    "no configuration": ([], "requires an argument"),
    "unknown flag": (["{config}", "--trase", "x"], "Did you mean --trace?"),
    "no batches": (["{config}", "--batches", "0"], "--batches: got 0, wanted >= 1"),
    "unknown section": (["{config}", "--set", "models.layers=3"], "did you mean 'model'?"),
    "unknown distribution": (["{config}", "--lengths", "fixd:64"], "did you mean 'fixed'?"),
    "no costs": (["{config}", "--costs", "nowhere.json"], "nowhere.json: got No such file"),
    "nothing fits": (["{config}", "--set", "devices.memory=8KiB"], "8 KiB"),
}


@pytest.mark.parametrize("case", BAD)
def test_mistakes_are_one_message_on_stderr(case: str, config: Path, capsys) -> None:
    """Catches a traceback, an exit code of success, and words on stdout."""
    arguments, text = BAD[case]
    code, out, err = call(capsys, *(a.replace("{config}", str(config)) for a in arguments))
    assert code == 2, err
    assert out == ""
    assert text in re.sub(r"[\s\u2502]+", " ", err), err
    assert "Traceback" not in err
