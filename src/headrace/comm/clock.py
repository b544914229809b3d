"""The time for which this process was awake, and an alarm that rings when something takes too long.

A thread of its own, which asks nobody anything: whatever other threads wait for, it goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["AwakeClock"]

_ASLEEP_S = 1.0  # a tick this late means that this process was stopped, or starved


class AwakeClock:
    """Seconds in which this process ran: time in which it was stopped itself (Ctrl-Z, a suspended
    machine) or another thread held Python's lock does not count.

    ``too_long(seconds)`` is called when :meth:`answered` was not for ``limit_s`` of them.
    """

    def __init__(
        self, *, tick_s: float, limit_s: float, too_long: Callable[[float], object]
    ) -> None:
        self._tick_s, self._limit_s, self._too_long = tick_s, limit_s, too_long
        self._tick = (0.0, time.monotonic())  # seconds asleep until then, and the last tick
        self._answered_s = self.seconds()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clock", daemon=True)

    def start(self) -> None:
        """Begin to tick."""
        self._tick = (0.0, time.monotonic())
        self.answered()
        self._thread.start()

    def seconds(self) -> float:
        """Seconds awake, from some beginning."""
        now_s = time.monotonic()
        return now_s - self._asleep(now_s)

    def answered(self) -> None:
        """What is waited for has come; it is waited for anew."""
        self._answered_s = self.seconds()

    @property
    def waited_s(self) -> float:
        """Seconds since it last came."""
        return self.seconds() - self._answered_s

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._tick_s):
            now_s = time.monotonic()
            self._tick = (self._asleep(now_s), now_s)
            if self.waited_s > self._limit_s:
                self._too_long(self.waited_s)

    def _asleep(self, now_s: float) -> float:
        asleep_s, last_s = self._tick
        late_s = now_s - last_s - self._tick_s
        return asleep_s + (late_s if late_s > _ASLEEP_S else 0.0)
