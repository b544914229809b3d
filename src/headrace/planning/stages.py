"""Stages of a pipeline: how many layers each has, what they take, and what they hold at once.

The slowest stage sets the pace, and the last one has the head: so it gets fewer layers where the
head is heavy. Stage s of S holds the activations of up to S - s micro-batches. Before a forward
those of S - s - 1 are kept, and likewise before a backward, where they are younger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import floor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.costs import CostModel, Linear, Quadratic
from headrace.costs.cost_model import MOST_TOKENS
from headrace.costs.stages import held_bytes, kept_line, message_s, moments, stage_gather
from headrace.spec import LayerOption, LayerPlan, Pipeline, Scheme
from headrace.spec.plan import Working
from headrace.spec.stage import Stage, share_layers

__all__ = ["Row", "StageCosts", "shares_of"]

Value = TypeVar("Value")
Row = tuple[float, float, float]
"""Seconds ``a sum(l^2) + b sum(l) + c`` of a micro-batch, forward and backward."""


def shares_of(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Layers of each stage: as even as can be, then with fewer and fewer for the last one."""
    even = share_layers(layers, stages)
    yield even
    for last in range(even[-1] - 1, 0, -1) if stages > 1 else ():
        yield (*share_layers(layers - last, stages - 1), last)


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """What micro-batches of some layer plans cost the stages of a pipeline, without the costs'
    scale; ``plans`` may be chosen by number."""

    costs: CostModel
    scheme: Scheme
    shares: tuple[int, ...]
    working: Working
    plans: tuple[LayerPlan, ...]

    @cached_property
    def pipeline(self) -> Pipeline:
        """The pipeline on the first ranks."""
        ranks = tuple(range(self.scheme.devices))
        return Pipeline(scheme=self.scheme, ranks=ranks, shares=self.shares)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Its stages."""
        return self.pipeline.stages(self.costs.shape.layers)

    @cached_property
    def rooms(self) -> tuple[int, ...]:
        """Bytes for activations on a rank of each stage."""
        free = self.costs.capacity_bytes - self.costs.state_bytes
        return tuple(free - held for held in held_bytes(self.costs, self.pipeline, self.working))

    @cached_property
    def rows(self) -> NDArray[np.float64]:
        """Seconds of each plan on each stage, messages included [plans, stages, 3]."""
        return np.array([self._of_stages(plan, self._row) for plan in self.plans])

    @cached_property
    def lines(self) -> list[list[tuple[Linear, list[Linear]]]]:
        """What each plan keeps on each stage, and its moments: what is kept of it so far and
        needed in passing."""
        return [self._of_stages(plan, self._lines) for plan in self.plans]

    @cached_property
    def slowest(self) -> list[Row]:
        """Coefficients of each plan that no stage exceeds."""
        return [(a, b, c) for a, b, c in self.rows.max(axis=1).tolist()]

    @property
    def pace_s(self) -> float:
        """Seconds per token of short sequences, by the quickest plan."""
        return min(b for _, b, _ in self.slowest)

    @cached_property
    def caps(self) -> list[int]:
        """By plan the tokens of a micro-batch of which as many fit as may be held at once."""
        return [self._cap(plan) for plan in range(len(self.plans))]

    def seconds(self, plan: int, squares: float, tokens: int) -> float:
        """Of the slowest stage for a pack of sum(l^2) ``squares`` and sum(l) ``tokens``."""
        return float((self.rows[plan] @ np.array([squares, tokens, 1.0])).max())

    def needs(self, plan: int, tokens: int) -> int:
        """Bytes that a pipeline of micro-batches of ``tokens`` lacks of the memory at its fullest
        stage; not positive where they fit."""
        depth = len(self.stages)
        lacks = [
            (depth - s - 1) * kept(tokens) + max(line(tokens) for line in peaks) - room
            for s, ((kept, peaks), room) in enumerate(
                zip(self.lines[plan], self.rooms, strict=True)
            )
        ]
        return -floor(-max(lacks))

    def fits(self, packs: Sequence[tuple[int, int]]) -> bool:
        """Whether micro-batches, as (tokens, plan) in their order, fit the stages' memory."""
        depth = len(self.stages)
        for s, room in enumerate(self.rooms):
            kept = [self.lines[plan][s][0](tokens) for tokens, plan in packs]
            most = [max(line(n) for line in self.lines[plan][s][1]) for n, plan in packs]
            for i in range(len(packs)):
                first = max(0, i - (depth - s - 1))
                both = sum(kept[first : i + 1])
                over = max(most[i] - kept[i], most[first] - kept[first])
                if both + over > room:
                    return False
        return True

    def _of_stages(self, plan: LayerPlan, of: Callable[[Stage, LayerPlan], Value]) -> list[Value]:
        """Something of each stage, worked out once for stages of like layers."""
        known, found = dict[tuple[bool, tuple[LayerOption, ...]], Value](), list[Value]()
        for stage in self.stages:
            key = stage.last, plan.options[stage.start : stage.stop]
            if key not in known:
                known[key] = of(stage, plan)
            found.append(known[key])
        return found

    def _lines(self, stage: Stage, plan: LayerPlan) -> tuple[Linear, list[Linear]]:
        return kept_line(self.costs, stage, plan), moments(self.costs, stage, plan)

    def _row(self, stage: Stage, plan: LayerPlan) -> Row:
        width = len(stage.ranks)
        total, gathered = Quadratic(), 0.0
        for option, count in Counter(plan.options[stage.start : stage.stop]).items():
            cost = self.costs.option(width, option)
            total = total + (cost.forward + cost.backward) * count
            gathered += count * sum(stage_gather(self.costs, self.scheme, option, self.working))
        if stage.last:
            ends = self.costs.ends[width]
            total = total + ends.forward + ends.backward
        # Activations to the next stage and gradients back, or from and to the one before.
        sent = 2 * message_s(self.costs, 1) / width if stage.count > 1 else 0.0
        return total.a, total.b + sent, total.c + gathered

    def _cap(self, plan: int) -> int:
        depth, most = len(self.stages), float(MOST_TOKENS)
        for s, ((kept, peaks), room) in enumerate(zip(self.lines[plan], self.rooms, strict=True)):
            for line in peaks:
                slope = (depth - s - 1) * kept.slope + line.slope
                free = room - (depth - s - 1) * kept.constant - line.constant
                if free < 0:
                    return 0
                if slope > 0:
                    most = min(most, free / slope)
        return floor(most)
