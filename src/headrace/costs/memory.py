"""Where the memory of a rank goes while a micro-batch runs."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.costs.cost_model import CostModel
from headrace.spec.method import LayerPlan
from headrace.spec.plan import Working

__all__ = ["MemoryParts", "memory_parts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Bytes of one rank at the peak of a micro-batch; ``free`` of what a plan may use is negative
    when it does not fit."""

    stored: int
    working: int
    layers: int
    ends: int
    passing: int
    free: int

    @property
    def peak(self) -> int:
        """All of them together."""
        return self.stored + self.working + self.layers + self.ends + self.passing


def memory_parts(
    costs: CostModel, tokens: int, p: int, layers: LayerPlan, working: Working
) -> MemoryParts:
    """The parts of :meth:`CostModel.micro_batch_bytes`.

    stored    masters, gradient sums, optimizer state
    working   weights that are worked with, and their gradients
    layers    activations that the layers keep for the backward
    ends      what embedding, head and loss keep
    passing   what is needed on top at the peak
    """
    peak = costs.micro_batch_bytes(tokens, p, layers, working)
    held = costs.held_bytes((p,), working)
    kept = sum(count * costs.option(p, option).kept(tokens) for option, count in layers.counts)
    ends = round(costs.ends[p].kept(tokens))
    passing = peak - costs.state_bytes - held - round(kept) - ends
    return MemoryParts(
        stored=costs.state_bytes, working=held, layers=round(kept), ends=ends,
        passing=max(0, passing), free=costs.capacity_bytes - peak,
    )  # fmt: skip
