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
"""Seconds between two looks at the deadline while no signal comes."""


class LoopStop:
    """Hears the signals that end a job from here on, until :meth:`close`.

    ``number`` is the signal that asked this rank to stop; 0 while none has.
    """

    def __init__(
        self,
        *,
        rank: int,
        grace_s: float,
        ask: Callable[[int], bool],
        where: Callable[[], str],
    ) -> None:
        """Replace the handlers of these signals, and start the thread that reads their numbers
        from a pipe.

        Args:
            rank: The number of this rank, for messages.
            grace_s: Seconds to stop in after the first signal; then the process is ended.
            ask: Called with the number of the first signal: asks all ranks to stop; returns whether
                this rank is the first to ask.
            where: Says in words what this rank is doing; empty where it is in no step.

        Raises:
            SpecError: Outside of the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            raise SpecError(
                "run.stoppable", got="another thread", wanted="the main thread, which hears signals"
            )
        self.number = 0
        self._rank, self._grace_s, self._ask, self._where = rank, grace_s, ask, where
        self._deadline = float("inf")  # on time.monotonic(), once a signal has come
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        # Handlers that do nothing keep the process alive; the signal's number goes into the pipe.
        self._former_handlers: dict[signal.Signals, Any] = {
            number: signal.signal(number, lambda *_: None) for number in stopping()
        }
        self._former_wakeup_fd = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="loop stop", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Restore the former handlers of the signals, and end the thread."""
        signal.set_wakeup_fd(self._former_wakeup_fd)
        for number, handler in self._former_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        os.write(self._write_end, b"\0")  # ends the thread
        self._thread.join()
        os.close(self._read_end)
        os.close(self._write_end)

    def _listen(self) -> None:
        """Run the thread: read signal numbers from the pipe until a 0 ends the thread, and end the
        process when the time to stop has run out."""
        while True:
            if self._read_end in select.select([self._read_end], [], [], _ROUND_S)[0]:
                numbers = os.read(self._read_end, 64)  # one byte for each signal
                if 0 in numbers:
                    return
                for number in numbers:
                    if number in self._former_handlers:
                        self._on_signal(signal.Signals(number))
            if time.monotonic() > self._deadline:
                first = signal.Signals(self.number)
                late = f"not stopped within {seconds_text(self._grace_s)} of {first.name}"
                self._end_process(late, first)

    def _on_signal(self, number: signal.Signals) -> None:
        """On the first signal, ask all ranks to stop and set the deadline for that; on a second
        one, end the process."""
        if self.number:
            self._end_process(f"a second signal, {number.name}", number)
        self.number, self._deadline = int(number), time.monotonic() + self._grace_s
        if self._ask(int(number)):
            say(f"stopped by {number.name}: {stop_text(self._grace_s)}")

    def _end_process(self, why: str, number: signal.Signals) -> None:
        """Say why and where this rank stops, and end the process with 128 and the signal's
        number."""
        say(f"rank {self._rank} stops: {why}; this rank was in {self._where() or 'no step'}")
        end(128 + number)
