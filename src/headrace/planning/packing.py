"""Packs the sequences of one pipeline into micro-batches (Hydraulis, equation 1, appendix D).

Data        sequences, longest first; the scheme's frontier (seconds and tokens of every row).
Variables   the number V of micro-batches, which sequence goes to which, the row of each.
Constraint  a micro-batch holds at most the tokens of its row.
Objective   sum_j t_j + (P - 1) max_j t_j, t_j = sum_i (a l_i^2 + b l_i) + c by the row of j.

One stage: only the sum counts. If everything fits one micro-batch by the first row, and no other
row is quicker, that is optimal. With one row, V is what counts: best-fit decreasing finds the
fewest, nearly always. With more rows, fewer micro-batches pay fewer constants and more of them
recompute less, so the most promising V by an even split are filled longest first, beside best fit
under the quickest row's tokens, where longer sequences stand alone; each takes its quickest row.

Several stages: :mod:`headrace.planning.staged_packing`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from headrace.planning.batch import PriceTable
from headrace.planning.frontier import Frontier
from headrace.planning.staged_packing import Line, pack_stages

__all__ = ["Packed", "best_fit", "pack"]

_COUNTS_RANKED = 8
_COUNTS_TRIED = 2
_FEW_PACKS = 3  # of the quickest row: with more, the fewest micro-batches recompute for nothing

Bins = list[list[int]]


@dataclass(frozen=True, slots=True)
class Packed:
    """Micro-batches of one pipeline: positions in the batch, each with a row of the frontier, and
    the pipeline's seconds."""

    seconds: float
    bins: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]


def pack(table: PriceTable, k: int, members: Sequence[int]) -> Packed:
    """Pack ``members`` (positions, longest first), each of which scheme ``k`` holds."""
    scheme = table.schemes[k]
    frontier, tokens = scheme.frontier, table.tokens
    if not members:
        return Packed(0.0, (), ())
    if scheme.depth > 1:
        return _staged(table, k, members)
    if len(frontier.caps) == 1:
        seconds, cap = table.seconds(k), frontier.caps[0]
        work = sum([seconds[i] for i in members])
        held = sum([tokens[i] for i in members])
        bins = [list(members)] if held <= cap else best_fit(tokens, members, cap)
        return _of(work + frontier.rows[0][2] * len(bins), bins, (0,) * len(bins))
    own = [tokens[i] for i in members]
    total, squares = sum(own), sum([n * n for n in own])
    if total <= frontier.caps[0] and frontier.rules[0]:
        a, b, c = frontier.rows[0]
        return _of(a * squares + b * total + c, [list(members)], (0,))
    quick = frontier.quickest_cap(squares, total)
    tries = [best_fit(tokens, members, quick)]
    if total <= _FEW_PACKS * quick:
        tries.append(best_fit(tokens, members, frontier.most_tokens))
    for count in _counts(len(own), total, squares, quick, frontier):
        filled = _fill(tokens, members, count, frontier.most_tokens)
        if filled is not None:
            tries.append(filled)
    return min((_priced(bins, tokens, frontier) for bins in tries), key=lambda p: p.seconds)


def best_fit(tokens: Sequence[int], members: Sequence[int], cap: int) -> Bins:
    """``members``, longest first, each in the bin of ``cap`` tokens that it fills best, a new one
    where none has room; longer ones stand alone."""
    bins: Bins = []
    rooms: list[tuple[int, int]] = []  # (room, bin), rising
    for i in members:
        length = tokens[i]
        at = bisect_left(rooms, (length, -1))
        if at < len(rooms):
            room, b = rooms.pop(at)
            bins[b].append(i)
            insort(rooms, (room - length, b))
        else:
            insort(rooms, (cap - length, len(bins)))
            bins.append([i])
    return bins


def _of(seconds: float, bins: Bins, rows: tuple[int, ...]) -> Packed:
    return Packed(seconds, tuple(map(tuple, bins)), rows)


def _priced(bins: Bins, tokens: Sequence[int], frontier: Frontier) -> Packed:
    seconds, rows = 0.0, list[int]()
    for held in bins:
        own = [tokens[i] for i in held]
        found = frontier.best(sum([n * n for n in own]), sum(own))
        assert found is not None, "a pack is within the capacity"
        seconds += found[0]
        rows.append(found[1])
    return _of(seconds, bins, tuple(rows))


def _counts(
    sequences: int, total: int, squares: float, quick: int, frontier: Frontier
) -> list[int]:
    """Numbers of micro-batches worth trying, by the cost of an even split, up to one more than
    the quickest row, which holds ``quick`` tokens, takes."""
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


def _fill(tokens: Sequence[int], members: Sequence[int], count: int, cap: int) -> Bins | None:
    """Longest first, each into the emptiest of ``count`` bins; None when one overflows."""
    bins: Bins = [[] for _ in range(count)]
    heap = [(0, b) for b in range(count)]
    heapify(heap)
    for i in members:
        filled, b = heap[0]
        if filled + tokens[i] > cap:
            return None
        bins[b].append(i)
        heapreplace(heap, (filled + tokens[i], b))
    return [held for held in bins if held]


def _staged(table: PriceTable, k: int, members: Sequence[int]) -> Packed:
    """All micro-batches by one row, the best of those that hold the longest sequence."""
    scheme, tokens = table.schemes[k], table.tokens
    best: Packed | None = None
    for row, ((a, b, c), cap) in enumerate(
        zip(scheme.frontier.rows, scheme.frontier.caps, strict=True)
    ):
        if cap < tokens[members[0]]:
            continue
        line = Line(stages=scheme.depth, c=c, cap=cap, util=scheme.util)
        seconds = {i: (a * tokens[i] + b) * tokens[i] for i in members}
        found, bins = pack_stages(line, tokens, seconds, members)
        if best is None or found < best.seconds:
            best = _of(found, bins, (row,) * len(bins))
    assert best is not None, "the scheme holds every member"
    return best
