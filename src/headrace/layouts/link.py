"""Links: the slices two partitions of the same rows have in common.

[Note: one rule for gradient sums] Pull copies every reader's rows from their owners. Push is its
transpose: each reader's gradient is a *partial sum* over the tokens it worked on, and the owner
adds the slices of all its readers, in rank order. Replicas, data parallelism, norms that every
rank of a group holds whole, and tied embeddings all follow from the table; therefore no method may
hold replicated activations inside a group (Hydraulis, section 5.2, without its LCM slices and
without the reduce-scatter before the link: the intersections are exact as they are).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.layouts.intervals import Partition, Rows

__all__ = ["Slice", "link", "link_of", "received_rows", "sent_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Rows of one weight that ``reader`` needs and ``owner`` stores."""

    rows: Rows
    owner: int
    reader: int


def link(owners: Partition, readers: Partition) -> tuple[Slice, ...]:
    """All mutual slices, ordered by (reader, owner): at most one per pair.

    ``owners`` must be a disjoint cover (a storage layout); ``readers`` may overlap and have gaps.
    """
    assert owners.is_disjoint_cover, "a storage layout covers each row once"
    return tuple(
        Slice(rows=common, owner=owner, reader=reader)
        for reader, wanted in enumerate(readers.parts)
        for owner, held in enumerate(owners.parts)
        if len(common := held.meet(wanted))
    )


def link_of(
    owners: Partition, readers: Partition, rank: int
) -> tuple[tuple[Slice, ...], tuple[Slice, ...]]:
    """Of :func:`link` the slices that ``rank`` serves, by reader, and those that it reads, by
    owner: all that a rank needs of it, in time that grows with the ranks, not with their pairs."""
    assert owners.is_disjoint_cover, "a storage layout covers each row once"
    held, wanted = owners.parts[rank], readers.parts[rank]
    serves = ((rank, reader, held.meet(rows)) for reader, rows in _near(readers, held))
    reads = ((owner, rank, rows.meet(wanted)) for owner, rows in _near(owners, wanted))
    serving, reading = (
        tuple(Slice(rows=rows, owner=owner, reader=reader) for owner, reader, rows in pairs)
        for pairs in (serves, reads)
    )
    return serving, reading


def _near(partition: Partition, rows: Rows) -> Iterator[tuple[int, Rows]]:
    """The ranks whose parts meet ``rows``, and the parts."""
    for rank, part in enumerate(partition.parts):
        if max(part.start, rows.start) < min(part.stop, rows.stop):
            yield rank, part


def received_rows(slices: tuple[Slice, ...], rank: int) -> int:
    """Rows that ``rank`` gets from other ranks in a pull (and sends to others in a push)."""
    return sum(len(s.rows) for s in slices if s.reader == rank != s.owner)


def sent_rows(slices: tuple[Slice, ...], rank: int) -> int:
    """Rows that ``rank`` sends to other ranks in a pull (and gets from others in a push)."""
    return sum(len(s.rows) for s in slices if s.owner == rank != s.reader)
