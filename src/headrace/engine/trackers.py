"""Scalars to TensorBoard or Weights & Biases, for those who watch runs there."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from headrace.errors import MissingExtra

__all__ = ["Tracker", "make_trackers", "require_trackers"]

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


class Tracker(Protocol):
    """Something that takes the metrics of each step."""

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Take a step's metrics."""

    def close(self) -> None:
        """Write what is left."""


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def log(self, metrics: Mapping[str, Any]) -> None:
        for name, value in _scalars(metrics).items():
            self._writer.add_scalar(name, value, metrics["step"])

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        import wandb

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
    """The trackers asked for, which are installed."""
    trackers: list[Tracker] = []
    if tensorboard:
        trackers.append(_TensorBoard(folder))
    if wandb:
        trackers.append(_WandB(folder, name, config))
    return trackers


def _scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: metrics[name] for name in _SCALARS if metrics.get(name) is not None}
