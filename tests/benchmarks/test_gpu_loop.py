"""A user's loop beside headrace's, tried on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
import gpu_loop

SMALL = "--device cpu --layers 1 --hidden 64 --vocabulary 60 --context 128 --batch-tokens 256"


@pytest.mark.slow
def test_all_sides_train_the_same(tmp_path: Path) -> None:
    """Catches sides that are given other samples, lose tokens, or mix those of a pack."""
    path = tmp_path / "loop.json"
    done = subprocess.run(  # a process of its own, as it begins torch.distributed
        [sys.executable, gpu_loop.__file__, *SMALL.split(), "--steps", "3", "--json", path],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    sides = json.loads(path.read_text())["sides"]
    assert len(sides) == 6
    for row in sides.values():
        assert row["losses"] == pytest.approx(sides["headrace"]["losses"], rel=1e-4)
        assert len(row["seconds"]) == 3
        assert row["tokens_per_s"] > 0
    assert [len(row["micro_batches"]) > 0 for row in sides["headrace"]["told"]] == [True] * 3
    assert "packed, r" in done.stdout


def test_packs_and_rows_hold_every_sample_once() -> None:
    """Catches samples that are dropped, and packs that are longer than the context."""
    items = gpu_loop.drawn(50, 400, 60)
    for split in (gpu_loop.packs, gpu_loop.padded_rows):
        found = list(split(items, 400))
        ids = sorted(id(item) for rows in found for item in rows)
        assert ids == sorted(map(id, items))
    assert max(sum(len(i["input_ids"]) for i in rows) for rows in gpu_loop.packs(items, 400)) <= 400


def test_out_of_memory_is_a_row() -> None:
    """Catches a benchmark that ends where a rival does."""

    def fail() -> dict[str, object]:
        raise torch.OutOfMemoryError("CUDA out of memory\nmore")

    assert gpu_loop.attempted(fail, "cpu") == {"out_of_memory": "CUDA out of memory"}
