"""Index tensors that are made once."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from headrace.ops import fused as index
from headrace.ops.fused import index_tensor, kept, to_device

CPU = torch.device("cpu")


def test_one_tensor_for_the_same_values() -> None:
    """Catches a copy to the device for each layer, and one tensor for several devices or values."""
    first = index_tensor([3, 1, 2], CPU)
    assert first is index_tensor((3, 1, 2), CPU)
    assert first.tolist() == [3, 1, 2]
    assert index_tensor([3, 1], CPU).tolist() == [3, 1]
    assert index_tensor([3, 1, 2], torch.device("meta")).device.type == "meta"
    assert to_device(first, "cpu") is first


def test_what_was_made_under_a_mode_stays_there() -> None:
    """Catches tensors without contents among real ones, and the other way round."""
    index_tensor([5, 6], CPU)
    with FakeTensorMode():
        assert isinstance(index_tensor([5, 6], CPU), FakeTensor)
        assert isinstance(index_tensor([7, 8], CPU), FakeTensor)
    assert index_tensor([7, 8], CPU).tolist() == [7, 8]
    with torch.inference_mode():
        made = index_tensor([9, 10], CPU)
    assert not made.is_inference()  # a backward may keep it


def test_not_for_ever() -> None:
    """Catches memory that grows with every length that ever came."""
    first = kept("first", lambda: torch.zeros(1))
    for i in range(index._MOST_KEPT):
        kept(("another", i), lambda: torch.zeros(1))
    assert len(index._made) <= index._MOST_KEPT
    assert kept("first", lambda: torch.zeros(1)) is not first
