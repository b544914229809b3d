"""Several ranks on one GPU, through gloo: NCCL wants one for each, but tensors, kernels and streams
of a device are those of a real run.

gloo's sends know no devices, so no plan here has stages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headrace as hr
from headrace.comm.gpus import count_gpus
from headrace.comm.mesh import Groups
from headrace.native.executor import Executor
from headrace.native.optimizers import AdamW
from headrace.native.storage import Storage
from headrace.spec import Architecture, Lengths
from oracles import full_weights, reference_step
from plans import random_documents, random_plan
from ranks import run_ranks
from running.engine.loops import (
    Drawn,
    alone,
    attached,
    batches,
    costs,
    dataset,
    llama,
    trained,
    weights,
)

pytestmark = [
    pytest.mark.skipif(not count_gpus(), reason="needs a CUDA device"),
    pytest.mark.gpu,
    pytest.mark.timeout(200),
]
MODEL = Architecture(layers=3, hidden=32, heads=4, kv_heads=2, ffn=48, vocabulary=61)
HALF = Architecture(layers=2, hidden=256, heads=4, kv_heads=2, ffn=512, vocabulary=307)
GPU = "cuda:0"
EXACT = 1e-10


def _drawn(a: Architecture, seed: int, longest: int) -> list[tuple[np.ndarray, ...]]:
    rng = np.random.default_rng(seed)
    return [random_documents(rng, a.vocabulary, int(rng.integers(2, 9)), longest) for _ in range(3)]


def _steps(
    a: Architecture, device: str, dtype: torch.dtype, seed: int, longest: int
) -> list[tuple[float, float, dict[str, np.ndarray]]]:
    """The loss, the norm of the gradients and this rank's rows of them, of steps by plans drawn at
    random."""
    groups = Groups(device=device)
    kept = torch.promote_types(dtype, torch.float32)
    storage = Storage(
        a,
        groups,
        seed=seed,
        device=device,
        dtype=kept,
        working_dtype=dtype,
        options=AdamW(clip=0.0),
    )
    executor = Executor(storage, groups, seed=seed, device=device)
    plans = np.random.default_rng((seed, groups.ranks))
    found = []
    for step, documents in enumerate(_drawn(a, seed, longest)):
        lengths = Lengths.of(len(d) for d in documents)
        plan = random_plan(lengths, groups.ranks, a.layers, plans, largest=a.heads)
        result = executor.run(plan, documents, step=step, lr=0.0)
        sums = {name: x.double().cpu().numpy().copy() for name, x in storage.sums.items()}
        found.append((result.loss, result.gradient_norm, sums))
    return found


def _reference(
    a: Architecture, seed: int, longest: int
) -> list[tuple[float, dict[str, np.ndarray]]]:
    """The loss and the gradients of the same steps of one process on a CPU. It is forked, too:
    autograd in this process would keep CUDA from later forks."""
    values, found = full_weights(a, seed, torch.float64), []
    for step, documents in enumerate(_drawn(a, seed, longest)):
        loss, grads = reference_step(list(documents), values, a, seed=seed, step=step)
        found.append((float(loss), {name: x.numpy() for name, x in grads.items()}))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_any_plans_equal_one_process_on_a_cpu(ranks: int) -> None:
    """Catches tensors of another device, streams that do not wait, and kernels that give something
    else than those of a CPU: in fp64, to the last digits."""
    seed = 11 * ranks
    found = run_ranks(ranks, _steps, MODEL, GPU, torch.float64, seed, 37, timeout_s=180)
    for step, (loss, grads) in enumerate(run_ranks(1, _reference, MODEL, seed, 37)[0]):
        for rank in found:
            assert rank[step][0] == pytest.approx(loss, rel=EXACT)
        for name, wanted in grads.items():
            rows = np.concatenate([rank[step][2][name] for rank in found])
            scale = max(float(np.abs(wanted).max()), 1e-3)
            np.testing.assert_allclose(rows, wanted, rtol=0, atol=1e-10 * scale)


@pytest.mark.parametrize("ranks", [2, 4])
def test_half_types_are_near(ranks: int) -> None:
    """Catches FlashAttention over parts of documents, and products and sums in bf16, that are wrong
    where several ranks share a sequence."""
    seed = 5 + ranks
    found = run_ranks(ranks, _steps, HALF, GPU, torch.bfloat16, seed, 400, timeout_s=180)
    for step, (loss, grads) in enumerate(run_ranks(1, _reference, HALF, seed, 400)[0]):
        assert found[0][step][0] == pytest.approx(loss, rel=0.01)
        for name, wanted in grads.items():
            rows = np.concatenate([rank[step][2][name] for rank in found])
            off = np.linalg.norm(rows - wanted) / np.linalg.norm(wanted)
            assert off < 0.05, name


def _alone(steps: int) -> tuple[list[float], list[Any]]:
    """Losses and weights of as many steps of one process on a CPU."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = alone(model, optimizer, batches(dataset(), steps, batch_tokens=150), clip=0.5)
    return losses, weights(model)


def _attached(ranks: int, folder: Path) -> tuple[list[float], list[Any]]:
    """Losses and weights of an attached loop over a model on the GPU, by plans drawn at random."""
    model = llama().to(GPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = attached(model, optimizer, dataset(), folder, clip=0.5, costs=costs(ranks))
    run.engine.planner = Drawn(ranks=ranks, layers=2, seed=3)
    found = trained(run, model)
    return found, [p.detach().cpu().numpy() for p in model.parameters()]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_attached_loops_equal_one_process_on_a_cpu(ranks: int, tmp_path: Path) -> None:
    """Catches samples left on the host, indices of another device, gradients added too early."""
    pytest.importorskip("transformers")
    found = run_ranks(ranks, _attached, ranks, tmp_path, timeout_s=180)
    losses, last = run_ranks(1, _alone, len(found[0][0]))[0]
    for got, ends in found:
        # Norms of transformers are in single precision.
        assert got == pytest.approx(losses, rel=1e-7)
        for mine, wanted in zip(ends, last, strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=0, atol=1e-6)


def _compiled(device: str, recompute: str, backend: str | None) -> tuple[float, list[Any]]:
    """The loss of a step of a model that tokens are spread over, and its gradients."""
    model = llama().to(device)
    run = hr.compile(model, recompute=recompute, backend=backend)
    ids = torch.randint(3, 61, (2, 40), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids.to(device), "labels": ids.masked_fill(ids % 3 == 0, -100).to(device)}
    loss = run(**run.shard(batch).inputs).loss
    run.backward(loss)
    return float(run.add_up(loss)), [p.grad.cpu().numpy() for p in model.parameters()]


@pytest.mark.parametrize(
    ("ranks", "recompute", "backend"),
    [
        (1, "attention", None),
        (2, "none", None),
        (2, "full", None),
        (3, "attention", None),
        (2, "none", "inductor"),
    ],
)
def test_spread_models_equal_one_process_on_a_cpu(
    ranks: int, recompute: str, backend: str | None
) -> None:
    """Catches exchanges of another device, and compiled graphs that a GPU runs otherwise."""
    pytest.importorskip("transformers")
    loss, grads = run_ranks(1, _compiled, "cpu", "none", None)[0]
    for got, mine in run_ranks(ranks, _compiled, GPU, recompute, backend, timeout_s=180):
        assert got == pytest.approx(loss, rel=1e-7)
        for one, wanted in zip(mine, grads, strict=True):
            # Norms of transformers are in single precision.
            np.testing.assert_allclose(one, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())
