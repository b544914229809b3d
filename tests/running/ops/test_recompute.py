"""Regions against the same function without them."""

from __future__ import annotations

import torch

from headrace.methods.weights import Whole
from headrace.native.counted import ByteCounter
from headrace.ops.linear import linear
from headrace.ops.random import DropoutKey, dropout
from headrace.ops.recompute import region


def _function(weight: Whole, calls: list[int]):
    key = DropoutKey(seed=0, step=0, samples=torch.arange(4), positions=torch.arange(4))

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return dropout(linear(x, weight).tanh() * y.exp(), 0.5, key, 0)

    return fn


def _draw() -> tuple[torch.Tensor, torch.Tensor, Whole, torch.Tensor]:
    torch.manual_seed(0)
    x, y, w, g = (torch.randn(4, 4, dtype=torch.float64) for _ in range(4))
    return x.requires_grad_(), y.requires_grad_(), Whole(value=w, grad=torch.zeros_like(w)), g


def test_a_region_changes_nothing_but_what_is_kept() -> None:
    """Would catch a second run with other randomness, a weight's gradient added in both runs, and
    gradients of several inputs exchanged: outputs and gradients have the same bits."""
    results = []
    for inside in (False, True):
        x, y, weight, grad = _draw()
        calls: list[int] = []
        fn = _function(weight, calls)
        out = region(fn, x, y) if inside else fn(x, y)
        out.backward(grad)
        assert len(calls) == 1 + inside
        results.append((out, x.grad, y.grad, weight.grad))
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


def test_gradient_by_differences() -> None:
    """Would catch a backward that sees its inputs after they were changed."""
    x, y, weight, _ = _draw()
    fn = _function(weight, [])
    assert torch.autograd.gradcheck(lambda x, y: region(fn, x, y), (x, y))


def test_inputs_that_need_no_gradient_get_none() -> None:
    """Would catch a gradient computed, and communicated, for nothing."""
    x, y, weight, grad = _draw()
    seen = []

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append((x.requires_grad, y.requires_grad))
        return _function(weight, [])(x, y)

    region(fn, x, y.detach()).backward(grad)
    assert seen[1] == (True, False)
    wanted = torch.autograd.grad(_function(weight, [])(x, y.detach()), x, grad)[0]
    assert torch.equal(x.grad, wanted)


def test_regions_within_regions() -> None:
    """Would catch an inner region that runs its backward under ``no_grad``."""
    x, y, weight, grad = _draw()
    fn = _function(weight, [])
    region(lambda x, y: region(fn, x, y) + x, x, y).backward(grad)
    inner = (x.grad.clone(), weight.grad.clone())
    x.grad = y.grad = None
    weight.grad.zero_()
    (fn(x, y) + x).backward(grad)
    assert torch.equal(inner[0], x.grad)
    assert torch.equal(inner[1], weight.grad)


def test_only_inputs_and_output_are_kept() -> None:
    """Would catch intermediate results that stay alive until the backward."""

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = x.exp().tanh()
        return x

    kept = []
    for inside in (False, True):
        x = torch.randn(1000, requires_grad=True)
        with ByteCounter() as counter:
            out = region(chain, x) if inside else chain(x)
            kept.append(counter.current_bytes)
        assert out.requires_grad
    assert kept == [12 * 4000, 4000]


def test_without_gradients_nothing_is_run_twice() -> None:
    """Would catch evaluation that pays for a backward it never takes."""
    x, y, weight, _ = _draw()
    calls: list[int] = []
    with torch.no_grad():
        out = region(_function(weight, calls), x, y)
    assert not out.requires_grad
    assert len(calls) == 1
