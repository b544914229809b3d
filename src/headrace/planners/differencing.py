"""Numbers in sets of like sums: Karmarkar and Karp's largest differencing method."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

__all__ = ["differenced"]

Sets = list[tuple[float, list[int]]]
"""(sum of weights, negated so that the heaviest set sorts first; the numbers) of each set."""


def differenced(weights: Sequence[float], parts: int) -> list[list[int]]:
    """Split the numbers of ``weights`` into ``parts`` sets whose weights sum to about the same,
    each set in rising order.

    Each number begins as a partial solution of its own: one set of it, the others empty. The two
    partial solutions whose heaviest and lightest sets differ most are joined, the heaviest set of
    one with the lightest of the other and so on, until one is left. Empty sets are not stored.
    """
    # (spread between the heaviest and the lightest set, negated; a number; the sets) of each.
    heap: list[tuple[float, int, Sets]] = [
        (-weight if parts > 1 else 0, i, [(-weight, [i])]) for i, weight in enumerate(weights)
    ]
    heapify(heap)
    while len(heap) > 1:
        _, first_number, first = heappop(heap)
        _, _, second = heappop(heap)
        # The second's sets meet the first's lightest ones, absent ones being empty; so many of the
        # first's heaviest stay as they are.
        unpaired = max(0, parts - len(second))
        joined = first[:unpaired]
        for (heavy_sum, heavy_numbers), (light_sum, light_numbers) in zip(
            first[unpaired:], reversed(second), strict=False
        ):
            joined.append((heavy_sum + light_sum, heavy_numbers + light_numbers))
        joined += second[: len(second) - max(0, len(first) - unpaired)]
        joined.sort()
        spread = (joined[-1][0] if len(joined) == parts else 0) - joined[0][0]
        heappush(heap, (-spread, first_number, joined))
    sets = [sorted(numbers) for _, numbers in heap[0][2]] if heap else []
    return sets + [[] for _ in range(parts - len(sets))]
