"""Going on from checkpoints that were damaged or tampered with."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from copy import deepcopy
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
import spread
from headrace.config import Config
from headrace.engine.checkpoints import Checkpoint, SavedState, changed
from headrace.engine.setup import open_data
from headrace.errors import CheckpointError, DamagedCheckpoint, HeadraceError
from headrace.native import checkpoint
from headrace.report.run_reader import read_run
from headrace.report.run_summary import summed_up
from running.cli.jobs import metrics, write_job

Whole = tuple[Config, hr.TrainingRun]


def silent(line: str) -> None:
    """Say nothing."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A run of six steps on one rank with checkpoints after 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("resume")
    path = write_job(folder, steps=6, candidates=["megatron_cz"])
    config = Config.load(
        path,
        "devices.ranks=1",
        "checkpoint.every=2",
        "checkpoint.keep=9",
        "profile.longest=128",
        "planner.recompute=['none']",
    )
    return config, hr.train(config, out=folder / "run", tell=silent)


LONE = """
import sys
import headrace as hr

config = hr.Config.load(sys.argv[1], "devices.ranks=1", "run.steps=100000")
hr.train(config, out=sys.argv[2], tell=lambda text: None)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, spread.whole(signal.SIGTERM)])
def test_a_signal_keeps_what_a_lone_rank_has_trained(number: int, tmp_path: Path) -> None:
    """Catches a run in the caller's own process that a signal ends with nothing kept, and an end
    that looks like a success."""
    path = write_job(tmp_path, steps=6, candidates=["megatron_cz"])
    command = [sys.executable, "-c", LONE, str(path), str(tmp_path / "run")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    trained, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if trained.exists() and trained.read_text().count("\n") > 5:
            break
        time.sleep(0.02)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == (-number if number == signal.SIGINT else 128 + number), said
    assert f"stopped by {signal.Signals(number).name}" in said
    steps = len(hr.TrainingRun(tmp_path / "run").losses)
    assert place(tmp_path / "run", steps).exists()
    config = Config.load(path, "devices.ranks=1", f"run.steps={steps + 1}")
    again = hr.train(config, out=tmp_path / "run", resume=True, tell=silent)
    assert len(again.losses) == steps + 1


@pytest.fixture
def copy(whole: Whole, tmp_path: Path) -> Path:
    """A copy of the run's folder."""
    shutil.copytree(whole[1].folder, tmp_path / "run")
    return tmp_path / "run"


def place(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06d}"


def damage(run: Path, step: int) -> None:
    file = place(run, step) / "rank00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 4
    file.write_bytes(raw)


def index_of(path: Path) -> dict[str, Any]:
    body = json.loads((path / "index.json").read_text())
    del body["crc32"]
    return body


def sign(path: Path, body: dict[str, Any]) -> None:
    """Write an index with the checksum that it ought to have."""
    text = json.dumps({"crc32": zlib.crc32(json.dumps(body).encode()), **body})
    (path / "index.json").write_text(text)


def test_a_damaged_newest_is_passed_over(whole: Whole, copy: Path) -> None:
    """Catches a run that fails the same way at each restart, and one that goes on from weights of
    which a part was loaded."""
    config, run = whole
    damage(copy, 6)
    damage(copy, 4)
    shutil.copytree(place(copy, 2), copy / "checkpoints" / "step-000999")
    told: list[str] = []
    again = hr.train(config, out=copy, resume=True, tell=told.append)
    passed = [line for line in told if "is damaged" in line]
    assert len(passed) == 3
    assert "step-000999" in passed[0]
    assert "checksum differs" in passed[1]
    assert any("continuing from" in line and "step-000002" in line for line in told)
    assert again.losses == run.losses
    Checkpoint(path=place(copy, 6)).verify()


def test_what_was_changed_is_said(whole: Whole, copy: Path) -> None:
    """Catches a run that goes on with another optimizer, or for longer, without a word."""
    config, _ = whole
    changes = {
        "run": config.run.model_copy(update={"steps": 7}),
        "optimizer": config.optimizer.model_copy(update={"lr": 0.02}),
        "report": config.report.model_copy(update={"timelines": 1}),
    }
    told: list[str] = []
    hr.train(config.model_copy(update=changes), out=copy, resume=True, tell=told.append)
    (line,) = [line for line in told if line.startswith("changed since")]
    assert line == "changed since   run.steps from 6 to 7, optimizer.lr from 0.01 to 0.02"
    again: list[str] = []
    hr.train(config.model_copy(update=changes), out=copy, resume=True, tell=again.append)
    assert not [line for line in again if line.startswith("changed since")]


def test_another_word_for_the_same_is_no_change() -> None:
    """Catches a run of before that is said to hold its weights in another way now."""
    before, now = ({"planner": {"working": word}} for word in ("whole", "replicated"))
    assert changed(before, now) == []
    assert changed(before, {"planner": {"working": "sharded"}}) == [
        'planner.working from "replicated" to "sharded"'
    ]


def test_a_key_that_no_step_depends_on_is_no_change() -> None:
    """Catches a run of before that is said to be planned otherwise, as it lacks the key."""
    assert changed({"planner": {}}, {"planner": {"compare": True}}) == []
    assert changed({"planner": {"compare": True}}, {"planner": {"compare": False}}) == []


def test_steps_are_the_same_whether_they_are_compared(whole: Whole, tmp_path: Path) -> None:
    """Catches a run that depends on what its plans are compared with, one that is compared against
    its wish, and comparisons that never reach the journal or the report."""
    config, run = whole
    for compare in (True, False):
        planner = config.planner.model_copy(update={"ahead": 0, "compare": compare})
        again = hr.train(
            config.model_copy(update={"planner": planner}), out=tmp_path / str(compare), tell=silent
        )
        assert again.losses == run.losses
        rows = metrics(again.folder)
        assert len(rows) == 6
        assert all("static_s" not in row and row["memory_margin"] == 0.3 for row in rows)
        assert all(("best_static_s" in row) == compare for row in rows)
        assert isfinite(summed_up(read_run(again.folder)).against_static) == compare
        if compare:
            assert all(row["best_static_s"] >= row["predicted_s"] for row in rows)
            drawn = (again.folder / "timelines.jsonl").read_text().splitlines()
            assert drawn
            assert all(json.loads(line)["static"] is not None for line in drawn)


def test_checkpoints_in_the_background_are_the_same(whole: Whole, tmp_path: Path) -> None:
    """Catches a run whose checkpoints hold what later steps made, or lack the last one, and one
    that cannot go on from them."""
    config, run = whole
    kept = config.checkpoint.model_copy(update={"background": True})
    changed = config.model_copy(update={"checkpoint": kept})
    again = hr.train(changed, out=tmp_path / "run", tell=silent)
    assert again.losses == run.losses
    for step in (2, 4, 6):
        mine, theirs = (place(folder, step) for folder in (again.folder, run.folder))
        Checkpoint(path=mine).verify()
        held, wanted = checkpoint.read_all(mine), checkpoint.read_all(theirs)
        assert held.keys() == wanted.keys()
        for name, tensor in held.items():
            assert torch.equal(tensor, wanted[name]), name
    shutil.rmtree(place(again.folder, 6))
    told: list[str] = []
    resumed = hr.train(changed, out=again.folder, resume=True, tell=told.append)
    assert any("continuing from" in line and "step-000004" in line for line in told)
    assert resumed.losses == run.losses


def test_nodes_go_on_where_others_stopped(whole: Whole, copy: Path) -> None:
    """Catches rows of nodes, which are stored in another order, that are saved or loaded as those
    of others, and an option that does nothing."""
    config, run = whole
    told: list[str] = []
    for step, ranks, node_ranks in ((2, 4, 2), (4, 3, 2), (4, 1, 0)):
        for later in {4, 6} - set(range(step + 1)):
            shutil.rmtree(place(copy, later))
        devices = config.devices.model_copy(update={"ranks": ranks, "node_ranks": node_ranks})
        changed = config.model_copy(update={"devices": devices})
        again = hr.train(changed, out=copy, resume=True, tell=told.append)
        assert again.losses == pytest.approx(run.losses, rel=1e-5)
        if node_ranks:  # the first ranks of both nodes, the last of which may be alone, come first
            files = index_of(place(copy, 6))["files"]
            stored = [dict((n, at) for n, at, _ in file["rows"]) for file in files]
            first = [rows["embed.weight"] for rows in stored]
            in_order = [first[rank] for rank in (0, 2, 1, 3) if rank < ranks]
            assert in_order == sorted(in_order)
    assert sum("continuing from" in line for line in told) == 3


def test_none_is_whole(whole: Whole, copy: Path) -> None:
    """Catches a run that silently begins anew, over the steps that were taken."""
    for step in (2, 4, 6):
        damage(copy, step)
    with pytest.raises(CheckpointError, match=r"step-000006.*wanted one that is whole"):
        hr.train(whole[0], out=copy, resume=True, tell=silent)


def test_a_checkpoint_of_another_model_is_not_passed_over(whole: Whole, copy: Path) -> None:
    """Catches a search for an older checkpoint where the configuration is the mistake."""
    larger = whole[0].model.model_copy(update={"layers": 3})
    config = whole[0].model_copy(update={"model": larger})
    with pytest.raises(CheckpointError, match=r"model of .*step-000006"):
        hr.train(config, out=copy, resume=True, tell=silent)


def test_what_differs_of_a_model_is_said(whole: Whole, copy: Path) -> None:
    """Catches an error with the same text on both sides."""
    turned = whole[0].model.model_copy(update={"dropout": 0.1})
    config = whole[0].model_copy(update={"model": turned})
    with pytest.raises(CheckpointError, match=r"\(dropout 0\.0\), wanted .*\(dropout 0\.1\)"):
        hr.train(config, out=copy, resume=True, tell=silent)


ODD: list[Any] = [None, True, -1, -5, 10**30, 1.5, float("1e308"), "x", [], {}, [[]], {"a": 1}]


def tampered(extra: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every entry of the first two levels replaced by each odd value, or left out."""

    def places(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for key in value if isinstance(value, dict) and len(path) < 2 else ():
            yield (*path, key)
            yield from places(value[key], (*path, key))

    for path in places(extra, ()):
        if path[0] == "config" and len(path) > 1:  # any configuration may have been the run's
            continue
        for odd in [*ODD, "gone"]:
            changed = deepcopy(extra)
            inner = changed
            for key in path[:-1]:
                inner = inner[key]
            if odd == "gone":
                del inner[path[-1]]
            else:
                inner[path[-1]] = odd
            yield f"{'.'.join(path)} = {odd!r}", changed


def test_no_state_is_believed(whole: Whole, copy: Path) -> None:
    """Catches an exception from the depths, and a run that trains from step -5."""
    path = place(copy, 6)
    body = index_of(path)
    sampler = open_data(whole[0]).sampler
    refused = 0
    for what, extra in tampered(body["extra"]):
        sign(path, {**body, "extra": extra})
        try:
            state = SavedState.read(path)
        except DamagedCheckpoint:
            refused += 1
            continue
        assert (state.step, type(state.updates)) == (6, int), what
        try:
            sampler.restore(state.sampler)
        except HeadraceError:
            refused += 1
    assert refused > 150


def test_a_checkpoint_without_a_weight(copy: Path) -> None:
    """Catches ``whole`` said of a checkpoint that no model can be made of."""
    path = place(copy, 6)
    body = index_of(path)
    name = next(row[0] for row in body["files"][0]["rows"])
    del body["tensors"][name]
    for file in body["files"]:
        file["rows"] = [row for row in file["rows"] if row[0] != name]
    sign(path, body)
    found = Checkpoint(path=path)
    with pytest.raises(CheckpointError, match="got nothing"):
        found.verify()
    with pytest.raises(CheckpointError, match="got nothing"):
        found.export(copy / "hf")
