"""Progress on stderr: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from headrace.units import count_text, percent_text, seconds_text

__all__ = ["StepDisplay", "Stopwatch", "out_console", "step_line", "tell"]

_QUIET_S = 2.0
"""Work shorter than this shows no progress."""


def tell(text: str) -> None:
    """One line to stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def out_console() -> Console:
    """Standard output, as wide as the terminal; where there is none rows are not cut at 80."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


class Stopwatch:
    """Progress of preparations (indexing, profiling): shown once they take over two seconds.

    Called as ``watch(what, done, of)``.
    """

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._said = 0.0
        self._what = ""

    def __call__(self, what: str, done: int, of: int) -> None:
        """Note that ``done`` of ``of`` parts of ``what`` are done."""
        now = time.perf_counter()
        topic = what.split(" ", maxsplit=1)[0]
        if topic != self._what:
            self._started, self._said, self._what = now, 0.0, topic
        spent = now - self._started
        if spent < _QUIET_S or (now - self._said < _QUIET_S and done < of):
            return
        self._said = now
        left = spent / done * (of - done) if done else float("nan")
        eta = f", {seconds_text(left)} left" if left > 0 else ""
        tell(f"{what}: {done}/{of} after {seconds_text(spent)}{eta}")


def step_line(metrics: Mapping[str, Any], steps: int, eta_s: float) -> str:
    """One step in one line."""
    return (
        f"step {metrics['step'] + 1}/{steps}  loss {metrics['loss']:.3f}  "
        f"{count_text(round(metrics['tokens_per_s']))} tok/s  "
        f"idle {percent_text(metrics['idle'])}  {metrics['strategy']}  "
        f"predicted {seconds_text(metrics['predicted_s'])} "
        f"measured {seconds_text(metrics['step_s'])}  ETA {seconds_text(eta_s)}"
    )


class StepDisplay:
    """Progress of training on the first rank. ``first`` is the step it starts from.

    On a terminal a bar with the last step's line; elsewhere a line every few seconds and for the
    last step.
    """

    def __init__(self, first: int, steps: int, *, every_s: float = 5.0) -> None:
        self._first, self._steps, self._every_s = first, steps, every_s
        self._started = self._said = time.perf_counter()
        console = Console(stderr=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
                TimeRemainingColumn(), console=console,
            )  # fmt: skip
            self._task = self._bar.add_task("training", total=steps, completed=first)
            self._bar.start()

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Show a finished step."""
        now = time.perf_counter()
        done = metrics["step"] + 1
        eta = (now - self._started) / max(1, done - self._first) * (self._steps - done)
        line = step_line(metrics, self._steps, eta)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done)
            self._bar.console.print(line, highlight=False, soft_wrap=True)
        elif now - self._said >= self._every_s or done == self._steps or done == self._first + 1:
            self._said = now
            tell(line)

    def notice(self, text: str) -> None:
        """Show a line that is no step, at once."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, soft_wrap=True, markup=False)
        else:
            tell(text)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
