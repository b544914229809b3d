"""What a process does that plans for :mod:`headrace.planning.ahead`.

A thread receives, the main thread plans, another thread sends, so that neither a slow planner nor a
reader who is busy training holds up the other. Each second without an item the process says that it
lives, unless what it said is not taken. It ends at once when its connection is
closed or its parent is gone, whatever it is doing. In a small file it notes what it is planning, so
that its death can be laid at the right door: what it has planned may not be sent yet.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from struct import Struct
from threading import Thread
from typing import Any

__all__ = ["ALIVE", "Answer", "command", "noted", "serve"]

Answer = tuple[int, bool, bytes]
"""(number of the item, whether it was planned, the pickled plan or error)"""

ALIVE: Answer = (-1, True, b"")
"""A sign of life."""

_NUMBER = Struct("q")
_LOOK_S = 1.0  # between two looks whether the parent is still there


def command(fd: int, note: int) -> list[str]:
    """The command line of a producer that talks over the file descriptor ``fd`` and notes what it
    plans in that of a file, ``note``. It does not import the main program, as multiprocessing
    would, and with it torch."""
    text = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from headrace.planning.producing import serve; serve({fd}, {note}, {os.getpid()})"
    )
    return [sys.executable, "-c", text]


def noted(note: int) -> int:
    """The number of the item that a producer began last, -1 for none."""
    data = os.pread(note, _NUMBER.size, 0)
    return int(_NUMBER.unpack(data)[0]) if len(data) == _NUMBER.size else -1


def serve(fd: int, note: int, parent: int) -> None:
    """Plan what comes over ``fd``: first the pickled function, then (number, pickled item)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all of us
    connection = Connection(fd)
    plan = _received_function(connection)
    items: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
    answers: SimpleQueue[Answer] = SimpleQueue()
    Thread(target=_receive, args=(connection, parent, items, answers), daemon=True).start()
    Thread(target=_send, args=(connection, answers), daemon=True).start()
    while True:
        number, item = items.get()
        os.pwrite(note, _NUMBER.pack(number), 0)
        answers.put(_answer(plan, number, item))


def _received_function(connection: Connection) -> Callable[[Any], Any]:
    """The function, or one that raises why it cannot be had."""
    try:
        data = connection.recv_bytes()
    except (EOFError, OSError):
        os._exit(0)
    try:
        return pickle.loads(data)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"

    def unknown(_: Any) -> Any:
        raise ImportError(f"the function cannot be loaded where plans are made ({text})")

    return unknown


def _answer(plan: Callable[[Any], Any], number: int, item: bytes) -> Answer:
    try:
        return number, True, pickle.dumps(plan(pickle.loads(item)))
    except Exception as error:
        data = b""
        with suppress(Exception):  # some errors cannot be pickled, or not read back
            data = pickle.dumps(error)
            pickle.loads(data)
            return number, False, data
        return number, False, pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))


def _receive(
    connection: Connection,
    parent: int,
    items: SimpleQueue[tuple[int, bytes]],
    answers: SimpleQueue[Answer],
) -> None:
    try:
        while os.getppid() == parent:
            if connection.poll(_LOOK_S):
                items.put(connection.recv())
            elif answers.empty():
                answers.put(ALIVE)
    except (EOFError, OSError):
        pass
    os._exit(0)


def _send(connection: Connection, answers: SimpleQueue[Answer]) -> None:
    try:
        while True:
            connection.send(answers.get())
    except OSError:
        os._exit(0)
