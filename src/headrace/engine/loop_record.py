"""What a loop writes down for reports: its facts, and a line for every step."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import headrace
from headrace.costs.calibration import Calibration
from headrace.costs.sources.measured import fit_parts
from headrace.engine.journal import Journal
from headrace.engine.loop_planning import LoopSetup, ModelCosts
from headrace.engine.run_folder import TrainingRun
from headrace.engine.sample_order import SampleOrder
from headrace.errors import CostError
from headrace.native.machine import machine_facts
from headrace.spec.step import Step

__all__ = ["LoopRecord"]


class LoopRecord:
    """The folder of a loop on the first rank: ``out``, or a temporary one where that is None."""

    def __init__(self, out: str | Path | None, setup: LoopSetup) -> None:
        self._temporary = tempfile.TemporaryDirectory() if out is None else None
        self.folder = Path(self._temporary.name if self._temporary else out or "")
        self._setup = setup
        self._journal: Journal | None = None

    def begin(self, first: int, order: SampleOrder, found: ModelCosts) -> None:
        """Begin with step ``first``; lines of later steps are dropped."""
        self._journal = Journal(self.folder, first)
        if first == 0 or not (self.folder / "run.json").exists():
            self._journal.facts(_facts(self.folder, self._setup, order, found))

    def step(self, step: Step, notices: tuple[str, ...]) -> None:
        """Write a finished step."""
        assert self._journal is not None, "begun"
        self._journal.step(step, notices)

    def keep(self, known: Calibration) -> None:
        """Write what was learnt about the costs."""
        try:
            known.save(self.folder / "calibration.json")
        except CostError as error:
            self._setup.say(f"what was learnt about costs is not kept ({error})")

    @property
    def run(self) -> TrainingRun:
        """What was written, as that of any run."""
        return TrainingRun(self.folder)

    def close(self) -> None:
        """Close the files, and let go of a temporary folder."""
        if self._journal is not None:
            self._journal.close()
        if self._temporary is not None:
            self._temporary.cleanup()


def _facts(folder: Path, setup: LoopSetup, order: SampleOrder, found: ModelCosts) -> dict[str, Any]:
    fits = fit_parts(found.profile) if found.profile else []
    errors: dict[str, dict[str, dict[str, float]]] = {"forward": {}, "backward": {}}
    for fit in fits:
        errors[fit.part][f"p{fit.p} {fit.option}"] = {
            "median": fit.error.median,
            "worst": fit.error.worst,
        }
    return {
        "format": 1,
        "name": folder.name,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "headrace": headrace.__version__,
        "machine": machine_facts(setup.device),
        "ranks": setup.groups.ranks,
        "seed": setup.seed,
        "config": {"model": {"name": found.costs.shape.name}, "loop": "attached"},
        "parameters": found.costs.shape.elements,
        "corpus": order.facts(),
        "costs": {
            "fingerprint": found.costs.fingerprint,
            "error": errors,
            "points": [point for fit in fits for point in fit.to_json()],
        },
        "memory": {"capacity_bytes": found.costs.cluster.memory_bytes},
    }
