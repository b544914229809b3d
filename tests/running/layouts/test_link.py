"""Links against a brute force over single rows."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.layouts.partition import (
    Partition,
    Rows,
    link,
    received_rows,
    rows_between,
    sent_rows,
    split_rows,
)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[Partition, Partition]:
    """A random cut of random rows over owners (in any order, some empty) and any readers."""
    count, ranks = draw(st.integers(0, 15)), draw(st.integers(1, 5))
    cuts = sorted(draw(st.lists(st.integers(0, count), min_size=ranks - 1, max_size=ranks - 1)))
    borders = [0, *cuts, count]
    owned = [Rows(a, b) for a, b in pairwise(borders)]
    readers = []
    for _ in range(ranks):
        ends = sorted(draw(st.tuples(st.integers(0, count), st.integers(0, count))))
        readers.append(Rows(*ends))
    order = draw(st.permutations(owned))
    return (
        Partition(rows=count, parts=tuple(order)),
        Partition(rows=count, parts=tuple(readers)),
    )


def _needed(owners: Partition, readers: Partition) -> set[tuple[int, int, int]]:
    """(row, owner, reader) for every row that a reader needs."""
    return {
        (row, owner, reader)
        for reader, wanted in enumerate(readers.parts)
        for row in range(wanted.start, wanted.stop)
        for owner, held in enumerate(owners.parts)
        if held.start <= row < held.stop
    }


@settings(deadline=None)
@given(partitions())
def test_slices_cover_each_reader_exactly(pair: tuple[Partition, Partition]) -> None:
    """Would catch a row that is missing, sent twice, or fetched from one who has it not."""
    owners, readers = pair
    slices = link(owners, readers)
    moved = [(row, s.owner, s.reader) for s in slices for row in range(s.rows.start, s.rows.stop)]
    assert len(moved) == len(set(moved)) == sum(len(wanted) for wanted in readers.parts)
    assert set(moved) == _needed(owners, readers)


@settings(deadline=None)
@given(partitions())
def test_one_slice_per_pair_in_rank_order(pair: tuple[Partition, Partition]) -> None:
    """Would catch a table in another order: gradients would be added in another order."""
    slices = link(*pair)
    pairs = [(s.reader, s.owner) for s in slices]
    assert pairs == sorted(set(pairs))
    assert all(len(s.rows) for s in slices)


@settings(deadline=None)
@given(partitions())
def test_a_rank_finds_its_own_slices_alone(pair: tuple[Partition, Partition]) -> None:
    """Would catch a rank that sends what its reader does not expect, or in another order: no
    lengths are exchanged."""
    slices = link(*pair)
    for rank in range(len(pair[0].parts)):
        serving, reading = (
            {peer: Rows(*rows) for peer, rows in enumerate(side.tolist()) if rows[0] < rows[1]}
            for side in rows_between(*pair, rank)
        )
        assert serving == {s.reader: s.rows for s in slices if s.owner == rank}
        assert reading == {s.owner: s.rows for s in slices if s.reader == rank}


@settings(deadline=None)
@given(partitions())
def test_counted_rows_are_those_that_change_ranks(pair: tuple[Partition, Partition]) -> None:
    """Would catch own rows counted as traffic, or the two directions exchanged."""
    owners, readers = pair
    slices = link(owners, readers)
    crossing = [(o, r) for _, o, r in _needed(owners, readers) if o != r]
    for rank in range(len(owners.parts)):
        assert received_rows(slices, rank) == sum(r == rank for _, r in crossing)
        assert sent_rows(slices, rank) == sum(o == rank for o, _ in crossing)


@settings(deadline=None)
@given(partitions())
def test_equal_partitions_move_nothing(pair: tuple[Partition, Partition]) -> None:
    """Would catch a table that is not diagonal where storage is the working layout."""
    owners, _ = pair
    slices = link(owners, owners)
    assert [(s.owner, s.reader) for s in slices] == [
        (rank, rank) for rank, part in enumerate(owners.parts) if part
    ]
    assert all(s.rows == owners.parts[s.owner] for s in slices)
    assert all(received_rows(slices, r) == sent_rows(slices, r) == 0 for r in range(5))


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 6))
def test_whole_readers_are_an_all_gather(rows: int, ranks: int) -> None:
    """Would catch more or less traffic than (N - 1) / N of a weight per rank."""
    owners = Partition.even(rows, ranks)
    slices = link(owners, Partition(rows=rows, parts=(Rows(0, rows),) * ranks))
    for rank, own in enumerate(split_rows(rows, ranks)):
        assert received_rows(slices, rank) == rows - len(own)
        assert sent_rows(slices, rank) == (ranks - 1) * len(own)


@pytest.mark.parametrize("parts", [((0, 2), (3, 4)), ((0, 3), (2, 4)), ((0, 2), (2, 3))])
def test_owners_must_hold_every_row_once(parts: tuple[tuple[int, int], ...]) -> None:
    """Would catch storage with a hole: its rows would stay NaN or never be updated."""
    owners = Partition(rows=4, parts=tuple(Rows(*part) for part in parts))
    with pytest.raises(AssertionError, match="covers each row once"):
        link(owners, owners)
