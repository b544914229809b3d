"""What a user may do to a model that is spread by its tokens is exact, or refused by name."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as f
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import headrace as hr
from headrace.adopt.operators import StandIn
from headrace.cli.foreign_models import foreign_model
from headrace.errors import DataError, ModelError, SpecError
from headrace.ops.loss import IGNORED
from ranks import run_ranks
from running.adopt.axial import DIMS, stages, table
from running.adopt.foreign import Gpt, drawn, gpt
from spread import whole

transformers = pytest.importorskip("transformers")

EXACT = 1e-10

pytestmark = pytest.mark.timeout(200)


def tokens(rows: int, count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Token numbers and labels, a third of which are ignored."""
    ids = torch.randint(3, 97, (rows, count), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.masked_fill(ids % 3 == 0, IGNORED)}


class SmoothedForCausalLM(transformers.LlamaForCausalLM):
    """With a small loss of the logits' sizes, made in its own forward."""

    def forward(self, *args: Any, labels: Any = None, **named: Any) -> Any:
        out = super().forward(*args, labels=labels, **named)
        if labels is not None:
            out.loss = out.loss + 1e-4 * out.logits.logsumexp(-1).square().mean()
        return out


class DistilledForCausalLM(transformers.LlamaForCausalLM):
    """Learns from a teacher, which it equals in the beginning."""

    teacher: Any

    def forward(self, input_ids: Any = None, labels: Any = None, **named: Any) -> Any:
        out = super().forward(input_ids, labels=labels, **named)
        if labels is not None:
            wanted = self.teacher[0](input_ids, **named).logits.softmax(-1)
            scores = out.logits.log_softmax(-1)
            out.loss = out.loss + f.kl_div(scores, wanted, reduction="batchmean")
        return out


class RegularForCausalLM(transformers.LlamaForCausalLM):
    """With a loss beside that of its labels, in training alone."""

    def forward(self, input_ids: Any = None, labels: Any = None, **named: Any) -> Any:
        out = super().forward(input_ids, labels=labels, **named)
        if labels is not None and self.training:
            out.loss = out.loss + 0.1 * out.logits.square().mean()
        return out


def smoothed(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    """A function in the place of the model's loss."""
    flat = logits[:, :-1].flatten(0, 1)
    return f.cross_entropy(flat, labels[:, 1:].flatten(), label_smoothing=0.1)


def with_own_loss(kind: str) -> Any:
    model: Any = foreign_model("llama", 0)
    if kind == "loss_function":
        model.loss_function = smoothed
    else:
        model.teacher = [copy.deepcopy(model)]
        model.__class__ = {
            "forward": SmoothedForCausalLM,
            "teacher": DistilledForCausalLM,
            "training": RegularForCausalLM,
        }[kind]
    return model


def with_loss_beside(kind: str) -> Any:
    """A model whose loss depends on more than the last hidden states of its layers."""

    class OddForCausalLM(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None, **named: Any) -> Any:
            out = super().forward(input_ids, labels=labels, output_hidden_states=True, **named)
            if labels is not None and kind == "states of other layers":
                out.loss = out.loss + out.hidden_states[1].square().mean()
            if labels is not None and kind == "a second call":
                out.loss = out.loss + self.model(input_ids).last_hidden_state.square().mean()
            return out

    model: Any = foreign_model("llama", 0)
    model.__class__ = OddForCausalLM
    return model


@pytest.mark.parametrize("kind", ["states of other layers", "a second call"])
def test_a_models_own_loss_is_not_replaced(kind: str) -> None:
    """Catches a loss, or a part of it however small, that is dropped for the cross entropy."""
    run = hr.compile(with_loss_beside(kind))
    shard = run.shard(tokens(2, 20))
    with pytest.raises(ModelError, match=r"loss of .*ForCausalLM: got .* of the model's own"):
        run(**shard.inputs)


class ScheduledForCausalLM(transformers.LlamaForCausalLM):
    """With a loss beside that of its labels, whose coefficient is 0 at first."""

    weight = 0.0

    def forward(self, input_ids: Any = None, labels: Any = None, **named: Any) -> Any:
        out = super().forward(input_ids, labels=labels, **named)
        if labels is not None:
            out.loss = out.loss + self.weight * out.logits.square().mean()
        return out


class MaskingForCausalLM(transformers.LlamaForCausalLM):
    """Does not learn one of the labels."""

    def forward(self, input_ids: Any = None, labels: Any = None, **named: Any) -> Any:
        kept = None if labels is None else labels.masked_fill(labels == 96, IGNORED)
        return super().forward(input_ids, labels=kept, **named)


class ValuelessForCausalLM(transformers.LlamaForCausalLM):
    """With a term that has a gradient and is 0."""

    def forward(self, input_ids: Any = None, labels: Any = None, **named: Any) -> Any:
        out = super().forward(input_ids, labels=labels, **named)
        if labels is not None:
            sizes = out.logits.square().mean()
            out.loss = out.loss + sizes - sizes.detach()
        return out


class TwiceForCausalLM(transformers.LlamaForCausalLM):
    """R-Drop: two passes that draw other dropout are to agree."""

    def forward(self, input_ids: Any = None, labels: Any = None, **named: Any) -> Any:
        out = super().forward(input_ids, labels=labels, **named)
        if labels is not None:
            other = super().forward(input_ids, **named).logits.log_softmax(-1)
            out.loss = out.loss + f.kl_div(other, out.logits.softmax(-1), reduction="batchmean")
        return out


class WeighedForCausalLM(transformers.LlamaForCausalLM):
    """With a loss whose weight is an argument."""

    def forward(
        self, input_ids: Any = None, labels: Any = None, alpha: float = 0.5, **named: Any
    ) -> Any:
        out = super().forward(input_ids, labels=labels, **named)
        if labels is not None:
            out.loss = out.loss + alpha * out.logits.square().mean()
        return out


def as_kind(kind: Any) -> Any:
    """A tiny Llama of another class."""
    model: Any = foreign_model("llama", 0)
    model.__class__ = kind
    return model


def set_weight(model: Any) -> None:
    model.weight = 1.0


def set_loss_function(model: Any) -> None:
    model.loss_function = smoothed


LATER: dict[str, tuple[Any, Callable[[Any], None]]] = {
    "a coefficient": (ScheduledForCausalLM, set_weight),
    "a loss_function": (transformers.LlamaForCausalLM, set_loss_function),
    "a label": (MaskingForCausalLM, lambda _: None),
    "a gradient": (ValuelessForCausalLM, lambda _: None),
}


def later_error(what: str) -> float:
    """The largest error of loss and gradients of a second batch, whose loss is another than the
    cross entropy as that of the first was not."""
    kind, change = LATER[what]
    model, plain = as_kind(kind), as_kind(kind)
    run, first = hr.compile(model), tokens(2, 20)
    first["input_ids"] = first["input_ids"].clamp(max=90)
    first["labels"] = first["input_ids"].clone()
    run(**run.shard(first).inputs)
    change(model), change(plain)
    batch = {"input_ids": first["input_ids"], "labels": first["labels"].clone()}
    batch["labels"][:, 5:12] = 96
    loss = run(**run.shard(batch).inputs).loss
    run.backward(loss)
    wanted = plain(**batch).loss
    wanted.backward()
    errors = [abs(float(run.add_up(loss)) / float(wanted.detach()) - 1)]
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        largest = float(other.grad.abs().max())
        errors.append(float((mine.grad - other.grad).abs().max()) / largest)
    return max(errors)


@pytest.mark.parametrize(("ranks", "what"), [*((1, what) for what in LATER), (2, "a coefficient")])
def test_a_loss_that_differs_later_is_the_models_own(ranks: int, what: str) -> None:
    """Catches a loss that is replaced by the cross entropy as it equalled it for a few tokens of
    the first batch: a coefficient of 0, a function set later, a label that these tokens lack, and a
    term without a value."""
    assert max(run_ranks(ranks, later_error, what)) < 2e-6  # norms of Llama are single precision


def test_a_loss_of_two_passes_is_refused() -> None:
    """Catches R-Drop, whose passes agree while dropout is held still."""
    run = hr.compile(as_kind(TwiceForCausalLM))
    part = run.shard(tokens(2, 20))
    with pytest.raises(ModelError, match=r"got a forward of the model's own, of .*ordinary_use"):
        run(**part.inputs)


def test_a_loss_function_of_ones_own_within_a_loop() -> None:
    """Catches one that is set after a loop has begun, and dropped there."""
    model = foreign_model("llama", 0)
    run = hr.compile(model)
    part = run.shard(tokens(2, 20))
    undo = run.install()
    run.take(part)
    model(**part.inputs)
    set_loss_function(model)
    with pytest.raises(ModelError, match="got a loss_function of the model's own"):
        model(**part.inputs)
    run.release()
    undo()


def weighed() -> float:
    """The error of a loss by an argument of the model's own forward."""
    model, plain, batch = as_kind(WeighedForCausalLM), as_kind(WeighedForCausalLM), tokens(2, 20)
    run = hr.compile(model)
    loss = run(**run.shard(batch).inputs, alpha=5.0).loss
    run.backward(loss)
    return abs(float(run.add_up(loss)) / float(plain(**batch, alpha=5.0).loss.detach()) - 1)


def test_arguments_of_a_models_own_loss_reach_it() -> None:
    """Catches arguments beside the part that are dropped."""
    assert max(run_ranks(2, weighed)) < 2e-6  # norms of Llama are single precision


REFUSED_ARGUMENTS: dict[str, tuple[Any, str]] = {
    "num_items_in_batch": (7, r"num_items_in_batch: got int beside labels.*targets="),
    "ignore_index": (3, "ignore_index: got int beside labels"),
    "shift_labels": (torch.zeros(2, 20).long(), "shift_labels: got Tensor beside labels"),
    "attention_mask": (torch.ones(2, 20), r"attention_mask: got Tensor.*give it to shard\(\)"),
    "logits_to_keep": (2, "logits_to_keep: got 2.*run.gather"),
    "output_attentions": (True, "output_attentions: got True, wanted none; .* makes no maps"),
    "inputs_embeds": (torch.zeros(2, 20, 48), "input inputs_embeds: got what is no number"),
}


@pytest.mark.parametrize("name", REFUSED_ARGUMENTS)
def test_arguments_that_are_wrong_for_a_part_are_refused(name: str) -> None:
    """Catches arguments that change nothing, or each rank's own tokens, in silence, by ``run`` and
    within a loop."""
    value, says = REFUSED_ARGUMENTS[name]
    model = foreign_model("llama", 0)
    run = hr.compile(model)
    part = run.shard(tokens(2, 20))
    with pytest.raises(ModelError, match=says):
        run(**part.inputs, **{name: value})
    run(**part.inputs, **{name: None if name != "logits_to_keep" else 0})
    undo = run.install()
    run.take(part)
    with pytest.raises(ModelError, match=says):
        model(**part.inputs, **{name: value})
    run.release()
    undo()


def test_a_mask_by_place_is_refused() -> None:
    """Catches a mask that a loop gives as the second argument."""
    model = foreign_model("bert", 0)
    run, mask = hr.compile(model), torch.ones(2, 20)
    part = run.shard(tokens(2, 20))
    undo = run.install()
    run.take(part)
    rest = {name: x for name, x in part.inputs.items() if name != "input_ids"}
    with pytest.raises(ModelError, match="attention_mask: got Tensor"):
        model(part.inputs["input_ids"], mask, **rest)
    run.release()
    undo()


@pytest.mark.parametrize(
    ("name", "value", "got"),
    [
        ("use_cache", True, "bool"),
        ("texts", ["a", "b"], "list"),
        ("attention_mask", {"full_attention": torch.ones(2, 1, 20, 20)}, "dict"),
    ],
)
def test_fields_that_are_no_tensors_are_named(name: str, value: Any, got: str) -> None:
    """Catches tracebacks from the depths of a batch."""
    run = hr.compile(foreign_model("llama", 0))
    with pytest.raises(DataError, match=f"field {name} of the batch: got {got}, wanted a tensor"):
        run.shard({**tokens(2, 20), name: value})
    part = run.shard({**tokens(2, 20), name: None})  # as if it were not there
    assert name not in part.inputs


def wrapped(how: str) -> str:
    """What is said of a model within a wrapper, by tokens and by axes."""
    model = gpt()
    if how == "torch.compile":
        called: nn.Module = torch.compile(model, backend="eager")  # type: ignore[assignment]
    elif how == "FSDP1":
        called = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    else:
        called = nn.DataParallel(model)
    said = list[str]()
    for adopt in (
        lambda: hr.compile(called, labels="next"),
        lambda: hr.adapt(called, stages=[], inputs={"x": "b t c"}, axis="t", batch="b"),
    ):
        with pytest.raises(ModelError) as caught:
            adopt()
        said.append(str(caught.value))
    assert said[0] == said[1]
    return said[0]


@pytest.mark.parametrize("how", ["torch.compile", "FSDP1", "DataParallel"])
def test_wrappers_that_are_not_known_are_refused(how: str) -> None:
    """Catches gradients that a wrapper adds up in a way of its own, and words about labels where a
    compiled model is what is wrong."""
    for said in run_ranks(1, wrapped, how):
        assert said.startswith("model under ")
        assert "fully_shard (FSDP2)" in said


def clamped(linear: bool) -> str:
    """What is said of a hook on gradients when the ranks' gradients are added up."""
    model = gpt()
    factor = (lambda g: 2 * g) if linear else (lambda g: g.clamp(-0.01, 0.01))
    for parameter in model.parameters():
        parameter.register_hook(factor)
    run, batch = hr.compile(model, labels="next"), drawn(1, 12)
    try:
        loss = run(**run.shard(batch))[1]
        run.backward(loss)
        run.add_up(loss)
    except ModelError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("linear", [True, False])
def test_hooks_on_gradients_of_parts(linear: bool) -> None:
    """Catches gradients that each rank clamps before they are added up."""
    for said in run_ranks(2, clamped, linear):
        assert ("nothing" if linear else "no linear function of its gradient") in said


def test_inputs_without_names_are_refused() -> None:
    """Catches a TypeError of Python where a part's inputs are given by place."""
    run = hr.compile(gpt())
    part = run.shard(drawn(1, 12))
    with pytest.raises(ModelError, match=r"got Tensor without a name, wanted run\(\*\*part"):
        run(part.inputs["ids"])
    with pytest.raises(ModelError, match="got BatchPart without a name"):
        run(part)
    with pytest.raises(ModelError, match="others than were sharded"):
        run(ids=[1, 2])


def own_loss_error(
    make: Callable[[], Any], rows: int, count: int, wrapped: str, exchange: str, pad: int = 0
) -> float:
    """How far loss, logits and gradients of a model's own loss are from one process'."""
    plain, model = make(), make()
    batch = tokens(rows, count)
    if pad:
        mask = torch.ones_like(batch["input_ids"])
        mask[0, count - pad :] = 0
        batch = {**batch, "attention_mask": mask, "labels": batch["labels"].clone()}
        batch["labels"][0, count - pad :] = IGNORED
    run = hr.compile(wrap(model, wrapped), exchange=exchange)  # type: ignore[arg-type]
    part = run.shard(batch)
    out = run(**part.inputs)
    run.backward(out.loss)
    total = float(run.add_up(out.loss))
    wanted = plain(**batch)
    wanted.loss.backward()
    logits = run.gather(out.logits)
    kept = slice(None) if not pad else slice(1, None)
    errors = [
        abs(total / float(wanted.loss.detach()) - 1),
        float((logits - wanted.logits)[kept].abs().max() / wanted.logits.abs().max()),
    ]
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None, name
        full = getattr(mine.grad, "full_tensor", lambda g=mine.grad: g)()
        largest = max(float(other.grad.abs().max()), 1e-3 * float(wanted.loss.detach()))
        errors.append(float((full - other.grad).abs().max()) / largest)
    return max(errors)


def wrap(model: Any, how: str) -> Any:
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "fsdp":
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
    return model


class TwoAheadForCausalLM(transformers.GPT2LMHeadModel):
    """Predicts the token after the next too, by a head of its own, and keeps scores small; in fp64
    throughout."""

    def forward(self, input_ids: Any = None, labels: Any = None, **named: Any) -> Any:
        hidden = self.transformer(input_ids, **named).last_hidden_state
        logits, further = self.lm_head(hidden), self.further(hidden)
        if labels is None:
            return transformers.modeling_outputs.CausalLMOutput(logits=logits)
        loss = f.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss = loss + 0.3 * f.cross_entropy(further[:, :-2].flatten(0, 1), labels[:, 2:].flatten())
        kept = labels[:, 1:] != IGNORED  # what padding gives is nobody's business
        sizes = logits[:, :-1].logsumexp(-1).square() * kept
        loss = loss + 1e-4 * sizes.sum() / kept.sum()
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def two_ahead() -> Any:
    model: Any = foreign_model("gpt2", 0)
    model.further = nn.Linear(model.config.n_embd, model.config.vocab_size).double()
    with torch.no_grad():
        model.further.weight.normal_(generator=torch.Generator().manual_seed(0))
        model.further.bias.zero_()
    model.__class__ = TwoAheadForCausalLM
    return model


@pytest.mark.parametrize(
    ("ranks", "kind", "rows", "count", "wrapped", "exchange"),
    [
        (2, "loss_function", 2, 21, "", "ulysses"),
        (3, "forward", 1, 20, "", "ring"),
        (2, "teacher", 2, 20, "", "gather"),
        (2, "training", 2, 20, "ddp", "ulysses"),
        (2, "two ahead", 2, 23, "", "ring"),
        (1, "two ahead", 2, 23, "", "ulysses"),
        whole(4, "two ahead", 1, 23, "", "ulysses"),
        whole(4, "loss_function", 2, 21, "ddp", "ring"),
        whole(2, "forward", 2, 20, "fsdp", "ulysses"),
        whole(3, "teacher", 3, 20, "", "ulysses"),
    ],
)
def test_a_models_own_loss_is_its_loss(
    ranks: int, kind: str, rows: int, count: int, wrapped: str, exchange: str
) -> None:
    """Catches a loss that is made of one rank's tokens, of tokens in the order of a ring, or that
    counts for every rank; a teacher that is run on a part; and gradients of heads that are."""
    make = two_ahead if kind == "two ahead" else partial(with_own_loss, kind)
    limit = EXACT if kind == "two ahead" else 2e-6  # norms of Llama are single precision
    args = (make, rows, count, wrapped, exchange)
    assert max(run_ranks(ranks, own_loss_error, *args)) < limit


def test_padding_and_a_models_own_loss() -> None:
    """Catches a mask that is given to layers on parts, and one that the head does not see."""
    assert max(run_ranks(2, own_loss_error, two_ahead, 2, 23, "", "ulysses", 6)) < EXACT


def several_batches() -> None:
    run = hr.compile(two_ahead())
    part = run.shard(tokens(2, 20), targets=99)
    with pytest.raises(ModelError, match="got a step of 99 targets, of which the batch has"):
        run(**part.inputs)


def test_a_models_own_loss_is_of_one_batch() -> None:
    """Catches means of several batches that are added up as sums."""
    run_ranks(2, several_batches)


def balanced() -> float:
    """The error of the gradient of a loss of means over tokens."""
    model, plain = two_ahead(), two_ahead()
    run, batch = hr.compile(model), tokens(2, 21)
    part = run.shard({"input_ids": batch["input_ids"]})
    scores = run(**part.inputs).logits.softmax(-1)
    loss = run.share * run.mean(scores).square().sum()
    run.backward(loss)
    total = float(run.add_up(loss))
    wanted = plain(batch["input_ids"]).logits.softmax(-1).mean(dim=(0, 1)).square().sum()
    wanted.backward()
    mine, other = (m.transformer.wte.weight.grad for m in (model, plain))
    off = float((mine - other).abs().max() / other.abs().max())
    return max(off, abs(total / float(wanted.detach()) - 1))


@pytest.mark.parametrize("ranks", [2, whole(3)])
def test_means_over_all_tokens_have_their_adjoint(ranks: int) -> None:
    """Catches a mean over one rank's tokens, and one whose gradient counts for every rank."""
    assert max(run_ranks(ranks, balanced)) < EXACT


def of_the_guide() -> tuple[float, float]:
    """The loss that the guide's lines on losses end with, and that of one process."""
    page = (Path(__file__).parents[3] / "docs/guides/your-own-model.md").read_text()
    section = page[page.index("## Losses of your own") :]
    own, balanced_ = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)[:2]
    model, batch = two_ahead(), tokens(2, 21)
    run = hr.compile(model)
    names: dict[str, Any] = {"run": run, "batch": batch, "cross_entropy": f.cross_entropy}
    exec(own, names)
    names["scores"] = names["logits"].detach().softmax(-1)
    names["chosen"] = (names["scores"] > 0.02).double()
    names["loss"] = torch.zeros((), dtype=torch.float64, requires_grad=True)
    exec(balanced_, names)
    plain = two_ahead()(batch["input_ids"]).logits.detach()
    scores = plain.softmax(-1)
    wanted = ((scores > 0.02).double().mean((0, 1)) * scores.mean((0, 1))).sum()
    return float(names["balance"]), float(wanted)


def test_the_losses_of_the_guide_run() -> None:
    """Catches names that have changed since the page was written, and means over a part."""
    for found, wanted in run_ranks(2, of_the_guide):
        assert found == pytest.approx(wanted, rel=1e-12)


def averaged_of_the_guide() -> tuple[bool, float]:
    """Whether the guide's moving average is a plain model that runs, and how far it has come."""
    page = (Path(__file__).parents[3] / "docs/guides/your-own-model.md").read_text()
    section = page[page.index("## Evaluation") : page.index("## What is checked")]
    logits, average = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
    model: Any = two_ahead()
    run, batch = hr.compile(model), tokens(2, 21)
    names: dict[str, Any] = {"run": run, "model": model, "torch": torch, "copy": copy}
    names["ids"] = batch["input_ids"]
    exec(logits, names)
    copied, moving = average.split("\n", 1)
    exec(copied, names)
    kept: Any = names["average"]
    alike = torch.allclose(kept(batch["input_ids"]).logits, names["logits"])
    before = model.further.bias.detach().clone()
    with torch.no_grad():
        model.further.bias += 1.0
    exec(moving, names)
    return alike, float((names["average"].further.bias - before).abs().max())


def test_the_evaluation_of_the_guide_runs() -> None:
    """Catches logits of one rank's tokens, and an average that is no plain model, or does not
    move."""
    for alike, moved in run_ranks(2, averaged_of_the_guide):
        assert alike
        assert moved == pytest.approx(0.001)


def own_loss_by_hand() -> float:
    """The error of a gradient of a smoothed loss that is summed as the refusal says."""
    run, plain = hr.compile(with_own_loss("loss_function")), with_own_loss("loss_function")
    batch = tokens(2, 21)
    part = run.shard(batch)
    logits = run(**{k: v for k, v in part.inputs.items() if k != "labels"}).logits
    flat = logits.flatten(0, 1), part.labels.flatten()
    loss = f.cross_entropy(*flat, label_smoothing=0.1, reduction="sum") / part.targets
    run.backward(loss)
    total = float(run.add_up(loss))
    wanted = plain(**batch).loss
    wanted.backward()
    mine, others = (m.lm_head.weight.grad for m in (run.model, plain))
    off = float((mine - others).abs().max() / others.abs().max())
    return max(off, abs(total - float(wanted.detach())))


def test_a_loss_of_ones_own_is_summed_by_hand() -> None:
    """Catches labels and targets that do not make the model's loss."""
    assert max(run_ranks(2, own_loss_by_hand)) < 1e-6  # norms of transformers are single precision


class Gated(nn.Module):
    """A convolution over tokens behind a gate that starts at zero."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(features, features, 3)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate * self.conv(f.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)


class Faint(nn.Module):
    """A convolution over tokens behind a small gate."""

    gate = 1e-5

    def __init__(self, features: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(features, features, 3, bias=False)
        self.scale = nn.Parameter(torch.full((features,), self.gate))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.conv(f.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)


class FaintInHalves(Faint):
    """With a gate that half types hide."""

    gate = 0.02


class Dirac(Faint):
    """Looks at earlier tokens from the second step on."""

    gate = 1.0

    def __init__(self, features: int) -> None:
        super().__init__(features)
        with torch.no_grad():
            self.conv.weight[..., :2] = 0


class TokenShift(nn.Module):
    """Mixes each token with the one before, which has a share of 0 at first."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.mu = nn.Parameter(torch.ones(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.mu + f.pad(x, (0, 0, 1, 0))[:, :-1] * (1 - self.mu)


class NearlyCentred(nn.Module):
    """Without a tenth of the mean over all tokens."""

    def __init__(self, features: int) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - 0.1 * x.mean(dim=1, keepdim=True)


class Indexed(Gpt):
    """Looks its tokens up by an index, not by a module."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = self.token.weight[ids]
        for block in self.blocks:
            x = block(x)
        return (self.norm(x) @ self.token.weight.t(),)


def indexed() -> Gpt:
    model = gpt(other=Faint)
    model.__class__ = Indexed
    return model


class Dilated(nn.Module):
    """Looks at the token 16 places before."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(f.pad(x, (0, 0, 16, 0))[:, :-16])


class Full(nn.Module):
    """Takes the first 16 tokens alone."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x[:, :16])
        return f.pad(y, (0, 0, 0, x.shape[1] - y.shape[1]))


class CentredInTraining(nn.Module):
    """Without the mean over all tokens, in training alone."""

    def __init__(self, features: int) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(dim=1, keepdim=True) if self.training else x


class DropPath(nn.Module):
    """Drops whole rows in training."""

    def __init__(self, features: int) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        return x * torch.empty(x.shape[0], 1, 1, dtype=x.dtype).bernoulli_(0.9)


class Dropped(nn.Module):
    """The same by torch's function, and the user's own coin."""

    def __init__(self, features: int) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * f.dropout(torch.ones(len(x), 1, 1, dtype=x.dtype), 0.1, self.training)


class Coin(nn.Module):
    """Is left out now and then, by a coin of Python's."""

    def __init__(self, features: int) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.training and random.random() < 0.5 else 2 * x


class Auxiliary(Gpt):
    """With a small loss that is a mean over tokens, in training alone."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits, loss = super().forward(ids, labels)
        if loss is not None and self.training:
            loss = loss + 1e-7 * logits.square().mean()
        return logits, loss


def auxiliary() -> Gpt:
    model = gpt()
    model.__class__ = Auxiliary
    return model


class Table(nn.Module):
    """Adds sines that it counts itself, and keeps until a call has another number of tokens."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.rates = torch.arange(1, features + 1) / features
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None or len(self.kept) != x.shape[1]:
            self.kept = torch.sin(torch.arange(x.shape[1])[:, None] * self.rates).to(x)
        return x + self.kept


class Growing(Table):
    """Keeps a table that grows where a call has more tokens than any before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None or len(self.kept) < x.shape[1]:
            places = torch.arange(0.0, x.shape[1], dtype=x.dtype)
            self.kept = torch.sin(places[:, None] * self.rates)
        return x + self.kept[: x.shape[1]]


def growing() -> str:
    """What is said of a model whose table is as long as the tokens of a rank."""
    run = hr.compile(gpt(other=Growing))
    part = run.shard({"ids": drawn(1, 20)["ids"]})
    with pytest.raises(ModelError) as caught:
        run(**part.inputs)
    return str(caught.value)


def test_tables_that_are_too_short_are_refused_on_all_ranks() -> None:
    """Catches an index beyond the table on one rank, while others wait for it."""
    for said in run_ranks(2, growing):
        assert "table of places in Growing.forward" in said
        assert "got 10 rows, wanted 20, as many as the longest document has tokens" in said


class OfClasses(Gpt):
    """With a mean over probabilities of classes, in which tokens without a label count, too."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits, loss = super().forward(ids)
        if labels is not None:
            classes = f.one_hot(labels.clamp(min=0), logits.shape[-1]).to(logits)
            classes = classes * (labels >= 0)[..., None]
            loss = f.cross_entropy(logits.flatten(0, 1), classes.flatten(0, 1))
        return logits, loss


def of_classes() -> Gpt:
    model = gpt()
    model.__class__ = OfClasses
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a table of as many tokens": (lambda: gpt(other=Table), "another result for token"),
    "probabilities of classes": (of_classes, "got probabilities of classes and a mean"),
    "a convolution behind a gate": (lambda: gpt(other=Gated), "another result for token 5"),
    "a far neighbour": (lambda: gpt(other=Dilated), "parts of 60 tokens.*another result"),
    "a capacity": (lambda: gpt(other=Full), "parts of 60 tokens.*another result"),
    "a mean in training": (lambda: gpt(other=CentredInTraining), "other tokens in training"),
    "a loss in training": (auxiliary, "beside its cross entropy"),
    "rows that are dropped": (lambda: gpt(other=DropPath), "module DropPath: got random numbers"),
    "rows dropped by torch": (lambda: gpt(other=Dropped), "module Dropped: got random numbers"),
    "a coin": (lambda: gpt(other=Coin), "module Coin: got random numbers"),
    "a faint convolution": (lambda: gpt(other=Faint), "gradient of Faint: got a part by token 0"),
    "a faint one of indices": (indexed, "gradient of Faint: got a part by token 0"),
    "a convolution of one tap": (lambda: gpt(other=Dirac), "gradient of Dirac: got a part"),
    "a shift of no share": (lambda: gpt(other=TokenShift), "gradient of TokenShift: got a part"),
    "a faint mean in halves": (
        lambda: gpt(other=NearlyCentred).bfloat16(),
        "gradient of NearlyCentred: got a part",
    ),
    "a faint convolution in halves": (
        lambda: gpt(other=FaintInHalves).bfloat16(),
        "gradient of FaintInHalves: got a part|loss of the model: got",  # by its few labels
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_shows_in_ordinary_use_alone_is_refused(what: str) -> None:
    """Catches what evaluation of 13 tokens with the first weights does not show."""
    make, says = REFUSED[what]
    with pytest.raises(ModelError, match=says):
        hr.compile(make()).shard(drawn(1, 60))


def test_a_graph_is_looked_at_by_gradients() -> None:
    """Catches gradients that are seen in eager models alone; and other models that are refused."""
    with pytest.raises(ModelError, match="gradient of Gpt: got a part by token 0"):
        hr.compile(gpt(other=TokenShift), backend="eager").shard(drawn(1, 20))
    hr.compile(gpt(checkpointed=True), backend="eager").shard(drawn(1, 20))


@pytest.mark.parametrize("kind", ["ernie4_5_moe", "afmoe", "gpt_oss", "bitnet"])
def test_what_gradients_see_of_single_tokens_is_taken(kind: str) -> None:
    """Catches experts that are refused as their tokens are indexed in another order, and numbers
    that are rounded by token."""
    run = hr.compile(foreign_model(kind, 0))
    run.shard(tokens(2, 20))


def test_a_longer_batch_is_looked_at_again() -> None:
    """Catches a capacity that the first batch was too short to reach."""
    run = hr.compile(gpt(other=Full))
    run.shard(drawn(1, 14))
    with pytest.raises(ModelError, match=r"parts of 60 tokens.*another result for token"):
        run.shard(drawn(1, 60))


class Dropping(nn.Module):
    """Drops some of the values."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(features, features), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.linear(x).relu())


@pytest.mark.parametrize("level", ["attention", "full"])
def test_dropout_is_computed_again(level: Any) -> None:
    """Catches a probe in which what is computed again drops other values, or any at all."""
    losses = []
    for recompute in (None, level):
        run, batch = hr.compile(gpt(other=Dropping), recompute=recompute), drawn(1, 20)
        _, loss = run(**run.shard(batch).inputs)
        run.backward(loss)
        losses.append(float(run.add_up(loss)))
    assert losses[0] == pytest.approx(losses[1], rel=EXACT)


class InADict(Gpt):
    """Returns a dict, as models for transformers' Trainer do."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits, loss = super().forward(ids, labels)
        return {"logits": logits} if loss is None else {"loss": loss, "logits": logits}


def results_in_a_dict() -> tuple[float, float, float]:
    """(loss, that of one process, how far logits are off) of such a model."""
    model: Any = gpt()
    model.__class__ = InADict
    alone, run, batch = copy.deepcopy(model), hr.compile(model), drawn(2, 21)
    outputs = run(**run.shard(batch).inputs)
    run.backward(outputs["loss"])
    found = float(run.add_up(outputs["loss"]))
    whole_logits = run.gather(run(**run.shard({"ids": batch["ids"]}).inputs)["logits"])
    wanted = alone(**batch)
    return found, wanted["loss"].item(), float((whole_logits - wanted["logits"]).abs().max())


def test_results_in_a_dict() -> None:
    for found, wanted, off in run_ranks(2, results_in_a_dict):
        assert found == pytest.approx(wanted, rel=EXACT)
        assert off < EXACT


class Switched(nn.Module):
    """Mixes tokens where a flag says so, and squares where another does."""

    def __init__(self) -> None:
        super().__init__()
        self.mixes = self.squares = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(1, keepdim=True) if self.mixes else x
        return x.square() if self.squares else x


def test_a_flag_that_is_set_later_is_looked_at() -> None:
    """Catches a model that mixes tokens from some step on."""
    model: Any = gpt()
    model.blocks[0].other = Switched()
    run = hr.compile(model)
    batch = drawn(2, 20)
    for squares in (False, True):
        model.blocks[0].other.squares = squares
        found = run(**run.shard(batch).inputs)[1]
        assert float(found.detach()) == pytest.approx(model(**batch)[1].item(), rel=EXACT)
    model.blocks[0].other.mixes = True
    for _ in range(2):
        with pytest.raises(ModelError, match="another result for token"):
            run.shard(batch)


def test_a_module_that_comes_later_is_looked_at() -> None:
    """Catches a convolution in the place of a module that was looked at."""
    model: Any = gpt(other=Noting)
    run = hr.compile(model)
    run.shard(drawn(1, 20))
    for block in model.blocks:
        block.other = Gated(32).double()
    with pytest.raises(ModelError, match="another result for token 5"):
        run.shard(drawn(1, 20))


class Placed(Gpt):
    """Says that positions may be left out, and needs them."""

    def forward(  # type: ignore[override]
        self, ids: torch.Tensor, position_ids: Any = None, labels: torch.Tensor | None = None
    ) -> Any:
        x = self.token(ids) + self.place(position_ids + 3)
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.token.weight.t()
        return logits, f.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_positions_that_a_model_of_ones_own_is_given() -> None:
    """Catches a model that is tried without positions, which it does not count by itself."""
    model = gpt()
    model.__class__ = Placed
    batch = drawn(1, 20) | {"position_ids": torch.arange(20)[None]}
    _, wanted = model(**batch)
    run = hr.compile(model)
    _, loss = run(**run.shard(batch).inputs)
    run.backward(loss)
    assert float(run.add_up(loss)) == pytest.approx(float(wanted), rel=EXACT)


NOTHING: dict[str, Any] = {
    "a leaf": lambda logits: torch.zeros((), requires_grad=True),
    "none": lambda logits: None,
    "a number": lambda logits: 0.0,
    "of each token": lambda logits: logits.square().sum(-1),
}


@pytest.mark.parametrize("what", NOTHING)
def test_losses_that_no_backward_leads_from_are_refused(what: str) -> None:
    """Catches a rank that has no label and skips its backward, while others wait in theirs."""
    run = hr.compile(gpt())
    logits, _ = run(**run.shard(drawn(1, 20)).inputs)
    with pytest.raises(ModelError, match=r"loss given to run\.backward.*logits\.sum\(\) \* 0"):
        run.backward(NOTHING[what](logits))
    run.backward(logits.sum() * 0)


def by_frequency() -> str:
    """What is said of an embedding whose gradients are divided by how often a token comes."""
    model: Any = gpt()
    next(m for m in model.modules() if isinstance(m, nn.Embedding)).scale_grad_by_freq = True
    try:
        hr.compile(model).shard(drawn(1, 20))
    except ModelError as error:
        return str(error)
    return ""


def test_gradients_by_frequency_are_refused() -> None:
    """Catches embeddings whose gradients count the tokens of one rank."""
    assert all("scale_grad_by_freq" in said for said in run_ranks(2, by_frequency))


class Noting(nn.Module):
    """Notes the number of tokens of every call."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.seen = list[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.shape[1])
        return x


def test_rows_that_grow_are_seldom_looked_at() -> None:
    """Catches a probe at every batch of a curriculum."""
    model: Any = gpt(other=Noting)
    run, probed = hr.compile(model), 0
    seen = model.blocks[0].other.seen
    for count in range(20, 100):
        before = len(seen)
        run.shard(drawn(1, count))
        probed += len(seen) > before
    assert probed == 4  # at 20, 21, 41 and 81 tokens


@pytest.mark.parametrize("what", ["a mean in training", "rows that are dropped"])
def test_a_model_that_was_sharded_in_evaluation(what: str) -> None:
    """Catches training that nobody looked at, as the first batch was evaluated; and an evaluation
    that is refused for what only training does."""
    make, says = REFUSED[what]
    run = hr.compile(make().eval())
    shard = run.shard(drawn(1, 60))
    run(**shard.inputs)
    run.model.train()
    with pytest.raises(ModelError, match=says):
        run(**shard.inputs)


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("opt", {"layerdrop": 0.5}, "module OPTDecoder: got random"),
        ("mixtral", {"jitter_noise": 0.1}, "module MixtralSparseMoeBlock: got random"),
    ],
)
def test_layers_and_routers_that_draw(kind: str, change: dict[str, float], says: str) -> None:
    """Catches ranks that draw apart: they leave out other layers, and wait for each other."""
    model = foreign_model(kind, 0)
    for module in model.modules():
        for name, value in change.items():
            if hasattr(module, name):
                setattr(module, name, value)
    with pytest.raises(ModelError, match=says):
        hr.compile(model.train()).shard(tokens(1, 20))


class Counting(nn.Module):
    """Counts its calls and keeps means of what it saw, behind dropout and a gate at minus zero."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.calls, self.last = 0, None
        self.register_buffer("seen", torch.zeros(features), persistent=False)
        self.gate = nn.Parameter(-torch.zeros(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = x.detach()
        self.seen.mul_(0.9).add_(x.detach().mean(dim=(0, 1)))
        return self.gate * f.dropout(x, 0.1, self.training)


def state_of(model: nn.Module) -> list[Any]:
    """All that a probe could change."""
    counting = [m for m in model.modules() if isinstance(m, Counting)]
    return [
        [value.clone() for value in model.state_dict().values()],
        [value.signbit() for value in model.parameters()],
        [p.grad.clone() for p in model.parameters() if p.grad is not None],
        [torch.tensor([m.training for m in model.modules()])],
        [torch.tensor([m.calls for m in counting])],
        [torch.tensor([m.last is None for m in counting])],
        [m.seen.clone() for m in counting],
        [torch.get_rng_state(), torch.tensor(random.getstate()[1])],
        [torch.from_numpy(np.random.get_state()[1].astype(np.int64))],  # noqa: NPY002
    ]


def probed(how: str) -> bool:
    """Whether a model is as it was before it was probed, in training with an odd part."""
    model: Any = gpt(other=Counting)
    model.blocks[0].mlp.eval()
    if how == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    elif how == "ddp":
        model = DistributedDataParallel(model, broadcast_buffers=False)
    sum(p.sum() for p in model.parameters()).backward()
    before, loss = state_of(model), sum(p.square().sum() for p in model.parameters())
    hr.compile(model).shard(drawn(1, 40))
    loss.backward()  # a graph from before does not see a change
    model.zero_grad()
    sum(p.sum() for p in model.parameters()).backward()
    after = state_of(model)
    local = lambda x: getattr(x, "_local_tensor", x)  # noqa: E731
    return all(
        len(a) == len(b) and all(torch.equal(local(x), local(y)) for x, y in zip(a, b, strict=True))
        for a, b in zip(before, after, strict=True)
    )


@pytest.mark.parametrize("how", ["alone", "ddp", "fsdp2"])
def test_a_probe_leaves_no_trace(how: str) -> None:
    """Catches weights, buffers, gradients, flags, counters or random numbers that a probe changes,
    and weights of the probe that FSDP2 keeps."""
    assert all(run_ranks(2, probed, how, timeout_s=100))


def side_by_side() -> str:
    """What is said of two batches side by side without targets."""
    run, me = hr.compile(gpt()), dist.get_rank()
    run.prepare([(0,), (1,)])
    with pytest.raises(SpecError) as raised:
        run.shard(drawn(1, 12, me), ranks=(me,))
    run.shard({"ids": drawn(1, 12, me)["ids"]}, ranks=(me,))  # without labels there are none
    return str(raised.value)


def test_groups_side_by_side_say_their_targets() -> None:
    """Catches a sum of means: twice the loss."""
    for said in run_ranks(2, side_by_side):
        assert "the tokens with a loss of the whole step" in said


def gathered(ranks: int, kind: str) -> float:
    """The distance of logits that were gathered from those of one process."""
    batch = tokens(3, 23)["input_ids"]
    if kind != "gpt":
        model, name = foreign_model(kind, 0).eval(), "input_ids"
    else:
        model, name, batch = gpt().eval(), "ids", batch % 61
    run, worst = hr.compile(model), 0.0
    with torch.no_grad():
        out = model(batch)
        wanted = out.logits if hasattr(out, "logits") else out[0]
        for exchange in ("ulysses", "ring"):
            out = run(**run.shard({name: batch}, exchange=exchange).inputs)
            logits = run.gather(out.logits if hasattr(out, "logits") else out[0])
            worst = max(worst, float((logits - wanted).abs().max()))
    return worst


@pytest.mark.parametrize(("ranks", "kind"), [(2, "gpt"), (3, "gpt"), (1, "gpt"), whole(3, "gpt2")])
def test_logits_are_gathered_for_evaluation(ranks: int, kind: str) -> None:
    """Catches rows and tokens in the order of ranks."""
    assert max(run_ranks(ranks, gathered, ranks, kind)) < EXACT


def test_results_that_are_not_of_the_last_batch() -> None:
    """Catches logits that are gathered by the places of another batch."""
    run = hr.compile(gpt())
    with pytest.raises(ModelError, match="results to gather: got no batch"):
        run.gather(torch.zeros(1, 12, 61))
    run(**run.shard(drawn(1, 12)).inputs)
    with pytest.raises(ModelError, match="results to gather"):
        run.gather(torch.zeros(1, 13, 61))


def test_inputs_that_are_no_tokens_are_named() -> None:
    """Catches tracebacks from the depths."""
    run, batch = hr.compile(foreign_model("llama", 0)), tokens(1, 20)
    for name in ("inputs_embeds", "pixel_values"):
        with pytest.raises(ModelError, match=rf"input {name}.*wanted input_ids alone"):
            run.shard({name: torch.zeros(1, 20, 48)})
    shard = run.shard(batch)
    with pytest.raises(ModelError, match="use_cache: got True"):
        run(**shard.inputs, use_cache=True)
    run(**shard.inputs, use_cache=False)


def test_losses_of_routers_that_are_asked_for_later() -> None:
    """Catches a loss of the router that is dropped, where the configuration or a call asks for it
    once the model is spread."""
    model: Any = foreign_model("mixtral", 0)
    run = hr.compile(model)
    shard = run.shard(tokens(1, 20))
    with pytest.raises(ModelError, match="output_router_logits: got True"):
        run(**shard.inputs, output_router_logits=True)
    model.config.output_router_logits = True
    with pytest.raises(ModelError, match="output_router_logits: got True"):
        run(**shard.inputs)


def test_maps_of_attention_that_a_configuration_asks_for_are_refused() -> None:
    """Catches an empty tuple in the place of maps, of which a loss is 0."""
    model: Any = foreign_model("llama", 0)
    model.set_attn_implementation("eager")
    run = hr.compile(model)
    model.config.output_attentions = True
    with pytest.raises(ModelError, match="output_attentions: got True, wanted none"):
        run(**run.shard(tokens(2, 20)).inputs)


def test_attention_of_a_class_of_its_own_is_named() -> None:
    """Catches a refusal that does not say of what."""
    with pytest.raises(ModelError, match=r"model with BloomAttention.*set_attn_implementation"):
        hr.compile(foreign_model("bloom", 0)).shard(tokens(1, 20))
    falcon = transformers.FalconConfig(
        vocab_size=97, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, alibi=True
    )
    with pytest.raises(ModelError, match=r"in FalconAttention.forward.*got attn_mask"):
        hr.compile(transformers.FalconForCausalLM(falcon)).shard(tokens(1, 20))


def roped(kind: str) -> Any:
    """A Llama whose rotary embeddings look at the longest place beyond 32."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        rope |= {"original_max_position_embeddings": 32}
    config = transformers.LlamaConfig(
        hidden_size=48,
        intermediate_size=80,
        num_attention_heads=6,
        num_key_value_heads=3,
        num_hidden_layers=2,
        vocab_size=97,
        max_position_embeddings=32 if kind == "dynamic" else 128,
        rope_parameters=rope,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).double()


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_that_look_at_the_longest_place(kind: str) -> None:
    """Catches ranks whose longest places are others than the batch's."""
    run = hr.compile(roped(kind))
    with pytest.raises(ModelError, match="rotary embeddings of LlamaForCausalLM: got 40 places"):
        run.shard(tokens(1, 40))
    loss = run(**run.shard(tokens(1, 30)).inputs).loss
    wanted = roped(kind)(**tokens(1, 30)).loss
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-6)


def within_another(rope: str = "dynamic") -> Any:
    """A Llava whose language model is such a Llama."""
    text = roped(rope).config.to_dict()
    vision = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=96)
    return transformers.LlavaForConditionalGeneration(config).double()


def test_rotary_embeddings_of_a_language_model_within_another() -> None:
    """Catches limits that are sought in the outer configuration alone."""
    run = hr.compile(within_another(), labels="next")
    assert run.longest == 32
    with pytest.raises(ModelError, match=r"rotary embeddings of Llava.*: got 40 places"):
        run.shard(tokens(1, 40))


def of_texts_alone(kind: str) -> Any:
    """The largest error of gradients of a model of texts and images that is given texts, one of
    them padded; or what is said of types of tokens, which make a mask in Gemma 3."""
    typed = kind == "gemma3, typed"
    if kind == "llava":
        model = within_another(rope="default")
    else:
        model = foreign_model("gemma3", 0)
    plain, batch = copy.deepcopy(model), tokens(2, 21) | {"attention_mask": torch.ones(2, 21)}
    batch["attention_mask"][0, 15:] = 0
    batch["labels"][0, 15:] = IGNORED
    run = hr.compile(model)
    try:
        types = {"token_type_ids": torch.zeros(2, 21, dtype=torch.long)} if typed else {}
        loss = run(**run.shard(batch | types).inputs).loss
    except ModelError as error:
        return str(error)
    run.backward(loss)
    run.add_up(loss)
    plain(**batch).loss.backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    errors = [
        (p.grad - q.grad).abs().max() / q.grad.abs().max() for p, q in pairs if q.grad is not None
    ]
    return float(max(errors))


def said_of_texts_alone() -> list[Any]:
    return [of_texts_alone(kind) for kind in ("llava", "gemma3", "gemma3, typed")]


def test_models_of_texts_and_images_on_texts() -> None:
    """Catches masks that are made by a configuration within another, and labels that are unknown by
    the name of such a model."""
    for *errors, said in run_ranks(2, said_of_texts_alone):
        assert max(errors) < 1e-5, errors  # norms of transformers are single precision
        assert "leave out the input that makes it, such as token_type_ids" in said


class CountingForCausalLM(transformers.LlamaForCausalLM):
    """Takes no places, so the model within counts those of the tokens that it is given."""

    def forward(self, input_ids: Any, labels: Any = None, use_cache: Any = None) -> Any:
        return super().forward(input_ids=input_ids, labels=labels, use_cache=use_cache)


class UncachedForCausalLM(transformers.LlamaForCausalLM):
    """Takes neither places nor a choice of caches."""

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        return super().forward(input_ids=input_ids, labels=labels)


@pytest.mark.parametrize("kind", [CountingForCausalLM, UncachedForCausalLM])
def test_places_that_a_model_counts_itself_are_refused(kind: Any) -> None:
    """Catches rotary embeddings by places of a part: queries and keys of one token turn alike, so
    their product says nothing of the place. Gradients were off by half."""
    model = kind(foreign_model("llama", 0).config).double()
    with pytest.raises(ModelError, match=r"places are counted in it: give position_ids"):
        hr.compile(model).shard(tokens(2, 21))


@pytest.mark.parametrize("keys", [1, 2, 4])
def test_the_stand_in_for_attention_has_its_adjoint(keys: int) -> None:
    """Catches a backward of the look at gradients that is not of its forward."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(5, 4, 6), (5, keys, 6), (5, keys, 6)]
    q, k, v = (
        torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    )
    stand_in = StandIn(places=np.arange(5), targets=5)
    out, *_ = stand_in.attend(q, k, v)
    grad = torch.randn(out.shape, generator=draw, dtype=torch.float64)
    wanted = torch.autograd.grad(out, (q, k, v), grad)
    for found, right in zip(stand_in.backward(grad, q, k, v), wanted, strict=True):
        torch.testing.assert_close(found, right)


class Adapter(nn.Module):
    """Hands on whatever it is given, as peft's models do."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inside, self.config = model, model.config
        self.base_model_prefix = "inside"

    def get_base_model(self) -> Any:
        return self.inside

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.inside(*args, **named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inside"), name)


def adapted() -> float:
    """The error of the loss of a model inside an adapter."""
    run = hr.compile(Adapter(foreign_model("llama", 0)), labels="next")
    loss = run(**run.shard(tokens(2, 20)).inputs).loss
    run.backward(loss)
    wanted = foreign_model("llama", 0)(**tokens(2, 20)).loss
    return abs(float(run.add_up(loss)) - float(wanted.detach()))


def test_an_adapter_takes_what_its_model_takes() -> None:
    """Catches arguments that are taken for the only ones of a forward."""
    assert max(run_ranks(2, adapted)) < 1e-6  # norms of transformers are single precision


def of_token_classes(kind: str, how: str) -> float:
    """The largest error of gradients of a model that gives each token one of 5 classes, by whose
    loss ``how`` says."""
    config = copy.copy(foreign_model(kind, 0).config)
    config.num_labels = 5
    torch.manual_seed(0)
    model = transformers.AutoModelForTokenClassification.from_config(config).double().train()
    for dropout in (m for m in model.modules() if isinstance(m, nn.Dropout)):
        dropout.p = 0.0  # that of the head is none of the configuration's
    plain, batch = copy.deepcopy(model), tokens(2, 21)
    batch["labels"] = (batch["input_ids"] % 5).masked_fill(batch["labels"] == IGNORED, IGNORED)
    run = hr.compile(model)
    if how == "without labels":
        del batch["labels"]
    part = run.shard(batch)
    out, wanted = run(**part.inputs), plain(**batch)
    loss = out.loss if how == "the model's" else out.logits.square().sum()
    run.backward(loss)
    run.add_up(loss)
    (wanted.loss if how == "the model's" else wanted.logits.square().sum()).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(float((p.grad - q.grad).abs().max()) for p, q in pairs if q.grad is not None)


def errors_of_token_classes() -> list[float]:
    cases = [("llama", "the model's"), ("llama", "without labels"), ("bert", "the model's")]
    return [of_token_classes(*case) for case in cases]


def test_models_that_classify_tokens() -> None:
    """Catches labels that a look at the loss makes of tokens, of which there are more than
    classes."""
    for errors in run_ranks(2, errors_of_token_classes):
        assert max(errors) < 1e-6, errors  # norms of transformers are single precision
    config = foreign_model("llama", 0).config
    with pytest.raises(ModelError, match="labels='next'"):  # it has a label for each row
        hr.compile(transformers.LlamaForSequenceClassification(config))


def of_padding(side: str, loose: bool) -> Any:
    """The error of a batch with padding, or what is said of labels that padding predicts."""
    model, plain = foreign_model("llama", 0), foreign_model("llama", 0)
    plain.set_attn_implementation("sdpa")  # eager attention makes NaN of padding on the left
    batch, mask = tokens(2, 21), torch.ones(2, 21, dtype=torch.long)
    padded = slice(0, 7) if side == "left" else slice(15, 21)
    mask[0, padded] = 0
    batch["labels"] = batch["input_ids"].masked_fill(mask == 0, IGNORED)
    if side == "left" and not loose:
        batch["labels"][0, 7] = IGNORED
    elif side == "right" and loose:
        batch["labels"] = batch["input_ids"]
    run = hr.compile(model)
    batch["attention_mask"] = mask
    try:
        part = run.shard(batch)
    except DataError as error:
        return str(error)
    loss = run(**part.inputs).loss
    run.backward(loss)
    plain(**batch).loss.backward()
    run.add_up(loss)
    return float((model.lm_head.weight.grad - plain.lm_head.weight.grad).abs().max())


@pytest.mark.parametrize("side", ["left", "right"])
def test_labels_that_padding_predicts_are_refused(side: str) -> None:
    """Catches labels of padding, and of the first token behind it, that count in a plain model,
    whose padding sees the tokens before it."""
    assert max(run_ranks(2, of_padding, side, False)) < 1e-6
    for said in run_ranks(2, of_padding, side, True):
        assert said.startswith(f"labels: got {1 if side == 'left' else 5} that are predicted from")


def test_rows_without_tokens_are_named() -> None:
    """Catches a traceback from the depths."""
    with pytest.raises(DataError, match=r"input ids: got \[2, 0\], wanted a token or more"):
        hr.compile(gpt()).shard({"ids": torch.zeros(2, 0, dtype=torch.long)})


def backward_of_ddp(how: str) -> str:
    """What is said of a backward that the spread model does not run itself."""
    model: Any = DistributedDataParallel(gpt() if how == "tokens" else table())
    if how == "tokens":
        run: Any = hr.compile(model)
        loss = run(**run.shard(drawn(2, 21)).inputs)[1]
    else:
        x = torch.ones(2, 5, 4, 6, 8, dtype=torch.float64)
        run = hr.adapt(model, stages=stages(returns=False), inputs={"x": DIMS}, axis="i", batch="b")
        loss = run(**run.shard({"x": x})).sum()
    with pytest.raises(ModelError) as error:
        loss.backward()
    return str(error.value)


@pytest.mark.parametrize("how", ["tokens", "axes"])
def test_means_of_ddp_are_refused(how: str) -> None:
    """Catches gradients that DDP has divided by the ranks: half of what they are on two."""
    for said in run_ranks(2, backward_of_ddp, how):
        assert (
            "gradients that DDP divides by the number of ranks, wanted run.backward(loss)" in said
        )


def own_loss(run: Any, part: Any, how: str) -> torch.Tensor:
    """A loss that is right in one process, made of a part's results; from ``sum`` on of a part."""
    inputs = {k: v for k, v in part.inputs.items() if k != "labels"}
    logits, labels = run(**inputs).logits, part.labels
    flat, kept = logits.flatten(0, 1), labels.flatten() != IGNORED
    each, few = f.cross_entropy(flat, labels.flatten(), reduction="none"), labels.flatten() % 5 == 0
    turned = logits.transpose(1, 2)
    losses = {
        "mean": lambda: f.cross_entropy(flat, labels.flatten()) + 1e-3 * logits.square().sum(),
        "mean in two dims": lambda: f.cross_entropy(logits.transpose(1, 2), labels),
        "divided by hand": lambda: each.sum() / kept.sum(),
        "mean of those with a label": each[kept].mean,
        "squares": lambda: f.mse_loss(logits, torch.zeros_like(logits)),
        "pooled": lambda: logits.mean(1).square().sum(),
        "last": lambda: logits[:, -1].square().sum(),
        "shifted": lambda: (logits[:, 1:] - logits[:, :-1]).square().sum(),
        "largest": lambda: logits.amax(1).sum(),
        "of sums": lambda: -f.logsigmoid(each.view_as(labels).sum(1)).sum(),
        "quotient": lambda: each.sum() / logits.square().sum(),
        "in two calls": lambda: logits.square().mean() + run(**inputs).logits.square().sum(),
        "masked": lambda: (each.square() * few).sum() / few.sum(),
        "masked rows": (
            (each.square() * few).view_as(labels).sum(1) / few.view_as(labels).sum(1)
        ).sum,
        "counted by Python": lambda: each.square().sum() / int(few.sum()),
        "all tokens": lambda: each.square().sum() / each.numel(),
        "picked": each[few].square().mean,
        "norm": lambda: logits.norm(dim=1).sum(),
        "largest few": each.topk(6).values.sum,
        "neighbours": (logits * logits.roll(1, 1)).sum,
        "pairs": lambda: (logits @ turned).square().sum(),
        "windows": lambda: f.avg_pool1d(turned, 2).square().sum(),
        "kernel": lambda: f.conv1d(turned, torch.ones(1, logits.shape[-1], 3).to(logits)).sum(),
        "first chunk": logits.split(4, 1)[0].sum,
        "by number": logits[:, [0, 2]].sum,
        "root of squares": lambda: f.mse_loss(logits, 0 * logits.detach(), reduction="sum").sqrt(),
        "perplexity": (f.cross_entropy(flat, labels.flatten(), reduction="sum") / part.targets).exp,
        "square of a product": (each @ each.detach()).square,
        "weights": lambda: each.square() @ (each.detach() / each.detach().sum()),
        "sum": lambda: each.sum() / part.targets,
        "masked sum": lambda: (each.square() * few).sum() / part.targets * 65_536.0,
        "weighed back": lambda: (each * few).sum() / few.sum() * (few.sum() / part.targets),
        "turned": lambda: f.cross_entropy(turned, labels, reduction="sum") / part.targets,
        "all chunks": lambda: sum(x.square().sum() for x in logits.split(4, 1)),
        "products of features": lambda: torch.bmm(flat[:, None], flat[:, :, None]).sum(),
        "along features": lambda: (
            logits.norm(dim=-1).sum()
            + logits.topk(3).values.sum()
            + f.layer_norm(logits, logits.shape[-1:]).square().sum()
            + f.avg_pool1d(logits, 3).sum()
        ),
        "weights of rows": (each.view_as(labels).sum(1) * torch.tensor([1.0, 3.0])).sum,
        "weights of those": lambda: (
            (flat[kept.nonzero()[:, 0]].square().sum(-1) * each.detach()[kept]).sum()
            + (flat[kept].square().sum(-1) * each.detach()[kept]).sum() / part.targets
        ),
        "a large graph on one rank": lambda: sum(
            each.sum() / part.targets / 600 for _ in range(600 if dist.get_rank() else 1)
        ),
        "recomputed": lambda: checkpoint(
            lambda x, y: 3.0 * (x * few[:, None] / 7.0).square().sum() / y,
            flat,
            part.targets,
            use_reentrant=False,
        ),
        "none here": lambda: each.sum() / part.targets * float(dist.get_rank() > 0),
        "with a label": lambda: flat.index_select(0, kept.nonzero()[:, 0]).square().sum(),
        "balance": lambda: run.share * run.mean(logits).square().sum().sqrt(),
        "chunks": lambda: logits[:, :4].sum() + logits[:, 4:].square().sum() + logits[:, :].sum(),
        "places alone": lambda: sum(logits[:, at].sum() for at in range(logits.shape[1])),
        "over features": lambda: logits.square().mean(-1).sum() + logits[..., 1:].sum(),
        "rows": lambda: (each.view_as(labels).sum(1) * torch.ones(2)).mean() / part.targets,
    }
    return losses[how]()


def said_of_own_losses(hows: list[str]) -> dict[str, str]:
    """What is said of losses before their backwards, by their names."""
    said = {}
    for how in hows:
        run = hr.compile(foreign_model("llama", 0))
        loss = own_loss(run, run.shard(tokens(2, 22)), how)
        try:
            run.backward(loss)
        except ModelError as error:
            said[how] = str(error)
        run.detach()
    return said


WRONG = {
    "mean": "a mean over tokens",
    "mean in two dims": "a mean over tokens",
    "divided by hand": "the mean cross entropy",
    "mean of those with a label": "a mean over tokens",
    "squares": "a mean over tokens",
    "pooled": "a mean over tokens",
    "last": "some of the places",
    "shifted": "some of the places",
    "largest": "a maximum over tokens",
    "of sums": "a function of sums over tokens",
    "quotient": "a function of sums over tokens",
    "in two calls": "a mean over tokens",
    "masked": "what is divided by numbers that differ between ranks",
    "masked rows": "what is divided by numbers that differ between ranks",
    "counted by Python": "what is divided by numbers that differ between ranks",
    "all tokens": "what is divided by the tokens of one rank",
    "picked": "a mean over tokens",
    "norm": "a norm over tokens",
    "largest few": "the largest over tokens",
    "neighbours": "other places over tokens",
    "pairs": "products of tokens with others",
    "windows": "values of windows over tokens",
    "kernel": "a convolution over tokens",
    "first chunk": "some of the tokens",
    "by number": "some of the places",
    "root of squares": "a function of sums over tokens",
    "perplexity": "a function of sums over tokens",
    "square of a product": "a function of sums over tokens",
    "weights": "weights that add up to 1 over tokens",
}


def test_losses_that_are_wrong_of_parts_are_refused() -> None:
    """Catches losses of one rank's tokens that are none of all tokens when they are added up."""
    for said in run_ranks(2, said_of_own_losses, list(WRONG)):
        for how, wrong in WRONG.items():
            assert said.get(how, "").startswith(f"loss of a part: got {wrong}"), how


ALIKE = ["sum", "over features", "rows", "balance", "places alone", "masked sum", "weighed back"]
ALIKE += ["turned", "all chunks", "products of features", "along features", "weights of rows"]
ALIKE += ["with a label", "recomputed", "weights of those"]
"""Losses that are the same of all tokens in one process."""


class Alone:
    """What a loss asks of a run, in one process."""

    share = 1.0

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        return values.mean(dim=(0, 1))


def errors_of_own_losses(hows: list[str]) -> dict[str, float]:
    """How far losses and gradients are from those of one process, by the names of the losses."""
    batch, errors = tokens(2, 22), dict[str, float]()
    placed = torch.cat([batch["labels"][:, 1:], torch.full((2, 1), IGNORED)], 1)
    ids, targets = {"input_ids": batch["input_ids"]}, int((placed != IGNORED).sum())
    for how in hows:
        plain, run = foreign_model("llama", 0), hr.compile(foreign_model("llama", 0))
        whole_batch = SimpleNamespace(inputs=ids, labels=placed, targets=targets)
        wanted = own_loss(Alone(plain), whole_batch, how)
        wanted.backward()
        loss = own_loss(run, run.shard(batch), how)
        run.backward(loss)
        off = [abs(float(run.add_up(loss)) / float(wanted.detach()) - 1)]
        for mine, other in zip(run.model.parameters(), plain.parameters(), strict=True):
            off.append(float((mine.grad - other.grad).abs().max() / other.grad.abs().max()))
        errors[how] = max(off)
        run.detach()
    return errors


def test_losses_that_are_right_of_parts_are_exact() -> None:
    """Catches what is refused because it looks like a mean over tokens, and losses and gradients
    that are not those of one process."""
    for errors in run_ranks(2, errors_of_own_losses, ALIKE):
        assert {how: error for how, error in errors.items() if not error < 5e-6} == {}
    more = ["chunks", "none here", "a large graph on one rank"]  # of parts alone
    assert run_ranks(2, said_of_own_losses, more) == [{}, {}]


OTHER_PLACES: dict[str, Any] = {"llama": "same", "gpt2": "same", "bert": "next"}
"""Where labels stand that are not where the own loss of a model of this type has them."""


def errors_of_other_places() -> dict[str, float]:
    """How far losses and gradients of labels in these places are from one process', by type."""
    errors = dict[str, float]()
    for kind, where in OTHER_PLACES.items():
        plain, batch = foreign_model(kind, 0), tokens(2, 22)
        run = hr.compile(foreign_model(kind, 0), labels=where)
        loss = run(**run.shard(batch).inputs).loss
        run.backward(loss)
        labels = batch["labels"] if where == "same" else batch["labels"][:, 1:]
        logits = plain(input_ids=batch["input_ids"]).logits[:, : labels.shape[1]]
        wanted = f.cross_entropy(logits.flatten(0, 1), labels.flatten())
        wanted.backward()
        off = [abs(float(run.add_up(loss)) / float(wanted.detach()) - 1)]
        pairs = zip(run.model.parameters(), plain.parameters(), strict=True)
        used = [(mine.grad, other.grad) for mine, other in pairs if other.grad is not None]
        largest = max(float(other.abs().max()) for _, other in used)
        off += [float((mine - other).abs().max()) / largest for mine, other in used]
        errors[kind] = max(off)
    return errors


@pytest.mark.parametrize("ranks", [1, 2])
def test_labels_stand_where_the_user_says(ranks: int) -> None:
    """Catches the model's own loss in the place of that of labels that were shifted before."""
    for errors in run_ranks(ranks, errors_of_other_places):
        assert {kind: error for kind, error in errors.items() if not error < 5e-6} == {}


def test_labels_elsewhere_and_a_loss_of_the_models_own_are_refused() -> None:
    """Catches a loss of the model's own whose labels the user says to stand elsewhere."""
    run = hr.compile(with_own_loss("forward"), labels="same")
    with pytest.raises(ModelError, match=r"loss of SmoothedForCausalLM: got .* of the model's own"):
        run(**run.shard(tokens(2, 20)).inputs)


def labels_of_ones_own() -> list[str]:
    """The labels that are refused, as they are not those of the part, and what they are called."""
    run, batch, refused = hr.compile(foreign_model("llama", 0)), tokens(2, 21), list[str]()
    part, unlabelled = run.shard(batch), run.shard({"input_ids": batch["input_ids"]})
    for how, inputs, labels in (
        ("token ids", part.inputs, part.inputs["input_ids"].clone()),
        ("fewer", part.inputs, part.inputs["labels"].masked_fill(part.labels % 5 == 0, IGNORED)),
        ("none sharded", unlabelled.inputs, unlabelled.inputs["input_ids"]),
        ("the same", part.inputs, part.inputs["labels"].clone()),
    ):
        try:
            run(**{**inputs, "labels": labels})
        except ModelError as error:
            refused.append(f"{how}, {error.what}")
    return refused


def test_labels_that_are_not_the_parts() -> None:
    """Catches labels in places that do not predict them, and others than the targets counted."""
    refused = [f"{how}, labels of a part" for how in ("token ids", "fewer", "none sharded")]
    assert run_ranks(2, labels_of_ones_own) == [refused] * 2


def trained_apart(how: str, adds_up: bool) -> list[str]:
    """What is said of batches of a loop that sums gradients over ranks, or forgets to."""
    said: list[str] = []
    if how == "tokens":
        model: Any = gpt()
        run: Any = hr.compile(model)
        batch = drawn(2, 21)
    else:
        model = table()
        run = hr.adapt(model, stages=stages(returns=True), inputs={"x": DIMS}, axis="i", batch="b")
        batch = {"x": torch.arange(1.0 * 5 * 4 * 6 * 8).sin().double().view(1, 5, 4, 6, 8)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(3):
        try:
            part = run.shard(batch)
        except ModelError as error:
            said.append(str(error))
            continue
        out = run(**part.inputs)
        loss = out[1] if how == "tokens" else out.square().sum()
        run.backward(loss)
        if adds_up:
            run.add_up(loss)
        optimizer.step()
        optimizer.zero_grad()
    return said


@pytest.mark.parametrize("how", ["tokens", "axes"])
def test_gradients_that_were_not_summed_are_noticed(how: str) -> None:
    """Catches a loop that trains another model on every rank, and a right one that is refused."""
    assert run_ranks(2, trained_apart, how, True) == [[], []]
    for said in run_ranks(2, trained_apart, how, False):
        assert len(said) == 2
        assert said[0].startswith("weights of the model: got others than on rank 0")


def drawn_anew(name: str) -> str:
    """What is said of a batch after one weight of twelve blocks was drawn by every rank."""
    model: Any = gpt(layers=12)
    run: Any = hr.compile(model)
    run.shard(drawn(2, 21))
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        model.get_parameter(name).normal_(std=0.02)
    try:
        run.shard(drawn(2, 21))
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["blocks.5.mlp.2.bias", "blocks.7.norm2.weight", "norm.bias"])
def test_weights_that_ranks_draw_later_are_noticed(name: str) -> None:
    """Catches a look at the first few weights alone."""
    for said in run_ranks(2, drawn_anew, name):
        assert said.startswith("weights of the model: got others than on rank 0")


def of_the_backbone() -> list[str]:
    """What is said of the layers of a model, called without its head, with a part and a copy."""
    model: Any = foreign_model("llama", 0)
    run = hr.compile(model)
    part = run.shard(tokens(2, 21))
    ids, places = part.inputs["input_ids"], part.inputs["position_ids"]
    said = []
    for given in ({"input_ids": ids}, {"inputs_embeds": model.model.embed_tokens(ids)}):
        try:
            model.model(**given, position_ids=places)
        except ModelError as error:
            said.append(str(error))
    model.model(ids.clone())  # the plain model
    run.backward(run(**part.inputs).loss)
    return said


def test_layers_that_are_called_with_a_part_are_refused() -> None:
    """Catches tokens of one rank that see no others, as in losses by chunks of logits."""
    for said in run_ranks(2, of_the_backbone):
        assert len(said) == 2
        assert all("given to LlamaModel(...) within the model" in text for text in said)


class NormedBackward(torch.autograd.Function):
    """The identity, whose gradients are normed over all tokens."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / grad.norm().clamp(min=1e-9)


class ChangedGradients(nn.Module):
    """A layer whose gradients are changed in its backward."""

    how = "function"

    def __init__(self, features: int) -> None:
        super().__init__()
        self.layer = nn.Linear(features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        if self.how == "function":
            return NormedBackward.apply(out)
        if self.how == "hook" and out.requires_grad:
            out.register_hook(lambda grad: grad / grad.norm().clamp(min=1e-9))
        if self.how == "clamp" and out.requires_grad:
            out.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))
        return out


def test_a_backward_that_norms_over_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches gradients normed over the tokens of each rank, which the results do not show."""
    for how in ("function", "hook"):
        monkeypatch.setattr(ChangedGradients, "how", how)
        with pytest.raises(ModelError, match="backward of Gpt: got another gradient of a token"):
            hr.compile(gpt(other=ChangedGradients)).shard(drawn(2, 21))
    monkeypatch.setattr(ChangedGradients, "how", "clamp")  # of each entry alone
    hr.compile(gpt(other=ChangedGradients)).shard(drawn(2, 21))


def of_other_groups() -> float:
    """A step of two batches, one of two ranks and one of all three: both forwards are run before
    the first backward. Returns the loss of all."""
    run, few, all_ranks = hr.compile(gpt()), drawn(1, 9), drawn(1, 12, seed=1)
    run.prepare([(0, 1), (0, 1, 2)])
    batches = [(few, (0, 1))] if dist.get_rank() < 2 else []
    losses = []
    for batch, ranks in (*batches, (all_ranks, (0, 1, 2))):
        part = run.shard({"ids": batch["ids"]}, ranks=ranks)
        losses.append(run(**part.inputs)[0].square().sum())
    for loss in losses:
        run.backward(loss)
    return float(run.add_up(sum(losses)))


def test_losses_of_several_groups_do_not_wait_for_each_other() -> None:
    """Catches ranks that ask others about a loss which those do not have."""
    found = run_ranks(3, of_other_groups)
    assert len({*found}) == 1
