"""A mean and a spread that forget, for what drifts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.errors import CostError

__all__ = ["KEEP", "Estimate"]

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
        """  # fmt: skip
        a = max(1 - KEEP, 1 / (self.count + 1))
        away = value - self.mean
        return Estimate(
            count=self.count + 1, mean=self.mean + a * away,
            variance=(1 - a) * (self.variance + a * away * away) + a * within,
        )  # fmt: skip
