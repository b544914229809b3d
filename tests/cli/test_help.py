"""Help texts: every command is listed, documented, and shows how it is called."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import sys

import pytest

import headrace
from headrace.cli import app, main

COMMANDS = [
    "train",
    "plan",
    "simulate",
    "forecast",
    "papers",
    "profile",
    "rehearse",
    "report",
    "verify",
    "export",
    "doctor",
    "config",
]


def shown(capsys, *arguments: str) -> str:
    """What a help prints to stdout."""
    try:
        code = main(list(arguments))
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert code == 0
    assert err == ""
    return out


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []], ids=str)
def test_the_top_level_lists_all_commands(arguments: list[str], capsys) -> None:
    """Catches a command that nobody can find."""
    out = shown(capsys, *arguments)
    assert re.findall(r"^\u2502 ([a-z]+) ", out, re.MULTILINE) == sorted(COMMANDS)
    assert sorted(name for name in app if not name.startswith("-")) == sorted(COMMANDS)


def test_the_version(capsys) -> None:
    """Catches a version that is written in two places."""
    assert shown(capsys, "--version").strip() == headrace.__version__


@pytest.mark.parametrize("name", COMMANDS)
def test_every_parameter_has_a_meaning(name: str) -> None:
    """Catches a flag that the help shows without a word."""
    for argument in app[name].assemble_argument_collection(parse_docstring=True):
        assert argument.parameter.help or not argument.show, argument.names


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_has_an_example(name: str, capsys) -> None:
    """Catches a help without an example, and examples that are printed as prose."""
    written = inspect.getdoc(app[name].default_command) or ""
    wanted = re.findall(rf"^\s*((?:\S.* )?headrace {name}\b.*)$", written, re.MULTILINE)
    assert wanted
    lines = [line.strip() for line in shown(capsys, name, "--help").splitlines()]
    for example in wanted:
        assert any(line and example.startswith(line) for line in lines), example
        assert example.count("headrace ") <= 1, example
    assert not any(line.count(f"headrace {name}") > 1 for line in lines)


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_can_be_called(name: str) -> None:
    """Catches an example with a flag that was renamed."""
    written = inspect.getdoc(app[name].default_command) or ""
    for line in re.findall(rf"headrace {name}\b(.*)$", written, re.MULTILINE):
        words = shlex.split(line.partition(" > ")[0])
        app.parse_args([name, *words], exit_on_error=False, print_error=False)


def test_config_prints_every_key(capsys) -> None:
    """Catches a reference that lacks a section, and a schema that is not JSON."""
    out = shown(capsys, "config")
    for key in (
        'run.name (string, "run")',
        "data.paths (list of string, required)",
        'devices.memory (string, "auto")',
    ):
        assert key in out
    schema = json.loads(shown(capsys, "config", "--schema"))
    assert set(schema["properties"]) >= {"run", "data", "model", "planner"}
    assert schema["required"] == ["data", "model"]


def test_a_reader_that_leaves_is_no_traceback() -> None:
    """Catches a BrokenPipeError where the output goes to ``head``."""
    command = f"{sys.executable} -m headrace config --schema | head -c 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "{"
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 141)


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "x.toml", "--batches", "1.5"],
        ["train", "x.toml", "--steps", "1.5"],
        ["train", "x.toml", "--ranks", "1e3"],
        ["verify", "native", "--ranks", "2", "2.5"],
        ["rehearse", "x.toml", "--sizes", "1.5"],
        ["plan", "x.toml", "--seed", "9" * 5000],
    ],
)
def test_whole_numbers_are_whole(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Catches one step where 1.5 were asked for."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code
    assert re.search("whole number|unable to convert", capsys.readouterr().err)
