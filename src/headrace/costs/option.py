"""Costs of one layer of one option, and of what every step pays once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headrace.costs.quadratic import Linear, Quadratic
from headrace.errors import CostError

__all__ = ["Exchange", "OptionCost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionCost:
    """One layer (or the ends of the model) of one option on one group size.

    ``forward``, ``backward``: seconds, recomputation included in the backward. ``kept``: bytes a
    rank keeps from forward to backward, ``transient``: bytes it needs only while the layer runs
    forward or backward; both as functions of the pack's tokens (of the whole group).
    """

    forward: Quadratic
    backward: Quadratic
    kept: Linear
    transient: Linear

    def to_json(self) -> dict[str, list[float]]:
        """A JSON object that :meth:`from_json` reads back."""
        return {
            "forward": self.forward.to_json(),
            "backward": self.backward.to_json(),
            "kept": self.kept.to_json(),
            "transient": self.transient.to_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> OptionCost:
        """The inverse of :meth:`to_json`."""
        (fa, fb, fc), (ba, bb, bc) = value["forward"], value["backward"]
        (kept, kept_constant), (transient, transient_constant) = value["kept"], value["transient"]
        return cls(
            forward=Quadratic(a=fa, b=fb, c=fc),
            backward=Quadratic(a=ba, b=bb, c=bc),
            kept=Linear(slope=kept, constant=kept_constant),
            transient=Linear(slope=transient, constant=transient_constant),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Seconds every step pays once, whatever its plan: pull of the weights before the first
    forward, push of the gradients after the last backward, update of the weights."""

    pull_s: float = 0.0
    push_s: float = 0.0
    update_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not math.isfinite(value) or value < 0:
                raise CostError(f"exchange.{name}", got=value, wanted="finite seconds >= 0")

    @property
    def total_s(self) -> float:
        """Sum of the three."""
        return self.pull_s + self.push_s + self.update_s
