"""Signals that end a job, heard in a user's loop: it stops after the step under way.

A handler in Python never runs while the main thread waits in a collective, so a thread reads the
signals from a pipe. A first one asks the first rank, which plans for all, to plan no further step;
a second one, or the end of the grace, ends this process.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from headrace.comm.processes import end, say, stop_text, stopping
from headrace.errors import SpecError
from headrace.units import seconds_text

__all__ = ["LoopStop"]

_ROUND_S = 0.2


class LoopStop:
    """Hears signals from here on, until :meth:`close`.

    ``ask(number)`` tells all ranks that one of them was asked to stop, and says whether it is the
    first; ``where()`` says what this rank is doing. Raises SpecError outside of the main thread.
    """

    def __init__(
        self,
        *,
        rank: int,
        grace_s: float,
        ask: Callable[[int], bool],
        where: Callable[[], str],
    ) -> None:
        """Take the signals that end a job from their handlers; a thread reads them from a pipe,
        passes each number to ``ask`` and allows ``grace_s`` seconds to stop."""
        if threading.current_thread() is not threading.main_thread():
            raise SpecError(
                "run.stoppable", got="another thread", wanted="the main thread, which hears signals"
            )
        self.number = 0
        self._rank, self._grace_s, self._ask, self._where = rank, grace_s, ask, where
        self._deadline = float("inf")
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._before: dict[signal.Signals, Any] = {
            number: signal.signal(number, lambda *_: None) for number in stopping()
        }
        self._former = signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="loop stop", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give signals their former effect."""
        signal.set_wakeup_fd(self._former)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        os.write(self._waker, b"\0")
        self._thread.join()
        os.close(self._wake)
        os.close(self._waker)

    def _run(self) -> None:
        """The thread: waits for signal numbers in the pipe until a 0 ends it, and ends the process
        where the time to stop has run out."""
        while True:
            if self._wake in select.select([self._wake], [], [], _ROUND_S)[0]:
                heard = os.read(self._wake, 64)
                if 0 in heard:
                    return
                for number in heard:
                    if number in self._before:
                        self._hear(signal.Signals(number))
            if time.monotonic() > self._deadline:
                number = signal.Signals(self.number)
                late = f"not stopped within {seconds_text(self._grace_s)} of {number.name}"
                self._end(late, number)

    def _hear(self, number: signal.Signals) -> None:
        """Ask the loop to stop at a first signal; end the process at a second."""
        if self.number:
            self._end(f"a second signal, {number.name}", number)
        self.number, self._deadline = int(number), time.monotonic() + self._grace_s
        if self._ask(int(number)):
            say(f"stopped by {number.name}: {stop_text(self._grace_s)}")

    def _end(self, why: str, number: signal.Signals) -> None:
        say(f"rank {self._rank} stops: {why}; this rank was in {self._where() or 'no step'}")
        end(128 + number)
