"""Ranks that wait for one another in vain are freed, and meet anew."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headrace.comm.collectives import (
    all_gather_rows,
    from_first,
    gather_bytes,
    issue_all_to_all,
)
from headrace.comm.launch import World, start
from headrace.comm.mesh import Groups
from headrace.comm.ranks import is_broken_connection
from headrace.comm.rerendezvous import Rerendezvous
from headrace.comm.sockets import Connections
from headrace.errors import PlanMismatch
from jobs import Job, heard

RunJob = Callable[[Callable[[Job], int]], Job]
RANKS = 4
# Who asks, and who waits for whom in what; the rank left over computes and hears nothing.
ROUNDS = (
    {"asks": 2, "receive": (0, 1), "collective": (3, 1)},
    {"asks": 3, "receive": (2, 0), "collective": (1, 0)},
)
COMPUTES_S = 1.3


def tcp() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection over the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


def talks(pair: tuple[socket.socket, socket.socket]) -> bool:
    """Whether bytes still pass both ways."""
    for one, other in (pair, pair[::-1]):
        other.settimeout(2)
        with suppress(OSError):
            one.sendall(b"?")
            if other.recv(1) == b"?":
                continue
        return False
    return True


def test_only_what_was_opened_is_cut() -> None:
    """Would catch a cut of every socket of the process, of one that took the number of a closed
    one, or of the socket that gloo listens on, the end of which ends the process."""
    connections = Connections()
    before = [tcp(), socket.socketpair()]
    with connections.opening():
        cut, closed = tcp(), tcp()
        listener = socket.create_server(("127.0.0.1", 0))
    with connections.opening():
        more = tcp()
    number = closed[0].fileno()
    for end in closed:
        end.close()
    after = [tcp(), socket.socketpair()]
    assert number in {end.fileno() for pair in after for end in pair}, "used again"
    assert connections.cut() == 4
    assert not talks(cut)
    assert not talks(more)
    assert all(talks(pair) for pair in before + after)
    with socket.create_connection(listener.getsockname(), timeout=2):
        listener.accept()[0].close()
    assert connections.cut() == 0, "each is cut once"
    for end in (*cut, *more, *before[0], *before[1], *after[0], *after[1], listener):
        end.close()


def test_the_store_is_spared() -> None:
    """Would catch a rank that serves the store and cuts the others off from it: they connect while
    it waits for them in the making of a group."""
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        connections = Connections(spared=port)
        with connections.opening():
            client = socket.create_connection(("127.0.0.1", port))
            served, _ = store.accept()
            other = tcp()
        assert connections.cut() == 2
        assert talks((client, served))
        assert not talks(other)
        for end in (client, served, *other):
            end.close()


def test_what_a_failed_attempt_opened_is_cut_too() -> None:
    """Would catch connections of a group that was never finished: they are in nobody's way only
    once they are cut."""
    connections, made = Connections(), []

    def fail() -> None:
        with connections.opening():
            made.append(tcp())
            raise RuntimeError("no group")

    with pytest.raises(RuntimeError, match="no group"):
        fail()
    assert connections.cut() == 2
    assert not talks(made[0])
    for end in made[0]:
        end.close()


def _wait_in_vain(world: World, groups: Groups, round_: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of a round, up to the moment at which it can go on."""
    pairs = {name: round_[name] for name in ("receive", "collective")}
    here = next((name for name, (who, _) in pairs.items() if who == world.rank), None)
    if world.rank == round_["asks"]:
        time.sleep(0.3)  # the others wait by now
        asked_s = time.monotonic()
        world.rerendezvous.ask()
        return {"asked_s": asked_s}
    try:
        if here == "receive":
            groups.messages.receive((3,), torch.float32, "cpu", pairs["receive"][1])
        elif here == "collective":
            group = groups.get(tuple(sorted(pairs["collective"])))
            all_gather_rows(torch.ones(1, 2), [1, 1], group)
        else:  # is waited for, and hears nothing until it is done
            groups.messages.send(torch.full((2,), 7.0), round_["asks"])  # is never received
            time.sleep(COMPUTES_S)
            gather_bytes(b"done", groups.world)
    except RuntimeError as error:
        return {
            "freed_s": time.monotonic(),
            "broken": is_broken_connection(error),
            "asked": world.rerendezvous.asked(),
        }
    return {}


def _still_right(world: World, groups: Groups, old: tuple[int, ...], number: int) -> dict[str, Any]:
    """What the new world makes of sums, groups and messages."""
    gone = 0
    for lookup in (lambda: groups.get(old), lambda: groups.messages):
        with suppress(PlanMismatch):
            lookup()
            continue
        gone += 1
    x = torch.full((3,), 10.0**world.rank, dtype=torch.float64)
    dist.all_reduce(x)
    groups.prepare([(0, 1), (1, 3), (0, 2), (2, 3)])
    groups.prepare_messages()
    pair = next(p for p in ((1, 3), (0, 2)) if world.rank in p)
    rows = all_gather_rows(torch.tensor([[world.rank]]), [1, 1], groups.get(pair))
    to, since = (world.rank + 1) % RANKS, (world.rank - 1) % RANKS
    groups.messages.send(torch.full((2,), float(10 * number + world.rank)), to)
    came = groups.messages.receive((2,), torch.float32, "cpu", since)
    groups.messages.settle()
    return {
        "gone": gone,
        "sum": x.tolist(),
        "pair": rows.flatten().tolist(),
        "came": came.tolist(),
        "first": from_first(f"{number}/{world.rank}".encode(), groups.world).decode(),
    }


def _rounds(job: Job) -> Callable[[World], int]:
    def main(world: World) -> int:
        groups = Groups(connections=world.rerendezvous.connections)
        pairs = {tuple(sorted(r["collective"])) for r in ROUNDS}
        foreign = [tcp(), socket.socketpair()]
        found = []
        for number, round_ in enumerate(ROUNDS):
            groups.prepare(pairs)
            groups.prepare_messages()
            foreign += [tcp()]
            dist.barrier()
            waited = _wait_in_vain(world, groups, round_)
            world.rerendezvous.meet_anew(groups)
            met_s = time.monotonic()
            old = tuple(sorted(round_["collective"]))
            found.append(
                waited
                | {"met_s": met_s}
                | _still_right(world, groups, old, number)
                | {"foreign": [talks(pair) for pair in foreign]}
            )
        for _ in range(2):
            world.rerendezvous.meet_anew(groups)
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == RANKS
        asked = world.rerendezvous.asked()
        job.note(f"rank{world.rank}", json.dumps({"rounds": found, "asked": asked}))
        return 0

    return main


def test_ranks_that_wait_in_vain_meet_anew(run_job: RunJob) -> None:
    """Would catch ranks that wait for their timeout in a message or a collective with a rank that
    has not noticed anything, groups or messages of the old world that are used in the new one, a
    meeting that can be held once only, and other sockets, the store's above all, that are cut."""
    job = run_job(lambda job: start(_rounds(job), ranks=RANKS, threads=1, timeout_s=30))
    assert job.wait(30) == 0, job.err
    told = [json.loads(job.read(f"rank{rank}")) for rank in range(RANKS)]
    for number, round_ in enumerate(ROUNDS):
        rows = [told[rank]["rounds"][number] for rank in range(RANKS)]
        asked_s = rows[round_["asks"]]["asked_s"]
        for name in ("receive", "collective"):
            freed = rows[round_[name][0]]
            assert 0 < freed["freed_s"] - asked_s < COMPUTES_S, f"{name} of round {number}"
            assert (freed["broken"], freed["asked"]) == (True, True)
        for rank, row in enumerate(rows):
            assert row["met_s"] - asked_s < COMPUTES_S + 1.5
            assert row["sum"] == [1111.0] * 3
            assert row["gone"] == 2
            assert row["pair"] == ([1, 3] if rank % 2 else [0, 2])
            assert row["came"] == [10 * number + (rank - 1) % RANKS] * 2
            assert row["first"] == f"{number}/0"
            assert all(row["foreign"]), f"sockets of rank {rank} in round {number}"
    assert [rank["asked"] for rank in told] == [False] * RANKS, "meetings held are not asked for"
    assert job.left_over() == []


def _dies(world: World) -> int:
    groups = Groups(connections=world.rerendezvous.connections)
    dist.barrier()
    world.watcher.enter("1F4")
    if world.rank == 1:
        world.rerendezvous.ask()
        world.watcher.enter("its last")
        heard(world)
        time.sleep(0.4)  # the others meet by now
        os.kill(os.getpid(), signal.SIGKILL)
    with suppress(RuntimeError):
        dist.recv(torch.zeros(1), src=1)
    world.rerendezvous.meet_anew(groups)
    return 0


def test_a_rank_that_dies_before_it_meets_is_named(run_job: RunJob) -> None:
    """Would catch ranks that wait for a dead one until the store's timeout, or blame each other for
    connections that they cut themselves."""
    job = run_job(lambda job: start(_dies, ranks=3, threads=1, timeout_s=60))
    assert job.wait(8) == 128 + signal.SIGKILL
    how = "rank 1 was killed by SIGKILL (last heard of in its last)"
    assert f"headrace: {how}" in job.said
    for rank in (0, 2):
        stops = f"headrace: rank {rank} stops: {how}; this rank was in meeting anew for "
        assert any(line.startswith(stops) for line in job.said), job.err
    assert job.left_over() == []


# Kind, fp32 elements, and after how many seconds rank 0 breaks it: what is half-way then differs.
BROKEN = tuple(
    (kind, elements, after_s)
    for after_s in (0.01, 0.02, 0.03)
    for kind, elements in (("collective", 4 << 20), ("message", 24 << 20))
)
BY_THEMSELVES = """
import sys
from test_rerendezvous import half_ways
from headrace.comm.launch import join
sys.exit(join(half_ways, threads=1, timeout_s=60))
"""


def _half_way(
    groups: Groups, rerendezvous: Rerendezvous, kind: str, many: int, after_s: float
) -> str:
    """A transfer of many bytes, broken by rank 0 when a part of it has arrived."""
    try:
        if kind == "collective":
            x = torch.ones(2 * many)
            coming = issue_all_to_all(x, [many] * 2, [many] * 2, groups.world)
        elif groups.rank == 0:
            groups.messages.send(torch.ones(many), 1)
        if groups.rank == 0:
            time.sleep(after_s)
            rerendezvous.ask()
            return "asked"
        if kind == "collective":
            coming.wait()
        else:
            groups.messages.receive((many,), torch.float32, "cpu", 0)
    except RuntimeError as error:
        return "freed" if is_broken_connection(error) else repr(error)
    return "arrived"


def half_ways(world: World) -> int:
    """Transfers broken half-way, and what becomes of this rank; says so on stdout."""
    groups, found = Groups(connections=world.rerendezvous.connections), []
    for broken in BROKEN:
        groups.prepare_messages()
        gather_bytes(b"", groups.world)
        start_s = time.monotonic()
        how = _half_way(groups, world.rerendezvous, *broken)
        world.rerendezvous.meet_anew(groups)
        found.append((how, time.monotonic() - start_s))
    assert gather_bytes(b"here", groups.world) == [b"here"] * 2
    os.write(1, f"{json.dumps(found)}\n".encode())
    return 0


def test_a_message_that_is_half_way_keeps_nobody() -> None:
    """Would catch a rank that waits for what gloo has forgotten (of a broken connection it tells
    only those whose message has not begun): in the transfer, at the end of its group or at the end
    of the process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    places = [
        {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
        for rank in range(2)
    ]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    started = [
        subprocess.Popen(
            [sys.executable, "-c", BY_THEMSELVES],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | place | {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": path},
        )
        for place in places
    ]
    said = [process.communicate(timeout=50) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    asked, freed = (json.loads(out) for out, _ in said)
    assert {how for how, _ in asked} == {"asked"}
    assert "freed" in {how for how, _ in freed} <= {"freed", "arrived"}
    assert max(seconds for _, seconds in asked + freed) < 8
