"""Attention over packs against whole score matrices, a document at a time; both back ends."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.errors import SpecError
from headrace.ops import attention
from headrace.ops.attention import BACKENDS, attend, attend_backward, attend_forward
from oracles import reference_attention

HEADS = {"mha": (3, 3), "gqa": (6, 2), "mqa": (4, 1)}
PACKS = {"one": (5,), "pack": (1, 7, 3), "singles": (1, 1), "blocks": (130, 70)}
each_heads = pytest.mark.parametrize(("n", "g"), HEADS.values(), ids=HEADS)
each_pack = pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS)
each_causal = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: type(b).__name__)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch, backend: attention.Backend) -> None:
    """Attention on one back end alone."""
    monkeypatch.setattr(attention, "BACKENDS", [backend])


def _draw(tokens: int, n: int, g: int, d: int = 4) -> tuple[torch.Tensor, ...]:
    """q, k, v as they come in a method: views of one fused tensor."""
    torch.manual_seed(tokens)
    fused = torch.randn(tokens, n + 2 * g, d, dtype=torch.float64)
    return tuple(x.detach().requires_grad_() for x in fused.split([n, g, g], dim=1))


def _reference(q, k, v, lengths, causal):
    parts = [x.split(list(lengths)) for x in (q, k, v)]
    return torch.cat([reference_attention(*p, causal) for p in zip(*parts, strict=True)])


@pytest.mark.usefixtures("only")
@each_backend
@each_causal
@each_pack
@each_heads
def test_output_and_every_gradient(lengths, n: int, g: int, causal: bool) -> None:
    """Would catch attention across a border of documents, a wrong scale, grouped gradients that
    are not summed over their queries, and a mask that is off by one."""
    q, k, v = _draw(sum(lengths), n, g)
    out = attend(q, k, v, lengths, causal)
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), grad)
    expected = _reference(q, k, v, lengths, causal)
    wanted = torch.autograd.grad(expected, (q, k, v), grad)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("only")
@each_backend
@each_causal
def test_gradient_by_differences(causal: bool) -> None:
    """Would catch a backward that agrees with the reference's only where both are wrong."""
    q, k, v = _draw(4, 2, 1, d=2)
    assert torch.autograd.gradcheck(lambda *x: attend(*x, (3, 1), causal), (q, k, v))


@pytest.mark.usefixtures("only")
@each_backend
@each_causal
def test_log_sum_exp_is_natural_and_scaled(causal: bool) -> None:
    """Would catch an lse in base two, or of scores without their scale: backward needs it so."""
    q, k, v = (x.detach() for x in _draw(5, 4, 2))
    _, lse = attend_forward(q, k, v, (2, 3), causal)
    assert lse.shape == (4, 5)
    assert lse.dtype == torch.float64
    for head in range(4):
        for t in range(5):
            first, last = (0, 2) if t < 2 else (2, 5)
            seen = range(first, t + 1 if causal else last)
            scores = [float(q[t, head] @ k[s, head // 2]) / math.sqrt(4) for s in seen]
            wanted = math.log(sum(math.exp(score) for score in scores))
            assert float(lse[head, t]) == pytest.approx(wanted, rel=1e-12)


PRECISIONS = [
    pytest.param(backend, dtype, tolerance, id=f"{type(backend).__name__}-{dtype}")
    for backend in BACKENDS
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.02))
]


@pytest.mark.usefixtures("only")
@pytest.mark.parametrize(("backend", "dtype", "tolerance"), PRECISIONS)
def test_other_precisions_accumulate_wide(dtype: torch.dtype, tolerance: float) -> None:
    """Would catch scores, sums of exponentials or delta kept in bf16: errors of ten per cent."""
    lengths = (300, 20)
    narrow = [x.detach().to(dtype).requires_grad_() for x in _draw(320, 4, 2, d=16)]
    wide = [x.detach().double().requires_grad_() for x in narrow]
    out, expected = attend(*narrow, lengths, True), _reference(*wide, lengths, True)
    grad = torch.randn_like(expected).to(dtype)
    out.backward(grad)
    expected.backward(grad.double())
    assert out.dtype == dtype
    pairs = [(out, expected), *((x.grad, y.grad) for x, y in zip(narrow, wide, strict=True))]
    for one, other in pairs:
        scale = float(other.detach().abs().max())
        torch.testing.assert_close(one.double(), other, rtol=0, atol=tolerance * scale)


def test_the_log_sum_exp_of_half_types_is_single() -> None:
    """Would catch a bf16 lse: its rounding alone is several per cent of a probability."""
    q, k, v = (x.detach().bfloat16() for x in _draw(6, 2, 2))
    assert attend_forward(q, k, v, (6,), True)[1].dtype == torch.float32


@each_causal
def test_documents_do_not_see_each_other(causal: bool) -> None:
    """Would catch any leak, however small: the same bits whatever the neighbour holds."""
    q, k, v = (x.detach() for x in _draw(9, 2, 1))
    before = attend(q, k, v, (4, 5), causal)
    for x in (q, k, v):
        x[4:] = 1e6
    assert torch.equal(attend(q, k, v, (4, 5), causal)[:4], before[:4])


def test_gradients_that_are_not_contiguous() -> None:
    """Would catch a kernel that reads a broadcast or transposed gradient as if it were dense."""
    q, k, v = _draw(6, 4, 2)
    dense = torch.autograd.grad(attend(q, k, v, (6,), True), (q, k, v), torch.ones_like(q))
    broadcast = torch.autograd.grad(attend(q, k, v, (6,), True).sum(), (q, k, v))
    turned = torch.randn(4, 4, 6, dtype=torch.float64)
    strided = torch.autograd.grad(attend(q, k, v, (6,), True), (q, k, v), turned.permute(2, 1, 0))
    copied = torch.autograd.grad(
        attend(q, k, v, (6,), True), (q, k, v), turned.permute(2, 1, 0).contiguous()
    )
    for one, other in zip((*broadcast, *strided), (*dense, *copied), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def test_a_rank_without_heads() -> None:
    """Would catch a kernel called on nothing, or gradients of keys left uninitialised."""
    q = torch.empty(5, 0, 4, requires_grad=True)
    k, v = (torch.randn(5, 2, 4, requires_grad=True) for _ in range(2))
    out = attend(q, k, v, (2, 3), True)
    assert out.shape == (5, 0, 4)
    out.backward(torch.zeros_like(out))
    assert q.grad.shape == (5, 0, 4)
    assert not k.grad.any()
    assert not v.grad.any()


def test_forward_and_backward_without_autograd_agree_with_it() -> None:
    """Would catch arguments in another order in the plain functions than in the operator."""
    q, k, v = _draw(7, 4, 2)
    grad = torch.randn_like(q)
    wanted = torch.autograd.grad(attend(q, k, v, (3, 4), True), (q, k, v), grad)
    q, k, v = q.detach(), k.detach(), v.detach()
    out, lse = attend_forward(q, k, v, (3, 4), True)
    for one, other in zip(
        attend_backward(grad, q, k, v, out, lse, (3, 4), True), wanted, strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("shapes", "lengths", "words"),
    [
        (((5, 2, 4), (5, 2, 4), (5, 2, 4)), (2, 2), "wanted 4 tokens in each"),
        (((4, 2, 4), (5, 2, 4), (5, 2, 4)), (4,), "k [5, 2, 4]"),
        (((4, 2, 4), (4, 2, 4), (4, 1, 4)), (4,), "v [4, 1, 4]"),
        (((4, 3, 4), (4, 2, 4), (4, 2, 4)), (4,), "got 3 query heads, wanted a multiple of 2"),
        (((4, 3, 4), (4, 0, 4), (4, 0, 4)), (4,), "got 3 query heads, wanted a multiple of 0"),
    ],
)
def test_shapes_that_disagree_are_refused(shapes, lengths, words: str) -> None:
    """Would catch tokens beyond the last document left uninitialised."""
    with pytest.raises(SpecError) as caught:
        attend(*(torch.zeros(shape) for shape in shapes), lengths, True)
    assert words in str(caught.value)
