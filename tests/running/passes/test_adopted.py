"""Sequence parallelism of models that nobody here wrote."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import headrace as hr
from headrace.errors import DataError, ModelError, PlanMismatch, SpecError
from headrace.passes.adopted import Adopted
from ranks import run_ranks as forked
from running.passes.foreign import (
    BatchNormed,
    Centred,
    DroppingAttention,
    Gpt,
    MaskedAttention,
    OwnAttention,
    Shifting,
    drawn,
    gpt,
)
from spread import whole

EXACT = 1e-10

pytestmark = pytest.mark.timeout(300)
run_ranks = partial(forked, timeout_s=250)  # every rank compiles


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """Graphs of other tests' models count against the same limit."""
    torch._dynamo.reset()


def alone(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[float, list[Any]]:
    """Loss and gradients of one process."""
    model.zero_grad()
    loss = model(**batch)[1]
    loss.backward()
    return float(loss.detach()), [p.grad.clone() for p in model.parameters()]


def spread(run: Adopted, batch: dict[str, torch.Tensor], **how: Any) -> tuple[float, list[Any]]:
    """The same of all ranks together."""
    run.model.zero_grad()
    shard = run.shard(batch, **how)
    loss = run(**shard.inputs)[1]
    run.backward(loss)
    return float(run.add_up(loss)), [p.grad.clone() for p in run.model.parameters()]


def errors(got: tuple[float, list[Any]], wanted: tuple[float, list[Any]]) -> float:
    """The largest relative error of the loss, or of gradients by the largest of all."""
    scale = max(float(g.abs().max()) for g in wanted[1])
    off = max(float((a - b).abs().max()) for a, b in zip(got[1], wanted[1], strict=True))
    return max(abs(got[0] - wanted[0]) / abs(wanted[0]), off / scale)


def compared(make: Callable[[], Gpt], cases: list[Any], **options: Any) -> tuple[float, int]:
    """(largest error, compiles) over batches with their exchanges."""
    model, worst = make(), 0.0
    run = hr.compile(model, **options)
    for seed, (rows, tokens, how) in enumerate(cases):
        batch = drawn(rows, tokens, seed)
        worst = max(worst, errors(spread(run, batch, **how), alone(make(), batch)))
    return worst, run.compiles


CASES = [
    (1, 12, {"exchange": "ulysses"}),
    (2, 15, {"exchange": "ring"}),
    (3, 33, {"exchange": "gather"}),
    (2, 40, {"exchange": "ulysses"}),
]


def check_tutorials_model(ranks: int, heads: int, keys: int) -> None:
    cases = [*CASES, (2, 24, {"exchange": "2d"})] if ranks == 4 and heads != 5 else CASES
    for worst, _ in run_ranks(ranks, compared, lambda: gpt(heads, keys), cases):
        assert worst < EXACT


@pytest.mark.parametrize(
    ("ranks", "heads", "keys"), [whole(1, 4, 4), whole(2, 4, 4), (3, 5, 1), whole(4, 6, 3)]
)
def test_a_tutorials_model(ranks: int, heads: int, keys: int) -> None:
    """Catches lost labels at borders, places that begin anew, wrong shares of heads, means of
    means, and ranks whose labels are all ignored, in every exchange."""
    check_tutorials_model(ranks, heads, keys)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("heads", "keys"), [(4, 1), (3, 3)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_more_heads(ranks: int, heads: int, keys: int) -> None:
    """Catches the same in more cases."""
    check_tutorials_model(ranks, heads, keys)


@pytest.mark.parametrize(
    "options",
    [
        whole({"places": "sliced"}),
        {"checkpointed": True, "causal": False},
        whole({"causal": False}),
    ],
    ids=str,
)
def test_ways_to_write_it(options: dict[str, Any]) -> None:
    """Catches tables of places that are cut, attention inside checkpoints, and full attention."""
    for worst, _ in run_ranks(2, compared, lambda: gpt(**options), CASES):
        assert worst < EXACT


def one_graph(ranks: int, backend: str, steps: list[tuple[tuple[int, ...], ...]]) -> None:
    """A compiled model on other groups and other lengths in every step."""

    def work() -> tuple[float, int]:
        run, worst = hr.compile(gpt(6, 3), backend=backend), 0.0
        run.prepare(sorted({group for groups in steps for group in groups}))
        me = dist.get_rank()
        for seed, groups in enumerate(steps):
            batches = [drawn(2, 9 + 7 * seed + 4 * at, seed + 10 * at) for at in range(len(groups))]
            targets = sum(int((b["labels"] != -100).sum()) for b in batches)
            at = next(i for i, members in enumerate(groups) if me in members)
            got = spread(run, batches[at], ranks=groups[at], targets=targets)
            wanted = [0.0, [torch.zeros_like(p) for p in run.model.parameters()]]
            for batch in batches:
                loss, grads = alone(gpt(6, 3), batch)
                share = int((batch["labels"] != -100).sum()) / targets
                wanted[0] += loss * share
                wanted[1] = [a + b * share for a, b in zip(wanted[1], grads, strict=True)]
            worst = max(worst, errors(got, (wanted[0], wanted[1])))
        return worst, run.compiles

    for worst, compiles in run_ranks(ranks, work):
        assert worst < EXACT
        assert compiles <= 2


def test_one_graph_serves_lengths_and_groups() -> None:
    """Catches a graph that knows its group, its lengths, or how attention is exchanged."""
    one_graph(2, "eager", [((0, 1),), ((0,), (1,)), ((0, 1),)])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_compiled_graph_serves_them_too() -> None:
    """Catches the same behind a compiler that also makes the backward."""
    steps = [((0, 1, 2),), ((0, 1), (2,)), ((0,), (1, 2)), ((0, 1, 2),)]
    one_graph(3, "aot_eager", steps)


def test_a_backward_after_the_next_forward() -> None:
    """Catches a backward that takes the batch in force for its own."""

    def work() -> float:
        run = hr.compile(gpt())
        first, second = drawn(2, 17, 1), drawn(1, 30, 2)
        losses = []
        for batch, exchange in ((first, "ulysses"), (second, "ring")):
            losses.append(run(**run.shard(batch, exchange=exchange).inputs)[1])
        for loss in losses:
            run.backward(loss)
        run.add_up(loss)
        got = [p.grad.clone() for p in run.model.parameters()]
        one, two = alone(gpt(), first), alone(gpt(), second)
        wanted = [a + b for a, b in zip(one[1], two[1], strict=True)]
        return errors((1.0, got), (1.0, wanted))

    assert max(run_ranks(2, work)) < EXACT


def test_under_ddp() -> None:
    """Catches gradients that are as many times too large, or too small, as there are ranks."""

    def work() -> float:
        model = gpt()
        run, batch = hr.compile(DistributedDataParallel(model)), drawn(2, 22, 3)
        loss = run(**run.shard(batch).inputs)[1]
        run.backward(loss)
        total = run.add_up(loss)
        return errors((float(total), [p.grad for p in model.parameters()]), alone(gpt(), batch))

    assert max(run_ranks(2, work)) < EXACT


def test_a_graph_that_hooks_would_break() -> None:
    """Catches attention that is not replaced in a model under FSDP2."""

    def work() -> str:
        try:
            hr.compile(fully_shard(gpt()))
        except ModelError as error:
            return str(error)
        return ""

    assert "FSDP2" in run_ranks(1, work)[0]


REFUSED = {
    "a convolution over tokens": (lambda: gpt(other=Shifting), "another result for token 5"),
    "a mean over tokens": (lambda: gpt(other=Centred), "another result"),
    "batch norm": (lambda: gpt(other=BatchNormed), "BatchNorm1d"),
    "attention of its own": (lambda: gpt(kind=OwnAttention), "no attention that was replaced"),
    "a mask tensor": (lambda: gpt(kind=MaskedAttention), "attn_mask"),
    "dropout of attention": (lambda: gpt(kind=DroppingAttention), "dropout_p 0.1"),
    "labels shifted in the model": (lambda: gpt(shifts=True), "loss of the model"),
}


@pytest.mark.parametrize(
    "what", [x if "a mean" in x or "mask" in x or "labels" in x else whole(x) for x in REFUSED]
)
def test_what_cannot_be_run_on_parts_is_refused(what: str) -> None:
    """Catches silently wrong results."""
    make, says = REFUSED[what]
    with pytest.raises(ModelError, match=says):
        hr.compile(make()).shard(drawn(1, 20))


def test_batches_that_cannot_be_sharded() -> None:
    """Catches tracebacks from the depths."""
    run = hr.compile(gpt())
    good = drawn(2, 12)
    with pytest.raises(SpecError, match="wanted ids"):
        run.shard({"labels": good["labels"]})
    with pytest.raises(DataError, match="input class"):
        run.shard({**good, "class": torch.zeros(2)})
    with pytest.raises(DataError, match="ones on both sides"):
        run.shard({**good, "attention_mask": torch.tensor([[1, 0, 1] * 4] * 2)})
    with pytest.raises(DataError, match="attention_mask"):
        run.shard({**good, "attention_mask": torch.ones(2, 1, 12, 12)})
    with pytest.raises(SpecError, match="exchange"):
        hr.compile(gpt(), exchange="nothing")  # type: ignore[arg-type]
    shard = run.shard(good)
    with pytest.raises(ModelError, match="others than were sharded"):
        run(**{name: value[:, :5] for name, value in shard.inputs.items()})
    with pytest.raises(ModelError, match="blocks that are not known"):
        hr.compile(gpt(), recompute="full")


@pytest.mark.slow
def test_batches_sharded_before_they_are_run() -> None:
    """Catches a batch that is run as if its tokens were those of the one that was sharded last."""

    def work() -> float:
        run = hr.compile(gpt())
        batches = [drawn(1, 24, 1), drawn(2, 12, 2), drawn(1, 24, 3)]
        shards = [
            run.shard(batch, exchange=exchange)
            for batch, exchange in zip(batches, ("ring", "ulysses", "gather"), strict=True)
        ]
        worst = 0.0
        for batch, shard in zip(batches, shards, strict=True):
            run.model.zero_grad()
            loss = run(**shard.inputs)[1]
            run.backward(loss)
            got = float(run.add_up(loss)), [p.grad.clone() for p in run.model.parameters()]
            worst = max(worst, errors(got, alone(gpt(), batch)))
        return worst

    assert max(run_ranks(2, work)) < EXACT


def test_ranks_must_see_one_batch() -> None:
    """Catches gradients of two batches in one."""

    def work() -> str:
        try:
            hr.compile(gpt()).shard(drawn(1, 20, dist.get_rank()))
        except PlanMismatch as error:
            return str(error)
        return ""

    assert all("batch of ranks" in said for said in run_ranks(2, work))


@pytest.mark.slow
def test_evaluation_without_labels() -> None:
    """Catches sequence parallelism that is off, or fails, where there are no labels."""

    def work() -> float:
        run, batch = hr.compile(gpt()), drawn(2, 18)
        run.model.eval()
        with torch.no_grad():
            shard = run.shard({"ids": batch["ids"]})
            logits = run(**shard.inputs)[0]
            whole = gpt()(batch["ids"])[0][:, shard.placement.index()]
        return float((logits - whole).abs().max())

    assert max(run_ranks(2, work)) < EXACT
