"""What the benchmarks count, against sizes known by hand."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from measured import Counted, Side, Storages, Traffic, seconds, settled
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ranks import run_ranks

ROWS, BYTES = 4, 4 * 6 * 4  # of x [4, 6] in fp32


def _plain(x: torch.Tensor) -> dict[str, Any]:
    """Collectives of torch.distributed; ranks are 2."""
    twice, half = torch.zeros(2 * ROWS, 6), torch.zeros(ROWS // 2, 6)
    rank = dist.get_rank()
    send, receive = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [3, 2])
    return {
        "all_gather": (lambda: dist.all_gather_into_tensor(twice, x), BYTES),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(half, x), BYTES // 2),
        "all_reduce": (lambda: dist.all_reduce(x), BYTES),
        "all_to_all": (
            lambda: dist.all_to_all_single(x.new_empty(sum(receive), 6), x, receive, send),
            (3, 2)[rank] * 6 * 4,
        ),
        "send": (lambda: dist.send(x, 1) if rank == 0 else dist.recv(x, 0), BYTES * (rank == 0)),
        "both ways": (
            lambda: [
                work.wait()
                for work in dist.batch_isend_irecv(
                    [
                        dist.P2POp(dist.isend, x, 1 - rank),
                        dist.P2POp(dist.irecv, torch.zeros_like(x), 1 - rank),
                    ]
                )
            ],
            BYTES,
        ),
        "barrier": (dist.barrier, 0),
        "no collective": (lambda: x @ x.t() + 1, 0),
    }


def _functional(x: torch.Tensor) -> dict[str, Any]:
    """What DTensor and the context parallelism are made of; ranks are 2."""
    world, rank = dist.group.WORLD, dist.get_rank()
    send, receive = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [3, 2])
    mesh = init_device_mesh("cpu", (2,))
    leaf = x.clone().requires_grad_()

    def both_ways() -> None:
        functional.all_gather_tensor_autograd(leaf, 0, world).sum().backward()

    return {
        "all_gather": (lambda: functional.all_gather_tensor(x, 0, world).sum(), BYTES),
        "reduce_scatter": (
            lambda: functional.reduce_scatter_tensor(x, "sum", 0, world).sum(),
            BYTES // 2,
        ),
        "all_reduce": (lambda: functional.all_reduce(x, "sum", world).sum(), BYTES),
        "all_to_all": (
            lambda: functional.all_to_all_single(x, receive, send, world).sum(),
            (3, 2)[rank] * 6 * 4,
        ),
        "with autograd": (both_ways, BYTES + BYTES),  # its gradient [8, 6] is scattered
        "DTensor to all": (
            lambda: (
                DTensor.from_local(x, mesh, [Shard(0)])
                .redistribute(mesh, [Replicate()])
                .to_local()
                .sum()
            ),
            BYTES,
        ),
        "DTensor summed": (
            lambda: (
                DTensor.from_local(x, mesh, [Partial()])
                .redistribute(mesh, [Shard(0)])
                .to_local()
                .sum()
            ),
            BYTES // 2,
        ),
    }


def _sent(which: str) -> dict[str, tuple[int, int]]:
    cases = (_plain if which == "plain" else _functional)(torch.ones(ROWS, 6))
    found = {}
    for name, (collective, wanted) in cases.items():
        with Traffic() as wire:
            collective()
        found[name] = (wire.sent_bytes, wanted)
    return found


@pytest.mark.parametrize("which", ["plain", "functional"])
def test_traffic_counts_what_leaves_a_rank(which: str) -> None:
    """Would catch a side of torch's that seems to send less, or twice as much, than it does: a
    collective counted at the wrapper and again inside, a rank's own part counted."""
    for found in run_ranks(2, _sent, which):
        assert {name: got for name, (got, _) in found.items()} == {
            name: wanted for name, (_, wanted) in found.items()
        }


def _unknown() -> str:
    with pytest.raises(KeyError) as caught, Traffic():
        dist.broadcast(torch.ones(3), 0)
    return str(caught.value)


def test_a_collective_that_is_not_known_is_an_error() -> None:
    """Would catch traffic counted as none because torch calls it by another name."""
    assert all("c10d.broadcast_" in text for text in run_ranks(2, _unknown))


def test_storages_follow_their_size() -> None:
    """Would catch FSDP2's gathered weights counted while they are emptied, or missed when they
    are filled again."""
    with Storages() as memory:
        x = torch.zeros(1000)
        storage = x.untyped_storage()
        assert memory.current_bytes == 4000
        storage.resize_(0)
        small = torch.zeros(10)
        assert memory.current_bytes == 40
        storage.resize_(8000)
        small.add_(1)
        assert memory.current_bytes == memory.peak_bytes == 8040
        del x, storage
        assert memory.current_bytes == 40
        del small
    assert (memory.current_bytes, memory.peak_bytes) == (0, 8040)


def test_storages_leave_out_what_was_there() -> None:
    """Would catch weights counted as activations, and shapes that DTensor only tries out."""
    weight = torch.zeros(100)
    with Storages() as memory:
        weight.mul_(2)
        view = weight[:10]
        tried = torch.empty(1000, device="meta")
        assert memory.current_bytes == memory.peak_bytes == 0
    del view, tried


def _kept() -> tuple[float, float]:
    found = Counted(wire=Traffic(), memory=Storages())
    with found.wire, found.memory:
        x = torch.zeros(100 * (1 + dist.get_rank()))
        found.forward_done()
        y = torch.zeros(1000)
        del x, y
    costs = found.costs()
    return costs.kept_bytes, costs.peak_bytes


def test_costs_are_the_most_of_any_rank() -> None:
    """Would catch the first rank's memory reported for all, and a peak without the backward's."""
    assert run_ranks(2, _kept) == [(800, 4800)] * 2


def _side(alone: bool) -> Side:
    def forward(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1 * (1 + dist.get_rank()))
        return x * 2

    return Side(
        name="",
        kind="",
        held="",
        by_torch=False,
        alone=alone,
        places=torch.arange(2),
        forward=forward,
        gradients=dict,
        clear=lambda: None,
        on=nullcontext,
    )


def _timed() -> list[tuple[float, float]]:
    x = torch.zeros(4, 3)
    with settled():
        return [seconds(_side(alone), x, x) for alone in (False, True)]


def test_seconds_are_of_the_slowest_rank_that_takes_part() -> None:
    """Would catch the time of a rank that waits, and CPU time where ranks sleep."""
    first, second = run_ranks(2, _timed)
    assert first == second
    (both, cpu), (alone, _) = first
    assert 0.2 <= both < 1
    assert 0.1 <= alone < both
    assert cpu < 0.05
