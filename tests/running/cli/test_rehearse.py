"""``headrace rehearse``: a job that is not there, told in full."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.costs import CostModel
from running.cli.jobs import run

CONFIG = """
[data]
paths = ["nowhere"]
tokenizer = "bytes"
context = 2048
batch_tokens = 4096

[model]
kind = "llama"
layers = 6
hidden = 64
heads = 8
kv_heads = 8
ffn = 192

[devices]
ranks = 8
hardware = "h100"
memory = "{memory}"

[planner]
candidates = ["megatron_cz", "ulysses_z"]
"""


LITTLE = (
    "--set",
    'planner.candidates=["megatron_cz"]',
    "--set",
    'planner.recompute=["none", "full"]',
)
"""One method at two levels."""


def _config(folder: Path, memory: str = "64MiB") -> Path:
    path = folder / "job.toml"
    path.write_text(CONFIG.format(memory=memory))
    return path


def _json(*words: str | Path) -> dict[str, Any]:
    code, out, err = run("rehearse", *words, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rehearse")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    """All eight ranks in one group, no data and no device at hand."""
    return _json(_config(folder), "--costs", folder / "costs.json", "--length", "1Ki")


def test_every_method_and_level_is_answered(found: dict[str, Any]) -> None:
    """Would catch a level left out, seconds of nothing, and a level that keeps more than less."""
    options = {row["option"]: row for row in found["options"]}
    assert options.keys() == {
        method + level
        for method in ("megatron_cz", "ulysses_z")
        for level in ("", "+attention", "+full")
    }
    assert all(row["forward_s"] > 0 and row["backward_s"] > 0 for row in found["options"])
    for method in ("megatron_cz", "ulysses_z"):
        none, full = options[method], options[f"{method}+full"]
        assert full["kept_bytes"] < none["kept_bytes"] / 5
        assert full["longest"] > none["longest"]
        assert full["backward_s"] > none["backward_s"]
    assert (found["hardware"], found["dtype"], found["device"]) == (
        "h100+nvlink4+infiniband-ndr",
        "bfloat16",
        None,
    )


def test_memory_parts_are_all_of_the_memory(found: dict[str, Any]) -> None:
    """Would catch a part counted twice or left out."""
    parts = found["memory_bytes"]
    peak = parts.pop("peak")
    free = parts.pop("free")
    assert sum(parts.values()) == peak
    assert peak + free == found["capacity_bytes"]
    assert min(*parts.values(), free) >= 0


def test_the_costs_can_be_planned_with(folder: Path, found: dict[str, Any]) -> None:
    """Would catch costs that plan refuses."""
    costs = CostModel.load(folder / "costs.json")
    assert costs.group_sizes == (8,)
    assert costs.capacity_bytes == found["capacity_bytes"]
    code, out, err = run(
        "plan",
        _config(folder),
        "--costs",
        folder / "costs.json",
        "--lengths",
        "lognormal:median=200,sigma=1,max=2048",
    )
    assert code == 0, err
    assert "*cp8" in out


def test_people_get_tables(folder: Path) -> None:
    """Would catch data on stderr, and an answer without the step and its memory."""
    code, out, err = run("rehearse", _config(folder), "--length", "1Ki", "--rank", "7", *LITTLE)
    assert code == 0, err
    assert "rank 7 of 8 on h100" in out
    assert "megatron_cz+full" in out
    assert "a step of one sequence of 1,024 tokens" in out
    assert "stored weights, gradients, optimizer" in out
    assert "shapes only" in err


def test_what_does_not_fit_is_said(folder: Path) -> None:
    """Would catch a plan for a sequence that no option can hold."""
    code, out, err = run("rehearse", _config(folder, "16MiB"), "--length", "256Ki", *LITTLE)
    assert code == 0, err
    assert "262,144 tokens do not fit; the longest sequence is" in out


@pytest.mark.long
def test_kernels_can_really_run(folder: Path) -> None:
    """Would catch a device that is ignored: real seconds differ from one call to the next."""
    words = (
        _config(folder),
        "--device",
        "cpu",
        "--hardware",
        "cpu",
        "--length",
        "64",
        "--set",
        "data.context=256",
        "--ranks",
        "2",
        *LITTLE,
    )
    first, second = _json(*words), _json(*words)
    assert first["dtype"] == "float32"
    assert first["device"] == "cpu"
    assert [row["forward_s"] for row in first["options"]] != [
        row["forward_s"] for row in second["options"]
    ]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--rank", "8"), "--rank: got 8, wanted 0 to 7"),
        (("--sizes", "9"), "--sizes: got 9, wanted 1 to 8"),
        (("--dtype", "float8"), "--dtype: got 'float8', wanted one of "),
        (("--device", "tpu"), "--device: got 'tpu'"),
        (("--hardware", "h1000"), "did you mean"),
        (("--length", "many"), "many"),
        (("--length", "0"), "--length: got 0, wanted >= 1 token"),
        (("--costs", "/no/where.json"), "--costs: got /no/where.json"),
        (("--set", "devices.memory=1KiB"), "no sequence fits"),
    ],
)
def test_bad_options_are_one_clear_message(
    folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], text: str
) -> None:
    """Would catch a traceback, and a job that cannot be."""
    code = main(["rehearse", str(_config(folder)), *words, *LITTLE])
    assert code == 2
    assert text in capsys.readouterr().err


def test_a_launch_of_iterations_is_told(folder: Path, found: dict[str, Any]) -> None:
    """Catches steps that choose their own samples of which nothing is said, and a launch that no
    memory holds or that another choice would beat."""
    drawn = ("--set", "data.batch_tokens=", "--set", "data.iterations=dcp")
    told = _json(_config(folder), *drawn, "--length", "1Ki")
    assert found["launch"] is None
    launch = told["launch"]
    assert (launch["ranks"], launch["length"]) == (8, 1024)
    longest = max(row["longest"] for row in told["options"])
    assert 1 <= launch["samples"] <= longest // 1024
    alone = min(row["forward_s"] + row["backward_s"] for row in told["options"])
    assert launch["seconds"] / launch["samples"] <= alone * (1 + 1e-9)
    code, out, err = run("rehearse", _config(folder), *drawn, "--length", "1Ki")
    assert code == 0, err
    assert f"{launch['samples']} samples of 1,024 tokens on 8 ranks" in out
