"""Products around a gather and a scatter of the sequence, against one process, in fp64."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.testing._internal.distributed.fake_pg  # registers the back end

from headrace.layouts.partition import Rows, split_rows
from headrace.methods.weights import Whole
from headrace.native.counted import ByteCounter, TrafficCounter
from headrace.ops import spread as spread_module
from headrace.ops.activation import Activation, Gelu, SwiGLU
from headrace.ops.norm import LayerNorm, Norm, RMSNorm
from headrace.ops.spread import (
    FeedForward,
    Spread,
    gather_linear,
    linear_scatter,
    spread_feed_forward,
)
from ranks import run_ranks
from spread import spread as spread_of
from spread import whole

H, EPS, BLOCK = 6, 1e-3, 2
SIZES = {
    1: [(5,), (1,)],
    2: [(4, 4), (5, 2), (3, 0), (1, 1)],
    3: [(4, 4, 4), (2, 0, 3), (1, 7, 2)],
}
Kind = Literal["gather", "scatter", "feed"]
Kept = Literal["", "rms", "layer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One product over tokens of ``sizes``; ``moved``: the pack has another order than they;
    ``summed``: x, or the result, is part of a residual sum."""

    kind: Kind
    sizes: tuple[int, ...]
    chunks: int
    moved: bool
    norm: Kept = ""
    biased: bool = False
    gated: bool = False
    summed: bool = False

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def places(self) -> torch.Tensor:
        """The place in the pack of each row, one rank after the other."""
        if not self.moved:
            return torch.arange(self.total)
        return torch.randperm(self.total, generator=torch.Generator().manual_seed(self.total))

    @property
    def features(self) -> tuple[int, int]:
        """Rows of the matrix that is first, those between the matrices; ranks share them
        unevenly."""
        return (16, 8) if self.gated else (8, 8)

    @property
    def activation(self) -> Activation:
        return SwiGLU(block=BLOCK) if self.gated else Gelu(approximate="tanh")

    def shards(self, rank: int) -> tuple[Rows, Rows]:
        """This rank's rows of the first and of the second matrix."""
        ranks, (first, second) = len(self.sizes), self.features
        units = (2 * BLOCK, BLOCK) if self.gated else (1, 1)
        return split_rows(first, ranks, units[0])[rank], split_rows(second, ranks, units[1])[rank]

    def mine(self, rank: int) -> slice:
        """This rank's rows of those of all ranks."""
        start = sum(self.sizes[:rank])
        return slice(start, start + self.sizes[rank])


def _cases(ranks: int) -> list[Case]:
    spreads = product(SIZES[ranks], (1, 2, 3), (False, True))
    return [
        case
        for sizes, chunks, moved in spreads
        for case in (
            Case(kind="gather", sizes=sizes, chunks=chunks, moved=moved),
            Case(kind="gather", sizes=sizes, chunks=chunks, moved=moved, norm="rms", biased=True),
            Case(kind="gather", sizes=sizes, chunks=chunks, moved=moved, norm="layer", summed=True),
            Case(kind="gather", sizes=sizes, chunks=chunks, moved=moved, summed=True),
            Case(kind="scatter", sizes=sizes, chunks=chunks, moved=moved),
            Case(kind="scatter", sizes=sizes, chunks=chunks, moved=moved, biased=True),
            Case(kind="scatter", sizes=sizes, chunks=chunks, moved=moved, summed=True),
            Case(kind="scatter", sizes=sizes, chunks=chunks, moved=moved, biased=True, summed=True),
            Case(kind="feed", sizes=sizes, chunks=chunks, moved=moved, norm="rms", gated=True),
            Case(
                kind="feed",
                sizes=sizes,
                chunks=chunks,
                moved=moved,
                norm="layer",
                biased=True,
                summed=True,
            ),
            Case(kind="feed", sizes=sizes, chunks=chunks, moved=moved, biased=True, gated=True),
        )
    ]


def _draw(case: Case) -> dict[str, torch.Tensor]:
    """Everything whole. Rows of ``x`` and ``dz`` stand one rank after the other, those of ``y``
    and ``dy`` in the order of the pack; both matrices have a row for each wide feature."""
    generator = torch.Generator().manual_seed(case.total)
    first, second = case.features
    shapes = {
        "x": (case.total, H),
        "dx": (case.total, H),
        "dz": (case.total, H),
        "y": (case.total, second),
        "dy": (case.total, first),
        "in": (first, H),
        "in_bias": (first,),
        "out": (second, H),
        "out_bias": (H,),
        "norm": (H,),
        "norm_bias": (H,),
    }
    return {
        name: torch.randn(*shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def _one_process(case: Case) -> dict[str, np.ndarray]:
    """The result and every gradient by plain autograd."""
    t = {name: value.requires_grad_() for name, value in _draw(case).items()}
    x = t["x"]
    if case.norm == "rms":
        x = F.rms_norm(x, (H,), t["norm"], eps=EPS)
    elif case.norm == "layer":
        x = F.layer_norm(x, (H,), t["norm"], t["norm_bias"], eps=EPS)
    in_bias, out_bias = (t[name] if case.biased else 0 for name in ("in_bias", "out_bias"))
    back = torch.argsort(case.places)
    if case.kind == "gather":
        out, grad = (x @ t["in"].t() + in_bias)[back], t["dy"]
    elif case.kind == "scatter":
        out, grad = t["y"][case.places] @ t["out"] + out_bias, t["dz"]
    else:
        wide = x @ t["in"].t() + in_bias
        if case.gated:
            gate, up = wide.view(case.total, -1, 2, BLOCK).unbind(2)
            y = (F.silu(gate) * up).reshape(case.total, -1)
        else:
            y = F.gelu(wide, approximate="tanh")
        out, grad = y @ t["out"] + out_bias, t["dz"]
    if case.summed and case.kind == "scatter":
        out = out + t["x"]
    elif case.summed:
        t["x"].backward(t["dx"].detach(), retain_graph=True)
    out.backward(grad.detach())
    t["dx"].grad = None
    grads = {n: v.grad.numpy() for n, v in t.items() if v.grad is not None}
    return {"result": out.detach().numpy(), **grads}


def _source(value: torch.Tensor) -> Whole:
    """A weight whose gradient starts at one: what is added to it must be added."""
    return Whole(value=value.clone(), grad=torch.ones_like(value))


def _norm(case: Case, weights: dict[str, Whole]) -> Norm | None:
    if case.norm == "rms":
        return RMSNorm(weight=weights["norm"], eps=EPS)
    if case.norm == "layer":
        return LayerNorm(weight=weights["norm"], bias=weights["norm_bias"], eps=EPS)
    return None


def _run(case: Case) -> dict[str, Any]:
    """This rank's part of the result and of every gradient, and what it sent."""
    rank, ranks, t = dist.get_rank(), dist.get_world_size(), _draw(case)
    first, second = (slice(rows.start, rows.stop) for rows in case.shards(rank))
    x, y = t["x"][case.mine(rank)].requires_grad_(), t["y"][:, second].requires_grad_()
    weights = {
        "in": _source(t["in"][first]),
        "in_bias": _source(t["in_bias"][first]),
        "out": _source(t["out"][second]),
        "out_bias": _source(t["out_bias"]),
        "norm": _source(t["norm"]),
        "norm_bias": _source(t["norm_bias"]),
    }
    spread = Spread(
        sizes=case.sizes,
        group=dist.group.WORLD if ranks > 1 else None,
        chunks=case.chunks,
        places=case.places if case.moved else None,
    )
    in_bias, out_bias = (weights[n] if case.biased else None for n in ("in_bias", "out_bias"))
    norm, grad = _norm(case, weights), t["dz"][case.mine(rank)]
    with TrafficCounter() as wire:
        came = case.places[torch.from_numpy(spread.arrival())]  # the places of rows as they come
        passed = x
        if case.kind == "gather":
            out, passed = gather_linear(x, weights["in"], in_bias, norm, spread)
            out, grad = out[torch.argsort(came)], t["dy"][:, first]
        elif case.kind == "scatter":
            onto = x if case.summed else None
            in_pack = case.moved or not case.biased
            rows = y if in_pack else y[came]
            out = linear_scatter(rows, weights["out"], out_bias, onto, spread, in_pack=in_pack)
        else:
            parts = FeedForward(
                norm=norm,
                matrix_in=weights["in"],
                bias_in=in_bias,
                activation=case.activation,
                matrix_out=weights["out"],
                bias_out=out_bias,
            )
            out, passed = spread_feed_forward(x, parts, spread)
        forward = wire.take()
        if case.summed and case.kind != "scatter":
            torch.autograd.backward([out, passed], [grad, t["dx"][case.mine(rank)]])
        else:
            out.backward(grad)
    grads = {name: weight.grad - 1 for name, weight in weights.items()}
    grads |= {n: v.grad for n, v in (("x", x), ("y", y)) if v.grad is not None}
    return {
        "result": out.detach().numpy(),
        **{n: g.numpy() for n, g in grads.items()},
        "sent": (forward, wire.take()),
    }


def _run_all(cases: list[Case]) -> list[dict[str, Any]]:
    return [_run(case) for case in cases]


def _run_all_as_a_device_does(cases: list[Case]) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spread_module, "adds_at_once", lambda x: False)
        patch.setattr(spread_module, "_takes_blocks", lambda x: True)
        return _run_all(cases)


def _together(case: Case, name: str, parts: list[np.ndarray]) -> np.ndarray:
    """Ranks' parts as one process has them: rows or columns joined, partial sums added."""
    if name == "y" or (name == "result" and case.kind == "gather"):
        return np.concatenate(parts, 1)
    if name in ("result", "x", "in", "in_bias", "out"):
        return np.concatenate(parts)
    return sum(parts)


Results = list[tuple[Case, list[dict[str, Any]]]]


RUNS = (_run_all, _run_all_as_a_device_does)


@pytest.fixture(
    scope="module",
    params=[*product([1, 2, 3], RUNS, [4]), *(whole(x) for x in product([1, 2, 3], RUNS, [1]))],
)
def results(request: pytest.FixtureRequest) -> Results:
    """Each case with what its ranks have."""
    ranks, run, every = request.param
    cases = spread_of(_cases(ranks), every)
    of_rank = run_ranks(ranks, run, cases)
    return [(case, [parts[i] for parts in of_rank]) for i, case in enumerate(cases)]


def test_results_and_every_gradient_equal_one_process(results: Results) -> None:
    """Would catch rows of a chunk put in another one's place, a permutation undone twice, chunks
    without a row on some rank, a bias added on every rank, and a gradient of a shard that lacks
    the tokens of others."""
    for case, parts in results:
        for name, wanted in _one_process(case).items():
            got = _together(case, name, [part[name] for part in parts])
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-12, err_msg=f"{name} {case}")


GATHERS_SCATTERS = {  # forward, backward
    "gather": ((1, 0), (1, 1)),
    "scatter": ((0, 1), (1, 0)),
    "feed": ((1, 1), (2, 1)),
}


def test_bytes_are_those_of_the_docstrings(results: Results) -> None:
    """Would catch a gather too many in a backward that makes results again, and rows sent to ranks
    that do not want them. On even ranks a gather and a scatter send V T h elements each."""
    for case, parts in results:
        for size, part in zip(case.sizes, parts, strict=True):
            gather, scatter = (len(case.sizes) - 1) * size, case.total - size
            wanted = tuple(
                8 * H * (gathers * gather + scatters * scatter)
                for gathers, scatters in GATHERS_SCATTERS[case.kind]
            )
            assert part["sent"] == wanted, case


def test_a_chunk_is_the_same_share_of_every_rank() -> None:
    """Would catch a token in two chunks or none, and all of a rank's tokens in the last chunk:
    ranks would not be even within a chunk."""
    for sizes, chunks in product([(7, 2, 0), (12, 12), (1,), (5, 4, 4, 4)], (1, 2, 3, 9)):
        spread = Spread(sizes=sizes, group=None, chunks=chunks)
        assert spread.total == sum(sizes)
        for rank, size in enumerate(sizes):
            shares = [spread.share(rank, chunk) for chunk in range(chunks)]
            assert [i for share in shares for i in range(size)[share]] == list(range(size))
            counts = [share.stop - share.start for share in shares]
            assert max(counts) - min(counts) <= 1
            assert counts == [spread.counts(chunk)[rank] for chunk in range(chunks)]


@pytest.mark.parametrize("moved", [False, True])
def test_take_and_put_are_inverse(moved: bool) -> None:
    """Would catch a chunk taken from one place of the pack and put in another."""
    case = Case(kind="gather", sizes=(5, 0, 3), chunks=3, moved=moved)
    spread = Spread(sizes=case.sizes, group=None, chunks=3, places=case.places if moved else None)
    whole, out = torch.arange(8)[:, None], torch.full((8, 1), -1)
    chunks = [spread.take(whole, chunk) for chunk in range(3)]
    for chunk, rows in enumerate(chunks):
        assert len(rows) == sum(spread.counts(chunk))
        spread.put(out, chunk, rows)
    assert torch.equal(out, whole)


def test_rows_as_they_come() -> None:
    """Would catch a chunk that is not where the one before ends, and rows of another rank."""
    spread = Spread(sizes=(5, 0, 3), group=None, chunks=3)
    came = spread.arrival()
    assert [list(came[spread.rows(c)]) for c in range(3)] == [[0, 5], [1, 2, 6], [3, 4, 7]]


TOKENS, WIDE, NARROW = 120, 64, 2  # of a rank; features of what is gathered; of its products


def _passing(chunks: list[int]) -> list[dict[str, float]]:
    """The most bytes in passing, in gathered activations T h; nothing is sent, as gloo's threads
    hold what has arrived for a while."""
    ranks = dist.get_world_size()
    group = dist.new_group(list(range(ranks)), backend="fake")
    unit, out = 8 * TOKENS * ranks * WIDE, []

    def source(*shape: int) -> Whole:
        return _source(torch.randn(*shape, dtype=torch.float64))

    for count in chunks:
        spread = Spread(sizes=(TOKENS,) * ranks, group=group, chunks=count)
        parts = FeedForward(
            norm=None,
            matrix_in=source(NARROW, WIDE),
            bias_in=None,
            bias_out=None,
            activation=Gelu(approximate="tanh"),
            matrix_out=source(NARROW, WIDE),
        )
        x = torch.randn(TOKENS, WIDE, dtype=torch.float64, requires_grad=True)
        passing = {}
        for name in ("gather", "feed"):
            with ByteCounter() as counter:
                if name == "gather":
                    y, _ = gather_linear(x, parts.matrix_in, None, None, spread)
                else:
                    y, _ = spread_feed_forward(x, parts, spread)
                passing[f"{name} forward"] = (counter.peak_bytes - y.nbytes) / unit
                grad, x.grad = torch.ones_like(y), None
                before = counter.current_bytes
                counter.reset_peak()
                y.backward(grad)
                passing[f"{name} backward"] = (counter.peak_bytes - before - x.nbytes) / unit
        out.append(passing)
    return out


def test_two_chunks_are_alive_and_never_all() -> None:
    """Would catch a chunk that a variable, a generator or an iterator holds while the next two are
    there, and all rows gathered at once. In passing are two chunks of what is gathered, and where
    something is scattered one chunk of products and one on its way, sent and received."""
    few, many = run_ranks(2, _passing, [4, 12])[0]
    gathered, scattered = 2, 3
    limits = {
        "gather forward": gathered,
        "gather backward": gathered + scattered,
        "feed forward": gathered + scattered,
        "feed backward": 2 * gathered + scattered,
    }
    for name, chunks in limits.items():
        assert 4 * few[name] == pytest.approx(chunks, abs=0.1), name  # products are narrow
        assert 12 * many[name] == pytest.approx(chunks, abs=0.1), name
