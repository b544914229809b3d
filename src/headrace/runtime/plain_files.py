"""Files that can be opened without waiting for a writer, and read without end."""

from __future__ import annotations

import stat
from pathlib import Path

from headrace.errors import CheckpointError

__all__ = ["require_plain"]


def require_plain(path: Path, *, most: int) -> int:
    """The bytes of a file. Raises CheckpointError for a pipe, a device and more than ``most``
    bytes, OSError when there is none."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(str(path), got="a pipe, device or folder", wanted="a plain file")
    if status.st_size > most:
        raise CheckpointError(
            str(path), got=f"{status.st_size} bytes", wanted=f"{most}", hint="the file is too long"
        )
    return status.st_size
