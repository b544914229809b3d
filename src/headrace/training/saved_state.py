"""What a checkpoint holds besides tensors. Nothing of it is believed that can be checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import headrace
from headrace.costs import CostModel
from headrace.costs.learning.calibration import Calibration
from headrace.errors import CheckpointError, DamagedCheckpoint, HeadraceError, shortened
from headrace.runtime import checkpoint
from headrace.runtime.checkpoint_folders import step_of
from headrace.spec.architecture import Architecture
from headrace.spec.plan import Plan, stored_working

__all__ = ["SavedState", "changed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The state of a run after ``step`` steps, of which ``updates`` changed weights, on ``ranks``
    ranks. ``sampler`` and ``planner`` are what these restore themselves from, ``costs`` what the
    planner plans with, ``config`` the configuration as JSON."""

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
        """The ``extra`` of a checkpoint."""
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
        """The state in a checkpoint. Raises DamagedCheckpoint when it is not one that a run of
        any configuration could have saved."""
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
        """Raise one of _MALFORMED for what contradicts itself. The sampler checks the rest of its
        state, which depends on the corpus."""
        if named not in (None, self.step):
            raise CheckpointError("step", got=self.step, wanted=named)
        position = {name: _count(self.sampler, name) for name in ("step", "epoch", "first_step")}
        if position["step"] != self.step or max(position.values()) > self.step:
            raise CheckpointError("position in the data", got=position, wanted=f"step {self.step}")
        ratio, observed = self.planner["ratio"], _count(self.planner, "observed")
        if not isfinite(ratio) or ratio <= 0 or observed < 0:
            raise CheckpointError("correction of costs", got=ratio, wanted="a number above 0")
        _count(self.planner, "steps")
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
"""What parsers of JSON that was tampered with raise."""


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The keys of a configuration, as JSON, that have another value now, each with both. Not what
    a run may change without a difference to its steps: where it is written, and how reported."""
    found = list[str]()
    for section, values in now.items():
        earlier = before.get(section)
        if section == "report" or not isinstance(values, Mapping):
            continue
        for key, value in values.items():
            was = earlier.get(key) if isinstance(earlier, Mapping) else None
            if (section, key) == ("planner", "working"):
                was = stored_working(was)
            if was != value and (section, key) not in (("run", "out"), ("run", "name")):
                found.append(f"{section}.{key} from {_shown(was)} to {_shown(value)}")
    return found


def _shown(value: object) -> str:
    return shortened(json.dumps(value), 60)


def _count(table: dict[str, Any], name: str) -> int:
    value = table.get(name)
    if type(value) is not int or not 0 <= value < 2**63:
        raise CheckpointError(name, got=repr(value)[:60], wanted="a whole number >= 0")
    return value


def _table(extra: dict[str, Any], name: str) -> dict[str, Any]:
    value = extra.get(name)
    if not isinstance(value, dict):
        raise CheckpointError(name, got=repr(value)[:60], wanted="a JSON object")
    return value
