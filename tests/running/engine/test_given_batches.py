"""Batches that are given: whatever the plans, losses, weights and values are those of one
process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, logsigmoid
from torch.nn.parallel import DistributedDataParallel

import headrace as hr
from headrace.engine.attach import Attached
from headrace.errors import HeadraceError, ModelError
from ranks import run_ranks
from running.adopt.foreign import gpt
from running.engine.loops import VOCABULARY, Drawn, attached, costs, llama, weights
from running.engine.test_clips import BATCHES as CLIPS
from running.engine.test_clips import alone as clips_alone
from running.engine.test_clips import clips, model_error
from running.engine.test_clips import model as clip_model
from spread import whole

pytest.importorskip("transformers")

EXACT = 1e-10
HOW = [
    ("alone", 1),
    ("alone", 2),
    ("ddp", 3),
    ("fsdp2", 2),
    whole("alone", 3),
    whole("alone", 4),
    whole("ddp", 2),
    whole("fsdp2", 3),
]
GIVEN = ((5, 40, 17, 3, 70, 9), (12, 64, 2, 11), (33,), (1, 50, 8, 6, 21))
"""Tokens of the samples of each step: one step has a single sample, so other ranks have none."""


def samples(lengths: tuple[int, ...], seed: int) -> list[dict[str, Any]]:
    """Rollouts: tokens, labels of which some samples have none, an advantage of each token, a
    number of each sample."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for at, count in enumerate(lengths):
        ids = torch.randint(0, VOCABULARY, (count,), generator=draw)
        labels = ids.clone()
        labels[: count // 3] = -100
        if at == 1 and len(lengths) > 1:
            labels[:] = -100
        found.append(
            {
                "input_ids": ids.tolist() if at % 2 else ids,
                "labels": labels,
                "advantages": torch.randn(count, generator=draw, dtype=torch.float64),
                "reward": float(torch.randn((), generator=draw)),
            }
        )
    return found


BATCHES = [samples(lengths, seed) for seed, lengths in enumerate(GIVEN)]
PAIRS = [[(0, 4), (1, 2)], [(1, 3)], [], [(3, 1)]]
"""Samples of each step that a loss compares."""


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


def given(how: str, ranks: int, folder: Path, **options: Any) -> tuple[Attached, Any, Any, Drawn]:
    """A run without a data set, whose plans are drawn at random."""
    model, called = wrapped(how)
    asked = {"longest": 80, "batch_tokens": None, "costs": costs(ranks), **options}
    run = attached(called, sgd(called), None, folder, **asked)
    semantics = "lockstep" if how == "fsdp2" else "free"
    run.engine.planner = drawn = Drawn(ranks=ranks, layers=2, seed=7, semantics=semantics)
    return run, model, called, drawn


def log_probabilities(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[1, s] of the labels; 0 where there is none."""
    flat = cross_entropy(logits[0], labels[0], ignore_index=-100, reduction="none")
    return -flat[None]


def by_tokens(logits: torch.Tensor, micro: Any) -> torch.Tensor:
    """A loss of tokens, each with its advantage."""
    logp = log_probabilities(logits, micro.labels)
    return -(logp * micro.rest["advantages"]).sum() / micro.targets


def by_sequences(logits: torch.Tensor, micro: Any) -> torch.Tensor:
    """A loss that is no sum over tokens, beside one that is."""
    logp = log_probabilities(logits, micro.labels)
    kept = (micro.labels != -100).double()
    mean = micro.per_sequence(logp) / micro.per_sequence(kept).clamp(min=1)
    return (mean.exp() * micro.sequence_share).sum() + by_tokens(logits, micro)


def by_pairs(
    logits: torch.Tensor, micro: Any, pairs: list[tuple[int, int]], sequences: Any = None
) -> torch.Tensor:
    """A loss that compares the samples of each pair, which are kept together."""
    sums = 0.02 * micro.per_sequence(log_probabilities(logits, micro.labels))
    at = {sample: place for place, sample in enumerate(sequences or micro.sequences)}
    loss = (sums.sigmoid() * micro.sequence_share).sum()
    for a, b in pairs:
        assert (a in at) == (b in at)
        if a in at:
            apart = logsigmoid(sums[at[a]] - sums[at[b]])
            loss = loss - apart * micro.sequence_share[at[a]]
    return loss


LOSSES: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "tokens": by_tokens,
    "sequences": by_sequences,
}


def steps_of(how: str, ranks: int, folder: Path, kind: str) -> Any:
    """Losses, weights and strategies of steps over the given batches."""
    run, model, called, drawn = given(how, ranks, folder)
    losses = []
    for batch, pairs in zip(BATCHES, PAIRS, strict=True):
        step = run.step(batch, together=pairs if kind == "pairs" else ())
        for micro in step:
            logits = called(**micro.inputs).logits
            if kind == "pairs":
                micro.backward(by_pairs(logits, micro, pairs))
            else:
                micro.backward(LOSSES[kind](logits, micro))
        losses.append(step.loss)
    return losses, weights(model), drawn.strategies


class Alone:
    """All samples of a batch in one process, as a micro-batch has them."""

    def __init__(self, batch: list[dict[str, Any]]) -> None:
        self.batch = [{k: torch.as_tensor(v) for k, v in item.items()} for item in batch]
        ends = torch.full((1,), -100)
        self.each = [torch.cat([item["labels"][1:], ends])[None] for item in self.batch]
        self.labels = torch.cat(self.each, dim=1)
        self.targets = int((self.labels != -100).sum())
        self.rest = {"advantages": torch.cat([item["advantages"] for item in self.batch])[None]}
        self.sequence_share = torch.full((len(batch),), 1 / len(batch), dtype=torch.float64)

    def per_sequence(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack([x.sum() for x in values[0].split([len(x[0]) for x in self.each])])

    def logits(self, model: Any) -> torch.Tensor:
        return torch.cat([model(input_ids=x["input_ids"][None]).logits for x in self.batch], dim=1)


def alone(kind: str) -> tuple[list[float], list[Any]]:
    """Losses and weights of one process."""
    model = llama()
    optimizer, losses = sgd(model), []
    for batch, pairs in zip(BATCHES, PAIRS, strict=True):
        own = Alone(batch)
        if kind == "pairs":
            loss = by_pairs(own.logits(model), own, pairs, range(len(batch)))
        else:
            loss = LOSSES[kind](own.logits(model), own)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, weights(model)


def require_equal(found: list[Any], wanted: tuple[list[float], list[Any]]) -> None:
    """Losses and weights of all ranks are those of one process."""
    for losses, ends, *strategies in found:
        assert losses == pytest.approx(wanted[0], rel=EXACT)
        assert strategies == list(found[0][2:])
        for mine, own in zip(ends, wanted[1], strict=True):
            np.testing.assert_allclose(mine, own, rtol=0, atol=EXACT)


@pytest.mark.parametrize(("how", "ranks"), HOW)
@pytest.mark.parametrize("kind", ["tokens", "sequences"])
def test_steps_equal_one_process(how: str, ranks: int, kind: str, tmp_path: Path) -> None:
    """Catches a loss of sequences counted by each of its ranks, sums with another adjoint, columns
    cut otherwise than tokens, and a rank without any sample that others wait for."""
    found = run_ranks(ranks, steps_of, how, ranks, tmp_path, kind, timeout_s=60)
    require_equal(found, alone(kind))


@pytest.mark.parametrize(
    ("how", "ranks"), [("alone", 2), ("fsdp2", 2), whole("alone", 1), whole("ddp", 3)]
)
def test_samples_kept_together(how: str, ranks: int, tmp_path: Path) -> None:
    """Catches pairs that plans part, samples that see each other, and numbers of samples that are
    those of their groups."""
    found = run_ranks(ranks, steps_of, how, ranks, tmp_path, "pairs", timeout_s=60)
    require_equal(found, alone("pairs"))


def of_a_data_set(folder: Path, dtype: torch.dtype) -> Any:
    """Losses, numbers of the samples and how often a loss was looked at, of a loop that draws its
    samples, with a loss of sequences."""
    model = llama().to(dtype)
    items = [{k: item[k] for k in ("input_ids", "labels")} for item in BATCHES[0]]
    run = attached(
        model, sgd(model), items, folder, costs=costs(2), batch_tokens=100, shuffle=False, epochs=1
    )
    run.engine.planner = Drawn(ranks=2, layers=2, seed=9)
    losses, looked = [], 0
    for step in run:
        for micro in step:
            looked += micro.checking
            sums = micro.per_sequence(log_probabilities(model(**micro.inputs).logits, micro.labels))
            micro.backward(((0.02 * sums).exp() * micro.sequence_share).sum())
        losses.append((step.loss, len(step.plan.lengths)))
    return losses, looked


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_losses_of_sequences_of_a_data_set(dtype: torch.dtype, tmp_path: Path) -> None:
    """Catches sums that only given batches have, a share of another type than the model's, and a
    check that refuses what was rounded."""
    model = llama()
    optimizer, wanted, at = sgd(model), [], 0
    found = run_ranks(2, of_a_data_set, tmp_path, dtype, timeout_s=60)
    for _, count in found[0][0]:
        own = Alone(BATCHES[0][at : at + count])
        sums = own.per_sequence(log_probabilities(own.logits(model), own.labels))
        loss = (0.02 * sums).exp().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(float(loss.detach()))
        at += count
    assert at == len(BATCHES[0])
    for losses, looked in found:
        exact = EXACT if dtype == torch.float64 else 1e-5
        assert [loss for loss, _ in losses] == pytest.approx(wanted, rel=exact)
        assert looked


def token_values(outputs: Any, micro: Any) -> torch.Tensor:
    """The log-probabilities of the local tokens."""
    return log_probabilities(outputs.logits, micro.labels)


def sequence_values(outputs: Any, micro: Any) -> torch.Tensor:
    """The mean log-probability of each sequence."""
    kept = micro.per_sequence((micro.labels != -100).double()).clamp(min=1)
    return micro.per_sequence(token_values(outputs, micro)) / kept


def reference() -> Any:
    """Another model of the same class, in evaluation and frozen."""
    other = llama()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    return other.eval().requires_grad_(False)


def arrays(values: list[torch.Tensor]) -> list[np.ndarray]:
    """Values, as they can be sent."""
    return [np.array(value.tolist()) for value in values]


def copy_of(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank has of a parameter."""
    return getattr(parameter, "to_local", lambda: parameter)().detach().clone()


def mapped(how: str, ranks: int, folder: Path) -> Any:
    """Values of tokens, of sequences, and of another model, between two steps."""
    run, model, called, _ = given(how, ranks, folder, logits=how == "fsdp2")
    other = reference()
    if how == "fsdp2":
        for layer in other.model.layers:
            fully_shard(layer)
        fully_shard(other)
    run.map(BATCHES[0], token_values)
    before, found = [copy_of(p) for p in model.parameters()], []
    for batch in BATCHES:
        bare = [{"input_ids": item["input_ids"], "labels": item["labels"]} for item in batch]
        found.append(arrays(run.map(batch, token_values)))
        found.append(arrays(run.map(bare, sequence_values)))
        found.append(arrays(run.map(bare, token_values, model=other)))
    same = [torch.equal(x, copy_of(p)) for x, p in zip(before, model.parameters(), strict=True)]
    grads = [p.grad is None for p in (*model.parameters(), *other.parameters())]
    if how != "fsdp2":
        ids = torch.arange(9)[None]
        with torch.no_grad():
            same.append(torch.equal(other(ids).logits, reference()(ids).logits))
    for micro in run.step(BATCHES[0]):
        micro.backward(called(**micro.inputs).loss)
    run.detach()
    return found, all(same) and all(grads), run.number


@pytest.mark.parametrize(("how", "ranks"), HOW)
def test_values_of_samples(how: str, ranks: int, tmp_path: Path) -> None:
    """Catches tokens of a layout in its own order, values of other samples, a rank without all of
    them, weights or gradients that a forward changes, and a reference that stays spread."""
    found = run_ranks(ranks, mapped, how, ranks, tmp_path, timeout_s=60)
    wanted = []
    for batch in BATCHES:
        own = Alone(batch)
        for fn, model in (
            (token_values, llama()),
            (sequence_values, llama()),
            (token_values, reference()),
        ):
            with torch.no_grad():
                logits = own.logits(model)
            values = log_probabilities(logits, own.labels)
            if fn is sequence_values:
                kept = own.per_sequence((own.labels != -100).double()).clamp(min=1)
                wanted.append(arrays(list(own.per_sequence(values) / kept)))
            else:
                wanted.append(arrays(list(values[0].split([len(x[0]) for x in own.each]))))
    for values, same, number in found:
        assert same
        assert number == 1
        for got, expected in zip(values, wanted, strict=True):
            assert [x.shape for x in got] == [x.shape for x in expected]
            for mine, other in zip(got, expected, strict=True):
                np.testing.assert_allclose(mine, other, rtol=EXACT, atol=EXACT)


def coupled(values: list[torch.Tensor]) -> torch.Tensor:
    """A loss in which every sample meets every other: no micro-batch knows it."""
    ends = torch.stack([v.sum() / max(1, v.numel()) for v in values])
    return (ends[:, None] - ends[None]).exp().mean() + torch.logsumexp(ends, 0)


def two_passes(how: str, ranks: int, folder: Path, kind: str) -> Any:
    """Losses and weights of steps whose losses are of all samples at once."""
    run, model, _, _ = given(how, ranks, folder)
    fn = token_values if kind == "tokens" else sequence_values
    losses = []
    for batch in BATCHES:
        values = [v.requires_grad_() for v in run.map(batch, fn)]
        loss = coupled(values)
        loss.backward()
        step = run.backward(batch, fn, [v.grad for v in values])
        assert step.done
        losses.append(float(loss.detach()))
    return losses, weights(model)


@pytest.mark.parametrize(("how", "ranks"), HOW)
@pytest.mark.parametrize("kind", ["tokens", "sequences"])
def test_two_passes_for_any_loss(how: str, ranks: int, kind: str, tmp_path: Path) -> None:
    """Catches gradients of other samples' values, or counted by the ranks of a micro-batch."""
    found = run_ranks(ranks, two_passes, how, ranks, tmp_path, kind, timeout_s=60)
    model = llama()
    optimizer, losses = sgd(model), []
    for batch in BATCHES:
        own = Alone(batch)
        logp = log_probabilities(own.logits(model), own.labels)
        each = list(logp[0].split([len(x[0]) for x in own.each]))
        if kind == "sequences":
            kept = own.per_sequence((own.labels != -100).double()).clamp(min=1)
            each = list(own.per_sequence(logp) / kept)
        loss = coupled(each)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    require_equal(found, (losses, weights(model)))


def other_passes(folder: Path, kind: str) -> dict[str, tuple[str, bool]]:
    """What is said of second passes with other values than the first, and whether the weights are
    as they were before; of one after maps of another model and by another function."""
    run, model, _, _ = given("alone", 2, folder)
    fn, found = token_values if kind == "tokens" else sequence_values, dict[str, tuple[str, bool]]()
    for case in ("dropout", "weights", "nothing"):
        batch = BATCHES[0]
        values = [v.requires_grad_() for v in run.map(batch, fn)]
        coupled(values).backward()
        hook = model.model.layers[1].register_forward_pre_hook(
            lambda _, given: (torch.nn.functional.dropout(given[0], 0.1), *given[1:])
        )
        if case != "dropout":
            hook.remove()
        with torch.no_grad():
            for parameter in model.parameters() if case == "weights" else ():
                parameter.mul_(1.01)
        if case == "nothing":
            run.map(batch, fn, model=reference())
            run.map(batch, lambda outputs, micro: 2 * fn(outputs, micro))
        before = [x.copy() for x in weights(model)]
        try:
            run.backward(batch, fn, [v.grad for v in values])
            said = "nothing"
        except HeadraceError as error:
            said = str(error)
        hook.remove()
        same = all((x == y).all() for x, y in zip(before, weights(model), strict=True))
        found[case] = said, same and all(p.grad is None for p in model.parameters())
    return found


@pytest.mark.parametrize("kind", ["tokens", "sequences"])
def test_a_second_pass_has_the_values_of_the_first(kind: str, tmp_path: Path) -> None:
    """Catches gradients of one loss by values that are those of another: of states that dropout
    drew anew, or of weights that were changed; and passes that are the same and are refused."""
    for found in run_ranks(2, other_passes, tmp_path, kind, timeout_s=60):
        for case in ("dropout", "weights"):
            text, same = found[case]
            assert text.startswith("values of run.backward"), (case, text)
            assert "others than run.map gave" in text
            assert same, case
        assert found["nothing"] == ("nothing", False)


def exhausted(folder: Path, update: bool) -> Any:
    """Losses, weights and values where the last rank runs out of memory once a step and a map. The
    loop may take the updates: there the map comes before each."""
    run, model, called, drawn = given("ddp", 2, folder, update=update)
    left, found, losses = [0], [], []

    def fail(*_: Any) -> None:
        if run.rank == 1 and left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("no more")

    model.model.layers[1].register_forward_pre_hook(fail)
    for batch in BATCHES:
        if update:
            left[0] = 1
            found.append(arrays(run.map(batch, token_values)))
        left[0] = 1
        step = run.step(batch)
        for micro in step:
            with micro:
                micro.backward(by_tokens(called(**micro.inputs).logits, micro))
        losses.append(step.loss)
        if not update:
            left[0] = 1
            found.append(arrays(run.map(batch, token_values)))
            optimizer = run.engine.runner.optimizer
            optimizer.step()
            optimizer.zero_grad()
    return losses, weights(model), found, len(drawn.failed)


@pytest.mark.parametrize("update", [True, False])
def test_memory_that_runs_out(update: bool, tmp_path: Path) -> None:
    """Catches a pass that is not taken again, values of an attempt that failed, and a pass that
    drops the gradients of a step whose update is still to come."""
    wanted = alone("tokens")
    model = llama()
    with torch.no_grad():
        own = Alone(BATCHES[0])
        first = log_probabilities(own.logits(model), own.labels)[0]
    for losses, ends, found, failed in run_ranks(2, exhausted, tmp_path, update, timeout_s=60):
        require_equal([(losses, ends)], wanted)
        np.testing.assert_allclose(np.concatenate(found[0]), first, rtol=0, atol=EXACT)
        assert failed >= 6


def gone_on(folder: Path, ranks: int, first: int, last: int) -> list[float]:
    """Losses of some of the steps, from wherever the checkpoint stands."""
    run, _, called, _ = given("alone", ranks, folder)
    assert run.load(folder / "saved") == (first > 0)
    assert run.number == first
    losses = []
    for batch in BATCHES[first:last]:
        step = run.step(batch)
        for micro in step:
            micro.backward(by_tokens(called(**micro.inputs).logits, micro))
        losses.append(step.loss)
    run.save(folder / "saved")
    return losses


def test_saved_and_gone_on(tmp_path: Path) -> None:
    """Catches a checkpoint without the optimizer, and a number of steps that begins anew."""
    wanted = alone("tokens")[0]
    losses = run_ranks(2, gone_on, tmp_path, 2, 0, 2)[0]
    losses += run_ranks(1, gone_on, tmp_path, 1, 2, 4)[0]
    assert losses == pytest.approx(wanted, rel=EXACT)


def planned(folder: Path) -> Any:
    """Losses of a plain module that the run measures and plans itself, and tokens of its values."""
    model = gpt()
    batches = [[{"ids": x["input_ids"]} for x in batch] for batch in BATCHES]
    run = attached(
        model,
        sgd(model),
        None,
        folder,
        longest=64,
        batch_tokens="192",
        example=batches[0][0],
        labels="next",
        out=folder / "run",
    )
    losses = []
    for batch in batches[1:3]:
        step = run.step(batch)
        for micro in step:
            micro.backward(micro.loss(model(micro.inputs["ids"])[0]))
        assert step.plan.predicted_s > 0
        losses.append(step.loss)
    values = run.map(batches[1], lambda outputs, micro: outputs[0].sum(-1))
    run.detach()
    return losses, [len(v) for v in values]


def test_a_run_plans_for_itself(tmp_path: Path) -> None:
    """Catches an example that nothing can be measured with, a planner that learns of no step, and a
    record without a beginning."""
    model = gpt()
    optimizer, wanted = sgd(model), []
    for batch in BATCHES[1:3]:
        rows = [torch.as_tensor(x["input_ids"])[None] for x in batch]
        count = sum(row.shape[1] - 1 for row in rows)
        parts = [cross_entropy(model(x)[0][0, :-1], x[0, 1:], reduction="sum") for x in rows]
        loss = torch.stack(parts).sum() / count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(float(loss.detach()))
    for losses, counts in run_ranks(2, planned, tmp_path, timeout_s=100):
        assert losses == pytest.approx(wanted, rel=EXACT)
        assert counts == list(GIVEN[1])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == pytest.approx(wanted, rel=EXACT)


def clip_steps(folder: Path) -> Any:
    """Losses and weights of a model of several axes whose clips are given."""
    own = clip_model()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.05, momentum=0.9)
    data = clips()
    run = attached(
        hr.adapt(own),
        optimizer,
        None,
        folder,
        longest=20,
        example=data[2],
        costs=costs(2),
        batch_tokens=None,
    )
    run.engine.planner = Drawn(ranks=2, layers=2, seed=4, levels=("none", "full"))
    losses = []
    for numbers in CLIPS:
        step = run.step([data[i] for i in numbers])
        for micro in step:
            micro.backward(model_error(own, micro).square().sum() / micro.targets)
        losses.append(step.loss)
    with pytest.raises(ModelError, match="several axes"):
        run.map(data, lambda outputs, micro: outputs)
    return losses, weights(own)


def test_clips_are_given(tmp_path: Path) -> None:
    """Catches a batch that is one of tokens alone."""
    wanted = clips_alone(CLIPS)
    require_equal(run_ranks(2, clip_steps, tmp_path, timeout_s=60), wanted)
