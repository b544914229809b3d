"""Pulls and pushes between nodes: rows that cross once, sums that are those of one step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from headrace.comm.mesh import Groups
from headrace.errors import LaunchError, PlanMismatch
from headrace.layouts.partition import Partition, Rows, hull, storage_partition
from headrace.layouts.transfer import bucket_links
from headrace.layouts.two_steps import crossing_rows, links_over
from headrace.native.storage import Storage
from headrace.spec import Architecture
from headrace.spec.architecture import WeightSpec, bucket_count
from ranks import run_ranks
from running.layouts.adjoints import sides
from spread import whole
from strategies import laid_out

WEIGHTS = (
    WeightSpec(name="norm", shape=(7,), unit=None, bucket=0),
    WeightSpec(name="matrix", shape=(26, 3), unit=1, bucket=0),
    WeightSpec(name="block", shape=(12, 2, 2), unit=2, bucket=0),
)
CASES = 10
SHAPES = [(4, 2), (6, 3), whole(6, 2), whole(8, 4)]
"""Ranks, and of them on a node."""


def _layouts(
    ranks: int, node_ranks: int, case: int
) -> tuple[dict[str, Partition], dict[str, Partition]]:
    """Storage layouts, and readers: all read all, all of a node the same, or anything."""
    rng = np.random.default_rng((ranks, node_ranks, case))
    owners = {w.name: storage_partition(w, ranks, node_ranks) for w in WEIGHTS}
    readers = {}
    for w in WEIGHTS:
        ends = np.sort(rng.integers(0, w.rows + 1, size=(ranks, 2)), axis=1)
        if case == 0:
            ends[:] = (0, w.rows)
        if case % 2:
            ends = np.repeat(ends[::node_ranks], node_ranks, axis=0)
        if case == 3:
            ends[-node_ranks:] = (2, 2)  # the last node reads nothing
        readers[w.name] = Partition(rows=w.rows, parts=tuple(Rows(*e) for e in ends.tolist()))
    return owners, readers


def _values(ranks: int, seed: int) -> dict[str, torch.Tensor]:
    """[ranks, *shape] of whole numbers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return {
        w.name: torch.randint(-99, 99, (ranks, *w.shape), generator=generator).double()
        for w in WEIGHTS
    }


def _held(part: Rows, rows: torch.Tensor) -> torch.Tensor:
    return rows[part.start : part.stop].clone()


class Wire:
    """Counts the elements that this process sends to ranks of other nodes."""

    def __init__(self, node_ranks: int) -> None:
        self._each, self.sent, self._real = node_ranks, 0, dist.all_to_all_single
        dist.all_to_all_single = self._counted

    def _counted(self, out: Any, x: Any, receive: Any, send: Any, group: Any, **rest: Any) -> Any:
        node = dist.get_rank() // self._each
        peers = dist.get_process_group_ranks(group)
        self.sent += sum(n for r, n in zip(peers, send, strict=True) if r // self._each != node)
        return self._real(out, x, receive, send, group=group, **rest)

    def take(self) -> int:
        sent, self.sent = self.sent, 0
        return sent


def _moved(ranks: int, node_ranks: int) -> list[dict[str, Any]]:
    groups, wire, out = Groups(node_ranks=node_ranks), Wire(node_ranks), []
    groups.prepare([])
    rank = groups.rank
    for case in range(CASES):
        owners, readers = _layouts(ranks, node_ranks, case)
        found: dict[str, Any] = {}
        for way in ("chosen", "one step"):
            (mine,) = (
                links_over(groups, [WEIGHTS], owners, readers)
                if way == "chosen"
                else bucket_links([WEIGHTS], owners, readers, rank, groups.world)
            )
            weights, grads = _values(ranks, case), _values(ranks, case + 100)
            storage = {n: _held(owners[n].parts[rank], w[0]) for n, w in weights.items()}
            working = {
                n: _held(readers[n].parts[rank], w[0] * float("nan")) for n, w in weights.items()
            }
            wire.take()
            mine.pull(storage, working).wait()
            pulled = wire.take()
            partial = {n: _held(readers[n].parts[rank], g[rank]) for n, g in grads.items()}
            sums = {n: torch.full_like(s, 99.0) for n, s in storage.items()}
            mine.push(partial, sums).wait()
            found[way] = {
                "working": {n: w.numpy() for n, w in working.items()},
                "sums": {n: s.numpy() for n, s in sums.items()},
                "crossed": (pulled, wire.take()),
                "waits": mine.waits,
            }
        out.append(found)
    return out


@pytest.mark.parametrize(("ranks", "node_ranks"), SHAPES)
def test_two_steps_give_what_one_gives(ranks: int, node_ranks: int) -> None:
    """Would catch a row of another node in the wrong place, a reader left out of a sum or counted
    by two nodes, and rows that cross more than once for a node."""
    results = run_ranks(ranks, _moved, ranks, node_ranks)
    for case in range(CASES):
        owners, readers = _layouts(ranks, node_ranks, case)
        weights = _values(ranks, case)
        chosen = [r[case]["chosen"] for r in results]
        direct = [r[case]["one step"] for r in results]
        for rank in range(ranks):
            for name, partition in readers.items():
                part = partition.parts[rank]
                wanted = weights[name][0][part.start : part.stop].numpy()
                np.testing.assert_array_equal(chosen[rank]["working"][name], wanted)
                np.testing.assert_array_equal(
                    chosen[rank]["sums"][name], direct[rank]["sums"][name]
                )
        crossing = np.array(
            [
                np.array(crossing_rows(owners[w.name], readers[w.name], node_ranks))
                * w.row_elements
                for w in WEIGHTS
            ]
        ).sum(axis=0)
        in_two = chosen[0]["waits"]
        assert {found["waits"] for found in chosen} == {in_two}
        for k in (0, 1):  # a pull, a push
            assert sum(found["crossed"][k] for found in direct) == crossing[0]
            assert sum(found["crossed"][k] for found in chosen) == crossing[1 if in_two else 0]
        if case == 0:  # all read all: of each row one copy for each other node, not one a rank
            elements = sum(w.elements for w in WEIGHTS)
            assert in_two
            assert crossing[1] == elements * (ranks // node_ranks - 1)
            assert crossing[0] == node_ranks * crossing[1]
    assert {r["chosen"]["waits"] for r in results[0]} == {True, False}


def test_rows_that_would_not_cross_less_go_in_one_step() -> None:
    """Would catch two steps where each rank of a node reads rows of its own, which cross as often
    either way."""
    (matrix,) = (w for w in WEIGHTS if w.name == "matrix")
    owners = storage_partition(matrix, 4, 2)
    halves = Partition(rows=26, parts=(Rows(0, 13), Rows(13, 26)) * 2)
    once, twice = crossing_rows(owners, halves, 2)
    assert once == twice == 26


@pytest.mark.parametrize(("ranks", "node_ranks"), [(4, 2), (6, 3), (6, 2), (12, 4), (1024, 8)])
@pytest.mark.parametrize("unit", [1, 2, None])
def test_what_crosses_together_is_stored_together(
    ranks: int, node_ranks: int, unit: int | None
) -> None:
    """Would catch a storage layout with gaps between what the ranks of one place hold."""
    weight = WeightSpec(name="w", shape=(2222, 3), unit=unit, bucket=0)
    partition = storage_partition(weight, ranks, node_ranks)
    assert partition.is_disjoint_cover
    assert sorted(partition.parts, key=lambda p: (p.start, p.stop)) == sorted(
        storage_partition(weight, ranks).parts, key=lambda p: (p.start, p.stop)
    )
    for place in range(node_ranks):
        parts = partition.parts[place::node_ranks]
        assert len(hull(parts)) == sum(map(len, parts))


def _adjoint(ranks: int, node_ranks: int) -> list[tuple[float, float]]:
    groups, out = Groups(node_ranks=node_ranks), []
    groups.prepare([])
    rank = groups.rank
    torch.manual_seed(rank)
    for case in range(CASES):
        owners, readers = _layouts(ranks, node_ranks, case)
        (mine,) = links_over(groups, [WEIGHTS], owners, readers)
        out.append(sides(mine, WEIGHTS, owners, readers, rank))
    return out


def test_push_is_the_adjoint_of_pull() -> None:
    """<pull x, y> = <x, push y>: would catch a mean of a node instead of a sum."""
    results = run_ranks(4, _adjoint, 4, 2)
    for case in range(CASES):
        left, right = (sum(r[case][side] for r in results) for side in (0, 1))
        assert left == pytest.approx(right, rel=1e-12, abs=1e-12)


def _counted(text: str, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Bytes that each pull and push has under way, and those that are told."""
    a = Architecture(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocabulary=61)
    groups = Groups(node_ranks=2)
    groups.prepare([])
    storage = Storage(a, groups, seed=0, working_dtype=dtype)
    working = storage.working(laid_out(text, a, (5, 4, 3, 2), 4))
    working.begin()
    found = []
    for bucket in range(bucket_count(a)):
        for issue in (working.pull, working.push):
            pending = issue(bucket)
            assert pending is not None
            found.append((pending.nbytes, working.buffer_bytes(bucket)))
            pending.wait()
    return found


@pytest.mark.parametrize("text", ["4*cp1", "1*pp2 + 2*cp1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_under_way_is_told(text: str, dtype: torch.dtype) -> None:
    """Catches what lies between two steps left out of the limit of bytes under way."""
    for rank in run_ranks(4, _counted, text, dtype):
        assert all(0 < held <= told for held, told in rank), rank


def _in_flight() -> list[bool]:
    groups, pending, workings = Groups(node_ranks=2), [], []
    groups.prepare([])
    for case in range(6):
        owners, readers = _layouts(4, 2, 2 * case + 1)
        (mine,) = links_over(groups, [WEIGHTS], owners, readers)
        weights = _values(4, case)
        storage = {n: _held(owners[n].parts[groups.rank], w[0]) for n, w in weights.items()}
        workings.append({n: _held(readers[n].parts[groups.rank], w[1]) for n, w in weights.items()})
        pending.append(mine.pull(storage, workings[-1]))
        for size in range(1, 60):  # whatever was freed is written over
            torch.full((size,), float("nan"))
    kept = [True] * len(pending)
    while pending:
        pending.pop().wait()
    for case, working in enumerate(workings):
        _, readers = _layouts(4, 2, 2 * case + 1)
        for n, w in _values(4, case).items():
            kept[case] &= torch.equal(working[n], _held(readers[n].parts[groups.rank], w[0]))
    return kept


def test_transfers_in_flight_keep_their_buffers() -> None:
    """Would catch what lies between the steps being freed, or used again, before the second."""
    assert run_ranks(4, _in_flight) == [[True] * 6] * 4


def _refused() -> list[str]:
    said = []
    for node_ranks in (3, 0):
        try:
            Groups(node_ranks=node_ranks)
        except LaunchError as error:
            said.append(str(error))
    owners, readers = _layouts(4, 2, 0)
    try:
        links_over(Groups(node_ranks=2), [WEIGHTS], owners, readers)
    except PlanMismatch as error:
        said.append(str(error))
    alike = [Groups(node_ranks=each).node_ranks for each in (1, 4, None)]
    return [*said, str(alike)]


def test_nodes_that_cannot_be_are_refused() -> None:
    """Would catch nodes of different sizes, and groups of nodes that some ranks never made."""
    for first, second, third, alike in run_ranks(4, _refused):
        assert "ranks of a node: got 3" in first
        assert "got 0" in second
        assert "never prepared" in third
        assert alike == "[None, None, None]"
