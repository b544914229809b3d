"""The steps whose timelines a run records; no torch here."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DrawnSteps", "EarlyAndRare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnSteps:
    """``wanted`` of ``steps`` steps, evenly, and the last one; none where none are wanted.

    Rows of all ranks are many: they are predicted, and gathered, for these steps only.
    """

    wanted: int
    steps: int

    def __contains__(self, number: object) -> bool:
        """Whether the step ``number`` is recorded."""
        if not self.wanted or not isinstance(number, int):
            return False
        return number % max(1, self.steps // self.wanted) == 0 or number == self.steps - 1


class EarlyAndRare:
    """The steps to record where nobody knows how many there will be: 1, 2, 4, ..."""

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and number > 0 and number & (number - 1) == 0
