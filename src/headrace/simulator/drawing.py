"""A timeline as text: one line per rank."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from string import ascii_lowercase

from headrace.errors import SpecError
from headrace.spec.measurement import Row, Timeline
from headrace.units import percent_text, seconds_text

__all__ = [
    "draw",
    "exposed_exchange_s",
    "without_waits",
]


def without_waits(rows: Iterable[Row]) -> list[Row]:
    """The rows, with forwards and backwards cut where they wait for weights: the waits have rows
    of their own."""
    rows = tuple(rows)
    pulls: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row.kind == "pull" and row.end_s > row.start_s:
            pulls[row.rank].append((row.start_s, row.end_s))
    for waits in pulls.values():
        waits.sort()
    found: list[Row] = []
    for row in rows:
        found += _cut(row, pulls[row.rank]) if row.waited_s > 0 else (row,)
    return found


def _cut(row: Row, waits: list[tuple[float, float]]) -> list[Row]:
    """A row without the ``waits`` of its rank, (begin, end) in seconds, as rows for what is
    left."""
    first = bisect_left(waits, (row.start_s, 0.0))
    inside = [(start, end) for start, end in waits[first:] if end <= row.end_s]
    edges = [(row.start_s, row.start_s), *inside, (row.end_s, row.end_s)]
    return [
        replace(row, start_s=end, end_s=start, waited_s=0.0)
        for (_, end), (start, _) in pairwise(edges)
        if start > end
    ]


def exposed_exchange_s(timeline: Timeline) -> float:
    """Seconds of pulls and pushes that no computation hides: of the rank that waits for them the
    least, as others also wait for the last one to compute."""
    waited = [0.0] * timeline.devices
    for row in timeline.rows:
        if row.kind in ("pull", "push"):
            waited[row.rank] += row.seconds
    return min(waited, default=0.0)


_MARKS = {"pull": "<", "push": ">", "update": "=", "send": "-", "recv": "-", "exchange": "-"}
_MICRO_BATCH = re.compile(r"^\d+[FB](\d+)")


def draw(timeline: Timeline, width: int = 80) -> str:
    """A Gantt chart of ``width`` columns per rank.

    Micro-batches are letters in turn (small in forward, capital in backward), ``<`` waits for
    weights, ``>`` for gradients (and for the last rank), ``-`` for a message of another stage,
    ``=`` is the update, ``.`` is idle. A column shows what took most of its time. Raises SpecError
    for fewer than ten columns.
    """
    if width < 10:
        raise SpecError("columns of a chart", got=width, wanted=">= 10")
    ranks = len(str(timeline.devices - 1))
    columns = max(1, width - ranks - 2)
    total_s = timeline.seconds
    rows: list[list[Row]] = [[] for _ in range(timeline.devices)]
    for row in without_waits(timeline.rows):
        rows[row.rank].append(row)
    lines = [
        f"{rank:>{ranks}} |" + _line(rows[rank], columns, total_s)
        for rank in range(timeline.devices)
    ]
    lines.append(f"{seconds_text(total_s)}, idle {percent_text(timeline.idle)}")
    return "\n".join(lines)


def _line(rows: list[Row], columns: int, total_s: float) -> str:
    """The line of a rank with these rows: for every column the mark that covers most of it."""
    covered: list[dict[str, float]] = [{} for _ in range(columns)]
    column_s = total_s / columns
    for row in rows:
        if row.seconds <= 0 or column_s <= 0:
            continue
        first = min(columns - 1, int(row.start_s / column_s))
        last = min(columns - 1, int(row.end_s / column_s))
        for column in range(first, last + 1):
            begins, ends = column * column_s, (column + 1) * column_s
            shared = min(row.end_s, ends) - max(row.start_s, begins)
            if shared > 0:
                marks = covered[column]
                marks[_mark(row)] = marks.get(_mark(row), 0.0) + shared
    return "".join(_most(marks, column_s) for marks in covered)


def _most(marks: dict[str, float], column_s: float) -> str:
    """The mark with the most seconds in a column of ``column_s``; a dot where less than half of it
    is covered."""
    if not marks or sum(marks.values()) < column_s / 2:
        return "."
    return max(marks, key=lambda mark: marks[mark])


def _mark(row: Row) -> str:
    """The character for a row: a letter for its micro-batch, or a sign for its kind."""
    found = _MICRO_BATCH.match(row.action)
    if not found:
        return _MARKS.get(row.kind, "?")
    letter = ascii_lowercase[int(found[1]) % 26]
    return letter if row.kind == "forward" else letter.upper()
