"""Steps that a user takes without a loop, on models spread by tokens or by an axis: summed
gradients, weights that ranks begin with, labels and places of one's own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as f

import headrace as hr
from headrace.adopt.call_arguments import of_part
from headrace.errors import DataError, ModelError
from headrace.ops.loss import IGNORED
from ranks import run_ranks
from running.adopt.axial import DIMS, stages, table
from running.adopt.foreign import Gpt, drawn, gpt
from spread import whole

EXACT = 1e-10

Loss = Callable[[int], torch.Tensor]
"""The loss of a spread model on this rank's part of a batch, which is drawn by its number."""


def field(number: int) -> torch.Tensor:
    """A drawn input of the model with an axis."""
    draw = torch.Generator().manual_seed(number)
    return torch.randn(1, 5, 4, 6, 8, dtype=torch.float64, generator=draw)


def plain(kind: str, model: Any, number: int) -> torch.Tensor:
    """The loss of a plain model on a whole batch."""
    if kind == "tokens":
        return model(**drawn(2, 20, number))[1]
    x = field(number)
    return model(x).square().sum() / x.numel()


def by_tokens() -> tuple[Gpt, Any, Loss]:
    model = gpt()
    run = hr.compile(model)

    def loss_of(number: int) -> torch.Tensor:
        return run(**run.shard(drawn(2, 20, number)).inputs)[1]

    return model, run, loss_of


def by_axis() -> tuple[Any, Any, Loss]:
    model = table()
    run = hr.adapt(model, stages=stages(returns=False), inputs={"x": DIMS}, axis="i", batch="b")

    def loss_of(number: int) -> torch.Tensor:
        x = field(number)
        return run(**run.shard({"x": x})).square().sum() / x.numel()

    return model, run, loss_of


KINDS = {"tokens": by_tokens, "axis": by_axis}


def error_of(model: torch.nn.Module, alone: torch.nn.Module) -> float:
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max(
        float((p.grad - q.grad).abs().max() / q.grad.abs().max())
        for p, q in pairs
        if p.grad is not None and q.grad is not None
    )


def _several(kind: str, how: str) -> tuple[float, float, float]:
    """(loss, that of one process, error of the gradients) after a step of two backwards, which
    follows another step whose gradients are dropped ``how``."""
    model, run, loss_of = KINDS[kind]()
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    first = loss_of(2)
    run.backward(first)
    run.add_up(first)
    if how == "by data":
        for p in model.parameters():
            p.grad.data.zero_()
    else:
        optimizer.zero_grad(set_to_none=how == "to none")
    total = torch.zeros((), dtype=torch.float64)
    wanted = 0.0
    for number in range(2):
        loss = loss_of(number) / 2
        run.backward(loss)
        total += loss.detach()
    found = float(run.add_up(total))
    for number in range(2):
        own = plain(kind, alone, number) / 2
        own.backward()
        wanted += float(own)
    return found, wanted, error_of(model, alone)


@pytest.mark.parametrize("how", ["to none", "zeros", "by data"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_several_backwards_equal_one_process(kind: str, how: str) -> None:
    for found, wanted, error in run_ranks(2, _several, kind, how):
        assert found == pytest.approx(wanted, rel=EXACT)
        assert error < EXACT


def _summed_twice(kind: str, how: str) -> str:
    model, run, loss_of = KINDS[kind]()
    for number in range(2):
        loss = loss_of(number) / 2
        run.backward(loss)
        run.add_up(loss)
        if how == "clipped":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    return "not refused"


@pytest.mark.parametrize("how", ["as they are", "clipped"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_not_summed_twice(kind: str, how: str) -> None:
    """The loss of each of several backwards is logged: what is summed already would be again."""
    with pytest.raises(AssertionError, match="backward after add_up: got gradients that are"):
        run_ranks(2, _summed_twice, kind, how)


def _logged(kind: str, how: str) -> tuple[float, float, float] | str:
    """(two losses that are added up after one backward, error of the gradients)."""
    model, run, loss_of = KINDS[kind]()
    alone = copy.deepcopy(model)
    loss = loss_of(0)
    run.backward(loss)
    first = run.add_up(loss)
    if how == "clipped":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    try:
        second = run.add_up(3 * loss.detach())
    except ModelError as error:
        return str(error)
    plain(kind, alone, 0).backward()
    return float(first), float(second), error_of(model, alone)


@pytest.mark.parametrize("kind", KINDS)
def test_another_loss_leaves_gradients_as_they_are(kind: str) -> None:
    """Catches gradients that a second number for the log doubles."""
    for first, second, error in run_ranks(2, _logged, kind, "as they are"):
        assert second == pytest.approx(3 * first, rel=EXACT)
        assert error < EXACT
    for said in run_ranks(2, _logged, kind, "clipped"):
        assert "got gradients that are summed over ranks already, and were changed since" in said


def _begun_otherwise(kind: str, how: str) -> tuple[float, float, float] | str:
    """(loss, that of one process, error of the gradients) where autograd makes the gradients."""
    model, run, loss_of = KINDS[kind]()
    alone, loss = copy.deepcopy(model), loss_of(0)
    if how == "backward":
        loss.backward()
    elif how == "backward of a step before":
        loss.backward()
        model.zero_grad(set_to_none=False)
        loss = loss_of(0)
        run.backward(loss)
    else:
        if how == "autograd.grad of a mean":
            draw = {"tokens": lambda: drawn(2, 20), "axis": lambda: {"x": field(0)}}[kind]()
            out = run(**{k: x for k, x in run.shard(draw).inputs.items() if k != "labels"})
            loss = (out[0] if kind == "tokens" else out).square().mean()
        trained = [*model.parameters()]
        for p, grad in zip(trained, torch.autograd.grad(loss, trained), strict=True):
            p.grad = grad
    try:
        found = float(run.add_up(loss))
    except ModelError as error:
        return str(error)
    own = plain(kind, alone, 0)
    own.backward()
    return found, float(own), error_of(model, alone)


@pytest.mark.parametrize("kind", KINDS)
def test_backwards_that_nobody_looks_at_are_refused(kind: str) -> None:
    """A loss passed by every look at it where autograd was asked for its gradients."""
    for said in run_ranks(2, _begun_otherwise, kind, "backward"):
        assert "loss.backward() of a spread model: got a loss that nobody has looked at" in said
    for said in run_ranks(2, _begun_otherwise, kind, "autograd.grad of a mean"):
        assert "loss of a part: got a mean over" in said


@pytest.mark.parametrize("how", ["backward of a step before", "autograd.grad"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_are_asked_for_are_summed(kind: str, how: str) -> None:
    for found, wanted, error in run_ranks(2, _begun_otherwise, kind, how):
        assert found == pytest.approx(wanted, rel=EXACT)
        assert error < EXACT


def _changed_before(kind: str, how: str) -> str:
    """What is said of gradients that are changed before they are summed."""
    model, run, loss_of = KINDS[kind]()
    loss = loss_of(0)
    run.backward(loss)
    if how == "clipped":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    else:  # a step that is left out
        model.zero_grad(set_to_none=how == "to none")
    try:
        run.add_up(loss)
    except ModelError as error:
        return str(error)
    return "taken"


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_clipped_after_they_are_summed(kind: str) -> None:
    """Each rank would clip its part by the norm of this part."""
    for said in run_ranks(2, _changed_before, kind, "clipped"):
        assert "got gradients of this rank's part that were changed after run.backward" in said
        assert "after run.add_up(loss)" in said
    for how in ("to none", "to zeros"):
        assert run_ranks(2, _changed_before, kind, how) == ["taken", "taken"]


def _learnt_beside(kind: str, how: str) -> tuple[float, float, float] | str:
    """(loss, that of one process, error of the gradients) of weights beside the model, or of a
    disturbance of each token, or what is said of it."""
    model, run, _ = KINDS[kind]()
    alone = copy.deepcopy(model)
    whole = {"ids": drawn(2, 20)["ids"]} if kind == "tokens" else {"x": field(0)}
    out, wanted = run(**run.shard(whole).inputs), alone(**whole)
    out, wanted = (out[0], wanted[0]) if kind == "tokens" else (out, wanted)
    if how == "a head":
        head = torch.nn.Linear(out.shape[-1], 3).double()
        loss, one = head(out).square().sum(), head(wanted).square().sum()
    elif how == "a temperature":
        hot = torch.ones((), dtype=out.dtype, requires_grad=True)
        loss, one = (hot * out).square().sum(), (hot * wanted).square().sum()
    else:
        noise, all_noise = (torch.ones_like(x).requires_grad_() for x in (out, wanted))
        loss, one = (noise * out).square().sum(), (all_noise * wanted).square().sum()
    try:
        run.backward(loss)
    except ModelError as error:
        return str(error)
    found = float(run.add_up(loss))
    one.backward()
    return found, float(one), error_of(model, alone)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_beside_the_model_are_refused(kind: str) -> None:
    """Each rank would train its own by its part."""
    for how, shape in (("a head", "[3"), ("a temperature", "[]")):
        for said in run_ranks(2, _learnt_beside, kind, how):
            assert f"loss of a part: got weights {shape}" in said
            assert "beside the model" in said
    for found, wanted, error in run_ranks(2, _learnt_beside, kind, "a disturbance"):
        assert found == pytest.approx(wanted, rel=EXACT)
        assert error < EXACT


def _added_by_all(how: str) -> tuple[float, float, float] | str:
    """(loss, that of one process, error of the gradients) of a term that ranks have alike, or what
    is said of it."""
    model, run, _ = by_tokens()
    alone, batch = copy.deepcopy(model), drawn(2, 20)
    kept = list[torch.Tensor]()
    model.blocks[0].register_forward_hook(lambda _, __, out: kept.append(out))
    loss, one = run(**run.shard(batch).inputs)[1], alone(**batch)[1]
    x, y = run(**run.shard({"ids": batch["ids"]}).inputs)[0], alone(batch["ids"])[0]
    if how.startswith("a penalty"):
        own, other = (sum(p.square().sum() for p in m.parameters()) for m in (model, alone))
    elif how.startswith("a mean"):
        own, other = run.mean(x.tanh()).square().sum(), y.tanh().mean((0, 1)).square().sum()
    elif how == "centred":  # of each token, though by a mean over all
        own = (x - run.mean(x)).square().sum()
        other = (y - y.mean((0, 1))).square().sum()
    else:  # states of a layer, which are no result of the forward
        alone.blocks[0].register_forward_hook(lambda _, __, out: kept.append(out))
        alone(batch["ids"])
        own, other = (state.square().sum() for state in kept[-2:])
    share = run.share if "share" in how else 1
    loss, one = loss + 0.01 * own * share, one + 0.01 * other
    if "viewed" in how:
        loss = torch.stack([loss.clone(), loss * 0]).view(2, 1).nansum()
    if "for nothing" in how:
        loss = loss + 0 * sum(p.sum() for p in model.parameters())
    try:
        run.backward(loss)
    except ModelError as error:
        return str(error)
    found = float(run.add_up(loss))
    one.backward()
    return found, float(one), error_of(model, alone)


@pytest.mark.parametrize("how", ["a penalty", "a mean", "a penalty, viewed"])
def test_a_term_that_every_rank_adds_is_refused(how: str) -> None:
    """It would count for each of them."""
    for said in run_ranks(2, _added_by_all, how):
        assert "got terms of weights, or of run.mean, that every rank adds" in said
        assert "write loss + run.share * term" in said


@pytest.mark.parametrize(
    "how", ["a penalty, share", "a mean, share", "centred", "of a layer", "of a layer, for nothing"]
)
def test_terms_with_their_share_or_of_tokens_are_exact(how: str) -> None:
    for found, wanted, error in run_ranks(2, _added_by_all, how):
        assert found == pytest.approx(wanted, rel=EXACT)
        assert error < EXACT


def _divided(divisors: list[int], told: bool) -> list[str]:
    """What is said of losses, in as many steps, that are divided by these numbers."""
    model, run, _ = by_tokens()
    said = []
    for number, divisor in enumerate(divisors):
        batch = {"ids": drawn(2, divisor)["ids"]}  # each of two ranks has as many tokens
        part = run.shard(batch, targets=divisor if told else None)
        loss = run(**part.inputs)[0].square().sum() / divisor
        try:
            run.backward(loss)
        except ModelError as error:
            said.append(f"{number}: {error}")
        model.zero_grad()
    return said


def test_a_count_that_equals_a_ranks_tokens_by_chance_is_taken() -> None:
    """The labels of a column of one's own may be as many as a rank has tokens."""
    assert run_ranks(2, _divided, [24, 24], False) == [[], []]
    assert run_ranks(2, _divided, [24, 24, 24, 28], True) == [[], []]
    for said in run_ranks(2, _divided, [24, 28], False):
        assert len(said) == 1
        assert said[0].startswith(
            "1: loss of a part: got what is divided by the tokens of one rank"
        )
    for said in run_ranks(2, _divided, [24, 24, 24], False):
        assert len(said) == 1
        assert said[0].startswith(
            "2: loss of a part: got what is divided by the tokens of one rank"
        )


def _compiled_later(how: str) -> str:
    """What is said of a model that is compiled once it is spread."""
    model, _, loss_of = by_tokens()
    loss_of(0)
    model.compile(backend="eager") if how == "whole" else model.norm.compile(backend="eager")
    try:
        loss_of(0)
    except ModelError as error:
        return str(error)
    return "taken"


def test_a_model_that_is_compiled_once_it_is_spread_is_refused() -> None:
    """It ended in an error of the compiler, which cannot trace what replaces calls."""
    for said in run_ranks(2, _compiled_later, "whole"):
        assert "Gpt.compile() after hr.compile" in said
    assert run_ranks(2, _compiled_later, "a module") == ["taken", "taken"]


def _unseeded(kind: str) -> tuple[float, float, list[float], list[str]]:
    """(loss, that of rank 0's weights, sums of weights after the forward, warnings)."""
    model, run, loss_of = KINDS[kind]()
    last = list(model.parameters())[-1]
    first_rank = copy.deepcopy(model)
    for rank, own in ((0, first_rank), (dist.get_rank(), model)):
        draw = torch.Generator().manual_seed(rank)
        noise = torch.randn(last.shape, dtype=last.dtype, generator=draw)
        list(own.parameters())[-1].data.add_(noise)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loss = loss_of(0)
    sums = [float(p.detach().sum()) for p in model.parameters()]
    found = float(run.add_up(loss))
    return found, float(plain(kind, first_rank, 0)), sums, [str(one.message) for one in told]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_begin_with_the_same_weights(kind: str) -> None:
    """Nobody set a seed before the head was made anew: each rank would train a model of its own."""
    found = run_ranks(2, _unseeded, kind)
    for loss, wanted, sums, told in found:
        assert loss == pytest.approx(wanted, rel=EXACT)
        assert sums == found[0][2]
        assert any("all ranks begin with those of rank 0" in text for text in told)


class PaddedGpt(Gpt):
    """Labels of padding, number 0, have no loss in its own cross entropy."""

    def forward(self, ids: Any, labels: Any = None) -> Any:
        logits, _ = super().forward(ids)
        if labels is None:
            return logits, None
        return logits, f.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)


def _padded(backend: str | None) -> str:
    model = gpt()
    model.__class__ = PaddedGpt
    run, batch = hr.compile(model, backend=backend), drawn(2, 20)
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] == IGNORED, 0)
    try:
        run(**run.shard(batch).inputs)
    except ModelError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_mean_over_other_labels_is_refused(ranks: int, backend: str | None) -> None:
    """It would be divided by the labels that are not -100, whatever the model leaves out."""
    for said in run_ranks(ranks, _padded, backend):
        assert "got ignore_index=0 and a mean" in said


class MaskedGpt(Gpt):
    """Leaves labels out in its forward, and has the mean loss of other labels, too."""

    def forward(self, ids: Any, labels: Any = None, kept: Any = None, more: Any = None) -> Any:
        logits, _ = super().forward(ids)
        if labels is None:
            return logits, None
        if kept is not None:
            labels = labels.masked_fill(kept == 0, IGNORED)
        loss = f.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if more is not None:
            loss = loss + f.cross_entropy(logits.flatten(0, 1), more.flatten())
        return logits, loss


def _miscounted(how: str, backend: str | None) -> tuple[float, float, float] | str:
    """(loss, that of one process, error of the gradients), or what is said of the loss."""
    model, batch = gpt(), drawn(2, 20)
    model.__class__ = MaskedGpt
    alone, labels, told = copy.deepcopy(model), batch["labels"], None
    if how in ("a mask", "a mask that is told", "unused"):
        batch["kept"] = (torch.arange(20) % 4 > 1).long().expand(2, 20).contiguous()
        told = int(((labels != IGNORED) & (batch["kept"] > 0)).sum()) if "told" in how else None
    if how == "other labels":
        batch["more"] = labels.masked_fill(labels % 2 == 0, IGNORED)
    if how == "as many labels":  # at other places
        batch["more"] = labels.flip(1)
    run = hr.compile(model, backend=backend)
    part = run.shard(batch, targets=told)
    own, wanted = run(**part.inputs), alone(**batch)
    loss, one = own[1], wanted[1]
    if how == "unused":
        loss, one = (x.square().sum() for x in (own[0], wanted[0]))
    try:
        run.backward(loss)
    except ModelError as error:
        return str(error)
    found = float(run.add_up(loss))
    one.backward()
    return found, float(one), error_of(model, alone)


@pytest.mark.parametrize("backend", [None, whole("eager")])
def test_a_mean_over_labels_that_nobody_counted_is_refused(backend: str | None) -> None:
    """It would be divided by the number of others."""
    for how in ("a mask", "other labels"):
        for said in run_ranks(2, _miscounted, how, backend):
            assert "mean cross entropy that the model makes: got other labels than" in said


@pytest.mark.parametrize("how", ["a mask that is told", "as many labels", "unused"])
def test_a_mean_over_as_many_labels_is_exact(how: str) -> None:
    for found, wanted, error in run_ranks(2, _miscounted, how, None):
        assert found == pytest.approx(wanted, rel=EXACT)
        assert error < EXACT


def _skipping(places: list[int], mask: list[int] | None) -> str:
    run, batch = hr.compile(gpt()), drawn(1, len(places))
    batch["position_ids"] = torch.tensor([places])
    if mask is not None:
        batch["attention_mask"] = torch.tensor([mask])
    try:
        run.shard(batch)
    except DataError as error:
        return str(error)
    return "taken"


def test_places_that_skip_or_repeat_are_refused() -> None:
    """They were taken for documents, whose tokens do not see each other."""
    (said,) = run_ranks(1, _skipping, [*range(12), 11, *range(12, 19)], None)
    assert "got 11 after 11, wanted 12, or 0" in said
    (said,) = run_ranks(1, _skipping, [*range(12), *range(50, 58)], None)
    assert "position_ids of the batch: got 50 after 11, wanted 12, or 0" in said


def test_places_of_documents_and_of_padding_are_taken() -> None:
    assert run_ranks(1, _skipping, [*range(3, 12), *range(11)], None) == ["taken"]
    assert run_ranks(1, _skipping, [*range(12), *range(5, 13)], None) == ["taken"]
    of_one = [2, 3, 4, 2, 2, 2, 3]  # as RoBERTa counts, from 2 on
    assert run_ranks(1, _skipping, of_one, None) == ["taken"]
    padded = [1] * 4 + [*range(16)]
    assert run_ranks(1, _skipping, padded, [0] * 4 + [1] * 16) == ["taken"]


def _sharded_in_part() -> str:
    model = gpt()
    for block in model.blocks:
        fully_shard(block)
    try:
        hr.compile(model)
    except ModelError as error:
        return str(error)
    return "not refused"


def test_blocks_alone_in_shards_are_refused() -> None:
    """Gradients of the rest would be summed by nobody: it ended in an error of torch."""
    for said in run_ranks(2, _sharded_in_part):
        assert "no FSDP2 around the model, wanted fully_shard(model)" in said


def _taught() -> tuple[float, float, float]:
    """(loss, that of one process, error of the gradients) of a student that learns from a teacher
    which is compiled, too."""
    model, teacher = gpt(), gpt()
    draw = torch.Generator().manual_seed(5)
    for p in teacher.parameters():
        p.data.add_(0.1 * torch.randn(p.shape, dtype=p.dtype, generator=draw))
    alone, alone_teacher = copy.deepcopy(model), copy.deepcopy(teacher)
    run, taught = hr.compile(model), hr.compile(teacher)
    batch = {"ids": drawn(2, 20)["ids"]}

    def loss_of(student: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return f.kl_div(student.log_softmax(-1), wanted.detach().softmax(-1), reduction="sum")

    wanted = taught(**taught.shard(batch).inputs)[0]
    loss = loss_of(run(**run.shard(batch).inputs)[0], wanted)
    run.backward(loss)
    found = float(run.add_up(loss))
    own = loss_of(alone(**batch)[0], alone_teacher(**batch)[0])
    own.backward()
    return found, float(own), error_of(model, alone)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_teacher_is_compiled_too(ranks: int) -> None:
    for found, wanted, error in run_ranks(ranks, _taught):
        assert found == pytest.approx(wanted, rel=EXACT)
        assert error < EXACT


def _given_to_another(kind: str, how: str) -> list[str]:
    """What a second model says of a part of a batch, and of a copy of it."""
    model, run, _ = KINDS[kind]()
    teacher = copy.deepcopy(model) if how == "a copy" else KINDS[kind]()[0]
    if how == "for evaluation":
        teacher.eval().requires_grad_(requires_grad=False)
    part = run.shard(drawn(2, 20) if kind == "tokens" else {"x": field(0)})
    inputs = {name: x for name, x in part.inputs.items() if name != "labels"}
    said = list[str]()
    for given in (inputs, {name: x.clone() for name, x in inputs.items()}):
        try:
            teacher(**given)
        except ModelError as error:
            said.append(str(error))
        else:
            said.append("taken")
    return said


@pytest.mark.parametrize("how", ["as it is", "a copy", "for evaluation"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_given_to_another_model_is_refused(kind: str, how: str) -> None:
    """It would take a part for whole rows, and nothing would be told."""
    for refused, copied in run_ranks(2, _given_to_another, kind, how):
        assert "a model that is not spread over ranks" in refused
        assert copied == "taken"


def _used_otherwise(kind: str) -> bool:
    """Whether a part does what a plain tensor does, in modules of its own model and in place."""
    model, run, loss_of = KINDS[kind]()
    part = run.shard(drawn(2, 20) if kind == "tokens" else {"x": field(0)})
    x = next(iter(part.inputs.values()))
    own = model.token if kind == "tokens" else next(model.children())
    alike = bool((copy.deepcopy(x) == x).all()) and type(copy.deepcopy(x)) is torch.Tensor
    if kind == "tokens":
        alike = alike and own(x).shape == (*x.shape, own.embedding_dim)
    x.mul_(0)
    return alike and not bool(x.any()) and bool(torch.isfinite(loss_of(1)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_is_otherwise_a_tensor(kind: str) -> None:
    assert all(run_ranks(2, _used_otherwise, kind))


def test_what_a_loop_does_with_tokens() -> None:
    """Catches what torch refuses for tensors of other classes, as decoding and logging need it, and
    marks on what tokens only pick."""
    own = torch.nn.Embedding(70, 4)
    scores = torch.randn(2, 6, 70, generator=torch.Generator().manual_seed(0))
    uses: list[Callable[[Any], Any]] = [
        lambda x: x.cpu().numpy(),
        lambda x: x[0].tolist(),
        lambda x: [f"{x[0, 1]:d}", int(x.max()), x[1, 2].item(), len(x)],
        lambda x: torch.arange(20)[x],
        lambda x: scores[x == 3],
        lambda x: torch.sum(input=x),
        lambda x: f.cross_entropy(scores[:, :-1].flatten(0, 1), x[:, 1:].flatten()),
        lambda x: torch.cat([x, x]),
        own,
        copy.copy,
    ]
    ids = torch.arange(12).view(2, 6)
    for use in uses:
        found = use(of_part(ids.clone(), own))
        assert type(found) is type(use(ids))
        assert repr(found) == repr(use(ids))


def _compiled_on_a_part() -> bool:
    """Whether a compiled function picks by a part's tokens what it picks uncompiled."""
    run, batch = hr.compile(gpt()), drawn(2, 20)
    ids = run.shard(batch).inputs["ids"]
    scores = torch.randn(*ids.shape, 64, generator=torch.Generator().manual_seed(3))

    def picked(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return scores.gather(-1, ids[..., None])[..., 0]

    found = torch.compile(picked, backend="aot_eager")(scores, ids)
    return torch.equal(found, picked(scores, ids.clone()))


def test_a_compiled_function_takes_a_part() -> None:
    """Catches tensors that graphs do not know."""
    assert all(run_ranks(2, _compiled_on_a_part, timeout_s=200))


def _gradient_of_an_input() -> float:
    """The error of the gradient by a part of an input that is asked for after it was cut."""
    model, run, _ = by_axis()
    alone, whole = copy.deepcopy(model), field(0).requires_grad_()
    alone(whole).square().sum().backward()
    part = run.shard({"x": field(0)})
    own = part.inputs["x"].requires_grad_()
    run(**part.inputs).square().sum().backward()
    return float((run.local(whole.grad, DIMS) - own.grad).abs().max())


def test_a_part_has_gradients() -> None:
    for error in run_ranks(2, _gradient_of_an_input):
        assert error < EXACT


class Counting(torch.nn.Module):
    """Changes a buffer whenever it is called in training."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3), persistent=persistent)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.add_(1)
            self.calls.add_(1)
        return x


def _changing(kind: str, what: str) -> str:
    """What a model says of a first batch whose embedding or buffers change with a rank's tokens."""
    model, run, loss_of = KINDS[kind]()
    if what in ("sparse", "max_norm"):
        of_tokens = torch.nn.Embedding(9, 4, **{what: True if what == "sparse" else 1.0})
        model.add_module("other", of_tokens)
    else:
        hooked = Counting(persistent=what == "saved")
        model.add_module("counting", hooked)
        leaf = next(m for m in model.modules() if isinstance(m, torch.nn.Linear))
        leaf.register_forward_hook(lambda module, args, out: hooked(out))
    try:
        run.backward(loss_of(0))
    except ModelError as error:
        return str(error)
    return "taken"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("what", "wanted"),
    [
        ("sparse", "embedding other: got sparse=True"),
        ("max_norm", "embedding other: got max_norm"),
        ("saved", "counting.seen of"),
        ("not saved", "taken"),
    ],
)
def test_what_would_drift_apart_by_rank_is_refused(kind: str, what: str, wanted: str) -> None:
    """Weights and buffers that forwards change are those of one rank's tokens."""
    for said in run_ranks(2, _changing, kind, what):
        assert wanted in said
