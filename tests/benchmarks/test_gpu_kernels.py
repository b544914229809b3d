"""The tables of kernels on a device, tried on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpu_kernels
import pytest


@pytest.mark.slow
def test_the_tables(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches functions that are not measured, and sides that do not run what they say."""
    monkeypatch.setattr(gpu_kernels, "TIMES", 1)
    path = tmp_path / "gpu" / "kernels.json"
    arguments = ["--device", "cpu", "--tokens", "16", "33", "--hidden", "256", "--json", str(path)]
    assert gpu_kernels.main(arguments) == 0
    assert "copies" in capsys.readouterr().out
    numbers = json.loads(path.read_text())
    functions = ["swiglu", "swiglu_backward", "rotate_and_sort", "unrotate_and_unsort"]
    assert [row["function"] for row in numbers["chains"]] == functions * 2
    for row in numbers["chains"]:
        assert min(row["memory_s"], row["written_s"], row["compiled_s"]) > 0
        assert row["runs"] == "plain operators"
    assert [row["tokens"] for row in numbers["attention"]] == [16, 33]
    for row in numbers["attention"]:
        assert min(row["headrace_s"], row["flash_attention_s"]) > 0
        assert "cudnn_attention_s" not in row


def test_a_device_that_is_not_there_is_refused(capsys: Any) -> None:
    """Catches a traceback where there is no device."""
    if not gpu_kernels.torch.cuda.is_available():
        with pytest.raises(SystemExit):
            gpu_kernels.main([])
        assert "--device cpu" in capsys.readouterr().err
