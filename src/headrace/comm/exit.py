"""Ending a process, and what it says before: whole lines, in one write each.

So lines of different ranks never mix.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from contextlib import suppress

__all__ = ["end", "flush", "say", "say_traceback"]


def say(text: str) -> None:
    """One line ``headrace: text`` on stderr, in one write. Needs no lock: any thread may call."""
    with suppress(OSError):  # stderr may be closed; the exit code still tells
        os.write(2, f"headrace: {text}\n".encode(errors="replace"))


def say_traceback(rank: int, error: BaseException) -> None:
    """The traceback of ``error``, every line marked with its rank, in one write."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    with suppress(OSError):
        os.write(2, "".join(f"rank {rank}| {line}\n" for line in lines).encode(errors="replace"))


def flush(limit_s: float = 0.5) -> None:
    """Write out what Python still buffers, giving up after ``limit_s``: another thread may hold
    the buffer in a write that never ends."""
    thread = threading.Thread(target=_flush, daemon=True)
    thread.start()
    thread.join(limit_s)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or its reader is gone
            stream.flush()


def end(code: int) -> None:
    """End the process with ``code`` now, from any thread, whatever its other threads wait for."""
    try:
        flush()
    finally:
        os._exit(code)
