"""Rows and partitions: every layout of a weight is a partition of its rows into intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.errors import SpecError

__all__ = ["Partition", "Rows", "hull", "split_rows", "split_sizes"]


@dataclass(frozen=True, slots=True)
class Rows:
    """The half-open interval of rows [start, stop); empty when they are equal."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise SpecError("rows", got=f"[{self.start}, {self.stop})", wanted="0 <= start <= stop")

    def __len__(self) -> int:
        return self.stop - self.start

    def meet(self, other: Rows) -> Rows:
        """The rows in both; empty (at the later start) when there are none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Rows(start, max(start, stop))

    def within(self, other: Rows) -> slice:
        """These rows as a slice of a tensor that holds ``other``."""
        return slice(self.start - other.start, self.stop - other.start)


def hull(parts: Iterable[Rows]) -> Rows:
    """The smallest interval with all of ``parts``; empty when they are."""
    some = [part for part in parts if part]
    if not some:
        return Rows(0, 0)
    return Rows(min(p.start for p in some), max(p.stop for p in some))


def split_sizes(count: int, parts: int) -> tuple[int, ...]:
    """``count`` things in ``parts`` sizes that differ by at most one, larger ones first."""
    return tuple(count // parts + (part < count % parts) for part in range(parts))


def split_rows(rows: int, parts: int, unit: int = 1) -> tuple[Rows, ...]:
    """``rows`` cut into ``parts`` intervals at multiples of ``unit``, as even as units allow.

    With fewer units than parts the last parts are empty. Raises SpecError when ``unit`` does not
    divide ``rows``.
    """
    if rows % unit:
        raise SpecError("rows", got=rows, wanted=f"a multiple of the unit {unit}")
    intervals: list[Rows] = []
    start = 0
    for size in split_sizes(rows // unit, parts):
        intervals.append(Rows(start, start + size * unit))
        start += size * unit
    return tuple(intervals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Who holds which rows of one weight: ``parts[rank]``, possibly empty or overlapping."""

    rows: int
    parts: tuple[Rows, ...]

    def __post_init__(self) -> None:
        for rank, part in enumerate(self.parts):
            if part.stop > self.rows:
                raise SpecError(f"rows of rank {rank}", got=part, wanted=f"within {self.rows}")

    @classmethod
    def even(cls, rows: int, ranks: int, unit: int = 1) -> Partition:
        """Disjoint parts at unit borders where there are enough units, else at any row."""
        return cls(rows=rows, parts=split_rows(rows, ranks, unit if rows // unit >= ranks else 1))

    @property
    def is_disjoint_cover(self) -> bool:
        """Whether every row has exactly one holder: what a storage layout must be."""
        return covers_once(sorted((p for p in self.parts if p), key=lambda p: p.start), self.rows)


def covers_once(parts: Sequence[Rows], rows: int) -> bool:
    """Whether sorted, non-empty ``parts`` follow each other from 0 to ``rows``."""
    at = 0
    for part in parts:
        if part.start != at:
            return False
        at = part.stop
    return at == rows
