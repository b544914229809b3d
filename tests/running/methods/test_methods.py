"""Every method at every recompute level on one to four ranks, against one process in fp64."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
from headrace.comm.mesh import Groups
from headrace.errors import SpecError
from headrace.layouts.layout import group_shards
from headrace.layouts.tokens import TokenPlan
from headrace.methods import METHODS, Context, Place, Shard, Whole, branch
from headrace.methods.head_split import split_heads
from headrace.methods.weights import Weight
from headrace.models.transformer import Transformer
from headrace.ops.random import DropoutKey
from headrace.runtime.counted import ByteCounter, TrafficCounter
from headrace.runtime.micro_batch import layer_states
from headrace.spec import Architecture, weight_table
from headrace.spec.known_methods import FACTS, methods_for, subgroups
from headrace.spec.method import BRANCHES, RECOMPUTE, LayerPlan
from headrace.spec.plan import TokenOrder
from headrace.spec.weights import WeightSpec
from ranks import run_ranks
from spread import spread, whole


def _llama(hidden: int, heads: int, kv_heads: int, ffn: int, **rest: Any) -> Architecture:
    return Architecture(
        layers=rest.pop("layers", 1), hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn,
        vocabulary=5, **rest,
    )  # fmt: skip


MODELS = {
    "gqa": _llama(24, 4, 2, 40),
    "mqa": _llama(24, 6, 1, 24),  # ranks outnumber key-value heads at once
    "mixed": _llama(20, 10, 2, 12),  # on 3 ranks one has a query of one group, two of another
    "groups": _llama(40, 10, 5, 80),  # groups and blocks that no number of ranks divides
    "gpt": _llama(32, 4, 4, 48, kind="gpt", positions=700),
    "bert": _llama(24, 4, 4, 40, kind="bert", causal=False, positions=700, mask_id=4),
    "bidirectional": _llama(24, 4, 4, 16, causal=False),
}
EVEN, UNEVEN, FEW = (7, 5), (3, 1, 7), (1,)  # few: ranks without a token
LONG = (1, 520, 3, 31)  # a document long enough to be folded over four ranks, and short ones
HELD = ("whole", "sharded")
ORDERS: tuple[TokenOrder, ...] = ("natural", "zigzag")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Some layers, run once forward and once backward; ``layers`` is a layer plan's text."""

    model: str
    layers: str
    held: str
    pack: tuple[int, ...]
    order: TokenOrder = "natural"
    dtype: torch.dtype = torch.float64
    rounded: bool = False  # the values of ``dtype`` in fp64

    @property
    def plan(self) -> LayerPlan:
        return LayerPlan.parse(self.layers)

    @property
    def architecture(self) -> Architecture:
        return MODELS[self.model]

    @property
    def table(self) -> list[WeightSpec]:
        """The weights of the first ``layers`` layers, which may be more than the model has."""
        one = [w for w in weight_table(self.architecture) if w.bucket == 1]
        return [
            WeightSpec(
                name=w.name.replace("layers.0.", f"layers.{i}."), shape=w.shape, unit=w.unit,
                bucket=i + 1,
            )
            for i in range(len(self.plan.options)) for w in one
        ]  # fmt: skip


def _draw(case: Case) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """x and dy [T, h] of the whole pack, all weights; nothing is zero or one."""
    a, total = case.architecture, sum(case.pack)
    generator = torch.Generator().manual_seed(total)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def typed(x: torch.Tensor) -> torch.Tensor:
        return x.to(case.dtype).double() if case.rounded else x.to(case.dtype)

    weights = {w.name: typed(0.3 * randn(*w.shape) + 0.1) for w in case.table}
    return typed(randn(total, a.hidden)), typed(randn(total, a.hidden)), weights


def _sources(case: Case, group: Any, member: int, ranks: int) -> dict[str, Weight]:
    """The layers' weights as this rank holds them; gradients start at one."""
    *_, weights = _draw(case)
    sources: dict[str, Weight] = {}
    for w in case.table:
        value, unit = weights[w.name], w.unit or 1
        wide = torch.float64 if case.dtype == torch.float64 else torch.float32
        if case.held == "whole" or w.unit is None:
            grad = torch.ones_like(value, dtype=wide)
            sources[w.name] = Whole(value=value, grad=grad, member=member, unit=unit)
            continue
        shards = group_shards(w, ranks)
        part = value[shards[member].start : shards[member].stop].clone()
        grad = torch.ones_like(part, dtype=wide)
        sources[w.name] = Shard(value=part, grad=grad, shards=shards, group=group, unit=unit)
    return sources


def _context(case: Case, groups: Groups | None) -> Context:
    a, member = case.architecture, groups.rank if groups else 0
    ranks = groups.ranks if groups else 1
    pack = TokenPlan(lengths=case.pack, ranks=ranks, order=case.order)
    place = Place(
        architecture=a, tokens=pack, member=member, dtype=case.dtype,
        group=groups.get(tuple(range(ranks))) if groups else None,
        subgroup=groups.get if groups else lambda members: None,
    )  # fmt: skip
    key = DropoutKey(
        seed=0, step=0, samples=torch.from_numpy(pack.documents(member)),
        positions=torch.from_numpy(pack.positions(member)),
    )  # fmt: skip
    return Context(place=place, dropout=key)


def _layers(case: Case, x: torch.Tensor, sources: dict[str, Weight], context: Context) -> Any:
    states = layer_states(sources, len(case.plan.options))
    for index, option in enumerate(case.plan.options):
        x = Transformer(case.architecture).layer(x, index, option, states[index], context)
    return x


def _run(case: Case, groups: Groups) -> dict[str, Any]:
    world = tuple(range(groups.ranks))
    wanted = {world} | {
        members for option in case.plan.options
        for members in subgroups(option, case.architecture, groups.ranks)
    }  # fmt: skip
    groups.prepare(wanted)
    sources = _sources(case, groups.get(world), groups.rank, groups.ranks)
    context = _context(case, groups)
    x, dy, _ = _draw(case)
    mine = torch.from_numpy(context.tokens.index(groups.rank))
    x, dy = x[mine], dy[mine]
    x.requires_grad_()
    with TrafficCounter() as wire:
        out = _layers(case, x, sources, context)
        forward = wire.take()
        out.backward(dy)
    return {
        "out": out.detach().double().numpy(),
        "dx": x.grad.double().numpy(),
        "grads": {n: (source.grad - 1).double().numpy() for n, source in sources.items()},
        "sent": (forward, wire.take()),
        "places": mine.numpy(),
    }


def _run_all(cases: list[Case]) -> list[dict[str, Any]]:
    groups = Groups()
    return [_run(case, groups) for case in cases]


def _reference(case: Case) -> dict[str, np.ndarray]:
    """The layers by plain autograd, a document at a time."""
    x, dy, weights = _draw(case)
    x.requires_grad_()
    w = {name: t.requires_grad_() for name, t in weights.items()}
    out = torch.cat([_document(part, w, case) for part in x.split(list(case.pack))])
    out.backward(dy)
    grads = {name: t.grad.double().numpy() for name, t in weights.items()}
    return {"out": out.detach().double().numpy(), "dx": x.grad.double().numpy(), **grads}


def _document(x: torch.Tensor, weights: dict[str, torch.Tensor], case: Case) -> torch.Tensor:
    a = case.architecture
    g, m, d = a.kv_heads, a.group_heads, a.head_features

    def norm(x: torch.Tensor, name: str, first: bool) -> torch.Tensor:
        if a.norm_first != first:
            return x
        if a.kind == "llama":
            return F.rms_norm(x, (a.hidden,), w[f"{name}.weight"], eps=a.norm_eps)
        return F.layer_norm(x, (a.hidden,), w[f"{name}.weight"], w[f"{name}.bias"], eps=a.norm_eps)

    for i in range(len(case.plan.options)):
        w = {n.split(".", 2)[2]: t for n, t in weights.items() if n.startswith(f"layers.{i}.")}
        y = F.linear(norm(x, "norm1", True), w["qkv.weight"], w.get("qkv.bias"))
        y = y.view(len(x), g, m + 2, d)
        q, k, v = y[:, :, :m].reshape(len(x), g * m, d), y[:, :, m], y[:, :, m + 1]
        if a.kind == "llama":
            q, k = oracles._rope(q, a), oracles._rope(k, a)
        heads = oracles.reference_attention(q, k, v, a.causal).reshape(len(x), a.hidden)
        x = norm(x + heads @ w["proj.weight"] + w.get("proj.bias", 0), "norm1", False)
        y = F.linear(norm(x, "norm2", True), w["in.weight"], w.get("in.bias"))
        if a.gated:
            pairs = y.view(len(x), a.ffn // a.ffn_block, 2, a.ffn_block)
            y = (F.silu(pairs[:, :, 0]) * pairs[:, :, 1]).reshape(len(x), a.ffn)
        else:
            y = F.gelu(y, approximate="tanh" if a.kind == "gpt" else "none")
        x = norm(x + y @ w["out.weight"] + w.get("out.bias", 0), "norm2", False)
    return x


def _together(case: Case, results: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """What the ranks hold, as one process would: tokens and shards joined, partial sums added."""
    whole: dict[str, np.ndarray] = {}
    places = np.concatenate([r["places"] for r in results])
    for key in ("out", "dx"):
        whole[key] = np.empty((sum(case.pack), case.architecture.hidden))
        whole[key][places] = np.concatenate([r[key] for r in results])
    for w in case.table:
        parts = [r["grads"][w.name] for r in results]
        sharded = case.held == "sharded" and w.unit is not None
        whole[w.name] = np.concatenate(parts) if sharded else sum(parts)
    return whole


def _wrong(cases: list[Case], ranks: int, tolerance: float = 1e-10) -> list[Any]:
    """What differs from one process, for each case."""
    results = run_ranks(ranks, _run_all, cases, timeout_s=240)
    references: dict[Any, dict[str, np.ndarray]] = {}
    wrong = []
    for i, case in enumerate(cases):
        key = (case.model, case.pack, len(case.plan.options), case.dtype)
        references[key] = references.get(key) or _reference(case)
        got = _together(case, [r[i] for r in results])
        for name, wanted in references[key].items():
            scale = max(1.0, float(np.abs(wanted).max()))
            if not np.abs(got[name] - wanted).max() <= tolerance * scale:
                wrong.append((case, name, float(np.abs(got[name] - wanted).max() / scale)))
    return wrong


def _usable(model: str, ranks: int) -> list[str]:
    a = MODELS[model]
    feed = methods_for(a, ranks, "feed_forward")
    return [name for name in methods_for(a, ranks, "attention") if name in feed]


@pytest.mark.parametrize(
    ("ranks", "every"), [(1, 4), (2, 6), (3, 9), (4, 12), *(whole(n, 1) for n in (1, 2, 3, 4))]
)
def test_a_layer_equals_one_process(ranks: int, every: int) -> None:
    """Would catch any wrong adjoint, head order, token order or doubled gradient of one method,
    recompute level or way to hold weights, and names it; whole steps are tested elsewhere."""
    packs = (EVEN, UNEVEN, FEW)
    cases = [
        Case(model=model, layers=f"1*{name}+{level}", held=held, pack=pack, order=order)
        for model in MODELS
        for name, level, held, (i, order) in product(
            _usable(model, ranks), RECOMPUTE, HELD if ranks > 1 else HELD[:1], enumerate(ORDERS)
        )
        for pack in (packs[(len(name) + len(level) + i) % 3], LONG)
        if pack != LONG or (order == "zigzag" and level != "full")
    ]  # fmt: skip
    assert not _wrong(spread(cases, every), ranks)


@pytest.mark.parametrize(("ranks", "every"), [(2, 3), (4, 8), whole(2, 1), whole(4, 1)])
def test_neighbouring_layers_and_branches_may_differ(ranks: int, every: int) -> None:
    """Every ordered pair of methods in two layers, every pair in two branches of one: would catch
    a method that leaves tokens in another order or a gradient unfinished for its neighbour."""
    names = _usable("bidirectional", ranks)
    causal = [n for n in _usable("gpt", ranks) if n in names]
    feed = ("ulysses_z", "megatron_ts", "metp", *(("tensor_ring",) if ranks == 4 else ()))
    cases = [
        Case(model="gpt", layers=f"1*{one} 1*{other}", held=HELD[i % 2], pack=(13, 1, 9),
             order=ORDERS[i % 3 > 0])
        for i, (one, other) in enumerate(product(causal, causal))
    ] + [
        Case(model="groups", layers=f"1*{one}/{other}+{level}", held=HELD[i % 2], pack=(5, 14),
             order="zigzag")
        for i, (one, other, level) in enumerate(product(_usable("groups", ranks), feed, RECOMPUTE))
    ]  # fmt: skip
    assert not _wrong(spread(cases, every), ranks)


def _narrow(dtype: torch.dtype) -> list[Case]:
    return [
        Case(model=model, layers=f"1*{name}", held=HELD[i % 2], pack=LONG, order="zigzag",
             dtype=dtype)
        for model in ("groups", "bert") for i, name in enumerate(_usable(model, 4))
    ]  # fmt: skip


def test_single_precision_is_as_exact_as_one_process() -> None:
    """Would catch a half type, or a sum in another order that loses digits, in any method."""
    assert not _wrong(_narrow(torch.float32), 4, 1e-5)


def test_half_types_are_no_worse_than_one_process() -> None:
    """Would catch a sum over ranks or blocks of keys that is kept in a half type: the error
    against fp64 stays within twice that of one process in bf16."""
    cases = _narrow(torch.bfloat16)
    results = run_ranks(4, _run_all, cases, timeout_s=240)
    first = {case.model: case for case in reversed(cases)}
    exact = {model: _reference(replace(case, rounded=True)) for model, case in first.items()}
    single = {model: _reference(case) for model, case in first.items()}
    wrong = []
    for i, case in enumerate(cases):
        got, right, one = (
            _together(case, [r[i] for r in results]),
            exact[case.model],
            single[case.model],
        )
        for name, wanted in right.items():
            ours, theirs = (np.linalg.norm(x[name] - wanted) for x in (got, one))
            if not ours <= 2 * theirs + 1e-3 * np.linalg.norm(wanted):
                wrong.append((case.layers, case.model, name, float(ours), float(theirs)))
    assert not wrong


DIVISIBLE = {  # ranks: a model (its units too) and a pack that they divide
    2: (_llama(24, 4, 2, 128), (7, 5)),
    3: (_llama(36, 6, 3, 48), (1, 9, 2)),
    4: (_llama(32, 8, 4, 256, kind="gpt", positions=16), (12,)),
}


def _sent(case: Case, ranks: int) -> tuple[float, float]:
    """Elements each rank sends, forward and backward, as the methods' docstrings say."""
    a, tokens, option = case.architecture, sum(case.pack), case.plan.options[0]
    v, h, kv = (ranks - 1) / ranks, a.hidden, a.kv_heads * a.head_features
    elements = {w.name.split(".")[-2]: w.elements for w in case.table if w.unit is not None}
    sharded = case.held == "sharded"
    weights = {name: v * count if sharded else 0 for name, count in elements.items()}
    inner, blocks = 2, ranks // 2  # of composites on 4 ranks
    switch = {
        "ulysses_z": v * (2 * h + 2 * kv) * tokens / ranks,
        "ulysses_ring": (inner - 1) / inner * (2 * h + 2 * kv) * tokens / ranks,
    }.get(option.attention, 0)
    ring = {
        "megatron_cz": v * kv * tokens,
        "megatron_cz_gather": v * kv * tokens,
        "colossal_z": v * kv * tokens,
        "metp": v * kv * tokens,
        "ulysses_ring": (blocks - 1) / blocks * kv * tokens / inner,
        "tensor_ring": (blocks - 1) / blocks * kv * tokens / inner,
    }.get(option.attention, 0)
    gathers = {"megatron_ts": v * h * tokens, "tensor_ring": h * tokens / 2 / blocks}
    forward, backward = switch + 2 * ring, switch + 4 * ring
    for name, matrices in (
        (option.attention, ("qkv", "proj")),
        (option.feed_forward, ("in", "out")),
    ):
        if name in gathers:
            forward, backward = forward + 2 * gathers[name], backward + 3 * gathers[name]
            continue
        held = sum(weights[matrix] for matrix in matrices)
        forward, backward = forward + held, backward + 2 * held
    same = (*gathers, "metp", "ulysses_z", "ulysses_ring")  # as at the level none
    if option.recompute == "attention" and option.attention not in same:
        backward += weights["qkv"]  # the projection is run again, and its weight gathered again
    if option.recompute == "full":
        backward += forward
    return forward, backward


@pytest.mark.parametrize(
    ("ranks", "every"), [(n, n) for n in DIVISIBLE] + [whole(n, 1) for n in DIVISIBLE]
)
def test_bytes_on_the_wire_are_the_formula(
    ranks: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch traffic that no result shows: a gather too many, activations sent again by a
    recompute level that keeps them, rows sent to ranks that do not want them."""
    a, pack = DIVISIBLE[ranks]
    monkeypatch.setitem(MODELS, "divisible", a)
    cases = [
        Case(model="divisible", layers=f"1*{name}+{level}", held=held, pack=pack, order=order)
        for name, level, held, order in product(
            _usable("divisible", ranks), RECOMPUTE, HELD, ORDERS
        )
        if name != "tensor_ring" or held == "whole"
    ] + [
        Case(model="divisible", layers=f"1*{one}/{other}", held="sharded", pack=pack)
        for one, other in (("megatron_cz", "megatron_ts"), ("megatron_ts", "metp"),
                           ("metp", "ulysses_z"))
    ]  # fmt: skip
    cases = spread(cases, every)
    results = run_ranks(ranks, _run_all, cases, timeout_s=240)
    for i, case in enumerate(cases):
        wanted = tuple(8 * elements for elements in _sent(case, ranks))
        assert [r[i]["sent"] for r in results] == [wanted] * ranks, case


def test_a_switch_between_layers_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of two layers of different methods are those of the two: would catch tokens or
    weights that are laid out anew in between."""
    monkeypatch.setitem(MODELS, "divisible", DIVISIBLE[2][0])
    names = _usable("divisible", 2)
    single = [Case(model="divisible", layers=f"1*{n}", held="whole", pack=(7, 5)) for n in names]
    pairs = [
        Case(model="divisible", layers=f"1*{one} 1*{other}", held="whole", pack=(7, 5))
        for one, other in product(names, names)
    ]
    results = run_ranks(2, _run_all, single + pairs, timeout_s=240)[0]
    sent = [np.array(r["sent"]) for r in results]
    alone = dict(zip(names, sent, strict=False))
    for (one, other), both in zip(product(names, names), sent[len(names) :], strict=True):
        assert (both == alone[one] + alone[other]).all(), (one, other)


def test_one_rank_sends_nothing() -> None:
    """Would catch a method on one rank that needs a process group."""
    for name in _usable("gqa", 1):
        case = Case(model="gqa", layers=f"1*{name}", held="whole", pack=EVEN)
        sources, context = _sources(case, None, 0, 1), _context(case, None)
        x, dy, _ = _draw(case)
        x.requires_grad_()
        _layers(case, x, sources, context).backward(dy)
        assert x.grad.isfinite().all()


def _settled(counter: ByteCounter) -> int:
    """Bytes alive, once gloo's threads have let go of the buffers of what is done."""
    counts = []
    for _ in range(6):
        time.sleep(0.005)
        counts.append(counter.current_bytes)
    return min(counts)


KEPT_MODELS = {
    "llama": _llama(256, 8, 4, 1024),
    "gpt": _llama(256, 4, 4, 1024, kind="gpt", positions=4096),
}
KEPT_PACK = (700, 324)


def _kept(cases: list[Case]) -> list[float]:
    """Bytes kept for the backward by this rank, x and the result counted, in local activations."""
    groups = Groups()
    kept = []
    for case in cases:
        world = tuple(range(groups.ranks))
        option = case.plan.options[0]
        groups.prepare({world, *subgroups(option, case.architecture, groups.ranks)})
        sources = _sources(case, groups.get(world), groups.rank, groups.ranks)
        context = _context(case, groups)
        x = _draw(case)[0][torch.from_numpy(context.tokens.index(groups.rank))].requires_grad_()
        _layers(case, x, sources, context).backward(torch.ones_like(x))  # tables, once per pack
        with ByteCounter() as counter:
            out = _layers(case, x, sources, context)
            kept.append(_settled(counter) / x.nbytes)  # the result stands for x, which is outside
        out.backward(torch.ones_like(out))
    return kept


def _kept_units(case: Case, ranks: int) -> float:
    """What the methods' docstrings say, in local activations; statistics left out."""
    a, option = case.architecture, case.plan.options[0]
    kappa = a.kv_heads * a.head_features / a.hidden
    wide = (3 if a.gated else 2) * a.ffn / a.hidden
    if option.recompute == "full":
        return 1
    none, attention = 3 + 2 * kappa, 2.0
    if option.attention in ("megatron_ts", "tensor_ring"):
        attention = none
    if option.attention in ("ulysses_z", "ulysses_ring"):
        none = attention = 4 + 2 * kappa  # heads before and after the switch back
    if option.attention == "colossal_z":
        pack, everyone = TokenPlan(lengths=case.pack, ranks=ranks), tuple(range(ranks))
        area = [  # of the blocks that count, masked halves of squares included
            (b.q_stop - b.q_start) * (b.k_stop - b.k_start)
            for rank in everyone for b in pack.blocks((rank,), everyone, a.causal)
        ]  # fmt: skip
        scores = a.heads * sum(area) / ranks
        none, attention = (x + scores / (sum(case.pack) / ranks * a.hidden)
                           for x in (none, attention))  # fmt: skip
    if option.attention == "metp":
        none = 2
    branch = none if option.recompute == "none" else attention
    feed = wide if option.recompute == "none" and option.feed_forward != "metp" else 0
    return branch + 1 + feed


@pytest.mark.parametrize(("ranks", "every"), [(2, 5), whole(2, 1)])  # eight: test_memory
def test_kept_bytes_are_the_formula(
    ranks: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch a gathered matrix, a merged copy of the heads or a normalised copy of x alive
    until the backward, and a level that saves nothing; within 15 %, as the log-sum-exp, the norms'
    statistics and the masks of short blocks are not in the formula."""
    for name, a in KEPT_MODELS.items():
        monkeypatch.setitem(MODELS, name, a)
    cases = [
        Case(model=model, layers=f"1*{name}+{level}", held="sharded", pack=KEPT_PACK, order=order,
             dtype=torch.float32)
        for model in KEPT_MODELS
        for name, level in product(_usable(model, ranks), RECOMPUTE)
        if model == "llama" or level == "none"
        for order in (ORDERS if (name, level) == ("megatron_ts", "none") else ORDERS[:1])
    ]  # fmt: skip
    cases = spread(cases, every)
    kept = np.mean(run_ranks(ranks, _kept, cases, timeout_s=240), axis=0)
    wrong = [
        (case, float(units), wanted)
        for case, units in zip(cases, kept, strict=True)
        if (wanted := _kept_units(case, ranks)) and abs(units / wanted - 1) > 0.15
    ]
    assert not wrong


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
        branch("ulyses_z", "attention", MODELS["gqa"], 2)
    with pytest.raises(SpecError, match="known are local, ulysses_z, megatron_ts"):
        branch("xyz", "feed_forward", MODELS["gqa"], 2)


@pytest.mark.parametrize(
    ("name", "part", "ranks", "rule", "others"),
    [
        ("local", "attention", 2, "local runs on 1 rank, not 2", "ulysses_z, megatron_cz"),
        ("ulysses_z", "attention", 5, "at most 4 ranks, one per query head", "megatron_cz"),
        ("megatron_ts", "attention", 3, "at most 2 ranks, one per key-value head", "ulysses_z"),
        ("metp", "attention", 4, "at most 2 ranks, one per key-value head", "ulysses_z"),
        ("megatron_ts", "feed_forward", 6, "at most 5 ranks, one per block", "metp_or_others"),
        ("ulysses_ring", "attention", 3, "blocks of at least 2", "ulysses_z"),
    ],
)
def test_an_unsupported_group_is_told_the_rule(
    name: str, part: Any, ranks: int, rule: str, others: str
) -> None:
    """Would catch a method that runs where it gives wrong results or an obscure error, and a
    sentence that ends in a colon."""
    with pytest.raises(SpecError, match=rule) as caught:
        branch(name, part, MODELS["gqa"], ranks)
    would_do = methods_for(MODELS["gqa"], ranks, part)
    assert f"these would do: {', '.join(would_do)}" in str(caught.value)
    assert others.partition(",")[0] in would_do or others == "metp_or_others"


def test_every_method_says_what_it_is() -> None:
    """Would catch a method without facts or facts without a method, and one whose feed-forward is
    named after one that does not exist, so that it would never be measured."""
    assert tuple(METHODS) == tuple(FACTS)
    for name, facts in FACTS.items():
        assert facts.name == name
        assert METHODS[name].facts is facts
        assert METHODS[facts.owner].feed_forward is METHODS[name].feed_forward
        assert facts.owner in (name, "ulysses_z")
        for part in BRANCHES:
            rule = facts.rule(part, MODELS["gqa"], 1)
            assert rule is None or name in rule


def test_activations_of_another_shape_are_refused() -> None:
    """Would catch a shape that goes on into a kernel and comes out as an obscure error there."""
    case = Case(model="gqa", layers="1*local", held="whole", pack=EVEN)
    sources, context = _sources(case, None, 0, 1), _context(case, None)
    wanted = r"activations of layer 0 on member 0: got \[11, 24\], wanted \[12, 24\]"
    with pytest.raises(SpecError, match=wanted):
        _layers(case, torch.zeros(11, 24, dtype=torch.float64), sources, context)


def test_looking_a_method_up_costs_next_to_nothing() -> None:
    """A change of method between two layers is a dictionary look-up: would catch a search, a
    parse or an import in it; the time is far above the machine's noise."""
    names = _usable("groups", 4)
    start = time.perf_counter()
    for _ in range(1000):
        for name in names:
            branch(name, "attention", MODELS["groups"], 4)
    assert (time.perf_counter() - start) / (1000 * len(names)) < 50e-6
