"""Every method at every recompute level on one to four ranks, against one process in fp64."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
from headrace.comm.mesh import Groups
from headrace.errors import SpecError
from headrace.layouts.layout import group_shards
from headrace.layouts.tokens import TokenPlan
from headrace.methods import METHODS, Context, Shard, Whole, method
from headrace.methods.ulysses_z import split_heads
from headrace.models.transformer import Transformer
from headrace.ops.linear import Source
from headrace.ops.random import DropoutKey
from headrace.ops.rotary import rotary_tables
from headrace.runtime.counted import ByteCounter
from headrace.spec import Architecture, weight_table
from headrace.spec.method import RECOMPUTE, LayerOption, Recompute
from headrace.spec.weights import WeightSpec
from ranks import run_ranks


def _llama(hidden: int, heads: int, kv_heads: int, ffn: int, **rest: Any) -> Architecture:
    return Architecture(
        layers=1, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocabulary=5, **rest
    )


MODELS = {
    "gqa": _llama(24, 4, 2, 40),
    "mqa": _llama(24, 6, 1, 24),  # ranks outnumber key-value heads at once
    "mixed": _llama(20, 10, 2, 12),  # on 3 ranks one has a query of one group, two of another
    "gpt": _llama(32, 4, 4, 48, kind="gpt", positions=64),
    "bidirectional": _llama(24, 4, 4, 16, causal=False),
}
EVEN, UNEVEN, FEW = (7, 5), (3, 1, 7), (1,)  # few: ranks without a token
HELD = ("whole", "sharded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One layer, run once forward and once backward."""

    model: str
    option: str
    recompute: Recompute
    held: str
    pack: tuple[int, ...]

    @property
    def architecture(self) -> Architecture:
        return MODELS[self.model]


def _cases(ranks: int) -> list[Case]:
    options = [name for name in METHODS if name != "local" or ranks == 1]
    if ranks == 1:
        options.append("local/ulysses_z")
    return [
        Case(model=model, option=option, recompute=level, held=held, pack=pack)
        for model, option, level, held, pack in product(
            MODELS, options, RECOMPUTE, HELD if ranks > 1 else HELD[:1], (EVEN, UNEVEN, FEW)
        )
    ]


def _weights(a: Architecture) -> list[WeightSpec]:
    return [w for w in weight_table(a) if w.bucket == 1]


def _draw(case: Case) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """x and dy [T, h] of the whole pack, all weights; nothing is zero or one."""
    a, total = case.architecture, sum(case.pack)
    generator = torch.Generator().manual_seed(total)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = {w.name: 0.3 * randn(*w.shape) + 0.1 for w in _weights(a)}
    return randn(total, a.hidden), randn(total, a.hidden), weights


def _sources(case: Case, group: Any, member: int, ranks: int) -> dict[str, Source]:
    """The layer's weights as this rank holds them; gradients start at one."""
    *_, weights = _draw(case)
    sources: dict[str, Source] = {}
    for w in _weights(case.architecture):
        value = weights[w.name]
        if case.held == "whole" or w.unit is None:
            sources[w.name] = Whole(value=value, grad=torch.ones_like(value))
            continue
        shards = group_shards(w, ranks)
        part = value[shards[member].start : shards[member].stop].clone()
        sources[w.name] = Shard(value=part, grad=torch.ones_like(part), shards=shards, group=group)
    return sources


def _context(case: Case, group: Any, member: int, ranks: int) -> Context:
    a, pack = case.architecture, TokenPlan(lengths=case.pack, ranks=ranks)
    positions = torch.from_numpy(pack.positions(member))
    tables = rotary_tables(positions, a.head_features, a.rope_theta, torch.float64)
    samples = torch.from_numpy(pack.documents(member))
    return Context(
        architecture=a, tokens=pack, member=member, group=group,
        tables=tables if a.kind == "llama" else None,
        dropout=DropoutKey(seed=0, step=0, samples=samples, positions=positions),
    )  # fmt: skip


class Wire:
    """Counts the elements that this process sends to other ranks, by any collective."""

    def __init__(self) -> None:
        self.sent = 0
        self._all_to_all = dist.all_to_all_single
        name = "all_gather_single" if hasattr(dist, "all_gather_single") else None
        name = name or "all_gather_into_tensor"
        self._all_gather = getattr(dist, name)
        dist.all_to_all_single = self._counted
        setattr(dist, name, self._counted_gather)

    def _counted(self, out: Any, x: Any, receive: Any, send: Any, group: Any = None) -> Any:
        row = x[:1].numel()
        self.sent += row * sum(n for r, n in enumerate(send) if r != dist.get_rank(group))
        return self._all_to_all(out, x, receive, send, group=group)

    def _counted_gather(self, out: Any, x: Any, group: Any = None) -> Any:
        self.sent += x.numel() * (dist.get_world_size(group) - 1)
        return self._all_gather(out, x, group=group)

    def take(self) -> int:
        sent, self.sent = self.sent, 0
        return sent


def _run(case: Case, groups: Groups, wire: Wire) -> dict[str, Any]:
    ranks, member = groups.ranks, groups.rank
    group = groups.get(tuple(range(ranks)))
    sources = _sources(case, group, member, ranks)
    context = _context(case, group, member, ranks)
    x, dy, _ = _draw(case)
    mine = context.tokens.parts[member]
    x, dy = (t[mine.start : mine.stop].clone() for t in (x, dy))
    x.requires_grad_()
    option = LayerOption.parse(f"{case.option}+{case.recompute}")
    wire.take()
    out = Transformer(case.architecture).layer(x, 0, option, sources, context)
    forward = wire.take()
    out.backward(dy)
    return {
        "out": out.detach().numpy(),
        "dx": x.grad.numpy(),
        "grads": {name: (source.grad - 1).numpy() for name, source in sources.items()},
        "sent": (forward, wire.take()),
    }


def _run_all(cases: list[Case]) -> list[dict[str, Any]]:
    groups = Groups()
    groups.prepare([tuple(range(groups.ranks))])
    wire = Wire()
    return [_run(case, groups, wire) for case in cases]


def _reference(case: Case) -> dict[str, np.ndarray]:
    """The layer by plain autograd, a document at a time."""
    a = case.architecture
    x, dy, weights = _draw(case)
    x.requires_grad_()
    w = {name.split(".", 2)[2]: t.requires_grad_() for name, t in weights.items()}
    out = torch.cat([_document(part, w, a) for part in x.split(list(case.pack))])
    out.backward(dy)
    grads = {name: t.grad.numpy() for name, t in weights.items()}
    return {"out": out.detach().numpy(), "dx": x.grad.numpy(), **grads}


def _document(x: torch.Tensor, w: dict[str, torch.Tensor], a: Architecture) -> torch.Tensor:
    g, m, d = a.kv_heads, a.group_heads, a.head_features
    y = F.linear(oracles._norm(x, w, "norm1", a), w["qkv.weight"], w.get("qkv.bias"))
    y = y.view(len(x), g, m + 2, d)
    q, k, v = y[:, :, :m].reshape(len(x), g * m, d), y[:, :, m], y[:, :, m + 1]
    if a.kind == "llama":
        q, k = oracles._rope(q, a), oracles._rope(k, a)
    heads = oracles.reference_attention(q, k, v, a.causal).reshape(len(x), a.hidden)
    x = x + heads @ w["proj.weight"] + w.get("proj.bias", 0)
    y = F.linear(oracles._norm(x, w, "norm2", a), w["in.weight"], w.get("in.bias"))
    if a.gated:
        pairs = y.view(len(x), -1, 2, a.ffn_block)
        y = (F.silu(pairs[:, :, 0]) * pairs[:, :, 1]).reshape(len(x), a.ffn)
    else:
        y = F.gelu(y, approximate="tanh")
    return x + y @ w["out.weight"] + w.get("out.bias", 0)


def _together(case: Case, results: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """What the ranks hold, as one process would: tokens and shards joined, partial sums added."""
    whole = {key: np.concatenate([r[key] for r in results]) for key in ("out", "dx")}
    for w in _weights(case.architecture):
        parts = [r["grads"][w.name] for r in results]
        sharded = case.held == "sharded" and w.unit is not None
        whole[w.name] = np.concatenate(parts) if sharded else sum(parts)
    return whole


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_layer_equals_one_process(ranks: int) -> None:
    """Would catch any wrong adjoint, head order, token order or doubled gradient of one method,
    recompute level or way to hold weights, and names it; whole steps are tested elsewhere."""
    cases = _cases(ranks)
    results = run_ranks(ranks, _run_all, cases)
    references: dict[tuple[str, tuple[int, ...]], dict[str, np.ndarray]] = {}
    wrong = []
    for i, case in enumerate(cases):
        key = (case.model, case.pack)
        references[key] = references.get(key) or _reference(case)
        got = _together(case, [r[i] for r in results])
        for name, wanted in references[key].items():
            scale = max(1.0, float(np.abs(wanted).max()))
            if got[name].shape != wanted.shape:
                wrong.append((case, name, got[name].shape))
            elif not np.abs(got[name] - wanted).max() <= 1e-10 * scale:
                wrong.append((case, name, float(np.abs(got[name] - wanted).max() / scale)))
    assert not wrong


DIVISIBLE = {  # ranks: a model (its units too) and a pack that they divide
    2: (_llama(24, 4, 2, 128), (7, 5)),
    3: (_llama(36, 6, 3, 48), (1, 9, 2)),
    4: (_llama(32, 8, 4, 256, kind="gpt", positions=16), (12,)),
}


def _formula(case: Case, ranks: int) -> tuple[float, float]:
    """Elements each rank sends, forward and backward, as the methods' docstrings say."""
    a = case.architecture
    v, elements = (ranks - 1) / ranks, {w.name.split(".")[-2]: w.elements for w in _weights(a)
                                        if w.unit is not None}  # fmt: skip
    kv = a.kv_heads * a.head_features
    switched = v * (2 * a.hidden + 2 * kv) * sum(case.pack) / ranks
    gathered = v * sum(elements.values()) if case.held == "sharded" else 0
    again = gathered - v * elements["proj"] if case.held == "sharded" else 0
    forward, backward = switched + gathered, switched + 2 * gathered
    if case.recompute == "attention":
        backward += again  # projections are run again, and their weights gathered again
    if case.recompute == "full":
        backward += forward
    return forward, backward


@pytest.mark.parametrize("ranks", DIVISIBLE)
def test_elements_on_the_wire_are_the_formula(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch traffic that no result shows: a gather too many, activations sent again by a
    recompute level that keeps them, columns sent to ranks that do not want them."""
    a, pack = DIVISIBLE[ranks]
    monkeypatch.setitem(MODELS, "divisible", a)
    cases = [
        Case(model="divisible", option="ulysses_z", recompute=level, held=held, pack=pack)
        for level, held in product(RECOMPUTE, HELD)
    ]
    results = run_ranks(ranks, _run_all, cases)
    for i, case in enumerate(cases):
        assert [r[i]["sent"] for r in results] == [_formula(case, ranks)] * ranks, case


def test_one_rank_sends_nothing() -> None:
    """Would catch a method on one rank that needs a process group."""
    for case in (c for c in _cases(1) if c.pack == EVEN):
        member = {"group": None, "member": 0, "ranks": 1}
        sources, context = _sources(case, **member), _context(case, **member)
        x, dy, _ = _draw(case)
        x.requires_grad_()
        option = LayerOption.parse(f"{case.option}+{case.recompute}")
        Transformer(case.architecture).layer(x, 0, option, sources, context).backward(dy)
        assert x.grad.isfinite().all()


def _settled(counter: ByteCounter) -> int:
    """Bytes alive, once gloo's threads have let go of the buffers of what is done."""
    counts = []
    for _ in range(10):
        time.sleep(0.01)
        counts.append(counter.current_bytes)
    return min(counts)


def _kept(held: str, pack: tuple[int, ...]) -> list[int]:
    groups = Groups()
    groups.prepare([(0, 1)])
    kept = []
    for level in RECOMPUTE:
        case = Case(model="gqa", option="ulysses_z", recompute=level, held=held, pack=pack)
        group = groups.get((0, 1))
        sources = _sources(case, group, groups.rank, 2)
        context = _context(case, group, groups.rank, 2)
        part = context.tokens.parts[groups.rank]
        x = _draw(case)[0][part.start : part.stop].clone().requires_grad_()
        option = LayerOption.of("ulysses_z", level)
        with ByteCounter() as counter:
            out = Transformer(case.architecture).layer(x, 0, option, sources, context)
            kept.append(_settled(counter))
        out.backward(torch.ones_like(out))
    return kept


def test_gathered_weights_are_not_kept_and_levels_keep_less() -> None:
    """Would catch a layer's gathered matrices alive until its backward, and a recompute level
    that saves nothing: ``full`` keeps the layer's output alone."""
    whole, sharded = (run_ranks(2, _kept, held, (40, 24))[0] for held in HELD)
    assert whole == sharded
    none, attention, full = whole
    assert none > attention > full
    assert full == 32 * MODELS["gqa"].hidden * 8


def _shard_adjoint() -> list[tuple[float, float]]:
    groups, out = Groups(), []
    world = tuple(range(groups.ranks))
    groups.prepare([world])
    for rows, unit in ((12, 2), (5, 1), (2, 1), (9, 3)):
        w = WeightSpec(name="w", shape=(rows, 3), unit=unit, bucket=1)
        shards = group_shards(w, groups.ranks)
        torch.manual_seed(10 * rows + groups.rank)
        value = torch.randn(len(shards[groups.rank]), 3, dtype=torch.float64)
        shard = Shard(
            value=value, grad=torch.zeros_like(value), shards=shards, group=groups.get(world)
        )
        left, right = (torch.randn(4, n, dtype=torch.float64) for n in (rows, 3))
        gathered = shard.rows()
        shard.add_product(left, right)
        y = left.t() @ right
        out.append((float((gathered * y).sum()), float((value * shard.grad).sum())))
    return out


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_shard_s_gradient_is_the_adjoint_of_its_gather(ranks: int) -> None:
    """<rows v, y> = <v, add y>, empty shards too: would catch a mean over the group."""
    results = run_ranks(ranks, _shard_adjoint)
    for case in range(4):
        left, right = (sum(r[case][side] for r in results) for side in (0, 1))
        assert left == pytest.approx(right, rel=1e-12)


def test_whole_weights_add_products_of_other_types() -> None:
    """Would catch a bf16 product that cannot be added to an fp32 sum."""
    torch.manual_seed(0)
    left, right = torch.randn(6, 3).bfloat16(), torch.randn(6, 2).bfloat16()
    whole = Whole(value=torch.zeros(3, 2).bfloat16(), grad=torch.ones(3, 2))
    whole.add_product(left, right)
    assert whole.grad.dtype == torch.float32
    torch.testing.assert_close(
        whole.grad.double() - 1, left.double().t() @ right.double(), rtol=0.02, atol=0.02
    )


shapes = st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 8))


@settings(deadline=None)
@given(shapes)
def test_heads_are_split_with_the_keys_they_need(shape: tuple[int, int, int]) -> None:
    """Would catch a query on no rank or on two, keys of another group, and an expansion that the
    kernel's own grouping would contradict."""
    g, m, ranks = shape
    n = g * m
    if ranks > n:
        return
    split = split_heads(n, g, ranks)
    assert [h for mine in split.queries.of for h in mine] == list(range(n))
    sizes = [len(mine) for mine in split.queries.of]
    assert max(sizes) - min(sizes) <= (m if ranks <= g else 1)
    assert min(sizes) > 0
    for rank, queries in enumerate(split.queries.of):
        columns, count = split.columns.of[rank], sizes[rank]
        keys = (len(columns) - count) // 2
        assert columns[:count] == queries
        groups = [column - n for column in columns[count : count + keys]]
        assert [column - n - g for column in columns[count + keys :]] == groups
        assert groups == sorted({query // m for query in queries})
        expand = split.expand[rank]
        assert expand is not None or count % keys == 0
        served = expand or [i // (count // keys) for i in range(count)]
        assert [groups[i] for i in served] == [query // m for query in queries]


def test_an_unknown_method_is_named_with_its_likeness() -> None:
    """Would catch a KeyError from the depths for a typing error in a plan."""
    with pytest.raises(SpecError, match=r"got 'ulyses_z'; did you mean 'ulysses_z'\?"):
        method("ulyses_z", MODELS["gqa"], 2)
    with pytest.raises(SpecError, match="known are local, ulysses_z"):
        method("ring", MODELS["gqa"], 2)


def test_an_unsupported_group_is_told_the_rule() -> None:
    """Would catch a method that runs where it gives wrong results or an obscure error."""
    assert method("local", MODELS["gqa"], 1).name == "local"
    assert method("ulysses_z", MODELS["gqa"], 4).name == "ulysses_z"
    with pytest.raises(SpecError, match="local runs on 1 rank, not 2; these would do: ulysses_z"):
        method("local", MODELS["gqa"], 2)
    with pytest.raises(SpecError, match="ulysses_z runs on at most 4 ranks, one per query head"):
        method("ulysses_z", MODELS["gqa"], 5)


def test_a_hint_is_not_left_empty() -> None:
    """Would catch a sentence that ends in a colon."""
    with pytest.raises(SpecError) as caught:
        method("ulysses_z", MODELS["gqa"], 5)
    assert not str(caught.value).rstrip().endswith(":")
