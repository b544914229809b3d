"""Numbers in sets of like sums: Karmarkar and Karp's largest differencing method."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

__all__ = ["differenced"]

Sets = list[tuple[float, list[int]]]
"""Sums, less than nothing so that the heaviest set comes first, and the numbers."""


def differenced(weights: Sequence[float], parts: int) -> list[list[int]]:
    """Numbers of ``weights`` in ``parts`` sets of like sums, each set in rising order.

    Of all partial solutions, the two whose heaviest and lightest sets differ most are joined, the
    heaviest set of one with the lightest of the other, until one is left. Sets that are still
    empty are not written.
    """
    heap: list[tuple[float, int, Sets]] = [
        (-weight if parts > 1 else 0, i, [(-weight, [i])]) for i, weight in enumerate(weights)
    ]
    heapify(heap)
    while len(heap) > 1:
        _, first, widest = heappop(heap)
        _, _, second = heappop(heap)
        apart = max(0, parts - len(second))
        joined = widest[:apart]
        for (heavy, held), (light, more) in zip(widest[apart:], reversed(second), strict=False):
            joined.append((heavy + light, held + more))
        joined += second[: len(second) - max(0, len(widest) - apart)]
        joined.sort()
        spread = (joined[-1][0] if len(joined) == parts else 0) - joined[0][0]
        heappush(heap, (-spread, first, joined))
    sets = [sorted(held) for _, held in heap[0][2]] if heap else []
    return sets + [[] for _ in range(parts - len(sets))]
