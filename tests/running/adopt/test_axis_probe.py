"""Models that shards of their axes would change are refused before they run on any."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import headrace as hr
from headrace.adopt.axis_model import AxisModel
from headrace.errors import HeadraceError, ModelError, PlanMismatch
from ranks import run_ranks
from running.adopt.axial import Axial

DIMS = "b t s c"
STAGES = (
    hr.AxisStage(modules="time", mixes="t", dims=DIMS),
    hr.AxisStage(modules="space", mixes="s", dims=DIMS),
)


class Video(nn.Module):
    """Space, something between, time."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.space, self.time = Axial(2), Axial(1)
        self.between = between if between is not None else nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.time(self.between(self.space(x)))


class Channels(nn.Module):
    """A module of channels before places, as of images, for channels behind them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.movedim(-1, 1)).movedim(1, -1)


class Frames(nn.Module):
    """Something of all frames, in one ``manner``."""

    def __init__(self, manner: str) -> None:
        super().__init__()
        self.manner = manner
        self.positions = nn.Parameter(torch.randn(9, 8) * 0.3)
        self.gate = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.manner == "cumsum":
            return x.cumsum(1)
        if self.manner == "positions":
            return x + self.positions[: x.shape[1], None]
        if self.manner == "arange":
            return x + torch.arange(x.shape[1]).to(x)[:, None, None].sin()
        if self.manner == "gated":
            return x + self.gate * x.mean(1, keepdim=True)
        return (x.roll(-1, 1) + x).roll(1, 1)  # windows, shifted


class Still(Frames):
    """Nothing of other frames, with the weights of what has something."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Centred(nn.Module):
    """Takes the mean over frames away, in training alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(1, keepdim=True) if self.training else x


class Summing(Video):
    """A sum over patches behind all stages, which have patches in shards there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).cumsum(2)


class Pooled(Video):
    """A number for each class, of all places."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean((1, 2))


class Losing(Video):
    """A mean over places."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


class Beside(Axial):
    """Attention that is given something for each of its rows."""

    def forward(self, x: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if beside is None else x + beside[:, None])


class Rows(Video):
    """Patches before samples in the rows of time, and something for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.patches = Beside(1), nn.Parameter(torch.randn(4, 1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.space(x).permute(2, 0, 1, 3)
        beside = self.patches + torch.arange(rows.shape[1]).to(x)[:, None]
        out = self.time(rows.flatten(0, 1), beside.flatten(0, 1))
        return out.unflatten(0, rows.shape[:2]).permute(1, 2, 0, 3)


class Counted(Video):
    """Frames flattened with samples, told apart by a number (Stable Video Diffusion)."""

    def forward(self, x: torch.Tensor, num_frames: int) -> torch.Tensor:
        rows = self.space(x.flatten(0, 1)[:, None])[:, 0]
        return self.time(rows.unflatten(0, (-1, num_frames)))


LEAVING = tuple(replace(stage, returns=False) for stage in STAGES)
"""Stages that leave the axis in shards with which they ran."""


def rows(order: str) -> tuple[hr.AxisStage, ...]:
    """Stages in which what stands beside the rows of time is said to be of an order."""
    return (
        hr.AxisStage(modules="time", mixes="t", dims="(s b) t c", sides={1: f"({order}) c"}),
        hr.AxisStage(modules="space", mixes="s", dims=DIMS),
    )


COUNTED = (
    hr.AxisStage(modules="time", mixes="t", dims=DIMS),
    hr.AxisStage(modules="space", mixes="s", dims="(b t) o s c"),
)


def video(shape: tuple[int, ...] = (2, 4, 4, 8)) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


Case = tuple[Callable[[], nn.Module], Any, Mapping[str, Any], str]
WRONG: dict[str, Case] = {
    "BatchNorm": (lambda: Video(Channels(nn.BatchNorm2d(8))), STAGES, {}, "module between.inner"),
    "InstanceNorm": (
        lambda: Video(Channels(nn.InstanceNorm2d(8))),
        STAGES,
        {},
        "module between.inner",
    ),
    "Conv3d": (
        lambda: Video(Channels(nn.Conv2d(8, 8, 3, padding=1))),
        STAGES,
        {},
        "module between.inner",
    ),
    "GroupNorm": (lambda: Video(Channels(nn.GroupNorm(2, 8))), STAGES, {}, "module between.inner"),
    "cumsum": (lambda: Video(Frames("cumsum")), STAGES, {}, "module between"),
    "positions": (lambda: Video(Frames("positions")), STAGES, {}, "module between"),
    "arange": (lambda: Video(Frames("arange")), STAGES, {}, "module between"),
    "behind a gate of zeros": (lambda: Video(Frames("gated")), STAGES, {}, "module between"),
    "shifted windows": (lambda: Video(Frames("windows")), STAGES, {}, "module between"),
    "a forgotten stage": (lambda: Video(Axial(1)), STAGES, {}, "module between"),
    "a mean of places": (Pooled, STAGES, {}, "code behind module time"),
    "a loss that is a mean": (Losing, STAGES, {}, "number that Losing returns"),
    "rows of another order": (Rows, rows("b s"), {}, "module time.norm is given"),
    "in training alone": (lambda: Video(Centred()), STAGES, {}, "module between"),
    "an axis in shards later": (Summing, LEAVING, {}, "shards of axis s"),
    "a number of frames": (Counted, COUNTED, {"num_frames": 4}, "in front of module time.norm"),
}


def adapted(model: nn.Module, stages: Any = STAGES, **options: Any) -> AxisModel:
    return hr.adapt(model, stages=stages, inputs={"x": DIMS}, axis="t", batch="b", **options)


def refused(what: str) -> str:
    """What is said of a model that is wrong."""
    torch.manual_seed(0)
    make, stages, more, _ = WRONG[what]
    try:
        adapted(make().double(), stages).shard({"x": video(), **more})
    except HeadraceError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("ranks", [1, 2])
def test_models_that_shards_would_change_are_refused(what: str, ranks: int) -> None:
    """Catches each of these, which gave other results on several ranks without a word; on one rank,
    too, where models are written."""
    for said in run_ranks(ranks, refused, what):
        assert said.startswith("ModelError: ")
        assert WRONG[what][3] in said


def on_one_rank_only() -> str:
    """What is said where the model of one rank does something else."""
    torch.manual_seed(0)
    kind = Frames if dist.get_rank() == 1 else Still
    model = Video(kind("cumsum")).double()
    try:
        adapted(model).shard({"x": video()})
    except ModelError as error:
        return str(error)
    return "nothing"


def test_all_ranks_refuse_what_one_refuses() -> None:
    """Catches ranks that wait for one that has ended."""
    first, second = run_ranks(2, on_one_rank_only, timeout_s=30)
    assert "on another rank" in first
    assert "module between" in second


def test_no_trace_is_left() -> None:
    """Catches weights, buffers, flags and states of random numbers that a probe has changed, and a
    mixing module that only ``check=False`` lets pass."""
    torch.manual_seed(0)
    model = Video(nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.5), Channels(nn.BatchNorm2d(8))))
    model.between.eval()  # statistics that are held
    nn.init.zeros_(model.time.out.weight)
    before = copy.deepcopy(model.state_dict())
    flags = [module.training for module in model.modules()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    run = adapted(model)
    part = run.shard({"x": video().float()})
    assert run.check is False
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # noqa: NPY002
    torch.testing.assert_close(run(**part), model(video().float()))
    run.detach()
    adapted(Rows().double(), rows("s b")).shard({"x": video()})
    adapted(Video(Frames("cumsum")), check=False).shard({"x": video().float()})


def test_a_batch_of_images_is_no_trial() -> None:
    """Catches a model that is taken for right because its first batch has no places to part."""
    run = adapted(Video(Frames("cumsum")).double())
    run.shard({"x": video((2, 1, 4, 8))})
    with pytest.raises(ModelError, match="module between"):
        run.shard({"x": video()})


class Scaled(Video):
    """A model with an input that may be given at the call."""

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return super().forward(x * scale)


def test_a_model_that_needs_its_call_is_tried_there() -> None:
    """Catches a probe that knows neither autocast nor what is given beside the shard."""
    run = adapted(Scaled())
    part = run.shard({"x": video().bfloat16()})
    with torch.autocast("cpu"):
        run(**part, scale=2.0)
    assert run.check is False
    run = adapted(Scaled(Frames("cumsum")))
    part = run.shard({"x": video().float()})
    with pytest.raises(ModelError, match="module between"):
        run(**part, scale=2.0)
    run = adapted(Scaled())
    with pytest.raises(ModelError, match="all inputs of the model"):
        run(**run.shard({"x": video()}))


def test_each_mode_is_tried_when_a_batch_comes_in_it() -> None:
    """Catches a model that was evaluated first, and then trained without a trial; and dropout,
    which draws on each rank, taken for a difference."""
    model = Video(nn.Sequential(Centred(), nn.Dropout(0.5))).double().eval()
    run = adapted(model)
    run.shard({"x": video()})
    assert not run.check
    model.train()
    assert run.check
    with pytest.raises(ModelError, match="module between"):
        run.shard({"x": video()})
    run = adapted(Video(nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.5))).double())
    run.shard({"x": video()})
    assert not run.check


VALUES: Mapping[str, Callable[[int], Any]] = {
    "a number": lambda rank: 1.0 + rank,
    "a truth value": lambda rank: rank > 0,
    "tensors in a tuple": lambda rank: (torch.ones(3), torch.ones(3) + rank),
    "a mapping": lambda rank: {"names": ["a", str(rank)]},
    "none": lambda rank: 1.0 if rank else None,
}


def unlike(what: str) -> tuple[str, str]:
    """What is said of values that are other ones on each rank, and of those that are not."""
    found = []
    for rank in (dist.get_rank(), 0):
        run = adapted(Video().double(), check=False)
        try:
            run.shard({"x": video(), "scale": VALUES[what](rank)})
        except PlanMismatch as error:
            found.append(str(error))
        else:
            found.append("nothing")
        run.detach()
    return found[0], found[1]


@pytest.mark.parametrize("what", VALUES)
def test_values_that_are_no_tensors_are_compared(what: str) -> None:
    """Catches a scale, or rotary positions in a tuple, that ranks have differently."""
    for differ, same in run_ranks(2, unlike, what):
        assert "inputs" in differ
        assert same == "nothing"
