"""The journal of a run: what its folder holds besides checkpoints, one JSON object per line.

run.json          the run's facts, once
metrics.jsonl     one line per step
plans.jsonl       the plan of each step
timelines.jsonl   measured and predicted rows of some steps
calibration.json  what was learnt about the costs, written by the command that trains
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from headrace.errors import HeadraceError
from headrace.spec.step import Step

__all__ = ["Journal"]

_FILES = ("metrics", "plans", "timelines")


class Journal:
    """Appends to the files of a run's folder; only the first rank holds one.

    ``first_step`` is the step the run goes on from: lines of that step and later, left by an
    attempt that was killed after its last checkpoint, are dropped. Raises HeadraceError, as each
    method but ``close``, when the folder does not take it.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        self.folder = folder
        self._files: dict[str, IO[str]] = {}
        with _said(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name in _FILES:
                path = folder / f"{name}.jsonl"
                if path.exists():
                    _drop_from(path, first_step)
                self._files[name] = path.open("a", encoding="utf-8")

    def facts(self, facts: dict[str, Any]) -> None:
        """Write run.json."""
        path = self.folder / "run.json"
        with _said(path):
            _write_aside(path, json.dumps(facts, indent=1) + "\n")

    def metrics(self, row: dict[str, Any]) -> None:
        """Append a step's metrics."""
        self._append("metrics", row)

    def plan(self, row: dict[str, Any]) -> None:
        """Append a step's plan."""
        self._append("plans", row)

    def timelines(self, row: dict[str, Any]) -> None:
        """Append a step's timelines."""
        self._append("timelines", row)

    def step(self, step: Step, notices: Sequence[str]) -> None:
        """Append a finished step: metrics, plan and, where it is drawn, timelines."""
        told = {"notices": list(notices)} if notices else {}
        self.metrics(dict(step.metrics) | told)
        self.plan({"step": step.number} | step.plan.to_json())
        if step.measured is None or step.predicted is None:
            return
        static = step.best_static.predicted if step.best_static is not None else None
        self.timelines(
            {
                "step": step.number,
                "measured": step.measured.to_json(),
                "predicted": step.predicted.to_json(),
                "static": static.to_json() if static is not None else None,
            }
        )

    def close(self) -> None:
        """Close all files. What a full disk did not take was told when it was written."""
        for file in self._files.values():
            with suppress(OSError):
                file.close()

    def _append(self, name: str, row: dict[str, Any]) -> None:
        with _said(self.folder / f"{name}.jsonl"):
            self._files[name].write(json.dumps(row) + "\n")
            self._files[name].flush()


@contextmanager
def _said(path: Path) -> Iterator[None]:
    """What the disk says, in our words."""
    try:
        yield
    except OSError as error:
        raise HeadraceError(
            f"journal {path}",
            got=error.strerror or "an error",
            hint="free some space and continue with --resume",
        )


def _drop_from(path: Path, first_step: int) -> None:
    kept = []
    for line in path.read_bytes().decode(errors="replace").splitlines():
        try:
            if json.loads(line)["step"] < first_step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue  # the last line of a killed run may be torn
    _write_aside(path, "".join(kept))


def _write_aside(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
