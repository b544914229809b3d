"""Bytes that the counter says are alive, against sizes known by hand."""

from __future__ import annotations

import pytest
import torch

from headrace.runtime.counted import ByteCounter


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
