"""Benchmarks as a user starts them: in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    ended = subprocess.run(
        [sys.executable, str(_FOLDER / script), *map(str, options),
         *(["--json", str(file)] if file else [])],
        capture_output=True, text=True, timeout=110, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    numbers = json.loads(file.read_text()) if file and file.exists() else None
    return Ran(code=ended.returncode, out=ended.stdout, err=ended.stderr, numbers=numbers)
