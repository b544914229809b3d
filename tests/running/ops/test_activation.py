"""SwiGLU against its equation, feature by feature; GELU against torch's own."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from headrace.native.counted import ByteCounter
from headrace.ops.activation import Activation, Gelu, SwiGLU, activated


def _by_feature(x: torch.Tensor, block: int) -> torch.Tensor:
    """silu(gate_i) up_i; gate_i in row 2 B (i // B) + i % B, up_i B rows further."""
    columns = []
    for i in range(x.shape[1] // 2):
        at = 2 * block * (i // block) + i % block
        gate, up = x[:, at], x[:, at + block]
        columns.append(gate * torch.sigmoid(gate) * up)
    return torch.stack(columns, 1)


@pytest.mark.parametrize(("tokens", "features", "block"), [(3, 6, 1), (2, 8, 4), (0, 4, 2)])
def test_gates_and_ups_are_interleaved_in_blocks(tokens: int, features: int, block: int) -> None:
    """Would catch gate and up exchanged, or halves taken for blocks."""
    torch.manual_seed(0)
    x = torch.randn(tokens, 2 * features, dtype=torch.float64)
    y = activated(x, SwiGLU(block=block))
    assert y.shape == (tokens, features)
    if tokens:
        torch.testing.assert_close(y, _by_feature(x, block), rtol=0, atol=1e-15)


@pytest.mark.parametrize(("features", "block"), [(3, 1), (4, 2), (4, 4)])
def test_gradient_by_differences(features: int, block: int) -> None:
    """Would catch the gradients of gate and up exchanged, or taken at the wrong argument."""
    torch.manual_seed(0)
    x = torch.randn(2, 2 * features, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: activated(x, SwiGLU(block=block)), x)


def test_the_backward_of_no_tokens() -> None:
    """Would catch a shape that an empty tensor leaves ambiguous."""
    x = torch.zeros(0, 8, requires_grad=True)
    activated(x, SwiGLU(block=2)).backward(torch.zeros(0, 4))
    assert x.grad.shape == (0, 8)


def test_half_precision_is_within_its_error() -> None:
    """Would catch a sigmoid of large negative gates that is not a number."""
    torch.manual_seed(0)
    x = (8 * torch.randn(32, 16)).bfloat16().requires_grad_()
    wide = x.detach().double().requires_grad_()
    grad = torch.randn(32, 8).bfloat16()
    y, expected = activated(x, SwiGLU(block=4)), _by_feature(wide, 4)
    y.backward(grad)
    expected.backward(grad.double())
    assert y.dtype == x.grad.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), expected, rtol=0.02, atol=1e-2)
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=0.03, atol=3e-2)


@pytest.mark.parametrize("activation", [SwiGLU(block=4), Gelu(approximate="tanh")], ids=repr)
def test_only_the_input_is_kept(activation: Activation) -> None:
    """Would catch silu(gate) kept for the backward: half as much again per layer."""
    x = torch.randn(64, 32, requires_grad=True)
    with ByteCounter() as counter:
        y = activated(x, activation)
        assert counter.current_bytes == y.numel() * y.element_size()


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("tokens", [0, 3])
def test_gelu_in_both_forms(approximate: Literal["tanh", "none"], tokens: int) -> None:
    """Would catch the tanh form taken for the exact one, forward or backward: they differ in the
    fourth digit."""
    torch.manual_seed(0)
    x, grad = (torch.randn(tokens, 7, dtype=torch.float64) for _ in range(2))
    leaf = x.clone().requires_grad_()
    expected = torch.nn.functional.gelu(leaf, approximate=approximate)
    expected.backward(grad)
    x.requires_grad_()
    y = activated(x, Gelu(approximate=approximate))
    y.backward(grad)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-15)
    torch.testing.assert_close(x.grad, leaf.grad, rtol=0, atol=1e-15)
