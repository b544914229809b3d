"""Residuals: the rows of a step that were measured against those that were predicted."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.costs.cost_model import CostModel
from headrace.spec.measurement import Timeline
from headrace.spec.plan import MicroBatch, Plan
from headrace.spec.program import Backward, Forward, parse_action

__all__ = ["Residual", "common_factor", "micro_batch_residuals", "rank_differences"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """One micro-batch: seconds of its forward and backward together, predicted and measured.

    ``shares`` are the parts of the predicted seconds of its layers by option key,
    ``cp2 megatron_cz+full``; they sum to one.
    """

    ranks: tuple[int, ...]
    predicted_s: float
    measured_s: float
    shares: Mapping[str, float]

    @property
    def log(self) -> float:
        """The logarithm of measured over predicted."""
        return math.log(self.measured_s / self.predicted_s)


def micro_batch_residuals(
    plan: Plan, predicted: Timeline, measured: Timeline, costs: CostModel
) -> tuple[Residual, ...]:
    """The residuals of a step's micro-batches, in the plan's order.

    A member of a group that arrives early waits in the group's first collective, and its row is
    longer by that. The shortest row of a group is of its last member, which is when the simulator
    lets the micro-batch start. Waiting for weights is not counted. A micro-batch that either
    timeline lacks is left out.
    """
    wanted, found = _seconds(predicted), _seconds(measured)
    return tuple(
        Residual(
            ranks=plan.pipelines[micro.pipeline].ranks, predicted_s=wanted[index],
            measured_s=found[index], shares=_shares(plan, micro, costs),
        )
        for index, micro in enumerate(plan.micro_batches)
        if wanted.get(index, 0.0) > 0 and found.get(index, 0.0) > 0
    )  # fmt: skip


def _seconds(timeline: Timeline) -> dict[int, float]:
    """Forward and backward of each micro-batch over its stages, by the last member of each."""
    shortest: dict[tuple[str, int, int], float] = {}
    for row in timeline.rows:
        if row.kind not in ("forward", "backward"):
            continue
        action = parse_action(row.action)
        if isinstance(action, Forward | Backward):
            # Not by their text: each member's backward names its own pushes.
            key = action.kind, action.stage, action.micro_batch
            shortest[key] = min(row.seconds - row.waited_s, shortest.get(key, math.inf))
    sums: dict[int, float] = defaultdict(float)
    for (_, _, micro_batch), seconds in shortest.items():
        sums[micro_batch] += seconds
    return sums


def _shares(plan: Plan, micro: MicroBatch, costs: CostModel) -> dict[str, float]:
    scheme, lengths = plan.pipelines[micro.pipeline].scheme, plan.tokens_of(micro)
    p = scheme.width
    seconds: dict[str, float] = defaultdict(float)
    for option, count in micro.layers.counts:
        seconds[f"cp{p} {option}"] += count * sum(
            costs.layer_seconds(lengths, p, option, plan.working)
        )
    total = sum(seconds.values())
    return {key: s / total if total > 0 else 1 / len(seconds) for key, s in seconds.items()}


def rank_differences(residuals: Sequence[Residual]) -> dict[int, float]:
    """How much slower each rank was than the others: the difference of logarithms between its
    measured over predicted seconds and the (lower) median of the other ranks'.

    Each rank is judged by its micro-batches in the smallest groups it worked in, and against others
    in groups of that size, so that a group size which is predicted badly says nothing about a rank.
    Ranks of one group cannot be told apart: a slow one makes all of them slow. A rank without work,
    or alone in groups of its size, is left out.
    """
    by_size: dict[int, list[tuple[int, float]]] = defaultdict(list)
    smallest: dict[int, int] = {}
    for (rank, size), value in _by_rank(residuals).items():
        by_size[size].append((rank, value))
        smallest[rank] = min(size, smallest.get(rank, size))
    found = {}
    for size, values in by_size.items():
        ordered = sorted(value for _, value in values)
        for rank, value in values:
            if smallest[rank] == size and len(ordered) > 1:
                found[rank] = value - _median_of_others(ordered, value)
    return found


def _median_of_others(ordered: Sequence[float], value: float) -> float:
    """The lower median of ``ordered`` without one ``value``."""
    middle = (len(ordered) - 2) // 2
    return ordered[middle if middle < bisect_left(ordered, value) else middle + 1]


def _by_rank(residuals: Sequence[Residual]) -> dict[tuple[int, int], float]:
    """The logarithm of measured over predicted of each rank and group size it worked in."""
    sums: dict[tuple[int, int], tuple[float, float]] = {}
    for residual in residuals:
        for rank in residual.ranks:
            key = rank, len(residual.ranks)
            measured_s, predicted_s = sums.get(key, (0.0, 0.0))
            sums[key] = measured_s + residual.measured_s, predicted_s + residual.predicted_s
    return {key: math.log(measured / predicted) for key, (measured, predicted) in sums.items()}


def common_factor(residuals: Sequence[Residual]) -> float:
    """The logarithm of measured over predicted of the whole step: the lower median over its ranks,
    so that one slow rank of two does not look like a slow machine. 0 without residuals."""
    sums: dict[int, tuple[float, float]] = {}
    for residual in residuals:
        for rank in residual.ranks:
            measured_s, predicted_s = sums.get(rank, (0.0, 0.0))
            sums[rank] = measured_s + residual.measured_s, predicted_s + residual.predicted_s
    ordered = sorted(math.log(measured / predicted) for measured, predicted in sums.values())
    return ordered[(len(ordered) - 1) // 2] if ordered else 0.0
