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
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import headrace as hr
from headrace.adopt.block_recompute import WrappedLevels
from headrace.adopt.placement import Placement
from headrace.adopt.token_model import TokenModel
from headrace.errors import DataError, ModelError, PlanMismatch, SpecError
from headrace.native.counted import ByteCounter, SavedBytes
from ranks import run_ranks as forked
from running.adopt.foreign import (
    Attention,
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


def spread(run: TokenModel, batch: dict[str, torch.Tensor], **how: Any) -> tuple[float, list[Any]]:
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


def check_tutorials_model(ranks: int, heads: int, keys: int, backend: str | None) -> None:
    cases = [*CASES, (2, 24, {"exchange": "2d"})] if ranks == 4 and heads != 5 else CASES
    work = partial(compared, lambda: gpt(heads, keys), cases, backend=backend)
    for worst, compiles in run_ranks(ranks, work):
        assert worst < EXACT
        assert bool(compiles) == bool(backend)


@pytest.mark.parametrize(
    ("ranks", "heads", "keys"), [whole(1, 4, 4), whole(2, 4, 4), (3, 5, 1), whole(4, 6, 3)]
)
def test_a_tutorials_model(ranks: int, heads: int, keys: int) -> None:
    """Catches lost labels at borders, places that begin anew, wrong shares of heads, means of
    means, and ranks whose labels are all ignored, in every exchange."""
    check_tutorials_model(ranks, heads, keys, None)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize(("heads", "keys"), [(4, 1), (3, 3)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_more_heads(ranks: int, heads: int, keys: int, backend: str | None) -> None:
    """Catches the same in more cases."""
    check_tutorials_model(ranks, heads, keys, backend)


WRITTEN = [
    {"places": "sliced"},
    {"checkpointed": True, "causal": False},
    {"causal": False},
    {"attends": "module"},
    {"places": "by hand"},
]


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        *(whole(options, None) for options in WRITTEN),
        ({"places": "sliced", "checkpointed": True}, "eager"),
        whole({"checkpointed": True, "causal": False}, "eager"),
        whole({"attends": "module"}, "eager"),
    ],
    ids=str,
)
def test_ways_to_write_it(options: dict[str, Any], backend: str | None) -> None:
    """Catches tables of places that are cut, attention inside checkpoints and of torch's module,
    places as numbers that a model makes in a function of its own, and full attention."""
    work = partial(compared, lambda: gpt(**options), CASES, backend=backend)
    for worst, _ in run_ranks(2, work):
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


@pytest.mark.slow
def test_one_graph_serves_lengths_and_groups() -> None:
    """Catches a graph that knows its group, its lengths, or how attention is exchanged."""
    one_graph(2, "eager", [((0, 1),), ((0,), (1,)), ((0, 1),)])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_compiled_graph_serves_them_too() -> None:
    """Catches the same behind a compiler that also makes the backward."""
    steps = [((0, 1, 2),), ((0, 1), (2,)), ((0,), (1, 2)), ((0, 1, 2),)]
    one_graph(3, "aot_eager", steps)


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": "full"},
        whole({"recompute": "attention"}),
        whole({}),
        whole({"backend": "eager"}),
    ],
    ids=str,
)
def test_a_backward_after_the_next_forward(options: dict[str, Any]) -> None:
    """Catches a backward that takes the batch in force for its own, and one that computes again
    with it."""

    def work() -> float:
        run = hr.compile(gpt(), **options)
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


def held(how: str, model: Gpt) -> torch.nn.Module:
    """A model in a wrapper, or its blocks compiled before."""
    if how == "ddp":
        return DistributedDataParallel(model)
    if "blocks compiled" in how:
        for block in model.blocks:
            block.compile(backend="aot_eager" if "aot" in how else "eager", dynamic=True)
    if "fsdp2" in how:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model


@pytest.mark.parametrize(
    ("ranks", "how", "options"),
    [
        (2, "ddp", {}),
        (3, "fsdp2", {"recompute": "attention"}),
        whole(2, "fsdp2, blocks compiled", {}),
        whole(2, "blocks compiled by aot", {}),
        whole(4, "fsdp2", {}),
        whole(1, "fsdp2", {"recompute": "full"}),
        whole(2, "ddp", {"backend": "eager"}),
        whole(2, "fsdp2, checkpointed", {}),
    ],
)
def test_under_wrappers(ranks: int, how: str, options: dict[str, Any]) -> None:
    """Catches gradients that are as many times too large, or too small, as there are ranks, weights
    that are gathered at other times on other ranks, and blocks whose attention is not replaced."""

    def work() -> float:
        model = gpt(checkpointed="checkpointed" in how)
        run, worst = hr.compile(held(how, model), **options), 0.0
        for seed, (rows, tokens) in enumerate([(2, 22), (1, 31)]):
            batch = drawn(rows, tokens, seed)
            model.zero_grad()
            loss = run(**run.shard(batch).inputs)[1]
            run.backward(loss)
            total = float(run.add_up(loss))
            whole = [
                getattr(p.grad, "full_tensor", lambda g=p.grad: g)() for p in model.parameters()
            ]
            worst = max(worst, errors((total, whole), alone(gpt(), batch)))
        return worst

    assert max(run_ranks(ranks, work)) < EXACT


def test_blocks_compute_again_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a recompute that nobody does, and one that reaches attention where it should not."""
    counted, asked = {}, []
    core = Placement.core
    monkeypatch.setattr(Placement, "core", lambda *args: asked.append(1) or core(*args))
    for level in (None, "attention", "full"):
        model, calls = gpt(), []
        model.blocks[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        run = hr.compile(model, recompute=level)
        shard = run.shard(drawn(1, 12))
        loss = run(**shard.inputs)[1]
        calls.clear(), asked.clear()
        run.backward(loss)
        counted[level] = len(calls), len(asked)
    assert counted == {None: (0, 2), "attention": (1, 2), "full": (1, 4)}


class Fixed(torch.nn.Module):
    """Adds a table of so many rows, which is no number of tokens."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(6, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(torch.arange(6)).sum(dim=0) + x


class Hidden(torch.nn.Module):
    """Counts tokens in a function that a checkpoint computes again."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(128, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._added, x, use_reentrant=False)

    def _added(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.rows(torch.arange(x.shape[1]))


class Bare(Attention):
    """A checkpoint around torch's own function."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return checkpoint(
            torch.nn.functional.scaled_dot_product_attention, q, k, v, use_reentrant=False
        )


class Sometimes(torch.nn.Module):
    """Counts tokens only when it is asked to."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(128, features)
        self.asked = 0  # a number, which no look at flags sees

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.rows(torch.arange(x.shape[1])) if self.asked else x


def test_a_size_that_is_the_number_of_tokens_by_chance() -> None:
    """Catches a count of something else that is taken for that of tokens, and the other way
    around: ranks have 6 tokens each, which are the rows of a table too."""
    cases = [(1, 12, {}), (2, 13, {}), (1, 12, {"exchange": "ring"})]
    for worst, _ in run_ranks(2, compared, lambda: gpt(other=Fixed), cases):
        assert worst < EXACT


def test_counts_that_cannot_be_told() -> None:
    """Catches silently wrong places."""
    with pytest.raises(ModelError, match=r"Hidden._added.*a checkpoint around a function"):
        hr.compile(gpt(other=Hidden)).shard(drawn(1, 20))
    with pytest.raises(ModelError, match="a function of torch: got a checkpoint around a function"):
        hr.compile(gpt(kind=Bare)).shard(drawn(1, 20))
    run = hr.compile(gpt(other=Sometimes))
    shard = run.shard(drawn(1, 20))
    for module in run.model.modules():
        if isinstance(module, Sometimes):
            module.asked = 1
    with pytest.raises(ModelError, match=r"Sometimes.forward.*which may be tokens or not"):
        run(**shard.inputs)


def test_a_model_that_is_adopted_again() -> None:
    """Catches a model in which two replace what it calls."""
    model, batch = gpt(), drawn(1, 12)
    hr.compile(model).shard(batch)
    assert errors(spread(hr.compile(model), batch), alone(gpt(), batch)) < EXACT


def kept_bytes(backend: str, level: Any) -> tuple[float, int, int]:
    """(error, bytes kept for the backward, compiles) of a compiled model."""
    run, batch = hr.compile(gpt(), backend=backend, recompute=level), drawn(2, 30)
    error = errors(spread(run, batch), alone(gpt(), batch))
    run.model.zero_grad()
    shard = run.shard(batch)
    with SavedBytes(run.model.parameters()) as saved:
        loss = run(**shard.inputs)[1]
        kept = saved.look()[0]
    run.backward(loss)
    return error, kept, run.compiles


def in_torchs_checkpoint(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What torch offers for it: all but the result of attention is computed again."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    kept = partial(create_selective_checkpoint_contexts, [kernel])
    return checkpoint(block, x, use_reentrant=False, context_fn=kept)


def alive_bytes(layers: int, level: Any, exchange: Any = "ulysses") -> tuple[int, list[Any]]:
    """(bytes alive between forward and backward, gradients) of a model; ``torch`` spreads nothing
    and has torch's own checkpoint around each block."""
    model, batch = gpt(layers=layers), drawn(1, 64)
    if level == "torch":
        for block in model.blocks:
            block.forward = partial(in_torchs_checkpoint, block.forward)
        with ByteCounter() as counter:
            loss = model(**batch)[1]
            kept = counter.look()[0]
        loss.backward()
        return kept, [p.grad for p in model.parameters()]
    run = hr.compile(model, recompute=level)
    shard = run.shard(batch, exchange=exchange)
    with ByteCounter(settle_s=0.1) as counter:
        loss = run(**shard.inputs)[1]
        kept = counter.look()[0]
    run.backward(loss)
    return kept, [p.grad for p in model.parameters()]


def layer_bytes(level: Any, exchange: Any = "ulysses") -> int:
    """Of one more layer."""
    return (alive_bytes(4, level, exchange)[0] - alive_bytes(2, level, exchange)[0]) // 2


def test_recompute_on_one_rank_keeps_what_torchs_selective_checkpoint_does() -> None:
    """Catches q, k and v that are kept though the backward computes them again, and gradients that
    this changes."""
    serial = 8  # the number of the placement
    assert layer_bytes("attention") == layer_bytes("torch") + serial
    for got, wanted in zip(alive_bytes(2, "attention")[1], alive_bytes(2, None)[1], strict=True):
        assert torch.equal(got, wanted)


def test_recompute_on_a_group_keeps_only_what_was_exchanged() -> None:
    """Catches traffic that is repeated to save memory, and memory for what nobody sent."""

    def work() -> tuple[int, int, bool]:
        alike = all(
            torch.equal(got, wanted)
            for exchange in ("ulysses", "ring", "gather")
            for got, wanted in zip(
                alive_bytes(2, "attention", exchange)[1],
                alive_bytes(2, None, exchange)[1],
                strict=True,
            )
        )
        return layer_bytes("attention", "ulysses"), layer_bytes("attention", "ring"), alike

    exchanged = 64 // 2 * 4 * 8 * 8 * 3  # q, k and v: a rank's share of tokens, heads, D in fp64
    for switched, ring, alike in run_ranks(2, work):
        # Ulysses keeps the exchanged q, k, v and the result of its heads, too.
        assert switched - ring == exchanged + exchanged // 3
        assert alike


@pytest.mark.slow
def test_a_graph_of_one_rank_keeps_no_more() -> None:
    """Catches q, k and v that a compiled model keeps though its backward computes them again."""

    def kept(layers: int, level: str) -> int:
        torch._dynamo.reset()
        run = hr.compile(gpt(layers=layers), backend="aot_eager", recompute=level)
        shard = run.shard(drawn(1, 64))
        with SavedBytes(run.model.parameters()) as saved:
            loss = run(**shard.inputs)[1]
            found = saved.look()[0]
        run.backward(loss)
        return found

    def layer(level: str) -> int:
        return (kept(4, level) - kept(2, level)) // 2

    result = 64 * 4 * 8 * 8 + 64 * 4 * 8  # and its log-sum-exp
    assert layer("attention") - layer("full") == pytest.approx(result, abs=64)


@pytest.mark.parametrize("backend", [whole("eager"), whole("aot_eager")])
def test_blocks_of_a_graph_compute_again_what_was_said(backend: str) -> None:
    """Catches tags that a partitioner does not see, and blocks that break a graph."""
    found = {}
    for level in (None, "attention", "full"):
        (error, found[level], compiles), _ = run_ranks(2, kept_bytes, backend, level)
        assert error < EXACT
        assert compiles == 1
    assert found["full"] <= found["attention"] < found[None]
    # What attention gives is kept by a mode where the graph is not compiled: no hook sees it.
    assert backend == "eager" or found["full"] < found["attention"]


class Levelled(torch.nn.Module):
    """A block whose arguments have names that checkpoints have, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, level: int, debug: bool) -> torch.Tensor:
        return self.linear(x) * level + debug


@pytest.mark.apart  # a backward in the test's own process
def test_names_that_checkpoints_have() -> None:
    """Catches arguments of a block that are taken for those of its checkpoint."""
    block, x = Levelled(), torch.randn(2, 4, requires_grad=True)
    levels = WrappedLevels([block], lambda f, *args, **named: f(*args, **named), lambda f: f)
    levels.choose(["full"])
    found = block(x, level=3, debug=True)
    (grad,) = torch.autograd.grad(found.sum(), x)
    levels.remove()
    assert torch.equal(found, block(x, level=3, debug=True))
    assert torch.allclose(grad, 3 * block.linear.weight.sum(0).expand(2, 4))


def test_a_graph_that_hooks_would_break() -> None:
    """Catches attention that is not replaced in a compiled model under FSDP2."""

    def work() -> str:
        with pytest.raises(ModelError) as raised:
            hr.compile(fully_shard(gpt()), backend="eager")
        return str(raised.value)

    assert "compile the model's blocks" in run_ranks(1, work)[0]


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
    with pytest.raises(ModelError, match="no blocks that can be seen"):
        hr.compile(gpt(layers=1), recompute="full").shard(good)


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
            whole = gpt()(batch["ids"])[0][:, shard.placed.index()]
        return float((logits - whole).abs().max())

    assert max(run_ranks(2, work)) < EXACT
