"""Links: the slices two partitions of the same rows have in common.

[Note: one rule for gradient sums] Pull copies every reader's rows from their owners. Push is its
transpose: each reader's gradient is a *partial sum* over the tokens it worked on, and the owner
adds the slices of all its readers, in rank order. Replicas, data parallelism, norms that every
rank of a group holds whole, and tied embeddings all follow from the table; therefore no method may
hold replicated activations inside a group (Hydraulis, section 5.2, without its LCM slices and
without the reduce-scatter before the link: the intersections are exact as they are).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.layouts.intervals import Partition, Rows

__all__ = ["Slice", "link", "received_rows", "rows_between", "sent_rows"]


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


def rows_between(
    owners: Partition, readers: Partition, rank: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of :func:`link` what ``rank`` serves each reader, and what it reads of each owner: first row
    and end [ranks, 2], the same where there is nothing. All that a rank needs of it, in time that
    grows with the ranks, not with their pairs."""
    assert owners.is_disjoint_cover, "a storage layout covers each row once"
    serving = _meet(_bounds(readers), owners.parts[rank])
    return serving, _meet(_bounds(owners), readers.parts[rank])


def _bounds(partition: Partition) -> NDArray[np.int64]:
    rows = [(part.start, part.stop) for part in partition.parts]
    return np.array(rows, dtype=np.int64)


def _meet(bounds: NDArray[np.int64], rows: Rows) -> NDArray[np.int64]:
    """What each interval has in common with ``rows``; nothing begins and ends at their start."""
    starts, stops = np.maximum(bounds[:, 0], rows.start), np.minimum(bounds[:, 1], rows.stop)
    empty = stops <= starts
    starts[empty] = stops[empty] = rows.start
    return np.stack([starts, stops], axis=1)


def received_rows(slices: tuple[Slice, ...], rank: int) -> int:
    """Rows that ``rank`` gets from other ranks in a pull (and sends to others in a push)."""
    return sum(len(s.rows) for s in slices if s.reader == rank != s.owner)


def sent_rows(slices: tuple[Slice, ...], rank: int) -> int:
    """Rows that ``rank`` sends to other ranks in a pull (and gets from others in a push)."""
    return sum(len(s.rows) for s in slices if s.owner == rank != s.reader)
