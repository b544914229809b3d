"""A priced scheme: what every source of costs gives a planner.

A scheme, how its weights are held, and a frontier: rows of seconds ``a sum(l^2) + b sum(l) + c`` of
a micro-batch on one stage, each with the tokens that it holds and, where the source knows one, its
layer plan. A published scheme has one row; a measured one has a row for every layer plan worth
keeping.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.costs import CostModel
from headrace.planning.frontier import Frontier
from headrace.planning.stages import StageCosts
from headrace.spec import LayerPlan, Scheme
from headrace.spec.plan import TokenOrder, Working

__all__ = ["PricedScheme"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PricedScheme:
    """``name`` is how the source writes the scheme. Micro-batches of ``util`` tokens or more keep
    the devices busy: no more micro-batches are made than hold so many. ``stages`` says what each
    stage takes and holds where the source knows; its plans have the frontier's numbers."""

    scheme: Scheme
    frontier: Frontier
    weights: Working = "replicated"
    name: str = ""
    util: int = 1
    stages: StageCosts | None = None
    _orders: dict[int, TokenOrder] = field(default_factory=dict, repr=False)

    @property
    def devices(self) -> int:
        """Devices of one pipeline."""
        return self.scheme.devices

    @property
    def depth(self) -> int:
        """Stages of one pipeline."""
        return self.scheme.pipeline

    @property
    def most_tokens(self) -> int:
        """The longest sequence that a micro-batch holds."""
        return self.frontier.most_tokens

    def layer_plan(self, row: int) -> LayerPlan | None:
        """The layer plan of a row; None where the source knows none."""
        return self.frontier.layer_plan(row) if self.frontier.options else None

    def order_of(self, row: int, costs: CostModel) -> TokenOrder:
        """The token order of micro-batches with a row's layers."""
        if row not in self._orders:
            layers = self.layer_plan(row)
            self._orders[row] = costs.order_of(self.scheme.width, layers) if layers else "natural"
        return self._orders[row]

    def __str__(self) -> str:
        return self.name or str(self.scheme)
