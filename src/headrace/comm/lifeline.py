"""A connection to the rank before, over which nothing is ever sent: it breaks when that rank ends.

A rank that computes on a busy machine may be late with its heartbeat and is alive. One whose
process has ended has closed its sockets, and a machine that is off, or cut off, no longer answers
the kernel of this one. So the dead are told from the slow within seconds.
"""

from __future__ import annotations

import socket

from headrace.comm.sockets import make_impatient
from headrace.errors import LaunchError

__all__ = ["Lifeline"]

_CONNECT_S = 30.0


class Lifeline:
    """This rank's end of two connections: the rank after connects to ``port``, and this one
    connects to the rank before."""

    def __init__(self) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        # Nobody accepts: the system does, and breaks what waits here when this process ends.
        self._door = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
        self._before: socket.socket | None = None

    @property
    def port(self) -> int:
        """Where the rank after this one connects."""
        return int(self._door.getsockname()[1])

    def hold(self, before: tuple[str, int]) -> None:
        """Connect to the rank before. Raises LaunchError when it cannot be reached."""
        try:
            self._before = socket.create_connection(before, timeout=_CONNECT_S)
        except OSError as error:
            raise LaunchError(
                f"rank before this one at {before[0]}:{before[1]}",
                got=error,
                wanted="a connection",
                hint="machines of a job must reach each other on all ports",
            )
        make_impatient(self._before)
        self._before.setblocking(False)

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """What becomes readable when the rank before is gone."""
        return () if self._before is None else (self._before,)

    def what_broke(self) -> str:
        """What became of the rank before, after "rank N"; empty while it is there."""
        if self._before is None:
            return ""
        try:
            self._before.recv(1)
            why = "ended without a word"
        except BlockingIOError:
            return ""
        except ConnectionError:
            why = "ended without a word"
        except OSError:
            why = "cannot be reached any more"
        self._before.close()
        self._before = None
        return why

    def close(self) -> None:
        """Let go of both."""
        for end in (self._door, *self.sockets):
            end.close()
