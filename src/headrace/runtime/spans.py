"""What the actions of a step took, by marks that are read when the step is over.

A host issues work to its device and goes on: to read a clock there after each action would be to
stand still until it is done. So an action's start and end are marks among the work, and so are
those of a wait for weights, which is the device's: the host does not wait at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from headrace.runtime.clocks import StepClock
from headrace.spec.measurement import BUSY, Row

__all__ = ["Spans"]


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
