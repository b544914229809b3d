"""The memory margin: what measured peaks say about predicted ones, and means that forget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.errors import CostError

__all__ = ["LEAST_MARGIN", "MOST_MARGIN", "Estimate", "Peaks", "raised_margin"]

LEAST_MARGIN, MOST_MARGIN = 0.05, 0.6

_SAFETY = 1.1  # what peaks may exceed the largest that was learnt by
_SPREADS = 3.0  # that a peak may lie above the mean
_ENOUGH = 20  # steps with peaks worth learning from, before less than the prior is believed
_NOTICEABLE = 0.25  # of the memory: smaller peaks count as this much
_GRID = 20  # margins are multiples of 1 / _GRID, so that runs alike start with the same one

KEEP = 0.98
"""Of what was known, at each value: one counts half after 34 others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean and a variance that forget: of ``count`` values, the last some fifty matter."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 0:
            raise CostError("count of an estimate", got=repr(self.count), wanted="an int >= 0")
        for name, value in (("mean", self.mean), ("variance", self.variance)):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise CostError(f"{name} of an estimate", got=repr(value), wanted="a number")
            if not math.isfinite(value) or (name == "variance" and value < 0):
                raise CostError(f"{name} of an estimate", got=value, wanted="finite, variance >= 0")

    @property
    def spread(self) -> float:
        """The standard deviation."""
        return math.sqrt(self.variance)

    def after(self, value: float, within: float = 0.0) -> Estimate:
        """With one more ``value``, itself a mean of values of variance ``within``.

        a         = max(1 - keep, 1 / count)
        mean'     = mean + a (value - mean)
        variance' = (1 - a) (variance + a (value - mean)^2) + a within
        """
        a = max(1 - KEEP, 1 / (self.count + 1))
        away = value - self.mean
        return Estimate(
            count=self.count + 1,
            mean=self.mean + a * away,
            variance=(1 - a) * (self.variance + a * away * away) + a * within,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Measured over predicted peak bytes, of the worst rank of each step that says something:
    what is ``usual``, and the ``largest``, whose distance to the usual is forgotten at the same
    pace."""

    usual: Estimate = field(default_factory=Estimate)
    largest: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.largest, bool) or not isinstance(self.largest, int | float):
            raise CostError("largest ratio of peaks", got=repr(self.largest), wanted="a number")
        if not math.isfinite(self.largest) or self.largest < 0:
            raise CostError("largest ratio of peaks", got=self.largest, wanted="finite, >= 0")

    def after(self, predicted: Sequence[int], measured: Sequence[int], memory_bytes: int) -> Peaks:
        """With the peak bytes of all ranks of one more step; the worst rank counts."""
        ratios = [
            _ratio(p, m, memory_bytes)
            for p, m in zip(predicted, measured, strict=True)
            if max(p, m) > _NOTICEABLE * memory_bytes
        ]
        if not ratios:
            return self
        usual = self.usual.after(max(ratios))
        faded = usual.mean + KEEP * (self.largest - usual.mean)
        return Peaks(usual=usual, largest=max(*ratios, faded))

    @property
    def high(self) -> float:
        """What ratios seldom exceed: max(largest, mean + 3 spreads)."""
        return max(self.largest, self.usual.mean + _SPREADS * self.usual.spread)

    def margin(self, prior: float) -> float:
        """The fraction of a rank's memory that plans leave free.

            margin = 1 - 1 / (1.1 high)    high = max(largest, mean + 3 spreads) of the ratios
                                           measured over predicted peak of the worst rank of a step

        rounded up to a multiple of 0.05, and at least 0.05, at most 0.6: then a predicted peak of
        (1 - margin) memory times ``high`` and a safety of 1.1 stays within the memory. Peaks below
        a quarter of the memory count as a quarter, and steps that stay below altogether not at
        all: what a process needs anyway would look like a large error of a small prediction.
        ``prior`` holds until something was learnt, and is a lower bound for the first 20 steps
        worth learning from.
        """
        if self.usual.count == 0:
            return prior
        found = _margin_for(self.high)
        return found if self.usual.count >= _ENOUGH else max(prior, found)


def raised_margin(
    margin: float, predicted: Sequence[int], measured: Sequence[int], memory_bytes: int
) -> float:
    """The margin after a step, given the peak bytes of all ranks: ``margin`` unless a peak came
    nearer to the memory than the safety of :meth:`Peaks.margin` allows, above
    memory / 1.1; then at least what that peak's ratio asks for.

    It follows from this step alone, so that a resumed run goes on with the margin in force.
    """
    for p, m in zip(predicted, measured, strict=True):
        if m > memory_bytes / _SAFETY:
            margin = max(margin, _margin_for(_ratio(p, m, memory_bytes)))
    return margin


def _ratio(predicted: int, measured: int, memory_bytes: int) -> float:
    least = _NOTICEABLE * memory_bytes
    return max(measured, least) / max(predicted, least)


def _margin_for(ratio: float) -> float:
    margin = min(MOST_MARGIN, max(LEAST_MARGIN, 1 - 1 / (_SAFETY * max(ratio, 1 / _SAFETY))))
    return math.ceil(margin * _GRID - 1e-9) / _GRID
