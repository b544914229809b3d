"""The guide of given batches, as it reads."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

import headrace as hr
from ranks import run_ranks
from running.engine.loops import Drawn, costs, llama, weights
from running.engine.test_given_batches import log_probabilities, reference, samples, sgd

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs/guides/given-batches.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


def as_it_reads(ranks: int, folder: Path) -> Any:
    """Weights after all of the guide's lines, and how often a step was taken."""
    model = llama()
    names: dict[str, Any] = {
        "hr": hr,
        "torch": torch,
        "model": model,
        "optimizer": sgd(model),
        "reference": reference(),
        "samples": samples((20, 31, 9, 30), seed=5),
        "log_probabilities": log_probabilities,
        "logsigmoid": logsigmoid,
    }
    attach = BLOCKS[0].splitlines()[0]
    made = attach.replace(
        'batch_tokens="1Ki"',
        'batch_tokens="1Ki", say=lambda text: None, measure=hr.MeasureOptions(costs=costs)',
    )
    assert made != attach
    with redirect_stdout(io.StringIO()):
        exec(made, {**names, "costs": costs(ranks)}, names)
        names["run"].engine.planner = Drawn(ranks=ranks, layers=2, seed=11)
        for block in (BLOCKS[0].removeprefix(attach), *BLOCKS[1:]):
            names["run"]._runner.check = True  # every loss of the guide is one that is checked
            exec(block, names)
    return weights(model), names["run"].number


def test_the_guide_runs_as_it_reads(tmp_path: Path) -> None:
    """Catches a line of the guide that does not run, or trains something else on two ranks."""
    assert len(BLOCKS) == 7
    (wanted, steps), *_ = run_ranks(1, as_it_reads, 1, tmp_path, timeout_s=60)
    assert steps == 6
    for found, taken in run_ranks(2, as_it_reads, 2, tmp_path, timeout_s=60):
        assert taken == steps
        for mine, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(mine, other, rtol=0, atol=1e-10)
