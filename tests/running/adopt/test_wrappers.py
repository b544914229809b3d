"""What people combine with torch's wrappers: exact, or refused by name on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import headrace as hr
from headrace.errors import HeadraceError
from ranks import run_ranks
from running.adopt.foreign import Gpt, drawn, gpt
from running.engine.loops import alone, attached, batches, costs, dataset, in_values, weights

EXACT = 1e-10

Wrap = Callable[[Gpt], Any]


def items() -> list[dict[str, Any]]:
    return [{"ids": each["input_ids"], "labels": each["labels"]} for each in dataset()]


def loss_of(model: Any, micro: Any) -> torch.Tensor:
    return model(**micro.inputs)[1]  # type: ignore[no-any-return]


def sharded(model: Gpt, *parts: str) -> Gpt:
    """FSDP2 of parts of blocks, or of ``blocks``, and of the model."""
    for block in model.blocks:
        for part in parts:
            fully_shard(block if part == "blocks" else getattr(block, part))
    fully_shard(model)
    return model


def _in_autocast(inside: bool, shards: bool) -> tuple[list[float], list[Any]]:
    """Losses and weights of three steps whose batches are sharded within the autocast of the
    forward, or before it; some weights are zero at first."""
    model = gpt().float()
    with torch.no_grad():
        for block in model.blocks:
            block.mlp[2].weight.zero_()
    if shards:
        sharded(model, "blocks")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run, losses = hr.compile(model), []
    for step in range(3):
        part = None if inside else run.shard(drawn(2, 24, step))
        with torch.autocast("cpu", torch.bfloat16):
            part = run.shard(drawn(2, 24, step)) if part is None else part
            loss = run(**part.inputs)[1]
        run.backward(loss)
        losses.append(float(run.add_up(loss)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, weights(model)


@pytest.mark.parametrize("shards", [False, True])
def test_batches_sharded_within_autocast(shards: bool) -> None:
    """Catches weights that autocast keeps as a look at the model had changed them."""
    inside, outside = (run_ranks(2, _in_autocast, where, shards) for where in (True, False))
    for (found, mine), (wanted, theirs) in zip(inside, outside, strict=True):
        assert found == wanted
        assert all(np.array_equal(x, y) for x, y in zip(mine, theirs, strict=True))


def _trained(
    folder: Path, wrap: Wrap, between: Callable[..., object], options: dict[str, Any]
) -> tuple[list[float], list[Any]]:
    """Losses and weights of three steps of a loop over a wrapped model."""
    model = gpt()
    called = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = attached(called, optimizer, items(), folder, steps=3, labels="same", **options)
    losses = []
    for step in run:
        for number, micro in enumerate(step):
            loss = loss_of(called, micro)
            between(called, number)
            micro.backward(loss)
        losses.append(step.loss)
        between(called, -1)
    return losses, weights(model)


def _require_exact(
    folder: Path, wrap: Wrap, between: Callable[..., object] = lambda *_: None, **options: Any
) -> None:
    """Compare with one process."""
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drawn_batches = batches(items(), 3, batch_tokens=150, tokens="ids", kind="same")
    wanted = alone(model, optimizer, drawn_batches, tokens="ids")
    options = {"costs": costs(2), **options}
    if options["costs"] is None:
        del options["costs"]
    for losses, mine in run_ranks(2, _trained, folder, wrap, between, options, timeout_s=100):
        assert losses == pytest.approx(wanted, rel=EXACT)
        for one, other in zip(mine, weights(model), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=EXACT)


def _evaluate(called: Any, number: int) -> None:
    """As people evaluate who forget torch.no_grad()."""
    if number < 0:
        called(torch.arange(20)[None])


def test_evaluations_with_gradients_under_ddp(tmp_path: Path) -> None:
    """Catches a sum over ranks that the evaluation has begun and one rank's backward would end."""
    _require_exact(tmp_path, DistributedDataParallel, _evaluate)


def _put_off(called: Any, number: int) -> None:
    """As loops have it that accumulate gradients of two micro-batches."""
    called.set_requires_gradient_sync(number % 2 == 1)


def test_sums_that_a_loop_puts_off_under_fsdp(tmp_path: Path) -> None:
    _require_exact(tmp_path, partial(sharded_by, "blocks"), _put_off)


def sharded_by(*given: Any) -> Gpt:
    *parts, model = given
    return sharded(model, *parts)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [["attention", "mlp"], ["attention", "norm", "mlp", "blocks"]])
def test_parts_of_blocks_under_fsdp(parts: list[str], tmp_path: Path) -> None:
    """Catches layers that are measured without the model that gathers their weights, and ranks that
    gather those of parts in another order, as one of them computes a layer again."""
    _require_exact(tmp_path, partial(sharded_by, *parts), costs=None, memory="1MiB")


def checkpointed(how: str, model: Gpt) -> Gpt:
    """With blocks that are computed again, as their author says."""
    for at, block in enumerate(model.blocks):
        if how == "wrapped":
            model.blocks[at] = checkpoint_wrapper(block)
        else:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wrapped", "by a function"])
def test_checkpoints_of_blocks(how: str, tmp_path: Path) -> None:
    """Catches a checkpoint around that of the author, which is computed again without it."""
    _require_exact(tmp_path, partial(checkpointed, how), costs=None, memory="1MiB")


def _said(how: str, folder: Path) -> str:
    """What is said of a model or an optimizer that ranks cannot train together."""
    with pytest.raises(HeadraceError) as caught:
        REFUSED[how][0](folder)
    return str(caught.value)


def _loop(folder: Path, model: Any, optimizer: Any) -> Any:
    """A loop of two steps."""
    options = in_values({"costs": costs(2), "steps": 2, "labels": "same", "memory": "256MiB"})
    return hr.attach(
        model, optimizer, items(), batch_tokens=150, say=lambda _: None, out=folder, **options
    )


def _train(run: Any, model: Any, save: Path | None = None) -> None:
    for step in run:
        for micro in step:
            micro.backward(loss_of(model, micro))
        if save is not None:
            run.save(save)


def _of_zero(folder: Path) -> None:
    model = gpt()
    parts = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    _train(_loop(folder, model, parts), model, folder)


def _of_accelerate(folder: Path) -> None:
    model = gpt()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.gradient_state = type("GradientState", (), {"num_steps": 2})()
    _loop(folder, model, optimizer)


def _sharded_later(folder: Path) -> None:
    model = gpt()
    run = _loop(folder, model, torch.optim.SGD(model.parameters(), lr=0.1))
    sharded(model, "blocks")
    _train(run, model)


def _compiled_unfrozen(_: Path) -> None:
    model = gpt()
    model.blocks[0].requires_grad_(False)
    run = hr.compile(DistributedDataParallel(model))
    model.blocks[0].requires_grad_(True)
    loss = run(**run.shard(drawn(2, 20)).inputs)[1]
    run.backward(loss)
    run.add_up(loss)


def _of_mesh(_: Path) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("other", "shards"))
    model = gpt()
    fully_shard(model, mesh=mesh["shards"])
    hr.compile(model)


def _with_ignored(_: Path) -> None:
    model = gpt()
    fully_shard(model, ignored_params=set(model.norm.parameters()))
    hr.compile(model)


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "states of ZeRO": (_of_zero, "optimizer ZeroRedundancyOptimizer: got states that each rank"),
    "steps left out": (_of_accelerate, "optimizer of Accelerate: got gradient_accumulation_steps"),
    "shards later": (_sharded_later, "got fully_shard since the loop began"),
    "unfrozen under DDP": (_compiled_unfrozen, "parameters of a model under DDP: got 12 that are"),
    "a graph that is static": (
        lambda _: hr.compile(DistributedDataParallel(gpt(), static_graph=True)),  # type: ignore[arg-type, return-value]
        "model under DDP: got static_graph=True",
    ),
    "a mesh of fewer ranks": (_of_mesh, "parameter [61, 32] under FSDP2: got (Shard(dim=0),) on"),
    "ignored parameters": (_with_ignored, "parameters that FSDP2 ignores: got 2 that are trained"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_wrappers_would_train_wrongly_is_refused(how: str, tmp_path: Path) -> None:
    """Catches gradients that nobody sums, states that nobody saves and steps that are left out."""
    for said in run_ranks(2, _said, how, tmp_path):
        assert REFUSED[how][1] in said
