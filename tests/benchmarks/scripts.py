"""Benchmarks as a user starts them: in a process of their own."""

from __future__ import annotations

import json
import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import Command

__all__ = ["Ran", "run"]

_FOLDER = Path(__file__).parents[2] / "benchmarks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A script that has ended; ``numbers`` is what it wrote to ``--json``."""

    code: int
    out: str
    err: str
    numbers: dict[str, Any] | None = None


def run(script: str, *options: object, json_in: Path | None = None) -> Ran:
    file = json_in / "deeper" / f"{script}.json" if json_in else None
    path = str(_FOLDER / script)
    more = ["--json", file] if file else []
    command = Command(lambda: runpy.run_path(path, run_name="__main__"), path, *options, *more)
    out, err = command.communicate(110)
    assert command.returncode is not None
    numbers = json.loads(file.read_text()) if file and file.exists() else None
    return Ran(code=command.returncode, out=out, err=err, numbers=numbers)
