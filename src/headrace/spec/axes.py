"""Axes of multi-dimensional models: what stages mix, and which axis is in shards meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.errors import SpecError

__all__ = ["AxisChoice", "AxisMove", "AxisPlan", "MixingStage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixingStage:
    """A part of a model in which places of the axes ``mixes`` see each other, and of no other.
    ``work_s`` are its seconds on one device for the whole tensor."""

    mixes: tuple[str, ...]
    work_s: float = 0.0

    def __post_init__(self) -> None:
        if len(set(self.mixes)) != len(self.mixes):
            raise SpecError("axes of a stage", got=", ".join(self.mixes), wanted="each once")
        if not self.work_s >= 0:
            raise SpecError("work_s of a stage", got=self.work_s, wanted="seconds >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisChoice:
    """The axis in shards during a stage. A stage that mixes it meets the other ranks within:
    ``ulysses`` exchanges heads for places, ``ring`` passes keys and values on."""

    axis: str
    method: Literal["none", "ulysses", "ring"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisMove:
    """What one rank did between two modules or within one: it switched the axis in shards, or met
    the others' places by a ``method`` and kept it. ``sent_bytes`` of a switch."""

    before: str
    after: str
    sent_bytes: int = 0
    method: str = "switch"

    def __str__(self) -> str:
        return f"{self.before} to {self.after}" if self.method == "switch" else self.method


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPlan:
    """One choice for each stage. ``sent_bytes`` of each rank in a forward, and its ``seconds``;
    ``switches`` counts changes of the axis, from that of the input on."""

    choices: tuple[AxisChoice, ...]
    switches: int
    sent_bytes: float
    seconds: float
