"""Messages of a run (lines, progress, steps), and their listeners; no torch here."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headrace.units import seconds_text

if TYPE_CHECKING:
    from headrace.spec.step import Step

__all__ = ["Listener", "ProgressLines", "tell"]

_QUIET_S = 2.0
"""Work shorter than this shows no progress."""


def tell(text: str) -> None:
    """Write one line to stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class ProgressLines:
    """Progress of preparations (indexing, profiling), in lines once they take over two seconds.

    Called as ``progress(what, done, of)``.
    """

    def __init__(self, tell: Callable[[str], object] = tell) -> None:
        self._tell = tell
        self._topic = ""  # the first word of the work that was last told of
        self._started = time.perf_counter()  # when that work began
        self._said = 0.0  # when its last line was told

    def __call__(self, what: str, done: int, of: int) -> None:
        """Tell that ``done`` of ``of`` parts of ``what`` are done, unless it has taken less than
        two seconds so far, or a line was told within the last two and parts are left."""
        now = time.perf_counter()
        topic = what.split(" ", maxsplit=1)[0]
        if topic != self._topic:
            self._started, self._said, self._topic = now, 0.0, topic
        spent = now - self._started
        if spent < _QUIET_S or (now - self._said < _QUIET_S and done < of):
            return
        self._said = now
        left = spent / done * (of - done) if done else float("nan")  # NaN is not shown
        eta = f", {seconds_text(left)} left" if left > 0 else ""
        self._tell(f"{what}: {done}/{of} after {seconds_text(spent)}{eta}")


class Listener:
    """Receives the messages of the first rank: text goes to ``tell``, finished steps to
    ``on_step``.

    Other front ends override its methods.
    """

    def __init__(
        self,
        *,
        on_step: Callable[[Step], object] | None = None,
        tell: Callable[[str], object] = tell,
    ) -> None:
        """Pass each step to ``on_step`` and each line of text to ``tell``."""
        self._on_step, self._tell = on_step, tell
        self._progress = ProgressLines(tell)

    def tell(self, text: str) -> None:
        """Print a line of text for people, apart from the data."""
        self._tell(text)

    def progress(self, what: str, done: int, of: int) -> None:
        """Report that ``done`` of ``of`` parts of a preparation, named ``what``, are done."""
        self._progress(what, done, of)

    def begin(self, first: int, steps: int) -> None:
        """Called before the steps ``first`` to ``steps - 1`` start; does nothing here."""

    def step(self, step: Step, notices: Sequence[str]) -> None:
        """Called when a step is finished; ``notices`` are sentences that a user should read."""
        if self._on_step is not None:
            self._on_step(step)
        for notice in notices:
            self.tell(notice)

    def end(self) -> None:
        """Called when the run has ended; does nothing here."""
