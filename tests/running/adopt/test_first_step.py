"""The first step against one process: what differs is refused, what is exact leaves no trace."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import headrace as hr
from headrace.errors import ModelError, SpecError
from ranks import run_ranks
from running.adopt.axial import stages, table
from running.adopt.foreign import gpt
from running.adopt.test_adapted import drawn
from running.engine.loops import attached, costs, dataset, llama, trained
from spread import whole


def batch(rows: int = 2, count: int = 20) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 50, (rows, count), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.masked_fill(ids % 3 == 0, -100)}


def of_documents(first_label: int = -100) -> dict[str, torch.Tensor]:
    """A batch of two rows, of three documents and of one."""
    places = torch.stack([torch.cat([torch.arange(n) for n in (7, 9, 4)]), torch.arange(20)])
    given = batch()
    labels = given["labels"].masked_fill(places == 0, first_label)
    return {**given, "labels": labels, "position_ids": places}


def stepped(kind: str, check: Any) -> tuple[list[Any], Any]:
    """The gradients of a first step, and what is drawn after it."""
    torch.manual_seed(0)
    model: Any = llama() if kind != "plain" else gpt()
    model = DistributedDataParallel(model) if kind == "ddp" else model
    if kind == "fsdp2":
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
    run = hr.compile(model, check=check)
    given = of_documents() if kind == "packed" else batch()
    if kind == "plain":
        given = {"ids": given["input_ids"]}
    torch.manual_seed(1)
    part = run.shard(given)
    out = run(**part.inputs)
    loss = out.loss if kind != "plain" else out[0].square().sum()
    run.backward(loss)
    run.add_up(loss)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    own = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    return [g.numpy() for g in own], torch.rand(2).tolist()


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("hugging", 2), ("packed", 2), ("plain", 2), ("fsdp2", 2), whole("ddp", 2)],
)
def test_a_compared_step_is_as_one_that_is_not(kind: str, ranks: int) -> None:
    """Catches a comparison that refuses what is exact, leaves gradients, or draws numbers."""
    pytest.importorskip("transformers")
    for (mine, after), (plain, drawn_after) in zip(
        run_ranks(ranks, stepped, kind, "first step"),
        run_ranks(ranks, stepped, kind, None),
        strict=True,
    ):
        assert after == drawn_after
        assert all((a == b).all() for a, b in zip(mine, plain, strict=True))


class Wrong(torch.autograd.Function):
    """The values of a tensor, and a gradient that is a little off."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 1.01


def planted(where: str, given: dict[str, torch.Tensor]) -> str:
    """What a step is refused for whose backward, or loss, is off on several ranks."""
    run = hr.compile(llama(), check="first step")
    own, calls = run.number, []

    def number(outputs: Any) -> torch.Tensor:
        calls.append(outputs)  # of all ranks, then of the plain model
        return own(outputs) * (1.01 if where == "loss" and len(calls) == 2 else 1)

    run.number = number  # type: ignore[method-assign]
    if where == "gradient":
        before = run.backward
        run.backward = lambda loss: before(Wrong.apply(loss))  # type: ignore[method-assign]
    with pytest.raises(ModelError) as caught:
        run.shard(given)
    return str(caught.value)


@pytest.mark.parametrize("given", [batch(), of_documents()], ids=["rows", "packed"])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_differs_is_refused_on_every_rank(
    where: str, given: dict[str, torch.Tensor]
) -> None:
    """Catches a comparison that is content with anything."""
    pytest.importorskip("transformers")
    for text in run_ranks(2, planted, where, given):
        assert "first step of LlamaForCausalLM on rank 0" in text
        assert ("a loss of" if where == "loss" else "a gradient of norm") in text


def without_memory() -> list[str]:
    run = hr.compile(llama(), check="first step")
    own, calls = run.number, []

    def number(outputs: Any) -> torch.Tensor:
        calls.append(outputs)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("planted")
        return own(outputs)

    run.number = number  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.shard(batch())
    return [str(one.message) for one in told if "first step" in str(one.message)]


def test_a_step_that_does_not_fit_is_not_compared_and_said() -> None:
    """Catches a comparison that ends the run for want of memory, or is left out without a word."""
    pytest.importorskip("transformers")
    for told in run_ranks(2, without_memory):
        assert told == ["the first step is not compared with one process, which needs more memory"]


def left_out(given: dict[str, torch.Tensor]) -> list[str]:
    run = hr.compile(llama(), check="first step")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.shard(given)
    return [str(one.message) for one in told if "first step" in str(one.message)]


def test_what_a_plain_model_would_not_do_alike_is_not_compared_and_said() -> None:
    """Catches a step that is refused although it is exact: a row's label that is another
    document's first."""
    pytest.importorskip("transformers")
    for told in run_ranks(2, left_out, of_documents(first_label=7)):
        assert len(told) == 1
        assert "labels of their first tokens" in told[0]


class Shifted(nn.Module):
    """A model of axes whose parameters get other gradients on shards: its result is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.table = table()
        self.slope = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.table(x)
        return y * self.slope + (self.slope - self.slope.detach()) * x.shape[1]


def axes(model: nn.Module, check: Any) -> str:
    named = [
        hr.AxisStage(modules=f"table.{s.modules}", mixes=s.mixes, dims=s.dims, returns=s.returns)
        for s in stages(returns=True)
    ]
    inputs = {"x": "b i j k c"}
    given = named if isinstance(model, Shifted) else stages(returns=True)
    run = hr.adapt(model, stages=given, inputs=inputs, axis="i", batch="b", check=check)
    try:
        part = run.shard({"x": drawn(0, 1, 5, 4, 6)})
    except ModelError as error:
        return str(error)
    loss = run(**part).square().sum()
    run.backward(loss)
    run.add_up(loss)
    return ""


def of_axes() -> list[str]:
    return [axes(Shifted(), True), axes(Shifted(), "first step"), axes(table(), "first step")]


@pytest.mark.parametrize("ranks", [2, whole(3)])
def test_gradients_of_axes_are_compared(ranks: int) -> None:
    """Catches a gradient that only shows in a backward: results on shards are right."""
    for unseen, seen, right in run_ranks(ranks, of_axes):
        assert not unseen
        assert "a gradient of norm" in seen
        assert not right


def attached_losses(folder: Path, check: Any, off: int) -> list[float] | str:
    """The losses of a loop whose first sample is compared, or what it is refused for."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if off:  # on several ranks alone
        spread_norm(model.model.norm, off)
    try:
        run = attached(model, optimizer, dataset(), folder, costs=costs(2), check=check, steps=2)
    except ModelError as error:
        return str(error)
    return trained(run, model)


def spread_norm(norm: Any, call: int) -> None:
    """Have the gradient of a norm be off in one call of its hook."""
    seen = list[int]()

    def off(grad: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return grad * (1.01 if len(seen) == call else 1)

    norm.weight.register_hook(off)


def test_loops_compare_a_sample_and_a_pack(tmp_path: Path) -> None:
    """Catches a loop that is told to compare and does not, that is refused although it is exact, or
    that goes on from other numbers."""
    pytest.importorskip("transformers")
    exact = run_ranks(2, attached_losses, tmp_path, "first step", 0)
    assert exact == run_ranks(2, attached_losses, tmp_path, None, 0)
    # The first backward is followed by twelve calls that see whether the hook is linear. Off are
    # the plain model given a sample, and all ranks given two.
    for call in (14, 15):
        for text in run_ranks(2, attached_losses, tmp_path, "first step", call):
            assert "first step of LlamaForCausalLM" in text


def test_only_the_first_step_can_be_compared() -> None:
    """Catches a word that is taken for no check."""
    with pytest.raises(SpecError, match="check: got 'always', wanted 'first step' or None"):
        hr.compile(gpt(), check="always")  # type: ignore[arg-type]
