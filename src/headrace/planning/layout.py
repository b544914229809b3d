"""Lays a schedule out on the ranks: a plan, timed by the simulator.

Micro-batches of a pipeline without stages stand with the longest last, whose backward hides most of
the push, and the next longest first, whose forward hides most of the pull; the longest first, where
its ranks work elsewhere afterwards. A pipeline with stages is set up for its own micro-batches:
layers of the stages, order of the micro-batches, layer plans; what the simulator finds quickest for
the pipeline alone is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from headrace.costs import CostModel
from headrace.planning.batch import SortedBatch
from headrace.planning.packed import Packed
from headrace.planning.priced import PricedScheme
from headrace.planning.schedule import Assignment
from headrace.planning.stages import StageCosts
from headrace.simulator import step_s
from headrace.spec import LayerPlan, Lengths, MicroBatch, Pipeline, Plan

__all__ = ["laid_out", "micro_batches_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setup:
    """A pipeline with stages and its micro-batches in order, each with a row of its scheme."""

    pipeline: Pipeline
    bins: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]


def laid_out(schedule: Assignment, costs: CostModel, *, larger_last: bool = False) -> Plan:
    """The plan of a schedule with the seconds that the simulator predicts, and no bound yet.
    ``larger_last``: ranks work in larger groups after smaller ones, not before."""
    table = schedule.table
    batch, groups = table.batch, list(zip(schedule.groups, schedule.packs, strict=True))
    pipelines, micro_batches = list[Pipeline](), list[MicroBatch]()
    groups = groups[::-1] if larger_last else groups
    ends = _ends([ranks for (_, ranks, _), _ in groups])
    for ((k, ranks, _), packed), (first, last) in zip(groups, ends, strict=True):
        priced = table.schemes[k]
        if priced.stages is not None:
            setup = _set_up(priced, ranks, packed, batch, costs)
        else:
            setup = _plain(priced, ranks, packed, first=first, last=last)
        number = len(pipelines)
        micro_batches += micro_batches_of(priced, setup.bins, setup.rows, number, batch, costs)
        pipelines.append(setup.pipeline)
    weights = {table.schemes[k].weights for k, _, _ in schedule.groups}
    plan = Plan(
        lengths=batch.lengths,
        devices=table.devices,
        working="sharded" if "sharded" in weights else "replicated",
        pipelines=tuple(pipelines),
        micro_batches=tuple(micro_batches),
        predicted_s=0.0,
        lower_bound_s=0.0,
    )
    return plan.replace(predicted_s=step_s(plan, costs))


def micro_batches_of(
    priced: PricedScheme,
    bins: Sequence[Sequence[int]],
    rows: Sequence[int],
    pipeline: int,
    batch: SortedBatch,
    costs: CostModel,
) -> Iterator[MicroBatch]:
    """The micro-batches of a pipeline of a plan."""
    for members, row in zip(bins, rows, strict=True):
        layers = priced.layer_plan(row) or LayerPlan()
        yield MicroBatch(
            pipeline=pipeline,
            sequences=tuple([batch.order[i] for i in members]),
            layers=layers,
            order=priced.order_of(row, costs),
        )


def _ends(groups: Sequence[tuple[int, ...]]) -> list[tuple[bool, bool]]:
    """Whether each of several groups of ranks, in order, is the first of some rank, and the
    last."""
    first, last = dict[int, int](), dict[int, int]()
    for number, ranks in enumerate(groups):
        for rank in ranks:
            first.setdefault(rank, number)
            last[rank] = number
    firsts, lasts = set(first.values()), set(last.values())
    return [(number in firsts, number in lasts) for number in range(len(groups))]


def _plain(
    priced: PricedScheme, ranks: tuple[int, ...], packed: Packed, *, first: bool, last: bool
) -> _Setup:
    pipeline = Pipeline(scheme=priced.scheme, ranks=ranks)
    if len(packed.bins) == 1:
        return _Setup(pipeline=pipeline, bins=packed.bins, rows=packed.rows)
    order = _falling(packed)
    if last or not first:
        order = [*order[1:], order[0]]
    return _Setup(
        pipeline=pipeline,
        bins=tuple(packed.bins[j] for j in order),
        rows=tuple(packed.rows[j] for j in order),
    )


def _falling(packed: Packed) -> list[int]:
    """Micro-batches by their seconds, longest first."""
    times, bins = packed.times, packed.bins
    return sorted(range(len(bins)), key=lambda j: (-times[j], bins[j]))


def _set_up(
    priced: PricedScheme,
    ranks: tuple[int, ...],
    packed: Packed,
    batch: SortedBatch,
    costs: CostModel,
) -> _Setup:
    """The quickest shares for micro-batches longest first, then the quickest order: shortest
    first, or the longest in the middle, so that short ones fill and drain the pipeline."""
    assert priced.stages is not None, "asked only of pipelines with stages"
    falling = _falling(packed)
    orders = [falling, falling[::-1], [*falling[1::2][::-1], *falling[::2]]]
    made = [
        (*_timed(priced, stages, ranks, packed, falling, batch, costs), stages)
        for stages in priced.stages.variants()
    ]
    best_s, best, stages = min(made, key=lambda item: item[0])
    for order in orders[1:] if len(falling) > 1 else ():
        seconds, tried = _timed(priced, stages, ranks, packed, order, batch, costs)
        if seconds < best_s:
            best_s, best = seconds, tried
    assert best_s < inf, "micro-batches of the same layers fit in any order"
    return best


def _timed(
    priced: PricedScheme,
    stages: StageCosts,
    ranks: tuple[int, ...],
    packed: Packed,
    order: Sequence[int],
    batch: SortedBatch,
    costs: CostModel,
) -> tuple[float, _Setup]:
    """(seconds, set-up) of a pipeline alone, infinite where it does not fit."""
    bins = tuple(packed.bins[j] for j in order)
    rows = _quickened(stages, bins, [packed.rows[j] for j in order], batch)
    pipeline = Pipeline(scheme=priced.scheme, ranks=ranks, shares=stages.shares)
    setup = _Setup(pipeline=pipeline, bins=bins, rows=rows)
    held = [sum([batch.tokens[i] for i in own]) for own in bins]
    if not stages.fits(list(zip(held, rows, strict=True))):
        return inf, setup
    return step_s(_alone(priced, setup, batch, costs), costs), setup


def _alone(priced: PricedScheme, setup: _Setup, batch: SortedBatch, costs: CostModel) -> Plan:
    """The plan of one pipeline with its sequences only."""
    held = sorted(i for members in setup.bins for i in members)
    place = {i: at for at, i in enumerate(held)}
    lengths = Lengths(tokens=tuple(batch.tokens[i] for i in held))
    own = SortedBatch.of(lengths)
    at = {index: position for position, index in enumerate(own.order)}
    bins = [[at[place[i]] for i in members] for members in setup.bins]
    return Plan(
        lengths=lengths,
        devices=costs.cluster.devices,
        working=priced.weights,
        pipelines=(setup.pipeline,),
        micro_batches=tuple(micro_batches_of(priced, bins, setup.rows, 0, own, costs)),
        predicted_s=0.0,
        lower_bound_s=0.0,
    )


def _quickened(
    stages: StageCosts, bins: Sequence[Sequence[int]], rows: Sequence[int], batch: SortedBatch
) -> tuple[int, ...]:
    """Rows of micro-batches in this order, quicker ones than ``rows`` where the stages have memory
    for what is in flight at the same time, what gains most first."""
    sums = [
        (sum([batch.tokens[i] ** 2 for i in own]), sum([batch.tokens[i] for i in own]))
        for own in bins
    ]
    table = [
        [stages.seconds(row, *both) for row in range(len(stages.table.plans))] for both in sums
    ]
    chosen = list(rows)
    gains = sorted(
        (each[other] - each[chosen[j]], j, other)
        for j, each in enumerate(table)
        for other in range(len(each))
        if each[other] < each[chosen[j]]
    )
    done = set[int]()
    for _, j, other in gains:
        if j not in done:
            tried = [*chosen[:j], other, *chosen[j + 1 :]]
            if stages.fits([(held, row) for (_, held), row in zip(sums, tried, strict=True)]):
                chosen[j] = other
                done.add(j)
    return tuple(chosen)
