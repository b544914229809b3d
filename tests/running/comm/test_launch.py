"""Starting and ending ranks: codes, signals, ports, torchrun's variables."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headrace.comm import gpus, launch, ranks
from headrace.comm.gpus import VARIABLES, begin_gpu, count_gpus, forks_fail, gpu_of
from headrace.comm.launch import World, join, lone_rank, start
from headrace.comm.ranks import RankPlace
from headrace.comm.variables import ranks_here, sees_own_gpus, under_torchrun
from headrace.errors import ConfigError, LaunchError
from jobs import Job, heard
from spread import whole

RunJob = Callable[[Callable[[Job], int]], Job]


def total(world: World) -> float:
    x = torch.full((3,), float(world.rank + 1))
    dist.all_reduce(x)
    return x[0].item()


def blocked(world: World) -> int:
    """Wait in C++ for a message that never comes."""
    dist.recv(torch.zeros(1), src=(world.rank + 1) % world.ranks)
    return 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def set_variables(rank: int, ranks: int, port: int) -> None:
    """What a launcher without an agent sets."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_meet_soon_and_know_their_place(run_job: RunJob, ranks: int) -> None:
    """Catches ranks numbered wrongly, a world of one left uninitialised, threads not set, and a
    start that imports again."""

    def body(job: Job) -> int:
        began = time.monotonic()

        def main(world: World) -> int:
            seconds = time.monotonic() - began
            facts = (world.rank, world.ranks, world.local_rank, world.local_ranks, world.attempt)
            facts += (world.device, world.timeout_s, torch.get_num_threads(), dist.get_rank())
            job.note(f"facts{world.rank}", (facts, total(world)))
            job.note(f"ready{world.rank}", seconds)
            return 0

        return start(main, ranks=ranks, threads=2, timeout_s=77)

    job = run_job(body)
    assert job.wait() == 0, job.err
    for rank in range(ranks):
        expected = ((rank, ranks, rank, ranks, 0, "cpu", 77, 2, rank), ranks * (ranks + 1) / 2)
        assert job.read(f"facts{rank}") == str(expected)
        assert float(job.read(f"ready{rank}")) < 10
    print(f"{ranks} ranks ready after {job.read('ready0')} s")
    assert job.err == ""


def leave(world: World) -> int:
    return 7 if world.rank == 1 else blocked(world)


def leave_by_exit(world: World) -> int:
    return sys.exit(3) if world.rank == 1 else blocked(world)


def leave_without_a_word(world: World) -> int:
    return os._exit(0) if world.rank == 1 else blocked(world)


def end_by_signal(world: World) -> int:
    return signal.raise_signal(signal.SIGUSR1) or 0 if world.rank == 1 else blocked(world)


@pytest.mark.parametrize(
    ("main", "code", "said"),
    [
        (leave, 7, "rank 1 left with code 7 (between actions)"),
        (leave_by_exit, 3, "rank 1 left with code 3 (between actions)"),
        (leave_without_a_word, 1, "rank 1 left before its end (last heard of"),
        (end_by_signal, 138, "rank 1 was killed by SIGUSR1 (last heard of"),
    ],
)
def test_the_first_failure_decides_the_code(
    run_job: RunJob, main: Callable[[World], int], code: int, said: str
) -> None:
    """Catches the survivors' code 75 or torchrun's 1 given as the job's, and silent ends."""
    job = run_job(lambda job: start(main, ranks=3))
    assert job.wait() == code
    assert f"rank 0 stops: {said}" in job.err
    assert f"rank 2 stops: {said}" in job.err
    assert job.left_over() == []


def test_output_is_complete(run_job: RunJob) -> None:
    """Catches buffered lines that are lost when ranks end by os._exit, or doubled by fork."""

    def main(world: World) -> int:
        print(f"rank {world.rank} was here")
        return 1 if world.rank == 1 else blocked(world)

    def body(job: Job) -> int:
        sys.stdout = os.fdopen(1, "w", closefd=False)  # a file: Python buffers it
        print("before the fork")
        return start(main, ranks=2)

    job = run_job(body)
    assert job.wait() == 1
    assert sorted(job.out.splitlines()) == ["before the fork", "rank 0 was here", "rank 1 was here"]


@pytest.mark.parametrize(
    ("raising", "text"), [((0, 1, 2), ""), ((1, 2), "rank 1: "), ((2,), "rank 2: ")]
)
def test_our_own_error_is_told_once(run_job: RunJob, raising: tuple[int, ...], text: str) -> None:
    """Catches the text once per rank, a traceback, and peers that hang or chatter."""

    def main(world: World) -> int:
        if world.rank in raising:
            raise ConfigError("layers", got=0, wanted="at least 1")
        return blocked(world)

    job = run_job(lambda job: start(main, ranks=3))
    assert job.wait() == 2
    assert job.err == f"headrace: {text}layers: got 0, wanted at least 1\n"


def test_another_error_has_its_traceback_once(run_job: RunJob) -> None:
    """Catches tracebacks of every rank, lines that do not say whose they are, or a lost cause."""

    def main(world: World) -> int:
        world.watcher.enter("1F4")
        if world.rank == 1:
            raise ValueError("wrong shape")
        return blocked(world)

    job = run_job(lambda job: start(main, ranks=2))
    assert job.wait() == 1
    assert job.err.count("Traceback") == 1
    assert "rank 1| ValueError: wrong shape\n" in job.err
    (line,) = job.said
    assert line.startswith(
        "headrace: rank 0 stops: rank 1 raised ValueError: wrong shape (in 1F4); this rank was in"
    )


def note_and_block(job: Job) -> Callable[[World], int]:
    """One rank waits in C++, the other in Python."""

    def main(world: World) -> int:
        world.watcher.enter("0F3")
        dist.barrier()
        heard(world)
        job.note(f"pid{world.rank}", os.getpid())
        if world.rank:
            time.sleep(60)
        return blocked(world)

    return main


@pytest.mark.parametrize(
    ("number", "group", "code"),
    [
        (signal.SIGINT, True, 130),
        (signal.SIGTERM, False, 143),
        (signal.SIGTERM, True, 143),
        (signal.SIGHUP, True, 129),
        (signal.SIGUSR1, False, 138),
    ],
)
def test_a_signal_ends_all(run_job: RunJob, number: signal.Signals, group: bool, code: int) -> None:
    """Catches orphans, tracebacks of KeyboardInterrupt, and a wrong code; SIGINT goes to the whole
    group, as from a terminal."""
    job = run_job(lambda job: start(note_and_block(job), ranks=2))
    job.read("pid0"), job.read("pid1")
    (os.killpg if group else os.kill)(job.pid, number)
    assert job.wait(5) == code
    assert job.left_over() == []
    assert "Traceback" not in job.err
    if number != signal.SIGTERM:  # which may end the ranks before they are asked where they are
        assert job.err.startswith(f"headrace: stopped by {number.name}: rank 0 in 0F3 for ")
        assert "rank 1 in 0F3 for " in job.err


def test_nohup_is_respected(run_job: RunJob) -> None:
    """Would catch a run that was to outlive its terminal and does not."""

    def body(job: Job) -> int:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return start(lambda world: job.note("on") or time.sleep(0.5) or 0, ranks=1)

    job = run_job(body)
    job.read("on")
    os.killpg(job.pid, signal.SIGHUP)
    assert job.wait(5) == 0, job.err


def test_ranks_deaf_to_sigterm_are_killed(run_job: RunJob) -> None:
    """Catches a launcher that kills without asking, or waits forever for a rank that does not
    obey."""

    def body(job: Job) -> int:
        def main(world: World) -> int:
            signal.signal(signal.SIGTERM, lambda *_: job.note(f"asked{world.rank}"))
            return note_and_block(job)(world)

        return start(main, ranks=2)

    job = run_job(body)
    job.read("pid0"), job.read("pid1")
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait(6) == 143
    job.read("asked1", 0.1)
    assert job.left_over() == []


def test_ranks_die_with_a_killed_launcher(run_job: RunJob) -> None:
    """Catches orphans that go on after kill -9 of the launcher, even one that was stopped and so
    cannot notice that the store is gone."""
    job = run_job(lambda job: start(note_and_block(job), ranks=2))
    job.read("pid0")
    os.kill(int(job.read("pid1")), signal.SIGSTOP)
    os.kill(job.pid, signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    job.until(lambda: not job.left_over(), "end of the ranks", 3)


def test_a_stopped_and_continued_job_goes_on(run_job: RunJob) -> None:
    """Catches watchers that count their own sleep (Ctrl-Z, fg) as somebody's silence."""

    def body(job: Job) -> int:
        def main(world: World) -> int:
            world.watcher.enter("nap", limit_s=1.8)
            dist.barrier()
            job.note(f"pid{world.rank}", os.getpid())
            job.read("go")
            dist.barrier()
            return 0

        return start(main, ranks=2, hang_s=1.3, heartbeat_s=0.1)

    job = run_job(body)
    job.read("pid0"), job.read("pid1")
    os.killpg(job.pid, signal.SIGSTOP)
    time.sleep(2)
    os.killpg(job.pid, signal.SIGCONT)
    time.sleep(0.5)
    job.note("go")
    assert job.wait() == 0, job.err


def test_a_rank_may_finish_early(run_job: RunJob) -> None:
    """Catches a finished rank that goes and is taken for a dead one."""

    def main(world: World) -> int:
        if world.rank != 1:
            time.sleep(2)
        return 0

    job = run_job(lambda job: start(main, ranks=3, hang_s=1.2, heartbeat_s=0.1))
    assert job.wait() == 0, job.err
    assert job.err == ""


def test_a_launcher_that_fails_leaves_nothing(run_job: RunJob) -> None:
    """Catches ranks left behind when the launcher itself meets an error after the fork."""

    def body(job: Job) -> int:
        def broken(*_: object) -> None:
            raise OSError("no store today")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "_serve", broken)
            try:
                start(total, ranks=2)
            except OSError:
                job.note("left", [pid for pid in job.left_over() if pid != os.getpid()])
        return 0

    job = run_job(body)
    assert job.wait() == 0
    assert job.read("left") == "[]"


def test_ports() -> None:
    """Catches a traceback from the depths for a port in use or no port at all."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port}: got in use, wanted free; 0 takes"):
            start(total, ranks=2, port=port)
    with pytest.raises(LaunchError, match="port 70000"):
        start(total, ranks=2, port=70000)


def test_a_port_may_be_chosen(run_job: RunJob) -> None:
    """Catches a port that is checked but not used."""
    port = free_port()

    def main(world: World) -> int:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        return 0

    assert run_job(lambda job: start(main, ranks=1, port=port)).wait() == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ranks": 0}, "ranks: got 0, wanted at least 1"),
        ({"ranks": 1, "device": "tpu"}, "device: got 'tpu', wanted 'cpu' or 'cuda'"),
        ({"ranks": 1, "threads": 0}, "threads: got 0"),
    ],
)
def test_nonsense_is_refused_before_forking(options: dict[str, Any], text: str) -> None:
    """Catches ranks that start and fail one by one."""
    with pytest.raises(LaunchError, match=text):
        start(total, **options)


@pytest.mark.skipif(count_gpus() > 0, reason="wants a machine without GPUs")
def test_a_missing_gpu_is_said_once(run_job: RunJob) -> None:
    """Catches CUDA's own errors, once per rank."""
    job = run_job(lambda job: start(blocked, ranks=2, device="cuda"))
    assert job.wait() == 2
    assert len(job.said) == len(job.err.splitlines()) == 1
    assert "got 0 GPUs, wanted one for each rank" in job.err


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"MASTER_PORT": ""}, "variable MASTER_PORT: got none, wanted a value; start it with"),
        ({"RANK": "one"}, "variable RANK: got 'one', wanted a whole number"),
        ({"RANK": "2"}, "RANK: got 2, wanted less than WORLD_SIZE = 2"),
        ({"MASTER_PORT": "70000"}, "127.0.0.1:70000: got"),
        ({}, "Connection refused, wanted a connection; MASTER_ADDR and MASTER_PORT must"),
    ],
)
def test_wrong_variables(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], text: str
) -> None:
    """Catches a wait of minutes and pages of C++ frames for a wrong variable."""
    assert not under_torchrun()
    port = str(free_port())
    all_of_them = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (all_of_them | {"MASTER_PORT": port} | variables).items():
        monkeypatch.setenv(name, value)
    assert under_torchrun()
    with pytest.raises(LaunchError, match=text):
        join(total, connect_s=0.3)


@pytest.mark.apart  # torch's client says in frames, when all is over, that the stranger has gone
@pytest.mark.parametrize("rank", [whole(0), 1])
def test_a_stranger_on_the_port(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Catches the endless wait of torch's client for a listener that is no store, and the server's
    own error."""
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        values = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_PORT": port}
        for name, value in (values | {"MASTER_ADDR": "127.0.0.1"}).items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(LaunchError, match=f"127.0.0.1:{port}: got .*MASTER_PORT"):
            join(total, connect_s=0.5)


def test_join_without_an_agent(run_job: RunJob) -> None:
    """Catches a store that goes with rank 0 while others still need it, and processes that can no
    longer be interrupted afterwards."""
    port = free_port()

    def body(rank: int) -> Callable[[Job], int]:
        def run(job: Job) -> int:
            def main(world: World) -> int:
                right = total(world) == 6.0
                time.sleep(0 if rank else 0.5)  # the others wait for it, asking rarely
                return int(not right)

            set_variables(rank, 3, port)
            code = join(main)
            job.note("end", signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
            return code

        return run

    jobs = [run_job(body(rank)) for rank in (2, 0, 1)]
    assert [job.wait() for job in jobs] == [0, 0, 0], [job.err for job in jobs]
    assert [job.read("end") for job in jobs] == ["True"] * 3
    assert [job.err for job in jobs] == [""] * 3


def test_a_restart_is_counted_differently_on_other_machines(run_job: RunJob) -> None:
    """Would catch an attempt that is what torchrun's agent of one machine says: it does not count
    restarts that another machine began."""
    port = free_port()

    def body(rank: int) -> Callable[[Job], int]:
        def run(job: Job) -> int:
            def main(world: World) -> int:
                through = os.environ["GLOO_SOCKET_IFNAME"]
                job.note("found", (world.attempt, total(world), through))
                return 0

            set_variables(rank, 2, port)
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(rank)
            return join(main)

        return run

    jobs = [run_job(body(rank)) for rank in range(2)]
    assert [job.wait() for job in jobs] == [0, 0], [job.err for job in jobs]
    assert [job.read("found") for job in jobs] == [str((0, 3.0, "lo"))] * 2


@pytest.mark.slow
def test_torchrun_restarts(tmp_path: Path) -> None:
    """Catches the second attempt reading addresses of the first, dead one from the store."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import os, sys, torch, torch.distributed as dist
            from headrace.comm.launch import join
            from headrace.comm.variables import under_torchrun

            def main(world):
                x = torch.full((3,), float(world.rank + 1))
                dist.all_reduce(x)
                if world.attempt == 0 and world.rank == 1:
                    return 1
                if world.attempt == 0:
                    dist.recv(x, 1)
                line = f"attempt {world.attempt} rank {world.rank} {x[0].item()}\\n"
                os.write(1, line.encode())  # in one piece
                return 0

            sys.exit(join(main) if under_torchrun() else 9)
        """)
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "--max-restarts=1", str(script)],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["attempt 1 rank 0 3.0", "attempt 1 rank 1 3.0"]
    assert "headrace: rank 0 stops: " in done.stderr


_LONE = """
from operator import attrgetter
import torch, torch.distributed as dist
from headrace.comm.launch import lone_rank, start
from headrace.errors import LaunchError

def add(world):
    ones = torch.ones(3)
    dist.all_reduce(ones)
    return 0 if ones.tolist() == [world.ranks] * 3 else 1

for threads, ranks_may_fork in ((1, True), (2, False)):
    torch.set_num_threads(1)
    for _ in range(2):
        with lone_rank(threads=threads) as world:
            assert (world.rank, world.ranks, world.device) == (0, 1, "cpu")
            assert torch.get_num_threads() == threads and add(world) == 0
            torch.randn(300, 300, requires_grad=True).exp().sum().backward()
        assert not dist.is_initialized() and torch.get_num_threads() == 1
    assert start(add, ranks=2, threads=1) == 0
    try:
        found = start(add, ranks=2, threads=2)
    except LaunchError as error:
        found = str(error)
    refused = "cannot be sent to a new process (of __main__)"
    assert found == 0 if ranks_may_fork else refused in found, found
    assert start(attrgetter("local_rank"), ranks=2, threads=2) == 1  # the code of rank 1
try:
    with lone_rank():
        with lone_rank():
            raise AssertionError("a rank within a rank")
except LaunchError as error:
    assert "initialised" in str(error)
"""


def test_a_lone_rank_leaves_its_process_as_it_was() -> None:
    """Would catch a world that stays, stores that make later ranks abort, threads that they would
    wait for, and a second world in the first."""
    done = subprocess.run(
        [sys.executable, "-c", _LONE], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr


def in_new_process(world: World) -> int:
    """Of a module, as what is sent to new processes has to be."""
    assert sys.argv[0] == "-c", "a new interpreter"
    os.write(1, f"rank {world.rank} {total(world)} {os.getppid()}\n".encode())
    return 0


def fails_in_new_process(world: World) -> int:
    if world.rank == 1:
        raise ConfigError("key", got=1, wanted=2)
    return blocked(world)


def dies_in_new_process(world: World) -> int:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return blocked(world)


def test_ranks_of_new_processes_are_ranks(run_job: RunJob) -> None:
    """Catches new processes that do not meet, are not the launcher's children, or outlive it."""
    job = run_job(lambda job: start(in_new_process, ranks=2, forked=False))
    assert job.wait(60) == 0, job.err
    assert sorted(job.out.splitlines()) == [f"rank {r} 3.0 {job.pid}" for r in (0, 1)]
    job = run_job(lambda job: start(fails_in_new_process, ranks=2, forked=False))
    assert job.wait(60) == 2
    assert job.said == ["headrace: rank 1: key: got 1, wanted 2"]
    assert job.left_over() == []


@pytest.mark.slow
def test_a_killed_rank_of_new_processes(run_job: RunJob) -> None:
    """Catches the same where a rank says nothing."""
    job = run_job(lambda job: start(dies_in_new_process, ranks=2, forked=False))
    assert job.wait(60) == 137
    assert any("rank 1 was killed by SIGKILL" in line for line in job.said)
    assert job.left_over() == []


def test_new_processes_are_interrupted_quietly(run_job: RunJob) -> None:
    """Catches tracebacks of every rank that still imports when a terminal interrupts them all."""
    job = run_job(lambda job: start(in_new_process, ranks=2, forked=False))
    time.sleep(0.7)
    os.killpg(job.pid, signal.SIGINT)
    assert job.wait(20) in (0, 130)
    assert "Traceback" not in job.err
    assert job.left_over() == []


_ELSEWHERE = """
import sys
from pathlib import Path
sys.path[:] = [str(Path("modules").absolute()), Path("nowhere"), *sys.path[1:]]
import torch
from work import precise
from headrace.comm.launch import start
torch.set_float32_matmul_precision("high")
sys.exit(start(precise, ranks=1, forked=False))
"""


@pytest.mark.slow
def test_new_processes_are_like_this_one(tmp_path: Path) -> None:
    """Catches modules of the working folder taken for Python's own, a path that is no text, and
    products that are rounded otherwise than on forked ranks."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/work.py").write_text(
        "import torch\n\n\ndef precise(world):\n"
        "    return 0 if torch.get_float32_matmul_precision() == 'high' else 3\n"
    )
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')\n")
    (tmp_path / "main.py").write_text(_ELSEWHERE)
    done = subprocess.run(
        [sys.executable, "-P", "main.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_what_no_new_process_can_have_is_refused() -> None:
    """Catches a closure that fails in every rank, with a traceback of pickle."""
    here = threading.Lock()
    with pytest.raises(LaunchError, match=r"cannot be sent to a new process.*before they begin"):
        start(lambda world: int(here.locked()), ranks=2, forked=False)


def test_what_forks_could_not_have_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ranks that are forked from a process in which torch has only looked for devices, or
    has used autograd beside some."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert not forks_fail()
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for bad, reached in ((True, 2), (False, 0), (False, 2)):
        monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda bad=bad: bad)
        monkeypatch.setattr(
            torch._C, "_cuda_getDeviceCount", lambda reached=reached: reached, raising=False
        )
        assert forks_fail() is (bad or reached == 0)

    def refused(self: torch.Tensor) -> None:
        raise RuntimeError("Unable to handle autograd's threading")

    monkeypatch.setattr(torch.Tensor, "backward", refused)
    assert forks_fail()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert forks_fail()


def test_the_launcher_is_called_while_ranks_run() -> None:
    """Would catch a call that comes only at the end, and ranks that outlive what it raises."""
    calls: list[float] = []
    assert start(linger, ranks=2, each=lambda: calls.append(time.monotonic())) == 0
    assert len(calls) > 5

    def refuse() -> None:
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        start(linger, ranks=2, each=refuse)


def linger(world: World) -> int:
    time.sleep(0.5)
    return 0


def test_a_device_that_takes_long_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a rank that is taken for dead while CUDA begins, which holds the interpreter."""

    def begin(place: RankPlace, settings: object) -> str:
        if place.rank == 1:
            ctypes.PyDLL(None).usleep(2_000_000)  # holds it as well
        return "cpu"

    monkeypatch.setattr(ranks, "_device", begin)
    assert start(lambda world: int(total(world) != 3.0), ranks=2, hang_s=0.8) == 0


def test_the_gpu_of_a_rank() -> None:
    """Catches ranks that are refused where a launcher shows each one GPU, its own, and ranks that
    share one where they should not."""
    assert [gpu_of(rank, 4, own=False) for rank in range(4)] == [0, 1, 2, 3]
    assert [gpu_of(rank, 1, own=True) for rank in range(3)] == [0, 0, 0]
    with pytest.raises(LaunchError, match="GPU of local rank 1"):
        gpu_of(1, 1, own=False)


def test_ranks_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches devices counted against ranks that torchrun did not start."""
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert ranks_here(2) == 2
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert ranks_here(2) == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert ranks_here(2) == 8
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # one for all of them
    monkeypatch.delenv("SLURM_TRES_PER_TASK", raising=False)
    monkeypatch.delenv("SLURM_GPUS_PER_TASK", raising=False)
    assert not sees_own_gpus()
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    assert sees_own_gpus()


def test_deterministic_kernels(run_job: RunJob) -> None:
    """Catches a run that says it is deterministic and is not, and one that fills every tensor."""

    def body(job: Job) -> int:
        gpus._take_deterministic_kernels()
        found = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
            os.environ["CUBLAS_WORKSPACE_CONFIG"],
        )
        return int(found != (True, True, False, ":4096:8"))

    job = run_job(body)
    assert job.wait() == 0, job.err


def test_gpus_are_counted_by_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a launcher in which asking how many GPUs there are begins CUDA, which would not live
    on in its ranks."""
    asked: list[int] = []
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: asked.append(1) or 3)
    assert count_gpus() == 3
    assert asked == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 / 0)
    assert count_gpus() == 0
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert count_gpus() == 0


def test_a_rank_of_a_process_that_asked_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches torch's own error, once for each rank, which says nothing of what to do."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(LaunchError, match=r"CUDA begun, or only asked for.*from a new process"):
        begin_gpu(0)


def test_a_rank_lives_on_when_its_communicators_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches torch's watchdog, which ends the process of an aborted communicator; torchrun says so
    in a variable of its own."""
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_RETHROW_CUDA_ERRORS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, **_: ones(*size))
    assert begin_gpu(0) == "cuda:0"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")


def test_a_lone_rank_leaves_torch_as_it_was(run_job: RunJob) -> None:
    """Catches a process that computes with deterministic kernels only, once a run in it did, and
    one whose later worlds are without torch's watchdog."""

    def body(job: Job) -> int:
        os.environ.pop(VARIABLES[0], None)
        os.environ[VARIABLES[2]] = "1"
        before = dict(os.environ)
        with lone_rank():  # as a rank of a device does:
            torch.use_deterministic_algorithms(True, warn_only=True)
            os.environ.update(dict.fromkeys(VARIABLES, "0"))
        return int(torch.are_deterministic_algorithms_enabled()) + (dict(os.environ) != before)

    job = run_job(body)
    assert job.wait() == 0, job.err
