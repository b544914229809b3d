"""Packs the sequences of one block of ranks into micro-batches.

Data        sequences, longest first; the frontier (seconds and capacity of every layer plan).
Variables   the number V of micro-batches, which sequence goes to which, the layer plan of each.
Constraint  a micro-batch holds at most the tokens of its layer plan.
Objective   minimise the sum of the micro-batches' seconds; each pays its constant once.

One block runs its micro-batches one after the other, so only the sum counts: fewer micro-batches
pay fewer constants, more of them recompute less. When everything fits one micro-batch without
any recomputation that is optimal. Otherwise the most promising V, by an even split, are tried
with longest-first filling, beside first-fit under the quickest plan's capacity, where longer
sequences stand alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from headrace.planning.frontier import Frontier

__all__ = ["Packed", "pack"]

_COUNTS_RANKED = 8
_COUNTS_TRIED = 2

Bins = list[list[int]]


@dataclass(frozen=True, slots=True)
class Packed:
    """Micro-batches of one block: indices into the sequences, each with a plan of the frontier."""

    seconds: float
    bins: tuple[tuple[int, ...], ...]
    plans: tuple[int, ...]


def pack(tokens: Sequence[int], frontier: Frontier) -> Packed:
    """Pack sequences of ``tokens`` (longest first, each within ``frontier.most_tokens``)."""
    total, squares = sum(tokens), sum(n * n for n in tokens)
    if total <= frontier.caps[0] and frontier.rules[0]:
        a, b, c = frontier.rows[0]
        return Packed(a * squares + b * total + c, (tuple(range(len(tokens))),), (0,))
    quick = frontier.quickest_cap(squares, total)
    tries = [_first_fit(tokens, quick), _first_fit(tokens, frontier.most_tokens)]
    for count in _counts(len(tokens), total, squares, quick, frontier):
        filled = _fill(tokens, count, frontier.most_tokens)
        if filled is not None:
            tries.append(filled)
    return min((_priced(bins, tokens, frontier) for bins in tries), key=lambda p: p.seconds)


def _priced(bins: Bins, tokens: Sequence[int], frontier: Frontier) -> Packed:
    seconds, plans = 0.0, list[int]()
    for held in bins:
        found = frontier.best(sum(tokens[i] ** 2 for i in held), sum(tokens[i] for i in held))
        assert found is not None, "a pack is within the capacity"
        seconds += found[0]
        plans.append(found[1])
    return Packed(seconds, tuple(map(tuple, bins)), tuple(plans))


def _counts(
    sequences: int, total: int, squares: float, quick: int, frontier: Frontier
) -> list[int]:
    """Numbers of micro-batches worth trying, by the cost of an even split, up to one more than
    the quickest plan, which holds ``quick`` tokens, takes."""
    least = -(-total // frontier.most_tokens)
    most = min(sequences, max(least, -(-total // quick)) + 1)
    step = (most / least) ** (1 / _COUNTS_RANKED)
    grid = {round(least * step**k) for k in range(_COUNTS_RANKED + 1)} | {least + 1}
    ranked = []
    for count in grid:
        found = frontier.best(squares / count, -(-total // count))
        if found is not None and count <= sequences:
            ranked.append((count * found[0], count))
    return [count for _, count in sorted(ranked)[:_COUNTS_TRIED]]


def _fill(tokens: Sequence[int], count: int, cap: int) -> Bins | None:
    """Longest first, each into the emptiest of ``count`` bins; None when one overflows."""
    bins: Bins = [[] for _ in range(count)]
    heap = [(0, k) for k in range(count)]
    heapify(heap)
    for i, length in enumerate(tokens):
        filled, k = heap[0]
        if filled + length > cap:
            return None
        bins[k].append(i)
        heapreplace(heap, (filled + length, k))
    return [held for held in bins if held]


def _first_fit(tokens: Sequence[int], cap: int) -> Bins:
    """Longest first, each into the first bin with room; longer ones than ``cap`` stand alone."""
    bins: Bins = []
    room: list[int] = []
    for i, length in enumerate(tokens):
        for k, free in enumerate(room):
            if length <= free:
                bins[k].append(i)
                room[k] -= length
                break
        else:
            bins.append([i])
            room.append(cap - length)
    return bins
