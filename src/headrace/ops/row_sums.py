"""Sums whose parts come one after the other, each of some neighbouring rows.

[Note: held parts] Adding parts one by one reads and writes the sum for each of them, and the sum is
fp32 where parts are of half types. A device is limited by its memory's speed, so it holds the parts
instead, and one kernel adds all parts of a row in fp32 and rounds once. Where more than ``HELD``
times the rows of the sum are held, they are added up into one fp32 part. A CPU adds each part at
once, while it is still in its caches.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from headrace.ops.fused import fused, widened
from headrace.spec.blocks import Block

__all__ = [
    "HELD",
    "KernelRun",
    "MarkedRows",
    "RowSpan",
    "RowSum",
    "Segment",
    "adds_at_once",
    "runs_of",
    "segments",
]

RowSpan = tuple[int, int, bool]
"""(start, stop, whether the rows [start, stop) are marked)."""


class KernelRun(NamedTuple):
    """Consecutive documents that one kernel call computes: their rows ``queries`` of q and ``keys``
    of k and v, and the lengths of each in tokens. All of them are ``causal`` and ``turned``, or
    not, as :class:`Block` says."""

    queries: slice
    keys: slice
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    causal: bool
    turned: bool


def runs_of(blocks: Iterable[Block], most: int) -> tuple[KernelRun, ...]:
    """Join ``blocks``, in their order, to runs, one for each call of a kernel. A block is a
    document; a run has at most ``most`` of them. Empty blocks are left out, and neighbouring
    queries that see the same keys become one document."""
    groups: list[list[Block]] = []
    for block in blocks:
        rows, columns = block.q_stop - block.q_start, block.k_stop - block.k_start
        assert not block.causal or rows == columns, f"{block} is causal and not square"
        if not rows or not columns:
            continue
        if groups and _extends_queries(block, groups[-1][-1]):
            groups[-1][-1] = groups[-1][-1]._replace(q_stop=block.q_stop)
        elif (
            most > 1
            and groups
            and len(groups[-1]) < most
            and _is_next_document(block, groups[-1][-1])
        ):
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


def _is_next_document(block: Block, last: Block) -> bool:
    """Whether ``block`` begins where ``last`` ends, among queries and among keys, and is of the
    same kind."""
    starts, stops = (block.q_start, block.k_start), (last.q_stop, last.k_stop)
    return starts == stops and (block.causal, block.turned) == (last.causal, last.turned)


def _extends_queries(block: Block, last: Block) -> bool:
    """Whether ``block`` has the queries right after those of ``last`` and the same keys, all of
    which count."""
    same_keys = (block.k_start, block.k_stop) == (last.k_start, last.k_stop)
    return same_keys and block.q_start == last.q_stop and not (block.causal or last.causal)


class MarkedRows:
    """A set of rows, as disjoint sorted intervals."""

    __slots__ = ("_starts", "_stops")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The marked intervals [start, stop), in order."""
        return zip(self._starts, self._stops, strict=True)

    def index(self, row: int) -> int:
        """Index of the interval that holds a marked row."""
        return bisect_right(self._starts, row) - 1

    def start(self, index: int) -> int:
        """First row of an interval."""
        return self._starts[index]

    def pieces(self, start: int, stop: int) -> list[RowSpan]:
        """The rows [start, stop), cut where marked rows begin and end; each piece says whether its
        rows are marked."""
        spans: list[RowSpan] = []
        # the first marked interval that ends behind ``start``
        index = bisect_right(self._stops, start)
        while start < stop:
            marked_start = self._starts[index] if index < len(self._starts) else stop
            if start < marked_start:
                spans.append((start, min(marked_start, stop), False))
            if marked_start < stop:
                spans.append((max(marked_start, start), min(self._stops[index], stop), True))
            start, index = spans[-1][1], index + 1
        return spans

    def mark(self, start: int, stop: int) -> list[RowSpan]:
        """Mark the rows [start, stop); returns :meth:`pieces` of them as it was before."""
        if start < stop and self._stops and start == self._stops[-1]:  # the usual case: extend
            self._stops[-1] = stop
            return [(start, stop, False)]
        pieces = self.pieces(start, stop)
        if start < stop:
            # replace all intervals that overlap or touch [start, stop) by one
            first, last = bisect_left(self._stops, start), bisect_right(self._starts, stop)
            if first < last:
                start = min(start, self._starts[first])
                stop = max(stop, self._stops[last - 1])
            self._starts[first:last], self._stops[first:last] = [start], [stop]
        return pieces


HELD = 9
"""The rows that a sum may hold in parts, in multiples of its own rows; see [Note: held parts].

It is just above the 8.5 that ring attention over eight ranks needs on its last rank. So many parts
of half types take less memory than the temporary tensors of a gated feed-forward with 3.5 h
features, which are not alive during attention."""


class Segment(NamedTuple):
    """Rows [start, stop), and the indices of the parts that contain them; other parts contain none
    of them."""

    start: int
    stop: int
    parts: list[int]


def adds_at_once(x: torch.Tensor) -> bool:
    """Whether parts like ``x`` are added as they come, as on a CPU, or held and added at the end;
    see [Note: held parts]."""
    return x.device.type == "cpu"


def segments(spans: Sequence[tuple[int, int]], rows: int) -> list[Segment]:
    """The rows from 0 to ``rows``, cut where a span begins or ends, each piece with the indices of
    the spans that contain it; ``spans`` are (start, stop) of several parts."""
    edges = sorted({0, rows, *(edge for span in spans for edge in span)})
    segment_at = {edge: i for i, edge in enumerate(edges)}
    pieces = [Segment(begin, end, []) for begin, end in pairwise(edges)]
    for i, (start, stop) in enumerate(spans):
        for segment in pieces[segment_at[start] : segment_at[stop]]:
            segment.parts.append(i)
    return pieces


class RowSum:
    """A sum [rows, ...] of parts [n, ...], each of which is added to n rows from a given one on;
    see [Note: held parts]."""

    __slots__ = ("_held", "_marked", "_parts", "_rows", "_total")

    def __init__(self, rows: int, *, total: torch.Tensor | None = None, fresh: bool = True) -> None:
        """An empty sum of ``rows`` rows. On a CPU parts are added to ``total`` [rows, ...] at once.
        Where it is ``fresh``, its contents are overwritten; else parts are added to them."""
        self._rows = rows
        # on a CPU: the tensor to which parts are added, and the rows of it that have a value
        self._total = total if total is not None and adds_at_once(total) else None
        self._marked = MarkedRows()
        if not fresh:
            self._marked.mark(0, rows)
        # else: (first row, part) of each held part, and how many rows they have together
        self._parts: list[tuple[int, torch.Tensor]] = []
        self._held = 0

    def add(self, start: int, part: torch.Tensor) -> None:
        """Add ``part`` [n, ...] to the rows from ``start`` on."""
        if not len(part):
            return
        if self._total is not None:
            _add(self._total, part, self._marked.mark(start, start + len(part)))
            return
        self._parts.append((start, part))
        self._held += len(part)
        if self._held > HELD * self._rows:
            self._join(part)

    def write(self, out: torch.Tensor, places: torch.Tensor | None = None) -> None:
        """Write the sum to ``out`` [rows, ...], of any strides and any type; rows without a part
        become 0. Row i of the sum goes to row ``places[i]`` of ``out`` where ``places`` [rows] are
        given, else to row i. Where parts were added to a ``total`` at once, ``out`` must be that
        tensor."""
        if self._total is not None:
            assert places is None, "parts were added in order"
            for begin, end, has_value in self._marked.pieces(0, self._rows):
                if not has_value:
                    out[begin:end] = 0
            return
        for start, stop, parts in self._segments():
            if places is not None:
                _put_sum(out, places[start:stop], parts)
            elif len(parts) > 1:
                _add_up(out[start:stop], parts)
            else:
                out[start:stop] = parts[0] if parts else 0

    def add_to(self, out: torch.Tensor) -> None:
        """Add the sum of the held parts to ``out`` [rows, ...]; parts added to a ``total`` at once
        are there already."""
        for start, stop, parts in self._segments():
            if len(parts) > 1:
                _add_to(out[start:stop], parts)
            elif parts:
                out[start:stop].add_(parts[0])

    def only(self) -> torch.Tensor | None:
        """The sum without a copy where it is one held part of all rows, else None."""
        if len(self._parts) != 1 or len(self._parts[0][1]) != self._rows:
            return None
        return self._parts[0][1]

    def _segments(self) -> list[tuple[int, int, list[torch.Tensor]]]:
        """(start, stop, the rows [start, stop) of every part that has them) of each segment between
        borders of parts."""
        spans = [(start, start + len(part)) for start, part in self._parts]
        return [
            (
                begin,
                end,
                [self._parts[i][1][begin - spans[i][0] : end - spans[i][0]] for i in part_indices],
            )
            for begin, end, part_indices in segments(spans, self._rows)
        ]

    def _join(self, like: torch.Tensor) -> None:
        """Add the held parts up, in at least fp32, so that each row is held once and their memory
        stays bounded. ``like`` is any part: it gives type, device and the shape of a row."""
        joined = list[tuple[int, torch.Tensor]]()
        for start, stop, parts in self._segments():
            if len(parts) > 1:
                sums = like.new_empty((stop - start, *like.shape[1:]), dtype=_wide(like))
                _add_up(sums, parts)
                joined.append((start, sums))
            elif parts:
                joined.append((start, parts[0]))
        self._parts, self._held = joined, sum(len(part) for _, part in joined)


def _add(total: torch.Tensor, part: torch.Tensor, pieces: Sequence[RowSpan]) -> None:
    """Add ``part`` [n, ...] to the rows of ``total`` that ``pieces`` cover, n rows one after the
    other. To marked rows, which hold a value already, it is added; to the others it is copied."""
    start = pieces[0][0]
    for begin, end, has_value in pieces:
        rows = part if len(pieces) == 1 else part[begin - start : end - start]
        if has_value:
            total[begin:end].add_(rows)
        else:
            total[begin:end].copy_(rows)


def _put_sum(out: torch.Tensor, places: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Write the sum of parts, each [n, ...], to the n rows of ``out`` whose indices are ``places``;
    zeros where there are no parts."""
    if not parts:
        out.index_fill_(0, places, 0)
    elif len(parts) == 1 and parts[0].dtype == out.dtype:
        out.index_copy_(0, places, parts[0])
    else:
        _put_up(out, places, parts)


def _wide(x: torch.Tensor) -> torch.dtype:
    """The type in which tensors like x are added up: fp64 for fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum of equally shaped parts in at least fp32, in their order."""
    total = widened(parts[0])
    for part in parts[1:]:
        total = total + part
    return total


@fused("add_up_(Tensor(a!) out, Tensor[] parts) -> ()")
def _add_up(out: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Write the sum of ``parts`` to ``out``."""
    out.copy_(_sum(parts))


@fused("add_to_(Tensor(a!) out, Tensor[] parts) -> ()")
def _add_to(out: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Add the sum of ``parts`` to ``out``, rounded once."""
    out.copy_(widened(out) + _sum(parts))


@fused("put_up_(Tensor(a!) out, Tensor places, Tensor[] parts) -> ()")
def _put_up(out: torch.Tensor, places: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Write the sum of ``parts`` [n, ...] to the n rows of ``out`` whose indices are ``places``."""
    out.index_copy_(0, places, _sum(parts).to(out.dtype))
