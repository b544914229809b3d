"""Ranks as new processes, where this one cannot be forked.

CUDA that was begun, or only asked for, does not live on in a forked child, nor do threads on which
torch has computed. A new interpreter takes some seconds to import torch; then it is a rank like any
other. What it is to do reaches it through memory that it inherits, never through a file.
"""

from __future__ import annotations

import errno
import os
import pickle
import pickletools
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from headrace.comm.children import bury, live
from headrace.comm.exit import say
from headrace.errors import LaunchError

__all__ = ["execute"]

_RANK = f"""
import sys
sys.path[:] = sys.argv[4:]  # before anything of the working folder is taken for a module
import signal
for number in {int(signal.SIGINT)}, {int(signal.SIGHUP)}:  # the terminal sends them to all of us
    signal.signal(number, signal.SIG_IGN)
from headrace.comm.executed import begin
begin(*map(int, sys.argv[1:4]))
"""


def execute(
    ranks: int, body: Callable[[int], int], inherited: Sequence[int] = ()
) -> dict[int, int]:
    """Start ``ranks`` new processes that each run ``body(rank)`` and end with its code, as
    :func:`headrace.comm.children.fork` does; they have the open files ``inherited``.

    Raises LaunchError for a ``body`` that cannot be sent: it must be of a module, not a closure.
    """
    data = _pickled(body)
    children: dict[int, int] = {}
    try:
        memory = os.memfd_create("ranks")
        try:
            _write(memory, data)
            with _open_in_children((memory, *inherited)):
                for rank in range(ranks):
                    children[rank] = _spawned(memory, rank)
        finally:
            os.close(memory)
    except BaseException as error:
        bury(children)
        if not isinstance(error, OSError):
            raise
        hint = "fewer ranks" if error.errno in (errno.EAGAIN, errno.ENOMEM) else None
        raise LaunchError(f"rank {len(children)}", got=error, wanted="a process", hint=hint)
    return children


def _spawned(memory: int, rank: int) -> int:
    """The process of a rank."""
    folders = [os.path.abspath(path) for path in sys.path if isinstance(path, str)]
    words = [*map(str, (memory, rank, os.getpid())), *folders]
    return os.posix_spawn(sys.executable, [sys.executable, "-c", _RANK, *words], dict(os.environ))


def begin(memory: int, rank: int, parent: int) -> None:
    """What a new process does first and last: the body's part of ``rank``."""

    def body(rank: int) -> int:
        size = os.fstat(memory).st_size
        try:
            work: Callable[[int], int] = pickle.loads(os.pread(memory, size, 0))
        except (ImportError, AttributeError) as error:
            say(f"rank {rank}: the function to run cannot be imported in a new process ({error})")
            return 1
        os.close(memory)
        return work(rank)

    live(parent, rank, body)


def _pickled(body: Callable[[int], int]) -> bytes:
    try:
        data = pickle.dumps(body)
    except Exception as error:  # of any class that is asked for its state
        raise _unsendable(str(error)) from None
    if _names_main(data):
        raise _unsendable("of __main__")
    return data


def _unsendable(why: str) -> LaunchError:
    return LaunchError(
        "main function of ranks",
        got=f"one that cannot be sent to a new process ({why})",
        wanted="a function of an importable module: as CUDA or threads of torch have begun here, "
        "ranks cannot be forked",
        hint="start ranks before they begin, or with torchrun",
    )


def _names_main(data: bytes) -> bool:
    """Whether something is of the program itself, which is another one in a new process."""
    return any(value == "__main__" for _, value, _ in pickletools.genops(data))


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


@contextmanager
def _open_in_children(files: Sequence[int]) -> Iterator[None]:
    before = [os.get_inheritable(file) for file in files]
    try:
        for file in files:
            os.set_inheritable(file, True)
        yield
    finally:
        for file, inheritable in zip(files, before, strict=True):
            os.set_inheritable(file, inheritable)
