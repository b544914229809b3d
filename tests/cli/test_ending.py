"""How the command line ends its process."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from headrace.cli import main

SOURCE = Path(headrace.__file__).parents[1]


def ended(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """An interpreter that ran ``code``, with modules of these folders first."""
    path = f"import sys; sys.path[:0] = {[*map(str, paths), str(SOURCE)]}\n"
    return subprocess.run(
        [sys.executable, "-c", path + code], check=False, capture_output=True, text=True, timeout=60
    )


def shell(line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What bash made of ``headrace LINE``."""
    return subprocess.run(
        ["bash", "-c", f"{shlex.quote(sys.executable)} -m headrace {line}"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(SOURCE), **variables},
    )


def test_control_c_while_modules_are_read(tmp_path: Path) -> None:
    """Would catch a traceback of whatever module was read when a user changed his mind."""
    (tmp_path / "cyclopts.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)\n"
    )
    done = ended("import headrace.__main__ as m; m.run()", tmp_path)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_the_process_ends_at_once_and_says_all() -> None:
    """Would catch seconds in which torch is taken apart, when one more Ctrl-C ends in a traceback,
    and output that is lost because it was not written yet."""
    done = ended("""
import atexit, headrace.__main__ as m
atexit.register(print, "taken apart")
sys.argv = ["headrace", "config"]
m.run()
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().splitlines()[-1].strip()
    assert len(done.stdout) > 2000
    assert "taken apart" not in done.stdout


def test_a_mistake_is_told_once_on_a_machine(monkeypatch, capsys, tmp_path: Path) -> None:
    """Would catch one mistake in a configuration told by each of the ranks that torchrun starts."""
    told = []
    for rank in range(3):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert main(["train", str(tmp_path / "nowhere.toml")]) == 2
        told.append(capsys.readouterr().err.count("nowhere.toml") > 0)
    assert told == [True, False, False]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("buffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_output_that_cannot_be_written_is_an_error(buffered: str) -> None:
    """Would catch the exit code of success, or a traceback, where the disk is full."""
    done = shell("config > /dev/full", PYTHONUNBUFFERED=buffered)
    assert (done.returncode, done.stderr) == (
        2,
        f"error: output: got {os.strerror(errno.ENOSPC)}\n",
    )


def test_closed_output_is_an_error() -> None:
    """Would catch a traceback, or success, where nobody could read what was written."""
    done = shell("config >&-")
    assert (done.returncode, done.stderr) == (2, f"error: output: got {os.strerror(errno.EBADF)}\n")
    assert shell("plan nowhere.toml 2>&-").returncode == 2


@pytest.mark.parametrize("command", ["config", "--help"])
def test_a_reader_that_has_seen_enough(command: str) -> None:
    """Would catch the exit code of a failed check for tables whose reader has ended."""
    done = shell(f"{command} | true; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
