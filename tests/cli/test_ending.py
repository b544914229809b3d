"""How the command line ends its process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import headrace
from headrace.cli import main

SOURCE = Path(headrace.__file__).parents[1]


def ended(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """An interpreter that ran ``code``, with modules of these folders first."""
    path = f"import sys; sys.path[:0] = {[*map(str, paths), str(SOURCE)]}\n"
    return subprocess.run(
        [sys.executable, "-c", path + code], check=False, capture_output=True, text=True, timeout=60
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
