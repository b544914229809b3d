"""The learning rate as a function of the step alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.errors import SpecError

__all__ = ["Schedule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Linear warm-up over ``warmup_steps``, then a cosine from ``lr`` to ``floor * lr`` at
    ``steps``."""

    lr: float
    steps: int
    warmup_steps: int = 0
    floor: float = 0.1

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup_steps < 0:
            raise SpecError("schedule", got=f"{self.steps} steps", wanted=">= 1, warm-up >= 0")

    def rate(self, step: int) -> float:
        """The rate of step ``step`` (the first is 0)."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        span = max(1, self.steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        return self.lr * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress)))
