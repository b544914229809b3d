"""Files of costs: whole, or as they were."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from headrace.errors import CostError

__all__ = ["save_whole"]


def save_whole(path: Path, text: str, what: str) -> None:
    """Write a file aside and rename it, its folder made when there is none. Raises CostError,
    naming ``what``, when the disk does not take it; what was there before is as it was."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise CostError(f"{what} {path}", got=error.strerror, wanted="a writable file")
