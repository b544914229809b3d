"""Products and sums of half types that stay wide."""

from __future__ import annotations

import pytest
import torch

from headrace.ops.flops import flop_counter
from headrace.ops.linear import add_product, add_wide_product, product, total

BF16, FP32 = torch.bfloat16, torch.float32


def test_a_device_rounds_once() -> None:
    """Catches gradients that are rounded to a half type before they are added up, kernels that
    widen the factors first, and a torch that does not have such products."""
    left, right = (torch.empty(7, n, dtype=BF16, device="meta") for n in (3, 5))
    sums = torch.empty(3, 5, device="meta")
    assert product(left, right, FP32).dtype == FP32
    for add in (add_product, add_wide_product):
        with flop_counter() as counter:
            add(sums, left, right)
        assert counter.get_total_flops() == 2 * 7 * 3 * 5
        (counts,) = counter.get_flop_counts().values()
        assert [str(kind) for kind in counts] == ["aten.addmm"]
    with flop_counter() as counter:
        product(left, right, FP32)
    assert counter.get_total_flops() == 2 * 7 * 3 * 5


@pytest.mark.parametrize("dtype", [BF16, FP32, torch.float64])
def test_the_same_sums_on_a_cpu(dtype: torch.dtype) -> None:
    """Catches a transpose too many, a sum that is overwritten, and a total of ones that stands
    still where a half type has no more digits."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(9, n, generator=generator).to(dtype) for n in (3, 5))
    wide = torch.promote_types(dtype, FP32)
    wanted = 1 + left.double().t() @ right.double()
    room = 0.03 if dtype == BF16 else 1e-5
    for add in (add_product, add_wide_product):
        sums = torch.ones(3, 5, dtype=wide)
        add(sums, left, right)
        torch.testing.assert_close(sums.double(), wanted, rtol=room, atol=room)
    torch.testing.assert_close(
        product(left, right, wide).double(), wanted - 1, rtol=room, atol=room
    )
    assert total(torch.ones(1000, 2, dtype=dtype)).tolist() == [1000.0, 1000.0]
