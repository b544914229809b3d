"""Jobs over two nodes that lose a rank, a node or the cable between them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nodes import Nodes, two_nodes, why_not
from running.cli.jobs import losses, metrics, write_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    if reason := why_not():
        pytest.skip(reason)
    with two_nodes() as found:
        yield found


def torchrun(nodes: Nodes, node: int, folder: Path, *more: object) -> subprocess.Popen[str]:
    """An agent of one rank on a node, which trains in ``folder / "run"``."""
    return nodes.start(
        node,
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=1",
        f"--node-rank={node}",
        f"--master-addr={nodes.addresses[0]}",
        "--master-port=29531",
        "--max-restarts=3",
        "-m",
        "headrace",
        "train",
        folder / "tiny.toml",
        "--out",
        folder / "run",
        "--resume",
        *more,
        log=folder / f"log{node}",
    )


def until(holds: Callable[[], object], what: str, folder: Path, limit_s: float = 90.0) -> float:
    """Wait until ``holds()``; returns how long that took."""
    began = time.monotonic()
    while not holds():
        seconds = time.monotonic() - began
        logs = "\n".join((folder / f"log{node}").read_text() for node in (0, 1))
        assert seconds < limit_s, f"{what}: not within {limit_s} s\n{logs}"
        time.sleep(0.02)
    return time.monotonic() - began


def stepped(folder: Path, step: int) -> None:
    """Wait for a step."""
    until(lambda: any(row["step"] >= step for row in metrics(folder / "run")), f"{step}", folder)


def test_a_rank_and_a_node_are_lost(nodes: Nodes, tmp_path: Path) -> None:
    """Would catch restarts whose ranks never meet: a node that is started anew counts none, and
    the store remembers the dead; steps left out or taken in another order; machines that know
    themselves as 127.0.0.1."""
    write_job(tmp_path, steps=50)
    agents = [torchrun(nodes, node, tmp_path) for node in (0, 1)]
    stepped(tmp_path, 6)
    (rank,) = set(nodes.pids(1)) - {agents[1].pid}
    os.kill(rank, signal.SIGKILL)
    said = tmp_path / "log0"
    until(lambda: "continuing from" in said.read_text(), "the first restart", tmp_path)
    stepped(tmp_path, 20)
    nodes.kill(1)
    agents[1] = torchrun(nodes, 1, tmp_path)
    until(lambda: said.read_text().count("continuing from") == 2, "the second restart", tmp_path)
    until(lambda: agents[0].poll() is not None, "the end", tmp_path)
    assert [agent.wait(20) for agent in agents] == [0, 0], said.read_text()
    assert len(losses(tmp_path / "run")) == 50
    assert "rank 1 ended without a word" in said.read_text()


def test_the_cable_is_pulled(nodes: Nodes, tmp_path: Path) -> None:
    """Would catch the side that has lost the store and waits for it for ever, without a word."""
    write_job(tmp_path, steps=4000)
    for node in (0, 1):
        torchrun(nodes, node, tmp_path)
    stepped(tmp_path, 2)
    nodes.cut()

    def ended() -> bool:
        here, there = ((tmp_path / f"log{node}").read_text() for node in (0, 1))
        return (
            "rank 0 stops: rank 1 cannot be reached any more" in here
            and "rank 1 stops: cut off from the store for " in there
        )

    print(f"both sides stopped after {until(ended, 'their end', tmp_path, 15.0):.1f} s")
