"""What the actions of a step took, by marks that are read when the step is over.

A host issues work to its device and goes on: to read a clock there after each action would be to
stand still until it is done. So an action's start and end are marks among the work, and so are
those of a wait for weights, which is the device's: the host does not wait at all.
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
    """What marks moments and tells the seconds between them."""

    def mark(self) -> Any:
        """Now, in the order of the work: on a device, when what was issued so far has been done."""

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to a later one, for which it waits."""


class StepClock(Clock, Protocol):
    """A clock whose marks may be of moments to come."""

    def past(self, mark: Any) -> bool:
        """Whether a moment has come."""

    def reach(self, mark: Any) -> None:
        """Wait until a moment has come."""


class HostClock:
    """The host's clock, for work that is done when its call returns."""

    def mark(self) -> float:
        """Now."""
        return time.perf_counter()

    def past(self, mark: float) -> bool:
        """It has come."""
        return True

    def reach(self, mark: float) -> None:
        """It has come."""

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
        """Whether the device has come to an event."""
        return mark.query()

    def reach(self, mark: torch.cuda.Event) -> None:
        """Wait until the device has."""
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
    """An action between two marks; ``waits`` are pairs of marks within it."""

    action: str
    kind: str
    start: Any
    end: Any
    tokens: int
    ranks: int
    waits: tuple[tuple[Any, Any], ...]


class Spans:
    """The actions of one step of ``rank``, on ``clock``."""

    def __init__(self, clock: StepClock, rank: int) -> None:
        self._clock, self._rank = clock, rank
        self._begun = clock.mark()
        self._spans: list[_Span] = []
        self._waits: list[tuple[Any, Any]] = []

    @contextmanager
    def action(self, text: str, kind: str, *, tokens: int = 0, ranks: int = 1) -> Iterator[None]:
        """What is issued within is an action, with a row of its own."""
        before, self._waits = self._waits, list[tuple[Any, Any]]()
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
            self._waits = before

    @contextmanager
    def wait(self) -> Iterator[None]:
        """The action around it waits for weights meanwhile."""
        start = self._clock.mark()
        yield
        self._waits.append((start, self._clock.mark()))

    def reach(self, entered: Callable[[str], None]) -> None:
        """Wait until all that was issued is done, one action after the other; ``entered`` is told
        those that are not, so that one which never ends has a name."""
        for span in self._spans:
            if not self._clock.past(span.end):
                entered(span.action)
                self._clock.reach(span.end)

    def rows(self) -> tuple[Row, ...]:
        """A row for each action, when all are done."""
        return tuple(map(self._row, self._spans))

    def _row(self, span: _Span) -> Row:
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
