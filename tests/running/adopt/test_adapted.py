"""Models on shards of their axes against one process."""

from __future__ import annotations

import copy
import importlib
import io
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import headrace as hr
from headrace.adopt.axis_examples import EXAMPLES, AxisExample, latte, transformer_2d
from headrace.adopt.labels import result_tensors
from headrace.cli import main
from headrace.comm.mesh import Groups
from headrace.errors import (
    DataError,
    HeadraceError,
    InfeasiblePlan,
    LaunchError,
    ModelError,
    SpecError,
)
from headrace.native.counted import TrafficCounter
from ranks import run_ranks
from running.adopt.axial import AXES, DIMS, Axial, example, stages, table
from running.adopt.test_joint import Spoken, spoken
from spread import spread, whole

EXACT = 1e-10

with suppress(ImportError):  # once, before any rank is forked
    importlib.import_module("diffusers.models.transformers.latte_transformer_3d")
    importlib.import_module("diffusers.models.transformers.transformer_wan")


def errors_of(name: str, case: str) -> tuple[float, float]:
    """Of one of the known models."""
    made = EXAMPLES[name][case]()
    return made.errors(copy.deepcopy(made.model))


@pytest.mark.parametrize(
    ("ranks", "name", "case"),
    spread([(r, n, c) for r in (1, 2, 3, 4) for n, cases in EXAMPLES.items() for c in cases], 11),
)
def test_known_models_equal_one_process(ranks: int, name: str, case: str) -> None:
    """Catches embeddings of other frames, rows that are lost, text of another frame, and a clip's
    token that counts for every rank."""
    if name != "transformer-2d":
        pytest.importorskip("transformers" if name == "timesformer" else "diffusers")
    for loss, gradient in run_ranks(ranks, errors_of, name, case, timeout_s=100):
        single = name in ("wan", "mochi")  # their norms
        assert max(loss, gradient) <= (1e-6 if single else EXACT)


def errors_of_table(returns: bool) -> tuple[float, float]:
    made = example(returns=returns)
    return made.errors(copy.deepcopy(made.model))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("returns", [True, False])
def test_named_stages_equal_one_process(ranks: int, returns: bool) -> None:
    """Catches axes that are mistaken for each other, and uneven shards."""
    for loss, gradient in run_ranks(ranks, errors_of_table, returns, timeout_s=100):
        assert max(loss, gradient) <= EXACT


def adapted(model: Any, *, returns: bool = False) -> Any:
    return hr.adapt(model, stages=stages(returns=returns), inputs={"x": DIMS}, axis="i", batch="b")


def drawn(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, 8, generator=generator, dtype=torch.float64)


def gradients(model: Any) -> torch.Tensor:
    grads = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]
    return torch.cat([g.flatten() for g in grads])


def alone(model: Any, batches: list[torch.Tensor]) -> torch.Tensor:
    for x in batches:
        model(x).square().sum().backward()
    return gradients(model)


def switches_of_forwards() -> list[int]:
    """Bytes that each of three forwards sends on two ranks, and of one whose axis returns."""
    x, sent = drawn(1, 2, 4, 6, 8), []
    for returns in (False, True):
        run = adapted(table(), returns=returns)
        for _ in range(1 if returns else 3):
            shard = run.shard({"x": x})
            with TrafficCounter() as wire:
                run(**shard)
            sent.append(wire.sent_bytes)
    return sent


def test_the_order_of_stages_is_learnt() -> None:
    """Catches axes that are switched although the next stage mixes them: six stages over three axes
    take three switches, and four while their order is not known, or where the axis returns."""
    once = 2 * 4 * 6 * 8 * 8 * 8 // 4  # M (N - 1) / N^2 of fp64
    assert run_ranks(2, switches_of_forwards)[0] == [4 * once, 3 * once, 3 * once, 4 * once]


def interleaved(ranks: int, checkpointed: bool) -> tuple[float, float]:
    """Two batches of other sizes whose backwards come after both forwards."""
    model, batches = table(checkpointed=checkpointed), [drawn(1, 1, 5, 4, 6), drawn(2, 1, 4, 7, 5)]
    run, losses = adapted(model, returns=checkpointed), []
    for x in batches:
        losses.append(run(**run.shard({"x": x})).square().sum())
    for loss in losses:
        run.backward(loss)
    run.add_up(sum(losses))
    wanted = alone(table(), batches)
    return float((gradients(model) - wanted).abs().max()), float(wanted.abs().max())


@pytest.mark.parametrize("checkpointed", [False, True])
def test_batches_whose_backwards_come_later(checkpointed: bool) -> None:
    """Catches sizes that are looked up when a backward runs: those of another batch."""
    for off, largest in run_ranks(3, interleaved, 3, checkpointed):
        assert off <= EXACT * largest


def wrapped(how: str, apart: bool) -> float:
    """How far gradients under a wrapper are from one process'."""
    model, x = table(), drawn(3, 4, 1 if apart else 5, 4, 6)
    called: Any = DistributedDataParallel(model) if how == "ddp" else model
    if how == "fsdp2":
        for part in model.modules():
            if isinstance(part, Axial):
                fully_shard(part)
        fully_shard(model)
    run = adapted(called)
    loss = run(**run.shard({"x": x})).square().sum()
    run.backward(loss)
    total = run.add_up(loss)
    plain = table()
    wanted = alone(plain, [x])
    assert float(total) == pytest.approx(float(plain(x).detach().square().sum()), rel=1e-12)
    return float((gradients(model) - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
@pytest.mark.parametrize("apart", [False, True])
def test_under_wrappers(how: str, apart: bool) -> None:
    """Catches gradients that are averaged, and samples that are worked on twice."""
    assert max(run_ranks(4, wrapped, how, apart)) <= EXACT


def latte_wrapped(how: str) -> tuple[float, float, str]:
    """The errors of Latte under a wrapper, recomputed, and what is said of it."""
    made = latte(frames=4, checkpoints=True)
    plain, called = copy.deepcopy(made.model), made.model
    if how == "ddp":
        called = DistributedDataParallel(called)
    else:
        inner: Any = called
        for block in (*inner.transformer_blocks, *inner.temporal_transformer_blocks):
            fully_shard(block)
        fully_shard(called)
    run = hr.adapt(called)
    loss = run(**run.shard(made.inputs)).sample.square().sum()
    said = str(run)
    run.backward(loss)
    total = float(run.add_up(loss))
    wanted = plain(**made.inputs).sample.square().sum()
    wanted.backward()
    right = gradients(plain)
    far = float((gradients(made.model) - right).abs().max() / right.abs().max())
    return abs(total / float(wanted.detach()) - 1), far, said


@pytest.mark.parametrize(("how", "ranks"), [("ddp", 2), ("fsdp2", 4), whole("fsdp2", 3)])
def test_latte_under_wrappers(how: str, ranks: int) -> None:
    """Catches hooks that wrappers overrule, and recompute on weights that were let go of."""
    pytest.importorskip("diffusers")
    for loss, gradient, said in run_ranks(ranks, latte_wrapped, how, timeout_s=100):
        assert max(loss, gradient) <= EXACT
        assert f"on {ranks} ranks, axis t in shards" in said
        assert "2 x t to s, 2 x s to t" in said


class Branches(torch.nn.Module):
    """Two stages that are given the same tensor, and one more."""

    def __init__(self) -> None:
        super().__init__()
        self.i, self.k = Axial(1), Axial(3)
        self.ij = torch.nn.Sequential(Axial(1), Axial(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.k(self.i(x) + self.ij(x))


def of_branches() -> float:
    """The error of a result. The first stage may take j, of most places; the second may not."""
    torch.manual_seed(0)
    model, x = Branches().double(), drawn(1, 1, 4, 9, 6)
    mixed = {"i": "i", "ij": "i j", "k": "k"}
    run = hr.adapt(
        model,
        inputs={"x": DIMS},
        axis="i",
        stages=[hr.AxisStage(modules=n, mixes=m, dims=DIMS) for n, m in mixed.items()],
    )
    with torch.no_grad():
        whole = run.collect(run(**run.shard({"x": x})), DIMS)
        run.detach()
        return float((whole - model(x)).abs().max())


def test_stages_that_are_given_the_same_tensor() -> None:
    """Catches the axis that another stage was given for this tensor."""
    assert max(run_ranks(2, of_branches)) <= EXACT


class Flattened(torch.nn.Module):
    """A table of which the inputs do not tell the last two axes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = table()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, i, _, c = x.shape
        return self.table(x.view(b, i, -1, 6, c))


def of_hidden_axes() -> float:
    """The largest error of results of two batches."""
    model, worst = Flattened(), 0.0
    named = [
        hr.AxisStage(modules=f"table.{s.modules}", mixes=s.mixes, dims=DIMS, returns=False)
        for s in stages(returns=False)
    ]
    run = hr.adapt(model, stages=named, inputs={"x": "b i p c"}, axis="i")
    for seed, places in ((1, 4), (2, 5)):
        x = drawn(seed, 1, 6, places * 6)
        with torch.no_grad():
            whole = run.collect(run(**run.shard({"x": x})), DIMS)
            worst = max(worst, float((whole - table()(x.view(1, 6, places, 6, 8))).abs().max()))
    return worst


def test_axes_that_no_input_tells() -> None:
    """Catches plans that know only some of the axes."""
    assert max(run_ranks(2, of_hidden_axes)) <= EXACT


def after_a_failure() -> tuple[float, float]:
    """Errors of a forward of Latte after one that failed, which left its embedding of frames."""
    made = EXAMPLES["latte"]["5 frames"]()
    embedded = made.model.temp_pos_embed.clone()
    run = hr.adapt(made.model, check=False)
    fail = made.model.transformer_blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(**run.shard(made.inputs))
    fail.remove()
    kept = float((made.model.temp_pos_embed - embedded).abs().max())
    with torch.no_grad():
        whole = run.collect(run(**run.shard(made.inputs)).sample, "b c t y x")
        run.detach()
        return kept, float((whole - made.model(**made.inputs).sample).abs().max())


def test_a_forward_that_fails_leaves_the_model_as_it_was() -> None:
    """Catches an embedding that stays taken away: results would be wrong without a word."""
    pytest.importorskip("diffusers")
    for kept, off in run_ranks(2, after_a_failure, timeout_s=100):
        assert kept == 0
        assert off <= EXACT


def recomputed_bytes() -> list[int]:
    """Bytes of a step of Latte, plain and with checkpoints."""
    sent = []
    for case in ("5 frames", "4 frames, recomputed"):
        made = EXAMPLES["latte"][case]()
        run = hr.adapt(made.model)
        shard = run.shard(made.inputs)
        with TrafficCounter() as wire:
            out = run(**shard).sample
            forward = wire.sent_bytes
            run.backward(out.square().sum())
        sent += [forward, wire.sent_bytes - forward]
    return sent


def test_checkpoints_repeat_no_traffic() -> None:
    """Catches switches within what is computed again."""
    pytest.importorskip("diffusers")
    plain, plain_back, forward, back = run_ranks(2, recomputed_bytes)[0]
    told = 432  # of a first backward ranks tell each other what they multiply tokens with
    assert back - told == forward > 0
    assert plain_back == plain  # results that all ranks have


def compiled(how: str) -> list[float]:
    """How far gradients of two batches of other sizes are from one process'."""
    mine, plain = (EXAMPLES["transformer-2d"]["5 frames"]().model for _ in range(2))
    found = []
    run = hr.adapt(mine)
    if how == "model":
        mine.compile(backend="aot_eager", dynamic=True)
    else:
        block: Any = mine.layers[0].temporal
        block.forward = torch.compile(
            block.forward, backend="aot_eager", dynamic=True, fullgraph=True
        )
    for frames, patches in ((5, 6), (7, 4)):
        inputs = {
            "x": torch.randn(
                1,
                frames,
                patches,
                4,
                dtype=torch.float64,
                generator=torch.Generator().manual_seed(frames),
            ),
            "timestep": torch.tensor([3]),
            "frames": torch.arange(frames),
            "patches": torch.arange(patches),
        }
        mine.zero_grad()
        plain.zero_grad()
        loss = run(**run.shard(inputs)).square().sum()
        run.backward(loss)
        run.add_up(loss)
        plain(**inputs).square().sum().backward()
        wanted = gradients(plain)
        found.append(float((gradients(mine) - wanted).abs().max() / wanted.abs().max()))
    return found


@pytest.mark.parametrize("how", [whole("block"), whole("model")])
def test_compiled_models(how: str) -> None:
    """Catches switches that are traced with the sizes of one batch, and, of a block, a graph
    that breaks."""
    for errors in run_ranks(2, compiled, how, timeout_s=200):
        assert max(errors) <= EXACT


MADE: dict[str, Callable[[int], AxisExample]] = {
    "transformer-2d": lambda size: transformer_2d(frames=size, patches=6, samples=1),
    "latte": lambda size: latte(samples=1),
    "table": lambda size: example(returns=False),
    "table, returning": lambda size: example(returns=True),
}


def one_graph(name: str, backend: str) -> tuple[list[float], int]:
    """How far gradients of batches of three sizes are from one process', and how many graphs there
    were: none is made in the first forward, which shows the order of stages."""
    from torch._dynamo.utils import counters

    counters.clear()
    first = MADE[name](5)
    plain, run = copy.deepcopy(first.model), first.adapted(first.model)
    run.compile(backend=backend)
    found = []
    for size in (5, 5, 4, 5):
        inputs = MADE[name](size).inputs
        plain.zero_grad()
        first.model.zero_grad()
        out = first.results(run(**run.shard(inputs)))
        loss = sum((x.square().sum() for x, _ in out), torch.zeros(()))
        run.backward(loss)
        run.add_up(loss)
        wanted = [x.square().sum() for x, _ in first.results(plain(**inputs))]
        torch.stack(wanted).sum().backward()
        right = gradients(plain)
        found.append(float((gradients(first.model) - right).abs().max() / right.abs().max()))
    breaks = sum(counters["graph_break"].values())
    assert not breaks, counters["graph_break"]
    return found, int(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("table", "aot_eager"),
        *(whole(name, "aot_eager") for name in MADE),
        whole("transformer-2d", "inductor"),
    ],
)
def test_a_model_is_one_graph(name: str, backend: str) -> None:
    """Catches graph breaks at switches, and a graph that is taken for a batch of other sizes whose
    parts here are alike."""
    if name == "latte":
        pytest.importorskip("diffusers")
    for errors, graphs in run_ranks(2, one_graph, name, backend, timeout_s=300):
        assert max(errors) <= EXACT
        assert 1 <= graphs <= (4 if name == "latte" else 2)


def compiled_parts() -> float:
    """How far a loss of results beside this rank's part of a target is from one process'."""
    first = transformer_2d(frames=4, patches=4, samples=1)
    plain, run = copy.deepcopy(first.model), first.adapted(first.model)
    run.compile(backend="eager")
    target = torch.randn(
        1, 4, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    found = []
    for _ in range(2):
        out = run(**run.shard(first.inputs))
        found.append(float(run.add_up((out - run.local(target, "b t s c")).square().sum())))
    wanted = float((plain(**first.inputs) - target).square().sum().detach())
    return max(abs(one / wanted - 1) for one in found)


def test_parts_after_a_compiled_forward() -> None:
    """Catches parts of another axis than that of the result."""
    assert max(run_ranks(2, compiled_parts, timeout_s=100)) < 1e-12


class Sometimes(torch.nn.Module):
    """Three axes in turn, of which images have no first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.ModuleDict({"j": Axial(2), "k": Axial(3), "i": Axial(1)}) for _ in range(2)
        )

    def forward(self, x: torch.Tensor, images: bool) -> torch.Tensor:
        for block in self.blocks:
            parts: Any = block
            for name in "jk" if images else "jki":
                x = parts[name](x)
        return x


def of_other_histories() -> float:
    """The error of a forward on both ranks, after each did another by itself."""
    torch.manual_seed(0)
    model = Sometimes().double()
    plain, x = copy.deepcopy(model), drawn(1, 1, 4, 6, 4)
    run, groups = adapted(model), Groups()
    run.join(groups, label_name="labels")
    groups.prepare([(0, 1)])
    mine = x[:, :1].contiguous() if groups.rank == 0 else x
    shard = run.place({"x": mine}, (groups.rank,))
    run.take(shard)
    model(shard["x"], images=groups.rank == 0)
    shard = run.place({"x": x}, (0, 1))
    with torch.no_grad():
        whole = run.collect(model(shard["x"], images=False), DIMS)
        return float((whole - plain(x, images=False)).abs().max())


def test_ranks_of_other_histories_choose_the_same_axes() -> None:
    """Catches a rank that plans from what only it has seen, while another waits."""
    assert max(run_ranks(2, of_other_histories, timeout_s=60)) < 1e-12


def copied() -> tuple[float, str]:
    """A copy of an adapted model beside the model without hooks; what is said of whole inputs."""
    model, x = table(), drawn(1, 1, 4, 4, 6)
    plain, run = copy.deepcopy(model), adapted(model)
    shard = run.shard({"x": x})
    run(**shard)
    average = torch.optim.swa_utils.AveragedModel(model)
    with torch.no_grad():
        off = float((average(x) - plain(x)).abs().max())
    try:
        run(x=x)
    except ModelError as error:
        return off, str(error)
    return off, ""


def test_copies_are_left_alone() -> None:
    """Catches moving averages that cannot be made, or that take part in what the model does."""
    for off, said in run_ranks(2, copied, timeout_s=60):
        assert off < 1e-12
        assert "what shard() gave" in said


def pickled(how: str) -> tuple[float, bool, bool]:
    """How far a pickle of an adapted model is from the model without hooks, whether its state is
    the same, and whether the pickle has what spreads it."""
    if how == "joint":
        torch.manual_seed(0)
        model: Any = Spoken(2).double()
        plain, inputs = copy.deepcopy(model), {"x": drawn(1, 1, 4, 6), "text": drawn(2, 1, 3)}
        run = spoken(model)
    else:
        model = table()
        plain, inputs = copy.deepcopy(model), {"x": drawn(1, 1, 4, 4, 6)}
        run = adapted(model)
    run(**run.shard(inputs))
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    again = torch.load(stored, weights_only=False)
    state, wanted = model.state_dict(), plain.state_dict()
    same = state.keys() == wanted.keys() and all(torch.equal(state[k], wanted[k]) for k in wanted)
    off = 0.0
    for one in (again, copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model)):
        with torch.no_grad():
            results = zip(*(result_tensors(m(**inputs)) for m in (one, plain)), strict=True)
        off = max(off, *(float((a - b).abs().max()) for a, b in results))
    return off, same, b"HookManager" in stored.getvalue()


@pytest.mark.parametrize("how", ["switches", "joint"])
def test_pickles_copies_and_states_are_those_of_the_plain_model(how: str) -> None:
    """Catches checkpoints that cannot be written, or whose models wait for other ranks."""
    for off, same, foreign in run_ranks(2, pickled, how, timeout_s=60):
        assert off < 1e-12
        assert same
        assert not foreign


def collected(samples: int) -> float:
    """How far a collected result and the gradients of a loss of it are from one process'."""
    x, model, plain = drawn(1, samples, 5, 4, 6), table(), table()
    run = adapted(model)
    whole = run.collect(run(**run.shard({"x": x})), DIMS)
    loss = whole.sin().sum()
    run.backward(loss, alike=True)
    wanted = plain(x)
    wanted.sin().sum().backward()
    total = run.add_up(loss, alike=True)
    assert float(total) == pytest.approx(float(wanted.detach().sin().sum()), rel=1e-12)
    off = (gradients(model) - gradients(plain)).abs().max() / gradients(plain).abs().max()
    return max(float((whole - wanted).detach().abs().max()), float(off))


def summed_otherwise(alike: bool) -> str:
    """What the sum of a loss says whose backward was given another ``alike``."""
    run = adapted(table())
    out = run(**run.shard({"x": drawn(1, 1, 5, 4, 6)}))
    loss = (run.collect(out, DIMS) if alike else out).sin().sum()
    run.backward(loss, alike=alike)
    with pytest.raises(ModelError) as caught:
        run.add_up(loss, alike=not alike)
    return str(caught.value)


@pytest.mark.parametrize("alike", [False, True])
def test_a_loss_is_added_up_as_its_backward_was(alike: bool) -> None:
    """Catches a loss that all ranks have alike, told as that times the number of ranks."""
    for said in run_ranks(2, summed_otherwise, alike):
        assert f"wanted alike={alike}, as its backward was given" in said


@pytest.mark.parametrize(("ranks", "samples"), [(3, 1), (2, 3), (4, 3)])
def test_results_are_collected(ranks: int, samples: int) -> None:
    """Catches a result whose axis is not the one that the model began with, samples that are
    missing, and a loss that counts for every rank."""
    assert max(run_ranks(ranks, collected, samples)) <= EXACT


def said(what: str) -> str:
    """What is said of a mistake on two ranks."""
    x, rank = drawn(1, 1, 5, 4, 6), dist.get_rank()
    try:
        if what == "no stages":
            hr.adapt(table())
        if what == "no module":
            hr.adapt(
                table(),
                stages=[hr.AxisStage(modules="layers.*", mixes="i", dims=DIMS)],
                inputs={"x": DIMS},
                axis="i",
            )
        if what == "an axis that is not there":
            hr.AxisStage(modules="blocks.*", mixes="z", dims=DIMS)
        if what == "a compiled wrapper":
            hr.adapt(
                DistributedDataParallel(table()),
                stages=stages(returns=True),
                inputs={"x": DIMS},
                axis="i",
            ).compile()
        if what == "everything mixed":
            every = [hr.AxisStage(modules="blocks.0.i", mixes="i j k", dims=DIMS)]
            run = hr.adapt(table(), stages=every, inputs={"x": DIMS}, axis="i")
            run(**run.shard({"x": x}))
        run = adapted(table())
        if what == "more ranks than places":
            run.shard({"x": x[:, :1]})
        if what == "a small axis":
            run(**run.shard({"x": x[:, :, :1, :1]}))
        if what == "other dims":
            run.shard({"x": x[0]})
        if what == "other inputs":
            run.shard({"x": x + rank})
        if what == "no shard":
            run(x=x)
        if what == "whole inputs":
            run.shard({"x": x})
            run(x=x)
    except HeadraceError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


MISTAKES = {
    "no stages": (ModelError, "a model without an adapter"),
    "no module": (ModelError, "stage layers"),
    "an axis that is not there": (SpecError, "mixes z"),
    "everything mixed": (ModelError, "name the module of the attention over places"),
    "more ranks than places": (InfeasiblePlan, "2 ranks"),
    "a small axis": (InfeasiblePlan, "1 samples of 1 places: got 2 ranks"),
    "a compiled wrapper": (ModelError, "hooks that break its graph"),
    "other dims": (DataError, "input x"),
    "other inputs": (HeadraceError, "inputs"),
    "no shard": (ModelError, "what shard() gave"),
    "whole inputs": (ModelError, "what shard() gave"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_told(what: str) -> None:
    """Catches hangs, and tracebacks from the depths."""
    kind, words = MISTAKES[what]
    for text in run_ranks(2, said, what, timeout_s=30):
        assert words in text
        assert text.startswith(kind.__name__) or kind is HeadraceError


def test_a_wrong_stage_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a self-test that passes whatever the stages are."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    name = "running.adopt.axial"
    assert main(["verify", f"{name}:example", "--ranks", "2", "--json"]) == 0
    assert main(["verify", f"{name}:wrong", "--ranks", "2"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_dims_are_read() -> None:
    """Catches brackets in brackets, and names that stand twice."""
    for text in ("b (t s", "b b", "(b t) t", "", "b ((t s) c)", "b t-s"):
        with pytest.raises(SpecError, match="dims"):
            hr.AxisStage(modules="x", mixes="", dims=text)
    assert isinstance(example(), AxisExample)
    assert set(AXES) < set(DIMS.split())


@pytest.mark.parametrize(
    "make",
    [
        lambda model: adapted(model).shard({"x": torch.zeros(1, 5, 4, 6, 8)}),
        lambda model: hr.compile(model, labels="same"),
    ],
)
def test_ranks_that_have_not_met_are_told(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ranks of a launcher that each take the whole batch, without a word."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="init_process_group"):
        make(table())
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert make(table()) is not None


LOSSES: dict[str, Any] = {
    "mean": lambda out: out.square().mean(),
    "mean squares": lambda out: torch.nn.functional.mse_loss(out, torch.zeros_like(out)),
    "means of samples": lambda out: out.square().mean(dim=(1, 2, 3, 4)).sum(),
    "half of the features": lambda out: out.chunk(2, dim=-1)[0].square().mean(),
    "first": lambda out: out[:, 0].sum(),
    "shifted": lambda out: (out[:, 1:] - out[:, :-1]).square().sum(),
    "mean by hand": lambda out: out.square().sum() / out.numel(),
    "by those above 0": lambda out: out.square().sum() / (out > 0).sum(),
    "sum": lambda out: out.square().sum(),
    "by all places": lambda out: out.square().sum() / (out.numel() * 2),
    "over features": lambda out: out.square().mean(-1).sum(),
    "mean of samples": lambda out: out.square().sum(dim=(1, 2, 3, 4)).mean(),
}
"""Losses of a result, [b, i, j, k, c], of which every rank has some places of i."""


PLACED = [
    # Loss, places of i, whether it is weighed by this rank's share, samples, what is said.
    ("mean", 5, False, 1, "a mean over places"),
    ("mean squares", 6, False, 1, "a mean over places"),
    ("means of samples", 5, False, 1, "a mean over places"),
    ("half of the features", 5, False, 1, "a mean over places"),
    ("mean", 5, True, 1, "a mean over places"),  # of 3 and 2
    ("mean", 1, False, 2, "a mean over samples"),
    ("mean of samples", 5, False, 2, "a mean over samples"),  # each rank has one
    ("first", 5, False, 1, "some of the places"),
    ("shifted", 9, False, 1, "some of the places"),
    ("mean by hand", 5, False, 1, "what is divided by the places"),
    ("mean by hand", 6, False, 1, "what is divided by the places"),
    ("mean by hand", 1, False, 2, "what is divided by the samples"),
    ("by those above 0", 6, False, 1, "what is divided by numbers that differ between ranks"),
    ("by all places", 6, False, 1, ""),
    ("mean by hand", 8, True, 1, ""),
    ("mean by hand", 1, True, 2, ""),
    ("mean", 8, True, 1, ""),
    ("mean", 1, True, 2, ""),
    ("sum", 5, False, 1, ""),
    ("over features", 5, False, 1, ""),
    ("mean of samples", 5, False, 1, ""),
]


def said_of_losses() -> list[str]:
    """What is said of the losses of ``PLACED``."""
    found = []
    for how, places, shares, samples, _ in PLACED:
        run, said = adapted(table(), returns=True), ""
        out = run(**run.shard({"x": drawn(1, samples, places, 4, 6)}))
        loss = LOSSES[how](out) * (run.share if shares else 1)
        try:
            run.backward(loss)
        except ModelError as error:
            said = str(error)
        found.append(said)
    return found


def test_losses_that_are_wrong_of_places_are_refused() -> None:
    """Catches losses of one rank's places that are none of all places when they are added up, and
    right ones that are refused."""
    for found in run_ranks(2, said_of_losses):
        for said, (*case, says) in zip(found, PLACED, strict=True):
            assert said.startswith(f"loss of a part: got {says}") if says else not said, case
