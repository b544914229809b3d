"""The example of a model of one's own, and its twin for one device."""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[3] / "examples"
STEPS = ("--steps", "4", "--tokens", "96")


def losses(*command: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=140, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line)["loss"] for line in done.stdout.splitlines()]


def test_at_most_ten_lines_more() -> None:
    """Catches an interface that asks for more."""
    single, several = (
        [line for line in (EXAMPLES / name).read_text().splitlines()[8:] if line.strip()]
        for name in ("hf_llama_single.py", "hf_llama.py")
    )
    changes = list(difflib.ndiff(single, several))
    assert sum(line.startswith("+ ") for line in changes) <= 10


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_same_losses() -> None:
    """Catches an example that does not run, or trains something else."""
    alone = losses(str(EXAMPLES / "hf_llama_single.py"), *STEPS)
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    spread = losses(*ranks, str(EXAMPLES / "hf_llama.py"), *STEPS)
    assert len(alone) == 4
    assert spread == pytest.approx(alone, rel=1e-5)
