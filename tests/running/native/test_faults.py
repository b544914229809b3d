"""A rank that is killed or stopped in any action of a step: the others end soon and say where."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest

from headrace.comm.launch import World, start
from headrace.comm.mesh import Groups
from headrace.native.executor import Executor
from headrace.native.storage import Storage
from headrace.spec import Architecture
from jobs import Job, heard
from spread import whole
from strategies import laid_out

RunJob = Callable[[Callable[[Job], int]], Job]
LLAMA = Architecture(layers=3, hidden=32, heads=4, kv_heads=2, ffn=48, vocabulary=61)
LENGTHS = (37, 3, 20, 11, 1, 29, 8, 2, 17)
HANG_S = 2.5
# Ranks 0 and 1 are two stages, 2 and 3 a tensor block.
WHERE = {
    "pull": (2, "P1"),
    "send": (0, "Sa0>1*"),
    "exchange": (1, "X(Sg0>0*"),
    "receive": (1, "Ra0<0*"),
    "forward": (3, "0F"),
    "backward": (0, "0B0[0]"),
    "push": (1, "G1"),
    "update": (3, "U"),
}


def _main(job: Job, victim: int, where: str, number: signal.Signals) -> Callable[[World], int]:
    """Steps of a strategy; in the second the victim sends itself a signal at its action."""

    def main(world: World) -> int:
        groups = Groups(connections=world.rerendezvous.connections)
        storage = Storage(LLAMA, groups, seed=3)
        at = {"step": 0}

        def entered(action: str) -> None:
            world.watcher.enter(action)
            if at["step"] == 1 and world.rank == victim and action.startswith(where):
                heard(world)
                job.note("struck", time.monotonic())
                os.kill(os.getpid(), number)

        executor = Executor(storage, groups, seed=3, entered=entered)
        plan = laid_out("1*pp2 + 1*tp2", LLAMA, LENGTHS, 4)
        rng = np.random.default_rng(0)
        documents = tuple(rng.integers(61, size=n).astype(np.int32) for n in LENGTHS)
        for step in range(3):
            at["step"] = step
            executor.run(plan, documents, step=step, lr=0.01)
        return 0

    return main


def _struck(run_job: RunJob, name: str, number: signal.Signals) -> Job:
    victim, where = WHERE[name]
    job = run_job(
        lambda job: start(_main(job, victim, where, number), ranks=4, hang_s=HANG_S, timeout_s=60)
    )
    began = float(job.read("struck"))
    job.until(
        lambda: all(_said(job, rank) for rank in {0, 1, 2, 3} - {victim}),
        "the last words of all survivors",
        5.0,
    )
    assert time.monotonic() - began < 15.0
    return job


def _said(job: Job, rank: int) -> bool:
    return any(line.startswith(f"headrace: rank {rank} stops: ") for line in job.said)


@pytest.mark.parametrize(
    "name", [whole(name) if name in ("send", "receive", "backward") else name for name in WHERE]
)
def test_a_rank_killed_in_any_action_is_named(run_job: RunJob, name: str) -> None:
    """Would catch survivors that wait in a message for a rank that is gone, and a report that does
    not name the rank or its action."""
    victim, where = WHERE[name]
    job = _struck(run_job, name, signal.SIGKILL)
    assert job.wait(5) == 128 + signal.SIGKILL
    how = rf"rank {victim} was killed by SIGKILL \(last heard of in {re.escape(where)}"
    assert len(re.findall(rf"rank \d stops: {how}", job.err)) == 3, job.err
    assert job.left_over() == []


@pytest.mark.parametrize("name", ["exchange", whole("update")])
def test_a_rank_stopped_in_an_action_is_named(run_job: RunJob, name: str) -> None:
    """Would catch survivors that wait for the timeout of a collective, and a stopped rank that is
    left behind."""
    victim, where = WHERE[name]
    job = _struck(run_job, name, signal.SIGSTOP)
    job.wait(8)
    silent = rf"rank {victim} gave no sign of life .*\(last heard of in {re.escape(where)}"
    assert len(re.findall(rf"rank \d stops: {silent}", job.err)) == 3, job.err
    assert job.left_over() == []
