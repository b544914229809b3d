"""Two nodes on one machine: network namespaces with a cable between them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["Nodes", "two_nodes", "why_not"]


class Nodes:
    """The nodes 0 and 1, at ``addresses``; their traffic never leaves this machine."""

    addresses = ("10.213.77.1", "10.213.77.2")

    def __init__(self) -> None:
        self.names = tuple(f"headrace{os.getpid()}n{node}" for node in (0, 1))

    def build(self) -> None:
        """Make them, with a cable between."""
        for name in self.names:
            _ip("netns", "add", name)
            _ip("-netns", name, "link", "set", "lo", "up")
        one, other = (["name", "cable", "netns", name] for name in self.names)
        _ip("link", "add", *one, "type", "veth", "peer", *other)
        for name, address in zip(self.names, self.addresses, strict=True):
            _ip("-netns", name, "address", "add", f"{address}/24", "dev", "cable")
            _ip("-netns", name, "link", "set", "cable", "up")

    def start(self, node: int, *command: object, log: Path) -> subprocess.Popen[str]:
        """Run a command on a node; what it says is in ``log``."""
        inside = ["ip", "netns", "exec", self.names[node], *map(str, command)]
        with log.open("a") as file:
            return subprocess.Popen(
                inside, text=True, stdout=file, stderr=file, start_new_session=True
            )

    def cut(self) -> None:
        """Pull the cable: neither node is told that the other is gone."""
        for name in self.names:
            _ip("-netns", name, "link", "set", "cable", "down")

    def pids(self, node: int, words: str = "") -> list[int]:
        """Processes of a node whose command line has these words."""
        command = ["ip", "netns", "pids", self.names[node]]
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        return [pid for pid in map(int, found.split()) if words in _command_line(pid)]

    def kill(self, node: int) -> None:
        """End all processes of a node, as when it loses its power."""
        for pid in self.pids(node):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill what still runs on the nodes, and take them away."""
        for node, name in enumerate(self.names):
            self.kill(node)
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Two nodes that end with the context."""
    nodes = Nodes()
    try:
        nodes.build()
        yield nodes
    finally:
        nodes.end()


def why_not() -> str:
    """Why there are no nodes to be had here; empty when there are."""
    if shutil.which("ip") is None:
        return "needs the command ip"
    try:
        with two_nodes():
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.strip()}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""
