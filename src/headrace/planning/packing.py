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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace, nlargest

from headrace.planning.batch import PriceTable
from headrace.planning.frontier import Frontier
from headrace.planning.staged_packing import Line, pack_stages

__all__ = ["Packed", "best_fit", "likely", "pack"]

_COUNTS_RANKED = 8
_COUNTS_TRIED = 2
_FEW_PACKS = 3  # of the quickest row: with more, the fewest micro-batches recompute for nothing

Bins = list[list[int]]


@dataclass(frozen=True, slots=True)
class Packed:
    """Micro-batches of one pipeline: positions in the batch, each with a row of the frontier, and
    the pipeline's seconds. On one stage the longest takes ``longest_s`` and the next ``next_s``,
    which is the same where there is one."""

    seconds: float
    bins: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]
    longest_s: float
    next_s: float

    @classmethod
    def of(
        cls, bins: Iterable[Sequence[int]], rows: Sequence[int], times: Sequence[float],
        depth: int = 1,
    ) -> Packed:  # fmt: skip
        """Micro-batches of ``times`` seconds on each of ``depth`` stages."""
        longest_s = max(times)
        next_s = nlargest(2, times)[1] if len(times) > 1 else longest_s
        seconds = sum(times) + (depth - 1) * longest_s
        return cls(seconds, tuple(map(tuple, bins)), tuple(rows), longest_s, next_s)


def pack(table: PriceTable, k: int, members: Sequence[int]) -> Packed:
    """Pack ``members`` (positions, longest first), each of which scheme ``k`` holds."""
    scheme = table.schemes[k]
    frontier, tokens = scheme.frontier, table.tokens
    if not members:
        return Packed(0.0, (), (), 0.0, 0.0)
    if scheme.depth > 1:
        return _staged(table, k, members)
    if len(frontier.caps) == 1:
        seconds, cap, c = table.seconds(k), frontier.caps[0], frontier.rows[0][2]
        held = sum([tokens[i] for i in members])
        bins = [members] if held <= cap else best_fit(tokens, members, cap)
        return Packed.of(bins, (0,) * len(bins), [sum([seconds[i] for i in b]) + c for b in bins])
    own = [tokens[i] for i in members]
    total, squares = sum(own), sum([n * n for n in own])
    if total <= frontier.caps[0] and frontier.rules[0]:
        a, b, c = frontier.rows[0]
        return Packed.of([members], (0,), [a * squares + b * total + c])
    quick = frontier.quickest_cap(squares, total)
    tries = [best_fit(tokens, members, quick)]
    if total <= _FEW_PACKS * quick:
        tries.append(best_fit(tokens, members, frontier.most_tokens))
    for count in _counts(len(own), total, squares, quick, frontier):
        filled = _fill(tokens, members, count, frontier.most_tokens)
        if filled is not None:
            tries.append(filled)
    made = [_priced(bins, tokens, frontier) for bins in tries]
    return min(made, key=lambda p: p.seconds + sum(table.exposed_s(k, p.next_s, p.longest_s)))


def likely(table: PriceTable, k: int, members: Sequence[int]) -> Packed:
    """About what :func:`pack` will give, without the micro-batches: alike ones by the usual row,
    the longest of which holds at least the longest sequence."""
    seconds, room = table.seconds(k), table.room(k)
    count = max(1, -(-sum([room[i] for i in members]) // table.cap[k]))
    total_s = sum([seconds[i] for i in members]) + table.c[k] * count
    longest_s = max(total_s / count, seconds[members[0]] + table.c[k])
    next_s = (total_s - longest_s) / (count - 1) if count > 1 else longest_s
    total_s += (table.depth[k] - 1) * longest_s
    return Packed(total_s, (), (), longest_s, next_s)


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


def _priced(bins: Bins, tokens: Sequence[int], frontier: Frontier) -> Packed:
    times, rows = list[float](), list[int]()
    for held in bins:
        own = [tokens[i] for i in held]
        found = frontier.best(sum([n * n for n in own]), sum(own))
        assert found is not None, "a pack is within the capacity"
        times.append(found[0])
        rows.append(found[1])
    return Packed.of(bins, rows, times)


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
            times = [sum([seconds[i] for i in held]) + c for held in bins]
            best = Packed.of(bins, (row,) * len(bins), times, scheme.depth)
    assert best is not None, "the scheme holds every member"
    return best
