"""Progress of a run on stderr: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from headrace.cli.app import Output
from headrace.engine.listener import Listener, tell
from headrace.units import count_text, percent_text, seconds_text

if TYPE_CHECKING:
    from headrace.spec.step import Step

__all__ = ["Terminal", "out_console", "step_line", "tell"]


def out_console() -> Output:
    """Standard output, as wide as the terminal, or 120 columns where it is none, so that rows of
    tables are not cut at 80."""
    return Output(highlight=False, width=None if sys.stdout.isatty() else 120)


def step_line(metrics: Mapping[str, Any], steps: int, eta_s: float | None = None) -> str:
    """One step of ``steps`` in one line; ``eta_s`` are the seconds until the run ends, which are
    left out for the last step."""
    last = metrics["step"] + 1 >= steps
    left = "" if eta_s is None or last else f"  ETA {seconds_text(eta_s)}"
    return (
        f"step {metrics['step'] + 1}/{steps}  loss {metrics['loss']:.3f}  "
        f"{count_text(round(metrics['tokens_per_s']))} tok/s  "
        f"idle {percent_text(metrics['idle'])}  {metrics['strategy']}  "
        f"predicted {seconds_text(metrics['predicted_s'])} "
        f"measured {seconds_text(metrics['step_s'])}{left}"
    )


class Terminal(Listener):
    """Shows a run to whoever started it: on a terminal one live line, the last step's, with a bar,
    and every minute a line that stays; elsewhere a line every few seconds. The first and the last
    step have a line everywhere."""

    def __init__(self, *, every_s: float = 5.0, stays_s: float = 60.0) -> None:
        """Without a terminal a line comes at most every ``every_s`` seconds; on one a line stays
        every ``stays_s``."""
        super().__init__()
        self._every_s, self._stays_s = every_s, stays_s
        self._first = self._steps = 0
        self._started = self._last_line = time.perf_counter()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def begin(self, first: int, steps: int) -> None:
        """Show the bar, where there is a terminal."""
        self._first, self._steps = first, steps
        self._started = self._last_line = time.perf_counter()
        console = Console(stderr=True)
        if console.is_terminal:
            one_line = Column(ratio=1, no_wrap=True, overflow="ellipsis")
            self._every_s = self._stays_s
            self._bar = Progress(
                TextColumn("{task.description}", markup=False, table_column=one_line),
                BarColumn(bar_width=16),
                TimeRemainingColumn(),
                console=console,
                expand=True,
            )
            self._task = self._bar.add_task("training", total=steps, completed=first)
            self._bar.start()

    def step(self, step: Step, notices: Sequence[str]) -> None:
        """Show a finished step where it is time for a line, and its notices always."""
        now, metrics = time.perf_counter(), step.metrics
        done = metrics["step"] + 1
        seconds_per_step = (now - self._started) / max(1, done - self._first)
        eta_s = seconds_per_step * (self._steps - done)
        if self._bar is not None and self._task is not None:
            self._bar.update(
                self._task, completed=done, description=step_line(metrics, self._steps)
            )
        if now - self._last_line >= self._every_s or done in (self._first + 1, self._steps):
            self._last_line = now
            self.tell(step_line(metrics, self._steps, eta_s))
        for notice in notices:
            self.tell(notice)

    def tell(self, text: str) -> None:
        """Show a line, above the bar where there is one."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, soft_wrap=True, markup=False)
        else:
            tell(text)

    def end(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
