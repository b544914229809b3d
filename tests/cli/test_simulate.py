"""``headrace simulate`` as a user types it, in this process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.cli import main
from headrace.config import Config
from headrace.costs import synthetic_costs
from headrace.engine.plans import make_problem
from headrace.engine.setup import PricedSampler, architecture_of, formula_costs, open_data
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
    """Catches a rank that is not drawn, a batch without its numbers, and pictures of all batches
    that push the table out of sight."""
    code, out, err = call(capsys, config, "--batches", 2, *drawn)
    assert code == 0, err
    *blocks, table = out.split("\n\n")
    assert len(blocks) == 2
    for number, block in enumerate(blocks):
        lines = block.splitlines()
        head = rf"batch {number}: \d+ sequences, [\d,]+ tokens, .*cp\d.*, programs checked"
        assert re.fullmatch(head, lines[0])
        drawn_ranks = [line.split("|")[0].strip() for line in lines if "|" in line]
        assert drawn_ranks == (["0", "1", "2"] if number == 0 else [])
        assert re.search(r"^peak .+ of 64 MiB \(rank [012]\)$", block, re.MULTILINE)
    assert table.startswith("planner ")
    assert re.search(r"^assumed: 3 x ", table, re.MULTILINE)
    assert "costs by formula" in err


def test_many_ranks_are_not_all_drawn(config: Path, capsys) -> None:
    """Catches a thousand lines before the table, a picture that ends without saying so, and clocks
    of a thousand ranks that nobody asked for."""
    many = ("--ranks", 24, "--batches", 2, *DRAWN)
    code, out, err = call(capsys, config, *many)
    assert code == 0, err
    first, second, _ = out.split("\n\n")
    assert len(re.findall(r"^ ?\d+ \|", first, re.MULTILINE)) == 16
    assert "and 8 more ranks" in first
    assert "programs checked" in first
    assert "programs checked" not in second
    value = json.loads(call(capsys, config, *many, "--json")[1])
    assert [batch["timeline"] is None for batch in value["batches"]] == [False, True]
    assert [batch["programs"] is None for batch in value["batches"]] == [False, True]
    both = json.loads(call(capsys, config, *many, "--json", "--programs")[1])
    assert all(len(batch["programs"]) == 24 for batch in both["batches"])


def test_planners_are_compared(config: Path, capsys) -> None:
    """Catches a table of other plans than those of the batches, or of other costs."""
    code, out, err = call(capsys, config, "--batches", 3, *DRAWN, "--json")
    assert code == 0, err
    value = json.loads(out)
    compared = value["comparison"]
    plans = [Plan.from_json(batch["plan"]) for batch in value["batches"]]
    rows = {row["name"]: row for row in compared["planners"]}
    assert next(iter(rows)) == "headrace"
    assert rows["headrace"]["seconds"] == [plan.predicted_s for plan in plans]
    costs = formula_costs(Config.load(config), architecture_of(Config.load(config)), 3)
    for number, plan in enumerate(plans):
        best = min(other.predicted_s for other in hr.baselines(plan.lengths, costs).values())
        assert rows["best static of each batch"]["seconds"][number] == pytest.approx(best)
    text = call(capsys, config, "--batches", 3, *DRAWN)[1]
    for row in compared["planners"]:
        [line] = [
            line for line in text.splitlines() if re.match(rf"{row['name']}(, | {{2}})", line)
        ]
        assert f"{row['ratios']['mean']:.3f}" in line
        assert f"{row['tokens_per_s_per_device']:,.0f}" in line
        assert line.endswith("3 of 3")


def test_devices_are_ranks(config: Path, capsys) -> None:
    """Catches a flag that is taken and does nothing."""
    found = [
        json.loads(call(capsys, config, flag, 2, "--json", *DRAWN)[1])
        for flag in ("--ranks", "--devices")
    ]
    assert found[0] == found[1]
    assert found[0]["comparison"]["devices"] == 2


def test_the_page_shows_the_comparison(config: Path, capsys, tmp_path: Path) -> None:
    """Catches a page of other numbers than the JSON's, and one without its assumptions."""
    pytest.importorskip("altair")
    page = tmp_path / "plans.html"
    code, out, err = call(capsys, config, "--batches", 2, *DRAWN, "--json", "--page", page)
    assert code == 0, err
    assert str(page) in err
    html = page.read_text()
    for row in json.loads(out)["comparison"]["planners"]:
        assert f"{row['tokens_per_s_per_device']:,.0f}" in html
        assert f"{row['ratios']['mean']:.3f}" in html
    assert "3 x synthetic" in html
    assert "costs by formula" in html


def test_a_page_without_its_packages_is_refused_first(config: Path) -> None:
    """Catches a refusal after minutes of planning, and one that does not say what to install."""
    code = (
        "import sys; sys.modules['altair'] = None\n"
        "from headrace.cli import main\n"
        "sys.exit(main(['simulate', sys.argv[1], '--page', 'page.html']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, config],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "--page needs the package altair; pip install 'headrace[report]'" in done.stderr


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


@pytest.mark.parametrize("flag", ["--trace", "--page"])
def test_files_that_cannot_be_are_refused_first(
    config: Path, capsys, tmp_path: Path, flag: str
) -> None:
    """Catches long planning whose result then cannot be written."""
    if flag == "--page":
        pytest.importorskip("vl_convert")
    place = tmp_path / "nowhere" / "of.html"
    code, out, err = call(capsys, config, flag, place, *DRAWN, "--ranks", 0)
    assert (code, out) == (2, "")
    assert f"{flag} {place}: got no such folder" in " ".join(err.split())


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
    "no page": (["{config}", "--page", "plans.pdf"], "--page plans.pdf: got ending '.pdf'"),
    "no place": (["{config}", "--page", "no/where.html"], "got no such folder"),
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


DRAWS = ("--set", "data.batch_tokens=", "--set", "data.iterations=dcp")


@pytest.mark.parametrize("drawn", [(), DRAWN], ids=["corpus", "drawn"])
def test_batches_of_iterations_choose_their_samples(
    config: Path, capsys, drawn: tuple[str, ...]
) -> None:
    """Catches a key that training obeys and forecasts do not, iterations drawn for other costs than
    those of the plans, samples that come twice, and a law of which only leftovers are seen."""
    code, out, err = call(capsys, config, "--batches", 3, "--json", *DRAWS, *drawn)
    assert code == 0, err
    assert "iterations are drawn by dcp from" in err
    plans = [Plan.from_json(batch["plan"]) for batch in json.loads(out)["batches"]]
    ids = [number for plan in plans for number in plan.lengths.ids]
    assert len(ids) == len(set(ids))
    if drawn:
        samples = int(re.search(r"([\d,]+) samples in an epoch", err)[1].replace(",", ""))
        assert 2 * len(ids) <= samples
        return
    read = Config.load(config, "data.batch_tokens=", "data.iterations=dcp")
    data = open_data(read)
    assert isinstance(data.sampler, PricedSampler)
    costs = formula_costs(read, architecture_of(read), 3)
    data.sampler.price(make_problem(costs, read.planner))
    assert [plan.lengths for plan in plans] == [b.lengths for b in data.sampler.peek(3)]
