"""Losses of what modules keep aside in a forward, and the model does not return: exact, or refused
by name on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import headrace as hr
from headrace.errors import ModelError
from ranks import run_ranks
from running.adopt.axial import DIMS, stages, table
from running.adopt.foreign import Gpt, drawn, gpt
from running.engine.loops import attached, batches, costs, dataset, llama, trained, weights

EXACT = 1e-10


class Router(nn.Module):
    """Weighs four experts for each token, and keeps its scores or something made of them."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.score = nn.Linear(features, 4)
        self.experts = nn.Linear(features, 4)
        self.make: Callable[[Router, torch.Tensor], torch.Tensor] = lambda _, scores: scores
        self.aside: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.score(x)
        self.aside = self.make(self, scores)
        return x * (scores.softmax(-1) * self.experts(x)).sum(-1, keepdim=True).tanh()


def balance(_: Router, scores: torch.Tensor) -> torch.Tensor:
    """How unevenly experts are used, as by Switch Transformers."""
    flat = scores.flatten(0, 1).softmax(-1)
    chosen = nn.functional.one_hot(flat.argmax(-1), 4).to(flat)
    return 4 * (chosen.mean(0) * flat.mean(0)).sum()


Make = Callable[[Router, torch.Tensor], torch.Tensor]
WRONG: dict[str, tuple[Make, str]] = {
    "balance": (balance, "a mean over tokens"),
    "a mean of rows": (lambda _, x: x.softmax(-1).mean((0, 1)).square().sum(), "a mean over"),
    "logarithms": (lambda _, x: x.logsumexp(-1).square().mean(), "a mean over tokens"),
    "a sum over a count": (
        lambda _, x: (x.softmax(-1).sum((0, 1)) / x.shape[:2].numel()).sum(),
        "sums over tokens of one rank that a module multiplies or divides",
    ),
    "a square of a sum": (lambda _, x: x.sum((0, 1)).square().sum() * 1e-3, "not linear"),
    "a deviation": (lambda _, x: x.transpose(1, 2).std(-1).sum(), "a deviation over tokens"),
    "the first token": (lambda _, x: x[:, 0].square().sum(), "some of the places"),
}
EXACTLY: dict[str, Make] = {
    "a penalty": lambda router, _: router.score.weight.square().mean(),
    "a sum": lambda _, x: x.square().sum(),
    "scores": lambda _, x: x.softmax(-1),
}


def model_of(make: Make, *, checkpointed: bool = False) -> Gpt:
    model = gpt(other=Router, checkpointed=checkpointed)
    for router in routers(model):
        router.make = make
    return model


def routers(model: nn.Module) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


def added(model: nn.Module, share: float) -> torch.Tensor:
    """The sum of what is kept: with its share, or over all tokens."""
    kept = [router.aside for router in routers(model)]
    return 0.1 * share * sum(x.square().sum() if x.dim() else x for x in kept)  # type: ignore[union-attr]


def _error_of_gradients(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((p.grad - q.grad).abs().max()) for p, q in pairs)  # type: ignore[operator]


def _refused(how: str, checkpointed: bool) -> str:
    """What is said of a loss of this kind."""
    model = model_of(WRONG[how][0], checkpointed=checkpointed)
    run = hr.compile(model)
    loss = run(**run.shard(drawn(2, 20)).inputs)[1] + added(model, run.share)
    with pytest.raises(ModelError) as caught:
        run.backward(loss)
    assert all(p.grad is None for p in model.parameters())
    return str(caught.value)


@pytest.mark.parametrize("how", WRONG)
def test_what_modules_make_of_tokens_of_one_rank_is_refused(how: str) -> None:
    """Catches the mean of a rank in the place of that of all."""
    for said in run_ranks(2, _refused, how, False):
        assert WRONG[how][1] in said
        assert "run.share * of run.mean(values)" in said


def test_so_it_is_in_a_checkpoint() -> None:
    for said in run_ranks(2, _refused, "balance", True):
        assert "a mean over tokens" in said


def _exact(how: str) -> tuple[float, float, float]:
    """(loss, that of one process, error of gradients), of two forwards and their backwards."""
    model = model_of(EXACTLY[how])
    other = copy.deepcopy(model)
    run = hr.compile(model)
    kept, found, wanted = [], 0.0, 0.0
    for seed in range(2):
        loss = run(**run.shard(drawn(2, 20, seed)).inputs)[1]
        share = run.share if how == "a penalty" else 1.0
        kept.append(loss + added(model, share))
    for loss in kept:
        run.backward(loss)
        found += loss.detach()
    total = run.add_up(found)
    for seed in range(2):
        loss = other(**drawn(2, 20, seed))[1] + added(other, 1.0)
        loss.backward()
        wanted += loss.item()
    return float(total), wanted, _error_of_gradients(model, other)


@pytest.mark.parametrize("how", EXACTLY)
def test_sums_and_penalties_that_are_kept_are_exact(how: str) -> None:
    for found, wanted, error in run_ranks(2, _exact, how):
        assert found == pytest.approx(wanted, rel=EXACT)
        assert error < EXACT


def _of_all() -> tuple[float, float, float]:
    """The same, of means over all tokens that the loss makes of kept scores."""
    model = model_of(lambda _, x: x.softmax(-1))
    other = copy.deepcopy(model)
    run = hr.compile(model)
    loss = run(**run.shard(drawn(2, 20)).inputs)[1]
    for router in routers(model):
        loss = loss + 0.1 * run.share * run.mean(router.aside).square().sum()
    run.backward(loss)
    found = float(run.add_up(loss))
    wanted = other(**drawn(2, 20))[1]
    for router in routers(other):
        assert router.aside is not None
        wanted = wanted + 0.1 * router.aside.mean((0, 1)).square().sum()
    wanted.backward()
    return found, wanted.item(), _error_of_gradients(model, other)


def _by_axis(how: str) -> tuple[float, float, float] | str:
    """(loss, that of one process, error of gradients) of a model spread by an axis of 5 places on 2
    ranks, or what is said of its loss. What the first block keeps is sharded by another axis."""
    model, draw = table(), torch.Generator().manual_seed(0)
    shape = (1, 5, 4, 7 if "uneven" in how else 6, 8)
    other, x = copy.deepcopy(model), torch.randn(shape, dtype=torch.float64, generator=draw)
    run = hr.adapt(model, stages=stages(returns=False), inputs={"x": DIMS}, axis="i", batch="b")
    kept = [torch.zeros(())]
    for each in (model, other):
        each.blocks[0]["i"].register_forward_hook(lambda _, __, out: kept.append(out))
    add = AXES[how.removesuffix(", uneven")]
    loss = run(**run.shard({"x": x})).square().sum() / x.numel()
    loss = loss + run.share * add(kept[-1]) if "mean" in how else loss + add(kept[-1])
    try:
        run.backward(loss)
    except ModelError as error:
        return str(error)
    found = float(run.add_up(loss))
    wanted = other(x).square().mean()
    wanted = wanted + add(kept[-1])
    wanted.backward()
    return found, wanted.item(), _error_of_gradients(model, other)


AXES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a mean": lambda x: x.square().mean(),
    "a square of a mean": lambda x: x.mean((1, 2, 3)).square().sum(),
    "a sum": lambda x: x.square().sum() / 960,
    "a root": lambda x: x.square().sum().sqrt(),
}


@pytest.mark.parametrize("how", ["a mean", "a sum", "a sum, uneven"])
def test_what_is_kept_by_models_that_are_spread_by_an_axis_is_exact(how: str) -> None:
    """Means of as many places on every rank, too."""
    for found, wanted, error in run_ranks(2, _by_axis, how):
        assert found == pytest.approx(wanted, rel=EXACT)
        assert error < EXACT


@pytest.mark.parametrize("how", ["a mean, uneven", "a square of a mean", "a root"])
def test_means_of_what_is_kept_along_an_axis_are_refused(how: str) -> None:
    for said in run_ranks(2, _by_axis, how):
        assert "places of one rank" in said


def in_a_loop(folder: Path, how: str) -> Any:
    """What is said of a loss of kept states in a loop; its losses and weights where nothing is."""
    pytest.importorskip("transformers")
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = attached(model, optimizer, dataset(), folder, costs=costs(dist.get_world_size()), steps=2)
    kept = keep(model)
    try:
        return trained(run, model, lambda model, micro: LOOPS[how](model, micro, kept)), weights(
            model
        )
    except ModelError as error:
        return str(error)


def keep(model: Any) -> list[torch.Tensor]:
    """A list that has the last result of the first layer."""
    kept = [torch.zeros(())]

    def after(_: Any, __: Any, out: Any) -> None:
        kept[0] = out[0] if isinstance(out, tuple) else out

    model.model.layers[0].register_forward_hook(after)
    return kept


def _of_labelled(model: Any, micro: Any, kept: list[torch.Tensor]) -> torch.Tensor:
    loss = model(**micro.inputs).loss
    of_tokens = kept[0].square().sum(-1) * (micro.labels != -100)
    return loss + 0.1 * of_tokens.sum() / micro.targets


LOOPS: dict[str, Callable[[Any, Any, list[torch.Tensor]], torch.Tensor]] = {
    "a mean": lambda model, micro, kept: (
        model(**micro.inputs).loss + micro.share * kept[0].square().mean()
    ),
    "of labelled tokens": _of_labelled,
}


def test_means_over_all_tokens_of_what_is_kept_are_exact() -> None:
    for found, wanted, error in run_ranks(2, _of_all):
        assert found == pytest.approx(wanted, rel=EXACT)
        assert error < EXACT


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_mean_of_one_micro_batch_is_refused_in_a_loop(ranks: int, tmp_path: Path) -> None:
    """Catches a balance of experts that follows the plan."""
    for said in run_ranks(ranks, in_a_loop, tmp_path, "a mean"):
        assert "a mean over tokens of one rank" in said
        assert "a mean over one micro-batch follows the plan" in said


def test_sums_of_kept_states_are_exact_in_a_loop(tmp_path: Path) -> None:
    model = llama()
    kept, wanted = keep(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches(dataset(), 2, batch_tokens=150):
        items = [batch.read(at) for at in range(len(batch.lengths))]
        targets = sum(int((item["labels"] != -100).sum()) for item in items)
        total = 0.0
        for item in items:
            logits, labels = model(input_ids=item["input_ids"][None]).logits[0], item["labels"]
            summed = nn.functional.cross_entropy(logits, labels, reduction="sum")
            of_tokens = kept[0][0].square().sum(-1) * (labels != -100)
            loss = (summed + 0.1 * of_tokens.sum()) / targets
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(total)
    for losses, mine in run_ranks(2, in_a_loop, tmp_path, "of labelled tokens"):
        assert losses == pytest.approx(wanted, rel=EXACT)
        for one, other in zip(mine, weights(model), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=EXACT)
