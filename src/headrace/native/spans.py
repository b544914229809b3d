"""The times of a step's actions, by marks that are read when the step is over.

A host issues work to its GPU and goes on: reading a clock after each action would block it until
the GPU is done. So the start and end of an action are marks in the GPU's stream (CUDA events), and
so are those of a wait for weights: the GPU waits, not the host. On a CPU a mark is the time, in
seconds of the host's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from headrace.spec.measurement import BUSY, Row

__all__ = [
    "Clock",
    "EventClock",
    "HostClock",
    "Spans",
    "StepClock",
    "clock_of",
]


class Clock(Protocol):
    """Makes marks, as of an action's start and end, and measures the seconds between them."""

    def mark(self) -> Any:
        """A mark at this place in the issued work: on a device, reached once the work before it is
        done."""

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to a later one, for which it waits."""


class StepClock(Clock, Protocol):
    """A clock whose marks may lie in the future, as events of a device do."""

    def past(self, mark: Any) -> bool:
        """Whether a mark has been reached."""

    def reach(self, mark: Any) -> None:
        """Wait until a mark is reached."""


class HostClock:
    """The host's clock, for work that is done when its call returns."""

    def mark(self) -> float:
        """The host's time now, in seconds."""
        return time.perf_counter()

    def past(self, mark: float) -> bool:
        """Always True: a mark of the host's clock lies in the past."""
        return True

    def reach(self, mark: float) -> None:
        """Return at once: a mark of the host's clock lies in the past."""

    def between(self, start: float, end: float) -> float:
        """Seconds from one mark to a later one."""
        return end - start


class EventClock:
    """Events on the current CUDA stream: the device's own time, without the host's waits."""

    def mark(self) -> torch.cuda.Event:
        """An event after all work issued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def past(self, mark: torch.cuda.Event) -> bool:
        """Whether the device has reached an event."""
        return mark.query()

    def reach(self, mark: torch.cuda.Event) -> None:
        """Wait until the device has reached an event."""
        mark.synchronize()

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Seconds from one event to a later one, once it has happened."""
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def clock_of(device: str) -> StepClock:
    """The clock of a rank that works on ``device``."""
    return HostClock() if device == "cpu" else EventClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """An action between the marks ``start`` and ``end``, over ``tokens`` tokens and ``ranks``
    ranks; ``waits`` are (start, end) marks of its waits for weights."""

    action: str
    kind: str
    start: Any
    end: Any
    tokens: int
    ranks: int
    waits: tuple[tuple[Any, Any], ...]


class Spans:
    """The actions of one step of ``rank``, timed by ``clock``."""

    def __init__(self, clock: StepClock, rank: int) -> None:
        """Start the step now, without actions."""
        self._clock, self._rank = clock, rank
        self._begun = clock.mark()
        self._spans: list[_Span] = []
        self._waits: list[tuple[Any, Any]] = []

    @contextmanager
    def action(self, text: str, kind: str, *, tokens: int = 0, ranks: int = 1) -> Iterator[None]:
        """Context whose issued work is timed as one action, with this ``text`` and ``kind``: it
        gets a row of its own, except where the work raises."""
        # waits in this action are its own: those of an action around it go on afterwards
        outer_waits, self._waits = self._waits, list[tuple[Any, Any]]()
        start = self._clock.mark()
        try:
            yield
            self._spans.append(
                _Span(
                    action=text,
                    kind=kind,
                    start=start,
                    end=self._clock.mark(),
                    tokens=tokens,
                    ranks=ranks,
                    waits=tuple(self._waits),
                )
            )
        finally:
            self._waits = outer_waits

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Context in which the surrounding action waits for weights."""
        start = self._clock.mark()
        yield
        self._waits.append((start, self._clock.mark()))

    def reach(self, entered: Callable[[str], None]) -> None:
        """Wait until the device has done all issued actions, one after the other. Before it waits
        for one, ``entered`` is called with its text, so that one that hangs can be reported."""
        for span in self._spans:
            if not self._clock.past(span.end):
                entered(span.action)
                self._clock.reach(span.end)

    def rows(self) -> tuple[Row, ...]:
        """A row for each action; waits until all are done."""
        return tuple(map(self._row, self._spans))

    def _row(self, span: _Span) -> Row:
        """The row of one action, in seconds since the step began; ``waited_s`` is the part in which
        it waited for pulls or pushes, counted where its kind keeps the device busy."""
        start_s = self._clock.between(self._begun, span.start)
        waits = span.waits if span.kind in BUSY else ()
        return Row(
            rank=self._rank,
            action=span.action,
            kind=span.kind,
            start_s=start_s,
            end_s=start_s + self._clock.between(span.start, span.end),
            tokens=span.tokens,
            ranks=span.ranks,
            waited_s=sum(self._clock.between(*wait) for wait in waits),
        )
