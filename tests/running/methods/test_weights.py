"""Weights and the parts that methods ask for: values, gradients, their order and their bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from headrace.layouts.partition import Rows, split_rows
from headrace.methods.weights import Part, Shard, Whole
from headrace.native.counted import TrafficCounter
from ranks import run_ranks

COLUMNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A weight of ``count`` rows over ranks, and the rows that each member asks for."""

    name: str
    count: int
    unit: int
    wanted: tuple[Rows, ...]
    vector: bool = False

    @property
    def ranks(self) -> int:
        return len(self.wanted)

    @property
    def shards(self) -> tuple[Rows, ...]:
        return split_rows(self.count, self.ranks, self.unit)

    @property
    def shape(self) -> tuple[int, ...]:
        return () if self.vector else (COLUMNS,)

    @property
    def row(self) -> int:
        """Bytes of a row in fp64."""
        return 8 if self.vector else 8 * COLUMNS


def _cases(ranks: int) -> list[Case]:
    """What methods ask for, of weights that ranks share evenly, unevenly, and not at all."""
    cases: list[Case] = []
    for count, unit in ((4 * ranks, 2), (3 * ranks + 2, 1), (2 * (ranks - 1), 2)):
        shards, everything = split_rows(count, ranks, unit), Rows(0, count)
        halves = split_rows(count, 2, unit)
        asked: dict[str, list[Rows]] = {
            "all rows": [everything] * ranks,
            "everyone the same": [shards[-2]] * ranks,
            "another each": [shards[(member + 1) % ranks] for member in range(ranks)],
            "shared halves": [halves[member % 2] for member in range(ranks)],
            "one of them nothing": [everything, *[Rows(count, count)] * (ranks - 1)],
            "across borders": [
                Rows(min(count, member), min(count, member + 3)) for member in range(ranks)
            ],
        }
        cases += [
            Case(name=name, count=count, unit=unit, wanted=tuple(rows))
            for name, rows in asked.items()
        ]
    rows = tuple(Rows(1, 2 + member) for member in range(ranks))
    return [*cases, Case(name="a vector", count=2 * ranks, unit=1, wanted=rows, vector=True)]


def _draw(case: Case) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The whole weight, and for each member a gradient of the rows it asks for."""
    generator = torch.Generator().manual_seed(case.count)

    def randn(rows: int) -> torch.Tensor:
        return torch.randn(rows, *case.shape, generator=generator, dtype=torch.float64)

    return randn(case.count), [randn(len(rows)) for rows in case.wanted]


def _cut(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    return x[rows.start : rows.stop]


def _shard(case: Case, dtype: torch.dtype = torch.float64) -> Shard:
    """This rank's rows; the gradient starts at one."""
    value = _cut(_draw(case)[0], case.shards[dist.get_rank()]).to(dtype, copy=True)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return Shard(
        value=value,
        grad=torch.ones_like(value, dtype=wide),
        shards=case.shards,
        group=dist.group.WORLD,
        unit=case.unit,
    )


def _fetched(ranks: int) -> list[dict[str, Any]]:
    rank, out = dist.get_rank(), []
    for case in _cases(ranks):
        shard, grad = _shard(case), _draw(case)[1][rank]
        part = shard.part(case.wanted)
        with TrafficCounter() as wire:
            rows = part.rows()
            there = wire.take()
            part.add(grad)
            back = wire.take()
            arriving = part.issue()
        value = shard.value.numpy().copy()
        out.append(
            {
                "rows": rows.numpy(),
                "issued": arriving.wait().numpy(),
                "value": value,
                "grad": shard.grad.numpy() - 1,
                "sent": (there, back),
            }
        )
    return out


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_parts_are_the_rows_asked_for_and_gradients_go_home(ranks: int) -> None:
    """Would catch rows of another member's wish, a gradient that lands a row off or only with its
    reader, and rows sent that nobody asked for, though the results are right."""
    results = run_ranks(ranks, _fetched, ranks)
    for i, case in enumerate(_cases(ranks)):
        whole, grads = _draw(case)
        total = torch.zeros_like(whole)
        for rows, grad in zip(case.wanted, grads, strict=True):
            total[rows.start : rows.stop] += grad
        meets = [[len(held.meet(rows)) for rows in case.wanted] for held in case.shards]
        for rank, result in enumerate(r[i] for r in results):
            for name, wanted in (
                ("rows", _cut(whole, case.wanted[rank])),
                ("issued", _cut(whole, case.wanted[rank])),
                ("value", _cut(whole, case.shards[rank])),
                ("grad", _cut(total, case.shards[rank])),
            ):
                np.testing.assert_allclose(result[name], wanted, atol=1e-14, err_msg=f"{case}")
            given = sum(n for member, n in enumerate(meets[rank]) if member != rank)
            taken = sum(held[rank] for owner, held in enumerate(meets) if owner != rank)
            assert result["sent"] == (given * case.row, taken * case.row), case


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_fetch_and_its_gradient_are_adjoint(ranks: int) -> None:
    """<rows v, y> = <v, add y> over the group: would catch a mean, or a copy of a row whose
    gradient is lost where several read it."""
    results = run_ranks(ranks, _fetched, ranks)
    for i, case in enumerate(_cases(ranks)):
        grads = _draw(case)[1]
        left = sum(
            float((r[i]["rows"] * grads[rank].numpy()).sum()) for rank, r in enumerate(results)
        )
        right = sum(float((r[i]["value"] * r[i]["grad"]).sum()) for r in results)
        assert left == pytest.approx(right, rel=1e-12, abs=1e-12), case


def _own(ranks: int) -> list[tuple[bool, int]]:
    out = []
    for case in _cases(ranks):
        shard = _shard(case)
        part = shard.part(case.shards)
        grad = torch.full_like(shard.grad, 2.0)
        with TrafficCounter() as wire:
            views = part.rows() is shard.value and part.issue().wait() is shard.value
            part.add(grad)
            if not case.vector:
                left = torch.ones(2, len(shard.value), dtype=torch.float64)
                part.add_product(left, torch.ones(2, COLUMNS, dtype=torch.float64))
        wanted = torch.full_like(shard.grad, 3.0 if case.vector else 5.0)
        out.append((views and torch.equal(shard.grad, wanted), wire.sent_bytes))
    return out


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_own_shard_is_used_as_it_lies(ranks: int) -> None:
    """Would catch a tensor method that copies its weights, or sends a gradient that is at home."""
    results = run_ranks(ranks, _own, ranks)
    assert results == [[(True, 0)] * len(_cases(ranks))] * ranks


def _magnitudes(ranks: int) -> list[torch.Tensor]:
    """A gradient of each member in fp32, whose sum depends on the order."""
    generator = torch.Generator().manual_seed(0)
    scale = 10.0 ** torch.randint(-4, 5, (ranks, 40, COLUMNS), generator=generator)
    return list(torch.randn(ranks, 40, COLUMNS, generator=generator) * scale)


def _added(ranks: int) -> list[np.ndarray]:
    rank, out = dist.get_rank(), []
    shards = split_rows(40, ranks)
    for _ in range(2):
        for wanted in ([Rows(0, 40)] * ranks, None):
            value = torch.zeros(len(shards[rank]), COLUMNS)
            shard = Shard(
                value=value, grad=torch.ones_like(value), shards=shards, group=dist.group.WORLD
            )
            (shard if wanted is None else shard.part(wanted)).add(_magnitudes(ranks)[rank])
            out.append(shard.grad.numpy())
    return out


def test_several_readers_are_added_in_the_order_of_the_members() -> None:
    """Would catch sums in order of arrival, whose bits change from run to run."""
    grads, one = _magnitudes(3), torch.ones(40, COLUMNS)
    parts, whole = (
        ((one + grads[0]) + grads[1]) + grads[2],
        one + ((grads[0] + grads[1]) + grads[2]),
    )
    assert not torch.equal(parts, ((one + grads[2]) + grads[1]) + grads[0])
    results = run_ranks(3, _added, 3)
    for again in (0, 2):
        for i, wanted in enumerate((parts, whole)):
            got = np.concatenate([r[again + i] for r in results])
            np.testing.assert_array_equal(got, wanted.numpy())


def _ahead(ranks: int) -> list[bool]:
    rank = dist.get_rank()
    case = _cases(ranks)[0]
    shard, whole = _shard(case), _draw(case)[0]
    wanted = [[case.shards[(member + j) % ranks] for member in range(ranks)] for j in range(ranks)]
    parts = [shard.part(rows) for rows in wanted]
    coming = [part.issue() for part in (*parts, shard)]
    other = shard.part(case.wanted).rows()  # fetched while they are under way
    same = [torch.equal(other, _cut(whole, case.wanted[rank]))]
    for arriving, rows in reversed(
        list(zip(coming, [*(w[rank] for w in wanted), Rows(0, case.count)], strict=True))
    ):
        same.append(torch.equal(arriving.wait(), _cut(whole, rows)))
    return same


@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_are_fetched_ahead_of_their_use(ranks: int) -> None:
    """Would catch a fetch that another one overtakes, or whose rows are those of the last."""
    assert run_ranks(ranks, _ahead, ranks) == [[True] * (ranks + 2)] * ranks


def _narrow() -> tuple[list[torch.dtype], list[int], np.ndarray]:
    case = Case(name="", count=6, unit=1, wanted=(Rows(0, 6), Rows(2, 5)))
    shard = _shard(case, torch.bfloat16)
    part, rank = shard.part(case.wanted), dist.get_rank()
    with TrafficCounter() as wire:
        rows = part.rows()
        sent = [wire.take()]
        # 256 + 1 is no value of bf16; the ones must not be lost on their way.
        part.add(torch.full_like(rows, 256.0 if rank == 0 else 1.0))
        sent.append(wire.take())
        part.add_product(torch.ones(2, len(rows)).bfloat16(), torch.ones(2, COLUMNS).bfloat16())
        shard.add(torch.full((6, COLUMNS), 256.0 if rank == 0 else 1.0).bfloat16())
    return [rows.dtype, shard.grad.dtype], sent, shard.grad.numpy()


def test_gradients_of_half_types_are_added_in_single_precision() -> None:
    """Would catch gradients sent in bf16 after they were summed wide, or sums kept narrow."""
    first, second = run_ranks(2, _narrow)
    assert first[0] == second[0] == [torch.bfloat16, torch.float32]
    # rank 0 holds rows 0 to 2 and wants all; rank 1 holds 3 to 5 and wants 2, 3 and 4
    assert (first[1], second[1]) == ([6, 3 * 3 * 4], [3 * 3 * 2, 3 * 4])
    sums = np.array([259, 259, 262, 262, 262, 259]) + 257  # rows 2 to 4 have two readers
    np.testing.assert_array_equal(np.concatenate([first[2], second[2]]), sums[:, None] * [1, 1, 1])


def _whole(count: int, member: int, unit: int = 1, vector: bool = False) -> Whole:
    shape = () if vector else (COLUMNS,)
    value = torch.arange(float(count)).double().view(-1, *(1 for _ in shape)).expand(count, *shape)
    return Whole(
        value=value.contiguous(), grad=torch.zeros(count, *shape).double(), member=member, unit=unit
    )


@pytest.mark.parametrize("vector", [False, True])
def test_a_part_of_a_whole_weight_is_a_view(vector: bool) -> None:
    """Would catch rows of another member's wish, a copy whose gradient never reaches the weight,
    and a bias cut otherwise than its matrix."""
    wanted = (Rows(0, 2), Rows(2, 5), Rows(5, 5))
    for member, rows in enumerate(wanted):
        weight = _whole(6, member, vector=vector)
        part: Part = weight.part(wanted)
        at = slice(rows.start, rows.stop)
        assert torch.equal(part.rows(), weight.value[at])
        assert part.issue().wait().data_ptr() == part.rows().data_ptr()
        assert not len(rows) or part.rows().data_ptr() == weight.value[at].data_ptr()
        part.add(torch.ones_like(part.rows()))
        part.add(torch.ones_like(part.rows()))
        assert (
            float(weight.grad.sum()) == 2 * weight.grad[at].numel() == float(weight.grad[at].sum())
        )


def test_products_are_added_to_a_view_of_the_gradient() -> None:
    """Would catch a product of a part that replaces the sum, or lands on the rows before."""
    weight, left = _whole(5, 1), torch.randn(4, 2).double()
    right = torch.randn(4, COLUMNS).double()
    part = weight.part((Rows(0, 3), Rows(3, 5)))
    for _ in range(2):
        part.add_product(left, right)
    torch.testing.assert_close(weight.grad[3:], 2 * left.t() @ right)
    assert not weight.grad[:3].any()


def _splits() -> list[tuple[Rows, ...]]:
    shard = _shard(Case(name="", count=12, unit=4, wanted=(Rows(0, 12),) * 2))
    return [shard.split(parts) for parts in (1, 2, 3, 4)]


def test_both_kinds_are_cut_at_the_same_units() -> None:
    """Would catch a KV group or a gate and its up on two ranks, or cuts that depend on how a
    weight is held."""
    whole = _whole(12, 0, unit=4)
    wanted = [
        (Rows(0, 12),),
        (Rows(0, 8), Rows(8, 12)),
        (Rows(0, 4), Rows(4, 8), Rows(8, 12)),
        (Rows(0, 4), Rows(4, 8), Rows(8, 12), Rows(12, 12)),
    ]
    assert [whole.split(parts) for parts in (1, 2, 3, 4)] == wanted
    assert run_ranks(2, _splits) == [wanted] * 2


def test_products_of_micro_batches_are_summed_wide() -> None:
    """Would catch a partial sum in bf16: each product is rounded once, their sum is not."""
    generator = torch.Generator().manual_seed(2)
    wide, narrow = torch.zeros(8, 4), torch.zeros(8, 4, dtype=torch.bfloat16)
    exact = torch.zeros(8, 4, dtype=torch.float64)
    weight = Whole(value=narrow.clone(), grad=wide)
    for _ in range(200):
        left, right = ((torch.rand(16, n, generator=generator)).bfloat16() for n in (8, 4))
        weight.add_product(left, right)
        narrow += left.t() @ right
        exact += left.double().t() @ right.double()
    assert float(((wide - exact) / exact).abs().max()) < 2**-10
    assert float(((narrow - exact) / exact).abs().max()) > 2**-6
