"""The checkpoints of a run: list them, verify them, export their weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import headrace
from headrace.costs import CostModel
from headrace.costs.calibration import Calibration
from headrace.data.tokenizer_files import save_tokenizer
from headrace.errors import CheckpointError, DamagedCheckpoint, HeadraceError, shortened
from headrace.models.hf_weights import save_pretrained
from headrace.native import checkpoint
from headrace.native.checkpoint import step_of
from headrace.spec.architecture import Architecture, weight_table
from headrace.spec.plan import Plan, stored_working

__all__ = [
    "Checkpoint",
    "Checkpoints",
    "SavedState",
    "changed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The state of a run after ``step`` steps, of which ``updates`` changed weights, on ``ranks``
    ranks. ``sampler`` and ``planner`` are the JSON that these restore themselves from, ``config``
    is the configuration as JSON."""

    step: int
    updates: int
    ranks: int
    sampler: dict[str, Any]
    planner: dict[str, Any]
    architecture: Architecture
    config: dict[str, Any]

    @property
    def costs(self) -> CostModel:
        """The costs that the run was planned with."""
        return CostModel.from_json(self.planner["costs"])

    def to_json(self) -> dict[str, Any]:
        """The state as JSON, stored as the ``extra`` of a checkpoint."""
        return {
            "step": self.step,
            "updates": self.updates,
            "sampler": self.sampler,
            "planner": self.planner,
            "architecture": self.architecture.to_json(),
            "config": self.config,
            "ranks": self.ranks,
            "headrace": headrace.__version__,
        }

    @classmethod
    def read(cls, path: Path) -> SavedState:
        """Read the state from the checkpoint in the folder ``path``. Raises DamagedCheckpoint when
        it is not one that a run of any configuration could have saved."""
        extra = checkpoint.load(path, [])
        try:
            state = cls(
                step=_count(extra, "step"),
                updates=_count(extra, "updates"),
                ranks=_count(extra, "ranks"),
                sampler=_table(extra, "sampler"),
                planner=_table(extra, "planner"),
                architecture=Architecture.from_json(_table(extra, "architecture")),
                config=_table(extra, "config"),
            )
            state._check(step_of(path))
        except _MALFORMED as error:
            kind = "" if isinstance(error, HeadraceError) else f"{type(error).__name__} "
            raise DamagedCheckpoint(
                f"state in {path}", got=f"{kind}{error}", wanted="that of a run"
            )
        return state

    def _check(self, named: int | None) -> None:
        """Raise one of the errors in ``_MALFORMED`` where fields contradict each other, or the step
        ``named`` by the checkpoint's folder (None: its name has none). The sampler checks the rest
        of its state, which depends on the corpus."""
        if named not in (None, self.step):
            raise CheckpointError("step", got=self.step, wanted=named)
        position = {name: _count(self.sampler, name) for name in ("step", "epoch", "first_step")}
        if position["step"] != self.step or max(position.values()) > self.step:
            raise CheckpointError("position in the data", got=position, wanted=f"step {self.step}")
        ratio, observed = self.planner["ratio"], _count(self.planner, "observed")
        if not isfinite(ratio) or ratio <= 0 or observed < 0:
            raise CheckpointError("correction of costs", got=ratio, wanted="a number above 0")
        _count(self.planner, "steps")
        # Parsing raises for JSON that is not of such a value.
        _ = self.costs
        Calibration.from_json(self.planner["calibration"])
        if "before" in self.planner:
            Plan.from_json(self.planner["before"])


_MALFORMED = (
    HeadraceError,
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    ArithmeticError,
)
"""Errors that parsing malformed JSON raises."""


_OF_NO_STEP = (("run", "out"), ("run", "name"), ("planner", "compare"))
"""Configuration keys, as (section, key), that have no influence on steps."""


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between two configurations as JSON, a text ``section.key from OLD to NEW``
    for each. Left out are keys that have no influence on steps: where a run is written, and how it
    is reported."""
    changes = list[str]()
    for section, values in now.items():
        earlier = before.get(section)
        if section == "report" or not isinstance(values, Mapping):
            continue
        for key, value in values.items():
            was = earlier.get(key) if isinstance(earlier, Mapping) else None
            if (section, key) == ("planner", "working"):  # which had another word in older files
                was = stored_working(was)
            if was != value and (section, key) not in _OF_NO_STEP:
                changes.append(f"{section}.{key} from {_shown(was)} to {_shown(value)}")
    return changes


def _shown(value: object) -> str:
    """The value of a configuration key as JSON text, shortened to 60 characters."""
    return shortened(json.dumps(value), 60)


def _count(table: dict[str, Any], name: str) -> int:
    """The entry ``name`` of a saved JSON object, a whole number from 0 that 64 bits can hold.
    Raises CheckpointError for any other."""
    value = table.get(name)
    if type(value) is not int or not 0 <= value < 2**63:
        raise CheckpointError(name, got=repr(value)[:60], wanted="a whole number >= 0")
    return value


def _table(extra: dict[str, Any], name: str) -> dict[str, Any]:
    """The entry ``name`` of a saved JSON object, itself an object. Raises CheckpointError for any
    other."""
    value = extra.get(name)
    if not isinstance(value, dict):
        raise CheckpointError(name, got=repr(value)[:60], wanted="a JSON object")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Weights, optimizer and state of a run after some step, in a folder."""

    path: Path

    @property
    def state(self) -> dict[str, Any]:
        """The JSON that the checkpoint holds besides tensors: step, position in the data, planner,
        architecture, configuration."""
        return checkpoint.load(self.path, [])

    @property
    def step(self) -> int:
        """Optimizer steps that were done before this checkpoint."""
        return SavedState.read(self.path).step

    def verify(self) -> int:
        """Read every file, compare checksums, and look for all weights of the model; returns the
        number of tensors. Raises CheckpointError for the first that is missing or damaged."""
        checkpoint.verify(self.path)
        self._weights()
        return len(checkpoint.names(self.path))

    def _weights(self) -> tuple[Architecture, list[str]]:
        """The architecture and the names of its weights. Raises CheckpointError unless the
        checkpoint has all of them in their shapes."""
        architecture, saved = SavedState.read(self.path).architecture, checkpoint.names(self.path)
        for weight in weight_table(architecture):
            found, _ = saved.get(weight.name, (None, None))  # (shape, dtype)
            if found != tuple(weight.shape):
                what = f"{self.path}: {weight.name}"
                raise CheckpointError(what, got=found or "nothing", wanted=tuple(weight.shape))
        return architecture, [weight.name for weight in weight_table(architecture)]

    def export(self, out: str | Path) -> Path:
        """Write ``model.safetensors``, ``config.json`` and the files of the tokenizer, as the
        Hugging Face has them, into the folder ``out``; returns it.

        The longest context that a Llama was trained for is the larger of the run's and of what it
        began with. Raises CheckpointError and DataError when weights or tokenizer cannot be read
        or written.
        """
        architecture, names = self._weights()
        data, out = SavedState.read(self.path).config["data"], Path(out)
        if not architecture.learned_positions:
            longest = max(architecture.positions, data["context"])
            architecture = replace(architecture, positions=longest)
        tensors = checkpoint.read_all(self.path)  # the optimizer's states too
        weights = {name: tensors[name] for name in names}
        save_pretrained(out, weights, architecture, ids=save_tokenizer(data["tokenizer"], out))
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """The checkpoints in a folder, or of a run's folder."""

    folder: Path

    def latest(self) -> Checkpoint:
        """The newest checkpoint that is complete; the folder itself where it is a checkpoint.
        Raises CheckpointError when there is none."""
        folder = self.folder
        if (folder / "index.json").exists():
            return Checkpoint(path=folder)
        inside = folder / "checkpoints"
        path = checkpoint.latest(inside if inside.is_dir() else folder)
        if path is None:
            raise CheckpointError(
                f"checkpoints in {folder}", got="none", wanted="at least one, saved by a run"
            )
        return Checkpoint(path=path)
