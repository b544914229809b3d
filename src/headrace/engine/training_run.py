"""Folders of runs: a new one, the one to continue, and what a run has left in it."""

from __future__ import annotations

import fcntl
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.config.model import JobConfig
from headrace.errors import ConfigError
from headrace.notebook import curve_html, table_html
from headrace.report import read_run, summary_text, write_report

if TYPE_CHECKING:
    from headrace.engine.checkpoints import Checkpoints

__all__ = ["TrainingRun", "choose_folder", "lock_wait_s", "locked"]

_LOCK_S = 2.0
"""Seconds to wait for the lock of a folder whose run is just ending."""

_DEAD_LOCK_S = 120.0
"""Seconds to wait for it when a job is started again after a machine died."""

_LEAST_BYTES = 1 << 16
"""Free bytes that a run needs to start: with less it could not write its record."""


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A run in its folder, finished or not.

    Attributes:
        folder: The folder.

    Example:
        >>> run = hr.TrainingRun("runs/my-run")
    """

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of every step. Raises DataError when the folder holds no run."""
        return tuple(step.loss for step in read_run(self.folder).steps)

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints of the run; needs torch."""
        from headrace.engine.checkpoints import Checkpoints

        return Checkpoints(folder=self.folder)

    def summary(self) -> str:
        """Say what the run did.

        Returns:
            About eleven lines of a name and a text.

        Raises:
            DataError: When the folder holds no run, or one that cannot be read.
        """
        return summary_text(self.folder)

    def report(self, out: str | Path | None = None) -> Path:
        """Write the report, one HTML file with pictures.

        Args:
            out: The file; ``report.html`` in the folder when left out.

        Returns:
            Its path.

        Raises:
            DataError: When the folder holds no run, or the file cannot be written.
            MissingExtra: Without the packages of the extra ``report``.
        """
        return write_report(self.folder, None if out is None else Path(out))

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        losses = [loss for loss in self.losses if isfinite(loss)]
        return table_html(self.summary()) + curve_html(losses, "loss by step")


def choose_folder(config: JobConfig, out: Path | None, *, resume: bool) -> Path:
    """The folder of a run: ``out``, or a new one under run.out, or the newest one to resume.

    Raises ConfigError for a folder that already holds a run when it is not resumed, for nothing to
    resume, and for a folder that takes no files.
    """
    folder = _choose_folder(config, out, resume=resume)
    # Ranks of several machines name a new folder by their own clocks: only one of these is made.
    _require_writable(Path(config.run.out) if out is None and not resume else folder)
    return folder


def _require_writable(folder: Path) -> None:
    """Raise ConfigError, before anything that takes long, where no file can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_LEAST_BYTES))
    except OSError as error:
        raise ConfigError(
            f"folder {folder}",
            got=error.strerror,
            wanted="a folder that takes the run's files",
            hint="choose another --out (out=...), or make room",
        )


def _choose_folder(config: JobConfig, out: Path | None, *, resume: bool) -> Path:
    """The folder of the run: the one to continue, the given one, or a new one with the time in its
    name; raises ConfigError where a new run would overwrite one."""
    if resume:
        return out if out is not None else _newest(config)
    if out is None:
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        return Path(config.run.out) / f"{config.run.name}-{stamp}"
    if os.path.exists(out / "run.json"):  # False for a name that no file can have
        raise ConfigError(
            f"folder {out}",
            got="a run",
            wanted="an empty or new folder",
            hint="continue it with --resume (resume=True), or choose another --out (out=...)",
        )
    return out


def _newest(config: JobConfig) -> Path:
    """The newest folder of a run with the configuration's name. Raises ConfigError if none."""
    found = sorted(Path(config.run.out).glob(f"{config.run.name}-*/run.json"))
    if not found:
        raise ConfigError(
            f"runs named {config.run.name} in {config.run.out}",
            got="none to resume",
            wanted="at least one",
            hint="name its folder with --out (out=...)",
        )
    return found[-1].parent


def lock_wait_s(attempt: int) -> float:
    """Seconds to wait for the lock of a run's folder in the ``attempt`` of a job, counted from 0:
    more when it was restarted, as a shared file system keeps the lock of a machine that died for a
    while."""
    return _DEAD_LOCK_S if attempt else _LOCK_S


@contextmanager
def locked(folder: Path, *, wait_s: float) -> Iterator[None]:
    """Keep other runs out of ``folder`` while the context, or this process, lasts: two that write
    into one folder spoil it for both. Waits ``wait_s`` for one that is just ending.

    Raises ConfigError where another run goes on, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "run.lock").open("a+")
    except OSError as error:
        raise ConfigError(f"folder {folder}", got=error.strerror, wanted="a place for a run")
    with file:
        deadline = time.monotonic() + wait_s
        # The lock is held by this process and not by its children: a child that plans ahead may
        # outlive a killed rank, and must not keep the folder locked.
        while not _lock(file.fileno()):
            if time.monotonic() > deadline:
                file.seek(0)
                raise ConfigError(
                    f"folder {folder}",
                    got=f"a run that goes on ({file.read().strip()})",
                    wanted="one run at a time",
                    hint="wait for its end, or stop it and resume",
                )
            time.sleep(0.1)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        yield


def _lock(number: int) -> bool:
    """Take the lock of the open file with this descriptor for this process, without waiting;
    returns whether no other process has it."""
    try:
        fcntl.lockf(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system that knows no locks: better a run without than none
        return True
    return True
