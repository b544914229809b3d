"""What ranks measure beside what the simulator predicts: the same rows in the same order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.comm.mesh import Groups
from headrace.costs import synthetic_costs
from headrace.native.executor import Executor
from headrace.native.optimizers import AdamW
from headrace.native.storage import Storage
from headrace.simulator import simulate
from headrace.spec import Architecture, Lengths, Plan, compile_plan
from headrace.spec.architecture import bucket_count
from headrace.spec.random_plans import random_strategy
from plans import random_documents
from ranks import run_ranks

TINY = Architecture(layers=3, hidden=32, heads=4, kv_heads=2, ffn=64, vocabulary=61)
METHODS = {1: ["local"], 2: ["ulysses_z"], 3: ["ulysses_z"]}

Seen = list[tuple[str, str, int, int, bool]]


def drawn(ranks: int, seed: int) -> list[tuple[Plan, tuple[np.ndarray, ...]]]:
    """Plans with their tokens, one for each step."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(5):
        documents = random_documents(rng, TINY.vocabulary, int(rng.integers(1, 9)), 37)
        lengths = Lengths.of(len(document) for document in documents)
        plan = random_strategy(lengths, ranks, TINY.layers, rng, methods=METHODS)
        steps.append((plan, documents))
    return steps


def measured(ranks: int, seed: int) -> list[Seen]:
    """Kind, action, tokens, ranks of the rows of every step, and whether they can have waited."""
    groups = Groups()
    storage = Storage(TINY, groups, seed=seed, dtype=torch.float64, options=AdamW(clip=0.0))
    executor = Executor(storage, groups, seed=seed)
    found = []
    for step, (plan, documents) in enumerate(drawn(ranks, seed)):
        rows = executor.run(plan, documents, step=step, lr=0.0).rows
        found.append([(r.kind, r.action, r.tokens, r.ranks, r.waited_s <= r.seconds) for r in rows])
    return found


@pytest.mark.parametrize("seed", [1, 2])
def test_rows_are_those_of_the_simulator(seed: int) -> None:
    """Catches a wait for weights or gradients at another place than predicted, and rows that the
    comparison of both cannot match."""
    results = run_ranks(3, measured, 3, seed)
    costs = synthetic_costs(3, architecture=TINY)
    for step, (plan, _) in enumerate(drawn(3, seed)):
        timeline = simulate(compile_plan(plan, bucket_count(TINY)), plan, costs)
        for rank in range(3):
            wanted = [
                (row.kind, row.action, row.tokens, row.ranks, True)
                for row in timeline.rows
                if row.rank == rank
            ]
            assert results[rank][step] == wanted
