"""Loops whose steps choose their own samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import fully_shard

import headrace as hr
from headrace.adopt.samples import TokenReader
from headrace.engine.iteration_order import IterationOrder
from headrace.engine.sample_order import LoopBatch, Samples
from headrace.errors import DataError, PlanMismatch, SpecError
from headrace.spec.cluster import Cluster
from ranks import run_ranks
from running.engine.loops import (
    alone,
    attached,
    costs,
    dataset,
    llama,
    may_have_children,
    trained,
    weights,
)
from spread import whole

pytest.importorskip("transformers")

EXACT = 1e-10
SAMPLES = tuple(int(n) for n in np.random.default_rng(0).geometric(1 / 24, 90).clip(2, 120))
DRAWS = hr.DrawOptions(bucket_ratio=2.0, least_steps=1, most_steps=2)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loop(model: Any, folder: Path, ranks: int, **options: Any) -> Any:
    """A run whose steps choose their samples; little memory, so that launches are small."""
    given = {"iterations": DRAWS, "batch_tokens": None, "costs": small(ranks), **options}
    return attached(model, sgd(model), dataset(SAMPLES), folder, **given)


def small(ranks: int) -> hr.CostModel:
    """Costs of which a rank holds some hundred tokens."""
    cluster = Cluster(devices=ranks, memory_bytes=80_000, device="cpu")
    return costs(ranks).replace(cluster=cluster)


def whole_epoch(ranks: int, folder: Path, stop: int | None = None, workers: int = 0) -> Any:
    """Losses, samples and weights of an epoch, from wherever a checkpoint stands, to ``stop``."""
    if workers:
        may_have_children()
    model = llama()
    run = loop(model, folder, ranks, workers=workers)
    run.load(folder / "saved")
    losses, ids = [], []
    for step in run:
        for micro in step:
            micro.backward(model(**micro.inputs).loss)
        losses.append(step.loss)
        ids.append(step.plan.lengths.ids)
        if step.number == stop:
            run.save(folder / "saved")
            break
    return losses, ids, weights(model), len(run)


def batch_of(ids: tuple[int, ...]) -> LoopBatch:
    """A batch of these samples."""
    items = dataset(SAMPLES)
    samples = Samples.of(items, None, TokenReader(tokens="input_ids", kind="next"))
    return LoopBatch(
        lengths=hr.Lengths.of((SAMPLES[i] for i in ids), ids),
        epoch=0,
        read=lambda i: samples.read(ids[i]),
        state_after={},
    )


def test_an_epoch_trains_every_sample_once_as_one_process_would(tmp_path: Path) -> None:
    """Catches ranks that draw other samples, weights of a sample that follow from its group or its
    accumulation steps, and an epoch that leaves samples out."""
    found = run_ranks(2, whole_epoch, 2, tmp_path, timeout_s=200)
    losses, ids, ends, steps = found[0]
    assert found[1][1] == ids
    assert len(ids) == steps > 2
    assert sorted(i for own in ids for i in own) == list(range(len(SAMPLES)))
    model = llama()
    assert losses == pytest.approx(alone(model, sgd(model), [*map(batch_of, ids)]), rel=EXACT)
    for mine, wanted in zip(ends, weights(model), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=0, atol=EXACT)


@pytest.mark.parametrize("after", [1, 2])
def test_a_loop_goes_on_with_what_is_left_of_the_epoch(after: int, tmp_path: Path) -> None:
    """Catches a position that counts for one number of ranks only, and on as many ranks other
    iterations than without a break. Ranks here take more memory than they have by their costs, so
    more of it is left free from the second step on: for plans, as far as the longest sample allows,
    but not for what is drawn."""
    ((_, before, _, _), _) = run_ranks(2, whole_epoch, 2, tmp_path, 1, timeout_s=200)
    rest = run_ranks(after, whole_epoch, after, tmp_path, timeout_s=200)[0][1]
    assert sorted(i for own in before + rest for i in own) == list(range(len(SAMPLES)))
    if after == 2:
        unbroken = run_ranks(2, whole_epoch, 2, tmp_path / "own", timeout_s=200)[0][1]
        assert before + rest == unbroken


@pytest.mark.parametrize("stop", [None, whole(1)])
def test_workers_read_the_samples_of_the_iterations_to_come(
    stop: int | None, tmp_path: Path
) -> None:
    """Catches workers that read on from where they stood when a checkpoint was loaded, or samples
    of iterations that other costs would draw."""
    own = run_ranks(2, whole_epoch, 2, tmp_path / "own", timeout_s=200)[0]
    found = list[Any]()
    if stop is not None:
        found.append(run_ranks(2, whole_epoch, 2, tmp_path / "read", stop, 2, timeout_s=200)[0])
    found.append(run_ranks(2, whole_epoch, 2, tmp_path / "read", None, 2, timeout_s=200)[0])
    assert [loss for one in found for loss in one[0]] == own[0]
    assert [ids for one in found for ids in one[1]] == own[1]
    for mine, wanted in zip(found[-1][2], own[2], strict=True):
        np.testing.assert_array_equal(mine, wanted)


def refused(folder: Path) -> list[str]:
    """What errors say of loops that cannot choose their samples."""
    said = []
    for kind, options in (
        (SpecError, {"batch_tokens": 150}),
        (SpecError, {"batch_sequences": 3}),
        (SpecError, {"shuffle": False}),
    ):
        with pytest.raises(kind, match="iterations") as error:
            loop(llama(), folder, 2, **options)
        said.append(str(error.value))
    with pytest.raises(SpecError, match="stream"):
        attached(
            (model := llama()),
            sgd(model),
            iter(dataset()),
            folder,
            iterations=DRAWS,
            batch_tokens=None,
        )
    sharded = llama()
    for layer in sharded.model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    with pytest.raises(SpecError, match="lockstep"):
        loop(sharded, folder, 2)
    return said


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    """Catches a budget that is not kept to, an order that is not that of the documents, and groups
    that would wait for each other at every layer."""
    for said in run_ranks(2, refused, tmp_path, timeout_s=100):
        names = ("batch_tokens", "batch_sequences", "shuffle=False")
        assert all(name in text for name, text in zip(names, said, strict=True))


def torn(folder: Path) -> str:
    """What ranks say whose costs round differently."""
    model = llama()
    run = loop(model, folder, 2)
    order = run._order
    assert isinstance(order, IterationOrder)
    if run.rank:
        order.price(hr.Problem(costs=small(2), sizes=(2,), stages=False))
    with pytest.raises(PlanMismatch) as error:
        trained(run, model)
    return str(error.value)


def test_ranks_that_draw_other_samples_are_told(tmp_path: Path) -> None:
    """Catches ranks that train a plan of one draw on the samples of another."""
    for said in run_ranks(2, torn, tmp_path, timeout_s=100):
        assert "samples of the iteration" in said


def test_a_state_of_other_iterations_is_refused() -> None:
    """Catches positions in buckets that mean other samples."""
    reader = TokenReader(tokens="input_ids", kind="next")
    samples = Samples.of(dataset(SAMPLES), None, reader)
    order = IterationOrder(samples, DRAWS)
    order.price(hr.Problem(costs=small(1), stages=False))
    state = order.next_batch().state_after
    for other in (
        IterationOrder(samples, hr.DrawOptions(bucket_ratio=1.5)),
        IterationOrder(Samples.of(dataset(SAMPLES[1:]), None, reader), DRAWS),
    ):
        with pytest.raises(DataError, match="as when the state was taken"):
            other.restore(state)
