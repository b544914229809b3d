"""Norms against torch's own, in fp64, fp32 and bf16."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from headrace.methods.weights import Whole
from headrace.native.counted import ByteCounter
from headrace.ops.norm import LayerNorm, Norm, RMSNorm, normalised

EPS = 1e-3
KINDS = ["rms", "layer"]


def _source(value: torch.Tensor) -> Whole:
    return Whole(value=value, grad=torch.zeros_like(value))


def _norm(kind: str, weight: Whole, bias: Whole) -> Norm:
    if kind == "rms":
        return RMSNorm(weight=weight, eps=EPS)
    return LayerNorm(weight=weight, bias=bias, eps=EPS)


def _ours(kind: str, x: torch.Tensor, weight: Whole, bias: Whole) -> torch.Tensor:
    return normalised(x, _norm(kind, weight, bias))


def _plain(kind: str, x: Any, weight: Any, bias: Any) -> torch.Tensor:
    if kind == "rms":
        return F.rms_norm(x, (x.shape[-1],), weight, EPS)
    return F.layer_norm(x, (x.shape[-1],), weight, bias, EPS)


def _draw(tokens: int, features: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, weight, bias and a gradient; means and deviations differ from token to token."""
    torch.manual_seed(tokens)
    x = torch.randn(tokens, features).double() * torch.rand(tokens, 1) + torch.randn(tokens, 1)
    rest = [torch.randn(features).double() + 1, torch.randn(features).double()]
    return [t.to(dtype) for t in (x, *rest, torch.randn(tokens, features).double())]


def _compare(kind: str, dtype: torch.dtype, tolerance: float, tokens: int = 5) -> None:
    """Output and gradients in ``dtype`` against fp64 on the same values."""
    x, weight, bias, grad = _draw(tokens, 12, dtype)
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    expected = _plain(kind, *leaves)
    expected.backward(grad.double())
    x.requires_grad_()
    w, b = _source(weight), _source(bias)
    y = _ours(kind, x, w, b)
    y.backward(grad)
    assert y.dtype == x.grad.dtype == dtype
    got = [y, x.grad, w.grad, *([b.grad] if kind == "layer" else [])]
    wanted = [expected, *(leaf.grad for leaf in leaves)]
    for one, other in zip(got, wanted, strict=False):
        scale = 1.0 if one.numel() == 0 else max(1.0, float(other.detach().abs().max()))
        torch.testing.assert_close(one.double(), other, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_output_and_every_gradient(kind: str, tokens: int) -> None:
    """Would catch eps outside the root, an unbiased variance, and a weight gradient without the
    normalisation."""
    _compare(kind, torch.float64, 1e-13, tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_the_input_by_differences(kind: str) -> None:
    """Would catch a term of dx that is small on random inputs (eps in the statistics)."""
    x, weight, bias, _ = _draw(3, 4, torch.float64)
    x = (0.02 * x).requires_grad_()  # of the size of eps
    w, b = _source(weight), _source(bias)
    assert torch.autograd.gradcheck(lambda x: _ours(kind, x, w, b), x, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_single_precision_is_within_its_error(kind: str) -> None:
    """Would catch a variance taken as a difference of large numbers."""
    _compare(kind, torch.float32, 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_rounds_once(kind: str) -> None:
    """Would catch statistics, normalised values or sums over tokens in bf16: nearly all results
    are those of fp64, rounded; a rounding before the last would spoil every second."""
    x, weight, bias, grad = _draw(200, 64, torch.bfloat16)
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    expected = _plain(kind, *leaves)
    expected.backward(grad.double())
    x.requires_grad_()
    w, b = (Whole(value=v, grad=torch.zeros(64)) for v in (weight, bias))
    y = _ours(kind, x, w, b)
    y.backward(grad)
    for got, wanted in ((y, expected), (x.grad, leaves[0].grad)):
        assert got.dtype == torch.bfloat16
        assert float((got == wanted.to(torch.bfloat16)).double().mean()) > 0.98
    torch.testing.assert_close(w.grad.double(), leaves[1].grad, rtol=1e-5, atol=1e-4)
    if kind == "layer":
        torch.testing.assert_close(b.grad.double(), leaves[2].grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_add_up_over_micro_batches(kind: str) -> None:
    """Would catch a weight gradient that replaces what an earlier micro-batch left."""
    x, weight, bias, grad = _draw(4, 6, torch.float64)
    w, b = _source(weight), _source(bias)
    for part in (slice(0, 1), slice(1, 4)):
        _ours(kind, x[part].clone().requires_grad_(), w, b).backward(grad[part])
    whole_w, whole_b = _source(weight), _source(bias)
    _ours(kind, x.clone().requires_grad_(), whole_w, whole_b).backward(grad)
    torch.testing.assert_close(w.grad, whole_w.grad)
    torch.testing.assert_close(b.grad, whole_b.grad)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_rank_without_tokens_is_no_cause_for_a_warning(kind: str) -> None:
    """Would catch a warning of torch on the terminal for what is an ordinary plan."""
    x, weight, bias, _ = _draw(0, 4, torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _ours(kind, x, _source(weight), _source(bias)).shape == (0, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_result_made_again_has_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    """Would catch a gradient of a fused linear map taken at another norm of x than the one that
    the forward multiplied."""
    x, weight, bias, _ = _draw(7, 12, dtype)
    norm = _norm(kind, _source(weight), _source(bias))
    y, stats = norm.forward(x)
    assert torch.equal(norm.again(x, stats), y)


@pytest.mark.parametrize(("kind", "statistics"), [("rms", 1), ("layer", 2)])
def test_only_the_input_and_statistics_are_kept(kind: str, statistics: int) -> None:
    """Would catch the normalised features kept beside x: a local activation more per norm."""
    x, weight, bias, _ = _draw(64, 32, torch.float32)
    x.requires_grad_()
    w, b = _source(weight), _source(bias)
    with ByteCounter() as counter:
        y = _ours(kind, x, w, b)
        assert counter.current_bytes == y.nbytes + statistics * 64 * 4
