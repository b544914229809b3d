"""Whole steps beside their predictions, tried on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gpu_step
import pytest

from headrace.config import Config

SMALL = (
    "run.steps=4",
    "devices.ranks=1",
    "devices.device=cpu",
    "planner.group_sizes=[1]",
    "data.paths=['package:headrace']",
    "data.batch_tokens=2048",
    "data.context=1024",
    "profile.rung_s=0.05",
)


@pytest.mark.slow
def test_the_table(tmp_path: Path) -> None:
    """Catches steps left out, and ratios the wrong way round."""
    path = tmp_path / "out" / "step.json"
    config = Path(gpu_step.ONE_GPU).parent / "python-sources.toml"
    changes = [text for change in SMALL for text in ("--set", change)]
    done = subprocess.run(
        [sys.executable, gpu_step.__file__, "--config", config, *changes, "--json", path],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert [step["step"] for step in found["steps"]] == [0, 1, 2, 3]
    assert f"{found['tokens_per_s']:,.0f} tokens/s" in done.stdout
    low, middle, high = found["seconds_ratio"]
    assert 0 < low <= middle <= high
    first = found["steps"][0]
    assert gpu_step.ratios(first)[0] == first["step_s"] / first["predicted_s"]
    assert 0 < found["peak_ratio"][0] < 3


def test_what_is_trained_on_a_gpu() -> None:
    """Catches an example that cannot be read, or is another than it says."""
    config = Config.load(gpu_step.ONE_GPU)
    assert (config.devices.ranks, config.devices.device) == (1, "cuda")


def test_first_steps_are_left_out_of_medians() -> None:
    """Catches kernels that are compiled counted as steps."""

    def step(number: int, seconds: float) -> dict[str, object]:
        return {
            "step": number,
            "step_s": seconds,
            "predicted_s": 2.0,
            "peak_bytes": [6, 9],
            "predicted_peak_bytes": [10, 10],
            "tokens_per_s": 1 / seconds,
            "mfu": 0.5,
            "loss": 3.0 - number,
            "out_of_memory": 0,
        }

    slow, quick = [step(i, 100.0) for i in range(3)], [step(i, 1.0) for i in range(3, 6)]
    found = gpu_step.summary(slow + quick)
    assert found["seconds_ratio"] == [0.5] * 3
    assert found["peak_ratio"] == [0.9] * 3
    assert found["losses"] == [3.0, -2.0]
    assert gpu_step.summary(slow)["tokens_per_s"] == pytest.approx(0.01)
