"""A loop under torchrun that is killed, and goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from running.engine.loops import alone, batches, dataset, llama

pytest.importorskip("transformers")

TESTS = Path(__file__).parents[2]


def launched(folder: Path, kill_at: int) -> tuple[int, dict[int, float]]:
    """(exit code, losses by step) of the script beside this file on two ranks."""
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(Path(__file__).with_name("killed.py")),
        str(folder),
        str(kill_at),
    ]
    paths = f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done.returncode, {row["step"]: row["loss"] for row in rows}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_loop_goes_on(tmp_path: Path) -> None:
    """Catches a checkpoint that a kill spoils, and steps that differ after it."""
    code, before = launched(tmp_path, 4)
    assert code != 0
    assert set(before) == {0, 1, 2, 3}
    code, after = launched(tmp_path, -1)
    assert code == 0
    assert set(after) == {4, 5}
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wanted = alone(model, optimizer, batches(dataset(), 6, batch_tokens=150))
    found = before | after
    assert [found[step] for step in range(6)] == pytest.approx(wanted, rel=1e-9)
