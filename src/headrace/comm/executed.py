"""Ranks as new processes, where this one cannot be forked.

CUDA that was begun, or only asked for, does not live on in a forked child, nor do threads on which
torch has computed. A new interpreter takes some seconds to import torch; then it is a rank like any
other. What it is to do reaches it through memory that it inherits, never through a file.
"""

from __future__ import annotations

import json
import os
import pickle
import pickletools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from headrace.comm.children import bury, live
from headrace.errors import LaunchError

__all__ = ["execute"]

_RANK = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[4]); "
    "from headrace.comm.executed import begin; begin(*map(int, sys.argv[1:4]))"
)


def execute(
    ranks: int, body: Callable[[int], int], inherited: Sequence[int] = ()
) -> dict[int, int]:
    """Start ``ranks`` new processes that each run ``body(rank)`` and end with its code, as
    :func:`headrace.comm.children.fork` does; they have the open files ``inherited``.

    Raises LaunchError for a ``body`` that cannot be sent: it must be of a module, not a closure.
    """
    memory = os.memfd_create("ranks")
    children: dict[int, int] = {}
    try:
        _write(memory, _pickled(body))
        with _open_in_children((memory, *inherited)):
            for rank in range(ranks):
                words = map(str, (memory, rank, os.getpid(), json.dumps(sys.path)))
                arguments = [sys.executable, "-c", _RANK, *words]
                children[rank] = os.posix_spawn(sys.executable, arguments, dict(os.environ))
    except OSError as error:
        bury(children)
        raise LaunchError(
            f"rank {len(children)}", got=error, wanted="a process", hint="fewer ranks"
        )
    finally:
        os.close(memory)
    return children


def begin(memory: int, rank: int, parent: int) -> None:
    """What a new process does first and last: the body's part of ``rank``."""

    def body(rank: int) -> int:
        size = os.fstat(memory).st_size
        work: Callable[[int], int] = pickle.loads(os.pread(memory, size, 0))
        os.close(memory)
        return work(rank)

    live(parent, rank, body)


def _pickled(body: Callable[[int], int]) -> bytes:
    try:
        data = pickle.dumps(body)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _cannot_have(str(error)) from None
    if _names_main(data):
        raise _cannot_have("of __main__")
    return data


def _cannot_have(why: str) -> LaunchError:
    return LaunchError(
        "main function of ranks", got=f"one that no new process can have ({why})",
        wanted="a value of a module: CUDA or torch's threads keep this process from a fork",
        hint="start ranks before they begin, or with torchrun",
    )  # fmt: skip


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
