"""A process that plans, as its owner sees it."""

from __future__ import annotations

import signal
import subprocess
import time
from collections import deque
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from tempfile import TemporaryFile
from typing import Any

from headrace.errors import LaunchError
from headrace.planning.producing import command, noted

__all__ = ["Producer"]

_GRACE_S = 2.0


class Producer:
    """One process, and the numbers of the items that it has and has not answered, oldest first;
    ``heard_s`` is when it last said something, or was started.
    """

    def __init__(self, function: bytes) -> None:
        ours, theirs = Pipe()
        self.note = TemporaryFile(buffering=0)  # noqa: SIM115 - open as long as the process
        self.connection: Connection[Any, Any] = ours
        self.numbers: deque[int] = deque()
        self.heard_s = time.monotonic()
        self._silent = ""
        with theirs:
            try:
                self.process = subprocess.Popen(
                    command(theirs.fileno(), self.note.fileno()),
                    pass_fds=(theirs.fileno(), self.note.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            except OSError as error:
                ours.close()
                self.note.close()
                raise LaunchError("producer of plans", got=error.strerror, wanted="a process")
        with suppress(OSError):  # dead already: noticed when its answer is waited for
            self.connection.send_bytes(function)

    def end(self) -> None:
        """End the process and wait until it is gone."""
        self.connection.close()
        try:
            self.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.note.close()

    def heard(self) -> None:
        """Note that the process has just sent something."""
        self.heard_s = time.monotonic()

    def stop(self, why: str) -> None:
        """Kill the process, which may be frozen, because of ``why``."""
        self._silent = why
        self.process.kill()

    def buried(self) -> tuple[int, str]:
        """For a process that is dying: the number that it was planning, -1 for none of those it has
        not answered; and how it ended, in words."""
        last = noted(self.note.fileno())
        self.end()
        code = self.process.returncode
        if self._silent:
            how = self._silent
        elif code >= 0:
            how = f"left with code {code}"
        else:
            known = -code in {number.value for number in signal.Signals}
            how = f"was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"
        return last if last in self.numbers else -1, how
