"""Loss and every gradient of any plan equal those of one process on the same sequences."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.comm.mesh import Groups
from headrace.layouts.partition import storage_partition
from headrace.layouts.peer_rows import ServedRows
from headrace.models import objective as objective_module
from headrace.native.executor import Executor
from headrace.native.optimizers import AdamW
from headrace.native.storage import Storage
from headrace.spec import Architecture, Lengths, weight_table
from oracles import full_weights, reference_step
from plans import random_documents, random_plan
from ranks import run_ranks
from spread import whole

switch_module = sys.modules["headrace.ops.switch"]  # the name in the package is the function


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


LLAMA = Architecture(layers=3, hidden=32, heads=4, kv_heads=2, ffn=48, vocabulary=61)
BERT = Architecture(
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=4,
    ffn=64,
    vocabulary=61,
    kind="bert",
    causal=False,
    positions=40,
    norm_eps=1e-12,
    mask_id=60,
)
MODELS = {
    "llama": LLAMA,
    "llama-mqa-untied": Architecture(
        layers=2, hidden=24, heads=6, kv_heads=1, ffn=40, vocabulary=53, tied=False
    ),
    "llama-mha": Architecture(layers=2, hidden=24, heads=3, kv_heads=3, ffn=24, vocabulary=31),
    "gpt": Architecture(
        layers=2, hidden=32, heads=4, kv_heads=4, ffn=64, vocabulary=61, kind="gpt", positions=40
    ),
    "bidirectional": Architecture(
        layers=2, hidden=32, heads=4, kv_heads=2, ffn=32, vocabulary=61, causal=False
    ),
    "bert": BERT,
    "bert-untied": replace(BERT, tied=False, kv_heads=2),
}


def _steps(a, dtype, seed, steps, options, lr=0.0):
    """Run ``steps`` random plans; per step this rank's loss and gradient rows, then weights."""
    groups = Groups()
    storage = Storage(a, groups, seed=seed, dtype=dtype, options=options)
    executor = Executor(storage, groups, seed=seed)
    rng, plans = np.random.default_rng(seed), np.random.default_rng((seed, groups.ranks))
    out = []
    for step in range(steps):
        documents = random_documents(rng, a.vocabulary, int(rng.integers(1, 9)), 37)
        lengths = Lengths.of(len(d) for d in documents)
        plan = random_plan(lengths, groups.ranks, a.layers, plans, largest=a.heads)
        result = executor.run(plan, documents, step=step, lr=lr)
        grads = {name: s.numpy().copy() for name, s in storage.sums.items()}
        out.append((result.loss, grads, str(plan.strategy)))
    return out, {name: m.numpy().copy() for name, m in storage.masters.items()}


def _whole(results, part, name, a, ranks):
    """Put the rows of all ranks together."""
    rows = storage_partition({w.name: w for w in weight_table(a)}[name], ranks).parts
    pieces = [part(results[rank])[name] for rank in range(ranks)]
    assert [len(p) for p in pieces] == [len(r) for r in rows]
    return np.concatenate(pieces)


ALWAYS = {
    "llama": (1, 2, 3, 4),
    "llama-mqa-untied": (1, 3),
    "llama-mha": (2, 4),
    "gpt": (1, 4),
    "bidirectional": (3,),
    "bert": (1, 4),
    "bert-untied": (2, 3),
}
"""Ranks that a model has in every run; the others under ``slow``."""


@pytest.mark.parametrize(
    ("model", "ranks"),
    [
        (model, ranks) if ranks in ALWAYS[model] else whole(model, ranks)
        for model in MODELS
        for ranks in (1, 2, 3, 4)
    ],
)
def test_gradients_equal_one_process(model, ranks):
    """Would catch a wrong adjoint, token count, label shift, position or head order."""
    a = MODELS[model]
    seed = 7 * ranks + len(model)
    results = run_ranks(ranks, _steps, a, torch.float64, seed, 3, AdamW(clip=0.0))
    weights = full_weights(a, seed, torch.float64)
    rng = np.random.default_rng(seed)
    for step in range(3):
        documents = random_documents(rng, a.vocabulary, int(rng.integers(1, 9)), 37)
        loss, grads = reference_step(list(documents), weights, a, seed=seed, step=step)
        for result in results:
            assert result[0][step][0] == pytest.approx(loss, rel=1e-10)
        for name, wanted in grads.items():
            got = _whole(results, lambda r, s=step: r[0][s][1], name, a, ranks)
            scale = max(float(wanted.abs().max()), 1e-3)
            np.testing.assert_allclose(got, wanted.numpy(), rtol=0, atol=1e-10 * scale)


@pytest.mark.parametrize(
    ("a", "ranks"),
    [
        (LLAMA, 1),
        whole(LLAMA, 2),
        (LLAMA, 3),
        whole(LLAMA, 4),
        whole(BERT, 1),
        whole(BERT, 2),
        (BERT, 3),
    ],
    ids=lambda value: getattr(value, "kind", str(value)),
)
def test_ten_steps_equal_one_process(a, ranks):
    """Would catch state that a plan leaves behind: stale partial sums, an update per group; and
    masks of one step that are those of another."""
    options = AdamW(eps=1e-3, decay=0.1, clip=0.5)
    results = run_ranks(ranks, _steps, a, torch.float64, 5, 10, options, 0.01)
    weights = full_weights(a, 5, torch.float64)
    reference = {n: torch.nn.Parameter(w.clone()) for n, w in weights.items()}
    decayed = [w for w in reference.values() if w.dim() > 1]
    plain = [w for w in reference.values() if w.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=0.01,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
    )
    rng = np.random.default_rng(5)
    for step in range(10):
        documents = random_documents(rng, a.vocabulary, int(rng.integers(1, 9)), 37)
        current = {n: w.detach() for n, w in reference.items()}
        loss, grads = reference_step(list(documents), current, a, seed=5, step=step)
        assert results[0][0][step][0] == pytest.approx(loss, rel=1e-10)
        for name, parameter in reference.items():
            parameter.grad = grads[name].clone()
        torch.nn.utils.clip_grad_norm_(list(reference.values()), options.clip)
        optimizer.step()
    for name, wanted in reference.items():
        got = _whole(results, lambda r: r[1], name, a, ranks)
        np.testing.assert_allclose(got, wanted.detach().numpy(), rtol=1e-8, atol=1e-8)


def test_single_precision_agrees():
    """Would catch an accumulation in the wrong dtype."""
    results = run_ranks(3, _steps, LLAMA, torch.float32, 11, 2, AdamW(clip=0.0))
    weights = full_weights(LLAMA, 11, torch.float32)
    rng = np.random.default_rng(11)
    for step in range(2):
        documents = random_documents(rng, LLAMA.vocabulary, int(rng.integers(1, 9)), 37)
        loss, grads = reference_step(list(documents), weights, LLAMA)
        assert results[0][0][step][0] == pytest.approx(loss, rel=1e-5)
        for name, wanted in grads.items():
            got = _whole(results, lambda r, s=step: r[0][s][1], name, LLAMA, 3)
            scale = float(wanted.abs().max())
            np.testing.assert_allclose(got, wanted.numpy(), rtol=0, atol=1e-5 * scale)


def _dropped(a, ranks):
    a = replace(a, dropout=0.2)
    results = run_ranks(ranks, _steps, a, torch.float64, 3, 2, AdamW(clip=0.0))
    losses = [step[0] for step in results[0][0]]
    last = {
        w.name: _whole(results, lambda r: r[0][-1][1], w.name, a, ranks) for w in weight_table(a)
    }
    return losses, last


@pytest.mark.parametrize("a", [LLAMA, BERT], ids=["llama", "bert"])
def test_dropout_does_not_depend_on_the_plan(a):
    """Would catch randomness keyed by rank, pack position or call order."""
    losses, grads = _dropped(a, 1)
    without = run_ranks(1, _steps, a, torch.float64, 3, 2, AdamW(clip=0.0))[0][0]
    assert losses[0] != pytest.approx(without[0][0], rel=1e-6)
    for ranks in (2, 3):
        other, other_grads = _dropped(a, ranks)
        assert other == pytest.approx(losses, rel=1e-10)
        for name, grad in grads.items():
            np.testing.assert_allclose(other_grads[name], grad, atol=1e-12)


def _faulty(fault, *args):
    """The same run with one operator broken: what the exactness tests must notice."""
    if fault == "switch backward":
        real = switch_module.to_columns
        switch_module._SwitchBack.backward = staticmethod(
            lambda ctx, grad: (real(grad, *ctx.rest).flip(1), None, None, None)
        )
    elif fault == "token count":
        Lengths.predicted = property(lambda self: self.total)
    elif fault == "label at the border":
        objective_module.NextToken.example = lambda self, d, sample, mask: (
            d,
            np.append(d[1:], d[:1]),
        )
    elif fault == "count of the masks":
        objective_module.Masked.count = lambda self, lengths, masks: round(
            self.share * lengths.total
        )
    elif fault == "sum of the push":
        ServedRows.add = _lose_one_weight(ServedRows.add)
    return _steps(*args)


def _lose_one_weight(add):
    lost = "layers.0.norm1.weight"

    def wrapped(self, wire, own, names, sums):
        kept = {lost: sums[lost].clone()} if lost in sums else {}
        add(self, wire, own, names, {**sums, **kept})

    return wrapped


@pytest.mark.parametrize(
    ("fault", "a"),
    [
        ("switch backward", LLAMA),
        ("token count", LLAMA),
        ("label at the border", LLAMA),
        ("sum of the push", LLAMA),
        ("sum of the push", BERT),
        ("count of the masks", BERT),
    ],
    ids=lambda value: getattr(value, "kind", value),
)
def test_a_planted_fault_is_noticed(fault, a):
    """The exactness test itself: it must fail when the runtime is wrong."""
    results = run_ranks(2, _faulty, fault, a, torch.float64, 5, 2, AdamW(clip=0.0))
    weights = full_weights(a, 5, torch.float64)
    rng = np.random.default_rng(5)
    worst = 0.0
    for step in range(2):
        documents = random_documents(rng, a.vocabulary, int(rng.integers(1, 9)), 37)
        _, grads = reference_step(list(documents), weights, a, seed=5, step=step)
        for name, wanted in grads.items():
            got = _whole(results, lambda r, s=step: r[0][s][1], name, a, 2)
            error = np.abs(got - wanted.numpy()).max() / max(float(wanted.abs().max()), 1e-3)
            worst = max(worst, error)
    assert worst > 1e-6
