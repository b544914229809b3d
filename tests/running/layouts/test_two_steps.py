"""Pulls and pushes between nodes: rows that cross once, sums that are those of one step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from headrace.comm.mesh import Groups
from headrace.errors import LaunchError, PlanMismatch
from headrace.layouts.partition import Partition, Rows, hull, storage_partition
from headrace.layouts.transfer import bucket_links
from headrace.layouts.two_steps import _cut_evenly, _held_rows, crossing_rows, links_over
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
SHAPES = [
    (2, 2),
    (3, 1),
    (1, 2, 1),
    whole((3, 3)),
    whole((2, 2, 2)),
    whole((4, 4)),
    whole((3, 2, 3)),
]
"""Ranks of each node."""


def _layouts(
    sizes: tuple[int, ...], case: int
) -> tuple[dict[str, Partition], dict[str, Partition]]:
    """Storage layouts, and readers: all read all, all of a node the same, or anything."""
    rng, ranks = np.random.default_rng((*sizes, case)), sum(sizes)
    owners = {w.name: storage_partition(w, ranks, sizes) for w in WEIGHTS}
    readers = {}
    for w in WEIGHTS:
        ends = np.sort(rng.integers(0, w.rows + 1, size=(ranks, 2)), axis=1)
        if case == 0:
            ends[:] = (0, w.rows)
        if case % 2:
            ends = np.repeat(ends[: len(sizes)], sizes, axis=0)
        if case == 3:
            ends[-sizes[-1] :] = (2, 2)  # the last node reads nothing
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

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._nodes = np.repeat(np.arange(len(sizes)), sizes)
        self.sent, self._real = 0, dist.all_to_all_single
        dist.all_to_all_single = self._counted

    def _counted(self, out: Any, x: Any, receive: Any, send: Any, group: Any, **rest: Any) -> Any:
        here = self._nodes[dist.get_rank()]
        peers = dist.get_process_group_ranks(group)
        self.sent += sum(n for r, n in zip(peers, send, strict=True) if self._nodes[r] != here)
        return self._real(out, x, receive, send, group=group, **rest)

    def take(self) -> int:
        sent, self.sent = self.sent, 0
        return sent


def _moved(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    groups, wire, out = Groups(node_sizes=sizes), Wire(sizes), []
    ranks = sum(sizes)
    groups.prepare([])
    rank = groups.rank
    for case in range(CASES):
        owners, readers = _layouts(sizes, case)
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


@pytest.mark.parametrize("sizes", SHAPES)
def test_two_steps_give_what_one_gives(sizes: tuple[int, ...]) -> None:
    """Would catch a row of another node in the wrong place, a reader left out of a sum or counted
    by two nodes, and rows that cross more than once for a node."""
    ranks = sum(sizes)
    results = run_ranks(ranks, _moved, sizes)
    for case in range(CASES):
        owners, readers = _layouts(sizes, case)
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
                np.array(crossing_rows(owners[w.name], readers[w.name], sizes)) * w.row_elements
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
            assert crossing[1] == elements * (len(sizes) - 1)
            if len({*sizes}) == 1:
                assert crossing[0] == sizes[0] * crossing[1]
    assert {r["chosen"]["waits"] for r in results[0]} == {True, False}


def test_rows_that_would_not_cross_less_go_in_one_step() -> None:
    """Would catch two steps where each rank of a node reads rows of its own, which cross as often
    either way."""
    (matrix,) = (w for w in WEIGHTS if w.name == "matrix")
    owners = storage_partition(matrix, 4, (2, 2))
    halves = Partition(rows=26, parts=(Rows(0, 13), Rows(13, 26)) * 2)
    once, twice = crossing_rows(owners, halves, (2, 2))
    assert once == twice == 26


@pytest.mark.parametrize(
    "sizes", [(2, 2), (3, 3), (2, 2, 2), (4, 4, 4), (8,) * 128, (8, 8, 7), (3, 4, 1, 4)]
)
@pytest.mark.parametrize("unit", [1, 2, None])
def test_what_crosses_together_is_stored_together(sizes: tuple[int, ...], unit: int | None) -> None:
    """Would catch a storage layout with gaps between what the ranks of one place hold."""
    weight = WeightSpec(name="w", shape=(2222, 3), unit=unit, bucket=0)
    ranks = sum(sizes)
    partition = storage_partition(weight, ranks, sizes)
    assert partition.is_disjoint_cover
    assert sorted(partition.parts, key=lambda p: (p.start, p.stop)) == sorted(
        storage_partition(weight, ranks).parts, key=lambda p: (p.start, p.stop)
    )
    places = np.concatenate([np.arange(size) for size in sizes])
    for place in range(max(sizes)):
        parts = [partition.parts[rank] for rank in np.flatnonzero(places == place)]
        assert len(hull(parts)) == sum(map(len, parts))


@pytest.mark.parametrize("sizes", [(8, 8), (8, 7), (8, 8, 4), (8, 3), (7, 8, 8), (8, 8, 2)])
def test_ranks_of_a_node_share_what_crosses_to_it(sizes: tuple[int, ...]) -> None:
    """Catches a rank that receives more than its part for its node, and forecasts of anything else
    than the rank that receives the most."""
    ranks, rows = sum(sizes), 5040
    weight = WeightSpec(name="w", shape=(rows, 3), unit=1, bucket=0)
    owners = storage_partition(weight, ranks, sizes)
    readers = Partition(rows=rows, parts=(Rows(0, rows),) * ranks)
    node_of = np.repeat(np.arange(len(sizes)), sizes)
    received = []
    for rank, held in enumerate(_held_rows(owners, readers, sizes)):
        others = [part for at, part in enumerate(owners.parts) if node_of[at] != node_of[rank]]
        received.append(sum(len(part.meet(held)) for part in others))
    fewest = min(sizes)
    assert max(received) == pytest.approx(rows * (ranks - fewest) / (ranks * fewest), rel=0.02)
    assert sum(received) == crossing_rows(owners, readers, sizes)[1] == rows * (len(sizes) - 1)


@pytest.mark.parametrize("seed", range(40))
def test_what_a_node_holds_is_cut_evenly(seed: int) -> None:
    """Catches rows that no rank of a small node holds, or two do, or that it does not read."""
    rng = np.random.default_rng(seed)
    ends = np.sort(rng.integers(0, 60, size=7))
    stored = [Rows(int(a), int(b)) for a, b in zip(ends[::2], ends[1::2], strict=False)]
    needed = Rows(*np.sort(rng.integers(0, 60, size=2)).tolist())
    count = int(rng.integers(1, 6))
    held = _cut_evenly(needed, stored, count)
    assert [held[0].start, held[-1].stop] == [needed.start, needed.stop]
    assert all(one.stop == other.start for one, other in pairwise(held))
    crossing = [len(part) - sum(len(part.meet(other)) for other in stored) for part in held]
    if any(crossing):
        assert max(crossing) - min(crossing) <= 1
    else:
        assert max(map(len, held)) - min(map(len, held)) <= 1


def _adjoint(sizes: tuple[int, ...]) -> list[tuple[float, float]]:
    groups, out = Groups(node_sizes=sizes), []
    groups.prepare([])
    rank = groups.rank
    torch.manual_seed(rank)
    for case in range(CASES):
        owners, readers = _layouts(sizes, case)
        (mine,) = links_over(groups, [WEIGHTS], owners, readers)
        out.append(sides(mine, WEIGHTS, owners, readers, rank))
    return out


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3)])
def test_push_is_the_adjoint_of_pull(sizes: tuple[int, ...]) -> None:
    """<pull x, y> = <x, push y>: would catch a mean of a node instead of a sum."""
    results = run_ranks(4, _adjoint, sizes)
    for case in range(CASES):
        left, right = (sum(r[case][side] for r in results) for side in (0, 1))
        assert left == pytest.approx(right, rel=1e-12, abs=1e-12)


def _counted(text: str, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Bytes that each pull and push has under way, and those that are told."""
    a = Architecture(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocabulary=61)
    groups = Groups(node_sizes=(2, 2))
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
    groups, pending, workings = Groups(node_sizes=(2, 2)), [], []
    groups.prepare([])
    for case in range(6):
        owners, readers = _layouts((2, 2), 2 * case + 1)
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
        _, readers = _layouts((2, 2), 2 * case + 1)
        for n, w in _values(4, case).items():
            kept[case] &= torch.equal(working[n], _held(readers[n].parts[groups.rank], w[0]))
    return kept


def test_transfers_in_flight_keep_their_buffers() -> None:
    """Would catch what lies between the steps being freed, or used again, before the second."""
    assert run_ranks(4, _in_flight) == [[True] * 6] * 4


def _refused() -> list[str]:
    said = []
    for sizes in ((3, 3), (4, 0)):
        try:
            Groups(node_sizes=sizes)
        except LaunchError as error:
            said.append(str(error))
    owners, readers = _layouts((2, 2), 0)
    try:
        links_over(Groups(node_sizes=(2, 2)), [WEIGHTS], owners, readers)
    except PlanMismatch as error:
        said.append(str(error))
    alike = [Groups(node_sizes=sizes).node_sizes for sizes in ((1,) * 4, (4,), None)]
    return [*said, str(alike)]


def test_nodes_that_cannot_be_are_refused() -> None:
    """Would catch nodes of other ranks than there are, and groups that some ranks never made."""
    for first, second, third, alike in run_ranks(4, _refused):
        assert "ranks of the nodes: got [3, 3], wanted 4 ranks" in first
        assert "got [4, 0]" in second
        assert "never prepared" in third
        assert alike == "[None, None, None]"
