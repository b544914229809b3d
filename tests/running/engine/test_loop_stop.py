"""Signals to a loop of one's own: it ends after a step, with a checkpoint, on all ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from running.engine.loops import attached, costs, dataset, llama
from spread import whole

pytest.importorskip("transformers")


def looped(folder: Path, name: str, number: int | None, rank: int) -> tuple[Any, list[float], int]:
    """(What the loop raised, its losses, its next step), where ``rank`` gets a signal in step 2."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ranks = dist.get_world_size()
    run = attached(model, optimizer, dataset(), folder, steps=6, costs=costs(ranks))
    found, raised = list[float](), None
    run.load(folder / name)
    try:
        with run.stoppable(folder / name):
            for step in run:
                for at, micro in enumerate(step):
                    if number is not None and step.number == 2 and at == 0 and run.rank == rank:
                        os.kill(os.getpid(), number)
                        time.sleep(1.0)  # for the others to hear of it
                    micro.backward(model(**micro.inputs).loss)
                found.append(step.loss)
    except (KeyboardInterrupt, SystemExit) as error:
        raised = type(error).__name__, error.args
    run.detach()
    return raised, found, run.number


@pytest.mark.parametrize(
    ("ranks", "number", "rank"),
    [
        (1, signal.SIGINT, 0),
        (2, signal.SIGTERM, 1),
        whole(2, signal.SIGUSR1, 0),
        whole(4, signal.SIGHUP, 2),
    ],
)
def test_a_signal_ends_the_loop_after_its_step(
    ranks: int, number: int, rank: int, tmp_path: Path
) -> None:
    """Catches a signal that only one rank hears, ranks that stop after different steps, steps that
    are lost or taken twice, and an end that looks like a good one."""
    stopped = run_ranks(ranks, looped, tmp_path, "cut", number, rank, timeout_s=90)
    wanted = (
        ("KeyboardInterrupt", ()) if number == signal.SIGINT else ("SystemExit", (128 + number,))
    )
    assert {how for how, _, _ in stopped} == {wanted}
    (at,) = {at for _, _, at in stopped}
    assert 3 <= at < 6
    rest = run_ranks(ranks, looped, tmp_path, "cut", None, 0, timeout_s=90)
    plain = run_ranks(ranks, looped, tmp_path, "plain", None, 0, timeout_s=90)
    for (_, before, _), (none, after, end), (_, losses, _) in zip(
        stopped, rest, plain, strict=True
    ):
        assert none is None
        assert end == 6
        assert before + after == losses


SCRIPT = """
import sys; sys.path[:0] = {paths!r}
import time, torch
from pathlib import Path
from running.engine.loops import attached, costs, dataset, llama
folder = Path({folder!r})
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = attached(model, optimizer, dataset(), folder, steps=9, costs=costs(1), say=print)
with run.stoppable(folder / "saved", grace_s={grace}):
    for step in run:
        for micro in step:
            if step.number == 1:
                (folder / "there").touch()
                time.sleep({sleep})
            micro.backward(model(**micro.inputs).loss)
print("the loop has ended")
"""


@pytest.mark.parametrize("how", ["in order", whole("twice"), whole("too late")])
def test_a_last_line_is_true(how: str, tmp_path: Path) -> None:
    """Catches a process that goes on after a second signal or its grace, a last line that promises
    what was not written, and code behind the loop that runs after a signal."""
    grace, sleep = {"in order": (25, 0.5), "twice": (25, 20), "too late": (0.5, 20)}[how]
    script = SCRIPT.format(
        paths=[p for p in sys.path if p], folder=str(tmp_path), grace=grace, sleep=sleep
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "there").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    if how == "twice":
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=15)
    assert process.returncode == 128 + signal.SIGTERM
    assert "the loop has ended" not in out
    assert "stopped by SIGTERM: the step under way is ended and a checkpoint written" in err
    saved = sorted(path.name for path in (tmp_path / "saved").glob("step-*"))
    if how == "in order":
        (line,) = [line for line in out.splitlines() if line.startswith("stopped after")]
        assert line == (
            f"stopped after step 2; checkpoint {tmp_path}/saved/step-000002; "
            f"continue with run.load('{tmp_path}/saved')"
        )
        assert saved == ["step-000002"]
    else:
        why = (
            "a second signal, SIGTERM" if how == "twice" else "not stopped within 500 ms of SIGTERM"
        )
        assert f"rank 0 stops: {why}; this rank was in step 1" in err
        assert not saved
