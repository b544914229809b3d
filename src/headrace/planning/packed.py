"""A pipeline's sequences in micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Packed", "longest_two"]


@dataclass(frozen=True, slots=True)
class Packed:
    """Micro-batches of one pipeline: positions in the batch, each with a row of the frontier and
    its seconds on one stage, and the pipeline's seconds. The longest takes ``longest_s`` and the
    next ``next_s``, which is the same where there is one."""

    seconds: float
    bins: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]
    times: tuple[float, ...]
    longest_s: float
    next_s: float

    @classmethod
    def of(
        cls,
        bins: Iterable[Sequence[int]],
        rows: Sequence[int],
        times: Sequence[float],
        depth: int = 1,
    ) -> Packed:
        """Micro-batches of ``times`` seconds on each of ``depth`` stages."""
        longest_s, next_s = longest_two(times)
        seconds = sum(times) + (depth - 1) * longest_s
        packs = tuple(map(tuple, bins))
        return cls(seconds, packs, tuple(rows), tuple(times), longest_s, next_s)


def longest_two(times: Sequence[float]) -> tuple[float, float]:
    """The longest of some seconds, and the next, which is the same where there is one."""
    if len(times) == 1:
        return times[0], times[0]
    rising = sorted(times)
    return rising[-1], rising[-2]
