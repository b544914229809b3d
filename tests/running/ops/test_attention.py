"""Attention over packs and blocks against whole score matrices; all back ends of a CPU."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.ops import attention, kernels
from headrace.ops.attention import (
    BACKENDS,
    Partial,
    attend,
    attend_blocks,
    attend_blocks_backward,
)
from headrace.ops.core import Heads, PackCore
from headrace.ops.kernels import Backend, Plain
from headrace.spec.blocks import Block, document_blocks, scores_of
from oracles import reference_attention


@dataclass(frozen=True, slots=True)
class Packs:
    """A back end that takes three documents in a call, as those of a GPU take many."""

    documents: int = 3

    def supports(self, q: torch.Tensor) -> bool:
        return True

    def forward(self, q, k, v, q_lengths, k_lengths, causal):
        parts = zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True)
        outs = [Plain().forward(*part, (), (), causal) for part in parts]
        return torch.cat([out for out, _ in outs]), torch.cat([lse for _, lse in outs], 1)

    def backward(self, grad, q, k, v, out, lse, q_lengths, k_lengths, causal):
        queries = [x.split(q_lengths) for x in (grad, q, out)]
        keys = [x.split(k_lengths) for x in (k, v)]
        grads = [
            Plain().backward(g, a, b, c, o, part, (), (), causal)
            for g, a, o, b, c, part in zip(*queries, *keys, lse.split(q_lengths, 1), strict=True)
        ]
        return tuple(torch.cat(part) for part in zip(*grads, strict=True))


HEADS = {"mha": (3, 3), "gqa": (6, 2), "mqa": (4, 1)}
PACKS = {"one": (5,), "pack": (1, 7, 3, 2), "singles": (1, 1), "blocks": (130, 70)}
LOCAL = [*(b for b in BACKENDS if b.supports(torch.empty(1, 1, 4))), Packs()]
each_heads = pytest.mark.parametrize(("n", "g"), HEADS.values(), ids=HEADS)
each_pack = pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS)
each_causal = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
each_backend = pytest.mark.parametrize("backend", LOCAL, ids=lambda b: type(b).__name__)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
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


def _oracle(q, k, v, lengths, causal, grad):
    """(out, dq, dk, dv) of whole score matrices in fp64."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = _reference(*leaves, lengths, causal)
    return out.detach(), *torch.autograd.grad(out, leaves, grad.double())


def _cover(lengths: Sequence[int], causal: bool, draw: random.Random) -> list[Block]:
    """The same scores as whole documents, cut at random points, in random order."""

    def cuts(start: int, stop: int) -> list[tuple[int, int]]:
        inner = draw.sample(range(start + 1, stop), min(stop - start - 1, draw.randint(0, 3)))
        points = [start, *sorted(inner), stop]
        return list(itertools.pairwise(points))

    blocks: list[Block] = []
    for document in document_blocks(lengths, False):
        rows = cuts(document.q_start, document.q_stop)
        columns = rows if causal else cuts(document.k_start, document.k_stop)
        blocks += [
            Block(*row, *column, causal and row == column)
            for row in rows
            for column in columns
            if not causal or column <= row
        ]
    draw.shuffle(blocks)
    assert scores_of(blocks) == scores_of(document_blocks(lengths, causal))
    return blocks


def _close(got, wanted, atol: float = 1e-12) -> None:
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.to(other.dtype), other, rtol=0, atol=atol)


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
    _close((out.detach(), *got), _oracle(q, k, v, lengths, causal, grad))


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
    _, lse = attend_blocks(q, k, v, document_blocks((2, 3), causal))
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
    for backend in LOCAL
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.02))
]


@pytest.mark.usefixtures("only")
@pytest.mark.parametrize(("backend", "dtype", "tolerance"), PRECISIONS)
def test_other_precisions_accumulate_wide(dtype: torch.dtype, tolerance: float) -> None:
    """Would catch scores, sums of exponentials or delta kept in bf16: errors of ten per cent."""
    lengths = (300, 20)
    narrow = [x.detach().to(dtype).requires_grad_() for x in _draw(320, 4, 2, d=16)]
    out = attend(*narrow, lengths, True)
    grad = torch.randn(out.shape).to(dtype)
    out.backward(grad)
    assert out.dtype == dtype
    wanted = _oracle(*narrow, lengths, True, grad)
    for one, other in zip((out, *(x.grad for x in narrow)), wanted, strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(one.double(), other, rtol=0, atol=tolerance * scale)


def test_the_log_sum_exp_of_half_types_is_single() -> None:
    """Would catch a bf16 lse: its rounding alone is several per cent of a probability."""
    q, k, v = (x.detach().bfloat16() for x in _draw(6, 2, 2))
    for blocks in (document_blocks((6,), True), document_blocks((2, 4), True)):
        assert attend_blocks(q, k, v, blocks)[1].dtype == torch.float32
    assert Partial(q).result(torch.bfloat16)[1].dtype == torch.float32


@each_causal
def test_documents_do_not_see_each_other(causal: bool) -> None:
    """Would catch any leak, however small: the same bits whatever the neighbour holds."""
    q, k, v = (x.detach() for x in _draw(9, 2, 1))
    before = attend(q, k, v, (4, 5), causal)
    for x in (q, k, v):
        x[4:] = 1e6
    assert torch.equal(attend(q, k, v, (4, 5), causal)[:4], before[:4])


@pytest.mark.usefixtures("only")
@each_backend
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    heads=st.sampled_from(sorted(HEADS.values())),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=25)
def test_any_cover_gives_the_whole_result(
    backend: Backend, lengths: list[int], heads: tuple[int, int], causal: bool, seed: int
) -> None:
    """Would catch a merge with a wrong weight, rows that are overwritten by a later block,
    gradients from the softmax of a part, and pieces that are put beside their rows."""
    q, k, v = (x.detach() for x in _draw(sum(lengths), *heads))
    grad, blocks = torch.randn_like(q), _cover(lengths, causal, random.Random(seed))
    wanted = _oracle(q, k, v, lengths, causal, grad)
    whole_out, whole_lse = attend_blocks(q, k, v, document_blocks(lengths, causal))

    out, lse = attend_blocks(q, k, v, blocks)
    partial = Partial(q)
    for block in blocks:
        partial.add(q, k, v, (block,))
    _close((whole_out, out, partial.result(q.dtype)[0]), [wanted[0]] * 3)
    _close((lse, partial.result(q.dtype)[1]), [whole_lse] * 2)

    at_once = [torch.full_like(x, math.nan) for x in (q, k, v)]
    attend_blocks_backward(grad, q, k, v, out, lse, blocks, *at_once, fresh_q=True, fresh_kv=True)
    by_one = [torch.zeros_like(x) for x in (q, k, v)]
    for block in blocks:
        attend_blocks_backward(
            grad, q, k, v, out, lse, (block,), *by_one, fresh_q=False, fresh_kv=False
        )
    _close(at_once, wanted[1:])
    _close(by_one, wanted[1:])


@pytest.mark.usefixtures("only")
@each_backend
def test_queries_and_keys_of_different_ranks(backend: Backend) -> None:
    """Would catch queries and keys taken for the same rows: in a ring they are not."""
    q, k, v = (x.detach() for x in _draw(11, 4, 2))
    grad = torch.randn(4, 4, 4, dtype=torch.float64)
    # Rank 1 holds rows 7..10 of one document, keys 0..6 come first, then its own.
    first, own = (Block(0, 4, 0, 7, False),), (Block(0, 4, 0, 4, True),)
    partial = Partial(q[7:])
    partial.add(q[7:], k[:7], v[:7], first)
    partial.add(q[7:], k[7:], v[7:], own)
    out, lse = partial.result(torch.float64)
    whole = torch.zeros_like(q)
    whole[7:] = grad
    wanted = _oracle(q, k, v, (11,), True, whole)
    _close((out,), (wanted[0][7:],))
    dq, dk, dv = torch.zeros_like(out), torch.zeros_like(k), torch.zeros_like(v)
    for keys, blocks in ((slice(0, 7), first), (slice(7, 11), own)):
        attend_blocks_backward(
            grad,
            q[7:],
            k[keys],
            v[keys],
            out,
            lse,
            blocks,
            dq,
            dk[keys],
            dv[keys],
            fresh_q=False,
            fresh_kv=False,
        )
    _close((dq, dk, dv), (wanted[1][7:], wanted[2], wanted[3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_causal
def test_parts_of_other_precisions_are_summed_wide(dtype: torch.dtype, causal: bool) -> None:
    """Would catch merges and sums in bf16: more error with each part than one call makes."""
    draw, lengths = random.Random(0), (200, 3, 90)
    q, k, v = (x.detach().to(dtype) for x in _draw(sum(lengths), 4, 2, d=16))
    grad = torch.randn_like(q)
    blocks, whole = _cover(lengths, causal, draw), document_blocks(lengths, causal)
    wanted = _oracle(q, k, v, lengths, causal, grad)

    def errors(blocks: Sequence[Block]) -> list[float]:
        out, lse = attend_blocks(q, k, v, blocks)
        grads = [torch.empty(x.shape) for x in (q, k, v)]
        attend_blocks_backward(grad, q, k, v, out, lse, blocks, *grads, fresh_q=True, fresh_kv=True)
        assert out.dtype == dtype
        pairs = zip((out, *grads), wanted, strict=True)
        return [float((one.double() - other).norm() / other.norm()) for one, other in pairs]

    for parts, single in zip(errors(blocks), errors(whole), strict=True):
        assert parts <= 1.5 * single + 1e-7


def test_keys_that_several_blocks_see_are_summed_wide() -> None:
    """Would catch gradients of keys and values added up in bf16, where no two blocks have the same
    queries: more error with each block than one call makes."""
    qkv, heads = (
        torch.cat([x.detach() for x in _draw(256, 4, 2, d=16)], dim=1),
        Heads(queries=4, keys=2),
    )
    qkv, grad = qkv.bfloat16(), torch.randn(256, 4, 16).bfloat16()

    def of(qkv: torch.Tensor, rows: int) -> torch.Tensor:
        # Rising neighbours would be joined to one block.
        starts = reversed(range(0, 256, rows))
        blocks = [Block(start, start + rows, 0, 256, False) for start in starts]
        core = PackCore(heads=heads, blocks=blocks)
        out, saved = core.forward(qkv)
        return core.backward(grad.to(qkv.dtype), qkv, out, saved).whole

    wanted = of(qkv.double(), 256)
    whole, parts = (float((of(qkv, rows).double() - wanted).norm()) for rows in (256, 8))
    assert parts <= 1.5 * whole


def test_rows_of_one_block_are_those_of_a_single_call() -> None:
    """Would catch rows that a sum rounds or moves though nothing is added to them."""
    q, k, v = (x.detach().bfloat16() for x in _draw(12, 4, 2))
    split = (Block(4, 6, 4, 6, True), Block(6, 8, 4, 6, False), Block(6, 8, 6, 8, True))
    once = document_blocks((4, 4, 4), True)
    wanted, got = attend_blocks(q, k, v, once), attend_blocks(q, k, v, (once[2], *split, once[0]))
    for rows in (slice(0, 4), slice(8, 12)):
        assert torch.equal(got[0][rows], wanted[0][rows])
        assert torch.equal(got[1][:, rows], wanted[1][:, rows])
    torch.testing.assert_close(got[1], wanted[1])


@pytest.mark.usefixtures("only")
@each_backend
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_of_no_block(backend: Backend, dtype: torch.dtype) -> None:
    """Would catch memory as it was found, and a NaN from -inf less -inf in the next merge."""
    q, k, v = (x.detach().to(dtype) for x in _draw(8, 4, 2))
    some = (Block(2, 4, 1, 5, False), Block(2, 4, 6, 7, False), Block(5, 6, 6, 7, False))
    idle, unseen = [0, 1, 4, 6, 7], [0, 5, 7]
    partial = Partial(q)
    partial.add(q, k, v, some[:1])
    partial.add(q, k, v, some[1:])
    out, lse = attend_blocks(q, k, v, some)
    for got, scale in ((out, lse), partial.result(dtype), Partial(q).result(dtype)):
        assert not got[idle].any()
        assert (scale[:, idle] == -math.inf).all()
        assert got.isfinite().all()
    grads = [torch.full_like(x, math.nan) for x in (q, k, v)]
    ones = torch.ones_like(q)
    attend_blocks_backward(ones, q, k, v, out, lse, some, *grads, fresh_q=True, fresh_kv=True)
    assert not grads[0][idle].any()
    assert not grads[1][unseen].any()
    assert not grads[2][unseen].any()
    assert all(x.isfinite().all() for x in grads)
    kept = [x.clone() for x in grads]
    attend_blocks_backward(ones, q, k, v, out, lse, (), *grads, fresh_q=False, fresh_kv=False)
    assert all(torch.equal(one, other) for one, other in zip(grads, kept, strict=True))


def test_scores_far_apart_do_not_overflow() -> None:
    """Would catch exponentials of an lse itself: parts that differ by thousands are ordinary."""
    q, k, v = (x.detach() for x in _draw(6, 2, 2))
    k[:3] *= 1e4
    blocks = (Block(0, 6, 3, 6, False), Block(0, 6, 0, 3, False))
    for order in (blocks, blocks[::-1]):
        out, _ = attend_blocks(q, k, v, order)
        _close((out,), (reference_attention(q, k, v, False),))


@pytest.mark.usefixtures("only")
@each_backend
def test_any_strides_in_and_out(backend: Backend) -> None:
    """Would catch a kernel that takes the last dim for dense, and results written elsewhere."""
    lengths, blocks = (5, 2), document_blocks((5, 2), True)
    q, k, v = (x.detach() for x in _draw(7, 4, 2))
    grad = torch.randn_like(q)
    wanted = _oracle(q, k, v, lengths, True, grad)

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, -1).contiguous().transpose(0, -1)

    for strange in (turned, lambda x: x.repeat_interleave(2, -1)[..., ::2], torch.clone):
        out, lse = attend_blocks(strange(q), strange(k), strange(v), blocks)
        fused = torch.full((7, 8, 4), math.nan, dtype=torch.float64)
        dq, dk, dv = fused.split([4, 2, 2], dim=1)
        attend_blocks_backward(
            strange(grad),
            strange(q),
            strange(k),
            strange(v),
            strange(out),
            strange(lse),
            blocks,
            dq,
            dk,
            dv,
            fresh_q=True,
            fresh_kv=True,
        )
        _close((out, dq, dk, dv), wanted)


def test_gradients_that_are_not_contiguous() -> None:
    """Would catch a kernel that reads a broadcast gradient as if it were dense."""
    q, k, v = _draw(6, 4, 2)
    dense = torch.autograd.grad(attend(q, k, v, (6,), True), (q, k, v), torch.ones_like(q))
    broadcast = torch.autograd.grad(attend(q, k, v, (6,), True).sum(), (q, k, v))
    _close(broadcast, dense, atol=1e-14)


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
    partial = Partial(q.detach())
    partial.add(q.detach(), k.detach(), v.detach(), document_blocks((2, 3), True))
    assert partial.result(torch.float32)[1].shape == (0, 5)


def test_a_rank_without_tokens() -> None:
    """Would catch a kernel called on no rows, where a pack is shorter than its group."""
    q, k, v = (torch.empty(0, heads, 4, requires_grad=True) for heads in (4, 2, 2))
    for lengths in ((), (0,)):
        out = attend(q, k, v, lengths, True)
        assert out.shape == (0, 4, 4)
        assert torch.autograd.grad(out.sum(), k)[0].shape == (0, 2, 4)


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


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("scores", [1, 100, 1 << 24])
def test_plain_operators_by_tiles(
    causal: bool, softcap: float, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches tiles that see other keys than whole rows do, and the slope of a bound."""
    monkeypatch.setattr(kernels, "_SCORES", scores)
    q, k, v = _draw(13, 4, 2)
    grad = torch.randn(13, 4, 4, dtype=torch.float64)
    raw = torch.einsum("qnd,knd->nqk", q, k.repeat_interleave(2, 1)) / 2
    if softcap:
        raw = softcap * torch.tanh(raw / softcap)
    if causal:
        raw = raw.masked_fill(torch.ones(13, 13, dtype=torch.bool).triu(1), -math.inf)
    wanted = torch.einsum("nqk,knd->qnd", raw.softmax(-1), v.repeat_interleave(2, 1))
    grads = torch.autograd.grad(wanted, (q, k, v), grad)
    plain = Plain(softcap=softcap)
    parts = [x.detach() for x in (q, k, v)]
    out, lse = plain.forward(*parts, (13,), (13,), causal)
    torch.testing.assert_close(out, wanted.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, raw.detach().logsumexp(-1), rtol=1e-12, atol=1e-12)
    found = plain.backward(grad, *parts, out, lse, (13,), (13,), causal)
    for one, exact in zip(found, grads, strict=True):
        torch.testing.assert_close(one, exact, rtol=1e-12, atol=1e-12)
