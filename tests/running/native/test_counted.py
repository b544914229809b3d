"""Bytes that the counters say are alive or sent, against sizes known by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from headrace.comm.collectives import (
    all_gather_rows,
    all_to_all_rows,
    gather_floats,
    issue_shift,
    reduce_scatter_rows,
)
from headrace.native.counted import ByteCounter, TrafficCounter, tensors_in
from ranks import run_ranks


def test_storages_count_once_and_until_the_last_view_is_gone() -> None:
    """Would catch views counted as memory, and memory forgotten with its first tensor."""
    with ByteCounter() as counter:
        x = torch.zeros(1000)
        assert counter.current_bytes == 4000
        views = [x[:10], x.view(10, 100).t(), x.detach()]
        x.add_(1)
        assert counter.current_bytes == 4000
        del x
        assert counter.current_bytes == 4000
        views.pop(0)
        assert counter.current_bytes == 4000
        views.clear()
        assert counter.current_bytes == 0
    assert counter.peak_bytes == 4000


def test_what_was_there_before_is_not_counted() -> None:
    """Would catch weights counted as activations when an operator writes into them."""
    weight, ids = torch.zeros(100, 10), torch.tensor([1, 2])
    with ByteCounter() as counter:
        weight.mul_(2)
        torch.add(weight, 1, out=weight)
        weight[3:5].fill_(1)
        assert counter.current_bytes == counter.peak_bytes == 0
        rows = weight.index_select(0, ids)
        assert counter.current_bytes == rows.numel() * 4
        parts = torch.split(rows, 1)
        assert counter.current_bytes == rows.numel() * 4
        del rows, parts
    assert counter.current_bytes == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool])
def test_bytes_are_those_of_the_type(dtype: torch.dtype) -> None:
    """Would catch elements counted, or fp32 taken for granted."""
    with ByteCounter() as counter:
        x = torch.zeros(7, 3, dtype=dtype)
        assert counter.current_bytes == 21 * x.element_size()


def test_the_peak_is_of_what_is_alive_together() -> None:
    """Would catch a sum of all allocations, and a storage whose address is used again."""
    with ByteCounter() as counter:
        for _ in range(20):
            x = torch.zeros(100)
            x = x + 1  # both alive for a moment, the one before until replaced
        assert counter.current_bytes == 400
        assert counter.peak_bytes == 800
        counter.reset_peak()
        assert counter.peak_bytes == 400
        y = torch.zeros(50)
        del y
        assert (counter.current_bytes, counter.peak_bytes) == (400, 600)
        del x
    assert counter.current_bytes == 0


def test_what_autograd_keeps_is_alive_until_the_backward() -> None:
    """Would catch saved activations missed, though no name holds them."""
    x = torch.zeros(1000, requires_grad=True)
    with ByteCounter() as counter:
        y = x.exp().exp().exp()  # each keeps its result
        assert counter.current_bytes == 3 * 4000
        total = y.sum()
        del y
        assert counter.current_bytes == 3 * 4000 + 4
        total.backward()
        assert counter.current_bytes == 4000 + 4  # the gradient, and the sum
        x.grad = None
        assert counter.current_bytes == 4


def test_memory_freed_later_is_still_taken_off() -> None:
    """Would catch a count that stands still once the context is left."""
    with ByteCounter() as counter:
        x = torch.zeros(10)
    y = torch.zeros(1000)  # outside
    assert counter.current_bytes == 40
    del x, y
    assert counter.current_bytes == 0


SPLITS = [  # counts[sender][receiver]
    [[1, 2, 3], [4, 0, 1], [0, 5, 2]],
    [[0, 0, 0], [2, 1, 0], [0, 0, 3]],  # rank 0 sends nothing, the others little
    [[7, 0, 0], [0, 7, 0], [0, 0, 7]],  # all of it stays where it is
    [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
]


def _exchanged() -> list[int]:
    rank, group, out = dist.get_rank(), dist.group.WORLD, []
    with TrafficCounter() as wire:
        for counts in SPLITS:
            send, receive = counts[rank], [row[rank] for row in counts]
            for dtype in (torch.float64, torch.bfloat16):
                all_to_all_rows(torch.zeros(sum(send), 2, 5, dtype=dtype), send, receive, group)
                out.append(wire.take())
    return out


def test_an_exchange_counts_what_leaves_the_rank() -> None:
    """Would catch a rank's own rows counted, rows received taken for rows sent, and a row's size
    lost where a rank sends nothing."""
    for rank, sent in enumerate(run_ranks(3, _exchanged)):
        rows = [sum(n for to, n in enumerate(c[rank]) if to != rank) for c in SPLITS]
        assert sent == [10 * size * n for n in rows for size in (8, 2)]


def _collected() -> dict[str, int]:
    rank, group = dist.get_rank(), dist.group.WORLD
    sent, even, uneven = {}, (2, 2, 2), (3, 0, 1)
    with TrafficCounter() as wire:
        for name, sizes in (("even", even), ("uneven", uneven)):
            all_gather_rows(torch.zeros(sizes[rank], 4), sizes, group)
            sent[f"{name} gather"] = wire.take()
            reduce_scatter_rows(torch.zeros(sum(sizes), 4), sizes, group)
            sent[f"{name} scatter"] = wire.take()
        issue_shift(torch.zeros(uneven[rank], 4), uneven[rank - 1], group).wait()
        sent["shift"] = wire.take()
        gather_floats([1.0, 2.0], group)
        all_to_all_rows(torch.zeros(5), [5], [5], None)
        sent["floats, and nothing for one rank"] = wire.take()
        (torch.zeros(8, 8) @ torch.ones(8, 8)).sum()
        sent["a product"] = wire.take()
    all_gather_rows(torch.zeros(2), even, group)  # outside
    sent["outside"] = wire.sent_bytes
    return sent


def test_gathers_and_scatters_count_what_leaves_the_rank() -> None:
    """Would catch an all-gather counted once instead of once for each other rank, and one that
    changed its operator: every docstring about bytes is tested with this counter."""
    row = 4 * 4
    for rank, sent in enumerate(run_ranks(3, _collected)):
        mine = (3, 0, 1)[rank]
        assert sent == {
            "even gather": 2 * 2 * row,
            "even scatter": 2 * 2 * row,
            "uneven gather": 2 * mine * row,
            "uneven scatter": (4 - mine) * row,
            "shift": mine * row,
            "floats, and nothing for one rank": 2 * 2 * 8,
            "a product": 0,
            "outside": 0,
        }


def test_tensors_are_found_wherever_they_stand() -> None:
    """Would catch a tensor behind a number, or in a list, whose bytes are counted as new."""
    one, two = torch.zeros(2), torch.ones(3)
    found = list(tensors_in((2, one, [two, None], {"out": two}, [1, 2, 3], [])))
    assert [id(x) for x in found] == [id(one), id(two), id(two)]
