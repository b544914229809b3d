"""Packs the sequences of one group into launches: fewest launches, best fit, longest first.

A group runs its launches one after the other, and each pays the same constant whatever it holds,
so of the packings under the cap only their number counts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

__all__ = ["launches_needed", "packed"]


def packed(tokens: Sequence[int], held: Sequence[int], cap: int) -> list[list[int]]:
    """``held`` (positions, longest first) in launches of at most ``cap`` tokens."""
    if sum([tokens[i] for i in held]) <= cap:
        return [list(held)] if held else []
    launches: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, launch), rising
    for i in held:
        length = tokens[i]
        at = bisect_left(rooms, (length, -1))
        if at < len(rooms):
            room, launch = rooms.pop(at)
            launches[launch].append(i)
            insort(rooms, (room - length, launch))
        else:
            insort(rooms, (cap - length, len(launches)))
            launches.append([i])
    return launches


def launches_needed(tokens: Sequence[int], held: Sequence[int], cap: int) -> int:
    """How many launches :func:`packed` makes."""
    if sum([tokens[i] for i in held]) <= cap:
        return 1 if held else 0
    return len(packed(tokens, held, cap))
