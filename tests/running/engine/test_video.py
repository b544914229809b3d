"""Runs over synthetic clips: from the command line to the same losses on any ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.config import Config
from headrace.config.clips_config import ClipsConfig
from headrace.config.kinds import read_any
from headrace.engine.synthetic_clips import SyntheticClips
from headrace.engine.video import shape_of
from headrace.errors import ConfigError, SpecError
from running.cli.jobs import losses, metrics, run

EXAMPLE = Path(__file__).parents[3] / "examples" / "video.toml"

SMALL = (
    'data.shapes={ "1x6" = 3, "4x6" = 2, "6x9" = 1 }',
    "data.batch_tokens=150",
    "data.clips=60",
    "model.hidden=16",
    "model.heads=2",
    "model.channels=2",
    "devices.dtype=float64",
    "devices.threads=1",
    "report.html=false",
)


def flags(folder: Path, *more: str) -> list[str]:
    changes = [*SMALL, f"data.cache={folder / 'cache'}", *more]
    return [part for change in changes for part in ("--set", change)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_is_the_same_on_any_ranks_and_resumed(tmp_path: Path) -> None:
    """Catches clips that are lost, drawn anew or weighted by ranks, and state that a checkpoint
    forgets."""
    one, two = tmp_path / "one", tmp_path / "two"
    given = ["train", EXAMPLE]
    for folder, ranks, steps in ((one, 1, 8), (two, 2, 5)):
        more = (f"run.steps={steps}", "checkpoint.every=2", "optimizer.floor=1.0")
        code, out, err = run(
            *given, "--out", folder, "--ranks", ranks, *flags(tmp_path, *more), timeout_s=200
        )
        assert code == 0, err
        assert out.strip() == str(folder)
        assert "synthetic clips of 3 shapes" in err
    more = ("checkpoint.every=2", "optimizer.floor=1.0", "run.steps=8")
    code, _, err = run(
        *given, "--out", two, "--resume", "--ranks", 2, *flags(tmp_path, *more), timeout_s=200
    )
    assert code == 0, err
    assert "going on with step 5" in err
    np.testing.assert_allclose(losses(two), losses(one), rtol=1e-10)
    assert {"predicted_s", "strategy", "idle"} <= metrics(two)[0].keys()


def test_clips_follow_from_their_numbers() -> None:
    shapes = {(1, 6): 3.0, (4, 6): 1.0}
    one, two = (SyntheticClips(400, shapes, channels=2, seed=5) for _ in range(2))
    assert set(one.lengths.tolist()) == {6, 24}
    assert (one.lengths == 6).mean() == pytest.approx(0.75, abs=0.08)
    for index in (0, 17, 399):
        mine, other = one[index], two[index]
        assert mine["x"].shape == (*one.shapes[index], 2)
        for name, value in mine.items():
            torch.testing.assert_close(value, other[name], rtol=0, atol=0)
    assert not torch.equal(one[0]["labels"].flatten()[:6], one[1]["labels"].flatten()[:6])
    # What is asked for, the noise, is in what is given, the more the later the time.
    late = max((one[i] for i in range(100)), key=lambda item: int(item["timestep"]))
    torch.testing.assert_close(late["x"], late["labels"], rtol=0, atol=0.1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("planner.smoothing=0.1", "planner.smoothing says nothing about clips"),
        ("data.shapes={ '3' = 1 }", "FRAMESxPATCHES"),
        ("data.shapes={ '3x4' = 0 }", "greater than 0"),
        ("data.batch_sequences=3", "either batch_tokens or batch_sequences"),
        ("model.layers=", "layers: wanted a value"),
        ("planner.name=strategies", "no stages"),
        ("devices.dtype=bfloat16", "float32 or float64"),
        ("data.paths=['x']", "unknown key"),
    ],
)
def test_mistakes_are_told(change: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_any(EXAMPLE, [change])


def test_what_is_not_of_tokens_is_told() -> None:
    """Catches a list of missing keys where the file is of another kind."""
    with pytest.raises(ConfigError, match="only headrace train takes"):
        Config.load(EXAMPLE)
    with pytest.raises(SpecError, match="which heads divide"):
        shape_of(ClipsConfig.load(EXAMPLE, "model.heads=3"))


def test_presets_are_the_papers() -> None:
    config = ClipsConfig.load(
        EXAMPLE,
        "model.preset=720m",
        "model.layers=",
        "model.hidden=",
        "model.heads=",
        "model.channels=",
    )
    assert (shape_of(config).layers, shape_of(config).hidden) == (28, 1152)
