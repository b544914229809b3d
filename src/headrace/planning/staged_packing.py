"""Packs the sequences of a pipeline with stages, all micro-batches by one row of its frontier.

The number V of micro-batches is enumerated from the tokens' least to ``util``'s most, in the order
of

    sum T + c V + (P - 1) (max(longest T, sum T / V, pigeons) + c),

which no packing into V beats: the mean is no more than the largest, and of the m V + 1 longest
sequences some micro-batch has m + 1, together no less than the m + 1 shortest of them. It stops
where that is no better than what is found. One V is filled longest first, into the micro-batch with
the least seconds that has room, then improved by moves and swaps out of the largest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import accumulate

from headrace.planning.batch import best_fit
from headrace.planning.priced import Line

__all__ = ["pack_stages"]

_COUNTS_TRIED = 3  # numbers V of micro-batches that are filled, at most
_STEPS = 12  # moves and swaps of one filling, at most
_OTHERS = 3  # shortest micro-batches with which the longest exchanges
_LEVEL = 1.002  # up to this times what no packing beats, nothing is improved

Seconds = Mapping[int, float] | Sequence[float]
"""Seconds that each sequence, by its position, adds to its micro-batch on every stage."""


def pack_stages(
    line: Line, tokens: Sequence[int], seconds: Seconds, members: Sequence[int]
) -> tuple[float, list[list[int]]]:
    """Pack the sequences of a pipeline with stages.

    Args:
        line: The pipeline by one row of its scheme.
        tokens: Tokens of every position.
        seconds: Seconds that each member adds to its micro-batch on every stage.
        members: Positions of the sequences, longest first, each of which fits a micro-batch.

    Returns:
        Seconds of the pipeline, and the positions of each micro-batch.
    """
    held = sum([tokens[i] for i in members])
    work, longest = sum([seconds[i] for i in members]), seconds[members[0]]
    bubbles = line.stages - 1
    least = -(-held // line.cap)
    most = min(len(members), max(least, held // line.util))
    middle = line.count(work, held, longest)
    near = range(max(least, middle - _COUNTS_TRIED), min(most, middle + _COUNTS_TRIED) + 1)
    sums = list(accumulate([seconds[i] for i in members], initial=0.0))
    order = []
    for v in near or [least]:
        level_s = max(longest, work / v, _pigeons_s(sums, v))
        order.append((work + line.c * v + bubbles * (level_s + line.c), v, level_s))
    order.sort()
    best: tuple[float, list[list[int]]] | None = None
    tried = 0
    for bound_s, v, level_s in order:
        if best is not None and (bound_s >= best[0] or tried >= _COUNTS_TRIED):
            break
        filled = _longest_first(tokens, seconds, line.cap, members, v)
        if filled is not None:
            tried += 1
            found = _improved(line, tokens, seconds, filled, level_s * _LEVEL)
            if best is None or found < best[0]:
                best = found, filled.members
    if best is None:
        filled = _first_fit(tokens, seconds, line.cap, members)
        best = _improved(line, tokens, seconds, filled, longest), filled.members
    return best


def _pigeons_s(sums: Sequence[float], v: int) -> float:
    """Least seconds of the fullest of ``v`` micro-batches: of m v + 1 sequences some one holds m +
    1. ``sums`` are prefix sums of their seconds, longest first."""
    most = (len(sums) - 2) // v
    if most < 1:
        return 0.0
    last = most * v + 1
    return max(sums[last] - sums[last - most - 1], sums[v + 1] - sums[v - 1])


@dataclass(slots=True)
class _Bins:
    """Micro-batches while they are made.

    Attributes:
        members: Positions of the sequences of each.
        times: Seconds of each on one stage, without its constant.
        held: Tokens of each.
    """

    members: list[list[int]]
    times: list[float]
    held: list[int]


def _longest_first(
    tokens: Sequence[int], seconds: Seconds, cap: int, members: Sequence[int], v: int
) -> _Bins | None:
    """``members``, longest first, each in the one of ``v`` micro-batches with the least seconds
    that has room; None when a sequence finds none. ``v`` is at most the number of sequences."""
    bins: list[list[int]] = [[] for _ in range(v)]
    held = [0] * v
    heap = [(0.0, b) for b in range(v)]
    for i in members:
        length = tokens[i]
        full = []
        while heap and held[heap[0][1]] + length > cap:
            full.append(heappop(heap))
        if not heap:
            return None
        at, b = heap[0]
        heapreplace(heap, (at + seconds[i], b))
        for entry in full:
            heappush(heap, entry)
        held[b] += length
        bins[b].append(i)
    times = [0.0] * v
    for at, b in heap:
        times[b] = at
    return _Bins(members=bins, times=times, held=held)


def _first_fit(tokens: Sequence[int], seconds: Seconds, cap: int, members: Sequence[int]) -> _Bins:
    """Micro-batches filled longest sequence first, each into the fullest with room."""
    bins = best_fit(tokens, members, cap)
    return _Bins(
        members=bins,
        times=[sum([seconds[i] for i in held]) for held in bins],
        held=[sum([tokens[i] for i in held]) for held in bins],
    )


def _improved(
    line: Line, tokens: Sequence[int], seconds: Seconds, filled: _Bins, enough_s: float
) -> float:
    """Move and swap sequences out of the longest micro-batch, in place, until that takes
    ``enough_s`` on one stage; returns the seconds of the pipeline."""
    bins, times, held = filled.members, filled.times, filled.held
    for _ in range(_STEPS if len(bins) > 1 else 0):
        top = times.index(max(times))
        if times[top] <= enough_s:
            break
        change = _change(line.cap, tokens, seconds, filled, top)
        if change is None:
            break
        b, i, r = change
        for source, target, moved in ((top, b, i), (b, top, r)):
            if moved >= 0:
                bins[source].remove(moved)
                bins[target].append(moved)
                times[source] -= seconds[moved]
                times[target] += seconds[moved]
                held[source] -= tokens[moved]
                held[target] += tokens[moved]
    return sum(times) + line.c * len(times) + (line.stages - 1) * (max(times) + line.c)


def _change(
    cap: int, tokens: Sequence[int], seconds: Seconds, filled: _Bins, top: int
) -> tuple[int, int, int] | None:
    """The change that lowers the seconds of micro-batch ``top``, the longest, the most, without
    making another as long: (other micro-batch, sequence to it, sequence back or -1); None when
    nothing does."""
    bins, times, held = filled.members, filled.times, filled.held
    best_s, found = times[top] * (1 - 1e-6), None
    here_s, here = times[top], held[top]
    for b in sorted(range(len(bins)), key=times.__getitem__)[:_OTHERS]:
        there_s, there = times[b], held[b]
        if b == top:
            break
        for i in bins[top]:
            out_s, out = seconds[i], tokens[i]
            if max(here_s - out_s, there_s + out_s) < best_s and there + out <= cap:
                best_s, found = max(here_s - out_s, there_s + out_s), (b, i, -1)
            # A sequence back must bring both below the best, so its seconds lie in between.
            least_s, most_s = there_s + out_s - best_s, best_s - here_s + out_s
            for r in bins[b] if least_s < most_s else ():
                if least_s < seconds[r] < most_s:
                    step = out - tokens[r]
                    larger = max(here_s - out_s + seconds[r], there_s + out_s - seconds[r])
                    if larger < best_s and there + step <= cap and here - step <= cap:
                        best_s, found = larger, (b, i, r)
        if found:
            break
    return found
