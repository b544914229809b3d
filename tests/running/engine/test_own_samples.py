"""Samples that live on different ranks: whoever gave them, everything is that of one process."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headrace as hr
from headrace.comm.collectives import exchange_bytes
from headrace.engine.attach import Attached
from headrace.errors import HeadraceError
from ranks import run_ranks
from running.engine.loops import Drawn, attached, costs, dataset, llama, weights
from running.engine.test_clips import BATCHES as CLIPS
from running.engine.test_clips import alone as clips_alone
from running.engine.test_clips import clips, model_error
from running.engine.test_clips import model as clip_model
from running.engine.test_given_batches import (
    BATCHES,
    EXACT,
    HOW,
    LOSSES,
    Alone,
    alone,
    arrays,
    by_pairs,
    by_tokens,
    copy_of,
    coupled,
    given,
    log_probabilities,
    require_equal,
    samples,
    sequence_values,
    sgd,
    token_values,
)
from spread import whole

pytest.importorskip("transformers")


def parts(batch: list[Any], ranks: int, step: int) -> list[list[int]]:
    """The numbers of the samples that each rank gives, in order: uneven, some ranks none; in the
    second step one rank gives all."""
    drawn = random.Random(step)
    if step == 1:
        return [list(range(len(batch))) if rank == ranks - 1 else [] for rank in range(ranks)]
    cuts = sorted(drawn.randint(0, len(batch)) for _ in range(ranks - 1))
    return [list(range(*pair)) for pair in zip([0, *cuts], [*cuts, len(batch)], strict=True)]


def own(batch: list[Any], run: Attached, ranks: int, step: int) -> list[Any]:
    """The samples that this rank gives."""
    return [batch[i] for i in parts(batch, ranks, step)[run.rank]]


def steps_of(how: str, ranks: int, folder: Path, kind: str) -> Any:
    """Losses, weights and strategies of steps."""
    run, model, called, drawn = given(how, ranks, folder, own=True)
    losses = []
    for number, batch in enumerate(BATCHES):
        step = run.step(own(batch, run, ranks, number))
        assert step.plan.lengths.tokens == tuple(len(item["input_ids"]) for item in batch)
        for micro in step:
            micro.backward(LOSSES[kind](called(**micro.inputs).logits, micro))
        losses.append(step.loss)
    return losses, weights(model), drawn.strategies


@pytest.mark.parametrize(("how", "ranks"), HOW)
@pytest.mark.parametrize("kind", ["tokens", "sequences"])
def test_steps_equal_one_process(how: str, ranks: int, kind: str, tmp_path: Path) -> None:
    """Catches a sample that is trained by no rank or by two, columns of another sample, a mean over
    the samples of a rank, and a rank without samples that others wait for."""
    found = run_ranks(ranks, steps_of, how, ranks, tmp_path, kind, timeout_s=60)
    require_equal(found, alone(kind))


def pairs_of(ranks: int, folder: Path) -> Any:
    """Losses, weights and strategies of steps whose pairs are given by one rank each."""
    run, model, called, drawn = given("alone", ranks, folder, own=True)
    losses = []
    for number, (batch, groups) in enumerate(zip(BATCHES, APART, strict=True)):
        numbers = parts(batch, ranks, 0 if number != 1 else 1)[run.rank]
        mine = [
            tuple(numbers.index(i) for i in group) for group in groups if set(group) <= set(numbers)
        ]
        kept = [group for group in groups if _by_one(batch, ranks, number, group)]
        step = run.step([batch[i] for i in numbers], together=mine)
        for micro in step:
            micro.backward(by_pairs(called(**micro.inputs).logits, micro, kept))
        losses.append(step.loss)
    return losses, weights(model), drawn.strategies


def _by_one(batch: list[Any], ranks: int, number: int, group: tuple[int, ...]) -> bool:
    return any(set(group) <= set(n) for n in parts(batch, ranks, 0 if number != 1 else 1))


APART = [[(0, 1), (3, 2)], [(1, 3)], [], [(3, 4)]]


@pytest.mark.parametrize("ranks", [2, 3])
def test_samples_kept_together(ranks: int, tmp_path: Path) -> None:
    """Catches groups by the numbers of another rank, and ranks that pack otherwise where only one
    of them has a group."""
    model = llama()
    optimizer, losses, met = sgd(model), [], 0
    for number, (batch, groups) in enumerate(zip(BATCHES, APART, strict=True)):
        all_of_it = Alone(batch)
        kept = [group for group in groups if _by_one(batch, ranks, number, group)]
        met += len(kept)
        loss = by_pairs(all_of_it.logits(model), all_of_it, kept, range(len(batch)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert met >= 2
    found = run_ranks(ranks, pairs_of, ranks, tmp_path, timeout_s=60)
    require_equal(found, (losses, weights(model)))


def mapped(how: str, ranks: int, folder: Path) -> Any:
    """The values that each rank gets of its own samples."""
    run, model, _, _ = given(how, ranks, folder, own=True)
    run.map(own(BATCHES[0], run, ranks, 0), token_values)
    before, found = [copy_of(p) for p in model.parameters()], []
    for number, batch in enumerate(BATCHES):
        mine = own(batch, run, ranks, number)
        found.append(arrays(run.map(mine, token_values)))
        found.append(arrays(run.map(mine, sequence_values)))
    same = all(torch.equal(x, copy_of(p)) for x, p in zip(before, model.parameters(), strict=True))
    return found, same


@pytest.mark.parametrize(("how", "ranks"), HOW)
def test_each_rank_gets_the_values_of_its_own(how: str, ranks: int, tmp_path: Path) -> None:
    """Catches values of other ranks' samples, in another order, or of a part of their tokens."""
    model = llama()
    for rank, (found, same) in enumerate(run_ranks(ranks, mapped, how, ranks, tmp_path)):
        assert same
        values = iter(found)
        for number, batch in enumerate(BATCHES):
            one = Alone(batch)
            with torch.no_grad():
                logp = log_probabilities(one.logits(model), one.labels)
            each = list(logp[0].split([len(x[0]) for x in one.each]))
            kept = one.per_sequence((one.labels != -100).double()).clamp(min=1)
            means = list(one.per_sequence(logp) / kept)
            numbers = parts(batch, ranks, number)[rank]
            for wanted in (each, means):
                got = next(values)
                assert len(got) == len(numbers)
                for value, i in zip(got, numbers, strict=True):
                    np.testing.assert_allclose(value, wanted[i].numpy(), rtol=EXACT, atol=EXACT)


def two_passes(how: str, ranks: int, folder: Path, kind: str) -> Any:
    """Weights after steps whose losses are of all samples at once: each rank knows only its own
    values, so the loss is made of what ranks tell each other."""
    from headrace.comm.collectives import gather_bytes

    run, model, _, _ = given(how, ranks, folder, own=True)
    fn = token_values if kind == "tokens" else sequence_values
    losses = []
    for number, batch in enumerate(BATCHES):
        mine = own(batch, run, ranks, number)
        values = run.map(mine, fn)
        told = repr([value.tolist() for value in values]).encode()
        said = [eval(text) for text in gather_bytes(told, run._setup.groups.world)]
        every = [torch.tensor(v, dtype=torch.float64) for one in said for v in one]
        leaves = [value.requires_grad_() for value in every]
        loss = coupled(leaves)
        loss.backward()
        grads = [leaves[i].grad for i in parts(batch, ranks, number)[run.rank]]
        step = run.backward(mine, fn, grads)
        assert step.done
        losses.append(float(loss.detach()))
    return losses, weights(model)


@pytest.mark.parametrize(
    ("how", "ranks"), [("alone", 1), ("ddp", 2), ("fsdp2", 2), whole("alone", 4)]
)
@pytest.mark.parametrize("kind", ["tokens", "sequences"])
def test_gradients_travel_with_their_samples(
    how: str, ranks: int, kind: str, tmp_path: Path
) -> None:
    """Catches gradients that meet the values of other samples."""
    found = run_ranks(ranks, two_passes, how, ranks, tmp_path, kind, timeout_s=60)
    model = llama()
    optimizer, losses = sgd(model), []
    for batch in BATCHES:
        one = Alone(batch)
        logp = log_probabilities(one.logits(model), one.labels)
        each = list(logp[0].split([len(x[0]) for x in one.each]))
        if kind == "sequences":
            kept = one.per_sequence((one.labels != -100).double()).clamp(min=1)
            each = list(one.per_sequence(logp) / kept)
        loss = coupled(each)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    require_equal(found, (losses, weights(model)))


def exhausted(folder: Path) -> Any:
    """Losses, weights and values where the last rank runs out of memory once a step and a map."""
    run, model, called, drawn = given("ddp", 2, folder, own=True)
    left, found, losses = [0], [], []

    def fail(*_: Any) -> None:
        if run.rank == 1 and left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("no more")

    model.model.layers[1].register_forward_pre_hook(fail)
    for number, batch in enumerate(BATCHES):
        mine = own(batch, run, 2, number)
        left[0] = 1
        found.append(arrays(run.map(mine, token_values)))
        left[0] = 1
        step = run.step(mine)
        for micro in step:
            with micro:
                micro.backward(by_tokens(called(**micro.inputs).logits, micro))
        losses.append(step.loss)
    return losses, weights(model), found, len(drawn.failed)


def test_memory_that_runs_out(tmp_path: Path) -> None:
    """Catches another plan without the samples that it needs."""
    with torch.no_grad():
        one = Alone(BATCHES[0])
        first = log_probabilities(one.logits(llama()), one.labels)[0]
    found = run_ranks(2, exhausted, tmp_path, timeout_s=60)
    for losses, ends, _, failed in found:
        require_equal([(losses, ends)], alone("tokens"))
        assert failed >= 6
    values = [value for _, _, mine, _ in found for value in mine[0]]
    np.testing.assert_allclose(np.concatenate(values), first, rtol=0, atol=EXACT)


def announced(folder: Path) -> Any:
    """Plans and losses of a run that announces each batch before."""
    model = llama()
    options = {"longest": 80, "batch_tokens": 200, "costs": costs(2), "ahead": 2, "own": True}
    run = attached(model, sgd(model), None, folder, **options)
    made = run._planner.steps
    losses, plans = [], []
    for number, batch in enumerate(BATCHES):
        mine = own(batch, run, 2, number)
        run.plan_ahead(mine)
        step = run.step(mine)
        for micro in step:
            micro.backward(by_tokens(model(**micro.inputs).logits, micro))
        losses.append(step.loss)
        plans.append(step.plan.hash)
    assert run._planner.steps is made
    run.detach()
    return losses, weights(model), plans


def test_coming_batches_of_all_ranks(tmp_path: Path) -> None:
    """Catches plans of one rank's samples."""
    require_equal(run_ranks(2, announced, tmp_path, timeout_s=60), alone("tokens"))


def clip_steps(folder: Path) -> Any:
    """Losses and weights of a model of several axes whose clips are on different ranks."""
    model = clip_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = clips()
    run = attached(
        hr.adapt(model),
        optimizer,
        None,
        folder,
        longest=20,
        example=data[2],
        costs=costs(2),
        batch_tokens=None,
        own=True,
    )
    run.engine.planner = Drawn(ranks=2, layers=2, seed=4, levels=("none", "full"))
    losses = []
    for number, numbers in enumerate(CLIPS):
        step = run.step(own([data[i] for i in numbers], run, 2, number))
        for micro in step:
            micro.backward(model_error(model, micro).square().sum() / micro.targets)
        losses.append(step.loss)
    return losses, weights(model)


def test_clips_travel(tmp_path: Path) -> None:
    """Catches samples that are no rows of tokens."""
    require_equal(run_ranks(2, clip_steps, tmp_path, timeout_s=60), clips_alone(CLIPS))


TYPES = (torch.int64, torch.float64)

CASES: dict[str, tuple[Any, str]] = {
    "none on any": (lambda run, model: run.step([]), "samples: got none on any rank"),
    "other fields": (
        lambda run, model: run.map(
            [{"input_ids": [1, 2], **({"reward": 1.0} if run.rank else {})}], token_values
        ),
        "fields of the samples of rank 1: got input_ids int64, labels int64, reward float32, "
        "wanted input_ids int64, labels int64, as of rank 0",
    ),
    "other types": (
        lambda run, model: run.step(
            [{"input_ids": [1, 2], "gain": torch.ones(2, dtype=TYPES[run.rank])}]
        ),
        "fields of the samples of rank 1: got gain float64",
    ),
    "too long on one": (
        lambda run, model: run.step([{"input_ids": [1] * (81 if run.rank else 3)}]),
        "sample 0: got 81 tokens, wanted at most 80",
    ),
    "not read on one": (
        lambda run, model: run.step([{"ids": [1]}] if run.rank else [{"input_ids": [1, 2]}]),
        "input_ids",
    ),
    "numbers of others": (
        lambda run, model: run.step(BATCHES[0][: 1 + run.rank], together=[(0, 1)]),
        "together=: got sample 1, wanted numbers of 0 to 0",
    ),
    "too few gradients": (
        lambda run, model: run.backward(BATCHES[0][:2], token_values, [None] * (1 + run.rank)),
        "gradients: got 1, wanted 2",
    ),
    "no finite gradient": (
        lambda run, model: run.backward(
            [BATCHES[2][0]], token_values, [torch.full((33,), (1.0, float("nan"))[run.rank])]
        ),
        "gradient of sample 0: got no finite",
    ),
    "asks for something else": (
        lambda run, model: (run.map if run.rank else run.step)(
            *([BATCHES[0], token_values] if run.rank else [BATCHES[0]])
        ),
        "rank 1 asks for: got a map before step 0, wanted step 0, as rank 0",
    ),
    "fails on one": (
        lambda run, model: run.map(BATCHES[0], _fails_on_one(run.rank)),
        "of this rank",
    ),
}


def _fails_on_one(rank: int) -> Any:
    def fn(outputs: Any, micro: Any) -> torch.Tensor:
        if rank:
            raise ZeroDivisionError("of this rank")
        return token_values(outputs, micro)

    return fn


def refused(folder: Path) -> Any:
    """Of each case the error of a rank; and the loss of a step afterwards."""
    run, model, called, _ = given("alone", 2, folder, own=True)
    before, found = weights(llama()), {}
    for case, (loop, _) in CASES.items():
        try:
            loop(run, called)
            found[case] = "nothing"
        except (HeadraceError, ZeroDivisionError) as error:
            found[case] = str(error)
        assert all((x == y).all() for x, y in zip(before, weights(model), strict=True)), case
    step = run.step(own(BATCHES[0], run, 2, 0))
    for micro in step:
        micro.backward(by_tokens(called(**micro.inputs).logits, micro))
    return found, step.loss


def test_refused_on_all_ranks(tmp_path: Path) -> None:
    """Catches a mistake that only one rank hears of, that changes a weight, or after which nothing
    can be trained."""
    for found, loss in run_ranks(2, refused, tmp_path, timeout_s=100):
        for case, text in found.items():
            assert re.search(CASES[case][1], text), (case, text)
        assert loss == pytest.approx(alone("tokens")[0][0], rel=EXACT)


def disagreeing(folder: Path) -> str:
    rank = torch.distributed.get_rank()
    with pytest.raises(HeadraceError) as error:
        given("alone", 2, folder, own=bool(rank))
    return str(error.value)


def with_a_data_set(folder: Path) -> str:
    model = llama()
    with pytest.raises(HeadraceError) as error:
        attached(model, sgd(model), dataset(), folder, costs=costs(1), own=True)
    return str(error.value)


def test_the_option_is_of_all_ranks_and_of_given_batches(tmp_path: Path) -> None:
    """Catches ranks that wait for samples of which others think that they have them."""
    for text in run_ranks(2, disagreeing, tmp_path):
        assert "SampleOptions(own=...) of hr.attach: got True on rank 1, wanted False" in text
    for text in run_ranks(1, with_a_data_set, tmp_path):
        assert "samples.own" in text
        assert "a data set too" in text


def exchanged(ranks: int) -> list[bytes]:
    rank, world = torch.distributed.get_rank(), torch.distributed.group.WORLD
    return exchange_bytes([bytes([rank, to]) * (rank + to) for to in range(ranks)], world)


@pytest.mark.parametrize("ranks", [1, 3])
def test_bytes_come_from_every_rank(ranks: int) -> None:
    """Catches bytes of another rank, and none that come as some."""
    for rank, found in enumerate(run_ranks(ranks, exchanged, ranks)):
        assert found == [bytes([sender, rank]) * (sender + rank) for sender in range(ranks)]


def test_what_is_given_may_differ_in_shape(tmp_path: Path) -> None:
    """Catches columns of several features, and of numbers that are no floats."""
    found = run_ranks(2, wide_columns, tmp_path, timeout_s=60)
    batch = samples((7, 12, 5), seed=3)
    wanted = [np.arange(len(x["input_ids"]) * 3).reshape(-1, 3) for x in batch]
    for rank, values in enumerate(found):
        for value, i in zip(values, parts(batch, 2, 0)[rank], strict=True):
            np.testing.assert_array_equal(value, 2 * wanted[i])


def wide_columns(folder: Path) -> Any:
    run, _, _, _ = given("alone", 2, folder, own=True)
    batch = samples((7, 12, 5), seed=3)
    for item in batch:
        count = len(item["input_ids"])
        item["wide"] = torch.arange(count * 3).view(count, 3)
        item["flag"] = torch.ones(count, dtype=torch.bool)

    def fn(outputs: Any, micro: Any) -> torch.Tensor:
        return (micro.rest["wide"] * (1 + micro.rest["flag"].long())[..., None]).double()

    return arrays(run.map(own(batch, run, 2, 0), fn))
