"""Deals sequences out to pipelines, each where it ends first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import groupby

from headrace.planning.batch import PriceTable

__all__ = [
    "Pipelines",
    "deal",
    "joined",
    "refilled",
]


def joined(
    table: PriceTable,
    k: int,
    spare_s: float,
    room: list[int],
    need_s: float,
    tokens: int,
    count: int,
) -> tuple[int, float]:
    """How many of ``count`` equal sequences a pipeline of scheme k takes, and the seconds it has
    left then.

    Args:
        table: The prices.
        k: The scheme.
        spare_s: Seconds that the pipeline has left.
        room: Tokens left of its micro-batches, changed in place; one number where the scheme has
            stages or is fluid, as there constants are dealt out to tokens.
        need_s: Seconds of each sequence.
        tokens: Tokens of each sequence.
        count: Number of sequences.
    """
    if table.depth[k] > 1 or table.fluid[k]:
        return _dealt(table.share[k], spare_s, room, need_s, tokens, count)
    return _counted(table.c[k], table.cap[k], spare_s, room, need_s, tokens, count)


def _counted(
    c: float, cap: int, spare_s: float, room: list[int], need_s: float, tokens: int, count: int
) -> tuple[int, float]:
    """:func:`joined` where micro-batches are counted: each sequence into the fullest that holds it,
    else into a new one."""
    taken = 0
    while taken < count:
        at = bisect_left(room, tokens)
        new = at == len(room)
        left, usable_s = (cap, spare_s - c) if new else (room[at], spare_s)
        some = min(count - taken, left // tokens, _times(usable_s, need_s, count))
        if some < 1:
            break
        if not new:
            del room[at]
        insort(room, left - some * tokens)
        spare_s = usable_s - some * need_s
        taken += some
    return taken, spare_s


def _dealt(
    share: float, spare_s: float, room: list[int], need_s: float, tokens: int, count: int
) -> tuple[int, float]:
    """:func:`joined` where constants are dealt out: first sequences for which tokens are left, then
    those that pay for theirs."""
    free = min(count, room[0] // tokens, _times(spare_s, need_s, count))
    spare_s -= free * need_s
    left = room[0] - free * tokens
    paid = 0
    if free < count and left < tokens:
        saved_s, dear_s = left * share, need_s + tokens * share
        paid = _times(spare_s + saved_s, dear_s, count - free)
        if paid:
            spare_s = max(0.0, spare_s + saved_s - paid * dear_s)
            left = 0
    room[0] = left
    return free + paid, spare_s


def _times(spare_s: float, need_s: float, most: int) -> int:
    """How many times ``need_s`` is in ``spare_s``, at most ``most``."""
    if spare_s < need_s:
        return 0
    if most * need_s <= spare_s:
        return most
    times = int(spare_s / need_s)
    return times - 1 if times * need_s > spare_s else times


def refilled(table: PriceTable, k: int, room: list[int], tokens: int, count: int) -> None:
    """Put ``count`` sequences into the micro-batches ``room`` of a scheme whose micro-batches are
    counted, whatever the seconds."""
    _counted(0.0, table.cap[k], 0.0, room, 0.0, tokens, count)


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
