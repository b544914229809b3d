"""``hr.split``, ``hr.switch`` and ``hr.gather`` in a model of one's own, against one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import headrace as hr
from headrace.errors import HeadraceError
from headrace.native.counted import TrafficCounter
from ranks import run_ranks
from spread import whole

SHAPES = ((4, 8, 6), (7, 5, 6), (3, 2, 6), (1, 9, 6), (2, 3, 6))
"""Frames, patches and features: even, uneven, and fewer than four ranks."""


class Axial(torch.nn.Module):
    """Attention over patches, then over frames, then over patches, of [t, s, 6]; every rank has
    frames first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into = torch.nn.Linear(6, 6)
        self.stages = torch.nn.ModuleList(torch.nn.Linear(6, 18) for _ in range(3))
        self.double()

    def mixed(self, x: torch.Tensor, stage: int) -> torch.Tensor:
        """Attention over dim 1."""
        q, k, v = self.stages[stage](x).chunk(3, -1)
        return x + torch.softmax(q @ k.transpose(1, 2) / 2, -1) @ v

    def forward(self, x: torch.Tensor, group: Any = None, **more: Any) -> torch.Tensor:
        """The whole result, on every rank of a group."""
        x = hr.split(self.into(x), 0, group)
        x = self.mixed(x, 0)
        x = hr.switch(x, 0, 1, group).transpose(0, 1)
        x = self.mixed(x, 1)
        x = hr.switch(x.transpose(0, 1), 1, 0, group)
        return hr.gather(self.mixed(x, 2), 0, group)


def drawn(shape: Sequence[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


def uneven(total: int, ranks: int, seed: int) -> tuple[int, ...]:
    """Sizes that are anything, 0 too."""
    cuts = torch.randint(0, total + 1, (ranks - 1,), generator=torch.Generator().manual_seed(seed))
    return tuple(b - a for a, b in pairwise([0, *sorted(cuts.tolist()), total]))


def far(mine: torch.Tensor | None, wanted: torch.Tensor | None) -> float:
    assert mine is not None
    assert wanted is not None
    assert mine.shape == wanted.shape
    return float((mine.detach() - wanted.detach()).abs().max()) if mine.numel() else 0.0


def modelled() -> list[float]:
    """How far results, and gradients of weights and inputs, are from those of one process."""
    group, ranks, found = dist.group.WORLD, dist.get_world_size(), []
    for case, shape in enumerate(SHAPES):
        mine, plain = Axial(), Axial()
        x, weight = drawn(shape, case), drawn(shape, 90 + case)
        own, whole = x.clone().requires_grad_(), x.clone().requires_grad_()
        out, wanted = mine(own, group), plain(whole)
        ((out * weight).sum() / ranks).backward()  # all ranks have this loss alike
        (wanted * weight).sum().backward()
        for grad in [own.grad, *(p.grad for p in mine.parameters())]:
            dist.all_reduce(grad)
        pairs = zip(mine.parameters(), plain.parameters(), strict=True)
        grads = [far(a.grad, b.grad) for a, b in pairs]
        found.append(max(far(out, wanted), far(own.grad, whole.grad), *grads))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_model_of_ones_own_equals_one_process(ranks: int) -> None:
    """Catches an adjoint that is scaled or of one rank's loss, places that are padded or lost where
    ranks do not divide them, and ranks without places that others wait for."""
    for found in run_ranks(ranks, modelled):
        assert max(found) <= 1e-12


def given_sizes() -> float:
    """The error of switches between sizes that are anything, back and forth, and of gradients."""
    group, rank, ranks, worst = dist.group.WORLD, dist.get_rank(), dist.get_world_size(), 0.0
    for case in range(6):
        whole, weight = drawn((7, 2, 5), case), drawn((7, 2, 5), 50 + case)
        rows, columns = uneven(7, ranks, case), uneven(5, ranks, case + 9)
        for told in ({}, {"sizes": rows}, {"sizes": list(rows), "compare": False}):
            x = whole.clone().requires_grad_()
            shard = hr.split(x, 0, group, sizes=rows, compare="compare" not in told)
            there = hr.switch(shard, 0, -1, group, to_sizes=columns, **told)
            worst = max(worst, far(there, whole.split(columns, 2)[rank]))
            again = hr.switch(there * 2, 2, 0, group, to_sizes=rows)
            (again * weight.split(rows, 0)[rank]).sum().backward()
            mine = torch.zeros_like(whole)
            mine.split(rows, 0)[rank].copy_(2 * weight.split(rows, 0)[rank])
            worst = max(worst, far(x.grad, mine))
    return worst


@pytest.mark.parametrize("ranks", [2, 4])
def test_sizes_may_be_anything(ranks: int) -> None:
    """Catches sizes that are told and not used, and those of ranks exchanged."""
    assert run_ranks(ranks, given_sizes) == [0.0] * ranks


def used_twice() -> list[float]:
    """Errors where a shard goes two ways, where gradients have gradients, and where stages are
    computed again in the backward."""
    group, rank = dist.group.WORLD, dist.get_rank()
    whole, found = drawn((5, 3), 1), []
    x = whole.clone().requires_grad_()
    shard = hr.split(x, 0, group)
    out = hr.switch(shard, 0, 1, group).square().sum() + hr.gather(shard, 0, group).sum()
    out.backward()
    dist.all_reduce(x.grad)
    found.append(far(x.grad, 2 * whole + dist.get_world_size()))

    x = whole.clone().requires_grad_()
    cubes = hr.switch(hr.split(x, 0, group), 0, 1, group).pow(3).sum()
    (first,) = torch.autograd.grad(cubes, x, create_graph=True)
    first.square().sum().backward()  # of this rank's rows: (3 x^2)^2 has the derivative 36 x^3
    rows = whole.split([3, 2], 0)[rank]
    found.append(far(x.grad.split([3, 2], 0)[rank], 36 * rows.pow(3)))

    for reentrant in (False, True):
        model, plain = Axial(), Axial()
        own, wanted = (drawn((5, 4, 6), 2).requires_grad_() for _ in range(2))
        again = checkpoint(model, own, group, use_reentrant=reentrant)
        (again.square().sum() / 2).backward()
        plain(wanted).square().sum().backward()
        dist.all_reduce(own.grad)
        found.append(far(own.grad, wanted.grad))
    return found


def test_shards_are_used_twice_and_computed_again() -> None:
    """Catches buffers that are given away, adjoints without adjoints, and a recompute that meets
    another rank's messages."""
    for found in run_ranks(2, used_twice):
        assert max(found) <= 1e-12


def compiled(fullgraph: bool) -> list[float]:
    """Errors of a compiled model, values and gradients; of a second shape, too."""
    group, found = dist.group.WORLD, []

    def told(sizes: tuple[int, ...]) -> dict[str, Any]:
        return {"sizes": sizes, "compare": False} if fullgraph else {}

    def model(w: torch.Tensor, rows: tuple[int, ...], columns: tuple[int, ...]) -> torch.Tensor:
        x = hr.split(w * 2, 0, group, **told(rows))
        x = hr.switch(x + 1, 0, 1, group, **told(rows))
        x = hr.switch(x * x, 1, 0, group, **told(columns))
        return hr.gather(x, 0, group, **told(rows))

    quick = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    for rows, columns in (((3, 2), (4, 3)), ((2, 2), (1, 0))):
        w = drawn((sum(rows), sum(columns)), 3).requires_grad_()
        out = quick(w, rows, columns)
        (out.sum() * (1 + dist.get_rank())).backward()
        dist.all_reduce(w.grad)
        plain = w.detach().clone().requires_grad_()
        wanted = (2 * plain + 1).square()
        (wanted.sum() * 3).backward()  # the losses of both ranks
        found += [far(out, wanted), far(w.grad, plain.grad)]
    return found


@pytest.mark.parametrize("fullgraph", [True, whole(False)])
def test_compiled_models_are_the_same(fullgraph: bool) -> None:
    """Catches operators without an adjoint in a graph, shards of another shape than was traced,
    and sizes of the shape before."""
    for found in run_ranks(2, compiled, fullgraph, timeout_s=100):
        assert max(found) <= 1e-12


def comparing_in_a_graph() -> str:
    group = dist.group.WORLD
    whole = torch.compile(lambda x: hr.switch(x, 0, 1, group), backend="eager", fullgraph=True)
    try:
        whole(torch.zeros(2, 4))
    except Exception as error:
        return str(error)
    return "accepted"


def test_one_graph_needs_sizes() -> None:
    """Catches a graph in which ranks have compared nothing although they were asked to."""
    assert all("compare=False" in text for text in run_ranks(2, comparing_in_a_graph))


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except HeadraceError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def disagreeing() -> list[str]:
    """What each rank says where both were called with something else."""
    group, rank = dist.group.WORLD, dist.get_rank()
    x, first = torch.zeros(2, 4), rank == 0
    calls = (
        lambda: hr.switch(x if first else x.double(), 0, 1, group),
        lambda: hr.switch(x, *((0, 1) if first else (1, 0)), group),
        lambda: hr.switch(x if first else x[:, :3], 0, 1, group),
        lambda: hr.switch(x, 0, 1, group) if first else hr.gather(x, 0, group),
        lambda: hr.gather(x if first else x[None], 0, group),
        lambda: hr.split(x if first else x[:1], 0, group),
        lambda: hr.gather(x.clone().requires_grad_(first), 0, group),
        lambda: hr.switch(x, 0, 1, group, to_sizes=(3, 1) if first else (1, 3)),
        lambda: hr.switch(x, 0, 1 if first else 2, group),
    )
    found = [said(call) for call in calls]
    right = hr.gather(x[:rank], 0, group)  # nothing of the refused ones is left on the way
    assert right.shape == (1, 4)
    return found


def test_ranks_that_disagree_are_refused_on_all() -> None:
    """Catches ranks that wait for each other, garbage, and calls that fail without a reason: gloo
    ends the process."""
    both = run_ranks(2, disagreeing)
    assert both[0] == both[1]
    assert all(text.startswith("PlanMismatch: split, switch or gather") for text in both[0])
    assert "float64, without a gradient on rank 1" in both[0][0]
    assert "gather of dims 0" in both[0][3]
    assert "wanted gather of dims 0 of [_, 4], float32, with a gradient" in both[0][6]


def refused() -> list[str]:
    rank, world = dist.get_rank(), dist.group.WORLD
    other = [dist.new_group([1 - member]) for member in range(2)][rank]
    mesh: Any = dist.device_mesh.init_device_mesh("cpu", (2,))
    x: Any = torch.zeros(2, 4)
    given: Any = dist.tensor.distribute_tensor(x, mesh, [dist.tensor.Shard(0)])
    calls = (
        lambda: hr.switch([1.0], 0, 1, world),  # type: ignore[arg-type]
        lambda: hr.gather(given, 0, world),
        lambda: hr.switch(x, 0, 2, world),
        lambda: hr.gather(x, -3, world),
        lambda: hr.split(x, "t", world),  # type: ignore[arg-type]
        lambda: hr.switch(x, 1, -1, world),
        lambda: hr.switch(x, 0, 1, world, sizes=(3, 3)),
        lambda: hr.switch(x, 0, 1, world, sizes=(2, 3)),
        lambda: hr.switch(x, 0, 1, world, to_sizes=(5, -1)),
        lambda: hr.split(x, 0, world, sizes=(1, 2)),
        lambda: hr.gather(x, 0, world, compare=False),
        lambda: hr.switch(x, 0, 1, other),
        lambda: hr.switch(x, 0, 1, mesh),
    )
    return [said(call) for call in calls]


def test_what_is_no_shard_is_refused() -> None:
    """Catches a group that is taken for one rank, and mistakes of which one rank alone knows."""
    for found in run_ranks(2, refused):
        assert all(text.startswith("SpecError: ") for text in found)
        named = ("x of switch: got list", "x.to_local()", "one of [2, 4]", "one of [2, 4]")
        more = ("dim of split: got 't'", "dim 1 twice", "[2, 2], as the", "[2, 2], as the")
        last = ("from 0 on", "2 places in all", "compare=False")
        groups = ("that this rank is in", "mesh.get_group()")
        for text, part in zip(found, (*named, *more, *last, *groups), strict=True):
            assert part in text


def test_a_rank_alone_exchanges_nothing() -> None:
    """Catches a copy where nothing changes, and dims that are not looked at in the run of one
    process in which a model is written."""
    x = torch.randn(3, 4)
    assert hr.switch(x, 0, 1, None) is hr.split(x, 0, None) is hr.gather(x, 1, None) is x
    assert "one of [3, 4]" in said(lambda: hr.switch(x, 0, 2, None))


def sent(compare: bool) -> int:
    x = torch.zeros(4, 8, 3, dtype=torch.float64)
    with TrafficCounter() as wire:
        hr.switch(x, 0, 1, dist.group.WORLD, sizes=(4, 4), compare=compare)
    return wire.sent_bytes


def test_bytes_of_a_switch_and_of_its_comparison() -> None:
    """Catches padding, and a comparison that sends more than a digest: M (N - 1) / N^2."""
    switched = 8 * 8 * 3 * 8 // 4
    assert run_ranks(2, sent, False) == [switched] * 2
    assert run_ranks(2, sent, True) == [switched + 32] * 2
