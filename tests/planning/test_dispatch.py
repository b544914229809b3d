"""Blocks and schedules."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.costs import synthetic_costs
from headrace.planning import Problem
from headrace.planning.dispatch import (
    deadline_schedule,
    finish_times,
    list_schedule,
    order_of,
)
from headrace.planning.sizing import Batch, SizeTable
from headrace.spec import Lengths


def test_larger_groups_first() -> None:
    """Catches an order in which short sequences delay groups that need several free ranks."""
    assert order_of([(1, 2), (4, 0), (2, 1), (2, 0)]) == [(4, 0), (2, 0), (2, 1), (1, 2)]


@settings(deadline=None)
@given(
    devices=st.integers(1, 9),
    jobs=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 8), st.floats(0, 5)), max_size=12),
)
def test_finish_times_are_those_of_a_clock(
    devices: int, jobs: list[tuple[int, int, float]]
) -> None:
    """Catches a block that starts before one of its ranks is free."""
    blocks = [((p, k), s) for p, k, s in jobs if p * (k + 1) <= devices]
    free = [0.0] * devices
    for (p, k), seconds in blocks:
        start = max(free[p * k : p * (k + 1)])
        for rank in range(p * k, p * (k + 1)):
            free[rank] = start + seconds
    assert finish_times(devices, blocks) == free


def test_longest_first_onto_the_first_free_block() -> None:
    """Catches ignoring what larger groups left, and a constant paid per sequence."""
    seconds = [[9.0, 4.0, 3.0, 2.0], [5.0, 0.0, 0.0, 0.0]]
    ends, members = list_schedule(3, (1, 2), [1, 0, 0, 0], seconds, [1.0, 0.5])
    # Ranks 0 and 1 are busy until 5.5; rank 2 takes 4 and 3 (until 8), rank 0 takes 2.
    assert members == {(2, 0): [0], (1, 2): [1, 2], (1, 0): [3]}
    assert ends == 8.5


def table_of(devices: int, lengths: list[int]) -> SizeTable:
    problem = Problem(costs=synthetic_costs(devices), devices=devices)
    batch = Batch.of(Lengths.of(lengths))
    arena = problem.arena("whole", problem.group_sizes)
    return SizeTable.of(arena.frontiers, batch)


@settings(deadline=None)
@given(
    devices=st.integers(1, 9),
    lengths=st.lists(st.integers(1, 50_000), min_size=1, max_size=20),
    factor=st.floats(0.01, 3),
)
def test_deadlines_place_every_sequence(devices: int, lengths: list[int], factor: float) -> None:
    """Catches sequences that are lost when no size meets the deadline, and unsorted blocks."""
    table = table_of(devices, lengths)
    deadline_s = factor * float(table.alone.min(axis=0).max())
    members = deadline_schedule(devices, table, deadline_s)
    assert sorted(i for held in members.values() for i in held) == list(range(len(lengths)))
    assert all(held == sorted(held) for held in members.values())
    assert all((k + 1) * p <= devices for p, k in members)


def test_a_generous_deadline_costs_the_least_device_seconds() -> None:
    """Catches spreading over ranks what one rank can do in time."""
    table = table_of(4, [3000, 2000, 10])
    assert {p for p, _ in deadline_schedule(4, table, 1e9)} == {1}
    tight_s = float(table.alone.min(axis=0).max()) * 1.01
    assert max(p for p, _ in deadline_schedule(4, table, tight_s)) == 4
