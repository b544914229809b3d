"""The benchmark of foreign models, by its functions."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

import autosp
import torch


@pytest.mark.apart  # backward passes in the test's own process
def test_contenders_take_the_same_step() -> None:
    """Catches contenders that do other work."""
    losses = [autosp.alone(96, level)(96) for level in ("none", "full")]
    losses += [autosp.spread(96, level)(96) for level in autosp.LEVELS]
    assert losses == pytest.approx([losses[0]] * 5, rel=1e-5)
    assert torch.isfinite(torch.tensor(losses)).all()


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches ratios to another contender than the first of the same length."""
    rows: list[dict[str, Any]] = [
        {"tokens": t, "contender": c, "bytes": b << 20, "cpu_s": s, "loss": 6.0}
        for t, c, b, s in ((64, "one device", 8, 1.0), (64, "2 ranks, none", 4, 1.5),
                           (128, "one device", 16, 2.0))
    ]  # fmt: skip
    autosp.show(rows)
    lines = capsys.readouterr().out.splitlines()
    assert "0.50" in lines[2]
    assert "1.50" in lines[2]
    assert lines[3].count("1.00") == 2
