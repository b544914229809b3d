"""Costs of one layer of one option, and of what every step pays once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

from headrace.costs.quadratic import Linear, Quadratic
from headrace.errors import CostError
from headrace.spec.plan import TokenOrder

__all__ = ["ExchangeCost", "OptionCost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionCost:
    """One layer (or the ends of the model) of one option on one group size.

    ``forward``, ``backward``: seconds, recomputation included in the backward. ``kept``: bytes a
    rank keeps from forward to backward, ``transient``: bytes it needs only while the layer runs
    forward or backward; both as functions of the pack's tokens (of the whole group).
    ``order`` is the token order for which the seconds hold. ``fetched`` is the share of the
    layer's weights that a rank fetches where they are held sharded.
    """

    forward: Quadratic
    backward: Quadratic
    kept: Linear
    transient: Linear
    order: TokenOrder = "natural"
    fetched: float = 1.0

    def __post_init__(self) -> None:
        if self.order not in get_args(TokenOrder):
            wanted = " or ".join(get_args(TokenOrder))
            raise CostError("token order of an option", got=repr(self.order), wanted=wanted)
        if not 0 <= self.fetched <= 1:
            raise CostError("fetched share of an option", got=self.fetched, wanted="0 to 1")

    def to_json(self) -> dict[str, Any]:
        """A JSON object that :meth:`from_json` reads back."""
        return {
            "forward": self.forward.to_json(),
            "backward": self.backward.to_json(),
            "kept": self.kept.to_json(),
            "transient": self.transient.to_json(),
            "order": self.order,
            "fetched": self.fetched,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> OptionCost:
        """The inverse of :meth:`to_json`. Costs of old had one token order and always fetched."""
        (fa, fb, fc), (ba, bb, bc) = value["forward"], value["backward"]
        (kept, kept_constant), (transient, transient_constant) = value["kept"], value["transient"]
        return cls(
            forward=Quadratic(a=fa, b=fb, c=fc),
            backward=Quadratic(a=ba, b=bb, c=bc),
            kept=Linear(slope=kept, constant=kept_constant),
            transient=Linear(slope=transient, constant=transient_constant),
            order=value.get("order", "natural"),
            fetched=value.get("fetched", 1.0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCost:
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
