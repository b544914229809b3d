"""The connections of process groups, and how to break them so that waiting ranks return.

A rank that waits in gloo waits for its whole timeout when the one it waits for will never answer:
aborting or destroying the group from another thread returns at once and unblocks no rank. Shutting
down the connections themselves does. So the connections that appear while a group is made
are remembered, and nothing else of the process (the store's, a tracker's) is ever cut. A rank may
serve the store itself, and connections of others to it appear while a group is made: they are known
by their port.

[Note: aborting] On a device, kernels of NCCL wait for those of other ranks, and the host waits for
the device. Any thread frees both by aborting the communicator. The kernels then end without an
error, and their results may hold anything: a host that reads them has to ask whether it was freed.
Aborting one communicator may wait for the device, on which kernels of another still run, so all are
aborted at once, each by a thread of its own, and the thread that cuts does not wait for these.
torch opens NCCL's sockets when a group is first used, after it is made, so they are not among those
that are cut.

The other way round, the system waits for a quarter of an hour for a machine that has been cut off;
connections that tell the living from the dead are made impatient.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

__all__ = ["Abortable", "Connections", "hurry", "make_impatient"]

_PATIENCE_S = 4  # of the system with a machine that no longer answers


class Abortable(Protocol):
    """The part of a process group that is used here."""

    def abort(self) -> None:
        """End all its operations, where its backend can (NCCL does, gloo does nothing)."""


class Connections:
    """The connections that process groups of this process have opened, to cut them, and the groups,
    to abort them. Connections are known by their inodes, as the number of a closed file is soon
    used for another one. Those from or to the port ``spared``, the store's, are never cut."""

    def __init__(self, *, spared: int | None = None) -> None:
        self._spared = spared
        self._inodes: set[int] = set()
        self._groups: list[weakref.ref[Abortable]] = []
        self._aborting: list[threading.Thread] = []

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Remember the sockets that are opened within the context, in which a group is made."""
        before = set(_sockets())
        try:
            yield
        finally:
            self._inodes |= set(_sockets()) - before

    def keep(self, group: Abortable) -> None:
        """Remember a group as long as it lives: a destroyed one closes its connections itself."""
        self._groups.append(weakref.ref(group))

    def cut(self) -> int:
        """Abort all groups and shut all connections down: threads that wait for one, here or at its
        other end, get an error. Any thread may call it. Returns how many connections were open."""
        open_count = 0
        # each in a thread of its own: see [Note: aborting]
        while self._groups:
            if (group := self._groups.pop()()) is not None:
                thread = threading.Thread(target=_abort, args=(group,), daemon=True)
                self._aborting.append(thread)
                thread.start()
        for inode, file_number in _sockets().items():
            if inode in self._inodes:
                with suppress(OSError), socket.socket(fileno=os.dup(file_number)) as connection:
                    # gloo ends the process when what it listens on is gone.
                    listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if not listens and self._spared not in _ports(connection):
                        connection.shutdown(socket.SHUT_RDWR)
                        open_count += 1
        self._inodes.clear()
        return open_count

    def settle(self) -> None:
        """Wait until all groups that were cut have been aborted."""
        while self._aborting:
            self._aborting.pop().join()


def _abort(group: Abortable) -> None:
    """Abort one group, in a thread of its own."""
    with suppress(RuntimeError):  # it was being destroyed, or had failed by itself
        group.abort()


def _ports(connection: socket.socket) -> set[int]:
    """The ports at both ends of a connection; empty where it is no TCP connection."""
    names = (connection.getsockname(), connection.getpeername())
    return {name[1] for name in names if isinstance(name, tuple)}


def _sockets() -> dict[int, int]:
    """File numbers of this process's sockets by inode; empty where the system does not tell."""
    file_numbers: dict[int, int] = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError, ValueError):
                target = os.readlink(f"/proc/self/fd/{name}")  # socket:[INODE] for a socket
                if target.startswith("socket:["):
                    inode = int(target.removeprefix("socket:[").removesuffix("]"))
                    file_numbers[inode] = int(name)
    return file_numbers


def make_impatient(connection: socket.socket) -> None:
    """Set TCP options so that the system breaks the connection after four silent seconds of the
    other machine, whether or not anything was sent. Its processes may be slow."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in (
            (socket.TCP_KEEPIDLE, 1),
            (socket.TCP_KEEPINTVL, 1),
            (socket.TCP_KEEPCNT, _PATIENCE_S - 1),
            (socket.TCP_USER_TIMEOUT, 1000 * _PATIENCE_S),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def hurry(port: int) -> None:
    """Apply :func:`make_impatient` to this process's connections to ``port`` of any machine."""
    for file_number in _sockets().values():
        with suppress(OSError), socket.socket(fileno=os.dup(file_number)) as connection:
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and connection.getpeername()[1] == port:
                make_impatient(connection)
