"""Ranks that die, stop, hang or raise: the others end soon and say who it was."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from headrace.comm.launch import World, join, start
from headrace.comm.status import Beat, Death, StatusBoard
from headrace.comm.watcher import Watcher
from jobs import Job, heard

RunJob = Callable[[Callable[[Job], int]], Job]
RANKS = 3


def reduce_once(world: World, x: torch.Tensor) -> None:
    dist.all_reduce(x)


def ring_once(world: World, x: torch.Tensor) -> None:
    to, since = (world.rank + 1) % world.ranks, (world.rank - 1) % world.ranks
    works = [dist.isend(x, to), dist.irecv(torch.empty_like(x), since)]
    for work in works:
        assert work is not None
        work.wait()


def forever(job: Job, once: Callable[[World, torch.Tensor], None]) -> Callable[[World], int]:
    """Ranks exchange 16 MB again and again: a signal finds them in the middle of a transfer."""

    def main(world: World) -> int:
        x = torch.ones(4 * 2**20)
        world.watcher.enter("1F4[0,1,2]")
        once(world, x)
        heard(world)
        job.note(f"pid{world.rank}", os.getpid())
        while True:
            once(world, x)

    return main


def begun(job: Job) -> list[int]:
    return [int(job.read(f"pid{rank}")) for rank in range(RANKS)]


@pytest.mark.parametrize("once", [reduce_once, ring_once])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank(
    run_job: RunJob, once: Callable[[World, torch.Tensor], None], victim: int
) -> None:
    """Catches survivors that wait for gloo's timeout (ring), that show gloo's text which names
    nobody (all_reduce), or that blame each other."""
    job = run_job(lambda job: start(forever(job, once), ranks=RANKS))
    pids = begun(job)
    time.sleep(0.1)  # at any point of a transfer
    os.kill(pids[victim], signal.SIGKILL)
    began = time.monotonic()
    assert job.wait(5) == 128 + signal.SIGKILL
    print(f"{once.__name__}: all ended {time.monotonic() - began:.2f} s after the kill")
    how = f"rank {victim} was killed by SIGKILL (last heard of in 1F4[0,1,2])"
    assert f"headrace: {how}" in job.said
    for rank in set(range(RANKS)) - {victim}:
        wanted = rf"headrace: rank {rank} stops: {re.escape(how)}; this rank was in 1F4.* for .*s"
        assert [line for line in job.said if re.fullmatch(wanted, line)], job.err
    assert len(job.err.splitlines()) == RANKS
    assert job.left_over() == []


def test_a_stopped_rank(run_job: RunJob) -> None:
    """Catches survivors that wait for the timeout, and the stopped rank left behind."""
    job = run_job(lambda job: start(forever(job, ring_once), ranks=RANKS, hang_s=1.0))
    pids = begun(job)
    time.sleep(0.1)
    os.kill(pids[1], signal.SIGSTOP)
    assert job.wait(8) == 75
    for rank in (0, 2):
        wanted = rf"headrace: rank {rank} stops: rank 1 gave no sign of life for 1(\.\d+)? s "
        wanted += r"\(last heard of in 1F4.*\); this rank was in 1F4.* for .*s"
        assert [line for line in job.said if re.fullmatch(wanted, line)], job.err
    assert job.left_over() == []


def test_no_progress_is_a_deadlock_report(run_job: RunJob) -> None:
    """Catches deadlocks that beat on forever, and a report of the one rank that noticed only."""

    def main(world: World) -> int:
        world.watcher.enter("S4>2" if world.rank else "R4<1", limit_s=0.6 if world.rank else None)
        dist.recv(torch.zeros(1), src=(world.rank + 1) % world.ranks)
        return 0

    job = run_job(lambda job: start(main, ranks=RANKS))
    assert job.wait(5) == 75
    report = [line for line in job.said if "no progress" in line]
    assert len(report) == 1
    wanted = r".*no progress: rank 0 in R4<1 for .*, rank 1 in S4>2 for .*, rank 2 in S4>2 for .*s"
    assert re.fullmatch(wanted, report[0])
    assert sum(", limit 600 ms; this rank was in " in line for line in job.said) == RANKS - 1


def test_a_limit_ends_with_its_action(run_job: RunJob) -> None:
    """Catches a limit that outlives its action, or a clock that enter does not restart."""

    def main(world: World) -> int:
        for _ in range(3):
            world.watcher.enter("short", limit_s=0.8)
            time.sleep(0.3)
        world.watcher.leave()
        time.sleep(0.9)
        return 0

    job = run_job(lambda job: start(main, ranks=1, heartbeat_s=0.05))
    assert job.wait() == 0, job.err


def test_a_broken_connection_nobody_explains(run_job: RunJob) -> None:
    """Catches a rank that waits forever for an explanation, or swallows the only one there is."""

    def main(world: World) -> int:
        if world.rank == 0:
            dist.destroy_process_group()
            time.sleep(30)
        world.watcher.enter("0F1")
        dist.recv(torch.zeros(1), src=0)
        return 0

    job = run_job(lambda job: start(main, ranks=2))
    assert job.wait(8) == 1
    assert re.search(r"rank 0 stops: rank 1 raised RuntimeError: .* \(in 0F1\)", job.err)
    assert "rank 1| Traceback" in job.err


def joined(
    rank: int, port: int, main: Callable[[Job, World], int], hang_s: float
) -> Callable[[Job], int]:
    """One of two ranks, started by variables."""

    def run(job: Job) -> int:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        return join(lambda world: main(job, world), hang_s=hang_s)

    return run


def two_joined(run_job: RunJob, *, hang_s: float = 30.0, talk: bool = True) -> list[Job]:
    """Two ranks that wait for each other, or sleep; no launcher looks after them."""

    def main(job: Job, world: World) -> int:
        world.watcher.enter(f"R{world.rank}")
        dist.barrier()
        heard(world)
        job.note("pid", os.getpid())
        if not talk:
            time.sleep(60)
        dist.recv(torch.zeros(1), src=1 - world.rank)
        return 0

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    jobs = [run_job(joined(rank, port, main, hang_s)) for rank in range(2)]
    for job in jobs:
        job.read("pid")
    return jobs


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_joined_rank_obeys_in_a_wait(run_job: RunJob, number: signal.Signals) -> None:
    """Catches handlers in Python, which do not run while the main thread waits in C++, and a
    silent end under torchrun, whose SIGTERM is all that survivors get."""
    jobs = two_joined(run_job)
    os.kill(jobs[1].pid, number)
    assert jobs[1].wait(3) == 128 + number
    wanted = rf"headrace: rank 1 stops: {number.name}; this rank was in R1 for .*s; "
    assert re.fullmatch(wanted + "rank 0 last heard of .*\n", jobs[1].err), jobs[1].err


def test_the_store_is_gone(run_job: RunJob) -> None:
    """Catches ranks that go on as orphans when the keeper of the store is killed."""
    jobs = two_joined(run_job)
    os.kill(jobs[0].pid, signal.SIGKILL)
    assert jobs[1].wait(5) == 75
    assert "rank 1 stops: the store is gone" in jobs[1].err
    assert "this rank was in R1 for" in jobs[1].err


def test_a_store_that_does_not_answer(run_job: RunJob) -> None:
    """Would catch a watcher that waits for ever for its store, hears nothing and says nothing."""
    jobs = two_joined(run_job, hang_s=1.0)
    os.kill(jobs[0].pid, signal.SIGSTOP)
    assert jobs[1].wait(5) == 75
    wanted = (
        r"headrace: rank 1 stops: cut off from the store for 1(\.\d+)? s; this rank was in R1 .*"
    )
    assert re.fullmatch(wanted, jobs[1].said[0]), jobs[1].err


def test_a_dead_rank_is_not_a_slow_one(run_job: RunJob) -> None:
    """Would catch a rank killed on another machine that is missed only after the time that a busy
    one may be silent for."""
    jobs = two_joined(run_job, talk=False)
    os.kill(jobs[1].pid, signal.SIGKILL)
    assert jobs[0].wait(3) == 75
    wanted = "headrace: rank 0 stops: rank 1 ended without a word (last heard of in R1); this rank"
    assert jobs[0].said[0].startswith(wanted), jobs[0].err


def test_the_first_death_counts() -> None:
    """Catches a later failure, mostly a consequence, that replaces the cause."""
    board = StatusBoard(dist.HashStore())
    assert board.death() is None
    first = Death(rank=2, how="was killed by SIGKILL", code=137)
    assert board.declare(first) == first
    assert board.declare(Death(rank=0, how="raised RuntimeError", already_told=True)) == first
    assert board.death() == first
    assert str(first) == "rank 2 was killed by SIGKILL"


def test_attempts_do_not_see_each_other() -> None:
    """Catches a restarted job that dies of the death of the attempt before."""
    store = dist.HashStore()
    StatusBoard.of_attempt(store, 0).declare(Death(rank=0, how="left"))
    StatusBoard.of_attempt(store, 0).put(0, Beat(count=9, action="old", seconds=1))
    after = StatusBoard.of_attempt(store, 1)
    assert after.death() is None
    assert after.everyone(1) == "rank 0 not started"


def test_everyone_is_in_the_report() -> None:
    """Catches ranks that are left out because they have not begun, or have finished."""
    board = StatusBoard(dist.HashStore())
    board.put(0, Beat(count=1, action="1F4", seconds=61))
    board.put(1, Beat(count=5, action="", seconds=0.25))
    board.put(2, Beat(count=7, action="the end", seconds=3, left=True))
    assert board.everyone(4) == (
        "rank 0 in 1F4 for 61 s, rank 1 between actions for 250 ms, rank 2 already done, "
        "rank 3 not started"
    )


@pytest.mark.parametrize("order", [(2, 0, 1), (0, 1, 2), (2, 1, 0)])
def test_the_lowest_rank_that_raised(order: tuple[int, ...]) -> None:
    """Catches an answer that depends on who came first."""
    board = StatusBoard(dist.HashStore())
    for rank in order:
        board.note_raised(rank)
    assert (board.raised(), board.lowest_raised()) == (3, 0)


def test_entering_costs_no_traffic() -> None:
    """Catches a store round trip per action, which would be paid in every layer."""

    class Counting(StatusBoard):
        def put(self, rank: int, beat: Beat) -> None:
            beats.append(beat)

    beats: list[Beat] = []
    watcher = Watcher(Counting(dist.HashStore()), rank=0, ranks=1, heartbeat_s=60)
    watcher.start()
    began = time.process_time()
    for number in range(10_000):
        watcher.enter(f"1F{number}")
        watcher.leave()
    seconds = time.process_time() - began
    assert len(beats) == 1
    assert seconds < 3  # 20,000 calls
    watcher.close()
    assert [beat.left for beat in beats] == [False, True]
