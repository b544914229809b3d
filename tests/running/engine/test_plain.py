"""Loops over plain modules, other kinds of data, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import headrace as hr
from headrace.adopt.samples import TokenReader
from headrace.data.sampler import Sampler, SamplerOptions
from headrace.engine.sample_order import DrawnOrder, Samples, StreamOrder
from headrace.errors import DataError, HeadraceError, InfeasiblePlan, ModelError, SpecError
from headrace.spec.checker import check_turns
from headrace.spec.program import Forward, compile_turns
from ranks import run_ranks
from running.adopt.foreign import OwnAttention, gpt
from running.engine.loops import Drawn, alone, attached, batches, costs, dataset, trained, weights
from spread import whole

EXACT = 1e-10
READER = TokenReader(tokens="input_ids", kind="next")


def items() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels, as torch's data sets give them."""
    return [(item["input_ids"], item["labels"]) for item in dataset()]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


LOSSES: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "its own": lambda model, micro: model(**micro.inputs)[1],
    "ours": lambda model, micro: micro.loss(model(micro.inputs["ids"])[0]),
    "by hand": lambda model, micro: (
        cross_entropy(model(micro.inputs["ids"])[0][0], micro.labels[0], reduction="sum")
        / micro.targets
    ),
}


def wrapped(how: str) -> tuple[Any, Any]:
    """(a model, what the loop calls)."""
    model = gpt()
    if how == "ddp":
        return model, DistributedDataParallel(model)
    if how == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model, model


def plain_steps(loss: str, folder: Path, how: str, ranks: int) -> tuple[list[float], Any]:
    model, called = wrapped(how)
    run = attached(called, sgd(called), items(), folder, labels="next", costs=costs(ranks))
    run.engine.planner = Drawn(
        ranks=ranks, layers=2, seed=3, semantics="lockstep" if how == "fsdp2" else "free"
    )
    losses, ends = trained(run, called, LOSSES[loss]), weights(model)
    run.detach()
    assert not any("forward" in vars(block) for block in model.blocks)
    return losses, ends


@pytest.mark.parametrize(
    ("loss", "how", "ranks"),
    [
        ("by hand", "ddp", 2),
        ("its own", "fsdp2", 3),
        *(
            whole(*case)
            for case in (
                ("its own", "ddp", 2),
                ("ours", "alone", 2),
                ("by hand", "alone", 1),
                ("by hand", "fsdp2", 2),
                ("ours", "fsdp2", 4),
                ("its own", "fsdp2", 1),
                ("its own", "alone", 3),
                ("its own", "alone", 4),
            )
        ),
    ],
)
def test_a_plain_module_equals_one_process(loss: str, how: str, ranks: int, tmp_path: Path) -> None:
    """Catches a model that is run without what is replaced, places of whole packs, losses that are
    means of means, blocks computed again as they are not, and gradients that a wrapper divides."""
    found = run_ranks(ranks, plain_steps, loss, tmp_path, how, ranks, timeout_s=250)
    model, steps = gpt(), len(found[0][0])
    losses = alone(
        model, sgd(model), batches(items(), steps, tokens="ids", batch_tokens=150), tokens="ids"
    )
    for got, ends in found:
        assert got == pytest.approx(losses, rel=EXACT)
        for mine, wanted in zip(ends, weights(model), strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=0, atol=EXACT)


def decayed(ranks: int, folder: Path) -> Any:
    """Weights after steps with decay, of a model some of which nobody uses."""
    model = gpt()
    model.unused = torch.nn.Linear(3, 3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "norm" not in name
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5, momentum=0.9)
    if ranks == 1:
        alone(model, optimizer, batches(items(), 2, tokens="ids", batch_tokens=150), tokens="ids")
        return weights(model)
    run = attached(model, optimizer, items(), folder, labels="next", costs=costs(ranks), steps=2)
    run.engine.planner = Drawn(ranks=ranks, layers=2, seed=3)
    trained(run, model, LOSSES["ours"])
    return weights(model)


def test_what_nobody_uses_stays_as_it_is(tmp_path: Path) -> None:
    """Catches gradients of zeros for parameters that had none: decay and momentum would move what
    one process leaves alone."""
    found = run_ranks(3, decayed, 3, tmp_path, timeout_s=250)
    wanted = run_ranks(1, decayed, 1, tmp_path, timeout_s=100)[0]
    for got in found:
        for mine, other in zip(got, wanted, strict=True):
            np.testing.assert_allclose(mine, other, rtol=0, atol=EXACT)


def refused(what: str, folder: Path) -> str:
    """What is said of a loop that cannot be right."""
    model, data = gpt(), items()
    given: dict[str, Any] = {"labels": "next", "costs": costs(1, layers=2)}
    if what == "attention that is not found":
        model = gpt(kind=OwnAttention)
    if what == "lengths that are not its own":
        given["lengths"] = [n + 1 for n in range(len(data))]
    if what == "a stream without a budget":
        data, given["batch_tokens"], given["batch_sequences"] = iter(data), None, 3
    if what == "items without tokens":
        data = [{"pixels": torch.zeros(3)}]
    if what == "no items":
        data = []
    if what == "a sample that fits nowhere":
        del given["costs"]
        given["memory"] = "700KiB"
    run = attached(model, sgd(model), data, folder, **given)
    if "costs" in given:  # several micro-batches
        run.engine.planner = Drawn(ranks=1, layers=2, seed=3, levels=("none",))
    for step in run:
        for micro in step:
            logits = model(micro.inputs["ids"])[0]
            if what == "a mean":
                micro.backward(cross_entropy(logits[0], micro.labels[0]))
                continue
            if what == "no gradient":
                micro.backward(micro.loss(logits.detach()))
            loss = micro.loss(logits)
            micro.backward(loss)
            if what == "two backwards":
                micro.backward(loss)
        if what == "a second loop":
            list(step)
    return "nothing"


REFUSED = {
    "attention that is not found": (ModelError, "no attention that was replaced"),
    "lengths that are not its own": (DataError, "wanted 1, as its length says|tokens, wanted"),
    "a stream without a budget": (SpecError, "batch_tokens"),
    "items without tokens": (DataError, "a field 'ids'"),
    "no items": (DataError, "0 items"),
    "a sample that fits nowhere": (InfeasiblePlan, "KiB"),
    "a mean": (ModelError, "whatever micro.targets is"),
    "no gradient": (ModelError, "without gradient"),
    "two backwards": (ModelError, "a second one"),
    "a second loop": (HeadraceError, "a second loop over it"),
}


@pytest.mark.apart
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_right_is_refused(what: str, tmp_path: Path) -> None:
    """Catches wrong results that nobody is told of, and tracebacks from the depths."""
    kind, words = REFUSED[what]
    with pytest.raises(kind, match=words):
        refused(what, tmp_path)


def stream() -> Iterator[dict[str, Any]]:
    """Items one after the other."""
    yield from dataset()


class Stream:
    """An iterable data set."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return stream()


def test_a_stream_is_taken_in_order() -> None:
    """Catches items lost at the end of a batch or an epoch, and a state that takes one twice."""
    order = StreamOrder(Stream(), READER, batch_tokens=100)
    drawn = [order.next_batch() for _ in range(9)]
    lengths = [n for batch in drawn if batch.epoch == 0 for n in batch.lengths.tokens]
    assert lengths == [len(item["input_ids"]) for item in dataset()]
    assert all(b.lengths.total <= 100 or len(b.lengths) == 1 for b in drawn)
    for at, batch in enumerate(drawn[:-1]):
        other = StreamOrder(Stream(), READER, batch_tokens=100)
        other.restore(batch.state_after)
        assert other.next_batch().lengths == drawn[at + 1].lengths


@pytest.mark.parametrize("failing", [0, 3, 7])
def test_a_read_that_fails_once_loses_nothing(failing: int) -> None:
    """Catches items lost or taken twice where a stream fails and is asked again, and an epoch that
    ends early as the iterator that failed gives no more."""
    fails = [failing]

    class Unsteady:
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for at, item in enumerate(dataset()):
                if at in fails:
                    fails.remove(at)
                    raise OSError("the disk is away")
                yield item

    order, wanted = (StreamOrder(x, READER, batch_tokens=100) for x in (Unsteady(), Stream()))
    for _ in range(9):
        state = order.state()
        try:
            found = order.next_batch()
        except OSError:
            assert order.state() == state
            found = order.next_batch()
        expected = wanted.next_batch()
        assert (found.lengths, found.epoch) == (expected.lengths, expected.epoch)
        assert found.state_after == expected.state_after
    assert not fails


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=40),
    st.integers(1, 9),
    st.integers(1, 600),
    st.integers(0, 99),
)
def test_every_sample_once(lengths: list[int], ranks: int, budget: int, seed: int) -> None:
    """Catches samples that are dropped or doubled between the order, the plan and the ranks, ranks
    that meet in another order, and turns of lockstep that not all ranks have."""
    options = SamplerOptions(batch_tokens=budget, too_long="refuse", min_tokens=1, seed=seed)
    data = [torch.zeros(n, dtype=torch.int64) for n in lengths]
    samples = Samples.of(data, lengths, TokenReader(tokens="ids", kind="next"))
    order = DrawnOrder(samples, Sampler(samples, options))
    seen = list[int]()
    for semantics in ("free", "lockstep"):
        drawn = Drawn(ranks=ranks, layers=2, seed=seed, semantics=semantics)
        while order.epoch == (semantics == "lockstep"):
            batch = order.next_batch()
            plan = drawn.plan(batch.lengths).plan
            packs = [[plan.pipelines[micro.pipeline].ranks] for micro in plan.micro_batches]
            programs = [compile_turns(plan, packs, rank) for rank in range(ranks)]
            check_turns(programs, plan, packs)
            led = [
                action.micro_batch
                for program in programs
                for action in program.actions
                if isinstance(action, Forward) and action.group[0] == program.rank
            ]
            assert sorted(led) == list(range(len(plan.micro_batches)))
            seen += [batch.lengths.ids[i] for m in plan.micro_batches for i in m.sequences]
    assert sorted(seen) == sorted([*range(len(lengths))] * 2)


def other_data(folder: Path) -> str:
    """What ranks say that see other samples."""
    model = gpt()
    data = items()[dist.get_rank() :]
    try:
        attached(model, sgd(model), data, folder, labels="next", costs=costs(2, layers=2))
    except HeadraceError as error:
        return str(error)
    return "nothing"


def test_ranks_that_see_other_data_are_told(tmp_path: Path) -> None:
    """Catches ranks that train on different orders."""
    for said in run_ranks(2, other_data, tmp_path, timeout_s=100):
        assert "data of the loop" in said


@pytest.mark.apart
def test_a_run_is_reported(tmp_path: Path) -> None:
    """Catches a folder that the report cannot read."""
    model = gpt()
    run = attached(
        model,
        sgd(model),
        items(),
        tmp_path,
        labels="next",
        costs=costs(1, layers=2),
        out=tmp_path / "run",
    )
    losses = trained(run, model, LOSSES["ours"])
    page = run.report(tmp_path / "page.html")
    assert page is not None
    assert page.stat().st_size > 10_000
    assert hr.TrainingRun(tmp_path / "run").losses == pytest.approx(losses)
    run.detach()
    assert model(torch.tensor([[1, 2, 3]]))[0].shape == (1, 3, 61)


def test_labels_by_another_name() -> None:
    """Catches labels that are left out for the tokens themselves."""
    reader = TokenReader(tokens="ids", kind="same", label_name="wanted")
    item = {"ids": torch.tensor([1, 2, 3]), "wanted": torch.tensor([7, 8, -100])}
    assert reader.read(item, "item")["labels"].tolist() == [7, 8, -100]
    with pytest.raises(DataError, match="'wanted', which has the labels, and 'labels'"):
        reader.read({**item, "labels": item["ids"]}, "item")
    with pytest.raises(DataError, match="a field 'wanted' with labels"):
        reader.read({"ids": item["ids"], "want": item["wanted"]}, "item")
    unlabelled = reader.read({"ids": item["ids"]}, "item", labelled=False)
    assert unlabelled["labels"].tolist() == [-100] * 3


def test_numbers_in_lists_of_any_kind_are_columns() -> None:
    """Catches columns that vanish: nested lists, lists of numpy's numbers or of tensors, unsigned
    arrays, one truth value; words are left out, ragged lists are told."""
    columns: dict[str, Any] = {
        "boxes": [[1, 2, 3, 4]] * 3,
        "worths": list(np.arange(3, dtype=np.float32)),
        "marks": list(np.array([True, False, True])),
        "parts": [torch.tensor([1.0, 2.0])] * 3,
        "ids16": np.arange(3, dtype=np.uint16),
        "halves": [0.5, 1.0, 1.5],
        "whole": np.bool_(True),
        "words": ["a", "b", "c"],
        "turns": [[{"role": "user"}], [{"role": "user"}, {"role": "tool"}], []],
        "text": "abc",
    }
    reader = TokenReader(tokens="ids", kind="next")
    found = reader.read({"ids": [1, 2, 3], **columns}, "item")
    assert {name: list(x.shape) for name, x in found.items()} == {
        "ids": [3],
        "boxes": [3, 4],
        "worths": [3],
        "marks": [3],
        "parts": [3, 2],
        "ids16": [3],
        "halves": [3],
        "whole": [3],
        "labels": [3],
    }
    assert found["ids16"].dtype == found["ids"].dtype == torch.int64
    assert found["halves"].dtype == found["worths"].dtype == torch.float32
    keys = np.array([2**64 - 1, 0, 1], dtype=np.uint64)
    kept = TokenReader(tokens="ids", kind="next").read({"ids": [1, 2, 3], "keys": keys}, "item")
    assert kept["keys"].tolist() == keys.tolist()
    for ragged in ([[1], [1, 2], [3]], [1, None, 2], [torch.ones(1), torch.ones(2), torch.ones(1)]):
        with pytest.raises(DataError, match=r"odd of item.*lists of several lengths"):
            reader.read({"ids": [1, 2, 3], "odd": ragged}, "item")
