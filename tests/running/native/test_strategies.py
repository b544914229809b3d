"""Pipelines of different shapes side by side: any strategy gives what one process gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.comm.mesh import Groups
from headrace.layouts.partition import storage_partition
from headrace.native.executor import Executor
from headrace.native.optimizers import AdamW
from headrace.native.storage import Storage
from headrace.spec import Architecture, LayerPlan, Lengths, Plan, compile_plan, weight_table
from headrace.spec.architecture import bucket_count
from headrace.spec.known_methods import FACTS
from headrace.spec.random_plans import random_strategy
from oracles import full_weights, reference_step
from plans import random_documents
from ranks import run_ranks
from spread import whole
from strategies import NAMED, laid_out

LLAMA = Architecture(layers=3, hidden=32, heads=4, kv_heads=2, ffn=48, vocabulary=61)
UNTIED = replace(LLAMA, layers=2, tied=False)
GPT = Architecture(
    layers=3, hidden=32, heads=4, kv_heads=4, ffn=48, vocabulary=61, kind="gpt", positions=40
)
BERT = Architecture(
    layers=3,
    hidden=32,
    heads=4,
    kv_heads=4,
    ffn=48,
    vocabulary=61,
    kind="bert",
    causal=False,
    positions=40,
    mask_id=60,
)
LENGTHS = (37, 3, 20, 11, 1, 29, 8, 2, 17)
Nodes = tuple[int, ...]
"""Ranks of each node."""


def _documents(a: Architecture, lengths: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(sum(lengths))
    return tuple(rng.integers(a.vocabulary - 1, size=n).astype(np.int32) for n in lengths)


def _gradients(storage: Storage) -> dict[str, np.ndarray]:
    return {
        name: s.float().numpy().copy() if s.dtype == torch.bfloat16 else s.numpy().copy()
        for name, s in storage.sums.items()
    }


def _one_step_each(
    a: Architecture,
    plans: list[Plan],
    dtype: torch.dtype,
    node_sizes: Nodes | None = None,
) -> list[Any]:
    groups = Groups(node_sizes=node_sizes)
    storage = Storage(a, groups, seed=3, dtype=dtype, options=AdamW(clip=0.0))
    executor = Executor(storage, groups, seed=3)
    out = []
    for plan in plans:
        result = executor.run(plan, _documents(a, plan.lengths.tokens), step=0, lr=0.0)
        out.append((result.loss, _gradients(storage)))
    return out


def _whole(
    results: list[dict[str, np.ndarray]],
    name: str,
    a: Architecture,
    node_sizes: Nodes | None = None,
) -> np.ndarray:
    weight = {w.name: w for w in weight_table(a)}[name]
    rows = storage_partition(weight, len(results), node_sizes).parts
    assert [len(r[name]) for r in results] == [len(part) for part in rows]
    found = np.full(weight.shape, np.nan, results[0][name].dtype)
    for part, result in zip(rows, results, strict=True):
        found[part.start : part.stop] = result[name]
    return found


def _compare(
    results: list[Any],
    a: Architecture,
    plans: list[Plan],
    tolerance: float,
    node_sizes: Nodes | None = None,
) -> None:
    """``results[rank][number]`` of (loss, gradient rows) against one process."""
    weights = full_weights(a, 3, torch.float64)
    for number, plan in enumerate(plans):
        documents = list(_documents(a, plan.lengths.tokens))
        loss, grads = reference_step(documents, weights, a, seed=3, step=0)
        for rank in results:
            assert rank[number][0] == pytest.approx(loss, rel=tolerance)
        for name, wanted in grads.items():
            got = _whole([rank[number][1] for rank in results], name, a, node_sizes)
            scale = max(float(wanted.abs().max()), 1e-3)
            np.testing.assert_allclose(
                got,
                wanted.numpy(),
                rtol=0,
                atol=tolerance * scale,
                err_msg=f"{plan.strategy} {plan.working} {name}",
            )


@pytest.mark.parametrize("ranks", [n if n in (3, 4) else whole(n) for n in NAMED])
def test_named_strategies_equal_one_process(ranks: int) -> None:
    """Would catch a message that goes to the wrong member, a bucket pulled by a stage that does
    not need it or not by one that does, and what one strategy leaves for the next."""
    held = ("replicated", "sharded")
    plans = [
        laid_out(text, LLAMA, LENGTHS, ranks, working=held[i % 2])
        for i, text in enumerate(NAMED[ranks])
    ]
    _compare(run_ranks(ranks, _one_step_each, LLAMA, plans, torch.float64), LLAMA, plans, 1e-10)


@pytest.mark.parametrize(("ranks", "text"), [(3, "1*pp3"), (2, "1*pp2"), (4, "2*pp2")])
def test_each_micro_batch_recomputes_in_its_own_way_on_every_stage(ranks: int, text: str) -> None:
    """Catches a stage that recomputes as another does, or as the micro-batch before: of mixed plans
    early stages recompute more, and longer micro-batches more than short ones."""
    mixtures = (
        "1*local+full 1*local+attention 1*local",
        "3*local",
        "2*local+full 1*local",
        "1*local+attention 2*local",
    )
    plan = laid_out(text, LLAMA, LENGTHS, ranks)
    micro_batches = tuple(
        replace(one, layers=LayerPlan.parse(mixtures[number % len(mixtures)]))
        for number, one in enumerate(plan.micro_batches)
    )
    assert len({one.layers for one in micro_batches}) > 1
    plans = [plan.replace(micro_batches=micro_batches)]
    _compare(run_ranks(ranks, _one_step_each, LLAMA, plans, torch.float64), LLAMA, plans, 1e-10)


@pytest.mark.parametrize(
    "node_sizes", [(2, 2), (3, 1), whole((2, 2, 2)), whole((3, 3)), whole((4, 4)), whole((3, 1, 4))]
)
def test_strategies_on_nodes_equal_one_process(node_sizes: Nodes) -> None:
    """Would catch a pull whose second step goes on before the first, a stage of another node that
    is left out of a sum, and rows of the storage layout of nodes that are taken for others'."""
    ranks, held = sum(node_sizes), ("replicated", "sharded")
    texts = (*NAMED[ranks], f"{ranks}*cp1", f"1*cp{ranks}")
    plans = [
        laid_out(text, LLAMA, LENGTHS, ranks, working=held[i % 2]) for i, text in enumerate(texts)
    ]
    results = run_ranks(ranks, _one_step_each, LLAMA, plans, torch.float64, node_sizes)
    _compare(results, LLAMA, plans, 1e-10, node_sizes)


@pytest.mark.parametrize("a", [UNTIED, GPT, BERT], ids=["untied", "gpt", "bert"])
def test_other_models_equal_one_process(a: Architecture) -> None:
    """Would catch a head that pulls no matrix of its own or misses the tied one, biases and
    positions of a stage that lacks them, and norms behind the sums cut off with their stage."""
    texts = ("1*tp2 + 2*cp1", "1*pp2 + 1*cp2", "1*tp2-pp2")
    plans = [laid_out(text, a, LENGTHS, 4) for text in texts]
    _compare(run_ranks(4, _one_step_each, a, plans, torch.float64), a, plans, 1e-10)


def test_uneven_stages_equal_one_process() -> None:
    """Would catch a stage that takes the layers of even shares."""
    even = laid_out("1*pp2", LLAMA, LENGTHS, 2)
    plans = [
        even.replace(pipelines=(replace(even.pipelines[0], shares=shares),))
        for shares in ((1, 2), (2, 1))
    ]
    _compare(run_ranks(2, _one_step_each, LLAMA, plans, torch.float64), LLAMA, plans, 1e-10)


def test_single_precision_equals_one_process() -> None:
    """Would catch a message or a partial sum of another dtype."""
    plans = [laid_out("1*tp2-pp2", LLAMA, LENGTHS, 4), laid_out("4*cp1", LLAMA, LENGTHS, 4)]
    _compare(run_ranks(4, _one_step_each, LLAMA, plans, torch.float32), LLAMA, plans, 1e-5)


def _drawn(a: Architecture, ranks: int, seed: int, steps: int) -> list[tuple[Plan, Any]]:
    rng = np.random.default_rng((seed, ranks))
    methods = {
        width: [name for name, m in FACTS.items() if m.supports(a, width) is None]
        for width in range(1, ranks + 1)
    }
    found = []
    for _ in range(steps):
        documents = random_documents(rng, a.vocabulary, int(rng.integers(1, 9)), 37)
        lengths = Lengths.of(len(d) for d in documents)
        plan = random_strategy(lengths, ranks, a.layers, rng, methods=methods, most_tensor=2)
        found.append((plan, documents))
    return found


def _ten_steps(
    a: Architecture, seed: int, steps: int, lr: float, node_sizes: Nodes | None = None
) -> Any:
    groups = Groups(node_sizes=node_sizes)
    options = AdamW(eps=1e-3, decay=0.1, clip=0.5)
    storage = Storage(a, groups, seed=seed, dtype=torch.float64, options=options)
    executor = Executor(storage, groups, seed=seed)
    losses = [
        executor.run(plan, documents, step=step, lr=lr).loss
        for step, (plan, documents) in enumerate(_drawn(a, groups.ranks, seed, steps))
    ]
    return losses, {name: m.numpy().copy() for name, m in storage.masters.items()}


def _steps_of_one(a: Architecture, ranks: int, seed: int, steps: int, lr: float) -> Any:
    reference = {
        n: torch.nn.Parameter(w.clone()) for n, w in full_weights(a, seed, torch.float64).items()
    }
    decayed = [w for w in reference.values() if w.dim() > 1]
    plain = [w for w in reference.values() if w.dim() == 1]
    o = AdamW()
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=lr,
        betas=(o.beta1, o.beta2),
        eps=1e-3,
    )
    losses = []
    for step, (_, documents) in enumerate(_drawn(a, ranks, seed, steps)):
        current = {n: w.detach() for n, w in reference.items()}
        loss, grads = reference_step(list(documents), current, a, seed=seed, step=step)
        losses.append(loss)
        for name, parameter in reference.items():
            parameter.grad = grads[name].clone()
        torch.nn.utils.clip_grad_norm_(list(reference.values()), 0.5)
        optimizer.step()
    return losses, reference


def _check_steps(
    a: Architecture, ranks: int, seed: int, steps: int, node_sizes: Nodes | None = None
) -> None:
    results = run_ranks(ranks, _ten_steps, a, seed, steps, 0.01, node_sizes)
    losses, reference = _steps_of_one(a, ranks, seed, steps, 0.01)
    for got, _ in results:
        assert got == pytest.approx(losses, rel=1e-8)
    for name, wanted in reference.items():
        got = _whole([weights for _, weights in results], name, a, node_sizes)
        np.testing.assert_allclose(got, wanted.detach().numpy(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("ranks", [whole(2), whole(3), 4, whole(6), whole(8)])
def test_ten_steps_of_ten_strategies_equal_one_process(ranks: int) -> None:
    """Would catch state that a strategy leaves behind: weights of another layout that were not
    pulled anew, partial sums that were not cleared, a group met in another order."""
    _check_steps(LLAMA, ranks, seed=ranks, steps=10)


@pytest.mark.parametrize("node_sizes", [(2, 2), (1, 2), whole((3, 3)), whole((2, 2, 2, 2))])
def test_ten_steps_on_nodes_equal_one_process(node_sizes: Nodes) -> None:
    """Would catch rows of optimizer state that belong to other rows of the weights, and changes
    between layouts in one step and layouts in two."""
    ranks = sum(node_sizes)
    _check_steps(UNTIED, ranks, seed=ranks, steps=10, node_sizes=node_sizes)


@pytest.mark.parametrize("examples", [3, whole(8)])
def test_any_strategies_equal_one_process(examples: int) -> None:
    """Would catch what no named strategy does: odd widths beside stages, methods and levels mixed
    within a stage, fewer tokens than ranks."""

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(st.sampled_from([LLAMA, UNTIED, GPT, BERT]), st.integers(2, 5), st.integers(0, 2**31))
    def check(a: Architecture, ranks: int, seed: int) -> None:
        _check_steps(a, ranks, seed=seed, steps=3)

    check()


def _bits(plan: Plan, node_sizes: Nodes | None) -> Any:
    groups = Groups(node_sizes=node_sizes)
    storage = Storage(LLAMA, groups, seed=3, dtype=torch.float32)
    executor = Executor(storage, groups, seed=3)
    documents, found = _documents(LLAMA, plan.lengths.tokens), []
    for step in (0, 0):
        result = executor.run(plan, documents, step=step, lr=0.0)
        found.append((result.loss, {n: s.numpy().tobytes() for n, s in storage.sums.items()}))
    return found


@pytest.mark.parametrize("node_sizes", [None, (2, 2), (1, 3)])
def test_the_same_plan_gives_the_same_bits(node_sizes: Nodes | None) -> None:
    """Would catch a sum whose order is that of arrival."""
    plan = laid_out("1*pp2 + 2*cp1", LLAMA, LENGTHS, 4)
    for first, second in run_ranks(4, _bits, plan, node_sizes):
        assert first == second


def _told(plan: Plan) -> Any:
    entered: list[str] = []
    groups = Groups()
    storage = Storage(LLAMA, groups, seed=3)
    executor = Executor(storage, groups, seed=3, entered=entered.append)
    result = executor.run(plan, _documents(LLAMA, plan.lengths.tokens), step=0, lr=0.0)
    return entered, [(row.action, row.kind, row.tokens) for row in result.rows]


def test_every_message_is_told_and_measured() -> None:
    """Would catch a hung rank that is not said to be in a message, and messages missing from the
    timeline or with other rows than the program's."""
    plan = laid_out("1*pp2", LLAMA, LENGTHS, 2, packed=3)
    programs = compile_plan(plan, bucket_count(LLAMA))
    for (entered, rows), program in zip(run_ranks(2, _told, plan), programs, strict=True):
        assert entered == [*map(str, program.actions), "between steps"]
        messages = [row for row in rows if row[1] in ("send", "recv", "exchange")]
        wanted = [a for a in program.actions if a.kind in ("send", "recv", "exchange")]
        assert [row[0] for row in messages] == [str(action) for action in wanted]
        assert all(row[2] > 0 for row in messages)


def _without_overlap(plan: Plan) -> Any:
    groups = Groups()
    storage = Storage(LLAMA, groups, seed=3, dtype=torch.float64, options=AdamW(clip=0.0))
    executor = Executor(storage, groups, seed=3, overlap=False)
    result = executor.run(plan, _documents(LLAMA, plan.lengths.tokens), step=0, lr=0.0)
    pulls = max(r.end_s for r in result.rows if r.kind == "pull")
    first = min((r.start_s for r in result.rows if r.kind in ("forward", "recv")), default=pulls)
    return (result.loss, _gradients(storage)), pulls <= first


def test_without_overlap_it_is_the_same() -> None:
    """Would catch a comparison with something that computes another step, or that overlaps too."""
    plan = laid_out("1*pp2 + 2*cp1", LLAMA, LENGTHS, 4)
    results = run_ranks(4, _without_overlap, plan)
    _compare([[found] for found, _ in results], LLAMA, [plan], 1e-10)
    assert all(apart for _, apart in results)


def _mixed(plan: Plan, node_sizes: Nodes | None) -> Any:
    groups = Groups(node_sizes=node_sizes)
    storage = Storage(
        LLAMA,
        groups,
        seed=3,
        dtype=torch.float32,
        working_dtype=torch.bfloat16,
        options=AdamW(clip=0.0),
    )
    executor = Executor(storage, groups, seed=3)
    documents = _documents(LLAMA, plan.lengths.tokens)
    loss = executor.run(plan, documents, step=0, lr=0.0).loss
    grads = _gradients(storage)
    working = storage.working(plan)
    dtypes = {v.dtype for v in working.values.values()}, {m.dtype for m in storage.masters.values()}
    before = {n: m.clone() for n, m in storage.masters.items()}
    executor.run(plan, documents, step=1, lr=1e-5)
    moved = all(not torch.equal(before[n], m) for n, m in storage.masters.items() if len(m))
    return loss, grads, dtypes, moved, (working.pull_bytes, working.push_bytes)


@pytest.mark.parametrize(
    ("text", "node_sizes"),
    [("1*cp1", None), ("1*tp2-pp2", None), ("1*pp2 + 1*cp2", None), ("4*cp1", (2, 2))],
)
def test_mixed_precision_is_near_one_process(text: str, node_sizes: Nodes | None) -> None:
    """Would catch masters kept in bf16 (a step of 1e-5 would change nothing), gradients summed in
    it over micro-batches, and transfers that still carry fp32."""
    ranks = 1 if text == "1*cp1" else 4
    plan = laid_out(text, LLAMA, LENGTHS, ranks)
    results = run_ranks(ranks, _mixed, plan, node_sizes)
    weights = full_weights(LLAMA, 3, torch.float64)
    wanted_loss, grads = reference_step(
        list(_documents(LLAMA, LENGTHS)), weights, LLAMA, seed=3, step=0
    )
    for loss, _, (working, masters), moved, _ in results:
        assert loss == pytest.approx(wanted_loss, rel=1e-2)
        assert working == {torch.bfloat16}
        assert masters == {torch.float32}
        assert moved
    for name, wanted in grads.items():
        got = _whole([r[1] for r in results], name, LLAMA, node_sizes)
        error = np.linalg.norm(got - wanted.numpy()) / max(float(wanted.norm()), 1e-6)
        assert error < 0.03, name
