"""Lays a strategy with its micro-batches out on the ranks: a plan.

Ranks are given out from the first: wide tensor blocks first, and among equals large pipelines.
So blocks start at multiples of their width wherever widths divide one another.

A pipeline with stages is then set up for its own micro-batches: layers of the stages, order of the
micro-batches, layer plans. What the simulator finds quickest is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from headrace.costs import CostModel
from headrace.planning.strategies.dealing import Dealt
from headrace.planning.strategies.staged import Load, quickened
from headrace.planning.strategies.stages import StageCosts, shares_of
from headrace.simulator import peak_bytes, step_s
from headrace.spec import Lengths, MicroBatch, Pipeline, Plan
from headrace.spec.plan import Working

__all__ = ["Ground", "laid_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """The batch, whose sequences stand at ``order`` (longest first), and how weights are held."""

    lengths: Lengths
    order: tuple[int, ...]
    costs: CostModel
    devices: int
    working: Working

    @property
    def tokens(self) -> list[int]:
        """Lengths, longest first."""
        return [self.lengths.tokens[i] for i in self.order]

    def plan(self, pipelines: Sequence[tuple[Pipeline, Load]]) -> Plan:
        """The plan of pipelines with work; predicted seconds are still to be told."""
        return self._plan(self.lengths, self.order, pipelines)

    def alone(self, pipeline: Pipeline, load: Load) -> Plan:
        """The plan of one pipeline with its sequences only."""
        members = load.members
        order = [0] * len(self.order)
        for at, place in enumerate(members):
            order[place] = at
        lengths = Lengths.of(self.lengths.tokens[self.order[place]] for place in members)
        return self._plan(lengths, order, [(pipeline, load)])

    def _plan(
        self, lengths: Lengths, order: Sequence[int], pipelines: Sequence[tuple[Pipeline, Load]]
    ) -> Plan:
        micro_batches = list[MicroBatch]()
        for number, (pipeline, load) in enumerate(pipelines):
            width = pipeline.scheme.width
            for own, index in zip(load.packs, load.plans, strict=True):
                layers = load.shape.layer_plan(index)
                micro_batches.append(
                    MicroBatch(
                        pipeline=number, sequences=tuple(order[i] for i in own), layers=layers,
                        order=self.costs.order_of(width, layers),
                    )
                )  # fmt: skip
        return Plan(
            lengths=lengths, devices=self.devices, working=self.working,
            pipelines=tuple(pipeline for pipeline, _ in pipelines),
            micro_batches=tuple(micro_batches), predicted_s=0.0, lower_bound_s=0.0,
        )  # fmt: skip


def laid_out(made: Dealt, ground: Ground) -> Plan:
    """The plan of a strategy, with the seconds that the simulator predicts. A pipeline without
    work is left out, its ranks idle."""
    loads = sorted(made.loads, key=_place)
    first, pipelines = 0, list[tuple[Pipeline, Load]]()
    for load in loads:
        devices = load.shape.scheme.devices
        ranks = tuple(range(first, first + devices))
        first += devices
        if load.packs:
            pipeline = Pipeline(
                scheme=load.shape.scheme, ranks=ranks, shares=load.shape.stages.shares
            )
            staged = load.shape.scheme.pipeline > 1
            pipelines.append(_set_up(pipeline, load, ground) if staged else (pipeline, load))
    plan = ground.plan(pipelines)
    return plan.replace(predicted_s=step_s(plan, ground.costs))


def _place(load: Load) -> tuple[int, int, object]:
    scheme = load.shape.scheme
    return -scheme.tensor, -scheme.devices, scheme


def _set_up(pipeline: Pipeline, load: Load, ground: Ground) -> tuple[Pipeline, Load]:
    """The quickest shares for micro-batches longest first, then the quickest order."""
    first, *others = _orders(load, ground.tokens)
    made = [_timed(pipeline, first, stages, ground) for stages in _shared(load.shape.stages)]
    best = min(made, key=lambda item: item[0])
    for other in others:
        tried = _timed(pipeline, other, best[3], ground)
        best = min(best, tried, key=lambda item: item[0])
    assert best[0] < inf, "micro-batches of the same layers fit in any order"
    return best[1], best[2]


def _timed(
    pipeline: Pipeline, load: Load, stages: StageCosts, ground: Ground
) -> tuple[float, Pipeline, Load, StageCosts]:
    """(seconds, ...) of a pipeline alone in one set-up, infinite where it does not fit."""
    tokens, costs = ground.tokens, ground.costs
    load, laid = quickened(load, stages, tokens), replace(pipeline, shares=stages.shares)
    plan = ground.alone(laid, load)
    fits = max(peak_bytes(plan, costs)) <= costs.capacity_bytes
    return step_s(plan, costs) if fits else inf, laid, load, stages


def _shared(stages: StageCosts) -> Iterator[StageCosts]:
    """The shares that are best for short sequences, then others with a layer more or less in the
    last stage."""
    yield stages
    layers, last = stages.costs.shape.layers, stages.shares[-1]
    for shares in shares_of(layers, stages.scheme.pipeline):
        if abs(shares[-1] - last) == 1:
            yield replace(stages, shares=shares)


def _orders(load: Load, tokens: Sequence[int]) -> Iterator[Load]:
    """Micro-batches longest first, shortest first, and with the longest in the middle, so that
    short ones fill and drain the pipeline."""
    plans = dict(zip(load.packs, load.plans, strict=True))
    work = {own: (sum(tokens[i] ** 2 for i in own), sum(tokens[i] for i in own)) for own in plans}
    rows = load.shape.frontier.rows
    falling = sorted(
        plans, key=lambda own: (-_seconds(rows[plans[own]], *work[own]), own)
    )  # fmt: skip
    seen = set[tuple[tuple[int, ...], ...]]()
    for order in (falling, falling[::-1], [*falling[1::2][::-1], *falling[::2]]):
        packs = tuple(order)
        if packs not in seen:
            seen.add(packs)
            yield replace(load, packs=packs, plans=tuple(plans[own] for own in packs))


def _seconds(row: tuple[float, float, float], squares: int, tokens: int) -> float:
    return row[0] * squares + row[1] * tokens + row[2]
