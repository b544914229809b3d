"""What a loop of one's own may do: exact, or refused by name on every rank."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    kl_div,
    l1_loss,
    log_softmax,
    one_hot,
)

from headrace import SpreadOptions
from headrace.adopt.held_weights import AlikeWeights
from headrace.adopt.samples import TokenReader
from headrace.data.sampler import Sampler, SamplerOptions
from headrace.engine.sample_order import DrawnOrder, Samples, StreamOrder
from headrace.errors import DataError, HeadraceError, ModelError, SpecError
from ranks import run_ranks
from running.adopt.foreign import gpt
from running.engine.loops import (
    Drawn,
    attached,
    batches,
    costs,
    dataset,
    llama,
    may_have_children,
    trained,
    weights,
)
from running.engine.loops import alone as one_process
from spread import whole

pytest.importorskip("transformers")

Loss = Callable[[Any, Any], torch.Tensor]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def local(model: Any, micro: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits [n, V], labels [n]) of the local tokens that have a label."""
    inputs = {name: value for name, value in micro.inputs.items() if name != "labels"}
    logits, labels = model(**inputs).logits[0], micro.labels[0]
    return logits[labels != -100], labels[labels != -100]


def penalty(model: Any) -> torch.Tensor:
    return 1e-2 * sum(p.square().sum() for p in model.parameters())


def gathered_mean(model: Any, micro: Any) -> torch.Tensor:
    logits, labels = local(model, micro)
    return -log_softmax(logits, -1).gather(1, labels[:, None]).mean()


def two_means(model: Any, micro: Any) -> torch.Tensor:
    logits, labels = local(model, micro)
    return cross_entropy(logits, labels) + 0.1 * cross_entropy(2 * logits, labels)


def binary(model: Any, micro: Any) -> torch.Tensor:
    logits, labels = local(model, micro)
    return binary_cross_entropy_with_logits(logits, one_hot(labels, logits.shape[1]).double())


def divergence(model: Any, micro: Any) -> torch.Tensor:
    logits, labels = local(model, micro)
    wanted = torch.full_like(logits, 1 / logits.shape[1])
    return kl_div(log_softmax(logits, -1), wanted, reduction="batchmean") + 0 * labels.sum()


def distance(model: Any, micro: Any) -> torch.Tensor:
    logits, labels = local(model, micro)
    return l1_loss(logits, one_hot(labels, logits.shape[1]).double())


def with_penalty(model: Any, micro: Any) -> torch.Tensor:
    return model(**micro.inputs).loss + penalty(model)


def count_of_its_own(model: Any, micro: Any) -> torch.Tensor:
    logits, labels = local(model, micro)
    return cross_entropy(logits, labels, reduction="sum") / max(1, len(labels))


def every_token(model: Any, micro: Any) -> torch.Tensor:
    """Tokens whose label is to be ignored, too."""
    inputs = {name: value for name, value in micro.inputs.items() if name != "labels"}
    return model(**inputs).logits.logsumexp(-1).sum() / micro.targets


def by_token(
    formula: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor],
) -> Loss:
    """The loss by a formula of logits [n, V], labels [n] and losses [n] of the local tokens, 0
    where there is no label, and the targets of the step."""

    def loss(model: Any, micro: Any) -> torch.Tensor:
        inputs = {name: value for name, value in micro.inputs.items() if name != "labels"}
        logits, labels = model(**inputs).logits[0], micro.labels[0]
        each = cross_entropy(logits, labels, reduction="none")
        return formula(logits, labels, each, micro.targets)

    return loss


def scored(logits: torch.Tensor, labels: torch.Tensor, each: torch.Tensor, n: int) -> torch.Tensor:
    """The policy gradient of rewards that are normalized over one micro-batch: its value is 0."""
    own = each[labels != -100]
    reward = (own.detach() - own.detach().mean()) / own.detach().std()
    return ((own - own.detach()) * reward).sum() / n


WRONG: dict[str, tuple[Loss, str]] = {
    "self-normalized": (
        by_token(lambda x, y, each, n: (each / each[y != -100].detach().mean()).sum() / n),
        "another gradient of a token.*run.map",
    ),
    "normalized rewards": (by_token(scored), "another gradient of a token"),
    "balance": (
        by_token(lambda x, y, each, n: each.sum() / n + x.softmax(-1).mean(0).square().sum() / n),
        "a mean over tokens of one rank",
    ),
    "temperature": (
        by_token(lambda x, y, each, n: cross_entropy(x / x.detach().std(), y, reduction="sum") / n),
        "two halves of the labels",
    ),
    "shifted once more": (
        by_token(lambda x, y, each, n: cross_entropy(x[:-1], y[1:], reduction="sum") / n),
        "some of the places of one rank.*not shifted once more",
    ),
    "the last tokens": (
        by_token(lambda x, y, each, n: each[-3:].sum() / n),
        "some of the places of one rank",
    ),
    "the largest half": (
        by_token(lambda x, y, each, n: each.topk(len(each) // 2 + 1)[0].sum() / n),
        "the largest over tokens of one rank",
    ),
    "gathered mean": (gathered_mean, r"whatever micro\.targets is"),
    "two means": (two_means, r"whatever micro\.targets is"),
    "binary": (binary, r"whatever micro\.targets is"),
    "batchmean": (divergence, r"whatever micro\.targets is"),
    "l1": (distance, r"whatever micro\.targets is"),
    "penalty": (with_penalty, r"micro\.share \* penalty"),
    "a count of its own": (count_of_its_own, r"whatever micro\.targets is"),
    "every token": (every_token, "two halves of the labels"),
}


def refused(ranks: int, name: str, folder: Path) -> tuple[str, bool]:
    """What is said of a loss, and whether the weights are as they were."""
    model = llama()
    before = weights(llama())
    run = attached(model, sgd(model), dataset(), folder, costs=costs(ranks), steps=2)
    try:
        trained(run, model, WRONG[name][0])
    except ModelError as error:
        same = all(map(np.array_equal, weights(model), before))
        return str(error), same and all(p.grad is None for p in model.parameters())
    return "nothing", False


def all_refused(ranks: int, folder: Path) -> dict[str, tuple[str, bool]]:
    return {name: refused(ranks, name, folder / str(at)) for at, name in enumerate(WRONG)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_no_sum_is_refused_on_every_rank(ranks: int, tmp_path: Path) -> None:
    """Catches means by any formula, terms that are counted once for each micro-batch, statistics of
    one micro-batch, and tokens by their places: losses or gradients would be others than those of
    one process."""
    for said in run_ranks(ranks, all_refused, ranks, tmp_path, timeout_s=100):
        for name, (text, same) in said.items():
            assert re.search(f"loss of a (micro-batch|part).*{WRONG[name][1]}", text), (name, text)
            assert same, name


def changing(folder: Path, later: Loss) -> tuple[str, list[int]]:
    """What is said of a loss that is another from the second step on, and the numbers of the steps
    in which losses were looked at."""
    model, looked = llama(), list[int]()
    run = attached(model, sgd(model), dataset(), folder, costs=costs(2), steps=5)
    try:
        for number, step in enumerate(run):
            for micro in step:
                looked += [number] * micro.checking
                loss = model(**micro.inputs).loss
                micro.backward(loss + later(model, micro) if number else loss)
    except ModelError as error:
        return str(error), looked
    return "nothing", looked


@pytest.mark.parametrize("right", [True, False])
def test_a_loss_that_changes_is_looked_at_again(right: bool, tmp_path: Path) -> None:
    """Catches a mean over a micro-batch that a loop adds later; and looks at every step."""
    term = by_token(lambda x, y, each, n: each.square().sum() / n)
    for said, looked in run_ranks(2, changing, tmp_path, term if right else gathered_mean):
        assert sorted({*looked}) == [0, 2]
        assert (said == "nothing") if right else re.search("loss of a (micro-batch|part)", said)


def ppo(x: torch.Tensor, y: torch.Tensor, each: torch.Tensor, n: int) -> torch.Tensor:
    """The clipped objective of PPO, with an estimate of the divergence from a fixed policy."""
    ratio, worth = (each.detach() - each).exp(), each.detach() - 3
    gain = torch.minimum(ratio * worth, ratio.clamp(0.8, 1.2) * worth)
    away = (each - 4).exp() - (each - 4) - 1
    return ((0.1 * away - gain) * (y != -100)).sum() / n


def of_states(model: Any, micro: Any) -> torch.Tensor:
    """A loss of the last hidden states, by the head, with a term of those between layers."""
    inputs = {name: value for name, value in micro.inputs.items() if name != "labels"}
    states = model(**inputs, output_hidden_states=True).hidden_states
    labels = micro.labels[0]
    each = cross_entropy(model.lm_head(states[-1])[0], labels, reduction="none")
    return (each + 0.1 * states[1][0].square().sum(-1) * (labels != -100)).sum() / micro.targets


def distilled(model: Any, micro: Any) -> torch.Tensor:
    """The divergence from the model's own scores, which have no gradient, and a term of sizes."""
    inputs = {name: value for name, value in micro.inputs.items() if name != "labels"}
    with torch.no_grad():
        wanted = model(**inputs).logits.log_softmax(-1)
    logits = model(**inputs).logits
    away = (wanted.exp() * (wanted - logits.log_softmax(-1))).sum(-1)
    return ((away + logits.square().mean(-1)) * (micro.labels != -100)).sum() / micro.targets


RIGHT: dict[str, Loss] = {
    "hidden states": of_states,
    "distilled": distilled,
    "chunks": by_token(
        lambda x, y, each, n: (
            sum(
                cross_entropy(a, b, reduction="sum")
                for a, b in zip(x.split(7), y.split(7), strict=True)
            )
            / n
        )
    ),
    "smoothed": by_token(
        lambda x, y, each, n: cross_entropy(x, y, label_smoothing=0.1, reduction="sum") / n
    ),
    "focal and z": by_token(
        lambda x, y, each, n: (
            (
                (each * (1 - (-each).exp()) ** 2).sum()
                + 1e-2 * (x.logsumexp(-1).square() * (y != -100)).sum()
            )
            / n
        )
    ),
    "entropy": by_token(
        lambda x, y, each, n: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1)[y != -100].sum() / n
    ),
    "of the worst scores": by_token(
        lambda x, y, each, n: (
            (x.topk(3, -1)[0].sum(-1) * (y != -100) * (each.detach() > 4)).sum() / n
        )
    ),
    "ppo": by_token(ppo),
    "score": by_token(lambda x, y, each, n: ((each - each.detach()) * each.detach()).sum() / n),
    "classes weighed": by_token(
        lambda x, y, each, n: (
            cross_entropy(
                x, y, weight=torch.linspace(0.5, 2, x.shape[-1]).double(), reduction="sum"
            )
            / n
        )
    ),
}


def all_trained(ranks: int, folder: Path) -> dict[str, tuple[list[float], Any]]:
    """Losses and weights of a step by each loss."""
    found = dict[str, tuple[list[float], Any]]()
    for at, (name, loss) in enumerate(RIGHT.items()):
        model = llama()
        run = attached(model, sgd(model), dataset(), folder / str(at), costs=costs(ranks), steps=1)
        found[name] = trained(run, model, loss), weights(model)
    return found


@pytest.mark.parametrize("ranks", [2, whole(3)])
def test_losses_of_tokens_are_exact(ranks: int, tmp_path: Path) -> None:
    """Catches sums over tokens that are refused, and losses or gradients that are not those of one
    process."""
    results = run_ranks(ranks, all_trained, ranks, tmp_path, timeout_s=100)
    (batch,) = batches(dataset(), 1, batch_tokens=150)
    items = [batch.read(at) for at in range(len(batch.lengths))]
    targets = sum(int((item["labels"] != -100).sum()) for item in items)
    for name, formula in RIGHT.items():
        model, total = llama(), torch.zeros((), dtype=torch.float64)
        for item in items:
            whole_sample = SimpleNamespace(
                inputs={"input_ids": item["input_ids"][None]},
                labels=item["labels"][None],
                targets=targets,
            )
            total = total + formula(model, whole_sample)
        total.backward()
        sgd(model).step()
        for losses, mine in (found[name] for found in results):
            assert losses == pytest.approx([float(total.detach())], rel=1e-10, abs=1e-12), name
            for one, other in zip(mine, weights(model), strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=1e-10, err_msg=name)


def shifted_before(folder: Path) -> tuple[list[float], Any]:
    """A step with labels that stand in the places that predict them, of a model whose own loss
    shifts them."""
    model = llama()
    options = {"costs": costs(2), "steps": 1, "labels": "same"}
    run = attached(model, sgd(model), dataset(), folder, **options)
    return trained(run, model), weights(model)


def test_labels_that_were_shifted_before(tmp_path: Path) -> None:
    """Catches the loss of a causal model in the place of that of the labels as they stand."""
    results = run_ranks(2, shifted_before, tmp_path)
    (batch,) = batches(dataset(), 1, batch_tokens=150)
    given = {tuple(item["input_ids"].tolist()): item["labels"] for item in dataset()}
    model, total, targets = llama(), torch.zeros((), dtype=torch.float64), 0
    for at in range(len(batch.lengths)):
        ids = batch.read(at)["input_ids"]
        labels = given[tuple(ids.tolist())]
        logits = model(input_ids=ids[None]).logits[0]
        total = total + cross_entropy(logits, labels, reduction="sum")
        targets += int((labels != -100).sum())
    (total / targets).backward()
    sgd(model).step()
    for losses, mine in results:
        assert losses == pytest.approx([float(total.detach()) / targets], rel=1e-10)
        for one, other in zip(mine, weights(model), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


def shifted_in_a_graph(folder: Path) -> str:
    """What is said of labels that a loop shifts once more, beside a compiled model."""
    model = gpt()
    items = [
        {"ids": item["input_ids"] % 50, "labels": item["input_ids"] % 50} for item in dataset()
    ]
    spread = SpreadOptions(backend="eager")
    run = attached(model, sgd(model), items, folder, costs=costs(2), labels="same", spread=spread)

    def loss(model: Any, micro: Any) -> torch.Tensor:
        logits = model(micro.inputs["ids"])[0][0]
        return cross_entropy(logits[:-1], micro.labels[0, 1:], reduction="sum") / micro.targets

    with pytest.raises(ModelError) as caught:
        trained(run, model, loss)
    return str(caught.value)


def test_results_of_compiled_models_are_looked_at(tmp_path: Path) -> None:
    """Catches a loss that is not looked at as its model runs in a graph."""
    for said in run_ranks(2, shifted_in_a_graph, tmp_path, timeout_s=100):
        assert "some of the places of one rank" in said


class Switched(torch.nn.Module):
    """Subtracts the mean of all tokens where a flag says so."""

    def __init__(self) -> None:
        super().__init__()
        self.mixes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(1, keepdim=True) if self.mixes else x


def changed_later(folder: Path, how: str) -> tuple[int, str]:
    """(steps done, what is said) of a loop that changes its model after the first step."""
    model: Any = llama()
    model.model.layers[0].post_attention_layernorm = torch.nn.Sequential(
        model.model.layers[0].post_attention_layernorm, Switched()
    )
    run = attached(model, sgd(model), dataset(), folder, costs=costs(2), steps=3)
    done = 0
    try:
        for step in run:
            for micro in step:
                micro.backward(model(**micro.inputs).loss)
            done += 1
            if how == "a flag":
                model.model.layers[0].post_attention_layernorm[1].mixes = True
            elif how == "a module":
                model.model.layers[0].post_attention_layernorm[1] = Switched()
                model.model.layers[0].post_attention_layernorm[1].mixes = True
            else:
                model.model.layers[0].post_attention_layernorm[1] = torch.nn.Identity()
    except ModelError as error:
        return done, str(error)
    return done, ""


@pytest.mark.parametrize("how", ["a flag", "a module", "what does nothing"])
def test_models_that_change_in_a_loop_are_looked_at(how: str, tmp_path: Path) -> None:
    """Catches tokens that are mixed from the second step on."""
    for done, said in run_ranks(2, changed_later, tmp_path, how):
        assert done == (3 if how == "what does nothing" else 1)
        assert ("another result for token" in said) == (how != "what does nothing")


def weighted(model: Any, micro: Any) -> torch.Tensor:
    """As in reinforcement learning: a value of each token, one of each sample, and a penalty."""
    inputs = {name: value for name, value in micro.inputs.items() if name != "labels"}
    labels = micro.labels[0]
    logged = log_softmax(model(**inputs).logits[0], -1)
    picked = logged.gather(1, labels.clamp(min=0)[:, None])[:, 0] * (labels != -100)
    worth = micro.rest["advantages"][0] * micro.rest["reward"][0]
    return -(picked * worth).sum() / micro.targets + micro.share * penalty(model)


def columns() -> list[dict[str, Any]]:
    """Samples with a value of each token and one of the sample; masks of their own."""
    drawn = torch.Generator().manual_seed(4)
    return [
        {
            **item,
            "advantages": torch.rand(len(item["input_ids"]), generator=drawn, dtype=torch.float64),
            "reward": 0.5 + at,
            "text": "not a number",
        }
        for at, item in enumerate(dataset())
    ]


def rewarded(ranks: int, folder: Path) -> tuple[list[float], Any, list[bool]]:
    """Losses, weights, and whether the loss was only looked at, of every call of one step."""
    model, looked = llama(), list[bool]()
    run = attached(model, sgd(model), columns(), folder, costs=costs(ranks), steps=2)

    def loss(model: Any, micro: Any) -> torch.Tensor:
        looked.append(micro.checking)
        return weighted(model, micro)

    return trained(run, model, loss), weights(model), looked


def alone() -> tuple[list[float], Any]:
    """The same of one process that knows nothing of headrace but the order of the samples."""
    model, losses = llama(), []
    optimizer = sgd(model)
    for batch in batches(columns(), 2, batch_tokens=150):
        items = [batch.read(i) for i in range(len(batch.lengths))]
        targets = sum(int((item["labels"] != -100).sum()) for item in items)
        total = penalty(model)
        for item in items:
            labels = item["labels"]
            logged = log_softmax(model(input_ids=item["input_ids"][None]).logits[0], -1)
            picked = logged.gather(1, labels.clamp(min=0)[:, None])[:, 0] * (labels != -100)
            total = total - (picked * item["advantages"] * item["reward"]).sum() / targets
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()))
    return losses, weights(model)


@pytest.mark.parametrize("ranks", [1, 2, whole(3)])
def test_columns_travel_with_their_tokens(ranks: int, tmp_path: Path) -> None:
    """Catches values that are cut at other places than their tokens, rewards of other samples, and
    penalties that are counted by micro-batches."""
    losses, ends = alone()
    for got, mine, looked in run_ranks(ranks, rewarded, ranks, tmp_path, timeout_s=120):
        assert got == pytest.approx(losses, rel=1e-10)
        assert looked[:3] == [True] * 3
        assert not all(looked)
        for one, other in zip(mine, ends, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


IDS = torch.arange(7)

ITEMS: dict[str, tuple[Any, str]] = {
    "shifted by hand": ({"ids": IDS[:-1], "labels": IDS}, r"shape \[7\], wanted \[6\]"),
    "one class of a sample": ({"ids": IDS, "labels": 3}, "label_place"),
    "one class in a list": ({"ids": IDS, "labels": [3]}, "label_place"),
    "no labels": ({"ids": IDS}, r"got none, wanted \[7\]"),
    "labels that are words": ({"ids": IDS, "labels": ["a"] * 7}, "no numbers"),
    "a mask where labels stand": ((IDS, torch.ones(7), IDS), "a tuple of 3"),
    "values to be fitted": ({"ids": IDS, "labels": torch.rand(7)}, "fractions.*micro.rest"),
    "a value of a sample": ({"ids": IDS, "labels": 0.7}, "fractions"),
    "values of others": ({"ids": IDS, "labels": IDS, "old": [1, 2]}, "columns that the loop does"),
    "a collated batch": ({"ids": IDS[None], "labels": IDS[None]}, "batch_size=None"),
    "padding alone": (
        {"ids": IDS, "labels": IDS, "attention_mask": torch.zeros(7)},
        "some ones",
    ),
    "a hole in the mask": (
        {"ids": IDS, "labels": IDS, "attention_mask": torch.tensor([0, 1, 1, 0, 0, 1, 1])},
        "attention_mask of .*: got ones on both sides of zeros",
    ),
    "a mask of pairs of tokens": (
        {"ids": IDS, "labels": IDS, "attention_mask": torch.ones(7, 7).tril()},
        r"attention_mask of .*: got shape \[7, 7\], wanted \[7\]",
    ),
}


@pytest.mark.apart
@pytest.mark.parametrize("what", ITEMS)
def test_labels_are_never_replaced(what: str, tmp_path: Path) -> None:
    """Catches tokens that are trained in the place of labels that do not fit them."""
    item, words = ITEMS[what]
    model = gpt()
    with pytest.raises(DataError, match=words):
        attached(model, sgd(model), [item] * 3, tmp_path, costs=costs(1), labels="same")


@pytest.mark.apart
def test_items_with_other_columns_are_told(tmp_path: Path) -> None:
    """Catches a pack in which some samples have a column that others lack."""
    items = [{"input_ids": IDS, "labels": IDS}, {"input_ids": IDS}]
    model = llama()
    with pytest.raises(DataError, match="as of the first item"):
        attached(model, sgd(model), items, tmp_path, costs=costs(1))


def classified(place: str, folder: Path) -> list[float]:
    """Losses of samples with one class each, which their first or last token has."""
    items = [{"ids": torch.arange(n) % 50, "labels": n % 7} for n in (4, 9, 13, 6)]
    model = gpt()
    run = attached(
        model, sgd(model), items, folder, costs=costs(2), labels="same", label_place=place, steps=1
    )
    return trained(run, model, lambda m, micro: micro.loss(m(micro.inputs["ids"])[0]))


@pytest.mark.parametrize("place", ["first", "last"])
def test_one_label_of_a_sample_has_a_token(place: str, tmp_path: Path) -> None:
    """Catches a class that is trained at every token, or at another one."""
    model, total = gpt(), 0.0
    for n in (4, 9, 13, 6):
        logits = model((torch.arange(n) % 50)[None])[0][0]
        at = 0 if place == "first" else n - 1
        total += float(cross_entropy(logits[at][None], torch.tensor([n % 7])).detach()) / 4
    for got in run_ranks(2, classified, place, tmp_path, timeout_s=100):
        assert got == pytest.approx([total], rel=1e-9)


def bert() -> Any:
    """A small BERT, whose embeddings of the two segments differ."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config).double().train()


def segmented() -> list[dict[str, Any]]:
    """Samples of two segments with masks as tokenizers give them."""
    return [
        {
            "input_ids": torch.arange(n) * 7 % 61,
            "labels": torch.arange(n) * 5 % 61,
            "token_type_ids": (torch.arange(n) >= n // 3).long(),
            "special_tokens_mask": (torch.arange(n) == n - 1).long(),
        }
        for n in (6, 31, 12, 20)
    ]


def of_segments(folder: Path) -> list[float]:
    """Losses of a model of segments in a loop, special tokens at half the weight."""
    model = bert()
    run = attached(model, sgd(model), segmented(), folder, costs=costs(2), labels="same", steps=2)

    def loss(model: Any, micro: Any) -> torch.Tensor:
        inputs = {name: value for name, value in micro.inputs.items() if name != "labels"}
        logged = log_softmax(model(**inputs).logits[0], -1)
        labels = micro.labels[0]
        picked = logged.gather(1, labels.clamp(min=0)[:, None])[:, 0] * (labels != -100)
        return -(picked * (1 - micro.rest["special_tokens_mask"][0] / 2)).sum() / micro.targets

    return trained(run, model, loss)


def test_segments_and_special_tokens_travel_as_tokens_do(tmp_path: Path) -> None:
    """Catches a tokenizer's columns that are lost, cut elsewhere, or given to a model that does not
    take them."""
    model, losses = bert(), list[float]()
    optimizer = sgd(model)
    for _ in range(2):
        total = torch.zeros((), dtype=torch.float64)
        for item in segmented():
            ids, kinds = item["input_ids"][None], item["token_type_ids"][None]
            logged = log_softmax(model(input_ids=ids, token_type_ids=kinds).logits[0], -1)
            picked = logged.gather(1, item["labels"][:, None])[:, 0]
            total = total - (picked * (1 - item["special_tokens_mask"] / 2)).sum() / 69
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()))
    for got in run_ranks(2, of_segments, tmp_path, timeout_s=100):
        assert got == pytest.approx(losses, rel=1e-9)


HOOKS: dict[str, Callable[[Any], Any]] = {
    "a mask": lambda p: p.register_hook(lambda g: g * (p.detach() > 0)),
    "a factor": lambda p: p.register_hook(lambda g: 0.5 * g),
    "a look": lambda p: p.register_hook(lambda g: None),
    "a clamp": lambda p: p.register_hook(lambda g: g.clamp(-0.01, 0.01)),
    "a clamp above most": lambda p: p.register_hook(lambda g: g.clamp(-100, 100)),
    "small ones dropped": lambda p: p.register_hook(lambda g: g * (g.abs() > 1e-4)),
    "a norm": lambda p: p.register_hook(lambda g: g / g.norm().clamp(min=1e-3)),
    "noise": lambda p: p.register_hook(lambda g: g + torch.randn_like(g)),
    "a step within the backward": lambda p: p.register_post_accumulate_grad_hook(lambda p: None),
}
"""What a loop may hang on the gradients of parameters; the first three are linear."""


def hooked(what: str, later: bool, folder: Path) -> Any:
    """Weights after three steps with hooks on gradients, which may come after the first step."""
    model = llama()
    run = attached(model, sgd(model), dataset(), folder, costs=costs(dist.get_world_size()))
    try:
        for step in run:
            if step.number == int(later):
                for parameter in model.parameters():
                    HOOKS[what](parameter)
            trained_step(step, model)
            if step.number == 2:
                return weights(model)
    except HeadraceError as error:
        return str(error)
    return None


@pytest.mark.parametrize("what", HOOKS)
def test_hooks_on_gradients_are_linear_or_refused(what: str, tmp_path: Path) -> None:
    """Catches gradients that are clamped micro-batch by micro-batch, so that weights follow from
    the plan; and masks of gradients that are refused."""
    apart = run_ranks(1, hooked, what, True, tmp_path / "alone", timeout_s=100)[0]
    for found in run_ranks(2, hooked, what, True, tmp_path / "together", timeout_s=100):
        if what in [*HOOKS][:3]:
            for mine, alone_ in zip(found, apart, strict=True):
                np.testing.assert_allclose(mine, alone_, rtol=0, atol=1e-10)
        else:
            assert found.startswith("hook on parameter model.embed_tokens.weight: got one that is")


def hooked_and_sharded(folder: Path) -> str:
    """What is said of a mask on a gradient under FSDP2."""
    model = llama()
    fully_shard(model)
    model.lm_head.weight.register_hook(lambda gradient: 2 * gradient)
    run = attached(model, sgd(model), dataset(), folder, costs=costs(2))
    try:
        trained(run, model)
    except HeadraceError as error:
        return str(error)
    return "nothing"


def test_a_hook_that_fsdp2_never_calls_is_refused(tmp_path: Path) -> None:
    """Catches a mask of a gradient that is lost without a word."""
    for text in run_ranks(2, hooked_and_sharded, tmp_path, timeout_s=100):
        assert text.startswith("hook on parameter lm_head.weight: got one that FSDP2 never calls")


class Outside(torch.nn.Module):
    """A learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))


def begun(what: str, folder: Path) -> None:
    """A loop that must not begin."""
    model, given = llama(), dict[str, Any]()
    optimizer: Any = sgd(model)
    if what == "parameters beside the model":
        optimizer = torch.optim.SGD([*model.parameters(), *Outside().parameters()], lr=0.1)
    if what == "another model's optimizer":
        optimizer = sgd(llama())
    if what == "no optimizer":
        optimizer = None
    if what == "an optimizer with closures":
        optimizer = torch.optim.LBFGS(model.parameters())
    if what == "a scheduler by metrics":
        given["scheduler"] = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    if what == "a scheduler of another optimizer":
        given["scheduler"] = torch.optim.lr_scheduler.StepLR(sgd(model), 1)
    if what == "evaluation mode":
        model.eval()
    if what == "a clip of nothing":
        given["clip"] = 0.0
    if what == "a compiled model":
        model = torch.compile(model, backend="eager")
    if what == "one process for all devices":
        model = torch.nn.DataParallel(model)
    attached(model, optimizer, dataset(), folder, costs=costs(1), **given)


BEGUN = {
    "parameters beside the model": (ModelError, "make what is learnt beside the model"),
    "another model's optimizer": (ModelError, "that the model has not"),
    "no optimizer": (SpecError, "optimizer: got NoneType"),
    "an optimizer with closures": (SpecError, "LBFGS"),
    "a scheduler by metrics": (SpecError, "ReduceLROnPlateau"),
    "a scheduler of another optimizer": (SpecError, "one of another optimizer"),
    "evaluation mode": (ModelError, r"model\.train\(\)"),
    "a clip of nothing": (SpecError, "a norm above 0"),
    "a compiled model": (ModelError, "model under OptimizedModule: got torch.compile"),
    "one process for all devices": (ModelError, "model under DataParallel"),
}


@pytest.mark.apart
@pytest.mark.parametrize("what", BEGUN)
def test_loops_that_cannot_be_right_do_not_begin(what: str, tmp_path: Path) -> None:
    """Catches parameters whose gradients nobody adds up over ranks, and errors of torch's own in
    the middle of a step."""
    kind, words = BEGUN[what]
    with pytest.raises(kind, match=words):
        begun(what, tmp_path)


def stepped(what: str, folder: Path) -> str:
    """What is said to a loop that takes steps of its own."""
    model = llama()
    optimizer = sgd(model)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    if what == "a scheduler of schedulers":  # which does not count its steps
        scheduler = torch.optim.lr_scheduler.ChainedScheduler([scheduler])
    items: Any = dataset()
    if what == "no labels":
        items = [{**i, "labels": torch.full_like(i["labels"], -100)} for i in items]
    run = attached(model, optimizer, items, folder, scheduler=scheduler, costs=costs(2))
    try:
        for step in run:
            for micro in step:
                micro.backward(model(**micro.inputs).loss)
                if what == "optimizer":
                    optimizer.step()
            if what in ("scheduler", "a scheduler of schedulers"):
                scheduler.step()
            if what == "rates" and dist.get_rank() and step.number == 1:
                optimizer.param_groups[0]["lr"] = 7.0
    except HeadraceError as error:
        return f"{step.number if what != 'no labels' else 0} {error}"
    return "nothing"


STEPPED = {
    "optimizer": "0 optimizer.step(): got a call by the loop",
    "scheduler": "1 scheduler.step(): got a step by the loop",
    "a scheduler of schedulers": "1 scheduler.step(): got a step by the loop",
    "rates": "2 optimizer of rank 1: got learning rates [7.0]",
    "no labels": "0 labels of the step: got all of",
}


@pytest.mark.parametrize("what", STEPPED)
def test_steps_by_hand_are_told(what: str, tmp_path: Path) -> None:
    """Catches two steps for one plan, rates that differ between ranks, and a division by no token;
    each on all ranks, at once."""
    for text in run_ranks(2, stepped, what, tmp_path, timeout_s=100):
        assert text.startswith(STEPPED[what])


def clipped(model: Any, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def dropped_by_hand(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def noised(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad + 1e-3


BESIDE: dict[str, tuple[str, Callable[[Any, Any], None]]] = {
    "a clip": ("after", clipped),
    "a clip by one rank": ("after on rank 1", clipped),
    "zero_grad": ("before", lambda model, optimizer: optimizer.zero_grad()),
    "zeros": ("before", lambda model, optimizer: optimizer.zero_grad(set_to_none=False)),
    "zero_grad at the end": ("after", lambda model, optimizer: model.zero_grad()),
    "None": ("before", dropped_by_hand),
    "noise": ("after", noised),
    "zero_grad before the step": ("first", lambda model, optimizer: optimizer.zero_grad()),
    "zeros before the step": (
        "first",
        lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    ),
}
"""What a loop does to gradients, and where: before or after each micro-batch's backward, or before
the first one of a step alone, where there are none."""


def beside(what: str, how: str, folder: Path) -> tuple[str, Any]:
    """What is said to a loop that changes gradients within a step, and its weights."""
    model, update = llama(), how != "by the loop"
    if how == "sharded":
        fully_shard(model)
    optimizer, (where, change) = sgd(model), BESIDE[what]
    options = {"update": update, "check_loss": update, "costs": costs(2), "steps": 2}
    run = attached(model, optimizer, dataset(), folder, batch_tokens=200, **options)
    if how != "sharded":
        run.engine.planner = Drawn(ranks=2, layers=2, seed=3, levels=("none",))
    try:
        for step in run:
            for at, micro in enumerate(step):
                if where == "before" or (where == "first" and not at):
                    change(model, optimizer)
                micro.backward(model(**micro.inputs).loss)
                if where == "after" or (where == "after on rank 1" and dist.get_rank()):
                    change(model, optimizer)
            if not update:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
    except HeadraceError as error:
        return str(error), weights(model)
    finally:
        run.detach()
    return "nothing", weights(model)


def all_beside(how: str, folder: Path) -> dict[str, tuple[str, Any]]:
    names = ("a clip", "zeros before the step") if how == "sharded" else BESIDE
    return {what: beside(what, how, folder / str(at)) for at, what in enumerate(names)}


@pytest.mark.parametrize("how", ["by the run", "by the loop", "sharded"])
def test_gradients_are_left_alone_within_a_step(how: str, tmp_path: Path) -> None:
    """Catches sums over some micro-batches and ranks that are clipped or dropped: the weights were
    others than those of one process; and a zero_grad() that drops nothing and is refused."""
    trained_alone = llama()
    one_process(trained_alone, sgd(trained_alone), batches(dataset(), 2, batch_tokens=200))
    for said in run_ranks(2, all_beside, how, tmp_path, timeout_s=100):
        for what, (text, mine) in said.items():
            exact = BESIDE[what][0] == "first"
            refused = "gradients within a step.*: got a change by the loop beside micro.backward"
            assert re.match("nothing" if exact else refused, text), (what, text)
            ends = weights(trained_alone if exact else llama())
            for one, other in zip(mine, ends, strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=1e-10, err_msg=what)


def head_called_again(folder: Path) -> list[float]:
    """Losses of two steps that call the head of a sharded model on hidden states."""
    model, losses = llama(), list[float]()
    for module in (model.lm_head, *model.model.layers, model):
        fully_shard(module)
    run = attached(model, sgd(model), dataset(), folder, costs=costs(2), steps=2, batch_tokens=200)
    for step in run:
        for micro in step:
            inputs = {name: value for name, value in micro.inputs.items() if name != "labels"}
            states = model(**inputs, output_hidden_states=True).hidden_states[-1]
            micro.backward(micro.loss(model.lm_head(states)))
        losses.append(step.loss)
    return losses


def test_weights_that_fsdp2_has_gathered_are_the_models(tmp_path: Path) -> None:
    """Catches a head that is refused as one beside the model, since FSDP2 gathers its shards into
    other tensors."""
    model = llama()
    wanted = one_process(model, sgd(model), batches(dataset(), 2, batch_tokens=200))
    for losses in run_ranks(2, head_called_again, tmp_path, timeout_s=100):
        assert losses == pytest.approx(wanted, rel=1e-10)


def read_after_a_forward() -> str:
    """What is compared of a sharded model whose weights a forward has just gathered."""
    model = llama()
    for module in (*model.model.layers, model):
        fully_shard(module)
    model(input_ids=torch.arange(1, 9)[None])
    return AlikeWeights(model).text()


def test_weights_that_fsdp2_has_freed_are_not_read() -> None:
    """Catches a look at gathered weights after something that frees them, as a state dict does."""
    first, second = run_ranks(2, read_after_a_forward, timeout_s=60)
    assert first == second
    assert first


def seeded(differ: bool, folder: Path) -> tuple[Any, list[str]]:
    """Weights after two steps of ranks that began with weights of their own, or with the first
    rank's."""
    said: list[str] = []
    model = llama()
    if differ and dist.get_rank():
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
    run = attached(model, sgd(model), dataset(), folder, costs=costs(2), steps=2, say=said.append)
    trained(run, model)
    return weights(model), said


def test_ranks_begin_with_the_same_weights(tmp_path: Path) -> None:
    """Catches models that drift apart from the first step on, as nobody set a seed."""
    (same, quiet), _ = run_ranks(2, seeded, False, tmp_path, timeout_s=100)
    for ends, said in run_ranks(2, seeded, True, tmp_path, timeout_s=100):
        assert all(map(np.array_equal, ends, same))
        assert all("weights of rank 1" in text for text in said[:1])
    assert not any("weights" in text for text in quiet)


def changed_on_one_rank(what: str, folder: Path) -> str:
    """What is said where rank 0 alone changes something of the model before the second step."""
    model = llama()
    model.register_buffer("scales", torch.ones(3, dtype=torch.float64))
    model.register_buffer("calls", torch.zeros((), dtype=torch.long))
    model.model.norm.weight.requires_grad_(False)
    others = {name: 1.5 * value for name, value in llama().state_dict().items()}
    run = attached(model, sgd(model), dataset(), folder, costs=costs(2), steps=3, batch_tokens=60)
    try:
        for step in run:
            if step.number == 1 and not dist.get_rank():
                if what == "weights":
                    model.load_state_dict(others, strict=False)
                with torch.no_grad():
                    if what == "frozen weights":
                        model.model.norm.weight.mul_(2)
                    if what == "a buffer":
                        model.scales.mul_(2)
            model.calls += dist.get_rank()
            trained_step(step, model)
    except HeadraceError as error:
        return f"{step.number} {error}"
    return "nothing"


@pytest.mark.parametrize("what", ["weights", "frozen weights", "a buffer", "nothing"])
def test_ranks_go_on_with_the_same_weights(what: str, tmp_path: Path) -> None:
    """Catches a checkpoint that the first rank alone loads within the loop: ranks trained on, each
    a model of its own; and counts of forwards that are refused."""
    for text in run_ranks(2, changed_on_one_rank, what, tmp_path, timeout_s=60):
        said = "1 weights and buffers of rank 1: got .*load weights on all ranks alike"
        assert re.match("nothing" if what == "nothing" else said, text), text


def scaled(what: str, folder: Path) -> tuple[str, Any]:
    """What is said of a loss that is multiplied, by a GradScaler or by a number, and weights."""
    model, check = llama(), what != "without a check"
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=what != "a scaler that is off")
    half = torch.tensor(0.5, dtype=torch.float64)
    run = attached(model, sgd(model), dataset(), folder, costs=costs(2), steps=1, check_loss=check)

    def loss(model: Any, micro: Any) -> torch.Tensor:
        own: torch.Tensor = model(**micro.inputs).loss
        return 2 * (half * own) if what == "a number" else scaler.scale(own)

    try:
        trained(run, model, loss)
    except HeadraceError as error:
        return str(error), weights(model)
    return "nothing", weights(model)


@pytest.mark.parametrize(
    "what", ["a scaler", "without a check", "a scaler that is off", "a number"]
)
def test_a_loss_that_a_scaler_multiplies_is_refused(what: str, tmp_path: Path) -> None:
    """Catches gradients that are a thousand times too large, as nobody divides them again."""
    trained_alone = llama()
    one_process(trained_alone, sgd(trained_alone), batches(dataset(), 1, batch_tokens=150))
    exact = what in ("a number", "a scaler that is off")
    for text, mine in run_ranks(2, scaled, what, tmp_path, timeout_s=60):
        assert text == "nothing" if exact else "1024 times a loss, by GradScaler" in text
        for one, other in zip(mine, weights(trained_alone if exact else llama()), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


class Gone(Exception):
    """An error of the user's own."""


def other_data(what: str, folder: Path) -> str:
    """What is said on a rank where ranks read other samples."""
    rank, model = dist.get_rank(), llama()
    items: Any = dataset()
    optimizer = (
        torch.optim.Adam(model.parameters()) if what == "optimizers" and rank else sgd(model)
    )
    if what == "rates" and rank:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    if what in ("first contents", "contents") and rank:
        at = 0 if what == "first contents" else 2
        items[at] = {**items[at], "input_ids": items[at]["input_ids"].flip(0)}

    def stream() -> Iterator[Any]:
        for at, item in enumerate(dataset()):
            if rank and at == 5:
                if what == "an error":
                    raise Gone("the disk is gone")
                if what == "an end":
                    return
                if what == "lengths":
                    yield {name: x[:2] for name, x in item.items()}
                    continue
                if what == "contents of a stream":
                    yield {name: x.flip(0) for name, x in item.items()}
                    continue
            yield item

    given: dict[str, Any] = {"costs": costs(2), "batch_tokens": 60}
    if what == "arguments":
        given["clip"] = 1.0 + rank
    if what == "a check":
        given["check_loss"] = not rank
    if what == "costs" and rank:
        del given["costs"]
    if what == "tokens of a batch" and rank:
        given["batch_tokens"] = 70
    if what == "the order":
        given["shuffle"] = bool(rank)
    if what == "seeds":
        given["seed"] = rank
    if what == "samples of a batch":
        given |= {"batch_tokens": None, "batch_sequences": 2 + rank}
    if what == "places of labels":
        given["label_place"] = ["first", "last"][rank]
    if what == "a parameter of one's own":
        optimizer = sgd(model)
    if what == "contents":  # all samples are read on both ranks
        given |= {"planner": "static", "static_size": 2}
    streams = ("lengths", "an end", "an error", "contents of a stream")
    try:
        run = attached(model, optimizer, stream() if what in streams else items, folder, **given)
        if what == "a place in the data" and rank:
            run._order.next_batch()
        if what == "a parameter of one's own":
            optimizer.add_param_group({"params": Outside().parameters()})
        trained(run, model)
    except (HeadraceError, Gone) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


OTHER = {
    "first contents": "PlanMismatch: data of the loop",
    "contents": "PlanMismatch: samples [",
    "arguments": "PlanMismatch: argument clip of hr.attach",
    "a check": "PlanMismatch: argument check_loss of hr.attach",
    "costs": "PlanMismatch: argument measure.costs of hr.attach",
    "lengths": "PlanMismatch: stream of samples",
    "an end": "PlanMismatch: stream of samples",
    "contents of a stream": "PlanMismatch: stream of samples",
    "optimizers": "PlanMismatch: optimizer of the loop",
    "rates": "PlanMismatch: optimizer of the loop",
    "samples of a batch": "PlanMismatch: argument batch_sequences of hr.attach",
    "places of labels": "PlanMismatch: argument samples.label_place of hr.attach",
    "tokens of a batch": "PlanMismatch: argument batch_tokens of hr.attach",
    "the order": "PlanMismatch: argument samples.shuffle of hr.attach",
    "seeds": "PlanMismatch: argument seed of hr.attach",
    "a place in the data": "PlanMismatch: samples of rank 1",
    "a parameter of one's own": "make what is learnt beside the model",
    "an error": "the disk is gone",
}


@pytest.mark.parametrize("what", OTHER)
def test_other_samples_end_by_name_on_all_ranks(what: str, tmp_path: Path) -> None:
    """Catches an error on one rank while the others wait for it."""
    for rank, text in enumerate(run_ranks(2, other_data, what, tmp_path, timeout_s=60)):
        if what == "an error" and not rank:
            assert text.startswith("PlanMismatch")
        else:
            assert OTHER[what] in text


def once(folder: Path) -> tuple[int, int]:
    """Steps of a generator that gives its items once, and samples of them."""
    model = llama()
    run = attached(
        model, sgd(model), (item for item in dataset()), folder, costs=costs(1), batch_tokens=90
    )
    steps = [len(step.plan.lengths) for step in run if trained_step(step, model)]
    return len(steps), sum(steps)


def of_a_part(folder: Path) -> tuple[list[float], Any]:
    """Norms of gradients and weights of three steps whose optimizer has the head alone."""
    model = llama()
    optimizer = torch.optim.SGD(model.lm_head.parameters(), lr=0.1)
    run = attached(model, optimizer, dataset(), folder, costs=costs(2), steps=3, clip=1.0)
    norms = []
    for step in run:
        for micro in step:
            inputs = {name: x for name, x in micro.inputs.items() if name != "labels"}
            micro.backward(micro.loss(model(**inputs).logits))
        assert step.gradient_norm is not None
        norms.append(step.gradient_norm)
    return norms, weights(model)


def test_gradients_of_other_parameters_do_not_pile_up(tmp_path: Path) -> None:
    """Catches gradients that the optimizer does not drop, which are summed over ranks again in
    every step: their norm grows, and a clipped update shrinks to nothing."""
    model, wanted = llama(), list[float]()
    optimizer = torch.optim.SGD(model.lm_head.parameters(), lr=0.1)
    for batch in batches(dataset(), 3, batch_tokens=150):
        items = [batch.read(i) for i in range(len(batch.lengths))]
        targets = sum(int((item["labels"] != -100).sum()) for item in items)
        for item in items:
            logits = model(input_ids=item["input_ids"][None]).logits[0]
            (cross_entropy(logits, item["labels"], reduction="sum") / targets).backward()
        wanted.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        model.zero_grad()
    for norms, ends in run_ranks(2, of_a_part, tmp_path, timeout_s=100):
        assert norms == pytest.approx(wanted, rel=1e-9)
        for one, other in zip(ends, weights(model), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


class Counting:
    """Reads items that are their own samples."""

    def read(self, item: Any, what: str, *, labelled: bool = True) -> Any:
        return {"input_ids": torch.as_tensor(item)}

    def length(self, sample: Any) -> int:
        return len(sample["input_ids"])

    def forget_fields(self) -> None:
        """Nothing is kept."""


def test_a_generator_goes_on_where_it_was_or_says_that_it_cannot() -> None:
    """Catches the item that was read first to see its size, and was lost when a run went on."""

    def order() -> StreamOrder:
        return StreamOrder(([i, i] for i in range(12)), Counting(), batch_tokens=4)

    unbroken, resumed = order(), order()
    unbroken.first()
    for _ in range(2):
        unbroken.next_batch()
    resumed.first()
    resumed.restore(unbroken.state())
    wanted = unbroken.next_batch().read(0)["input_ids"].tolist()
    assert resumed.next_batch().read(0)["input_ids"].tolist() == wanted == [4, 4]
    begun = order()
    begun.first()
    begun.restore({"epoch": 0, "items": 0})
    assert begun.next_batch().read(0)["input_ids"].tolist() == [0, 0]
    with pytest.raises(DataError, match="a generator that has given 3 items"):
        begun.restore({"epoch": 0, "items": 0})


class Numbered(torch.utils.data.Dataset[torch.Tensor]):
    """Eight items of two tokens, their number twice."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.tensor([at, at])


class OwnIterator:
    """Gives the same items; it is its own iterator, and begins anew."""

    def __iter__(self) -> OwnIterator:
        self.at = 0
        return self

    def __next__(self) -> torch.Tensor:
        self.at += 1
        if self.at > 8:
            raise StopIteration
        return torch.tensor([self.at - 1] * 2)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_goes_on_where_it_was(persistent: bool) -> None:
    """Catches workers that persist, whose loader gives one iterator, which begins anew: taken for a
    generator, it gave items again or left some out."""

    def order(source: Any = None) -> StreamOrder:
        loader = torch.utils.data.DataLoader(
            Numbered(), batch_size=None, num_workers=1, persistent_workers=persistent
        )
        return StreamOrder(loader if source is None else source, Counting(), batch_tokens=4)

    def taken(source: StreamOrder, batches: int) -> list[int]:
        found = [source.next_batch() for _ in range(batches)]
        return [int(b.read(i)["input_ids"][0]) for b in found for i in range(len(b.lengths))]

    unbroken = order()
    unbroken.first()
    start, found = unbroken.state(), taken(unbroken, 2)
    state = unbroken.state()
    assert found + taken(unbroken, 2) == list(range(8))
    for place, wanted in ((state, [4, 5, 6, 7]), (start, [0, 1, 2, 3])):
        resumed = order()
        resumed.first()
        resumed.restore(place)
        assert taken(resumed, 2) == wanted
    assert taken(unbroken, 1) == [0, 1]
    own = order(OwnIterator())
    own.first()
    own.restore(state)
    assert taken(own, 1) == [4, 5]
    with pytest.raises(DataError, match="OwnIterator, which is its own iterator"):
        own.restore(state)


def shuffled(seed: int) -> StreamOrder:
    """Batches of two items of a loader that shuffles by the global generator of this seed."""
    torch.manual_seed(seed)
    loader = torch.utils.data.DataLoader(Numbered(), batch_size=None, shuffle=True)
    order = StreamOrder(loader, Counting(), batch_tokens=4)
    order.first()
    return order


def first_values(order: StreamOrder, batches: int) -> list[list[int]]:
    """The first value of each item of the batches that follow."""
    found = [order.next_batch() for _ in range(batches)]
    return [[int(b.read(i)["input_ids"][0]) for i in range(len(b.lengths))] for b in found]


def test_a_stream_goes_on_with_the_items_that_are_left_or_is_refused() -> None:
    """Catches a shuffled stream that is begun a second time, in another order: it lost some items
    and gave others twice."""
    unbroken = shuffled(3)
    found = first_values(unbroken, 2)
    state = unbroken.state()
    torch.rand(1)  # as dropout draws, so that the second epoch has another order
    wanted = first_values(unbroken, 2)
    assert sorted(at for batch in found + wanted for at in batch) == list(range(8))
    unbroken.next_batch()
    later = unbroken.state()
    resumed = shuffled(3)
    resumed.restore(state)
    assert first_values(resumed, 2) == wanted
    former = shuffled(3)
    former.restore({"epoch": 0, "items": 4})  # saved by an earlier version
    assert first_values(former, 2) == wanted
    for other, place in ((shuffled(4), state), (shuffled(3), later), (unbroken, state)):
        with pytest.raises(DataError, match=r"others for the first \d items of epoch"):
            other.restore(place)


def test_other_samples_of_the_same_lengths_are_refused() -> None:
    """Catches a run that goes on over samples in another order: some of them would come twice."""
    items = [{"input_ids": torch.full((4,), at)} for at in range(12)]

    def order(source: Any) -> DrawnOrder:
        samples = Samples.of(source, [4] * 12, TokenReader(tokens="input_ids", kind="next"))
        options = SamplerOptions(too_long="refuse", min_tokens=1, batch_sequences=2)
        return DrawnOrder(samples, Sampler(samples, options))

    class Noisy:
        """Items that are drawn anew at each reading."""

        def __len__(self) -> int:
            return 12

        def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
            return {"input_ids": torch.randint(0, 99, (4,))}

    state = order(items).next_batch().state_after
    order(items).restore(state)
    with pytest.raises(DataError, match="samples of list: got others of the same lengths"):
        order(items[::-1]).restore(state)
    order(items[::-1]).restore({key: value for key, value in state.items() if key != "samples"})
    order(Noisy()).restore(order(Noisy()).state())


def trained_step(step: Any, model: Any) -> bool:
    for micro in step:
        micro.backward(model(**micro.inputs).loss)
    return True


def test_a_generator_ends_without_an_error(tmp_path: Path) -> None:
    """Catches a loop that asks for a second epoch of what gives its items once."""
    ((steps, samples),) = run_ranks(1, once, tmp_path, timeout_s=60)
    assert steps > 2
    assert samples == len(dataset())


def left_and_skipped(folder: Path) -> tuple[Any, Any, int]:
    """Lengths of the steps of a loop that is left and taken up again, and that skips its third
    step; of a plain loop; and what ``len`` says."""
    model = llama()
    run = attached(model, sgd(model), dataset(), folder, costs=costs(2), batch_tokens=60)
    count, found = len(run), []
    for step in run:
        if step.number == 1:
            for micro in step:
                micro.backward(model(**micro.inputs).loss)
                break
            break
        assert len(run) == count
        trained_step(step, model)
        assert len(run) == count
        found.append(step.plan.lengths.tokens)
    for step in run:
        if step.number == 2:
            step.skip()
            continue
        trained_step(step, model)
        found.append(step.plan.lengths.tokens)
    run.detach()
    again = llama()
    run = attached(again, sgd(again), dataset(), folder, costs=costs(2), batch_tokens=60)
    plain = [step.plan.lengths.tokens for step in run if trained_step(step, again)]
    return found, plain, count


def test_a_loop_that_is_left_loses_no_batch(tmp_path: Path) -> None:
    """Catches batches that are lost between two loops, and skipped ones that are trained."""
    for found, plain, count in run_ranks(2, left_and_skipped, tmp_path, timeout_s=100):
        assert found == plain[:2] + plain[3:]
        assert count == len(plain) > 4


def skipped_apart(own: bool, folder: Path) -> str:
    """What a rank says of a step that rank 1 alone skips, where ranks give samples of their own or
    read the same."""
    model, rank = llama(), dist.get_rank()
    given = {"own": True, "longest": 70} if own else {"batch_tokens": 60}
    run = attached(model, sgd(model), None if own else dataset(), folder, costs=costs(2), **given)
    try:
        for step in (run.step(dataset()[rank::2]) for _ in range(3)) if own else run:
            if step.number == 1 and rank:
                step.skip()
            else:
                trained_step(step, model)
    except HeadraceError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("own", [False, True])
def test_a_step_that_one_rank_skips_is_told_on_all(own: bool, tmp_path: Path) -> None:
    """Catches a rank that goes on to the next batch while others wait for it in this one."""
    for text in run_ranks(2, skipped_apart, own, tmp_path, timeout_s=60):
        assert text.startswith("PlanMismatch: loop of rank 1: got skips step 1, wanted trains step")
        assert "step.skip()" in text


class Slow(list[Any]):
    """Items that are read by number, by whichever process, which notes its number in ``readers``;
    one may not be readable."""

    broken: int | None = None
    readers: Path | None = None

    def __getitem__(self, at: Any) -> Any:
        if self.readers is not None:
            (self.readers / str(os.getpid())).touch()
        if at == self.broken and torch.utils.data.get_worker_info() is not None:
            raise OSError("the disk is gone")
        return super().__getitem__(at)


def read_by_workers(folder: Path, workers: int) -> tuple[list[float], list[int]]:
    """Losses of a loop that is left and resumed; the processes beside it that read its samples."""
    may_have_children()
    model, items = llama(), Slow(dataset())
    items.readers = folder / f"{workers} {dist.get_rank()}"
    items.readers.mkdir()
    drops = torch.nn.Dropout(0.3)
    run = attached(model, sgd(model), items, folder, costs=costs(2), workers=workers, steps=6)
    torch.manual_seed(5)
    found = list[float]()
    for stop in (2, None):
        for step in run:
            if step.number == stop:
                run.save(folder / f"saved {workers}")
                break
            for micro in step:
                inputs = {k: v for k, v in micro.inputs.items() if k != "labels"}
                micro.backward(micro.loss(drops(model(**inputs).logits)))
            found.append(step.loss)
        if stop is not None:
            assert run.load(folder / f"saved {workers}")
    run.detach()
    return found, [
        int(path.name) for path in items.readers.iterdir() if int(path.name) != os.getpid()
    ]


def test_workers_read_the_same_samples(tmp_path: Path) -> None:
    """Catches workers that read other samples or in another order, that go on from elsewhere after
    a break and a load, that draw from dropout's numbers, and that outlive the loop."""
    plain = run_ranks(2, read_by_workers, tmp_path, 0, timeout_s=100)
    read = run_ranks(2, read_by_workers, tmp_path, 2, timeout_s=100)
    for (wanted, none), (found, workers) in zip(plain, read, strict=True):
        assert found == wanted
        assert len(found) == 6
        assert not none
        assert workers
        deadline = time.monotonic() + 20
        while any(map(psutil.pid_exists, workers)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(psutil.pid_exists, workers))


def unreadable(folder: Path) -> str:
    may_have_children()
    model, items = llama(), Slow(dataset())
    items.broken = 3
    run = attached(model, sgd(model), items, folder, costs=costs(2), workers=1)
    try:
        for step in run:
            trained_step(step, model)
    except HeadraceError as error:
        return str(error)
    return ""


def test_what_a_worker_cannot_read_is_named_on_every_rank(tmp_path: Path) -> None:
    """Catches a worker's error that ends one rank and leaves the others waiting."""
    for text in run_ranks(2, unreadable, tmp_path, timeout_s=60):
        assert "OSError: the disk is gone" in text


def of_a_loader(folder: Path, workers: int) -> list[tuple[int, ...]]:
    """Lengths of the steps of a loop over a DataLoader of torch, twice through."""
    may_have_children()
    model = llama()
    loader = torch.utils.data.DataLoader(dataset(), batch_size=None, num_workers=workers)  # type: ignore[arg-type]
    run = attached(model, sgd(model), loader, folder, costs=costs(2), epochs=2, longest=70)
    with pytest.raises(TypeError, match="a stream of samples has no length"):
        len(run)
    found = [step.plan.lengths.tokens for step in run if trained_step(step, model)]
    run.detach()
    return found


@pytest.mark.parametrize("workers", [0, whole(2)])
def test_a_loader_is_a_source(workers: int, tmp_path: Path) -> None:
    """Catches a DataLoader that is taken for a data set by number, or of which samples are lost."""
    for found in run_ranks(2, of_a_loader, tmp_path, workers, timeout_s=60):
        half = len(found) // 2
        assert found[:half] == found[half:]
        assert sum(map(len, found)) == 2 * len(dataset())


def shuffled_by_a_loader(folder: Path) -> tuple[str, int]:
    """What is said of a DataLoader that shuffles with the numbers that dropout draws from, and how
    many steps were taken before."""
    model, items = llama(), [{"input_ids": torch.arange(12) + at} for at in range(16)]
    loader = torch.utils.data.DataLoader(items, batch_size=None, shuffle=True)  # type: ignore[arg-type]
    run = attached(
        model, sgd(model), loader, folder, costs=costs(2), epochs=2, batch_tokens=48, longest=12
    )
    try:
        for step in run:
            torch.rand(1 + run.rank)  # as dropout draws for other tokens on each rank
            trained_step(step, model)
    except HeadraceError as error:
        return str(error), run.number
    return "nothing", run.number


def test_a_loader_that_shuffles_ranks_apart_is_told(tmp_path: Path) -> None:
    """Catches ranks whose samples are as long as the others', in another order from the second
    epoch on: some would be trained twice and others never."""
    for text, steps in run_ranks(2, shuffled_by_a_loader, tmp_path, timeout_s=60):
        assert text.startswith("stream of samples: got 4 samples of 48 tokens, checksum ")
        assert "a random generator of its own" in text
        assert steps == 4


def workers_of_a_stream(folder: Path) -> None:
    model, wanted = llama(), r"DataLoader\(dataset, batch_size=None, num_workers=...\)"
    with pytest.raises(SpecError, match=wanted):
        attached(model, sgd(model), iter(dataset()), folder, workers=2)


def test_a_stream_has_its_own_workers(tmp_path: Path) -> None:
    """Catches workers that are asked for and that nobody starts."""
    run_ranks(1, workers_of_a_stream, tmp_path)


def dropped(folder: Path, stop: int | None) -> list[float]:
    """Losses of a model with dropout, from wherever the checkpoint stands."""
    model = gpt()
    drops = torch.nn.Dropout(0.3)
    items = [(item["input_ids"] % 50, item["labels"] % 50) for item in dataset(ignored=False)]
    torch.manual_seed(dist.get_rank())
    run = attached(
        model, sgd(model), items, folder, costs=costs(2), labels="next", steps=4, batch_tokens=90
    )
    run.load(folder / "saved")
    found = []
    for step in run:
        for micro in step:
            micro.backward(micro.loss(drops(model(micro.inputs["ids"])[0])))
        found.append(step.loss)
        if step.number == stop:
            run.save(folder / "saved")
            break
    return found


def test_dropout_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    """Catches generators that begin anew when a run is resumed."""
    unbroken = run_ranks(2, dropped, tmp_path / "own", None, timeout_s=100)[0]
    first = run_ranks(2, dropped, tmp_path, 1, timeout_s=100)[0]
    rest = run_ranks(2, dropped, tmp_path, None, timeout_s=100)[0]
    assert first + rest == unbroken


def test_losses_are_looked_at_after_a_load(tmp_path: Path) -> None:
    """Catches a loss that was changed between two runs."""
    (text,) = run_ranks(1, changed_loss, tmp_path, timeout_s=100)
    assert "whatever micro.targets is" in text


def changed_loss(folder: Path) -> str:
    for wrong in (False, True):
        model = llama()
        run = attached(model, sgd(model), dataset(), folder, costs=costs(1), steps=2)
        run.load(folder / "saved")
        try:
            for step in run:
                for micro in step:
                    loss = model(**micro.inputs).loss
                    micro.backward(gathered_mean(model, micro) if wrong else loss)
                run.save(folder / "saved")
                break
        except ModelError as error:
            return str(error)
        run.detach()
    return "nothing"


def test_checks_can_be_left_out(tmp_path: Path) -> None:
    """Catches an option that does nothing."""
    (looked,) = run_ranks(1, unchecked, tmp_path, timeout_s=60)
    assert looked
    assert not any(looked)


def unchecked(folder: Path) -> list[bool]:
    model, looked = llama(), list[bool]()
    run = attached(model, sgd(model), dataset(), folder, costs=costs(1), steps=1, check_loss=False)
    for step in run:
        for micro in step:
            looked.append(micro.checking)
            micro.backward(model(**micro.inputs).loss)
    return looked
