"""Runs of blocks, and which rows are marked, against plain sets."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.ops.row_sums import MarkedRows, runs_of
from headrace.spec.blocks import Block, document_blocks

SPANS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted), max_size=12)


def test_a_pack_is_one_run() -> None:
    """Would catch one kernel call per document on a device that takes a pack."""
    (run,) = runs_of(document_blocks((3, 1, 4), True), 10)
    assert (run.queries, run.keys) == (slice(0, 8), slice(0, 8))
    assert run.q_lengths == run.k_lengths == (3, 1, 4)
    assert run.causal


@pytest.mark.parametrize("most", [1, 2, 3])
def test_runs_are_no_longer_than_asked(most: int) -> None:
    """Would catch more documents than a kernel's grid holds, and one lost where a run ends."""
    runs = runs_of(document_blocks((1, 2, 3, 4, 5), False), most)
    assert max(len(run.q_lengths) for run in runs) == most
    assert [n for run in runs for n in run.q_lengths] == [1, 2, 3, 4, 5]
    assert [run.queries.start for run in runs] == [sum(range(1, 1 + i)) for i in range(0, 5, most)]


@pytest.mark.parametrize(
    "second",
    [
        Block(2, 4, 3, 5, False),  # a gap in the keys
        Block(3, 5, 2, 4, False),  # a gap in the queries
        Block(2, 4, 2, 4, True),  # of another kind
        Block(0, 2, 2, 4, False),  # the same queries again
    ],
)
def test_only_neighbours_of_one_kind_are_joined(second: Block) -> None:
    """Would catch lengths that are added up over a gap: rows of other documents."""
    assert len(runs_of((Block(0, 2, 0, 2, False), second), 10)) == 2


def test_empty_blocks_are_left_out() -> None:
    """Would catch kernels called on nothing, which divide by zero or refuse."""
    nothing = (Block(2, 2, 2, 2, True), Block(0, 2, 5, 5, False))
    (run,) = runs_of((Block(0, 2, 0, 2, True), *nothing, Block(2, 3, 2, 3, True)), 10)
    assert run.q_lengths == run.k_lengths == (2, 1)


def test_a_causal_rectangle_is_our_own_mistake() -> None:
    """Would catch a mask whose corner each kernel puts elsewhere."""
    with pytest.raises(AssertionError, match="not square"):
        runs_of((Block(0, 2, 0, 3, True),), 1)


@given(spans=SPANS, probe=st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted))
def test_marks_agree_with_a_set(spans: list[list[int]], probe: list[int]) -> None:
    """Would catch intervals that overlap, are not joined where they touch, or lose a row."""
    rows, wanted = MarkedRows(), set()
    for start, stop in spans:
        cuts = rows.mark(start, stop)
        assert [row for a, b, _ in cuts for row in range(a, b)] == list(range(start, stop))
        assert all((row in wanted) == marked for a, b, marked in cuts for row in range(a, b))
        wanted |= set(range(start, stop))
    intervals = list(rows)
    assert {row for a, b in intervals for row in range(a, b)} == wanted
    assert all(a < b for a, b in intervals)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(intervals))
    assert all(rows.start(rows.index(row)) <= row < intervals[rows.index(row)][1] for row in wanted)
    inside = {row for a, b, marked in rows.pieces(*probe) if marked for row in range(a, b)}
    assert inside == wanted & set(range(*probe))
