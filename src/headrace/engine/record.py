"""The record of a run: what its folder holds besides checkpoints, one JSON object per line.

run.json          the run's facts, once
metrics.jsonl     one line per step
plans.jsonl       the plan of each step
timelines.jsonl   measured and predicted rows of some steps
calibration.json  what was learnt about the costs
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import IO, Any, Protocol

import headrace
from headrace.costs.calibration import Calibration
from headrace.costs.sources.measured import fit_parts
from headrace.engine.listener import tell
from headrace.engine.training_run import TrainingRun
from headrace.errors import HeadraceError, MissingExtra
from headrace.spec.profile import Profile
from headrace.spec.step import Step
from headrace.units import counted

__all__ = [
    "DrawnSteps",
    "EarlyAndRare",
    "Journal",
    "RunRecord",
    "Tracker",
    "make_trackers",
    "require_trackers",
    "run_facts",
    "steps_done",
]


class RunRecord:
    """The files of a run on its first rank, from the step that it goes on from.

    Args:
        folder: Where they are written; a temporary folder, gone when the record is closed, where it
            is None.
        trackers: Others that take the metrics of every step.
        calibrations: More files that what was learnt is written to, for runs to come.
    """

    def __init__(
        self,
        folder: str | Path | None,
        *,
        trackers: Sequence[Tracker] = (),
        calibrations: Sequence[Path] = (),
    ) -> None:
        """Make a temporary folder where ``folder`` is None; no file is opened before
        :meth:`begin`."""
        self._temporary = tempfile.TemporaryDirectory() if folder is None else None
        self.folder = Path(self._temporary.name if self._temporary else folder or "")
        self._trackers, self._calibrations = trackers, calibrations
        self._journal: Journal | None = None

    @property
    def run(self) -> TrainingRun:
        """The run that was written, as any run is read."""
        return TrainingRun(self.folder)

    def begin(self, first: int, facts: Mapping[str, Any]) -> None:
        """Open the files to go on with step ``first``: lines of it and of later steps are dropped,
        and ``facts`` are written where the run is new."""
        self._journal = Journal(self.folder, first)
        if first == 0 or not (self.folder / "run.json").exists():
            self._journal.facts({**facts, "name": facts.get("name") or self.folder.name})

    def step(self, step: Step, notices: Sequence[str]) -> None:
        """Write a finished step: metrics, plan and, where it is drawn, timelines."""
        assert self._journal is not None, "the record was begun"
        self._journal.step(step, notices)
        for tracker in self._trackers:
            tracker.log(step.metrics)

    def keep(self, known: Calibration) -> None:
        """Write what was learnt about the costs to calibration.json and the other files for it.
        Raises CostError when the disk does not take it."""
        for path in (self.folder / "calibration.json", *self._calibrations):
            known.save(path)

    def close(self) -> None:
        """Close all files, and delete a temporary folder."""
        if self._journal is not None:
            self._journal.close()
        for tracker in self._trackers:
            tracker.close()
        if self._temporary is not None:
            self._temporary.cleanup()


def run_facts(
    *,
    name: str,
    machine: Mapping[str, Any],
    ranks: int,
    seed: int,
    config: Mapping[str, Any],
    parameters: int,
    corpus: Mapping[str, Any],
    fingerprint: str,
    profile: Profile | None,
    memory_bytes: int,
    compared: str = "",
) -> dict[str, Any]:
    """The facts of a run for its report, as JSON: what is trained, on what, and what it costs.

    ``fingerprint`` is that of the costs, ``profile`` what they were fitted to, where it was read or
    measured now; ``memory_bytes`` is what a rank may use; ``compared`` says how far the forecast
    from two layers was from the whole model, where that was measured now.
    """
    fits = fit_parts(profile) if profile else []
    # By part, then by group size and layer option.
    errors: dict[str, dict[str, dict[str, float]]] = {"forward": {}, "backward": {}}
    for fit in fits:
        error = {"median": fit.error.median, "worst": fit.error.worst}
        errors[fit.part][f"p{fit.p} {fit.option}"] = error
    return {
        "format": 1,
        "name": name,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "headrace": headrace.__version__,
        "machine": dict(machine),
        "ranks": ranks,
        "seed": seed,
        "config": dict(config),
        "parameters": parameters,
        "corpus": dict(corpus),
        "costs": {
            "fingerprint": fingerprint,
            "compared": compared,
            "error": errors,
            "points": [point for fit in fits for point in fit.to_json()],
        },
        "memory": {"capacity_bytes": memory_bytes},
    }


_FILES = ("metrics", "plans", "timelines")
"""Names, without their ending, of the files that have a line for each step."""


class Journal:
    """Appends to the files of a run's folder; only the first rank holds one.

    ``first_step`` is the step the run goes on from: lines of that step and later, left by an
    attempt that was killed after its last checkpoint, are dropped. Where it is 0, the files of a
    run that was there are moved to a folder ``before-N`` within it, which is printed. This and
    every method but ``close`` raise HeadraceError when a file cannot be written.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        """Open the files to append, once lines of ``first_step`` and later ones are dropped."""
        self.folder = folder
        self._files: dict[str, IO[str]] = {}
        with _disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if first_step == 0:
                _keep_former(folder)
            for name in _FILES:
                path = folder / f"{name}.jsonl"
                if path.exists():
                    _drop_from(path, first_step)
                self._files[name] = path.open("a", encoding="utf-8")

    def facts(self, facts: dict[str, Any]) -> None:
        """Write the facts of the run to run.json."""
        path = self.folder / "run.json"
        with _disk_errors(path):
            _write_aside(path, json.dumps(facts, indent=1) + "\n")

    def metrics(self, row: dict[str, Any]) -> None:
        """Append the metrics of one step to metrics.jsonl."""
        self._append("metrics", row)

    def plan(self, row: dict[str, Any]) -> None:
        """Append the plan of one step to plans.jsonl."""
        self._append("plans", row)

    def timelines(self, row: dict[str, Any]) -> None:
        """Append the timelines of one step to timelines.jsonl."""
        self._append("timelines", row)

    def step(self, step: Step, notices: Sequence[str]) -> None:
        """Append a finished step: metrics, plan and, where it is drawn, timelines."""
        shown = {"notices": list(notices)} if notices else {}
        self.metrics(dict(step.metrics) | shown)
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
        """Close all files. A write error was raised when it happened."""
        for file in self._files.values():
            with suppress(OSError):
                file.close()

    def _append(self, name: str, row: dict[str, Any]) -> None:
        """Write one JSON object as a line of the file ``name``, at once."""
        with _disk_errors(self.folder / f"{name}.jsonl"):
            self._files[name].write(json.dumps(row) + "\n")
            self._files[name].flush()


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Context that turns an error of the file system into a HeadraceError, which names ``path`` and
    says how to go on."""
    try:
        yield
    except OSError as error:
        raise HeadraceError(
            f"journal {path}",
            got=error.strerror or "an error",
            hint="free some space; the same command with --resume added, and --out "
            f"{path if path.is_dir() else path.parent}, goes on",
        )


def steps_done(folder: Path) -> int:
    """The number of steps that a run has written down: one more than the number of the step in the
    last complete line of its metrics; 0 where there are none."""
    try:
        # The very last line may be torn: then the one before it counts.
        lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        return max((_step_of(line) + 1 for line in lines[-2:]), default=0)
    except OSError:
        return 0


def _step_of(line: bytes) -> int:
    """The number of the step in a line of JSON; -1 for a line that was cut off half way."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return -1


def _keep_former(folder: Path) -> None:
    """Move the files of the steps that a run has written down, before it begins anew in the same
    folder, into a new folder ``before-N`` within it, and print that."""
    done = steps_done(folder)
    if not done:
        return
    names = (folder / f"before-{n}" for n in count(1))
    aside = next(path for path in names if not path.exists())
    aside.mkdir()
    for name in ("run.json", *(f"{name}.jsonl" for name in _FILES)):
        if (folder / name).exists():
            os.replace(folder / name, aside / name)
    tell(f"the first {counted(done, 'step')} are taken again; what was written is kept in {aside}")


def _drop_from(path: Path, first_step: int) -> None:
    """Keep only the lines of a file whose step is before ``first_step``."""
    kept = []
    for line in path.read_bytes().decode(errors="replace").splitlines():
        try:
            if json.loads(line)["step"] < first_step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue  # the last line of a killed run may be torn
    _write_aside(path, "".join(kept))


def _write_aside(path: Path, text: str) -> None:
    """Write a file under the name ``PATH.part``, then rename it, so that no reader sees half of
    it."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


_SCALARS = (
    "loss",
    "lr",
    "grad_norm",
    "step_s",
    "tokens_per_s",
    "idle",
    "mfu",
    "predicted_s",
    "gap",
    "planning_s",
    "waited_s",
    "waited",
    "tokens",
    "longest",
)
"""The metrics of a step that are single numbers to draw as curves."""


class Tracker(Protocol):
    """An external service that receives the metrics of each step."""

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Send the metrics of one step."""

    def close(self) -> None:
        """Send whatever is still buffered."""


class _TensorBoard:
    """Writes the numbers among a step's metrics to TensorBoard files in the folder of the run."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def log(self, metrics: Mapping[str, Any]) -> None:
        for name, value in _scalars(metrics).items():
            self._writer.add_scalar(name, value, metrics["step"])

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """Sends the numbers among a step's metrics to a run at Weights & Biases."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        """Begin a run of this ``name`` and ``config`` there, whose local files are in
        ``folder``."""
        import wandb  # optional

        self._run: Any = wandb.init(
            project="headrace", name=name, dir=str(folder), config=dict(config)
        )

    def log(self, metrics: Mapping[str, Any]) -> None:
        self._run.log(_scalars(metrics), step=metrics["step"])

    def close(self) -> None:
        self._run.finish()


def require_trackers(*, tensorboard: bool, wandb: bool) -> None:
    """Raise MissingExtra when a tracker that is asked for is not installed."""
    for name, wanted in {"tensorboard": tensorboard, "wandb": wandb}.items():
        if wanted and find_spec(name) is None:
            raise MissingExtra(name, extra=name, needed_for=f"report.{name} = true")


def make_trackers(
    folder: Path, *, tensorboard: bool, wandb: bool, name: str, config: Mapping[str, Any]
) -> list[Tracker]:
    """The trackers that are asked for; their packages must be installed."""
    trackers: list[Tracker] = []
    if tensorboard:
        trackers.append(_TensorBoard(folder))
    if wandb:
        trackers.append(_WandB(folder, name, config))
    return trackers


def _scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those of a step's metrics that are single numbers to draw as curves."""
    return {name: metrics[name] for name in _SCALARS if metrics.get(name) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnSteps:
    """The numbers of the steps that are drawn: about ``wanted`` of the ``steps`` of a run at equal
    distances, and the last one; none where ``wanted`` is 0.

    The actions of all ranks are many: they are predicted, and gathered, for these steps only.
    """

    wanted: int
    steps: int

    def __contains__(self, number: object) -> bool:
        """Whether the step ``number`` is drawn."""
        if not self.wanted or not isinstance(number, int):
            return False
        return number % max(1, self.steps // self.wanted) == 0 or number == self.steps - 1


class EarlyAndRare:
    """The numbers of the steps that are drawn in a run without a known end: 1, 2, 4, 8, ..."""

    def __contains__(self, number: object) -> bool:
        """Whether the step ``number`` is drawn: where it is a power of two."""
        return isinstance(number, int) and number > 0 and number & (number - 1) == 0
