"""Residuals: the seconds of micro-batches that were measured against those that were predicted."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.costs.cost_model import CostModel
from headrace.spec.method import LayerPlan
from headrace.spec.plan import MicroBatch, Plan

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
    plan: Plan, predicted: Sequence[float], measured: Mapping[int, float], costs: CostModel
) -> tuple[Residual, ...]:
    """The residuals of a step's micro-batches, in the plan's order: seconds of their forwards and
    backwards without waiting, ``predicted`` for each and ``measured`` for those that ran. One that
    took no time is left out.
    """
    shares = _Shares(plan, costs)
    return tuple(
        Residual(
            ranks=plan.pipelines[micro.pipeline].ranks,
            predicted_s=predicted[index],
            measured_s=measured[index],
            shares=shares.of(micro),
        )
        for index, micro in enumerate(plan.micro_batches)
        if predicted[index] > 0 and measured.get(index, 0.0) > 0
    )


class _Shares:
    """The parts of options in predicted layer seconds: the coefficients of each once for every
    layer plan and width."""

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        self._plan, self._costs = plan, costs
        self._known: dict[tuple[int, int], dict[str, tuple[float, float, float]]] = {}

    def of(self, micro: MicroBatch) -> dict[str, float]:
        """The shares of a micro-batch by option key; they sum to one."""
        width = self._plan.pipelines[micro.pipeline].scheme.width
        lengths = self._plan.tokens_of(micro)
        squares, tokens = sum(n * n for n in lengths), sum(lengths)
        seconds = {
            key: a * squares + b * tokens + c
            for key, (a, b, c) in self._rows(width, micro.layers).items()
        }
        total = sum(seconds.values())
        return {key: s / total if total > 0 else 1 / len(seconds) for key, s in seconds.items()}

    def _rows(self, width: int, layers: LayerPlan) -> dict[str, tuple[float, float, float]]:
        """Coefficients of the seconds of all layers of each option. By the identity of their plan:
        hashing all layers of all micro-batches takes longer."""
        known = self._known.get((width, id(layers)))
        if known is None:
            known = dict[str, tuple[float, float, float]]()
            self._known[width, id(layers)] = known
            for option, count in Counter(layers.options).items():
                cost = self._costs.option(width, option)
                gather = sum(self._costs.gather_seconds(width, option, self._plan.working))
                lines = cost.forward, cost.backward
                known[f"cp{width} {option}"] = (
                    count * sum(line.a for line in lines),
                    count * sum(line.b for line in lines),
                    count * (sum(line.c for line in lines) + gather),
                )
        return known


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
