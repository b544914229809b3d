"""Bytes of a parameter on real ranks: those that are counted, and no second copy of gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from headrace.comm.mesh import Groups
from headrace.costs import synthetic_costs
from headrace.native.executor import Executor
from headrace.native.optimizers import AdamW
from headrace.native.storage import Storage
from headrace.profiling.constants import sharded_share, working_bytes
from headrace.spec import Architecture, Lengths
from headrace.spec.architecture import parameter_count
from headrace.spec.layer_plan import LayerOption, LayerPlan
from headrace.spec.plan import MicroBatch, Pipeline, Plan, Working
from headrace.spec.strategy import Scheme
from ranks import run_ranks
from running.native.test_executor import _documents
from spread import whole

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


def _received(a: Architecture, working: Working, dtype: torch.dtype) -> int:
    """Bytes that this rank receives in the pull of a plan of one group of all ranks."""
    groups = Groups()
    storage = Storage(a, groups, seed=1, working_dtype=dtype)
    return storage.working(_plan(groups.ranks, groups.ranks, working)).pull_bytes


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_one_group_moves_the_share_that_is_counted(ranks: int, kv_heads: int) -> None:
    """Catches weights of few heads, which no rank stores as it works with them, that are counted as
    if they stayed, and a share that the formulas see otherwise."""
    a = replace(MODEL, kv_heads=kv_heads)
    share = sharded_share(a, ranks, None)
    for dtype in (torch.float32, torch.bfloat16):
        sharded = max(run_ranks(ranks, _received, a, "sharded", dtype))
        replicated = max(run_ranks(ranks, _received, a, "replicated", dtype))
        assert sharded / replicated == pytest.approx(share, rel=0.1, abs=2e-3)
    found = synthetic_costs(ranks, architecture=a).exchange_s.sharded_share
    assert found == pytest.approx(share, abs=0.02)


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


GROUPED = Architecture(layers=2, hidden=48, heads=6, kv_heads=3, ffn=80, vocabulary=101, tied=True)


def _own(method: str, dtype: torch.dtype, lengths: tuple[int, ...]) -> list[tuple[Any, ...]]:
    """(loss, gradient norm, sums, weights) of steps with weights sharded over all ranks, whole,
    and sharded again: what one step leaves behind shows in the next."""
    groups = Groups()
    ranks, found = groups.ranks, list[tuple[Any, ...]]()
    storage = Storage(GROUPED, groups, seed=1, dtype=torch.float64, working_dtype=dtype)
    executor = Executor(storage, groups, seed=1)
    documents = _documents(lengths)
    layers = LayerPlan.uniform(LayerOption.of(method), GROUPED.layers)
    pipeline = Pipeline(scheme=Scheme(context=ranks), ranks=tuple(range(ranks)))
    micros = [(0, 2), (1,)]
    for step, working in enumerate(get_args(Working) * 2):
        plan = Plan(
            lengths=Lengths(tokens=lengths),
            devices=ranks,
            pipelines=(pipeline,),
            micro_batches=tuple(
                MicroBatch(pipeline=0, sequences=pack, layers=layers) for pack in micros
            ),
            working=working,
            predicted_s=0.0,
            lower_bound_s=0.0,
        )
        result = executor.run(plan, documents, step=step, lr=1e-2)
        sums = [x.numpy().copy() for x in storage.sums.values()]
        weights = [x.numpy().copy() for x in storage.masters.values()]
        found.append((result.loss, result.gradient_norm, sums, weights))
    return found


@pytest.mark.parametrize(
    ("ranks", "method"),
    [
        (2, "ulysses_z"),
        (3, "ulysses_z"),
        (3, "megatron_ts"),
        (2, "metp"),
        (3, "metp"),
        (3, "megatron_cz"),
        whole(4, "megatron_cz_gather"),
        whole(4, "megatron_cz"),
    ],
)
def test_stored_shards_give_the_gradients_of_copies(ranks: int, method: str) -> None:
    """Catches sums that a push overwrites or adds twice, or that live on into the next step, shards
    that are read before they are cast or after they were updated, and products in the wrong type:
    working weights of fp32 over stored ones of fp64 equal fp64 throughout, by every method, with
    fewer key-value heads, odd ranks, and lengths that they do not divide."""
    lengths = (23, 17, 5)
    wide = run_ranks(ranks, _own, method, torch.float64, lengths)
    narrow = run_ranks(ranks, _own, method, torch.float32, lengths)
    for steps, others in zip(wide, narrow, strict=True):
        for (loss, norm, sums, weights), other in zip(steps, others, strict=True):
            assert other[0] == pytest.approx(loss, rel=1e-5)
            assert other[1] == pytest.approx(norm, rel=1e-4)
            for one, same in zip(sums, other[2], strict=True):
                np.testing.assert_allclose(same, one, rtol=1e-3, atol=1e-5 * norm)
            for one, same in zip(weights, other[3], strict=True):
                apart = np.abs(same - one) > 1e-4  # of a gradient of nothing Adam takes the sign
                assert apart.mean() < 0.01, apart.mean()
    first, last = wide[0][0], wide[0][-1]
    assert last[0] != pytest.approx(first[0], rel=1e-3), "the weights were updated"


def test_stored_shards_learn_as_one_process() -> None:
    """Catches what two spread runs do wrong alike: losses of shards over two ranks are those
    of one rank with its own weights."""
    lengths = (23, 17, 5)
    (alone,) = run_ranks(1, _own, "local", torch.float64, lengths)
    for steps in run_ranks(2, _own, "ulysses_z", torch.float32, lengths):
        for (loss, norm, *_), (one, other, *_) in zip(steps, alone, strict=True):
            assert loss == pytest.approx(one, rel=1e-4)
            assert norm == pytest.approx(other, rel=1e-3)
