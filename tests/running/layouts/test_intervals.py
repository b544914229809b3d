"""Rows, splits and partitions against sets of row numbers."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.layouts.partition import Partition, Rows, covers_once, split_rows, split_sizes

rows = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda p: Rows(min(p), max(p)))


def _set(interval: Rows) -> set[int]:
    return set(range(interval.start, interval.stop))


@settings(deadline=None)
@given(rows, rows)
def test_meet_is_set_intersection(one: Rows, other: Rows) -> None:
    """Would catch intervals that only touch, or lie apart, meeting in rows of neither."""
    assert _set(one.meet(other)) == _set(one) & _set(other)
    assert len(one) == len(_set(one))
    assert bool(one) == (one.start < one.stop)


@settings(deadline=None)
@given(rows, rows)
def test_within_finds_the_rows_in_a_tensor_of_others(one: Rows, other: Rows) -> None:
    """Would catch an offset counted from the wrong interval."""
    common = one.meet(other)
    if common:
        held = list(range(other.start, other.stop))
        assert held[common.within(other)] == list(range(common.start, common.stop))


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (-3, -2)])
def test_impossible_rows_are_refused(start: int, stop: int) -> None:
    """Would catch an interval that counts from the end, as Python's slices do."""
    with pytest.raises(SpecError, match=r"rows: got \["):
        Rows(start, stop)


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(1, 40))
def test_sizes_are_as_even_as_they_can_be(count: int, parts: int) -> None:
    """Would catch torch.chunk's cut (32 over 6 as 6, 6, 6, 6, 6, 2)."""
    sizes = split_sizes(count, parts)
    assert len(sizes) == parts
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(1, 9), st.integers(1, 7))
def test_splits_cover_every_row_once_at_unit_borders(units: int, parts: int, unit: int) -> None:
    """Would catch a unit (a KV group, a gate/up block) cut in two, or a row lost at a border."""
    intervals = split_rows(units * unit, parts, unit)
    assert len(intervals) == parts
    seen = Counter(row for interval in intervals for row in _set(interval))
    assert seen == Counter(range(units * unit))
    sizes = [len(interval) for interval in intervals]
    assert all(size % unit == 0 for size in sizes)
    assert max(sizes) - min(sizes) <= unit
    starts = [interval.start for interval in intervals]
    assert starts == sorted(starts)
    assert all(not size for size in sizes[units:])  # with fewer units the last parts are empty


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(2, 7))
def test_rows_that_units_do_not_divide_are_refused(count: int, unit: int) -> None:
    """Would catch the rest of the rows being dropped silently."""
    if count % unit:
        with pytest.raises(SpecError, match=f"multiple of the unit {unit}"):
            split_rows(count, 2, unit)


@settings(deadline=None)
@given(st.integers(0, 8), st.lists(rows, max_size=5))
def test_a_disjoint_cover_has_every_row_once(count: int, parts: list[Rows]) -> None:
    """Would catch gaps, overlaps, nested intervals or a missing end taken for storage."""
    parts = [part for part in parts if part.stop <= count]
    partition = Partition(rows=count, parts=tuple(parts))
    held = Counter(row for part in parts for row in _set(part))
    assert partition.is_disjoint_cover == (held == Counter(range(count)))


@settings(deadline=None)
@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 3))
def test_covers_follow_each_other(cut: int, stop: int, gap: int) -> None:
    """Would catch a cover accepted that ends early, late or with a hole."""
    cut, stop = sorted((cut, stop))
    pieces = [Rows(0, cut), Rows(cut + gap, stop + gap)]
    whole = covers_once([p for p in pieces if p], stop)
    assert whole == (gap == 0 or cut == stop)


@settings(deadline=None)
@given(st.integers(0, 20), st.integers(1, 9), st.integers(1, 4))
def test_even_partitions_leave_units_only_when_they_are_too_few(
    units: int, ranks: int, unit: int
) -> None:
    """Would catch ranks that own nothing while rows remain to be shared out, and storage cut
    inside units where working layouts are not (then equal layouts would move rows)."""
    partition = Partition.even(units * unit, ranks, unit)
    assert partition.is_disjoint_cover
    sizes = [len(part) for part in partition.parts]
    step = unit if units >= ranks else 1
    assert all(part.start % step == 0 for part in partition.parts)
    assert max(sizes) - min(sizes) <= step


def test_a_partition_stays_within_its_rows() -> None:
    """Would catch a part of a larger weight taken for one of this."""
    with pytest.raises(SpecError, match="rows of rank 1"):
        Partition(rows=4, parts=(Rows(0, 4), Rows(3, 5)))
