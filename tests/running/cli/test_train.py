"""``headrace train`` as a user runs it: to the end, killed, interrupted, resumed."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import spread
from headrace.comm.watcher import Watcher
from headrace.engine.training_run import TrainingRun
from headrace.native import checkpoint
from running.cli.jobs import children, losses, metrics, run, start, wait_for_step, write_job


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run: its configuration and folder."""
    folder = tmp_path_factory.mktemp("whole")
    config = write_job(folder)
    code, out, err = run("train", config, "--out", folder / "run")
    assert code == 0, err
    assert out.strip() == str(folder / "run")
    return config, folder / "run", err


def test_a_run_trains_and_says_so(whole):
    """Would catch a loop that does not learn, a lost journal, a silent skip of bad files."""
    _, folder, err = whole
    values = losses(folder)
    assert len(values) == 10
    assert values[-1] < values[0] - 0.5
    assert "(1 skipped)" in err
    assert "bad.txt" in err
    assert "step 10/10" in err
    rows = metrics(folder)
    for row in rows:
        assert row["lower_bound_s"] <= row["predicted_s"] * (1 + 1e-9)
        assert row["tokens"] <= 1500
        assert 0 <= row["idle"] < 1
    assert (folder / "checkpoints" / "step-000010" / "index.json").exists()
    facts = json.loads((folder / "run.json").read_text())
    assert facts["ranks"] == 2
    assert facts["costs"]["points"]


def test_a_planner_of_others_trains_alike(whole, tmp_path):
    """Catches a planner that plans in a table only: layers by Algorithm 1 train to the losses of
    the run's own plans."""
    config, folder, _ = whole
    changes = ("--set", "planner.name=paradyse")
    code, _, err = run("train", config, "--out", tmp_path / "run", *changes)
    assert code == 0, err
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(folder), rtol=1e-4)
    lines = (tmp_path / "run" / "plans.jsonl").read_text().splitlines()
    assert len(lines) == len(losses(folder))
    assert all('"paradyse"' in line for line in lines)


def test_a_killed_run_resumes_to_the_same_bits(whole, tmp_path):
    """Would catch state outside the checkpoint: sampler, optimizer, schedule, costs."""
    config, folder, _ = whole
    copy = tmp_path / "killed"
    process = start("train", config, "--out", copy, "--set", "run.steps=10")
    wait_for_step(process, copy, 5)
    victim = children(process)[1]
    began = time.monotonic()
    victim.send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - began < 15
    assert process.returncode == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in err
    assert "Traceback" not in err
    code, _, err = run("train", config, "--out", copy, "--resume")
    assert code == 0, err
    assert "continuing from" in err
    assert losses(copy) == losses(folder)


def test_another_number_of_ranks_goes_on_with_the_same_samples(whole, tmp_path):
    """Would catch an order of samples, or a checkpoint, that depends on the ranks."""
    config, folder, _ = whole
    copy = tmp_path / "other"
    less = ["--set", "planner.recompute=['none']"]  # a profile of all levels takes long
    code, _, err = run(
        "train",
        config,
        "--out",
        copy,
        "--set",
        "run.steps=10",
        "--ranks",
        "1",
        "--set",
        "checkpoint.every=6",
        *less,
    )
    assert code == 0, err
    (copy / "checkpoints" / "step-000010" / "index.json").unlink()
    less += ["--set", "planner.group_sizes=[3]"]
    code, _, err = run("train", config, "--out", copy, "--resume", "--ranks", "3", *less)
    assert code == 0, err
    assert "saved by 1 rank" in err
    np.testing.assert_allclose(losses(copy), losses(folder), rtol=2e-5)
    assert _samples(copy) == _samples(folder)
    assert len({row["step"] for row in metrics(copy) if len(row["peak_bytes"]) == 3}) == 4


def _stopped(err, folder, again):
    """The step after which a run says that it stopped, with a checkpoint of it."""
    found = re.search(r"after step (\d+); checkpoint (.+); continue with: (.+)", err)
    assert found, err
    step = int(found[1])
    assert found[2] == str(folder / "checkpoints" / f"step-{step:06d}")
    assert found[3] == f"headrace train {again} --out {shlex.quote(str(folder))} --resume"
    assert (folder / "checkpoints" / f"step-{step:06d}" / "index.json").exists()
    assert len(metrics(folder)) == step
    return step


def test_control_c_keeps_what_was_trained(whole, tmp_path):
    """Would catch ranks that outlive their launcher, an exit code scripts misread, steps that are
    lost, ranks that stop after different steps, and a run that goes on with other samples."""
    config, _, _ = whole
    copy, more = tmp_path / "run", ("--set", "checkpoint.every=0", "--set", "run.steps=100")
    process = start("train", config, "--out", copy, *more)
    wait_for_step(process, copy, 2)
    ranks = children(process)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "a second signal ends all at once" in err
    assert "Traceback" not in err
    assert not any(rank.is_running() and rank.status() != "zombie" for rank in ranks)
    step = _stopped(err, copy, " ".join([str(config), *more]))
    assert 3 <= step < 100
    code, _, err = run("train", config, "--out", copy, "--resume", *more)
    assert code == 0, err
    assert f"step-{step:06d}, saved by 2 ranks" in err
    code, _, err = run("train", config, "--out", tmp_path / "whole", *more)
    assert code == 0, err
    assert losses(copy) == losses(tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, spread.whole(signal.SIGHUP)])
def test_other_signals_keep_it_too(whole, tmp_path, number):
    """Would catch runs that a scheduler or a closed terminal ends without a checkpoint, and a
    command to go on with that lacks a flag or that a shell reads otherwise."""
    config, folder = whole[0], tmp_path / "my run"
    given = ("--ranks", "2", "--steps", "2000", "--set", "run.seed=3")
    process = start("train", config, "--out", folder, *given)
    wait_for_step(process, folder, 2)
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert f"stopped by {number.name}: rank 0 in" in err
    _stopped(err, folder, " ".join([str(config), *given]))


@pytest.mark.parametrize("how", ["twice", "no grace", "too late"])
def test_a_run_that_may_not_end_its_step_ends_all_the_same(whole, tmp_path, how):
    """Would catch a second signal, a grace of 0 or the end of a grace that is waited beyond, and a
    last line that promises what was not written."""
    config, _, _ = whole
    grace = {"twice": 25, "no grace": 0, "too late": 0.5}[how]
    sets = ("--set", "run.steps=2000", "--set", "checkpoint.every=0")
    sets += ("--set", f"checkpoint.grace_s={grace}")
    process = start("train", config, "--out", tmp_path / "run", *sets)
    wait_for_step(process, tmp_path / "run", 2)
    if how != "no grace":
        children(process)[1].send_signal(signal.SIGSTOP)  # its step will not end
    os.kill(process.pid, signal.SIGTERM)
    if how == "twice":
        time.sleep(0.5)
        os.kill(process.pid, signal.SIGTERM)
    began = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - began < 10
    assert process.returncode == 143
    assert re.search(r"stopped after step \d+; no checkpoint was written; continue with", err), err
    assert ("not stopped within 500 ms: rank 0" in err) == (how == "too late")


def test_a_stopped_rank_is_named(whole, tmp_path):
    """Would catch a hang that says nothing until a collective's timeout of half an hour."""
    config, _, _ = whole
    process = start(
        "train",
        config,
        "--out",
        tmp_path / "run",
        "--set",
        "run.steps=2000",
        "--set",
        "devices.hang_s=2",
    )
    wait_for_step(process, tmp_path / "run", 2)
    victim = children(process)[1]
    began = time.monotonic()
    victim.send_signal(signal.SIGSTOP)
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - began < 15
    assert process.returncode not in (0, None)
    assert "rank 1" in err
    assert "no sign of life" in err


def test_a_run_keeps_others_out_of_its_folder(whole, tmp_path):
    """Would catch a second run that goes on with the first one's folder and kills it."""
    config, _, _ = whole
    process = start("train", config, "--out", tmp_path / "run", "--set", "run.steps=2000")
    wait_for_step(process, tmp_path / "run", 2)
    code, _, err = run("train", config, "--out", tmp_path / "run", "--resume")
    assert code == 2
    assert "got a run that goes on (process " in err
    steps = len(metrics(tmp_path / "run"))
    wait_for_step(process, tmp_path / "run", steps + 3)
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130


def test_a_report_that_takes_long_keeps_nobody_waiting(whole, tmp_path, monkeypatch):
    """Would catch a finished run that is taken for a hung one while its report is drawn, and ranks
    of which nobody knows what they do between two steps."""
    config, _, _ = whole
    enter = Watcher.enter

    def entering(self, action, limit_s=None):
        with (tmp_path / "entered").open("a") as file:
            file.write(action + "\n")
        enter(self, action, limit_s)

    def draw(run):
        ctypes.PyDLL(None).usleep(4_000_000)  # and holds Python's lock
        return run.folder / "report.html"

    monkeypatch.setattr(Watcher, "enter", entering)
    monkeypatch.setattr(TrainingRun, "report", draw)
    code, out, err = run(
        "train",
        config,
        "--out",
        tmp_path / "run",
        "--set",
        "run.steps=1",
        "--set",
        "devices.hang_s=2",
        "--set",
        "report.html=true",
    )
    assert code == 0, err
    assert out.strip() == str(tmp_path / "run" / "report.html")
    entered = (tmp_path / "entered").read_text().splitlines()
    assert {
        "reading and tokenising the corpus",
        "making the weights",
        "reading and planning the batch of step 0",
        "writing down step 0",
        "writing checkpoint 1",
    } <= set(entered)


def _samples(folder):
    rows = [json.loads(line) for line in (folder / "plans.jsonl").read_text().splitlines()]
    return [row["lengths"]["ids"] for row in rows]


BAD = {
    "unknown key": (["--set", "run.stepz=3"], "did you mean 'steps'"),
    "wrong type": (["--set", "model.layers=many"], "model.layers"),
    "missing data": (["--set", 'data.paths=["nowhere"]'], "nowhere"),
    "no sequence fits": (["--set", "devices.memory=64KiB"], "does not fit"),
    "a run is there": ([], "--resume"),
    "static without size": (["--set", "planner.name=static"], "static_size"),
    "refused length": (["--set", "data.too_long=refuse", "--set", "data.context=16"], "tokens"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_message(case, whole, tmp_path):
    """Would catch a traceback, or a message that does not name what is wrong."""
    config, folder, _ = whole
    changes, wanted = BAD[case]
    out = folder if case == "a run is there" else tmp_path / "run"
    code, _, err = run("train", config, "--out", out, *changes)
    assert code == 2, err
    assert wanted in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_torchrun_starts_and_resumes(whole, tmp_path):
    """Would catch ranks of torchrun that name folders of their own, or losses of other plans."""
    config, folder, _ = whole
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "headrace", "train", str(config)]
    command += ["--out", str(tmp_path / "run")]
    for more in ([], ["--resume"]):
        done = subprocess.run(
            [*command, *more], capture_output=True, text=True, timeout=90, check=False
        )
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == losses(folder)
    assert "raise run.steps" in done.stderr


def _under_torchrun(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "headrace", "train", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, pipesize=1 << 20
    )


def _wait_for_step(process: subprocess.Popen[str], folder: Path) -> None:
    deadline = time.monotonic() + 60
    while len(metrics(folder)) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline, "too slow"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "who"),
    [
        (signal.SIGTERM, "torchrun"),
        spread.whole(signal.SIGINT, "torchrun"),
        spread.whole(signal.SIGHUP, "torchrun"),
        spread.whole(signal.SIGUSR1, "rank 1"),
    ],
)
def test_signals_under_torchrun_keep_what_was_trained(whole, tmp_path, number, who):
    """Would catch ranks of torchrun that end without a checkpoint, that stop after different steps,
    or of which only the one that heard the signal stops, several last lines, and one that begins
    other ranks."""
    config, folder = whole[0], tmp_path / "run"
    more = ("--set", "checkpoint.every=0", "--set", "run.steps=2000")
    process = _under_torchrun(config, "--out", folder, *more)
    _wait_for_step(process, folder)
    ranks = children(process)[:2]
    heard = process.pid if who == "torchrun" else ranks[1].pid
    os.kill(heard, number)
    _, err = process.communicate(timeout=40)
    assert process.returncode != 0
    assert err.count("a second signal ends all at once") == 1
    assert f"stopped by {number.name}: rank 0 in" in err
    found = re.findall(r"after step (\d+); checkpoint (.+); continue with: (.+)", err)
    assert len(found) == 1, err
    step = int(found[0][0])
    assert (folder / "checkpoints" / f"step-{step:06d}" / "index.json").exists()
    assert len(metrics(folder)) == step
    again = ["torchrun", "--nproc-per-node", "2", "-m", "headrace", "train", str(config), *more]
    assert found[0][2] == f"{' '.join(again)} --out {folder} --resume"
    assert not any(rank.is_running() and rank.status() != "zombie" for rank in ranks)


@pytest.mark.slow
def test_a_rank_of_torchrun_that_cannot_stop_ends_after_the_grace(whole, tmp_path):
    """Would catch a signal that waits for ever for a rank that is stopped."""
    folder = tmp_path / "run"
    more = ("--set", "run.steps=2000", "--set", "checkpoint.grace_s=1")
    process = _under_torchrun(whole[0], "--out", folder, *more)
    _wait_for_step(process, folder)
    first, frozen = children(process)[:2]
    frozen.send_signal(signal.SIGSTOP)
    os.kill(process.pid, signal.SIGTERM)
    _, running = psutil.wait_procs([first], timeout=20)
    assert not running
    frozen.send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=40)
    assert "rank 0 stops: not stopped within 1 s of SIGTERM" in err


OTHER = {
    "gpt, dropout, json lines": "model.kind=gpt model.kv_heads=4 model.dropout=0.1 "
    "data.kind=jsonl data.paths=['d.jsonl'] data.patterns=[]",
    "bert, dropout": "model.kind=bert model.kv_heads=4 model.dropout=0.1",
    "fasta, curriculum, sharded": "data.kind=fasta data.paths=['g.fa'] data.patterns=[] "
    "data.tokenizer=kmer:3 data.curriculum=short-to-long data.curriculum_steps=3 "
    "planner.working=sharded",
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.long if "gpt" in case else pytest.mark.slow)
        for case in OTHER
    ],
)
def test_other_models_and_data_train(case, tmp_path):
    """Would catch a kind of data, model or plan that works alone but not in a run."""
    config = write_job(tmp_path, steps=3)
    lines = [json.dumps({"text": "abc " * n}) for n in range(5, 60)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    (tmp_path / "g.fa").write_text("".join(f">r{n}\n{'ACGTTGCA' * n}\n" for n in range(3, 40)))
    few = (
        "planner.candidates=['ulysses_z','megatron_cz']",
        "planner.group_sizes=[3]",
        "planner.recompute=['none']",
    )  # a profile of all takes long
    changes = [word for change in (*OTHER[case].split(), *few) for word in ("--set", change)]
    code, _, err = run("train", config, "--out", tmp_path / "run", "--ranks", "3", *changes)
    assert code == 0, err
    assert np.isfinite(losses(tmp_path / "run")).all()
    assert len(losses(tmp_path / "run")) == 3


@pytest.mark.slow
def test_half_precision_trains_and_resumes(tmp_path):
    """Would catch sums, masters or moments kept in bfloat16 or saved so: small updates are lost
    and a resumed run goes on with other weights."""
    config = write_job(tmp_path, steps=5)
    changes = [
        "--set",
        "devices.dtype=bfloat16",
        "--set",
        "checkpoint.every=3",
        "--set",
        "planner.candidates=['megatron_cz']",
        "--set",
        "planner.recompute=['none']",
    ]
    code, _, err = run("train", config, "--out", tmp_path / "half", *changes)
    assert code == 0, err
    values = losses(tmp_path / "half")
    assert np.isfinite(values).all()
    assert values[-1] < values[0]
    checkpoints = tmp_path / "half" / "checkpoints"
    held = checkpoint.read_all(checkpoints / "step-000005")
    assert {t.dtype for t in held.values()} == {torch.float32}
    rounded = [n for n, t in held.items() if torch.equal(t.bfloat16().float(), t)]
    assert not [name for name in rounded if held[name].unique().numel() > 1]
    shutil.rmtree(checkpoints / "step-000005")
    code, _, err = run("train", config, "--out", tmp_path / "half", *changes, "--resume")
    assert code == 0, err
    assert "step-000003" in err
    assert losses(tmp_path / "half") == values
