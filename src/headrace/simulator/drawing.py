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
    """The rows of a timeline, with forwards and backwards cut where they wait for weights: the
    waits (pulls) have rows of their own."""
    rows = tuple(rows)
    waits_of: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row.kind == "pull" and row.end_s > row.start_s:
            waits_of[row.rank].append((row.start_s, row.end_s))
    for waits in waits_of.values():
        waits.sort()
    cut_rows: list[Row] = []
    for row in rows:
        cut_rows += _cut(row, waits_of[row.rank]) if row.waited_s > 0 else (row,)
    return cut_rows


def _cut(row: Row, waits: list[tuple[float, float]]) -> list[Row]:
    """Cut the ``waits`` of its rank, (begin, end) in seconds and sorted, out of a row. Gives a row
    for each part that is left."""
    first = bisect_left(waits, (row.start_s, 0.0))
    inside = [(start, end) for start, end in waits[first:] if end <= row.end_s]
    # What is left lies between the end of each wait and the begin of the next.
    edges = [(row.start_s, row.start_s), *inside, (row.end_s, row.end_s)]
    return [
        replace(row, start_s=end, end_s=start, waited_s=0.0)
        for (_, end), (start, _) in pairwise(edges)
        if start > end
    ]


def exposed_exchange_s(timeline: Timeline) -> float:
    """Seconds of pulls and pushes that no computation hides, on the rank that waits for them the
    least: the others also wait for the slowest rank to compute."""
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
    rank_digits = len(str(timeline.devices - 1))
    columns = max(1, width - rank_digits - 2)
    total_s = timeline.seconds
    rows: list[list[Row]] = [[] for _ in range(timeline.devices)]
    for row in without_waits(timeline.rows):
        rows[row.rank].append(row)
    lines = [
        f"{rank:>{rank_digits}} |" + _line(rows[rank], columns, total_s)
        for rank in range(timeline.devices)
    ]
    lines.append(f"{seconds_text(total_s)}, idle {percent_text(timeline.idle)}")
    return "\n".join(lines)


def _line(rows: list[Row], columns: int, total_s: float) -> str:
    """The line of a rank that did ``rows``: for each of ``columns`` columns the mark with the most
    of its seconds. All columns together are ``total_s`` seconds."""
    covered: list[dict[str, float]] = [{} for _ in range(columns)]  # by column, seconds of a mark
    column_s = total_s / columns
    for row in rows:
        if row.seconds <= 0 or column_s <= 0:
            continue
        first = min(columns - 1, int(row.start_s / column_s))
        last = min(columns - 1, int(row.end_s / column_s))
        for column in range(first, last + 1):
            begin_s, end_s = column * column_s, (column + 1) * column_s
            overlap_s = min(row.end_s, end_s) - max(row.start_s, begin_s)
            if overlap_s > 0:
                seconds_of = covered[column]
                seconds_of[_mark(row)] = seconds_of.get(_mark(row), 0.0) + overlap_s
    return "".join(_most(seconds_of, column_s) for seconds_of in covered)


def _most(seconds_of: dict[str, float], column_s: float) -> str:
    """The mark with the most seconds in a column of ``column_s`` seconds, given the seconds of each
    mark; a dot (idle) where less than half of the column is covered."""
    if not seconds_of or sum(seconds_of.values()) < column_s / 2:
        return "."
    return max(seconds_of, key=lambda mark: seconds_of[mark])


def _mark(row: Row) -> str:
    """The character for a row: a letter for its micro-batch, or a sign for its kind."""
    micro_batch = _MICRO_BATCH.match(row.action)
    if not micro_batch:
        return _MARKS.get(row.kind, "?")
    letter = ascii_lowercase[int(micro_batch[1]) % 26]
    return letter if row.kind == "forward" else letter.upper()
