"""Runs: what one call of a kernel takes, and which rows its results touch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from headrace.spec.blocks import Block

__all__ = ["RowSpan", "MarkedRows", "KernelRun", "runs_of"]

RowSpan = tuple[int, int, bool]
"""MarkedRows from, rows up to, whether they are marked."""


class KernelRun(NamedTuple):
    """Documents one after the other in both queries and keys, all of one kind."""

    queries: slice
    keys: slice
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    causal: bool
    turned: bool


def runs_of(blocks: Iterable[Block], most: int) -> tuple[KernelRun, ...]:
    """Blocks in their order, neighbours joined up to ``most`` of them; empty ones left out, and
    queries that see the same keys are one document."""
    groups: list[list[Block]] = []
    for block in blocks:
        rows, columns = block.q_stop - block.q_start, block.k_stop - block.k_start
        assert not block.causal or rows == columns, f"{block} is causal and not square"
        if not rows or not columns:
            continue
        if groups and _goes_on(block, groups[-1][-1]):
            groups[-1][-1] = groups[-1][-1]._replace(q_stop=block.q_stop)
        elif most > 1 and groups and len(groups[-1]) < most and _follows(block, groups[-1][-1]):
            groups[-1].append(block)
        else:
            groups.append([block])
    return tuple(
        KernelRun(
            slice(group[0].q_start, group[-1].q_stop),
            slice(group[0].k_start, group[-1].k_stop),
            tuple([block.q_stop - block.q_start for block in group]),
            tuple([block.k_stop - block.k_start for block in group]),
            group[0].causal,
            group[0].turned,
        )
        for group in groups
    )


def _follows(block: Block, last: Block) -> bool:
    starts, stops = (block.q_start, block.k_start), (last.q_stop, last.k_stop)
    return starts == stops and (block.causal, block.turned) == (last.causal, last.turned)


def _goes_on(block: Block, last: Block) -> bool:
    same_keys = (block.k_start, block.k_stop) == (last.k_start, last.k_stop)
    return same_keys and block.q_start == last.q_stop and not (block.causal or last.causal)


class MarkedRows:
    """Marked rows, as disjoint intervals in order."""

    __slots__ = ("_starts", "_stops")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._stops, strict=True)

    def index(self, row: int) -> int:
        """Which interval holds a marked row."""
        return bisect_right(self._starts, row) - 1

    def start(self, index: int) -> int:
        """First row of an interval."""
        return self._starts[index]

    def pieces(self, start: int, stop: int) -> list[RowSpan]:
        """[start, stop) cut where marks begin and end."""
        cuts: list[RowSpan] = []
        at = bisect_right(self._stops, start)
        while start < stop:
            begin = self._starts[at] if at < len(self._starts) else stop
            if start < begin:
                cuts.append((start, min(begin, stop), False))
            if begin < stop:
                cuts.append((max(begin, start), min(self._stops[at], stop), True))
            start, at = cuts[-1][1], at + 1
        return cuts

    def mark(self, start: int, stop: int) -> list[RowSpan]:
        """Mark [start, stop); its pieces as they were before."""
        if start < stop and self._stops and start == self._stops[-1]:  # most often: go on
            self._stops[-1] = stop
            return [(start, stop, False)]
        before = self.pieces(start, stop)
        if start < stop:
            first, last = bisect_left(self._stops, start), bisect_right(self._starts, stop)
            if first < last:
                start = min(start, self._starts[first])
                stop = max(stop, self._stops[last - 1])
            self._starts[first:last], self._stops[first:last] = [start], [stop]
        return before
