"""A process in which the cases of one attack run, so that what hangs or dies is only a case."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from attacks.asked import asked
from attacks.attack import NO_START, Attack, Outcome, case_rng

__all__ = ["Worker"]

_BEGIN_S = 300.0
_MEMORY_BYTES = 8 << 30
_TOLD = 2000  # characters of what was printed


class Worker:
    """Runs cases of an attack by their numbers; starts its process when the first one comes, and
    anew after a case that hung or died."""

    def __init__(self, attack: Attack, seed: int) -> None:
        self.attack, self.seed = attack, seed
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._folder = Path()

    def run(self, number: int) -> Outcome:
        """The outcome of a case."""
        if self._pipe is None:
            error = self._start()
            if error:
                return Outcome(verdict=NO_START, survived=False, words=error)
        assert self._pipe is not None
        try:
            self._pipe.send(number)
            if self._pipe.poll(self.attack.limit_s):
                return self._pipe.recv()
            words, verdict = f"no answer within {self.attack.limit_s:g} s", "hung"
        except (EOFError, ConnectionError):
            words, verdict = self._end_of_process(), "died"
        words = f"{words}\n{self._printed()}"
        self.close()
        return Outcome(verdict=verdict, survived=False, words=words)

    def close(self) -> None:
        """End the process and all that it started; its folder goes."""
        if self._process is None or self._pipe is None:
            return
        with suppress(psutil.Error):
            mine = psutil.Process(self._process.pid)
            for process in [*mine.children(recursive=True), mine]:
                with suppress(psutil.Error):
                    process.send_signal(signal.SIGCONT)
                    process.kill()
        self._process.join()
        self._pipe.close()
        self._process = self._pipe = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> str:
        """Start the process and wait until it is ready; what went wrong, if anything."""
        self._folder = Path(tempfile.mkdtemp(prefix=f"attack-{self.attack.name}-"))
        here, there = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(
            target=_work, args=(self.attack, self.seed, self._folder, there)
        )
        self._process.start()
        there.close()
        self._pipe = here
        try:
            error: str = here.recv() if here.poll(_BEGIN_S) else f"not ready in {_BEGIN_S:g} s"
        except EOFError:
            error = self._end_of_process()
        if error:
            error = f"{error}\n{self._printed()}"
            self.close()
        return error

    def _end_of_process(self) -> str:
        assert self._process is not None
        self._process.join(5)
        return f"its process ended with exit code {self._process.exitcode}"

    def _printed(self) -> str:
        with suppress(OSError):
            return (self._folder / "printed").read_text(errors="replace")[-_TOLD:].strip()
        return ""


def _work(attack: Attack, seed: int, folder: Path, pipe: Connection) -> None:
    """The life of the process."""
    runner = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _contain(folder)
    try:
        inside = folder / "work"
        inside.mkdir()
        with attack.begin(inside) as case:
            pipe.send("")
            while (number := asked(pipe, runner)) is not None:
                try:
                    outcome = case(case_rng(seed, attack.name, number))
                except Exception:
                    words = traceback.format_exc()[-_TOLD:]
                    outcome = Outcome(verdict="traceback", survived=False, words=words)
                pipe.send(outcome)
    except BaseException:
        with suppress(OSError):
            pipe.send(traceback.format_exc()[-_TOLD:])
    if os.getppid() != runner:
        shutil.rmtree(folder, ignore_errors=True)  # nobody else will
    os._exit(0)


def _contain(folder: Path) -> None:
    """What is printed goes to a file, temporary files to the folder, and memory has an end."""
    printed = os.open(folder / "printed", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    tempfile.tempdir = str(folder)
    limit = psutil.Process().memory_info().vms + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    # A disk full of one corpus's cache, or of a file that never ends, is a case that fails.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
