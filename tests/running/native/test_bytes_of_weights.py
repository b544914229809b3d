"""Bytes of a parameter on real ranks: those that are counted, and no second copy of gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.comm.mesh import Groups
from headrace.native.executor import Executor
from headrace.native.optimizers import AdamW
from headrace.native.storage import Storage
from headrace.profiling.constants import working_bytes
from headrace.spec import Architecture, Lengths
from headrace.spec.architecture import parameter_count
from headrace.spec.layer_plan import LayerOption, LayerPlan
from headrace.spec.plan import MicroBatch, Pipeline, Plan, Working
from headrace.spec.strategy import Scheme
from ranks import run_ranks
from running.native.test_executor import _documents

MODEL = Architecture(layers=6, hidden=64, heads=4, kv_heads=4, ffn=256, vocabulary=512, tied=False)
TOKENS = 24


def _plan(ranks: int, p: int, working: Working) -> Plan:
    """A sequence for each group of ``p`` neighbours."""
    option = LayerOption.of("local" if p == 1 else "ulysses_z")
    layers = LayerPlan.uniform(option, MODEL.layers)
    starts = range(0, ranks, p)
    return Plan(
        lengths=Lengths(tokens=(TOKENS,) * len(starts)),
        devices=ranks,
        pipelines=tuple(
            Pipeline(scheme=Scheme(context=p), ranks=tuple(range(at, at + p))) for at in starts
        ),
        micro_batches=tuple(
            MicroBatch(pipeline=i, sequences=(i,), layers=layers) for i in range(len(starts))
        ),
        working=working,
        predicted_s=0.0,
        lower_bound_s=0.0,
    )


def _held(p: int, working: Working, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that this rank holds after a step, and those that are counted for it, without what is
    gathered in passing."""
    groups = Groups()
    storage = Storage(MODEL, groups, seed=1, options=AdamW(), working_dtype=dtype)
    plan = _plan(groups.ranks, p, working)
    executor = Executor(storage, groups, seed=1)
    executor.run(plan, _documents((TOKENS,) * len(plan.pipelines)), step=0, lr=1e-3)
    counted = storage.bytes_held() + working_bytes(MODEL, groups.ranks, p, dtype)[working]
    if working == "sharded" and p > 1:
        layer = 4 * 64 * 64 + 3 * 64 * 256
        counted -= layer * (dtype.itemsize + 4)
    return storage.bytes_now(), counted


@pytest.mark.parametrize(
    ("ranks", "p", "working", "most"),
    [
        (1, 1, "replicated", 18),  # master, gradient, two moments in fp32; a weight in 16 bits
        (2, 2, "sharded", 16 / 2),  # shards are stored rows, cast when they are used
        (4, 4, "sharded", 16 / 4),
        (2, 1, "replicated", 16 / 2 + 6),
        (4, 2, "sharded", 16 / 4 + 6 / 2),
    ],
)
def test_a_rank_holds_what_is_counted(ranks: int, p: int, working: Working, most: float) -> None:
    """Catches a gradient that is held twice where the rank that works with a weight stores it,
    and bytes that are counted otherwise than they are held."""
    for held, counted in run_ranks(ranks, _held, p, working, torch.bfloat16):
        assert held == pytest.approx(counted, rel=0.02)
        assert held / parameter_count(MODEL) <= most * 1.03


def _steps(dtype: torch.dtype, working: Working, p: int) -> tuple[float, float, list[np.ndarray]]:
    groups = Groups()
    storage = Storage(MODEL, groups, seed=1, dtype=torch.float64, working_dtype=dtype)
    plan = _plan(groups.ranks, p, working)
    executor = Executor(storage, groups, seed=1)
    documents = _documents((TOKENS,) * len(plan.pipelines))
    for step in range(2):  # sums that are not cleared show in the second
        result = executor.run(plan, documents, step=step, lr=1e-3)
    return result.loss, result.gradient_norm, [x.numpy() for x in storage.sums.values()]


@pytest.mark.parametrize(("ranks", "working"), [(1, "replicated"), (2, "sharded"), (4, "sharded")])
def test_gradients_added_up_where_they_lie_are_the_same(ranks: int, working: Working) -> None:
    """Catches sums that a push overwrites or adds twice, or that live on into the next step, where
    working weights are of another type than stored ones but lie on the same ranks."""
    wide = run_ranks(ranks, _steps, torch.float64, working, ranks)
    narrow = run_ranks(ranks, _steps, torch.float32, working, ranks)
    for (loss, norm, sums), (other_loss, other_norm, others) in zip(wide, narrow, strict=True):
        assert other_loss == pytest.approx(loss, rel=1e-5)
        assert other_norm == pytest.approx(norm, rel=1e-4)
        for one, other in zip(sums, others, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-5)
