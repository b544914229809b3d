"""Loops over models of several axes: clips of any shapes, whatever the plans, as one process."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

import headrace as hr
from headrace.engine.attach import Attached
from headrace.errors import DataError, InfeasiblePlan, ModelError
from headrace.models.transformer_2d import SHAPES_2D, Transformer2D
from ranks import run_ranks
from running.adopt.axial import Axial
from running.adopt.test_axis_probe import DIMS, STAGES, Video
from running.adopt.test_joint import FEATURES, Spoken, spoken
from running.engine import loops
from running.engine.loops import Drawn, costs, in_values, weights
from spread import whole

EXACT = 1e-10
SHAPES = ((3, 4), (1, 6), (5, 4), (1, 6), (3, 4), (2, 7), (5, 4), (1, 1), (4, 4), (1, 6), (3, 4))
"""Frames and patches: images have one frame."""


def clips() -> list[dict[str, torch.Tensor]]:
    """One item for each shape."""
    draw = torch.Generator().manual_seed(3)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    return [
        {
            "x": randn(t, s, 4),
            "labels": randn(t, s, 4),
            "frames": torch.arange(t),
            "patches": torch.arange(s),
            "timestep": torch.randint(0, 1000, (), generator=draw),
        }
        for t, s in SHAPES
    ]


def model() -> Transformer2D:
    """A small one in fp64."""
    torch.manual_seed(0)
    return Transformer2D(SHAPES_2D["tiny"]).double()


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def squares(model: Any) -> Any:
    """A penalty on weights."""
    return sum(p.square().sum() for p in model.parameters())


def alone(batches: list[tuple[int, ...]], *, penalty: float = 0.0) -> tuple[list[float], Any]:
    """Losses and weights of one process over the same samples, one after the other; with a
    ``penalty`` on weights in each step."""
    data, single = clips(), model()
    optimizer, losses = sgd(single), list[float]()
    for batch in batches:
        targets, total = sum(data[i]["x"].shape[:2].numel() for i in batch), 0.0
        for i in batch:
            item = data[i]
            out = single(item["x"][None], item["timestep"][None], item["frames"], item["patches"])
            loss = (out - item["labels"]).square().sum() / targets
            loss.backward()
            total += float(loss.detach())
        if penalty:
            extra = penalty * squares(single)
            extra.backward()
            total += float(extra.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, weights(single)


def attached(how: str, folder: Path, **options: Any) -> tuple[Attached, Any]:
    """A loop over the clips in their order, four of them a step."""
    own = model()
    called: Any = own
    if how == "ddp":
        called = DistributedDataParallel(own)
    if how == "fsdp2":
        for layer in own.layers:
            fully_shard(layer)
        fully_shard(own)
    return hr.attach(
        hr.adapt(called),
        sgd(called),
        clips(),
        **in_values(
            {
                "batch_sequences": 4,
                "shuffle": False,
                "cache": folder,
                "say": lambda text: None,
                **options,
            }
        ),
    ), called


def trained(run: Attached, called: Any) -> list[float]:
    """The losses of all steps."""
    losses = []
    for step in run:
        for micro in step:
            error = model_error(called, micro)
            micro.backward(error.square().sum() / micro.targets)
        losses.append(step.loss)
    return losses


def model_error(called: Any, micro: Any) -> torch.Tensor:
    return called(**micro.inputs) - micro.labels


def drawn_steps(how: str, ranks: int, folder: Path, seed: int) -> Any:
    """Losses, weights and strategies of steps with plans drawn at random."""
    run, called = attached(how, folder, costs=costs(ranks))
    semantics = "lockstep" if how == "fsdp2" else "free"
    run.engine.planner = drawn = Drawn(
        ranks=ranks, layers=2, seed=seed, semantics=semantics, levels=("none", "full")
    )  # type: ignore[assignment]
    losses = trained(run, called)
    return losses, weights(called if how != "ddp" else called.module), drawn.strategies


BATCHES = [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10)]


@pytest.mark.parametrize(
    ("how", "ranks"),
    [
        ("alone", 1),
        ("alone", 4),
        whole("ddp", 3),
        ("fsdp2", 2),
        whole("alone", 2),
        whole("alone", 3),
        whole("ddp", 2),
        whole("ddp", 4),
        whole("fsdp2", 3),
        whole("fsdp2", 4),
    ],
)
def test_any_plans_equal_one_process(how: str, ranks: int, tmp_path: Path) -> None:
    """Catches clips of other shapes in one call, images on ranks without places, gradients counted
    by ranks, and ranks that wait at a layer for others with fewer packs."""
    losses, ends = alone(BATCHES)
    for seed in (1, 2, 3):
        for got, mine, strategies in run_ranks(
            ranks, drawn_steps, how, ranks, tmp_path, seed, timeout_s=200
        ):
            assert got == pytest.approx(losses, rel=EXACT)
            assert len(strategies) == len(BATCHES)
            for one, wanted in zip(mine, ends, strict=True):
                np.testing.assert_allclose(one, wanted, rtol=0, atol=EXACT)


def planned_steps(folder: Path) -> Any:
    """A run that measures and plans for itself, and goes on from a checkpoint."""
    run, called = attached("alone", folder, epochs=2)
    losses = trained(run, called)
    options = {opt for cost in run.found.costs.options.values() for opt in cost}
    run.save(folder / "saved")
    again, other = attached("alone", folder, epochs=3)
    assert again.load(folder / "saved")
    losses += trained(again, other)
    return losses, weights(other), sorted(options), run.found.costs.group_sizes


def test_a_run_plans_for_itself(tmp_path: Path) -> None:
    """Catches costs that no plan can be made from, levels that are not measured, and clips lost or
    trained twice where a run goes on."""
    losses, ends = alone(3 * BATCHES)
    for got, mine, options, sizes in run_ranks(2, planned_steps, tmp_path, timeout_s=200):
        assert got == pytest.approx(losses, rel=EXACT)
        assert sizes == (1, 2)
        assert any("full" in option for option in options)
        for one, wanted in zip(mine, ends, strict=True):
            np.testing.assert_allclose(one, wanted, rtol=0, atol=EXACT)


def spoken_clips() -> list[dict[str, torch.Tensor]]:
    """Clips with a text each, of other lengths than the clips'."""
    draw = torch.Generator().manual_seed(4)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    return [
        {"x": randn(t, s, FEATURES), "text": randn(n, FEATURES), "labels": randn(t, s, FEATURES)}
        for (t, s), n in zip(SHAPES, (3, 1, 4, 1, 6, 2, 4, 5, 1, 2, 3), strict=True)
    ]


def spoken_loss(model: Any, micro: Any) -> torch.Tensor:
    """The squares of what is off, of places alone."""
    places, _ = model(**micro.inputs)
    return (places - micro.labels).square().sum() / micro.targets


def spoken_steps(folder: Path, ranks: int, seed: int) -> Any:
    """Losses and weights of steps with plans drawn at random."""
    torch.manual_seed(0)
    own = Spoken(2).double()
    run = hr.attach(
        spoken(own),
        sgd(own),
        spoken_clips(),
        batch_sequences=4,
        samples=hr.SampleOptions(shuffle=False),
        measure=hr.MeasureOptions(cache=folder, costs=costs(ranks)),
        say=lambda text: None,
    )
    run.engine.planner = Drawn(  # type: ignore[assignment]
        ranks=ranks, layers=2, seed=seed, semantics="free", levels=("none",)
    )
    losses = list[float]()
    for step in run:
        for micro in step:
            micro.backward(spoken_loss(own, micro))
        losses.append(step.loss)
    return losses, weights(own)


@pytest.mark.parametrize("ranks", [1, 3, whole(2), whole(4)])
def test_clips_with_texts_equal_one_process(ranks: int, tmp_path: Path) -> None:
    """Catches texts that count as places of clips, that are packed with others of another length,
    or whose gradients count by ranks."""
    torch.manual_seed(0)
    single, data, wanted = Spoken(2).double(), spoken_clips(), list[float]()
    optimizer = sgd(single)
    for batch in BATCHES:
        targets, total = sum(data[i]["x"].shape[:2].numel() for i in batch), 0.0
        for i in batch:
            places, _ = single(data[i]["x"][None], data[i]["text"][None])
            loss = (places[0] - data[i]["labels"]).square().sum() / targets
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(total)
    for seed in (1, 2):
        for got, mine in run_ranks(ranks, spoken_steps, tmp_path, ranks, seed, timeout_s=100):
            assert got == pytest.approx(wanted, rel=EXACT)
            for one, other in zip(mine, weights(single), strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=EXACT)


def begun_late(folder: Path) -> list[float]:
    """Losses where the model is adapted before the world begins, as under torchrun."""
    store = dist.distributed_c10d._get_default_store()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store.set(f"met {rank}", "")  # who leaves at once breaks connections that others still make
    store.wait([f"met {other}" for other in range(ranks)])
    dist.destroy_process_group()
    own = model()
    spread = hr.adapt(own)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=ranks
    )
    run = hr.attach(
        spread,
        sgd(own),
        clips(),
        batch_sequences=4,
        samples=hr.SampleOptions(shuffle=False),
        measure=hr.MeasureOptions(cache=folder, costs=costs(ranks)),
        planner=hr.PlannerConfig(ahead=0),
        say=lambda text: None,
    )
    return trained(run, own)


def test_a_model_may_be_adapted_before_ranks_meet(tmp_path: Path) -> None:
    """Catches ranks that each work for themselves, and a launcher's ranks that are refused."""
    losses, _ = alone(BATCHES)
    for got in run_ranks(2, begun_late, tmp_path, timeout_s=100):
        assert got == pytest.approx(losses, rel=EXACT)


def evaluated(folder: Path) -> float:
    """The loss of a batch on all ranks, of a model that is attached."""
    run, called = attached("alone", folder, costs=costs(2))
    item = clips()[0]
    whole_batch = {
        name: value if name in ("frames", "patches") else value[None]
        for name, value in item.items()
    }
    with torch.no_grad(), run.shard(whole_batch) as part:
        error = called(**part.inputs) - part.labels
    assert part.targets == 12
    assert part.tokens == 2 * 4 if run.rank == 0 else 4
    return float(error.square().sum())


def test_a_batch_is_evaluated(tmp_path: Path) -> None:
    item, single = clips()[0], model()
    out = single(item["x"][None], item["timestep"][None], item["frames"], item["patches"])
    wanted = float((out - item["labels"]).square().sum().detach())
    assert sum(run_ranks(2, evaluated, tmp_path, timeout_s=100)) == pytest.approx(wanted, rel=1e-12)


class Guided(torch.nn.Module):
    """A table of two axes with a number for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.space = Axial(1), Axial(2)

    def forward(self, x: torch.Tensor, guidance: torch.Tensor) -> torch.Tensor:
        return self.space(self.time(x + guidance[:, None, None, None]))


def guided(folder: Path) -> tuple[float, float]:
    """The loss of samples that ranks work on apart, with a field that has no dims; that of one
    process. Items have words, too."""
    torch.manual_seed(0)
    own = Guided().double()
    plain = copy.deepcopy(own)
    items = [
        {
            "x": torch.randn(1, 4, 8, dtype=torch.float64),
            "guidance": float(at),
            "caption": "waves",
            "labels": torch.randn(1, 4, 8, dtype=torch.float64),
        }
        for at in range(2)
    ]
    stages = [
        hr.AxisStage(modules=n, mixes=m, dims="b t s c", returns=False)
        for n, m in (("time", "t"), ("space", "s"))
    ]
    adapted = hr.adapt(own, stages=stages, inputs={"x": "b t s c"}, axis="t", batch="b")
    run = hr.attach(
        adapted,
        sgd(own),
        items,
        batch_sequences=2,
        samples=hr.SampleOptions(shuffle=False),
        measure=hr.MeasureOptions(cache=folder, costs=costs(2, layers=1)),
        planner=hr.PlannerConfig(ahead=0),
        say=lambda text: None,
    )
    whole_batch = {
        "x": torch.cat([item["x"][None] for item in items]),
        "guidance": torch.tensor([0.0, 1.0]),
    }
    with pytest.raises(DataError, match="input guidance"):
        adapted.shard(whole_batch)
    drawn = Drawn(ranks=2, layers=1, seed=5, levels=("none",))
    run.engine.planner = drawn  # type: ignore[assignment]
    (loss,) = trained(run, own)
    given = whole_batch["guidance"].double()
    error = plain(whole_batch["x"], given) - torch.stack([item["labels"] for item in items])
    return loss, float(error.square().sum().detach()) / 8


def test_fields_without_dims_are_of_their_samples(tmp_path: Path) -> None:
    """Catches numbers of all samples that are taken for those of one."""
    for loss, wanted in run_ranks(2, guided, tmp_path, timeout_s=100):
        assert loss == pytest.approx(wanted, rel=1e-6)  # guidance is in single precision


def left(folder: Path) -> tuple[Any, Any]:
    """Weights after a step that was left in the middle and the ones that follow; without it."""
    found = []
    for leaves in (True, False):
        run, called = attached("alone", folder, costs=costs(1))
        first = next(iter(run))
        if leaves:
            for micro in first:
                micro.backward(model_error(called, micro).square().sum() / micro.targets)
                break
        steps = iter(run)
        for step in steps:
            for micro in step:
                micro.backward(model_error(called, micro).square().sum() / micro.targets)
        found.append(weights(called))
    return found[0], found[1]


def test_a_step_that_is_left_leaves_nothing(tmp_path: Path) -> None:
    """Catches gradients of half a step in the next one."""
    ((one, other),) = run_ranks(1, left, tmp_path, timeout_s=100)
    for mine, wanted in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine, wanted)


def refused(folder: Path) -> tuple[float, float]:
    """The loss of a plain model after a loop that could not begin, and before."""
    own = loops.llama()
    ids = torch.arange(20)[None]
    before = float(own(input_ids=ids, labels=ids).loss.detach())
    with pytest.raises(InfeasiblePlan):
        loops.attached(own, sgd(own), loops.dataset(), folder, memory="1KiB")
    return float(own(input_ids=ids, labels=ids).loss.detach()), before


def test_a_loop_that_cannot_begin_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ((after, before),) = run_ranks(1, refused, tmp_path, timeout_s=100)
    assert after == before


@pytest.mark.apart
def test_a_mean_over_one_micro_batch_is_told(tmp_path: Path) -> None:
    """Catches losses that weigh clips by their company."""
    for loss, fine in (("sum", True), ("mean", False)):
        run, called = attached("alone", tmp_path, costs=costs(1), steps=1)
        refused = nullcontext() if fine else pytest.raises(ModelError, match="whatever micro")
        with refused:
            for step in run:
                for micro in step:
                    out = mse_loss(called(**micro.inputs), micro.labels, reduction=loss)
                    micro.backward(out / micro.targets / 4 if fine else out)


@pytest.mark.apart
@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"frames": torch.arange(2)}, "a field 'x'"),
        ({"x": torch.zeros(3, 4)}, "dims b t s c"),
        ([1, 2], "a field 'x'"),
    ],
)
def test_items_that_are_no_clips_are_told(item: Any, words: str) -> None:
    own = model()
    with pytest.raises(DataError, match=words):
        hr.attach(hr.adapt(own), sgd(own), [item], batch_sequences=1)


class Summed(torch.nn.Module):
    """A sum over frames between two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.space = Axial(1), Axial(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.space(self.time(x).cumsum(1))


def unlike() -> str:
    """What is said of such a model in a loop."""
    own = Summed().double()
    stages = [hr.AxisStage(modules=n, mixes=n[0], dims="b t s c") for n in ("time", "space")]
    adapted = hr.adapt(own, stages=stages, inputs={"x": "b t s c"}, axis="t", batch="b")
    items = [{"x": torch.randn(t, 4, 8, dtype=torch.float64)} for t in (1, 3)]
    try:
        hr.attach(adapted, sgd(own), items, batch_sequences=2, say=lambda text: None)
    except ModelError as error:
        return str(error)
    return "nothing"


def test_a_model_that_shards_would_change_is_refused() -> None:
    """Catches a loop whose first item is an image, which has no frames to part."""
    for said in run_ranks(2, unlike):
        assert "what module space" in said


def penalised_steps(how: str, folder: Path, ranks: int, seed: int) -> Any:
    """Losses and weights with a penalty, and the shares of this rank by step."""
    run, called = attached(how, folder, costs=costs(ranks))
    semantics = "lockstep" if how == "fsdp2" else "free"
    run.engine.planner = Drawn(  # type: ignore[assignment]
        ranks=ranks, layers=2, seed=seed, semantics=semantics, levels=("none",)
    )
    losses, shares = list[float](), list[float]()
    for step in run:
        shares.append(0.0)
        for micro in step:
            if not micro.checking:
                shares[-1] += float(micro.share)
            loss = model_error(called, micro).square().sum() / micro.targets
            if how == "alone":
                loss = loss + micro.share * 0.1 * squares(called)
            micro.backward(loss)
        losses.append(step.loss)
    return losses, weights(called), shares


@pytest.mark.parametrize(("how", "ranks"), [("alone", 2), ("alone", 4), ("fsdp2", 2), ("fsdp2", 3)])
def test_shares_of_places_add_up_to_one(how: str, ranks: int, tmp_path: Path) -> None:
    """Catches shares that count channels, or turns of ranks that are idle, and a penalty that
    counts several times."""
    losses, ends = alone(BATCHES, penalty=0.1 if how == "alone" else 0.0)
    found = run_ranks(ranks, penalised_steps, how, tmp_path, ranks, 4, timeout_s=200)
    for got, mine, _ in found:
        assert got == pytest.approx(losses, rel=EXACT)
        for one, wanted in zip(mine, ends, strict=True):
            np.testing.assert_allclose(one, wanted, rtol=0, atol=EXACT)
    for of_step in zip(*(shares for _, _, shares in found), strict=True):
        assert sum(of_step) == pytest.approx(1.0, rel=1e-12)


def one_micro_batch(spread: Any, own: Any, items: list[Any], folder: Path, **more: Any) -> Attached:
    """A loop of one step, whose items all ranks have together."""
    layers = len(own.layers) if hasattr(own, "layers") else 1
    return hr.attach(
        spread,
        torch.optim.SGD(own.parameters(), lr=0.05),
        items,
        batch_sequences=len(items),
        steps=1,
        samples=hr.SampleOptions(shuffle=False),
        planner=hr.PlannerConfig(name="static", static_size=dist.get_world_size(), ahead=0),
        measure=hr.MeasureOptions(cache=folder, costs=costs(dist.get_world_size(), layers=layers)),
        say=lambda text: None,
        **more,
    )


COLLECTED = {
    "all of it": lambda micro, out, whole, adapted: whole.square().sum() / micro.targets,
    "beside places": lambda micro, out, whole, adapted: (
        (out.square().sum() + whole.square().sum()) / micro.targets
    ),
    "beside a penalty": lambda micro, out, whole, adapted: (
        whole.square().sum() / micro.targets + micro.share * out.new_ones(())
    ),
    "a share": lambda micro, out, whole, adapted: (
        out.square().sum() / micro.targets + micro.share * whole.square().mean()
    ),
    "divided": lambda micro, out, whole, adapted: (
        (out.square().sum() + whole.square().sum() * adapted.share) / micro.targets
    ),
}
"""Losses of this rank's places and of the collected ones."""


def of_collected(how: str, samples: int, folder: Path) -> tuple[Any, Any]:
    """Loss and weights of a step of such a loss, or what is said of it; those of one process."""
    own = model()
    plain, items = copy.deepcopy(own), [clips()[2], clips()[6]][:samples]
    adapted = hr.adapt(own)
    run = one_micro_batch(adapted, own, items, folder)
    try:
        for step in run:
            for micro in step:
                out = own(**micro.inputs)
                whole = adapted.collect(out, "b t s c")
                micro.backward(COLLECTED[how](micro, out, whole, adapted))
    except ModelError as error:
        return str(error), ""
    x, at = (torch.stack([item[name] for item in items]) for name in ("x", "timestep"))
    out = plain(x, at, items[0]["frames"], items[0]["patches"])
    summed = out.square().sum() / (20 * samples)
    wanted = summed + (out.square().mean() if how == "a share" else summed)
    wanted.backward()
    torch.optim.SGD(plain.parameters(), lr=0.05).step()
    return (step.loss, weights(own)), (float(wanted.detach()), weights(plain))


@pytest.mark.parametrize("how", COLLECTED)
@pytest.mark.parametrize(("ranks", "samples"), [(2, 1), (2, 2), (3, 2)])
def test_a_term_of_a_collected_result_in_a_loop(
    how: str, ranks: int, samples: int, tmp_path: Path
) -> None:
    """Catches a term that counts for every rank of a micro-batch, though a penalty has its share,
    and a refusal of terms that are divided."""
    for got, wanted in run_ranks(ranks, of_collected, how, samples, tmp_path, timeout_s=100):
        if how in ("a share", "divided"):
            assert got[0] == pytest.approx(wanted[0], rel=EXACT)
            for one, other in zip(got[1], wanted[1], strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=EXACT)
        else:
            assert "what its ranks have alike" in got
            assert "adapted.share * term" in got


def video_items(*frames: int) -> list[dict[str, torch.Tensor]]:
    """Clips of four patches, with a weight for each place."""
    draw = torch.Generator().manual_seed(5)
    return [
        {
            "x": torch.randn(t, 4, 8, generator=draw, dtype=torch.float64),
            "labels": torch.randn(t, 4, 8, generator=draw, dtype=torch.float64),
            "mask": torch.rand(t, 4, generator=draw, dtype=torch.float64),
        }
        for t in frames
    ]


def masked(folder: Path) -> tuple[list[str], float, float]:
    """The inputs of a micro-batch whose loss has a declared column, its loss, and that of one
    process."""
    torch.manual_seed(0)
    own = Video().double()
    plain, items = copy.deepcopy(own), video_items(5, 5)
    inputs = {"mask": "b t s", "x": DIMS}
    adapted = hr.adapt(own, stages=STAGES, inputs=inputs, axis="t", batch="b")
    names = list[str]()
    run = one_micro_batch(adapted, own, items, folder)
    for step in run:
        for micro in step:
            names = [*micro.inputs]
            error = own(**micro.inputs) - micro.labels
            mask = micro.rest["mask"][..., None]
            micro.backward((error.square() * mask).sum() / micro.targets)
    x, labels, mask = (torch.stack([i[n] for i in items]) for n in ("x", "labels", "mask"))
    wanted = ((plain(x) - labels).square() * mask[..., None]).sum() / 40
    return names, step.loss, float(wanted.detach())


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_declared_column_is_cut_for_the_loss(ranks: int, tmp_path: Path) -> None:
    """Catches a mask of all places beside the labels of some, or given to the model."""
    for names, got, wanted in run_ranks(ranks, masked, tmp_path, timeout_s=100):
        assert names == ["x"]
        assert got == pytest.approx(wanted, rel=EXACT)


def frame_classes(folder: Path) -> tuple[float, float]:
    """The loss of a class for each frame, with a penalty, and that of one process."""
    torch.manual_seed(0)
    own = Video().double()
    plain = copy.deepcopy(own)
    items = [{"x": item["x"], "labels": torch.arange(5) % 3} for item in video_items(5, 5)]
    inputs = {"x": DIMS, "labels": "b t"}
    adapted = hr.adapt(own, stages=STAGES, inputs=inputs, axis="t", batch="b")
    run = one_micro_batch(adapted, own, items, folder)
    for step in run:
        for micro in step:
            logits = own(**micro.inputs).mean(2).transpose(1, 2)
            loss = cross_entropy(logits, micro.labels, reduction="sum") / micro.targets
            micro.backward(loss + micro.share * squares(own))
    logits = plain(torch.stack([item["x"] for item in items])).mean(2).transpose(1, 2)
    labels = torch.stack([item["labels"] for item in items])
    wanted = cross_entropy(logits, labels, reduction="sum") / 40 + squares(plain)
    return step.loss, float(wanted.detach())


def test_classes_of_frames_with_a_penalty(tmp_path: Path) -> None:
    """Catches a share that is whole in each half of the labels, for which a right loss would be
    refused."""
    for got, wanted in run_ranks(2, frame_classes, tmp_path, timeout_s=100):
        assert got == pytest.approx(wanted, rel=EXACT)


class Limited(Video):
    """A model for which a device has memory for so many places, and that may need a flag."""

    def __init__(self, *, places: int = 1000, flags: int = 0, wrong: bool = False) -> None:
        super().__init__()
        self.places, self.flags, self.wrong = places, flags, wrong

    def forward(self, x: torch.Tensor, *flags: Any) -> torch.Tensor:
        if x.shape[1] * x.shape[2] > self.places:
            raise torch.OutOfMemoryError("out of memory")
        if len(flags) < self.flags:
            raise TypeError("a flag is missing")
        return super().forward(x.cumsum(1) if self.wrong else x)


def limited(folder: Path, options: dict[str, Any], check: bool) -> Any:
    """The loss of a clip that fits two ranks alone, and that of one process; or what is said."""
    torch.manual_seed(0)
    own = Limited(**options).double()
    items = video_items(5)
    try:
        adapted = hr.adapt(own, stages=STAGES, inputs={"x": DIMS}, axis="t", batch="b", check=check)
        run = one_micro_batch(adapted, own, items, folder)
    except ModelError as error:
        return type(error).__name__, str(error)
    plain = copy.deepcopy(own)
    plain.places = 1000
    for step in run:
        for micro in step:
            error = own(**micro.inputs) - micro.labels
            micro.backward(error.square().sum() / micro.targets)
    wanted = (plain(items[0]["x"][None])[0] - items[0]["labels"]).square().sum() / 20
    return step.loss, float(wanted.detach())


def test_a_clip_that_fits_several_ranks_alone(tmp_path: Path) -> None:
    """Catches a raw out-of-memory where a loop begins, and a model that is not tried for it."""
    for got, wanted in run_ranks(2, limited, tmp_path, {"places": 12}, True, timeout_s=100):
        assert got == pytest.approx(wanted, rel=EXACT)
    told = run_ranks(2, limited, tmp_path, {"places": 12, "wrong": True}, True, timeout_s=100)
    assert all("code in front of it" in words for _, words in told)


@pytest.mark.parametrize("check", [True, False])
def test_a_model_that_needs_more_than_a_sample_is_told(check: bool, tmp_path: Path) -> None:
    """Catches a TypeError from the depths, and a loop over a model that nobody could try."""
    for kind, words in run_ranks(2, limited, tmp_path, {"flags": 1}, check, timeout_s=100):
        assert kind == "WholeFails"
        assert "a flag is missing" in words


def between_steps(folder: Path) -> tuple[float, float]:
    """How far evaluations between micro-batches of a loop, of the model and of its average, are
    from those of the plain model with the same weights."""
    run, called = attached("alone", folder, costs=costs(2))
    average = torch.optim.swa_utils.AveragedModel(called)
    item, plain, off = clips()[2], model(), 0.0
    given = (item["x"][None], item["timestep"][None], item["frames"], item["patches"])
    for step in run:
        for micro in step:
            micro.backward(model_error(called, micro).square().sum() / micro.targets)
            plain.load_state_dict(called.state_dict())
            with torch.no_grad():
                off = max(off, float((called(*given) - plain(*given)).abs().max()))
        average.update_parameters(called)
    plain.load_state_dict(called.state_dict())
    averaged = copy.deepcopy(plain)
    averaged.load_state_dict(average.module.state_dict())
    with torch.no_grad():
        return off, float((average(*given) - averaged(*given)).abs().max())


def test_a_model_is_evaluated_within_a_loop(tmp_path: Path) -> None:
    """Catches evaluations that are taken for a part of a batch, and averages that are spread."""
    for mine, average in run_ranks(2, between_steps, tmp_path, timeout_s=100):
        assert max(mine, average) < 1e-12


@pytest.mark.apart
def test_a_bare_penalty_is_told_how_it_counts_once(tmp_path: Path) -> None:
    """Catches a penalty of each micro-batch of each rank, refused without a word of its share."""
    run, called = attached("alone", tmp_path, costs=costs(1), steps=1)

    def penalised() -> None:
        """Train with a penalty that each micro-batch adds."""
        for step in run:
            for micro in step:
                error = model_error(called, micro).square().sum() / micro.targets
                micro.backward(error + squares(called))

    with pytest.raises(ModelError, match=r"micro.share \* penalty"):
        penalised()
