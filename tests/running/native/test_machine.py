"""What is read of the memory of a machine and its devices."""

from __future__ import annotations

import pytest
import torch

from headrace.native.machine import available_bytes, outside_bytes


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """A device of 100 bytes, 30 of them free; torch has reserved 50 and uses 35 of these."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 35)
    return "cuda:0"


def test_what_torch_keeps_for_tensors_that_are_gone_is_free(device: str) -> None:
    """Catches a second run in a process that believes to have no memory left."""
    assert available_bytes(device) == 30 + 15


def test_what_is_held_outside_of_torch(device: str) -> None:
    """Catches communicators that nobody counts, and tensors that are counted twice."""
    assert outside_bytes(device) == 20
    assert outside_bytes("cpu") == 0
