"""Group sizes of which each divides the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

__all__ = ["chains"]

_MOST = 24


def chains(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Rows of ``sizes`` (rising) such that each size divides the next, and none fits between or
    beyond: the maximal chains, those with the largest sizes first, at most two dozen."""
    return list(islice(_downwards(sizes), _MOST))


def _downwards(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for top in range(len(sizes) - 1, -1, -1):
        if not any(size % sizes[top] == 0 for size in sizes[top + 1 :]):
            yield from _below(sizes, (top,))


def _below(sizes: Sequence[int], chain: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    divisors = [row for row in range(chain[0]) if sizes[chain[0]] % sizes[row] == 0]
    next_rows = [
        row for row in divisors
        if not any(other > row and sizes[other] % sizes[row] == 0 for other in divisors)
    ]  # fmt: skip
    if not next_rows:
        yield chain
    for row in reversed(next_rows):
        yield from _below(sizes, (row, *chain))
