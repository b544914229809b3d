"""Switch, split and gather against whole tensors on one rank."""

from __future__ import annotations

from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from headrace.errors import SpecError
from headrace.layouts.partition import split_sizes
from headrace.native.counted import TrafficCounter
from headrace.ops.switch import gather, issue_switch, split, switch
from ranks import run_ranks

SHAPES = ((4, 6), (1, 1), (3, 5), (2, 7, 3), (5, 1, 4, 2), (1, 8, 8, 3), (3, 1, 7, 1, 5))
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def draw(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def uneven(total: int, ranks: int, seed: int) -> tuple[int, ...]:
    """Sizes that are anything, 0 too."""
    cuts = torch.randint(0, total + 1, (ranks - 1,), generator=torch.Generator().manual_seed(seed))
    ends = [0, *sorted(cuts.tolist()), total]
    return tuple(b - a for a, b in pairwise(ends))


def part(x: torch.Tensor, dim: int, sizes: tuple[int, ...], rank: int) -> torch.Tensor:
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank])


def switched(ranks: int) -> float:
    """The largest error of values and gradients of all cases."""
    rank, group, worst = dist.get_rank(), dist.group.WORLD, 0.0
    for case, shape in enumerate(SHAPES):
        whole, weight = draw(shape, case), draw(shape, 100 + case)
        for own, other in permutations(range(len(shape)), 2):
            sizes = uneven(shape[own], ranks, case) if case % 2 else split_sizes(shape[own], ranks)
            to_sizes = None if case % 3 else uneven(shape[other], ranks, case + 7)
            x = part(whole, own, sizes, rank).clone().requires_grad_()
            negative = own - len(shape)
            got = switch(x, negative, other, group, sizes=sizes, to_sizes=to_sizes)
            to_sizes = to_sizes or split_sizes(shape[other], ranks)
            mine = part(weight, other, to_sizes, rank)
            (got * mine).sum().backward()
            worst = max(
                worst,
                far(got, part(whole, other, to_sizes, rank)),
                far(x.grad, part(weight, own, sizes, rank)),
            )
    return worst


def far(got: Any, wanted: torch.Tensor) -> float:
    assert got is not None
    assert got.shape == wanted.shape
    return float((got.detach() - wanted).abs().max()) if wanted.numel() else 0.0


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_switch_moves_values_and_gradients(ranks: int) -> None:
    """Catches places of ranks exchanged, dims that are mixed up, padding, and scaled gradients."""
    assert run_ranks(ranks, switched, ranks) == [0.0] * ranks


def split_and_gathered(ranks: int) -> list[float]:
    """Errors of the results and of the gradients of both."""
    rank, group, worst = dist.get_rank(), dist.group.WORLD, [0.0] * 4
    for case, shape in enumerate(SHAPES):
        whole = draw(shape, case)
        for dim in range(len(shape)):
            sizes = uneven(shape[dim], ranks, case)
            x = whole.clone().requires_grad_()
            shard = split(x, dim, group, sizes=sizes)
            weight = draw(shape, 50 + case)
            (shard * part(weight, dim, sizes, rank)).sum().backward()
            grads = torch.zeros(shape, dtype=torch.float64)
            part(grads, dim, sizes, rank).copy_(part(weight, dim, sizes, rank))
            y = part(whole, dim, sizes, rank).clone().requires_grad_()
            joined = gather(y, dim, group, sizes=sizes)
            # Every rank has a loss of its own of the whole: gradients are sums over all of them.
            weights = [draw(shape, 80 + r) for r in range(ranks)]
            (joined * weights[rank]).sum().backward()
            summed = sum(weights[1:], weights[0])
            errors = [
                far(shard, part(whole, dim, sizes, rank)),
                far(x.grad, grads),
                far(joined, whole),
                far(y.grad, part(summed, dim, sizes, rank)),
            ]
            worst = [max(pair) for pair in zip(worst, errors, strict=True)]
    return worst


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_split_and_gather_are_true_adjoints(ranks: int) -> None:
    """Catches gradients that are scaled, or of one rank's loss only."""
    for errors in run_ranks(ranks, split_and_gathered, ranks):
        assert max(errors) <= 1e-14


def of_types() -> list[bool]:
    rank, group = dist.get_rank(), dist.group.WORLD
    found = []
    for dtype in (*DTYPES, torch.int64, torch.bool, torch.complex64):
        whole = (draw((6, 5), 3) * 3).to(dtype)
        got = switch(part(whole, 0, (4, 2), rank), 0, 1, group, sizes=(4, 2))
        found.append(torch.equal(got, part(whole, 1, (3, 2), rank)))
    return found


def test_any_type_is_carried() -> None:
    """Catches values that are converted on the way."""
    assert run_ranks(2, of_types) == [[True] * 7] * 2


def several_under_way() -> tuple[float, int]:
    """Three switches issued before the first is waited for, waited for in another order."""
    rank, group = dist.get_rank(), dist.group.WORLD
    whole = [draw((4, 6), seed) for seed in range(3)]
    parts = [part(x, 0, (3, 1), rank).clone().requires_grad_() for x in whole]
    with TrafficCounter() as wire:
        coming = [issue_switch(x, 0, 1, group, sizes=(3, 1)) for x in parts]
        got = [coming[at].wait() for at in (2, 0, 1)]
    worst = max(far(x, part(whole[at], 1, (3, 3), rank)) for x, at in zip(got, (2, 0, 1)))  # noqa: B905
    sum((x**2).sum() for x in got).backward()
    for x in parts:
        worst = max(worst, far(x.grad, 2 * x.detach()))
    got[0].add_(1)  # what came is nobody else's
    return worst, wire.sent_bytes


def test_several_are_under_way() -> None:
    """Catches buffers that are shared, and results that are views which cannot be written to."""
    first, second = run_ranks(2, several_under_way)
    assert first[0] == second[0] == 0.0
    assert (first[1], second[1]) == (3 * 3 * 3 * 8, 3 * 1 * 3 * 8)


def bytes_sent(ranks: int) -> int:
    x = torch.zeros(2, 3 * ranks, ranks, dtype=torch.float64)
    with TrafficCounter() as wire:
        switch(x, 0, 1, dist.group.WORLD)
    return wire.sent_bytes


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_of_a_switch(ranks: int) -> None:
    """Catches padding, and what a rank sends to itself: M (N - 1) / N^2."""
    total = 2 * ranks * 3 * ranks * ranks * 8
    assert run_ranks(ranks, bytes_sent, ranks) == [total * (ranks - 1) // ranks**2] * ranks


def refused() -> list[str]:
    rank, world = dist.get_rank(), dist.group.WORLD
    other = [dist.new_group([1 - member]) for member in range(2)][rank]
    x = torch.zeros(2, 4)
    calls = (
        lambda: switch(x, 0, 2, world),
        lambda: switch(x, -3, 0, world),
        lambda: switch(x, 1, -1, world),
        lambda: switch(x, 0, 1, world, sizes=(3, 3)),
        lambda: switch(x, 0, 1, world, to_sizes=(3, 2)),
        lambda: switch(x, 0, 1, world, sizes=(2,)),
        lambda: split(x, 0, world, sizes=(1, 2)),
        lambda: gather(x, 2, world),
        lambda: switch(x, 0, 1, other),
    )
    found = []
    for call in calls:
        try:
            call()
            found.append("accepted")
        except (SpecError, ValueError) as error:
            found.append(str(error))
    return found


def test_wrong_dims_and_sizes_are_refused() -> None:
    """Catches what gloo would meet first: it ends the process without a word."""
    said = run_ranks(2, refused)[0]
    assert "one of [2, 4]" in said[0]
    assert "one of [2, 4]" in said[1]
    assert "dim 1 twice" in said[2]
    assert all("shards" in text for text in said[3:7])
    assert "one of [2, 4]" in said[7]
    assert "wanted one with rank 0" in said[8]
    assert "accepted" not in said


def test_without_a_group_nothing_changes() -> None:
    """Catches a copy where nothing changes."""
    x = torch.randn(3, 4)
    assert switch(x, 0, 1, None) is split(x, 0, None) is gather(x, 1, None) is x
    np.testing.assert_equal(issue_switch(x, 0, 1, None).wait().numpy(), x.numpy())
