"""What models on shards of their axes are given: numbers, sides, short axes, undeclared tensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import headrace as hr
import spread
from headrace.adopt.axis_hooks import ArgumentCut
from headrace.adopt.axis_shards import Dims
from headrace.errors import DataError, HeadraceError, ModelError
from ranks import run_ranks
from running.adopt.axial import DIMS, Axial, stages, table
from running.adopt.test_adapted import EXACT, adapted, alone, drawn, gradients
from running.adopt.test_axis_probe import Rows, Video, rows, video


def test_a_model_is_adapted_once() -> None:
    """Catches hooks of two adapters, which switch twice; copies and models that were given back are
    free."""
    model = table()
    run = adapted(model)
    with pytest.raises(ModelError, match=r"run.detach\(\)"):
        adapted(model)
    adapted(copy.deepcopy(model))
    run.detach()
    adapted(model).detach()


def of_a_short_axis() -> float:
    """How far gradients are from one process', with an axis of one place that need not be cut."""
    model, x = table(), drawn(1, 1, 5, 1, 6)
    run = adapted(model)
    for _ in range(2):  # the second forward is planned
        model.zero_grad()
        loss = run(**run.shard({"x": x})).square().sum()
        run.backward(loss)
        run.add_up(loss)
    wanted = alone(table(), [x])
    return float((gradients(model) - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_an_axis_that_is_never_cut_may_be_short(ranks: int) -> None:
    """Catches a refusal for want of places that nobody asks for."""
    assert max(run_ranks(ranks, of_a_short_axis)) <= EXACT


def with_sides() -> tuple[float, float]:
    """How far results are from one process' where nothing names the samples, on the way of eager
    models and on that of graphs."""
    torch.manual_seed(0)
    model = Rows().double()
    plain, x, found = copy.deepcopy(model), video(), []
    run = hr.adapt(model, stages=rows("s b"), inputs={"x": "b t s c"}, axis="t")
    run.compile(backend="eager")
    with torch.no_grad():
        for _ in range(2):
            whole = run.collect(run(**run.shard({"x": x})), "b t s c")
            found.append(float((whole - plain(x)).abs().max()))
    return found[0], found[1]


@pytest.mark.parametrize("ranks", [1, 3, spread.whole(2), spread.whole(4)])
def test_sides_are_cut_without_a_name_of_samples(ranks: int) -> None:
    """Catches a side that has all places and is taken for one that has this rank's, of more
    samples."""
    for eager, graph in run_ranks(ranks, with_sides):
        assert max(eager, graph) <= EXACT


def test_a_side_that_may_be_whole_or_a_part_is_refused_in_graphs_too() -> None:
    """Catches a side that is taken for whole, and cut once more, where eager models refuse it."""
    cut = ArgumentCut(dims=Dims.parse("(b t) c"), totals={"t": 4}, at=1, start=2, count=2)
    whole = torch.arange(24.0).view(8, 3)
    part = whole.view(2, 4, 3)[:, 2:].reshape(4, 3)
    for side in (whole, part):
        assert torch.equal(cut.of(side, {"b": 2}), part)
        with pytest.raises(DataError, match="which may be either"):
            cut.of(side, {})
    with pytest.raises(DataError, match="2 or 4 places of t"):
        cut.of(whole[:6], {"b": 2})


class TemporalRows(Axial):
    """Attention over frames that are flattened with samples, told apart by a number."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, x: torch.Tensor, num_frames: int = 1) -> torch.Tensor:
        return super().forward(x.unflatten(0, (-1, num_frames))).flatten(0, 1)


class Counting(nn.Module):
    """A model as Stable Video Diffusion: frames in the rows, and their number."""

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = Axial(1), TemporalRows()

    def forward(self, x: torch.Tensor, num_frames: int) -> torch.Tensor:
        out = self.time(self.space(x.flatten(0, 1)), num_frames=num_frames)
        return out.unflatten(0, (-1, num_frames))


def counting(samples: int) -> list[float]:
    """How far gradients are from one process', eager and as a graph."""
    torch.manual_seed(0)
    model, found = Counting().double(), []
    plain = copy.deepcopy(model)
    run = hr.adapt(
        model,
        stages=[
            hr.AxisStage(modules="space", mixes="s", dims="(b t) s c"),
            hr.AxisStage(modules="time", mixes="t", dims="(b t) s c", counts={"num_frames": "t"}),
        ],
        inputs={"x": "b t s c"},
        axis="t",
        batch="b",
        counts={"num_frames": "t"},
    )
    run.compile(backend="eager")
    x = video((samples, 5, 4, 8))
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        loss = run(**run.shard({"x": x, "num_frames": 5})).square().sum()
        run.backward(loss)
        run.add_up(loss)
        plain(x, 5).square().sum().backward()
        wanted = gradients(plain)
        found.append(float((gradients(model) - wanted).abs().max() / wanted.abs().max()))
    return found


@pytest.mark.parametrize(
    ("ranks", "samples"), [(1, 2), (3, 2), spread.whole(2, 1), spread.whole(4, 2)]
)
def test_numbers_that_count_an_axis(ranks: int, samples: int) -> None:
    """Catches a number of frames that is that of the whole, where a rank has some, and that of a
    rank, where a stage has all."""
    for errors in run_ranks(ranks, counting, samples):
        assert max(errors) <= EXACT


class Masked(Video):
    """Something beside the video that has its frames."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x * mask[:, None, None])


def told(what: str) -> str:
    """What is said of a tensor without dims."""
    torch.manual_seed(0)
    run = hr.adapt(
        Masked().double(),
        stages=[hr.AxisStage(modules=n, mixes=n[0], dims="b t s c") for n in ("time", "space")],
        inputs={"x": "b t s c"} | ({"mask": "t"} if what == "declared" else {}),
        axis="t",
        batch="b",
    )
    other = dist.get_rank() if what == "of other ranks" else 1
    try:
        run.shard({"x": video((1, 4, 4, 8)), "mask": torch.ones(4) * (1 + other)})
    except HeadraceError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("undeclared", "ModelError: Masked on shards of axis t"),
        ("undeclared", "input mask has no dims"),
        ("of other ranks", "PlanMismatch: inputs"),
        ("declared", "nothing"),
    ],
)
def test_tensors_without_dims_are_told(what: str, words: str) -> None:
    """Catches a tensor of all places beside this rank's, and one that is another on each rank."""
    for text in run_ranks(2, told, what):
        assert words in text


def positioned() -> float:
    """How far a result is from one process' with positions that hooks hand out."""
    torch.manual_seed(0)
    model, x = Positioned().double(), video((2, 5, 4, 8))
    plain = copy.deepcopy(model)
    run = hr.adapt(
        model,
        stages=[hr.AxisStage(modules=n, mixes=n[0], dims="b t s c") for n in ("time", "space")],
        inputs={"x": "b t s c"},
        axis="t",
        batch="b",
    )

    def all_frames(args: Any, named: dict[str, Any]) -> Any:
        return (run.places_of("t"),), named

    def own_frames(_: Any, out: torch.Tensor) -> torch.Tensor:
        return run.local(out, "t c")

    run.on(model.embed, before=all_frames, after=own_frames)
    with torch.no_grad():
        whole = run.collect(run(**run.shard({"x": x})), "b t s c")
        return float((whole - plain(x)).abs().max())


class Embedded(nn.Module):
    """Positions of so many frames."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 8))

    def forward(self, frames: int) -> torch.Tensor:
        return self.table[:frames]


class Positioned(Video):
    """Positions from the first frame of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedded()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.embed(x.shape[1])[:, None])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_hooks_hand_out_positions(ranks: int) -> None:
    """Catches the guide's way with positions that count from 0 on every rank."""
    assert max(run_ranks(ranks, positioned)) <= EXACT


def test_a_stage_counts_axes_that_are_there() -> None:
    """Catches a count of an axis that nobody knows, which would stay that of the whole."""
    run = hr.adapt(
        table(),
        stages=[*stages(returns=True)],
        inputs={"x": DIMS},
        axis="i",
        counts={"scale": "z"},
    )
    with pytest.raises(HeadraceError, match="axis that is counted"):
        run.shard({"x": drawn(1, 1, 4, 4, 4), "scale": 3})


def masked_loss() -> float:
    """How far a loss with a declared column of places, which the model does not take, is from that
    of one process."""
    torch.manual_seed(0)
    model = Video().double()
    plain, x, mask = copy.deepcopy(model), video(), torch.arange(2 * 4 * 4).view(2, 4, 4) % 3
    inputs = {"mask": "b t s", "x": "b t s c"}
    stages_ = [hr.AxisStage(modules=n, mixes=n[0], dims="b t s c") for n in ("time", "space")]
    run = hr.adapt(model, stages=stages_, inputs=inputs, axis="t", batch="b")
    part = run.shard({"x": x, "mask": mask})
    loss = (run(**part).square() * part.rest["mask"][..., None]).sum()
    run.backward(loss)
    wanted = float((plain(x).square() * mask[..., None]).sum().detach())
    assert not run.check
    return abs(float(run.add_up(loss)) / wanted - 1)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_declared_columns_that_the_model_does_not_take(ranks: int) -> None:
    """Catches a mask of the loss that is given to the model, or whole beside a part."""
    assert max(run_ranks(ranks, masked_loss)) <= EXACT
