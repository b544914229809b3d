"""The table of one layer on a device, tried on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_layer
import pytest


@pytest.mark.slow
def test_the_table(tmp_path: Path) -> None:
    """Catches sides left out, ranks that take others' tokens for theirs, and work that is not
    counted."""
    path = tmp_path / "gpu" / "layer.json"
    done = subprocess.run(
        [
            sys.executable,
            gpu_layer.__file__,
            "--device",
            "cpu",
            "--hidden",
            "256",
            "--tokens",
            "32",
            "64",
            "--ranks",
            "2",
            "--methods",
            "local",
            "ulysses_z",
            "--no-compile",
            "--json",
            path,
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "products at" in done.stdout
    assert "64 tokens: ulysses_z" in done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [row["side"] for row in rows] == ["torch", "local", "ulysses_z"] * 2
    for row in rows:
        assert row["us_per_token"] > 0
        assert row["utilisation"] > 0
        assert row["kept_bytes"] > 0


def test_what_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Catches a table that ends at the first size that does not fit."""

    def full(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(gpu_layer, "of_torch", full)
    monkeypatch.setattr(gpu_layer, "of_method", full)
    assert (
        gpu_layer.main(["--device", "cpu", "--hidden", "1024", "--tokens", "8", "--ranks", "2"])
        == 0
    )
    assert capsys.readouterr().out.count("out of memory") == 7
