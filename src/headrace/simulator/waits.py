"""Rows of a step of which no two of a rank are at the same time."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from headrace.spec.measurement import Row, Timeline

__all__ = ["exposed_exchange_s", "without_waits"]


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
