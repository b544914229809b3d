"""The head's loss against torch's cross-entropy over whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headrace.methods.weights import Whole
from headrace.native.counted import ByteCounter
from headrace.ops.loss import IGNORED, head_loss


def _draw(tokens: int, dtype: torch.dtype = torch.float64, features: int = 6, words: int = 11):
    """x, labels (every third ignored), weight."""
    torch.manual_seed(tokens)
    x = torch.randn(tokens, features).to(dtype)
    labels = torch.randint(words, (tokens,))
    labels[::3] = IGNORED
    return x, labels, torch.randn(words, features).to(dtype)


def _source(weight: torch.Tensor, dtype: torch.dtype | None = None) -> Whole:
    return Whole(value=weight, grad=torch.zeros(weight.shape, dtype=dtype or weight.dtype))


def _reference(x, labels, weight, scale: float):
    x, weight = (t.detach().double().clone().requires_grad_() for t in (x, weight))
    loss = scale * F.cross_entropy(x @ weight.t(), labels, reduction="sum", ignore_index=IGNORED)
    return loss.detach(), *torch.autograd.grad(loss, (x, weight))


@pytest.mark.parametrize("chunk", [1, 3, 7, 8, 2048])
def test_loss_and_gradients_whatever_the_chunk(chunk: int) -> None:
    """Would catch a last chunk left out, an ignored token that counts, a scale applied twice,
    and a weight gradient that replaces what was there."""
    x, labels, weight = _draw(7)
    wanted, dx_wanted, dw_wanted = _reference(x, labels, weight, 0.25)
    source = _source(weight)
    source.grad.fill_(1.0)
    loss, dx = head_loss(x, labels, source, 0.25, chunk)
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, wanted, rtol=1e-13, atol=0)
    torch.testing.assert_close(dx, dx_wanted, rtol=0, atol=1e-14)
    torch.testing.assert_close(source.grad - 1.0, dw_wanted, rtol=0, atol=1e-13)


def test_gradient_by_differences() -> None:
    """Would catch a loss and a gradient that are each right but of different functions."""
    x, labels, weight = _draw(5)
    _, dx = head_loss(x, labels, _source(weight), 0.5)
    for t, i in ((1, 0), (2, 5), (4, 3), (0, 2)):
        step = torch.zeros_like(x)
        step[t, i] = 1e-6
        up, down = (head_loss(x + s, labels, _source(weight), 0.5)[0] for s in (step, -step))
        assert float(dx[t, i]) == pytest.approx(float(up - down) / 2e-6, abs=1e-8)


def test_two_chunks_of_logits_are_alive() -> None:
    """Catches the gradient of a chunk's logits that lives on while the next has its own: what the
    formulas of costs count is logits and gradient of one, in the type of activations."""
    chunk, words = 64, 5000
    with ByteCounter() as counter:
        x, matrix = (
            torch.empty(n, 8, dtype=torch.bfloat16, device="meta") for n in (4 * chunk, words)
        )
        weight = Whole(value=matrix, grad=torch.empty(words, 8, device="meta"))
        labels = torch.empty(4 * chunk, dtype=torch.int64, device="meta")
        counter.reset_peak()
        before = counter.current_bytes
        head_loss(x, labels, weight, 1.0, chunk)
        peak = counter.peak_bytes - before
    assert 2 * 2 * chunk * words <= peak < 2.2 * 2 * chunk * words


def test_any_negative_label_carries_no_loss() -> None:
    """Catches a token that is counted though it has no label: its loss would be a logsumexp."""
    x, labels, weight = _draw(7)
    wanted = head_loss(x, labels, _source(weight), 1.0)
    labels[labels == IGNORED] = -1
    for one, other in zip(head_loss(x, labels, _source(weight), 1.0), wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("tokens", [0, 4])
def test_nothing_to_predict(tokens: int) -> None:
    """Would catch NaN from a mean of nothing, and a rank without tokens that skips the sum of
    the weight's gradient: its group would hang."""
    x, labels, weight = _draw(tokens)
    labels.fill_(IGNORED)
    asked = []

    class Asked(Whole):
        def add(self, grad: torch.Tensor) -> None:
            asked.append(grad)

    loss, dx = head_loss(x, labels, Asked(value=weight, grad=torch.zeros_like(weight)), 1.0)
    assert float(loss) == 0
    assert dx.shape == x.shape
    assert not dx.any()
    assert [grad.shape for grad in asked] == [weight.shape]
    assert not asked[0].any()


def test_large_logits_do_not_overflow() -> None:
    """Would catch exponentials taken before the maximum is subtracted."""
    x, labels, weight = (t * 100 if t.is_floating_point() else t for t in _draw(6, torch.float32))
    loss, dx = head_loss(x, labels, _source(weight), 1.0)
    wanted, dx_wanted, _ = _reference(x, labels, weight, 1.0)
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(dx.double(), dx_wanted, rtol=1e-4, atol=1e-2)


def test_many_small_chunks_add_up_in_fp64() -> None:
    """Would catch a loss added up in fp32: after 6,000 chunks it is off by 1e-5."""
    x, labels, weight = _draw(6_000, torch.float32, features=2, words=3)
    loss, _ = head_loss(x, labels, _source(weight), 1.0, chunk=1)
    wanted = _reference(x, labels, weight, 1.0)[0]
    torch.testing.assert_close(loss, wanted, rtol=1e-7, atol=0)


def test_bf16_is_within_its_error() -> None:
    """Would catch softmax or the weight gradient accumulated in bf16 (it stalls after 256)."""
    x, labels, weight = _draw(3000, torch.bfloat16)
    source = _source(weight, torch.float32)
    scale = 1 / 2000
    loss, dx = head_loss(x, labels, source, scale, chunk=4)
    wanted, dx_wanted, dw_wanted = _reference(x, labels, weight, scale)
    assert dx.dtype == torch.bfloat16
    torch.testing.assert_close(loss, wanted, rtol=2e-3, atol=0)
    for got, other, error in ((dx, dx_wanted, 0.02), (source.grad, dw_wanted, 0.002)):
        tolerance = error * float(other.abs().max())
        torch.testing.assert_close(got.double(), other, rtol=0, atol=tolerance)


def test_logits_of_one_chunk_at_a_time() -> None:
    """Would catch logits of the whole pack alive at once: they are what does not fit."""
    x, labels, weight = _draw(512, torch.float32, words=500)
    whole_logits = 512 * 500 * 4
    with ByteCounter() as counter:
        head_loss(x, labels, _source(weight), 1.0, chunk=16)
        assert counter.peak_bytes < whole_logits / 4


@pytest.mark.parametrize("chunk", [2, 2048])
def test_a_bias_of_the_vocabulary(chunk: int) -> None:
    """Would catch a bias of each chunk added again, and a gradient of ignored tokens."""
    x, labels, weight = _draw(7)
    value = torch.randn(len(weight), dtype=torch.float64)
    leaf = value.clone().requires_grad_()
    wanted = 0.25 * F.cross_entropy(
        x @ weight.t() + leaf, labels, reduction="sum", ignore_index=IGNORED
    )
    wanted.backward()
    bias = _source(value)
    bias.grad.fill_(1.0)
    loss, _ = head_loss(x, labels, _source(weight), 0.25, chunk, bias)
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(bias.grad - 1.0, leaf.grad, rtol=0, atol=1e-14)
