"""Waiting for work without outliving who gives it."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["asked"]


def asked(pipe: Connection, parent: int) -> Any:
    """What comes next through the pipe; None when the process that started this one has gone,
    which the pipe does not tell, as brothers hold its other end too."""
    while not pipe.poll(2):
        if os.getppid() != parent:
            return None
    try:
        return pipe.recv()
    except EOFError:
        return None
