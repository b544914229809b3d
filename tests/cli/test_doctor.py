"""``headrace doctor`` with the links left out: what it says of packages and of the machine."""

from __future__ import annotations

import importlib
import json
import os
import re
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main

MODULE = importlib.import_module("headrace.cli.doctor")  # in the package the name is the command
WORKS = (
    "plan and simulate",
    "train on this machine",
    "train on its GPUs",
    "tokenizer.json",
    "reports",
    "parquet",
    "FASTA",
)


def examine(
    monkeypatch,
    capsys,
    *flags: str,
    absent: tuple[str, ...] = (),
    links: Any = None,
    devices: Any = (),
) -> tuple[int, str]:
    """Exit code and stdout of an examination where some packages are absent."""
    monkeypatch.setattr(MODULE, "_version", lambda name: None if name in absent else "1.2.3")
    monkeypatch.setattr(MODULE, "_links", lambda: links or {})
    monkeypatch.setattr(MODULE, "_devices", lambda: list(devices))
    code = main(["doctor", *flags])
    out, err = capsys.readouterr()
    assert err == ""
    return code, out


LINKED = {
    "gloo": True,
    "nccl": False,
    "gloo_works": True,
    "ranks_ready_s": 0.2,
    "gloo_latency_s": 5e-5,
    "gloo_bytes_per_s": 3e9,
}


def test_what_two_ranks_measure_goes_to_a_folder_of_their_own(monkeypatch, tmp_path) -> None:
    """Catches a file whose name another user of the machine can foresee, and one left behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    written: list[Path] = []
    monkeypatch.setattr(MODULE, "_time_exchanges", lambda path: written.append(path) or {})
    MODULE._measure_gloo()
    assert written[0].parent.parent == tmp_path
    assert str(os.getpid()) not in written[0].name
    assert list(tmp_path.iterdir()) == []


def test_where_two_ranks_can_talk_one_can_train(monkeypatch, capsys) -> None:
    """Catches a verdict that does not follow from what was found."""
    code, out = examine(monkeypatch, capsys, "--json", links=LINKED)
    value = json.loads(out)
    assert code == 0
    assert tuple(value["works"]) == WORKS
    assert value["works"]["train on this machine"] == {"ok": True, "why": "two gloo ranks talked"}
    assert not value["works"]["train on its GPUs"]["ok"]
    assert all(value["works"][name]["ok"] for name in WORKS[3:])
    assert value["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert 0 < value["machine"]["free_memory_bytes"] <= value["machine"]["memory_bytes"]
    assert value["machine"]["free_disk_bytes"] > 0


@pytest.mark.parametrize("links", [{}, {"gloo": True, "gloo_works": False}], ids=str)
def test_where_ranks_cannot_talk_the_exit_code_is_one(monkeypatch, capsys, links) -> None:
    """Catches a script that goes on to train where nothing can."""
    code, out = examine(monkeypatch, capsys, "--json", links=links)
    assert code == 1
    assert not json.loads(out)["works"]["train on this machine"]["ok"]


def test_without_torch_it_says_what_to_install(monkeypatch, capsys) -> None:
    """Catches an import of torch where there is none, and a hint without its extra."""
    code, out = examine(monkeypatch, capsys, "--json", absent=("torch", "pyfaidx"))
    value = json.loads(out)
    assert code == 1
    assert value["devices"] == []
    assert value["links"] == {}
    assert value["works"]["plan and simulate"]["ok"]
    assert value["works"]["train on this machine"] == {
        "ok": False,
        "why": "needs torch: pip install 'headrace[train]'",
    }
    assert value["works"]["FASTA"]["why"] == "needs pyfaidx: pip install 'headrace[genomics]'"


def test_gpus_need_nccl(monkeypatch, capsys) -> None:
    """Catches a promise of GPUs to a torch that cannot link them."""
    gpu = {"name": "H100", "memory_bytes": 80 * 2**30}
    for nccl in (True, False):
        links = LINKED | {"nccl": nccl}
        _, out = examine(monkeypatch, capsys, "--json", links=links, devices=[gpu])
        assert json.loads(out)["works"]["train on its GPUs"]["ok"] is nccl


def test_absent_nccl_is_not_called_present(monkeypatch, capsys) -> None:
    """Catches a reason that contradicts its verdict."""
    gpu = {"name": "H100", "memory_bytes": 80 * 2**30}
    _, out = examine(monkeypatch, capsys, "--json", links=LINKED, devices=[gpu])
    assert "NCCL present" not in json.loads(out)["works"]["train on its GPUs"]["why"]


def test_the_table_shows_the_same(monkeypatch, capsys) -> None:
    """Catches brackets that the console takes for a style, and a row that is left out."""
    monkeypatch.setenv("COLUMNS", "200")
    _, out = examine(monkeypatch, capsys, absent=("pyarrow",), links=LINKED)
    rows = {name: line for line in out.splitlines() for name in WORKS if line.startswith(name)}
    assert set(rows) == set(WORKS)
    assert "yes" in rows["train on this machine"]
    assert "no" in rows["parquet"].split()
    assert "pip install 'headrace[hf]'" in rows["parquet"]
    assert "gloo: two ranks ready and done in 200 ms" in out
    assert "absent: pyarrow" in out


def test_all_that_extras_install_is_looked_for() -> None:
    """Catches ``absent: nothing`` where what was never looked for is absent."""
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"]
    wanted = {
        re.split(r"[><=]", package)[0]
        for extra, packages in extras.items()
        if extra not in ("test", "lint", "docs", "dev", "all")
        for package in packages
    }
    assert {"wandb", "tensorboard", "psutil"} <= wanted
    assert wanted <= set(MODULE._PACKAGES)


def test_versions_are_those_installed() -> None:
    """Catches a distribution asked for by its module's name."""
    import numpy

    assert MODULE._version("numpy") == numpy.__version__
    assert MODULE._version("no-such-package") is None
