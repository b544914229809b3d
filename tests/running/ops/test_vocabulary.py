"""Embedding and head whose words are spread over a tensor group, against one process, in fp64."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.testing._internal.distributed.fake_pg  # registers the back end

from headrace.comm.mesh import Groups
from headrace.layouts.partition import Rows, split_rows
from headrace.methods.weights import Whole
from headrace.native.counted import ByteCounter, TrafficCounter
from headrace.ops.loss import IGNORED, head_loss
from headrace.ops.spread import Spread
from headrace.ops.vocabulary import spread_embed, spread_head_loss
from ranks import run_ranks
from spread import spread as spread_of
from spread import whole

H, SCALE = 6, 0.25
SIZES = {
    1: [(5,)],
    2: [(4, 4), (5, 2), (3, 0), (0, 4), (0, 0), (1, 1)],
    3: [(4, 4, 4), (2, 0, 3), (1, 7, 2)],
    4: [(3, 3, 3, 3), (5, 0, 1, 2)],
}
WORDS = (11, 2, 1)  # the last ones are fewer than the ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An embedding and a head of ``words``, over ``blocks`` groups that each hold all of them;
    ``sizes`` are the tokens of every rank, ``chunks`` those of the embedding, ``chunk`` the tokens
    of the head's."""

    sizes: tuple[int, ...]
    words: int
    chunks: int = 1
    chunk: int = 2048
    tied: bool = True
    biased: bool = False
    blocks: int = 1
    dtype: torch.dtype = torch.float64
    large: float = 1.0

    @property
    def ranks(self) -> int:
        """Ranks of a block."""
        return len(self.sizes) // self.blocks

    @property
    def wide(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def rows(self, rank: int) -> Rows:
        return split_rows(self.words, self.ranks)[rank % self.ranks]

    def mine(self, rank: int) -> slice:
        """This rank's tokens of those of all ranks."""
        start = sum(self.sizes[:rank])
        return slice(start, start + self.sizes[rank])

    def group(self, rank: int) -> tuple[int, ...]:
        first = rank - rank % self.ranks
        return tuple(range(first, first + self.ranks))


def _cases(ranks: int) -> list[Case]:
    shapes = product(SIZES[ranks], WORDS, ((1, 2048), (2, 3), (3, 1)))
    return [
        Case(sizes=sizes, words=words, chunks=chunks, chunk=chunk, tied=tied, biased=biased)
        for sizes, words, (chunks, chunk) in shapes
        for tied, biased in ((True, False), (False, True))
    ]


def _draw(case: Case) -> dict[str, torch.Tensor]:
    """Everything whole, tokens one rank after the other; every third has no label."""
    generator = torch.Generator().manual_seed(sum(case.sizes) + case.words)
    total = sum(case.sizes)

    def randn(*shape: int) -> torch.Tensor:
        return (case.large * torch.randn(*shape, generator=generator)).to(case.dtype)

    labels = torch.randint(case.words, (total,), generator=generator)
    labels[::3] = IGNORED
    return {
        "ids": torch.randint(case.words, (total,), generator=generator),
        "labels": labels,
        "more": randn(total, H),
        "embed": randn(case.words, H),
        "head": randn(case.words, H),
        "bias": randn(case.words),
    }


def _one_process(case: Case) -> dict[str, Any]:
    """Embedding, something added, head and loss by plain autograd in fp64; a loss per rank."""
    t = _draw(case)
    w = {name: t[name].double().requires_grad_() for name in ("embed", "head", "bias")}
    y = F.embedding(t["ids"], w["embed"])
    x = (y + t["more"].double()).detach().requires_grad_() if not case.tied else y + t["more"]
    x.retain_grad()
    z = x @ w["embed" if case.tied else "head"].t() + (w["bias"] if case.biased else 0)
    each = SCALE * F.cross_entropy(z, t["labels"], reduction="none", ignore_index=IGNORED)
    each.sum().backward()
    if not case.tied:
        y.backward(x.grad)
    losses = [float(part.detach().sum()) for part in each.split(case.sizes)]
    grads = {n: v.grad.numpy() for n, v in w.items() if v.grad is not None}
    return {"y": y.detach().numpy(), "dx": x.grad.numpy(), "losses": losses, **grads}


def _source(value: torch.Tensor, rows: Rows, dtype: torch.dtype) -> Whole:
    """This rank's rows; the gradient starts at one: what is added to it must be added."""
    value = value[rows.start : rows.stop].clone()
    return Whole(value=value, grad=torch.ones_like(value, dtype=dtype))


def _run(case: Case, groups: Groups) -> dict[str, Any]:
    rank, t = groups.rank, _draw(case)
    rows, mine, members = case.rows(rank), case.mine(rank), case.group(rank)
    w = {name: _source(t[name], rows, case.wide) for name in ("embed", "head", "bias")}
    sizes = tuple(case.sizes[member] for member in members)
    spread = Spread(sizes=sizes, group=groups.get(members), chunks=case.chunks)
    anchor = torch.empty(0, requires_grad=True)
    with TrafficCounter() as wire:
        y = spread_embed(t["ids"][mine], w["embed"], rows.start, anchor, spread)
        sent = [wire.take()]
        x = (y + t["more"][mine]).detach()
        loss, dx = spread_head_loss(
            x,
            t["labels"][mine],
            w["embed" if case.tied else "head"],
            rows.start,
            SCALE,
            spread,
            case.chunk,
            w["bias"] if case.biased else None,
        )
        sent.append(wire.take())
        y.backward(dx)
        sent.append(wire.take())
    assert y.dtype == dx.dtype == case.dtype
    assert loss.dtype == torch.float64
    used = ["embed", *([] if case.tied else ["head"]), *(["bias"] if case.biased else [])]
    grads = {name: (w[name].grad - 1).double().numpy() for name in used}
    out = {"y": y.detach().double().numpy(), "dx": dx.double().numpy(), "losses": float(loss)}
    return {**out, **grads, "sent": sent}


def _run_all(cases: list[Case]) -> list[dict[str, Any]]:
    groups = Groups()
    ranks = range(groups.ranks)
    groups.prepare({case.group(rank) for case in cases for rank in ranks})
    return [_run(case, groups) for case in cases]


def _together(case: Case, name: str, parts: list[Any]) -> Any:
    """Ranks' parts as one process has them: tokens and words joined, blocks' gradients added."""
    if name == "losses":
        return parts
    if name in ("y", "dx"):
        return np.concatenate(parts)
    n = case.ranks
    return sum(np.concatenate(parts[i : i + n]) for i in range(0, len(parts), n))


Results = list[tuple[Case, list[dict[str, Any]]]]


def _results(cases: list[Case]) -> Results:
    of_rank = run_ranks(len(cases[0].sizes), _run_all, cases)
    return [(case, [parts[i] for parts in of_rank]) for i, case in enumerate(cases)]


@pytest.fixture(
    scope="module", params=[(1, 1), (2, 2), (3, 2), (4, 3), *(whole((n, 1)) for n in (2, 3, 4))]
)
def results(request: pytest.FixtureRequest) -> Results:
    """Each case with what its ranks have."""
    ranks, every = request.param
    return _results(spread_of(_cases(ranks), every))


def _check(results: Results, tolerance: float) -> None:
    for case, parts in results:
        for name, wanted in _one_process(case).items():
            got = _together(case, name, [part[name] for part in parts])
            np.testing.assert_allclose(
                got, wanted, rtol=0, atol=tolerance, err_msg=f"{name} {case}"
            )


def test_results_and_every_gradient_equal_one_process(results: Results) -> None:
    """Would catch words counted from the wrong first, a softmax over this rank's words alone, a
    target's logit lost at a border, gradients that replace what another use has added, losses of
    other ranks' tokens counted too, a bias added once per rank, and a rank without words or tokens
    that leaves a collective out."""
    _check(results, 1e-12)


def test_bytes_are_those_of_the_docstrings(results: Results) -> None:
    """Would catch a table or logits that travel, and ids gathered again in the backward. A gather
    sends this rank's rows to each other one, a scatter what is others'."""
    for case, parts in results:
        total, others = sum(case.sizes), len(case.sizes) - 1
        for size, part in zip(case.sizes, parts, strict=True):
            gather, scatter = 8 * others * size, 8 * (total - size)
            embedding = gather + H * scatter  # ids one way, rows the other
            head = (H + 1) * gather + 2 * 8 * others * total + H * scatter
            assert part["sent"] == [embedding, head, H * gather], case


def test_blocks_are_replicas() -> None:
    """Two blocks of two ranks that each hold all words: would catch ranks counted in the world
    instead of the block, and a loss or a gradient that crosses blocks."""
    sizes = ((3, 4, 2, 5), (1, 0, 0, 3), (0, 0, 2, 2))
    _check(
        _results(
            [
                Case(sizes=s, words=words, chunks=2, chunk=3, tied=tied, biased=not tied, blocks=2)
                for s, words, tied in product(sizes, (7, 1), (True, False))
            ]
        ),
        1e-12,
    )


def test_large_logits_do_not_overflow() -> None:
    """Would catch exponentials of one rank taken before the maximum of all is subtracted, and the
    -inf of a rank without words that turns into NaN."""
    shapes = [((3, 4), 11), ((2, 3), 1)]
    for case, parts in _results([Case(sizes=s, words=w, large=40.0) for s, w in shapes]):
        wanted = _one_process(case)
        got = [part["losses"] for part in parts]
        np.testing.assert_allclose(got, wanted["losses"], rtol=1e-12, atol=1e-300)
        dx = np.concatenate([part["dx"] for part in parts])
        np.testing.assert_allclose(dx, wanted["dx"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types_are_as_good_as_one_process(dtype: torch.dtype) -> None:
    """Would catch a softmax, or gradients of the words, kept in a half type over chunks or ranks
    (sums of ones stall after 256), and results of another type than the activations'."""
    case = Case(sizes=(900, 700), words=5, chunks=3, chunk=8, tied=False, biased=True, dtype=dtype)
    [(_, parts)] = _results([case])
    exact, t = _one_process(case), _draw(case)
    head, bias = (_source(t[n], Rows(0, 5), torch.float32) for n in ("head", "bias"))
    x = t["embed"][t["ids"]] + t["more"]
    loss, dx = head_loss(x, t["labels"], head, SCALE, 8, bias)
    one = {"dx": dx, "head": head.grad - 1, "bias": bias.grad - 1}
    assert sum(part["losses"] for part in parts) == pytest.approx(float(loss), rel=1e-6)
    for name, theirs in one.items():
        got = _together(case, name, [part[name] for part in parts])
        ours = np.linalg.norm(got - exact[name])
        limit = np.linalg.norm(theirs.double().numpy() - exact[name])
        assert ours <= 1.5 * limit + 1e-6 * np.linalg.norm(exact[name]), name
    dx = np.concatenate([part["dx"] for part in parts])
    words = np.zeros((5, H))
    np.add.at(words, t["ids"].numpy(), dx)
    got = _together(case, "embed", [part["embed"] for part in parts])
    np.testing.assert_allclose(got, words, rtol=0, atol=1e-5 * np.abs(words).max())


def _twice(case: Case) -> list[dict[str, Any]]:
    return _run_all([case, case])


def test_the_same_bits_twice() -> None:
    """Would catch sums whose order depends on arrival."""
    case = Case(sizes=(40, 31, 2), words=23, chunks=2, chunk=16, biased=True, dtype=torch.float32)
    for one, other in run_ranks(3, _twice, case):
        assert one["losses"] == other["losses"]
        assert all(np.array_equal(one[n], other[n]) for n in ("y", "dx", "embed", "bias"))


TOKENS, WIDE = 240, 64  # tokens of a rank, features


def _passing(chunks: list[int]) -> list[dict[str, float]]:
    """The most bytes in passing, in gathered activations T h; nothing is sent, as gloo's threads
    hold what has arrived for a while."""
    ranks = dist.get_world_size()
    group = dist.new_group(list(range(ranks)), backend="fake")
    unit, out = 8 * TOKENS * ranks * WIDE, []
    for count in chunks:
        spread = Spread(sizes=(TOKENS,) * ranks, group=group, chunks=count)
        source = _source(torch.randn(4, WIDE, dtype=torch.float64), Rows(0, 4), torch.float64)
        ids = torch.full((TOKENS,), 9)  # of no rank
        with ByteCounter() as counter:
            y = spread_embed(ids, source, 0, torch.empty(0, requires_grad=True), spread)
            forward = (counter.peak_bytes - y.nbytes) / unit
            grad = torch.ones_like(y)
            before = counter.current_bytes
            counter.reset_peak()
            y.backward(grad)
            backward = (counter.peak_bytes - before) / unit
            before = counter.current_bytes
            counter.reset_peak()
            _, dx = spread_head_loss(
                y.detach(), ids, source, 0, 1.0, spread, TOKENS * ranks // count
            )
            head = (counter.peak_bytes - before - dx.nbytes) / unit
        out.append({"forward": forward, "backward": backward, "head": head})
    return out


def test_few_chunks_are_alive_and_never_all() -> None:
    """Would catch gathered activations of all tokens alive at once, which are R local ones, or a
    chunk that a loop's variable holds. In passing are two chunks of what is gathered; where
    something is scattered, a chunk of products and one on its way, sent and received."""
    for count, got in zip((6, 12), run_ranks(2, _passing, [6, 12])[0], strict=True):
        limits = {"forward": 3, "backward": 2, "head": 5}
        for name, chunks in limits.items():
            assert count * got[name] <= chunks + 0.7, (name, got)  # narrow things: ids, logits
