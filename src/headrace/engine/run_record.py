"""What the first rank of a run writes down: journal, trackers, facts and what was learnt."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import headrace
from headrace.config import Config
from headrace.costs.calibration import Calibration
from headrace.costs.sources.measured import fit_parts
from headrace.data import summarise
from headrace.engine.cost_cache import calibration_path
from headrace.engine.drawn_steps import DrawnSteps
from headrace.engine.journal import Journal
from headrace.engine.rank import Rank
from headrace.engine.trackers import Tracker, make_trackers
from headrace.errors import CostError
from headrace.spec.architecture import parameter_count
from headrace.spec.profile import Profile
from headrace.spec.step import Step

__all__ = ["RunRecord", "drawn_steps"]


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """The files of a run's folder besides checkpoints, from the step it goes on from."""

    rank: Rank
    folder: Path
    first: int
    _journal: Journal = field(init=False)
    _trackers: list[Tracker] = field(init=False)

    def __post_init__(self) -> None:
        config = self.rank.config
        self._journal = Journal(self.folder, self.first)
        self._trackers = make_trackers(
            self.folder,
            tensorboard=config.report.tensorboard,
            wandb=config.report.wandb,
            name=config.run.name,
            config=config.to_json(),
        )

    def begin(self, fingerprint: str, profile: Profile | None) -> None:
        """Write the facts of a run that begins; ``fingerprint`` is that of its costs, ``profile``
        what they were fitted to, where it was measured or read now."""
        if self.first == 0 or not (self.folder / "run.json").exists():
            self._journal.facts(_facts(self.rank, fingerprint, profile))

    def step(self, step: Step, notices: tuple[str, ...]) -> None:
        """Write a finished step: metrics, plan and, for some steps, timelines."""
        self._journal.step(step, notices)
        for tracker in self._trackers:
            tracker.log(step.metrics)

    def keep(self, known: Calibration) -> None:
        """Write what was learnt, for the report of this run and for those to come."""
        try:
            known.save(self.folder / "calibration.json")
            known.save(calibration_path(self.rank.config, known.fingerprint))
        except CostError as error:
            self.rank.say(f"what was learnt about costs is not kept ({error})")

    def close(self) -> None:
        """Close all files."""
        self._journal.close()
        for tracker in self._trackers:
            tracker.close()


def drawn_steps(config: Config) -> DrawnSteps:
    """The steps whose timelines a run records."""
    return DrawnSteps(wanted=config.report.timelines, steps=config.run.steps)


def _facts(rank: Rank, fingerprint: str, profile: Profile | None) -> dict[str, Any]:
    config, summary = rank.config, summarise(rank.data.corpus)
    fits = fit_parts(profile) if profile else []
    errors: dict[str, dict[str, dict[str, float]]] = {"forward": {}, "backward": {}}
    for fit in fits:
        found = {"median": fit.error.median, "worst": fit.error.worst}
        errors[fit.part][f"p{fit.p} {fit.option}"] = found
    return {
        "format": 1,
        "name": config.run.name,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "headrace": headrace.__version__,
        "machine": rank.machine,
        "ranks": rank.world.ranks,
        "seed": config.run.seed,
        "config": config.to_json(),
        "architecture": rank.storage.architecture.to_json(),
        "parameters": parameter_count(rank.storage.architecture),
        "corpus": {
            **summary.facts(),
            "fingerprint": rank.data.corpus.fingerprint,
            "context": config.data.context,
        },
        "costs": {
            "fingerprint": fingerprint,
            "error": errors,
            "points": [point for fit in fits for point in fit.to_json()],
        },
        "memory": {"capacity_bytes": rank.cluster.memory_bytes},
    }
