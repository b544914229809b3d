"""Linear maps and the embedding against plain autograd."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F

from headrace.native.counted import ByteCounter
from headrace.ops.linear import embed, linear, linear_inputs, normed_linear
from headrace.ops.norm import LayerNorm, Norm, RMSNorm, normalised


@dataclass
class Held:
    """A source that hands out a fresh copy each time, as one that gathers does."""

    value: torch.Tensor
    grad: torch.Tensor = field(init=False)
    given: list[weakref.ref[torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.grad = torch.zeros_like(self.value)

    def rows(self) -> torch.Tensor:
        copy = self.value.clone()
        self.given.append(weakref.ref(copy))
        return copy

    def add(self, grad: torch.Tensor) -> None:
        self.grad += grad

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.grad += left.t() @ right


def _randn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


Map = Callable[..., torch.Tensor]
MAPS: dict[str, tuple[Map, tuple[int, int], Map]] = {
    "rows are outputs": (linear, (5, 3), F.linear),
    "rows are inputs": (linear_inputs, (3, 5), lambda x, w, b: x @ w + (0 if b is None else b)),
}
each_map = pytest.mark.parametrize(("ours", "shape", "plain"), MAPS.values(), ids=MAPS)


@each_map
@pytest.mark.parametrize("tokens", [0, 1, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_output_and_every_gradient(
    ours: Map, shape: tuple[int, int], plain: Map, tokens: int, biased: bool
) -> None:
    """Would catch a transposed weight gradient, a bias gradient averaged, gradients that replace
    the sum of earlier micro-batches, and a rank without tokens that drops out of the backward."""
    torch.manual_seed(0)
    x = _randn(tokens, 3).requires_grad_()
    weight, bias, grad = _randn(*shape), _randn(5), _randn(tokens, 5)
    leaves = [x.detach().clone().requires_grad_(), weight.clone().requires_grad_()]
    leaves += [bias.clone().requires_grad_()] if biased else []
    expected = plain(leaves[0], leaves[1], leaves[2] if biased else None)
    expected.backward(grad)
    w, b = Held(weight), Held(bias)
    before = _randn(*shape)
    w.grad += before
    y = ours(x, w, b if biased else None)
    y.backward(grad)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(x.grad, leaves[0].grad, rtol=0, atol=1e-13)
    torch.testing.assert_close(w.grad - before, leaves[1].grad, rtol=0, atol=1e-13)
    torch.testing.assert_close(b.grad, leaves[2].grad if biased else torch.zeros(5).double())


@each_map
def test_gradient_of_the_input_by_differences(
    ours: Map, shape: tuple[int, int], plain: Map
) -> None:
    """Would catch a dx that agrees with plain autograd only on the inputs above."""
    x, w, b = _randn(3, 3).requires_grad_(), Held(_randn(*shape)), Held(_randn(5))
    assert torch.autograd.gradcheck(lambda x: ours(x, w, b), x)


@each_map
def test_no_gathered_weight_outlives_its_use(ours: Map, shape: tuple[int, int], plain: Map) -> None:
    """Would catch a gathered matrix kept for the backward: every layer's would pile up."""
    x, w = _randn(2, 3).requires_grad_(), Held(_randn(*shape))
    y = ours(x, w)
    assert len(w.given) == 1
    assert w.given[0]() is None
    y.sum().backward()
    assert len(w.given) == 2
    assert w.given[1]() is None


@each_map
def test_half_precision_keeps_its_type(ours: Map, shape: tuple[int, int], plain: Map) -> None:
    """Would catch activations widened to fp32 by a bias or by the gradient."""
    x = _randn(8, 3, dtype=torch.bfloat16).requires_grad_()
    weight, bias = _randn(*shape, dtype=torch.bfloat16), _randn(5, dtype=torch.bfloat16)
    y = ours(x, Held(weight), Held(bias))
    y.backward(torch.ones_like(y))
    assert y.dtype == x.grad.dtype == torch.bfloat16
    wanted = plain(x.detach().double(), weight.double(), bias.double())
    torch.testing.assert_close(y.double(), wanted, rtol=0.02, atol=0.02)


def _norm(kind: str) -> tuple[Norm, list[Held]]:
    """A norm of 3 features, and its weights."""
    weight, bias = Held(_randn(3)), Held(_randn(3))
    if kind == "rms":
        return RMSNorm(weight=weight, eps=1e-3), [weight]
    return LayerNorm(weight=weight, bias=bias, eps=1e-3), [weight, bias]


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("tokens", [0, 4])
def test_a_norm_within_is_the_norm_before(kind: str, tokens: int) -> None:
    """Would catch the weight's gradient taken at x instead of its norm, and a gradient of the norm
    left out or added twice."""
    results = []
    for inside in (True, False):
        torch.manual_seed(0)
        norm, held = _norm(kind)
        weight, bias = Held(_randn(5, 3)), Held(_randn(5))
        x, grad = _randn(tokens, 3).requires_grad_(), _randn(tokens, 5)
        if inside:
            y = normed_linear(x, norm, weight, bias)[0]
        else:
            y = linear(normalised(x, norm), weight, bias)
        y.backward(grad)
        results.append([y, x.grad, *(source.grad for source in (weight, bias, *held))])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_a_norm_within_keeps_the_input_and_no_copy() -> None:
    """Would catch norm(x) kept for the backward beside x: a local activation more per product."""
    x = _randn(64, 3).requires_grad_()
    norm, _ = _norm("layer")
    weight = Held(_randn(1, 3))
    with ByteCounter() as counter:
        y = normed_linear(x, norm, weight)[0]
        assert counter.current_bytes == y.nbytes + 2 * 64 * 8  # mean and deviation of each token


def test_embedding_adds_the_gradients_of_a_word_that_comes_twice() -> None:
    """Would catch rows assigned instead of added, and ids of other rows touched."""
    ids, table, grad = torch.tensor([2, 0, 2, 2]), _randn(4, 3), _randn(4, 3)
    leaf = table.clone().requires_grad_()
    F.embedding(ids, leaf).backward(grad)
    source = Held(table)
    source.grad += 1.0
    x = embed(ids, source, torch.empty(0, requires_grad=True))
    x.backward(grad)
    assert torch.equal(x, table[ids])
    assert source.given[0]() is None
    torch.testing.assert_close(source.grad - 1.0, leaf.grad)


def test_a_frequent_word_s_gradient_does_not_stand_still() -> None:
    """Would catch a sum of rows in bf16: 256 + 1 is 256 there."""
    source = Held(torch.zeros(2, 3, dtype=torch.bfloat16))
    source.grad = torch.zeros(2, 3)
    x = embed(torch.ones(5000, dtype=torch.int64), source, torch.empty(0, requires_grad=True))
    x.backward(torch.ones_like(x))
    assert source.grad.tolist() == [[0.0] * 3, [5000.0] * 3]


def test_a_rank_without_tokens_still_runs_the_backward_of_its_embedding() -> None:
    """Would catch a rank that skips its part of a reduce-scatter: its group would hang."""
    asked: list[tuple[int, ...]] = []

    class Asked(Held):
        def add(self, grad: torch.Tensor) -> None:
            asked.append(tuple(grad.shape))

    anchor = torch.empty(0, requires_grad=True)
    x = embed(torch.empty(0, dtype=torch.int64), Asked(_randn(4, 3)), anchor)
    assert x.shape == (0, 3)
    x.backward(torch.zeros(0, 3, dtype=torch.float64))
    assert asked == [(4, 3)]
    assert torch.equal(anchor.grad, torch.empty(0))
