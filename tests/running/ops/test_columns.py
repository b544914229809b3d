"""Switch against the pack put together on one rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from headrace.errors import SpecError
from headrace.native.counted import TrafficCounter
from headrace.ops.switch import Columns, reordered, switch_heads, switch_heads_back
from ranks import run_ranks

FEATURES = 2
CASES: dict[int, list[tuple[tuple[int, ...], Columns]]] = {
    2: [
        ((2, 2), Columns(total=4, of=((0, 1), (2, 3)))),
        ((3, 1), Columns(total=5, of=((4, 0, 2), (1, 3)))),  # uneven, in no order
        ((1, 0), Columns(total=3, of=((0, 1), (1, 2)))),  # a rank without tokens, a copied column
        ((2, 1), Columns(total=3, of=((), (2, 1, 0)))),  # a rank without columns
        ((2, 1), Columns(total=4, of=((0,), (3, 0)))),  # columns that nobody takes
        # Taken alike: queries in turn and a key that both have; two parts in turn, the last first.
        ((3, 1), Columns(total=5, of=((0, 1, 4), (2, 3, 4)))),
        ((1, 2), Columns(total=6, of=((4, 0, 1), (5, 2, 3)))),
        ((2, 1), Columns(total=4, of=((1, 0), (3, 2)))),  # pairs turned round
        ((2, 1), Columns(total=6, of=((0, 3), (1, 4)))),  # alike, and columns that nobody takes
    ],
    3: [
        ((2, 2, 2), Columns(total=6, of=((0, 1), (2, 3), (4, 5)))),
        ((2, 0, 1), Columns(total=5, of=((0, 4), (1, 4), (2, 3, 4)))),
        ((0, 0, 3), Columns(total=2, of=((0, 1), (0, 1), (1, 0)))),
        ((2, 0, 1), Columns(total=5, of=((0, 3, 4), (1, 3, 4), (2, 3, 4)))),  # keys that all have
    ],
    4: [
        ((1, 1, 2, 0), Columns(total=4, of=((0, 1), (0, 1), (2, 3), (2, 3)))),  # shared by two
        ((1, 3, 0, 2), Columns(total=8, of=tuple((r, 4 + r // 2, 6 + r // 2) for r in range(4)))),
    ],
}
EVEN = 0  # the case that the formula of the bytes is for


def _draw(sizes: tuple[int, ...], columns: Columns, case: int) -> tuple[Any, list[Any]]:
    """x [T, C, D] of the whole pack, and what each rank holds after a switch [T, C_r, D]."""
    generator = torch.Generator().manual_seed(case)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    total = sum(sizes)
    return randn(total, columns.total, FEATURES), [
        randn(total, len(mine), FEATURES) for mine in columns.of
    ]


def _mine(sizes: tuple[int, ...], rank: int, whole: Any) -> Any:
    start = sum(sizes[:rank])
    return whole[start : start + sizes[rank]]


def _switched(ranks: int) -> list[dict[str, Any]]:
    rank, group, out = dist.get_rank(), dist.group.WORLD, []
    for case, (sizes, columns) in enumerate(CASES[ranks]):
        tokens, heads = _draw(sizes, columns, case)
        x = _mine(sizes, rank, tokens).clone().requires_grad_()
        y = heads[rank].clone().requires_grad_()
        with TrafficCounter() as wire:
            to_heads = switch_heads(x, sizes, columns, group)
        to_tokens = switch_heads_back(y, sizes, columns, group)
        # The transposes are asked for with what the other direction is drawn from.
        to_heads.backward(heads[rank])
        to_tokens.backward(_mine(sizes, rank, tokens))
        values = {"heads": to_heads, "tokens": to_tokens, "dx": x.grad, "dy": y.grad}
        out.append({n: v.detach().numpy() for n, v in values.items()} | {"sent": wire.sent_bytes})
    return out


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_token_of_the_columns_asked_for(ranks: int) -> None:
    """Would catch columns in another order than asked, or tokens of ranks exchanged."""
    results = run_ranks(ranks, _switched, ranks)
    for case, (sizes, columns) in enumerate(CASES[ranks]):
        tokens, _ = _draw(sizes, columns, case)
        for rank, mine in enumerate(columns.of):
            np.testing.assert_array_equal(results[rank][case]["heads"], tokens[:, list(mine)])


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_columns_of_several_ranks_are_added_on_the_way_back(ranks: int) -> None:
    """Would catch the last copy of a replicated key-value head written over the others."""
    results = run_ranks(ranks, _switched, ranks)
    for case, (sizes, columns) in enumerate(CASES[ranks]):
        _, heads = _draw(sizes, columns, case)
        whole = np.zeros((sum(sizes), columns.total, FEATURES))
        for rank, mine in enumerate(columns.of):
            for at, column in enumerate(mine):
                whole[:, column] += heads[rank][:, at].numpy()
        for rank in range(ranks):
            got = results[rank][case]["tokens"]
            np.testing.assert_allclose(got, _mine(sizes, rank, whole), rtol=0, atol=1e-15)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_backward_is_the_transpose(ranks: int) -> None:
    """<A x, y> = <x, A^T y>: would catch a backward scaled by the number of ranks."""
    results = run_ranks(ranks, _switched, ranks)
    for case, (sizes, columns) in enumerate(CASES[ranks]):
        tokens, heads = _draw(sizes, columns, case)
        forward = backward = there = back = 0.0
        for rank in range(ranks):
            got, x = results[rank][case], _mine(sizes, rank, tokens).numpy()
            forward += float((got["heads"] * heads[rank].numpy()).sum())
            backward += float((got["dx"] * x).sum())
            there += float((got["tokens"] * x).sum())
            back += float((got["dy"] * heads[rank].numpy()).sum())
        assert forward == pytest.approx(backward, rel=1e-12)
        assert there == pytest.approx(back, rel=1e-12)


@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_of_an_even_switch(ranks: int) -> None:
    """Would catch all columns gathered and most thrown away: V C T / R elements are sent."""
    sizes, columns = CASES[ranks][EVEN]
    wanted = 8 * (ranks - 1) * sum(sizes) * columns.total * FEATURES // ranks**2
    assert [r[EVEN]["sent"] for r in run_ranks(ranks, _switched, ranks)] == [wanted] * ranks


def _refused() -> list[str]:
    sizes, columns = (3, 1), Columns(total=4, of=((0, 1, 2), (3,)))
    rank, group, out = dist.get_rank(), dist.group.WORLD, []
    for call, shape in (
        (switch_heads, (sizes[rank] + 1, 4, 2)),
        (switch_heads, (sizes[rank], 3, 2)),
        (switch_heads, (sizes[rank], 8)),
        (switch_heads_back, (5, len(columns.of[rank]), 2)),
        (switch_heads_back, (4, 4, 2)),
    ):
        try:
            call(torch.zeros(shape), sizes, columns, group)
            out.append("accepted")
        except SpecError as error:
            out.append(str(error))
    return out


def test_wrong_shapes_are_refused_before_anything_is_sent() -> None:
    """Would catch a size that gloo meets first: it ends the process without a word."""
    for rank, errors in enumerate(run_ranks(2, _refused)):
        rows, count = (3, 1)[rank], (3, 1)[rank]
        assert errors[0] == f"switch_heads: got a tensor [{rows + 1}, 4, 2], wanted [{rows}, 4, D]"
        assert all(error.startswith("switch_heads: got") for error in errors[:3])
        assert all(error.endswith(f"wanted [4, {count}, D]") for error in errors[3:])


def test_one_rank_takes_its_columns_without_a_group() -> None:
    """Would catch a copy where nothing changes, and an order ignored where something does."""
    x = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    same = Columns(total=4, of=((0, 1, 2, 3),))
    assert switch_heads(x, (3,), same, None) is x
    assert switch_heads_back(x, (3,), same, None) is x
    other = Columns(total=4, of=((2, 0),))
    assert torch.equal(switch_heads(x, (3,), other, None), x[:, [2, 0]])
    torch.autograd.gradcheck(lambda x: switch_heads(x, (3,), other, None), x)


def test_rows_in_another_order_and_back() -> None:
    """Would catch the order applied where its inverse belongs: the two are the same for pairs
    that change places, so this order has a cycle of three."""
    order = torch.tensor([2, 0, 1, 4, 3, 5])
    back = torch.argsort(order)
    x = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(reordered(x, order, back), x[order])
    assert torch.equal(reordered(reordered(x, order, back), back, order), x)
    assert torch.autograd.gradcheck(lambda x: reordered(x, order, back), x)
