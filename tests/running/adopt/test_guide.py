"""What the guide and README.md show, run on two ranks."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from headrace.adopt.axis_examples import latte
from ranks import run_ranks
from running.adopt.test_joint import FEATURES, Spoken

ROOT = Path(__file__).parents[3]


def blocks(page: str, call: str = "hr.adapt") -> list[str]:
    """The blocks of Python on a page that adapt a model, or call something else."""
    found = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)
    return [block for block in found if call in block]


(TEXT,) = blocks("docs/guides/axes.md", "attends")
BLOCKS = [block for block in blocks("docs/guides/axes.md") if block != TEXT]
LOOP = BLOCKS.pop()
(PENALTY,) = blocks("docs/guides/axes.md", "penalty = ")
(AVERAGE,) = blocks("docs/guides/axes.md", "AveragedModel")
(PRIMITIVES,) = blocks("docs/guides/axes.md", "hr.switch")
README = "import headrace as hr\n" + blocks("README.md")[0]


class Block(torch.nn.Module):
    """Attention over time or over space, as the guide's stages have it."""

    def __init__(self) -> None:
        super().__init__()
        self.spatial = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.temporal = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, s, c = x.shape
        y = self.spatial(x.reshape(b * t, s, c)).view(b, t, s, c).transpose(1, 2)
        return self.temporal(y.reshape(b * s, t, c)).view(b, s, t, c).transpose(1, 2)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def shown(block: int) -> float:
    """The loss that the guide's lines end with, or the distance of a result."""
    example = latte()
    torch.manual_seed(3)
    names: dict[str, Any] = {
        "latte": example.model,
        "video": example.inputs["hidden_states"],
        "t": example.inputs["timestep"],
        "text": example.inputs["encoder_hidden_states"],
        "target": torch.randn(2, 4, 5, 6, 6, dtype=torch.float64),
        "model": Model().double(),
    }
    exec(README if block == 2 else BLOCKS[0], names)  # the second goes on with the first's imports
    if block != 1:
        return float(names["loss"])
    exec(BLOCKS[1], names)
    run, x = names["run"], torch.randn(2, 5, 3, 8, dtype=torch.float64)
    with torch.no_grad():
        whole = run.collect(run(**run.shard({"x": x})), "b t s c")
        run.detach()
        return float((whole - names["model"](x)).abs().max())


def test_the_guide_runs() -> None:
    """Catches names that have changed since the page was written, and a loss that is not the
    mean over the whole batch."""
    pytest.importorskip("diffusers")
    example = latte()
    torch.manual_seed(3)
    target = torch.randn(2, 4, 5, 6, 6, dtype=torch.float64)
    out = example.model(**example.inputs).sample
    wanted = float((out - target).detach().square().mean())
    for block in (0, 2):
        assert run_ranks(2, shown, block, timeout_s=100) == [pytest.approx(wanted, rel=1e-12)] * 2
    assert max(run_ranks(2, shown, 1, timeout_s=100)) <= 1e-12


def penalised() -> tuple[float, float]:
    """How far gradients with the guide's penalty are from one process', and the average that the
    guide makes from the plain model."""
    example = latte()
    torch.manual_seed(3)
    plain, target = copy.deepcopy(example.model), torch.randn(2, 4, 5, 6, 6, dtype=torch.float64)
    names: dict[str, Any] = {
        "latte": example.model,
        "video": example.inputs["hidden_states"],
        "t": example.inputs["timestep"],
        "text": example.inputs["encoder_hidden_states"],
        "target": target,
        "torch": torch,
    }
    assert "run.backward(loss)\n" in BLOCKS[0]
    exec(BLOCKS[0].replace("run.backward(loss)\n", PENALTY), names)
    exec(AVERAGE, names)
    out = plain(**example.inputs).sample
    loss = (out - target).square().mean() + sum(p.square().sum() for p in plain.parameters())
    loss.backward()
    off, largest = 0.0, 0.0
    for mine, wanted in zip(example.model.parameters(), plain.parameters(), strict=True):
        if wanted.grad is not None and mine.grad is not None:
            off = max(off, float((mine.grad - wanted.grad).abs().max()))
            largest = max(largest, float(wanted.grad.abs().max()))
    return off / largest, float((names["whole"] - out).detach().abs().max())


def test_the_penalty_and_the_average_of_the_guide() -> None:
    """Catches a penalty that counts for every rank, and an average that is spread."""
    pytest.importorskip("diffusers")
    for gradient, average in run_ranks(2, penalised, timeout_s=100):
        assert gradient < 1e-12
        assert average < 1e-12


def replicated() -> tuple[float, float]:
    """The loss that the guide's lines on replicas end with, and that of one process."""
    torch.manual_seed(3)
    model, replica = Model().double(), torch.distributed.get_rank()
    names: dict[str, Any] = {"hr": hr, "model": model}
    exec(BLOCKS[1], names)
    names["run"].detach()
    videos = [torch.randn(2, frames, 3, 8, dtype=torch.float64) for frames in (5, 4)]
    wanted = sum(float(model(x).square().sum()) for x in videos) / (2 * 9 * 3)
    names["video"] = videos[replica]
    exec(BLOCKS[-1], names)
    return float(names["loss"]), wanted


def test_the_replicas_of_the_guide_run() -> None:
    """Catches a mean over one replica, and names that have changed since the page was written."""
    for loss, wanted in run_ranks(2, replicated):
        assert loss == pytest.approx(wanted, rel=1e-12)


def spoken() -> float:
    """How far a model of videos and texts, as the guide spreads it, is from itself alone."""
    torch.manual_seed(0)
    model = Spoken(2).double()
    x, text = (torch.randn(2, *n, FEATURES, dtype=torch.float64) for n in ((5, 3), (4,)))
    wanted, _ = model(x, text)
    names: dict[str, Any] = {"hr": hr, "model": model}
    exec(TEXT.replace("blocks.*.attn", "layers.*"), names)
    run = names["run"]
    places, _ = run(**run.shard({"x": x, "text": text}))
    return float((places - run.local(wanted, "b t s c")).detach().abs().max())


def test_the_text_of_the_guide_runs() -> None:
    """Catches names that have changed since the page was written."""
    assert max(run_ranks(2, spoken)) <= 1e-12


def looped(folder: Path) -> float:
    """The loss of the only step of the guide's loop."""
    from headrace.engine.synthetic_clips import SyntheticClips
    from headrace.models.transformer_2d import SHAPES_2D, Transformer2D

    torch.manual_seed(0)
    model = Transformer2D(SHAPES_2D["tiny"]).double()
    clips = SyntheticClips(6, {(1, 6): 1, (4, 9): 1}, channels=4, seed=1, dtype=torch.float64)
    measure = f"measure=hr.MeasureOptions(cache={str(folder)!r})"
    loop = LOOP.replace('batch_tokens="16Ki"', f'batch_tokens="16Ki", {measure}')
    names: dict[str, Any] = {
        "hr": hr,
        "model": model,
        "clips": clips,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    exec(loop, names)
    places = sum(len(c["frames"]) * len(c["patches"]) for c in map(clips.__getitem__, range(6)))
    torch.manual_seed(0)
    other, total = Transformer2D(SHAPES_2D["tiny"]).double(), 0.0
    for at in range(6):
        item = clips[at]
        out = other(item["x"][None], item["timestep"][None], item["frames"], item["patches"])
        total += float((out - item["labels"]).square().sum().detach()) / places
    return abs(names["step"].loss / total - 1)


def test_the_loop_of_the_guide_runs(tmp_path: Path) -> None:
    for error in run_ranks(2, looped, tmp_path, timeout_s=120):
        assert error < 1e-12


def by_primitives() -> list[float]:
    """How far the loss and gradients of the guide's own model are from those of one process."""
    names: dict[str, Any] = {}
    torch.manual_seed(5)
    exec(PRIMITIVES, names)
    mine, plain = names["model"], names["Axial"]()
    plain.load_state_dict(mine.state_dict())
    loss = (plain(names["video"], None) - names["target"]).square().mean()
    loss.backward()
    pairs = zip(mine.parameters(), plain.parameters(), strict=True)
    grads = [float((a.grad - b.grad).abs().max() / b.grad.abs().max()) for a, b in pairs]
    return [abs(float(names["loss"].detach() / loss.detach()) - 1), *grads]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_primitives_of_the_guide_run(ranks: int) -> None:
    """Catches names that have changed since the page was written, and an objective that is not the
    mean over the whole video: seven frames and five patches are not divisible."""
    for errors in run_ranks(ranks, by_primitives):
        assert max(errors) < 1e-5  # fp32
