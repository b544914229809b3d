"""Anyone's loop: whatever the plans, its losses and weights are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ranks import run_ranks
from running.loop.loops import (
    Drawn,
    alone,
    attached,
    batches,
    dataset,
    llama,
    trained,
    weights,
)
from spread import whole

pytest.importorskip("transformers")

EXACT = 1e-10


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def wrapped(how: str) -> tuple[Any, Any]:
    """(a model as a user has it, what he calls)."""
    model = llama()
    if how == "ddp":
        return model, DistributedDataParallel(model)
    if how == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model, model


def drawn_steps(how: str, ranks: int, folder: Path, seed: int) -> tuple[list[float], Any, Any]:
    """Losses, weights and strategies of steps with plans drawn at random."""
    model, called = wrapped(how)
    optimizer = sgd(called)
    run = attached(called, optimizer, dataset(), folder, clip=0.5)
    run.planner = drawn = Drawn(
        ranks=ranks, layers=2, seed=seed, semantics="lockstep" if how == "fsdp2" else "free"
    )
    return trained(run, called), weights(model), drawn.strategies


@pytest.mark.parametrize(
    ("how", "ranks"),
    [("alone", 1), ("alone", 2), ("ddp", 3), ("fsdp2", 2), whole("alone", 3), whole("alone", 4),
     whole("ddp", 1), whole("ddp", 2), whole("ddp", 4), whole("fsdp2", 3), whole("fsdp2", 4)],
)  # fmt: skip
def test_any_plans_equal_one_process(how: str, ranks: int, tmp_path: Path) -> None:
    """Catches gradients counted by ranks, means of means, lost borders, an update too many, and
    layers computed again for another group."""
    found = run_ranks(ranks, drawn_steps, how, ranks, tmp_path, 7, timeout_s=200)
    model = llama()
    steps = len(found[0][0])
    assert steps >= 3
    losses = alone(model, sgd(model), batches(dataset(), steps, batch_tokens=150), clip=0.5)
    for got, ends, strategies in found:
        assert got == pytest.approx(losses, rel=EXACT)
        assert strategies == found[0][2]
        for mine, wanted in zip(ends, weights(model), strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=0, atol=EXACT)
