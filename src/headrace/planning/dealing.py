"""Deals sequences out to pipelines, each where it ends first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import groupby

from headrace.planning.batch import PriceTable
from headrace.planning.runs import refilled

__all__ = ["Pipelines", "deal"]

Pipelines = list[tuple[int, list[int]]]
"""(number of the scheme, positions longest first) of each pipeline."""


def deal(table: PriceTable, kept: Pipelines, loose: Sequence[int]) -> float:
    """Give the positions ``loose``, longest first, to pipelines without stages, each where it ends
    first; ``kept`` are changed. Returns when the last of these pipelines ends."""
    heaps: dict[int, list[tuple[float, int]]] = {}
    spaces = list[list[int]]()
    for g, (k, members) in enumerate(kept):
        space = list[int]()
        if table.depth[k] == 1:
            load, space = _held_by(table, k, members)
            heaps.setdefault(k, []).append((load, g))
        spaces.append(space)
    for heap in heaps.values():
        heapify(heap)
    fluid, share, c, cap = table.fluid, table.share, table.c, table.cap
    left_of = [s[0] if s else table.cap[k] for s, (k, _) in zip(spaces, kept, strict=True)]
    kinds = [(heap, table.seconds(k), table.room(k), k) for k, heap in heaps.items()]
    first, others = kinds[0], kinds[1:]
    for i in loose:
        heap, seconds, tokens, k = first
        if others:
            first_s = heap[0][0] + seconds[i]
            for kind in others:
                end_s = kind[0][0][0] + kind[1][i]
                if end_s < first_s:
                    first_s, (heap, seconds, tokens, k) = end_s, kind
        load, g = heap[0]
        kept[g][1].append(i)
        # The rules of ``added_s`` and ``put``, without calls: the innermost loop.
        if fluid[k]:
            left = left_of[g] - tokens[i]
            if left < 0:
                load -= left * share[k]
                left = 0
            left_of[g] = left
            heapreplace(heap, (load + seconds[i], g))
            continue
        space, length = spaces[g], tokens[i]
        at = bisect_left(space, length)
        if at < len(space):
            insort(space, space.pop(at) - length)
        else:
            load += c[k] if space else 0.0  # the first micro-batch is paid
            insort(space, cap[k] - length)
        heapreplace(heap, (load + seconds[i], g))
    return max(max(heap)[0] for heap in heaps.values())


def _held_by(table: PriceTable, k: int, members: Sequence[int]) -> tuple[float, list[int]]:
    """Seconds of a pipeline of scheme k without stages, and the tokens left of its micro-batches,
    rising, with ``members``, longest first; the first micro-batch is paid for if there are
    none."""
    c, cap = table.c[k], table.cap[k]
    if not members:
        return c, []
    seconds, tokens, room = table.seconds(k), table.room(k), list[int]()
    load_s = sum([seconds[i] for i in members])
    if table.fluid[k]:
        left = cap - sum([tokens[i] for i in members])
        return load_s + c + max(0, -left) * table.share[k], [max(0, left)]
    for length, run in groupby(map(tokens.__getitem__, members)):
        refilled(table, k, room, length, len(list(run)))
    return load_s + len(room) * c, room
