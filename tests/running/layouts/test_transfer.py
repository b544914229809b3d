"""Pulls and pushes of random layouts: every row, every sum, every byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from headrace.layouts.partition import Partition, Rows, link, received_rows, sent_rows
from headrace.layouts.transfer import bucket_links
from headrace.spec.architecture import WeightSpec
from ranks import run_ranks
from running.layouts.adjoints import sides

WEIGHTS = (
    WeightSpec(name="norm", shape=(7,), unit=None, bucket=0),
    WeightSpec(name="matrix", shape=(10, 3), unit=1, bucket=0),
    WeightSpec(name="block", shape=(4, 2, 2), unit=1, bucket=0),
)
CASES = 12


def _layouts(ranks: int, case: int) -> tuple[dict[str, Partition], dict[str, Partition]]:
    """Random owners (in any order of ranks, some with nothing) and random readers."""
    rng = np.random.default_rng((ranks, case))
    owners, readers = {}, {}
    for w in WEIGHTS:
        borders = [0, *sorted(rng.integers(0, w.rows + 1, size=ranks - 1).tolist()), w.rows]
        owned = [Rows(borders[i], borders[i + 1]) for i in rng.permutation(ranks)]
        ends = np.sort(rng.integers(0, w.rows + 1, size=(ranks, 2)), axis=1)
        if case == 0:
            ends[:] = (0, w.rows)  # every rank reads everything
        if case == 1:
            ends[-1] = (2, 2)  # the last rank reads nothing
        owners[w.name] = Partition(rows=w.rows, parts=tuple(owned))
        readers[w.name] = Partition(rows=w.rows, parts=tuple(Rows(*e) for e in ends.tolist()))
    return owners, readers


def _values(ranks: int, seed: int) -> dict[str, torch.Tensor]:
    """[ranks, *shape] fp32 of very different sizes, so that the order of a sum can be seen."""
    generator = torch.Generator().manual_seed(seed)
    return {
        w.name: torch.randn(ranks, *w.shape, generator=generator)
        * 10.0 ** torch.randint(-4, 5, (ranks, *w.shape), generator=generator)
        for w in WEIGHTS
    }


def _held(part: Rows, whole: torch.Tensor) -> torch.Tensor:
    return whole[part.start : part.stop].clone()


class Wire:
    """Counts the elements that this process sends to other ranks."""

    def __init__(self) -> None:
        self.sent, self.calls, self._real = 0, 0, dist.all_to_all_single
        dist.all_to_all_single = self._counted

    def _counted(self, out: Any, x: Any, receive: Any, send: Any, group: Any, **rest: Any) -> Any:
        self.calls += 1
        self.sent += sum(n for r, n in enumerate(send) if r != dist.get_rank(group))
        return self._real(out, x, receive, send, group=group, **rest)

    def take(self) -> int:
        sent, self.sent = self.sent, 0
        return sent


def _transfer(ranks: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    rank, world, wire = dist.get_rank(), dist.group.WORLD, Wire()
    out = []
    for case in range(CASES):
        owners, readers = _layouts(ranks, case)
        mine = bucket_links([WEIGHTS], owners, readers, rank, world)[0]
        weights, grads = _values(ranks, case), _values(ranks, case + 100)
        storage = {n: _held(owners[n].parts[rank], w[0].to(dtype)) for n, w in weights.items()}
        working = {
            n: _held(readers[n].parts[rank], torch.full_like(w[0], float("nan")).to(dtype))
            for n, w in weights.items()
        }
        mine.pull(storage, working).wait()
        pulled = wire.take()
        partial = {n: _held(readers[n].parts[rank], g[rank].to(dtype)) for n, g in grads.items()}
        sums = {n: torch.full_like(s, 99.0) for n, s in storage.items()}
        mine.push(partial, sums).wait()
        out.append(
            {
                "working": {n: w.double().numpy() for n, w in working.items()},
                "sums": {n: s.double().numpy() for n, s in sums.items()},
                "wire": (pulled, wire.take()),
                "told": (mine.pull_elements, mine.push_elements),
            }
        )
    return out


@pytest.mark.parametrize(
    ("ranks", "dtype"), [(2, torch.float64), (3, torch.float32), (4, torch.bfloat16)]
)
def test_pull_copies_and_push_adds(ranks: int, dtype: torch.dtype) -> None:
    """Would catch a row in the wrong place, a reader left out of a sum or added out of rank
    order, sums that keep what was there, and bytes that the table does not know of."""
    results = run_ranks(ranks, _transfer, ranks, dtype)
    for case in range(CASES):
        owners, readers = _layouts(ranks, case)
        weights, grads = _values(ranks, case), _values(ranks, case + 100)
        received, served = [0] * ranks, [0] * ranks
        for w in WEIGHTS:
            whole = weights[w.name][0].to(dtype).double().numpy()
            total = torch.zeros(w.shape, dtype=dtype)
            for reader, part in enumerate(readers[w.name].parts):
                rows = slice(part.start, part.stop)
                got = results[reader][case]["working"][w.name]
                np.testing.assert_array_equal(got, whole[rows])
                total[rows] += grads[w.name][reader].to(dtype)[rows]
            for owner, part in enumerate(owners[w.name].parts):
                got = results[owner][case]["sums"][w.name]
                wanted = total[part.start : part.stop].double().numpy()
                np.testing.assert_array_equal(got, wanted)
            slices = link(owners[w.name], readers[w.name])
            for rank in range(ranks):
                received[rank] += received_rows(slices, rank) * w.row_elements
                served[rank] += sent_rows(slices, rank) * w.row_elements
        for rank in range(ranks):
            assert results[rank][case]["told"] == (received[rank], served[rank])
            assert results[rank][case]["wire"] == (served[rank], received[rank])


def test_the_order_of_the_sum_can_be_seen() -> None:
    """The test above: in another order these gradients have other bits."""
    grads = _values(3, 100)["matrix"]
    forwards, backwards = (grads[0] + grads[1]) + grads[2], (grads[2] + grads[1]) + grads[0]
    assert not torch.equal(forwards, backwards)


def _in_flight() -> list[bool]:
    rank, world, ranks = dist.get_rank(), dist.group.WORLD, 3
    links, storages, workings, pending = [], [], [], []
    for case in range(6):
        owners, readers = _layouts(ranks, case)
        links.append(bucket_links([WEIGHTS], owners, readers, rank, world)[0])
        weights = _values(ranks, case)
        storages.append({n: _held(owners[n].parts[rank], w[0]) for n, w in weights.items()})
        workings.append({n: _held(readers[n].parts[rank], w[1]) for n, w in weights.items()})
    for mine, storage, working in zip(links, storages, workings, strict=True):
        pending.append(mine.pull(storage, working))
        for size in range(1, 60):  # whatever was freed is written over
            torch.full((size,), float("nan"))
    while pending:
        pending.pop().wait()
    out = []
    for case, working in enumerate(workings):
        _, readers = _layouts(ranks, case)
        wanted = {n: _held(readers[n].parts[rank], w[0]) for n, w in _values(ranks, case).items()}
        out.append(all(torch.equal(working[n], w) for n, w in wanted.items()))
    return out


def test_transfers_in_flight_keep_their_buffers() -> None:
    """Would catch a buffer that two transfers share, or that is used again before its wait."""
    assert run_ranks(3, _in_flight) == [[True] * 6] * 3


def _adjoint() -> list[tuple[float, float]]:
    rank, world, ranks = dist.get_rank(), dist.group.WORLD, 3
    torch.manual_seed(rank)
    out = []
    for case in range(CASES):
        owners, readers = _layouts(ranks, case)
        mine = bucket_links([WEIGHTS], owners, readers, rank, world)[0]
        out.append(sides(mine, WEIGHTS, owners, readers, rank))
    return out


def test_push_is_the_adjoint_of_pull() -> None:
    """<pull x, y> = <x, push y>: would catch a mean instead of a sum."""
    results = run_ranks(3, _adjoint)
    for case in range(CASES):
        left, right = (sum(r[case][side] for r in results) for side in (0, 1))
        assert left == pytest.approx(right, rel=1e-12, abs=1e-12)


def _alone() -> tuple[list[bool], int]:
    wire, name = Wire(), "matrix"
    whole = Partition(rows=10, parts=(Rows(0, 10),))
    some = Partition(rows=10, parts=(Rows(2, 7),))
    mine = bucket_links([WEIGHTS[1:2]], {name: whole}, {name: some}, 0, dist.group.WORLD)[0]
    storage, working = torch.randn(10, 3), torch.zeros(5, 3)
    mine.pull({name: storage}, {name: working}).wait()
    grad, total = torch.randn(5, 3), torch.full((10, 3), 7.0)
    mine.push({name: grad}, {name: total}).wait()
    wanted = torch.zeros(10, 3)
    wanted[2:7] = grad
    return [torch.equal(working, storage[2:7]), torch.equal(total, wanted)], wire.calls


def test_one_rank_copies_without_a_message() -> None:
    """Would catch a collective issued by a job of one rank, or its own rows forgotten."""
    assert run_ranks(1, _alone) == [([True, True], 0)]
