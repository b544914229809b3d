"""``headrace report``, ``verify`` and ``export`` on what is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.cli import main


def call(capsys, *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr (its lines joined)."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else -1
    out, err = capsys.readouterr()
    return code, out, re.sub(r"[\s\u2502]+", " ", err)


@pytest.mark.parametrize("flags", [(), ("--text",)], ids=str)
def test_a_report_of_no_run(capsys, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Catches an empty report, or a traceback."""
    code, out, err = call(capsys, "report", tmp_path / "nowhere", *flags)
    assert (code, out) == (2, "")
    assert "nowhere" in err
    assert "Traceback" not in err
    code, out, err = call(capsys, "report", tmp_path, *flags)
    assert (code, out) == (2, "")
    assert str(tmp_path) in err


BAD: dict[str, tuple[list[str], str]] = {
    "report without a run": (["report"], "requires an argument"),
    "export without a folder": (["export", "run"], "--out"),
    "export without a run": (["export", "--out", "x"], "requires an argument"),
    "unknown flag of report": (["report", "run", "--txt"], "Did you mean --text?"),
    "unknown flag of verify": (["verify", "--rank", "2"], "Did you mean --ranks?"),
    "unknown thing to verify": (["verify", "natives"], "native"),
    "ranks of no number": (["verify", "native", "--ranks", "two"], '"two" into int'),
    "no flag of config": (["config", "--schemas"], "Did you mean --schema?"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_flags_are_one_message(capsys, case: str) -> None:
    """Catches a mistyped flag that is ignored."""
    arguments, text = BAD[case]
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert text in err


TORCH: dict[str, tuple[list[str], str]] = {
    "native with a path": (["verify", "native", "x"], "got a path x, wanted none"),
    "no ranks": (["verify", "native", "--ranks", "0"], "got ranks [0], steps 3, wanted >= 1 each"),
    "no steps": (["verify", "native", "--steps", "0"], "steps 0, wanted >= 1 each"),
    "no error is below 0": (
        ["verify", "native", "--tolerance", "-1"],
        "--tolerance: got -1.0, wanted from 0 to below 1",
    ),
    "no path": (["verify", "checkpoint"], "verify checkpoint: got no path"),
    "no checkpoint": (["verify", "checkpoint", "{tmp}"], "got none, wanted at least one"),
    "no folder": (["verify", "checkpoint", "{tmp}/nowhere"], "got none, wanted at least one"),
    "no run to export": (
        ["export", "{tmp}/nowhere", "--out", "{tmp}/out"],
        "nowhere: got none, wanted at least one, saved by a run",
    ),
}


def test_code_that_is_run_is_named(capsys) -> None:
    """Catches a command that runs a program of whoever named it without a word."""
    pytest.importorskip("torch")
    code, _, err = call(capsys, "verify", "json:dumps")
    assert code == 2
    assert err.startswith("running the code of json:dumps ")


@pytest.mark.parametrize("case", TORCH)
def test_what_is_not_there_is_one_message(capsys, tmp_path: Path, case: str) -> None:
    """Catches a traceback, and an export that leaves an empty folder behind."""
    pytest.importorskip("torch")
    arguments, text = TORCH[case]
    code, out, err = call(capsys, *(a.replace("{tmp}", str(tmp_path)) for a in arguments))
    assert (code, out) == (2, "")
    assert text in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", ["native", "latte"])
def test_a_tolerance_of_0_takes_equal_numbers_only(capsys, what: str) -> None:
    """Catches a tolerance that is replaced by the default as it is 0."""
    pytest.importorskip("torch")
    code, out, err = call(
        capsys,
        "verify",
        what,
        "--ranks",
        "2",
        "--steps",
        "1",
        "--methods",
        "megatron_ts",
        "--tolerance",
        "0",
    )
    assert code == 1, out + err
    assert "tolerance 0e+00" in out
