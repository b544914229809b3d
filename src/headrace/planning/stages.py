"""Stages of a pipeline: how many layers each has, what they take, and what they hold at once.

The slowest stage sets the pace, and the last one has the head: so it gets fewer layers where the
head is heavy. Stage s of S holds the activations of up to S - s micro-batches. Before a forward
those of S - s - 1 are kept, and likewise before a backward, where they are younger.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import floor

import numpy as np
from numpy.typing import NDArray

from headrace.costs import CostModel, Linear
from headrace.costs.cost_model import MOST_TOKENS
from headrace.costs.stages import held_bytes, kept_line, message_s, moments, stage_gather
from headrace.planning.frontier import Frontier
from headrace.spec import LayerOption, LayerPlan, Pipeline, Scheme
from headrace.spec.plan import Working
from headrace.spec.stage import Stage, share_layers

__all__ = ["LayerTable", "Least", "Row", "StageCosts", "shares_of"]

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Row = tuple[float, float, float]
"""Seconds ``a sum(l^2) + b sum(l) + c`` of a micro-batch, forward and backward."""


def shares_of(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Layers of each stage: as even as can be, then with fewer and fewer for the last one."""
    even = share_layers(layers, stages)
    yield even
    for last in range(even[-1] - 1, 0, -1) if stages > 1 else ():
        yield (*share_layers(layers - last, stages - 1), last)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerTable:
    """Layer plans, and what one layer of their options costs in a scheme: option ``layers[i, j]``
    is that of layer j in plan i; of every option ``seconds`` [options, 3] forward and backward,
    ``kept`` and ``passing`` [options, 2], slope and constant of its bytes."""

    plans: tuple[LayerPlan, ...]
    options: tuple[LayerOption, ...]
    layers: Counts
    seconds: Floats
    kept: Floats
    passing: Floats

    @classmethod
    def of(
        cls, costs: CostModel, scheme: Scheme, working: Working, plans: Sequence[LayerPlan]
    ) -> LayerTable:
        """The table of some plans."""
        number: dict[LayerOption, int] = {}
        layers = [
            [at for o, count in plan.counts for at in [number.setdefault(o, len(number))] * count]
            for plan in plans
        ]
        listed = [costs.option(scheme.width, option) for option in number]
        seconds = list[Row]()
        for option, cost in zip(number, listed, strict=True):
            both = cost.forward + cost.backward
            gathered = sum(stage_gather(costs, scheme, option, working))
            seconds.append((both.a, both.b, both.c + gathered))
        return cls(
            plans=tuple(plans),
            options=tuple(number),
            layers=np.array(layers, dtype=np.int64),
            seconds=np.array(seconds),
            kept=_lines([cost.kept for cost in listed]),
            passing=_lines([cost.transient for cost in listed]),
        )

    def only(self, some: Counts) -> LayerTable:
        """With some plans only."""
        return replace(
            self, plans=tuple(self.plans[i] for i in some.tolist()), layers=self.layers[some]
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Least:
    """What micro-batches take at least of stages of ``width`` ranks, of all ``depth`` together:
    ``alone`` one of its own; ``dealt`` what a sequence adds with its share of constants, all of
    which may be less by ``over_s`` for each stage."""

    width: int
    depth: int
    alone: Frontier
    dealt: Frontier
    over_s: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class StageCosts:
    """What micro-batches of the layer plans of ``table`` cost the stages of a pipeline, without the
    costs' scale; plans go by their number."""

    costs: CostModel
    scheme: Scheme
    shares: tuple[int, ...]
    working: Working
    table: LayerTable

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
    def rows(self) -> Floats:
        """Seconds of each plan on each stage, messages included [plans, stages, 3]."""
        width, table = self.scheme.width, self.table
        starts = [stage.start for stage in self.stages]
        rows: Floats = np.add.reduceat(table.seconds[table.layers], starts, axis=1)
        ends = self.costs.ends[width]
        both = ends.forward + ends.backward
        rows[:, -1] += (both.a, both.b, both.c)
        if len(self.stages) > 1:
            # Activations to the next stage and gradients back, or from and to the one before.
            rows[:, :, 1] += 2 * message_s(self.costs, 1) / width
        return rows

    @cached_property
    def lines(self) -> list[list[tuple[Linear, list[Linear]]]]:
        """What each plan keeps on each stage, and its moments: what is kept of it so far and
        needed in passing."""
        return [self._of_stages(plan) for plan in self.table.plans]

    @cached_property
    def slowest(self) -> list[Row]:
        """Coefficients of each plan that no stage exceeds."""
        return [(a, b, c) for a, b, c in self.rows.max(axis=1).tolist()]

    @property
    def pace_s(self) -> float:
        """Seconds per token of short sequences, by the quickest plan."""
        return float(self.rows[:, :, 1].max(axis=1).min())

    @cached_property
    def caps(self) -> list[int]:
        """By plan the tokens of a micro-batch of which as many fit as may be held at once."""
        return self.caps_at(len(self.stages))

    def variants(self) -> Iterator[StageCosts]:
        """These shares of the layers, and others with a layer more or less in the last stage."""
        yield self
        layers, last = self.costs.shape.layers, self.shares[-1]
        for shares in shares_of(layers, self.scheme.pipeline):
            if abs(shares[-1] - last) == 1:
                yield replace(self, shares=shares)

    @cached_property
    def least(self) -> Least:
        """What no pipeline beats, whatever the variant, the order of its micro-batches and what
        they are beside: seconds of all stages together, without messages."""
        caps = np.array([variant.caps_at(1) for variant in self.variants()]).max(axis=0)
        ends = self.costs.ends[self.scheme.width]
        both = ends.forward + ends.backward
        layers = self.table.seconds[self.table.layers].sum(axis=1)
        a, b, c = (layers + np.array([both.a, both.b, both.c])).T
        full = np.array([variant.in_flight for variant in self.variants()]).max(axis=0)
        dealt = b + c.min() / np.maximum(full, 1.0)  # of what fits nowhere nothing is claimed
        order = np.argsort(caps, kind="stable")
        order = order[caps[order] > 0]
        held, nothing = tuple(caps[order].tolist()), np.zeros(len(order))
        depth = self.scheme.pipeline
        return Least(
            width=self.scheme.width,
            depth=depth,
            alone=_bare(a[order], b[order], c[order], held),
            dealt=_bare(a[order], dealt[order], nothing, held),
            over_s=float(c.min()) * (depth - 1) / depth,
        )

    @property
    def in_flight(self) -> Floats:
        """By plan the tokens of each of as many micro-batches as the first stage holds, if it held
        nothing else."""
        held, _ = self._moments(self.stages[0])
        slope = len(self.stages) * held[:, 0]
        most = np.full(len(slope), float(MOST_TOKENS))
        return np.divide(max(0, self.rooms[0]), slope, out=most, where=slope > 0)

    def caps_at(self, at_once: int) -> list[int]:
        """:attr:`caps` where a stage holds up to ``at_once`` micro-batches."""
        table, depth = self.table, len(self.stages)
        most = np.full(len(table.plans), float(MOST_TOKENS))
        for s, (stage, room) in enumerate(zip(self.stages, self.rooms, strict=True)):
            held, peaks = self._moments(stage)
            lines = (min(at_once, depth - s) - 1) * held[:, None] + peaks
            slope, free = lines[:, :, 0], room - lines[:, :, 1]
            fits = np.where(slope > 0, free / np.where(slope > 0, slope, 1.0), float(MOST_TOKENS))
            most = np.minimum(most, np.where(free < 0, 0.0, fits).min(axis=1))
        return [floor(tokens) for tokens in most.tolist()]

    def _moments(self, stage: Stage) -> tuple[Floats, Floats]:
        """:func:`kept_line` [plans, 2] and :func:`moments` [plans, moments, 2] of a stage, slopes
        and constants."""
        chosen = self.table.layers[:, stage.start : stage.stop]
        kept, passing = self.table.kept[chosen], self.table.passing[chosen]
        held = kept.cumsum(axis=1)
        if not stage.last:
            return held[:, -1], held + passing
        ends = self.costs.ends[self.scheme.width]
        first, head = _lines([ends.kept, ends.transient])
        kept[:, 0] += first
        so_far = kept.cumsum(axis=1)
        return held[:, -1] + first, np.concatenate(
            [so_far + passing, so_far[:, -1:] + head], axis=1
        )

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
        """Whether micro-batches, as (tokens, plan) in their order, fit the stages' memory: in each
        forward beside those in flight, and in each backward beside those after it, which are fewer
        and fewer behind the last forward."""
        depth, last = len(self.stages), len(packs) - 1
        for s, room in enumerate(self.rooms):
            kept = [self.lines[plan][s][0](tokens) for tokens, plan in packs]
            over = [
                max(line(n) for line in self.lines[plan][s][1]) - own
                for (n, plan), own in zip(packs, kept, strict=True)
            ]
            for i, more in enumerate(over):
                first, end = max(0, i - (depth - s - 1)), min(last, i + depth - s - 1)
                if max(sum(kept[first : i + 1]), sum(kept[i : end + 1])) + more > room:
                    return False
        return True

    def _of_stages(self, plan: LayerPlan) -> list[tuple[Linear, list[Linear]]]:
        """:attr:`lines` of one plan, worked out once for stages of like layers."""
        known = dict[tuple[bool, tuple[LayerOption, ...]], tuple[Linear, list[Linear]]]()
        found = list[tuple[Linear, list[Linear]]]()
        for stage in self.stages:
            key = stage.last, plan.options[stage.start : stage.stop]
            if key not in known:
                lines = moments(self.costs, stage, plan)
                known[key] = kept_line(self.costs, stage, plan), lines
            found.append(known[key])
        return found


def _bare(a: Floats, b: Floats, c: Floats, caps: tuple[int, ...]) -> Frontier:
    """A frontier without layer plans."""
    layers = np.zeros((len(caps), 0), dtype=np.int64)
    return Frontier(options=(), a=a.copy(), b=b.copy(), c=c.copy(), caps=caps, layers=layers)


def _lines(lines: Sequence[Linear]) -> Floats:
    return np.array([(line.slope, line.constant) for line in lines])
