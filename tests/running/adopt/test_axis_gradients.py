"""Gradients of models on shards of their axes, however a loss and its backward come about."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import headrace as hr
from headrace.adopt.alike_guards import AlikeGuards
from headrace.adopt.axis_examples import timesformer
from headrace.errors import ModelError
from headrace.ops.switch import gather, switch
from ranks import run_ranks
from running.adopt.axial import AXES, DIMS, Axial, stages, table
from running.adopt.test_adapted import EXACT, adapted, alone, drawn, gradients


def penalised(returns: bool) -> float:
    """How far gradients of a loss with a gradient penalty are from one process'."""
    model, plain, x = table(), table(), drawn(1, 1, 5, 4, 6)
    run = adapted(model, returns=returns)
    with sdpa_kernel(SDPBackend.MATH):
        part = run.shard({"x": x})
        part["x"].requires_grad_()
        out = run(**part)
        (slope,) = torch.autograd.grad(out.sin().sum(), part["x"], create_graph=True)
        loss = out.square().sum() + slope.square().sum()
        run.backward(loss)
        total = run.add_up(loss)
        x.requires_grad_()
        out = plain(x)
        (slope,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
        loss = out.square().sum() + slope.square().sum()
        loss.backward()
    assert float(total) == pytest.approx(float(loss.detach()), rel=1e-12)
    return float((gradients(model) - gradients(plain)).abs().max() / gradients(plain).abs().max())


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_gradient_penalty_equals_one_process(ranks: int, returns: bool) -> None:
    """Catches switches whose backward is a dead end: a part of the penalty would be lost."""
    assert max(run_ranks(ranks, penalised, returns)) <= EXACT


def differentiated_twice() -> list[bool]:
    """Whether switches and gathers of uneven shards have the second derivatives of what
    they compute, for the sum of all ranks' results."""
    group, rank = dist.group.WORLD, dist.get_rank()
    sizes, found = (3, 2), list[bool]()
    for operator, copies in (
        (lambda x: switch(x, 0, 1, group, sizes=sizes), 1),
        (lambda x: gather(x, 0, group, sizes=sizes), 2),
    ):
        x = drawn(rank, sizes[rank], 4).requires_grad_()
        (slope,) = torch.autograd.grad(operator(x).pow(3).sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.pow(2).sum(), x)
        wanted = 36 * copies**2 * x.detach().pow(3)
        found.append(torch.allclose(bend, wanted, rtol=1e-12))
    return found


def test_switches_and_gathers_differentiate_twice() -> None:
    """Catches an adjoint of the second order that forgets what several ranks hold."""
    assert all(all(found) for found in run_ranks(2, differentiated_twice))


class Blocks(torch.nn.Module):
    """A table whose rounds of three stages are computed again, with a norm in front of them."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.table, self.reentrant = table(), reentrant
        self.norm = torch.nn.LayerNorm(8).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.table.blocks:
            x = checkpoint(self.round_of, block, x, use_reentrant=self.reentrant)
        return x

    def round_of(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for name in AXES:
            x = block[name](x)
        return x


def recomputed(reentrant: bool, returns: bool, order: str) -> float:
    """How far gradients are from one process', where the backwards of two batches of other sizes
    come after both forwards, or another batch was evaluated in between."""
    model, plain = Blocks(reentrant), Blocks(reentrant)
    stages_ = [
        hr.AxisStage(modules=f"table.{s.modules}", mixes=s.mixes, dims=DIMS, returns=returns)
        for s in stages(returns=returns)
    ]
    run = hr.adapt(model, stages=stages_, inputs={"x": DIMS}, axis="i", batch="b")
    batches = [drawn(1, 1, 5, 4, 6), drawn(2, 1, 4, 7, 5), drawn(3, 1, 5, 4, 6)]
    for x in batches:
        x.requires_grad_()  # reentrant checkpoints ask for it
    if order == "evaluated between":
        for x in batches:
            loss = run(**run.shard({"x": x})).square().sum()
            with torch.no_grad():
                run(**run.shard({"x": batches[1]}))
            run.backward(loss)
    else:
        losses = [run(**run.shard({"x": x})).square().sum() for x in batches]
        if order == "one backward":
            run.backward(sum(losses, torch.zeros(())))
        for loss in losses if order == "backwards later" else ():
            run.backward(loss)
    run.add_up(torch.zeros(()))
    wanted = alone(plain, batches)
    return float((gradients(model) - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("order", ["evaluated between", "backwards later", "one backward"])
@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_blocks_that_are_computed_again(reentrant: bool, returns: bool, order: str) -> None:
    """Catches stages that run again on another batch, or with the axis with which the forward
    ended: sizes may fit, and gradients be wrong."""
    assert max(run_ranks(3, recomputed, reentrant, returns, order)) <= EXACT


class Layered(torch.nn.Module):
    """A model of another, whose layers its user computes again."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        for layer in model.encoder.layer:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def distance(model: Any, plain: Any) -> float:
    """How far gradients are from another's, of parameters that the other uses."""
    off, norm = 0.0, 0.0
    for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        if wanted.grad is not None:
            assert mine.grad is not None
            off = max(off, float((mine.grad - wanted.grad).abs().max()))
            norm = max(norm, float(wanted.grad.abs().max()))
    return off / norm


def recomputed_layers() -> float:
    """How far gradients of TimeSformer are from one process', another clip being run in between."""
    first, plain = timesformer(), timesformer().model
    run = hr.adapt(Layered(first.model).model)
    out = run(**run.shard(first.inputs)).last_hidden_state[:, 1:]
    weights = run.local(drawn(1, 2, 125 * 2).reshape(2, 125, 16), "b (h w t) d")
    loss = (out * weights).sum()
    with torch.no_grad():
        run(**run.shard({"pixel_values": first.inputs["pixel_values"][:, :, :, :12]}))
    run.backward(loss)
    run.add_up(loss)
    out = plain(**first.inputs).last_hidden_state[:, 1:]
    (out * drawn(1, 2, 125 * 2).reshape(2, 125, 16)).sum().backward()
    return distance(first.model, plain)


def test_layers_of_a_known_model_that_are_computed_again() -> None:
    """Catches hooks of an adapter that switch from the axis with which the forward ended."""
    pytest.importorskip("transformers")
    assert max(run_ranks(2, recomputed_layers)) <= EXACT


class Twice(torch.nn.Module):
    """One module at two places, with other axes in shards, all computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.i, self.k = Axial(1), Axial(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.both, x, use_reentrant=False)

    def both(self, x: torch.Tensor) -> torch.Tensor:
        return self.k(self.i(self.k(x * 1) * 1))


def twice() -> str:
    torch.manual_seed(0)
    run = hr.adapt(
        Twice().double(),
        inputs={"x": DIMS},
        axis="i",
        stages=[hr.AxisStage(modules=n, mixes=n, dims=DIMS, returns=False) for n in ("i", "k")],
    )
    loss = run(**run.shard({"x": drawn(1, 1, 6, 5, 4)})).square().sum()
    try:
        run.backward(loss)
    except ModelError as error:
        return str(error)
    return "nothing"


def test_a_module_that_is_computed_again_in_two_places_is_refused() -> None:
    """Catches a recompute that takes the one for the other."""
    for said in run_ranks(2, twice):
        assert "runs 2 times, with other axes" in said


def classifier(samples: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """A TimeSformer that classifies clips, and clips."""
    from transformers import TimesformerConfig, TimesformerForVideoClassification

    made: Any = timesformer(samples=samples)
    torch.manual_seed(0)
    model: Any = TimesformerForVideoClassification(TimesformerConfig(**made.model.config.to_dict()))
    return model.double(), {**made.inputs, "labels": torch.arange(samples) % 2}


def classified(how: str, samples: int) -> str:
    """What is said of a loss that ranks have alike."""
    model, inputs = classifier(samples)
    run = hr.adapt(model)
    if how == "labels at the call":
        part = run.shard({"pixel_values": inputs["pixel_values"]})
        out = run(**part, labels=run.local(inputs["labels"], "b"))
    else:
        out = run(**run.shard(inputs))
    try:
        run.backward(out.loss if how != "of logits" else out.logits.square().sum())
    except ModelError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("how", "ranks", "samples"),
    [
        ("labels at the call", 2, 1),
        ("labels at the call", 2, 2),
        ("labels in the batch", 2, 1),
        ("labels in the batch", 4, 2),
        ("of logits", 2, 1),
    ],
)
def test_a_loss_of_what_is_alike_is_refused(how: str, ranks: int, samples: int) -> None:
    """Catches gradients that are counted for every rank: a model's own loss, whether ranks share
    samples or have others, or a loss of logits that have no places."""
    pytest.importorskip("transformers")
    for said in run_ranks(ranks, classified, how, samples):
        assert "run.backward(loss, alike=True)" in said


def shared(samples: int, alike: bool) -> float:
    """How far a model's own loss, and its gradients, are from one process'."""
    (model, inputs), (plain, _) = classifier(samples), classifier(samples)
    run = hr.adapt(model)
    loss = run(**run.shard(inputs)).loss
    if not alike:
        loss = loss * run.share
    run.backward(loss, alike=alike)
    total = run.add_up(loss, alike=alike)
    wanted = plain(**inputs).loss
    wanted.backward()
    return max(distance(model, plain), abs(float(total / wanted.detach()) - 1))


@pytest.mark.parametrize(("ranks", "samples"), [(1, 2), (2, 3), (3, 2), (4, 2)])
def test_a_share_of_a_mean_equals_one_process(ranks: int, samples: int) -> None:
    """Catches samples that count by ranks where some have more of them, and a refusal of what is
    right."""
    pytest.importorskip("transformers")
    assert max(run_ranks(ranks, shared, samples, False)) <= EXACT
    if ranks != 2:
        assert max(run_ranks(ranks, shared, samples, True)) <= EXACT


def of_collected(how: str) -> str:
    """What is said of a loss of a collected result."""
    x = drawn(1, 2, 4, 4, 6)
    run = adapted(table())
    whole = run.collect(run(**run.shard({"x": x})), DIMS)
    mine = whole[:, dist.get_rank() :: 2] if how == "a part" else whole
    try:
        run.backward(mine.square().sum(), alike=how == "said")
    except ModelError as error:
        return str(error)
    return "nothing"


def test_a_loss_of_a_collected_result_must_be_said_to_be_alike() -> None:
    """Catches gradients times the number of ranks; and parts of a collected result that are
    refused although they add up."""
    for how, words in (("whole", "alike=True"), ("a part", "nothing"), ("said", "nothing")):
        for said in run_ranks(2, of_collected, how):
            assert words in said


def mixed(how: str) -> tuple[str, bool]:
    """What is said of a loss of this rank's places and of something that ranks have alike, and
    whether any gradient is left."""
    if how == "logits":
        model, inputs = classifier(1)
        run = hr.adapt(model)
        # A call that gives more results than the probe has seen.
        out = run(**run.shard(inputs), output_hidden_states=True)
        entropy = torch.nn.functional.cross_entropy(out.logits, inputs["labels"])
        loss = entropy + out.hidden_states[-1][:, 1:].square().sum()
    else:
        model = table()
        run = adapted(model)
        run.check = how != "unprobed"
        out = run(**run.shard({"x": drawn(1, 1, 5, 4, 6)}))
        loss = run.collect(out, DIMS).sin().sum() + 0.1 * out.square().sum()
    try:
        run.backward(loss)
    except ModelError as error:
        return str(error), any(p.grad is not None for p in model.parameters())
    return "nothing", True


@pytest.mark.parametrize("how", ["logits", "collected", "unprobed"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_term_of_what_is_alike_beside_a_local_one_is_refused(how: str, ranks: int) -> None:
    """Catches a term that counts for every rank while the number of the loss is another one on
    each of them."""
    if how == "logits":
        pytest.importorskip("transformers")
    for said, left in run_ranks(ranks, mixed, how):
        assert "run.share times the term" in said
        assert not left


TERMS = {
    "share": lambda run, out, whole: run.share * whole.sin().sum() + out.square().sum(),
    "mates": lambda run, out, whole: whole.sin().sum() / run.mates + out.square().sum(),
    "parts": lambda _, out, whole: whole[..., dist.get_rank() :: dist.get_world_size()].sum(),
    "others": lambda _, out, whole: out.flatten(0, -2).matmul(whole.flatten(0, -2).mT).sin().sum(),
}
"""Losses of this rank's result and of the collected one that are right."""
WHOLE_TERMS = {
    "share": lambda out: out.sin().sum() + out.square().sum(),
    "mates": lambda out: out.sin().sum() + out.square().sum(),
    "parts": lambda out: out.sum(),
    "others": lambda out: out.flatten(0, -2).matmul(out.flatten(0, -2).mT).sin().sum(),
}
"""The same in one process."""


def beside(how: str) -> float:
    """How far gradients of such a loss, and a penalty times the share, are from one process'."""
    x, model, plain = drawn(1, 1, 5, 4, 6), table(), table()
    run = adapted(model)
    out = run(**run.shard({"x": x}))
    loss = TERMS[how](run, out, run.collect(out, DIMS))
    if how in ("share", "mates"):
        loss = loss + run.share * sum(p.square().sum() for p in model.parameters())
    run.backward(loss)
    total = run.add_up(loss)
    wanted = WHOLE_TERMS[how](plain(x))
    if how in ("share", "mates"):
        wanted = wanted + sum(p.square().sum() for p in plain.parameters())
    wanted.backward()
    assert float(total) == pytest.approx(float(wanted.detach()), rel=1e-10)
    return float((gradients(model) - gradients(plain)).abs().max() / gradients(plain).abs().max())


@pytest.mark.parametrize("how", TERMS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_terms_of_what_is_alike_that_count_once_equal_one_process(how: str, ranks: int) -> None:
    """Catches a refusal of shares, of parts of a collected result of equal gradients, and of a
    loss that compares this rank's places with all of them; and penalties that count for every
    rank."""
    assert max(run_ranks(ranks, beside, how)) <= EXACT


def test_few_backwards_are_compared() -> None:
    """Catches a message between ranks in every step of a long run."""
    guards = AlikeGuards()
    due = [number for number in range(1, 100) if guards.due()]
    assert due == [*range(1, 9), 16, 32, 64]
