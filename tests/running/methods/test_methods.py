"""Every method at every recompute level on one to four ranks, against one process in fp64."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.comm.mesh import Groups
from headrace.errors import SpecError
from headrace.layouts.partition import group_shards
from headrace.layouts.token_plan import TokenPlan
from headrace.methods import METHODS, Shard, Whole, branch
from headrace.methods.switched import split_heads
from headrace.native.counted import ByteCounter
from headrace.spec import Architecture
from headrace.spec.architecture import WeightSpec
from headrace.spec.known_methods import FACTS, methods_for, subgroups
from headrace.spec.layer_plan import BRANCHES, RECOMPUTE
from headrace.spec.plan import TokenOrder
from layers import Case, context_of, drawn, reference, run_all, sources_of, through, together
from ranks import run_ranks
from spread import spread, whole


def _llama(hidden: int, heads: int, kv_heads: int, ffn: int, **rest: Any) -> Architecture:
    return Architecture(
        layers=rest.pop("layers", 1),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocabulary=5,
        **rest,
    )


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
HELD = ("replicated", "sharded")
ORDERS: tuple[TokenOrder, ...] = ("natural", "zigzag")


def _case(model: str, **rest: Any) -> Case:
    return Case(architecture=MODELS[model], **rest)


def _wrong(cases: list[Case], ranks: int, tolerance: float = 1e-10) -> list[Any]:
    """What differs from one process, for each case."""
    results = run_ranks(ranks, run_all, cases, timeout_s=240)
    references: dict[Any, dict[str, np.ndarray]] = {}
    wrong = []
    for i, case in enumerate(cases):
        key = (case.architecture, case.pack, len(case.plan.options), case.dtype)
        references[key] = references.get(key) or reference(case)
        got = together(case, [r[i] for r in results])
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
    ("ranks", "every"), [(1, 12), (2, 18), (3, 27), (4, 36), *(whole(n, 1) for n in (1, 2, 3, 4))]
)
def test_a_layer_equals_one_process(ranks: int, every: int) -> None:
    """Would catch any wrong adjoint, head order, token order or doubled gradient of one method,
    recompute level or way to hold weights, and names it; whole steps are tested elsewhere."""
    packs = (EVEN, UNEVEN, FEW)
    cases = [
        _case(model, layers=f"1*{name}+{level}", held=held, pack=pack, order=order)
        for model in MODELS
        for name, level, held, (i, order) in product(
            _usable(model, ranks), RECOMPUTE, HELD if ranks > 1 else HELD[:1], enumerate(ORDERS)
        )
        for pack in (packs[(len(name) + len(level) + i) % 3], LONG)
        if pack != LONG or (order == "zigzag" and level != "full")
    ]
    assert not _wrong(spread(cases, every), ranks)


@pytest.mark.parametrize(("ranks", "every"), [(2, 6), (4, 16), whole(2, 1), whole(4, 1)])
def test_neighbouring_layers_and_branches_may_differ(ranks: int, every: int) -> None:
    """Every ordered pair of methods in two layers, every pair in two branches of one: would catch
    a method that leaves tokens in another order or a gradient unfinished for its neighbour."""
    names = _usable("bidirectional", ranks)
    causal = [n for n in _usable("gpt", ranks) if n in names]
    feed = ("ulysses_z", "megatron_ts", "metp", *(("tensor_ring",) if ranks == 4 else ()))
    cases = [
        _case(
            "gpt",
            layers=f"1*{one} 1*{other}",
            held=HELD[i % 2],
            pack=(13, 1, 9),
            order=ORDERS[i % 3 > 0],
        )
        for i, (one, other) in enumerate(product(causal, causal))
    ] + [
        _case(
            "groups",
            layers=f"1*{one}/{other}+{level}",
            held=HELD[i % 2],
            pack=(5, 14),
            order="zigzag",
        )
        for i, (one, other, level) in enumerate(product(_usable("groups", ranks), feed, RECOMPUTE))
    ]
    assert not _wrong(spread(cases, every), ranks)


def _narrow(dtype: torch.dtype) -> list[Case]:
    return [
        _case(model, layers=f"1*{name}", held=HELD[i % 2], pack=LONG, order="zigzag", dtype=dtype)
        for model in ("groups", "bert")
        for i, name in enumerate(_usable(model, 4))
    ]


@pytest.mark.parametrize("every", [2, whole(1)])
def test_single_precision_is_as_exact_as_one_process(every: int) -> None:
    """Would catch a half type, or a sum in another order that loses digits, in any method."""
    assert not _wrong(spread(_narrow(torch.float32), every), 4, 1e-5)


def test_half_types_are_no_worse_than_one_process() -> None:
    """Would catch a sum over ranks or blocks of keys that is kept in a half type: the error
    against fp64 stays within twice that of one process in bf16, of vectors, which are a few sums
    each and so a matter of chance, within four times."""
    cases = _narrow(torch.bfloat16)
    results = run_ranks(4, run_all, cases, timeout_s=240)
    first = {case.architecture: case for case in reversed(cases)}
    exact = {model: reference(replace(case, rounded=True)) for model, case in first.items()}
    single = {model: reference(case) for model, case in first.items()}
    wrong = []
    for i, case in enumerate(cases):
        got, right, one = (
            together(case, [r[i] for r in results]),
            exact[case.architecture],
            single[case.architecture],
        )
        for name, wanted in right.items():
            ours, theirs = (np.linalg.norm(x[name] - wanted) for x in (got, one))
            most = 2 if wanted.ndim > 1 else 4
            if not ours <= most * theirs + 1e-3 * np.linalg.norm(wanted):
                wrong.append((case.layers, case.architecture, name, float(ours), float(theirs)))
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
        _case("divisible", layers=f"1*{name}+{level}", held=held, pack=pack, order=order)
        for name, level, held, order in product(
            _usable("divisible", ranks), RECOMPUTE, HELD, ORDERS
        )
        if name != "tensor_ring" or held == "replicated"
    ] + [
        _case("divisible", layers=f"1*{one}/{other}", held="sharded", pack=pack)
        for one, other in (
            ("megatron_cz", "megatron_ts"),
            ("megatron_ts", "metp"),
            ("metp", "ulysses_z"),
        )
    ]
    cases = spread(cases, every)
    results = run_ranks(ranks, run_all, cases, timeout_s=240)
    for i, case in enumerate(cases):
        wanted = tuple(8 * elements for elements in _sent(case, ranks))
        assert [r[i]["sent"] for r in results] == [wanted] * ranks, case


def test_a_switch_between_layers_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of two layers of different methods are those of the two: would catch tokens or
    weights that are laid out anew in between."""
    monkeypatch.setitem(MODELS, "divisible", DIVISIBLE[2][0])
    names = _usable("divisible", 2)
    single = [_case("divisible", layers=f"1*{n}", held="replicated", pack=(7, 5)) for n in names]
    pairs = [
        _case("divisible", layers=f"1*{one} 1*{other}", held="replicated", pack=(7, 5))
        for one, other in product(names, names)
    ]
    results = run_ranks(2, run_all, single + pairs, timeout_s=240)[0]
    sent = [np.array(r["sent"]) for r in results]
    alone = dict(zip(names, sent, strict=False))
    for (one, other), both in zip(product(names, names), sent[len(names) :], strict=True):
        assert (both == alone[one] + alone[other]).all(), (one, other)


def test_one_rank_sends_nothing() -> None:
    """Would catch a method on one rank that needs a process group."""
    for name in _usable("gqa", 1):
        case = _case("gqa", layers=f"1*{name}", held="replicated", pack=EVEN)
        sources, context = sources_of(case, None, 0, 1), context_of(case, None)
        x, dy, _ = drawn(case)
        x.requires_grad_()
        through(case, x, sources, context).backward(dy)
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
        sources = sources_of(case, groups.get(world), groups.rank, groups.ranks)
        context = context_of(case, groups)
        x = drawn(case)[0][torch.from_numpy(context.tokens.index(groups.rank))].requires_grad_()
        through(case, x, sources, context).backward(torch.ones_like(x))  # tables, once per pack
        with ByteCounter() as counter:
            out = through(case, x, sources, context)
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
            for rank in everyone
            for b in pack.blocks((rank,), everyone, a.causal)
        ]
        scores = a.heads * sum(area) / ranks
        none, attention = (
            x + scores / (sum(case.pack) / ranks * a.hidden) for x in (none, attention)
        )
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
        _case(
            model,
            layers=f"1*{name}+{level}",
            held="sharded",
            pack=KEPT_PACK,
            order=order,
            dtype=torch.float32,
        )
        for model in KEPT_MODELS
        for name, level in product(_usable(model, ranks), RECOMPUTE)
        if model == "llama" or level == "none"
        for order in (ORDERS if (name, level) == ("megatron_ts", "none") else ORDERS[:1])
    ]
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
    case = _case("gqa", layers="1*local", held="replicated", pack=EVEN)
    sources, context = sources_of(case, None, 0, 1), context_of(case, None)
    wanted = r"activations of layer 0 on member 0: got \[11, 24\], wanted \[12, 24\]"
    with pytest.raises(SpecError, match=wanted):
        through(case, torch.zeros(11, 24, dtype=torch.float64), sources, context)


def test_looking_a_method_up_costs_next_to_nothing() -> None:
    """A change of method between two layers is a dictionary look-up: would catch a search, a
    parse or an import in it; the time is far above the machine's noise."""
    names = _usable("groups", 4)
    seconds = list[float]()
    for _ in range(3):
        start = time.process_time()
        for _ in range(300):
            for name in names:
                branch(name, "attention", MODELS["groups"], 4)
        seconds.append(time.process_time() - start)
    assert min(seconds) / (300 * len(names)) < 50e-6
