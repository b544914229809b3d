"""Jobs in a forked process of their own, so that signals and exits never reach pytest."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.comm.launch import World

__all__ = ["Command", "Job", "heard"]

_PATIENCE = 3  # times what is waited for at most: machines are slow, what hangs hangs longer


def heard(world: World) -> None:
    """Wait for two heartbeats of this rank: they say where the rank is, and between them its
    watcher has read where the rank before it was."""
    board, rank = world.watcher.board, world.rank
    last = board.last(rank)
    seen = last.count if last else 0
    while (last := board.last(rank)) is None or last.count < seen + 2:
        time.sleep(0.01)


class Job:
    """A session of its own running ``body(job)``: its exit code, its output, its notes."""

    def __init__(self, folder: Path, body: Callable[[Job], int]) -> None:
        self.folder = folder
        folder.mkdir()
        self.pid = os.fork()
        if self.pid == 0:
            self._live(body)

    def _live(self, body: Callable[[Job], int]) -> None:
        code = 99
        gc.freeze()
        try:
            self.pid = os.getpid()
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
                signal.signal(number, signal.SIG_DFL)
            for stream, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(self.folder / name, os.O_CREAT | os.O_WRONLY), stream)
            code = body(self)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)

    def note(self, name: str, text: object = "") -> None:
        """Called in the job: leave a note for the test, whole or not at all."""
        part = self.folder / f"{name}.part{os.getpid()}"
        part.write_text(str(text))
        part.rename(self.folder / name)

    def read(self, name: str, limit_s: float = 15.0) -> str:
        """Wait for a note and read it."""
        path = self.folder / name
        self.until(path.exists, f"note {name}", limit_s)
        return path.read_text()

    def until(self, holds: Callable[[], bool], what: str, limit_s: float) -> float:
        """Wait until ``holds()``; returns how long that took, fails after ``limit_s``, or what that
        is on a slow machine."""
        start = time.monotonic()
        while not holds():
            waited = time.monotonic() - start
            assert waited < _PATIENCE * limit_s, f"{what}: not within {waited} s: {self.err}"
            time.sleep(0.01)
        return time.monotonic() - start

    def wait(self, limit_s: float = 15.0) -> int:
        """The exit code, negative for a signal."""
        ended: list[int] = []

        def reaped() -> bool:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            ended.extend([os.waitstatus_to_exitcode(status)] if pid else [])
            return bool(pid)

        self.until(reaped, "end of the job", limit_s)
        return ended[0]

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text() if (self.folder / "out").exists() else ""

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text() if (self.folder / "err").exists() else ""

    @property
    def said(self) -> list[str]:
        """The lines of stderr that are ours."""
        return [line for line in self.err.splitlines() if line.startswith("headrace: ")]

    def left_over(self) -> list[int]:
        """Processes of the job that still run; zombies do not."""
        assert self.pid > 1, "session 0 is the kernel's"
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    stat = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                if int(stat[3]) == self.pid and stat[0] != "Z":  # session, state
                    found.append(int(entry.name))
        return found

    def clear(self) -> None:
        """Kill and reap whatever is left."""
        for pid in self.left_over():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


class Command(Job):
    """``program`` as a user starts it, ``sys.argv`` being ``arguments``: in a process of its own.

    It is a fork of this one, which has imported torch: a new interpreter takes four seconds to.
    """

    def __init__(self, program: Callable[[], object], *arguments: object) -> None:
        self.returncode: int | None = None
        self._place = tempfile.TemporaryDirectory()
        gc.freeze()  # what the fork never touches it shares with this process
        super().__init__(
            Path(self._place.name) / "job", lambda _: _ended(program, list(map(str, arguments)))
        )

    def poll(self) -> int | None:
        """The exit code, None while the program runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end; stdout and stderr. What still runs after ``timeout`` is killed."""
        try:
            self.until(lambda: self.poll() is not None, f"end; stdout:\n{self.out}", timeout)
        except AssertionError:
            self.clear()
            raise
        return self.out, self.err


def _ended(program: Callable[[], object], arguments: list[str]) -> int:
    """The exit code with which an interpreter that runs ``program`` ends."""
    sys.argv = arguments
    sys.stdin = open(os.devnull)  # noqa: SIM115
    sys.stdout, sys.stderr = (os.fdopen(number, "w") for number in (1, 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code: object = 0
    try:
        program()
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return int(code or 0)
