"""Attention over a group, by rings and by a gather, against whole score matrices in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from headrace.comm.collectives import Arriving
from headrace.layouts.token_plan import TokenPlan
from headrace.native.counted import ByteCounter, TrafficCounter
from headrace.ops import attention, core, gathered, row_sums
from headrace.ops.core import Core, Heads, PackCore, attended, attended_again
from headrace.ops.gathered import GatheredCore
from headrace.ops.ring import Ring, RingCore
from headrace.ops.rotary import Turned, turned
from headrace.ops.score_rows import ScoreRowsCore
from headrace.spec.blocks import Block
from headrace.spec.plan import TokenOrder
from oracles import reference_attention
from ranks import run_ranks
from spread import spread, whole

D = 4
KINDS = ("ring", "gathered", "score rows")
HEADS = (Heads(queries=3, keys=3), Heads(queries=4, keys=2), Heads(queries=3, keys=1))
PACKS = ((7, 5), (1, 11, 3), (1,), (2, 1))  # the last two leave ranks without a token
FOLDED = (3, 513, 40)  # long enough to be folded over four ranks
ORDERS: tuple[TokenOrder, ...] = ("natural", "zigzag")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A pack, attended once."""

    kind: str
    heads: Heads
    pack: tuple[int, ...]
    order: TokenOrder
    causal: bool

    @property
    def columns(self) -> int:
        return self.heads.queries + 2 * self.heads.keys

    def tokens(self, ranks: int) -> TokenPlan:
        return TokenPlan(lengths=self.pack, ranks=ranks, order=self.order)


SHORT = [
    Case(kind=kind, heads=heads, pack=pack, order=order, causal=causal)
    for kind, heads, pack, order, causal in product(KINDS, HEADS, PACKS, ORDERS, (True, False))
]
LONG = [
    Case(kind=kind, heads=HEADS[1], pack=FOLDED, order="zigzag", causal=causal)
    for kind, causal in product(KINDS, (True, False))
]
CASES = SHORT + LONG


def _draw(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries, keys and values of the pack, and the gradient of its heads."""
    generator = torch.Generator().manual_seed(sum(case.pack))
    shapes = ((sum(case.pack), n, D) for n in (case.columns, case.heads.queries))
    qkv, grad = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes)
    return qkv, grad


@cache
def _one_process(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Heads and dqkv, a document at a time."""
    qkv, grad = _draw(case)
    qkv.requires_grad_()
    parts = (case.heads.split(document) for document in qkv.split(list(case.pack)))
    out = torch.cat([reference_attention(*part, case.causal) for part in parts])
    out.backward(grad)
    return out.detach().numpy(), qkv.grad.numpy()


def _core(case: Case, tokens: TokenPlan, member: int, group: Any) -> Core:
    def blocks(source: int) -> Sequence[Block]:
        return tokens.blocks((member,), (source,), case.causal)

    ring = Ring(sizes=tokens.sizes, member=member, group=group)
    if case.kind == "ring":
        return RingCore(heads=case.heads, ring=ring, blocks=blocks)
    if case.kind == "score rows":
        return ScoreRowsCore(heads=case.heads, ring=ring, blocks=blocks)
    everyone = tuple(range(tokens.ranks))
    order = tokens.held(everyone).order
    return GatheredCore(
        heads=case.heads,
        sizes=tokens.sizes,
        group=group,
        blocks=tokens.blocks((member,), everyone, case.causal),
        order=None if order is None else torch.from_numpy(order),
        back=None if order is None else torch.from_numpy(np.argsort(order)),
    )


def _group() -> Any:
    return dist.group.WORLD if dist.get_world_size() > 1 else None


def _run(case: Case) -> dict[str, Any]:
    tokens, member = case.tokens(dist.get_world_size()), dist.get_rank()
    qkv, grad = (x[torch.from_numpy(tokens.index(member))] for x in _draw(case))
    qkv.requires_grad_()
    with TrafficCounter() as wire:
        out = attended(_core(case, tokens, member, _group()), qkv)
        forward = wire.take()
        out.backward(grad)
    return {
        "out": out.detach().numpy(),
        "dqkv": qkv.grad.numpy(),
        "sent": (forward, wire.take()),
        "places": tokens.index(member),
    }


def _run_all(cases: list[Case]) -> list[dict[str, Any]]:
    return [_run(case) for case in cases]


def _as_a_device_does(cases: list[Case], held: int) -> list[dict[str, Any]]:
    """What this rank has where parts are held, up to ``held`` times their rows, and then added."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (attention, core, gathered, row_sums):
            patch.setattr(module, "adds_at_once", lambda x: False)
        for module in (attention, row_sums):
            patch.setattr(module, "HELD", held)
        return _run_all(cases)


HELD = (None, 0, 2)


@pytest.mark.parametrize(
    ("ranks", "held", "every"),
    [
        (1, None, 1),
        (1, 0, 4),
        (2, None, 2),
        (2, 2, 4),
        (3, None, 4),
        (3, 0, 4),
        (4, None, 6),
        (4, 2, 6),
        *(whole(ranks, held, 1) for ranks, held in product((1, 2, 3, 4), HELD)),
    ],
)
def test_heads_and_gradients_equal_one_process(ranks: int, held: int | None, every: int) -> None:
    """Would catch a block attended with another rank's keys, softmaxes over parts of the keys that
    are not merged, gradients that travel a hop too far, ranks without tokens that leave the ring,
    and parts that are held and then forgotten, or added to rows that are not theirs."""
    work = _run_all if held is None else partial(_as_a_device_does, held=held)
    cases = spread(SHORT, every) + LONG
    results = run_ranks(ranks, work, cases)
    for i, case in enumerate(cases):
        places = np.concatenate([r[i]["places"] for r in results])
        for name, wanted in zip(("out", "dqkv"), _one_process(case), strict=True):
            got = np.empty_like(wanted)
            got[places] = np.concatenate([r[i][name] for r in results])
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-11, err_msg=f"{name} {case}")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_are_those_of_the_docstrings(ranks: int) -> None:
    """Would catch keys sent a full round, and gradients that travel with the keys of all ranks:
    each rank sends 2 V T kv forward, and as many for kv and for dkv backward."""
    cases = [
        Case(kind=kind, heads=heads, pack=(12, 12), order=order, causal=True)
        for kind, heads, order in product(KINDS, HEADS, ORDERS)
    ]
    results = run_ranks(ranks, _run_all, cases)
    for i, case in enumerate(cases):
        hop = 8 * 2 * case.heads.keys * D * 24 // ranks
        wanted = ((ranks - 1) * hop, 2 * (ranks - 1) * hop)
        assert [r[i]["sent"] for r in results] == [wanted] * ranks, case


@dataclass(frozen=True)
class _AsTheyAre:
    """In place of a rotation: q, k and v are what is given."""

    def turned(self, qkv: torch.Tensor) -> torch.Tensor:
        return qkv.clone()

    def turned_back(self, *grads: torch.Tensor) -> torch.Tensor:
        return torch.cat(grads, dim=1)


def _as_they_are(qkv: torch.Tensor) -> Turned:
    return turned(qkv, _AsTheyAre())  # type: ignore[arg-type]


def _twice(cases: list[Case]) -> list[list[Any]]:
    """Heads, dx, dW, calls of the projection and bytes sent backward, q, k and v kept and not."""
    member, results = dist.get_rank(), []
    for case in cases:
        tokens, both = case.tokens(dist.get_world_size()), []
        core = _core(case, tokens, member, _group())
        for again in (False, True):
            generator = torch.Generator().manual_seed(member)
            calls, count = [], tokens.sizes[member]
            x = torch.randn(count, 5, generator=generator, dtype=torch.float64).requires_grad_()
            w = torch.randn(5, case.columns * D, generator=generator, dtype=torch.float64)
            w.requires_grad_()

            def project(x, calls=calls, w=w, columns=case.columns):
                calls.append(torch.is_grad_enabled())
                return _as_they_are((x @ w).tanh().view(len(x), columns, D)), x

            if again:
                out, _ = attended_again(core, project, x)
            else:
                out = attended(core, project(x)[0])
            with TrafficCounter() as wire:
                out.backward(torch.ones_like(out) + out.detach())
            grads = [t.detach().numpy() for t in (out, x.grad, w.grad)]
            both.append((grads, calls, wire.sent_bytes))
        results.append(both)
    return results


@pytest.mark.parametrize("ranks", [1, 3])
def test_queries_and_keys_made_again_give_the_same_bits(ranks: int) -> None:
    """Would catch a second projection that is not the first, its gradients left out or added
    twice, and activations sent for it."""
    cases = [case for case in CASES if case.heads == HEADS[1] and case.causal]
    for results in run_ranks(ranks, _twice, cases):
        for case, (kept, again) in zip(cases, results, strict=True):
            for one, other in zip(kept[0], again[0], strict=True):
                np.testing.assert_array_equal(one, other, err_msg=str(case))
            assert (kept[1], again[1]) == ([True], [False, True])
            assert kept[2] == again[2]


def _saved(fn: Any) -> tuple[list[tuple[int, ...]], int]:
    """Shapes of what is kept for the backward, and bytes alive besides the inputs."""
    shapes: list[tuple[int, ...]] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), ByteCounter() as counter:
        out = fn()
        alive = counter.current_bytes
    del out
    return shapes, alive


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept(kind: str) -> None:
    """Would catch q, k and v alive though they are made again, scores kept where the log-sum-exp
    is enough, and a copy of the heads."""
    case = Case(kind=kind, heads=HEADS[1], pack=(20, 12), order="natural", causal=True)
    tokens = case.tokens(1)
    core, n = _core(case, tokens, 0, None), case.heads.queries
    x = torch.randn(32, 5, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, case.columns * D, dtype=torch.float64)
    scores = [(n, 20, 20), (n, 12, 12)] if kind == "score rows" else [(n, 32)]
    heads = (32, n, D)
    kept = 8 * (sum(int(np.prod(shape)) for shape in scores) + int(np.prod(heads)))

    def project(x: torch.Tensor) -> tuple[Turned, torch.Tensor]:
        return _as_they_are((x @ w).view(32, case.columns, D)), x

    assert _saved(lambda: attended_again(core, project, x)[0]) == ([(32, 5), heads, *scores], kept)
    qkv = project(x)[0].qkv.detach().requires_grad_()
    assert _saved(lambda: attended(core, qkv)) == ([tuple(qkv.shape), heads, *scores], kept)


def test_a_pack_on_one_rank_is_attended_at_once() -> None:
    """Would catch blocks of one rank that are not those of the documents, in half types too, whose
    sums over several blocks of a row are wide."""
    for case in CASES:
        tokens, everyone = case.tokens(3), (0, 1, 2)
        qkv, grad = _draw(case)
        qkv.requires_grad_()
        core = PackCore(heads=case.heads, blocks=tokens.blocks(everyone, everyone, case.causal))
        out = attended(core, qkv)
        out.backward(grad)
        for got, wanted in zip((out.detach(), qkv.grad), _one_process(case), strict=True):
            np.testing.assert_allclose(got.numpy(), wanted, rtol=0, atol=1e-11)
    half = qkv.detach().bfloat16().requires_grad_()
    attended(core, half).backward(grad.bfloat16())
    assert half.grad.dtype == torch.bfloat16


def _walked() -> list[list[tuple[str, int]]]:
    """What a ring does, in order: hops issued by their step, sources attended."""
    ranks, member, logs = dist.get_world_size(), dist.get_rank(), []
    for kind in ("ring", "score rows"):
        log: list[tuple[str, int]] = []

        class Told(Ring):
            def onward(self, x: torch.Tensor, step: int, log: Any = log) -> Arriving | None:
                log.append(("issue", step))
                return Ring.onward(self, x, step)

        def blocks(source: int, log: Any = log) -> Sequence[Block]:
            log.append(("attend", (member - source) % ranks))
            return ()

        ring = Told(sizes=(2,) * ranks, member=member, group=dist.group.WORLD)
        heads = Heads(queries=2, keys=1)
        core: Core = (
            RingCore(heads=heads, ring=ring, blocks=blocks)
            if kind == "ring"
            else ScoreRowsCore(heads=heads, ring=ring, blocks=blocks)
        )
        qkv = torch.zeros(2, 4, D)
        out, saved = core.forward(qkv)
        logs.append(log.copy())
        log.clear()
        core.backward(out, qkv, out, saved)
        logs.append(log)
    return logs


def test_keys_are_under_way_while_others_are_attended() -> None:
    """Would catch a hop issued only when the attention of the step before is done: links would
    wait for kernels and kernels for links. Steps are hops: at step i what came with i is used."""
    steps = [("issue", 0), ("attend", 0), ("issue", 1), ("attend", 1), ("issue", 2), ("attend", 2)]
    for logs in run_ranks(3, _walked):
        forward, backward, rows, rows_backward = logs
        assert forward == backward == rows_backward == steps
        assert rows[:6] == steps  # of the keys; values go round after them
        assert rows[-6:] == steps
