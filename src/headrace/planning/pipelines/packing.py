"""Packs the sequences of one pipeline into micro-batches (Hydraulis, equation 1, appendix D).

Data        sequences, longest first, T their seconds on a stage; the pipe's room, constant, stages.
Variables   the number V of micro-batches, and which sequence goes to which.
Constraint  a micro-batch holds at most ``cap`` tokens.
Objective   sum_j t_j + (P - 1) max_j t_j with t_j = sum of T + c.

With one stage only V counts: best-fit decreasing finds the fewest that hold everything, nearly
always. With more stages V is enumerated from the tokens' least to ``util``'s most, in the order of

    sum T + c V + (P - 1) (max(longest T, sum T / V, pigeons) + c),

which no packing into V beats: the mean is no more than the largest, and of the m V + 1 longest
sequences some micro-batch has m + 1, together no less than the m + 1 shortest of them. It stops
where that is no better than what is found. One V is filled longest first, into the micro-batch with
the least seconds that has room, then improved by moves and swaps out of the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import accumulate

from headrace.planning.pipelines.batch import Batch
from headrace.planning.pipelines.world import Pipe

__all__ = ["Packed", "pack", "pigeons_s"]

_COUNTS_TRIED = 3
_STEPS = 12
_OTHERS = 3
_LEVEL = 1.002  # of what no packing beats: no improvement beyond it

Packed = tuple[float, list[list[int]]]
"""Seconds of the pipeline, and its micro-batches as places in the batch."""


def pack(batch: Batch, k: int, members: Sequence[int], *, enough_s: float = 0.0) -> Packed:
    """Micro-batches for the sequences at ``members``, longest first, on pipe ``k``; no better ones
    are looked for when the pipeline ends within ``enough_s``."""
    if not members:
        return 0.0, []
    pipe, tokens, seconds = batch.world.pipes[k], batch.tokens, batch.seconds(k)
    held = work = 0
    for i in members:
        held += tokens[i]
        work += seconds[i]
    if pipe.stages == 1:
        bins = [list(members)] if held <= pipe.cap else _fewest(tokens, pipe.cap, members)
        return work + pipe.c * len(bins), bins
    return _staged(batch, pipe, seconds, members, held, work, enough_s)


def _staged(
    batch: Batch, pipe: Pipe, seconds: list[float], members: Sequence[int], held: int, work: float,
    enough_s: float,
) -> Packed:  # fmt: skip
    tokens, longest = batch.tokens, seconds[members[0]]
    bubbles = pipe.stages - 1
    least = -(-held // pipe.cap)
    most = min(len(members), max(least, held // pipe.util))
    middle = pipe.count(work, held, longest)
    near = range(max(least, middle - _COUNTS_TRIED), min(most, middle + _COUNTS_TRIED) + 1)
    sums = list(accumulate([seconds[i] for i in members], initial=0.0))
    order = []
    for v in near or [least]:
        level_s = max(longest, work / v, pigeons_s(sums, 0, len(members), v))
        order.append((work + pipe.c * v + bubbles * (level_s + pipe.c), v, level_s))
    order.sort()
    best: Packed | None = None
    tried = 0
    for bound_s, v, level_s in order:
        if best is not None and (max(bound_s, enough_s) >= best[0] or tried >= _COUNTS_TRIED):
            break
        filled = _longest_first(tokens, seconds, pipe.cap, members, v)
        if filled is not None:
            tried += 1
            enough = (enough_s - work - pipe.c * v) / bubbles - pipe.c
            seconds_ = _improved(pipe, tokens, seconds, filled, max(level_s * _LEVEL, enough))
            if best is None or seconds_ < best[0]:
                best = seconds_, filled.members
    if best is None:
        bins = _fewest(tokens, pipe.cap, members)
        filled = _Bins(
            members=bins, times=[sum([seconds[i] for i in own]) for own in bins],
            held=[sum([tokens[i] for i in own]) for own in bins],
        )  # fmt: skip
        best = _improved(pipe, tokens, seconds, filled, longest), bins
    return best


def pigeons_s(sums: Sequence[float], begin: int, end: int, v: int) -> float:
    """What some of ``v`` micro-batches takes at least, given the sums of seconds before each of
    the sequences from ``begin`` to ``end``, longest first."""
    most = (end - begin - 1) // v
    if most < 1:
        return 0.0
    last = begin + most * v + 1
    several = sums[last] - sums[last - most - 1]
    return max(several, sums[begin + v + 1] - sums[begin + v - 1])


@dataclass(slots=True)
class _Bins:
    """Micro-batches being made, with their seconds (no constants) and tokens."""

    members: list[list[int]]
    times: list[float]
    held: list[int]


def _longest_first(
    tokens: list[int], seconds: list[float], cap: int, members: Sequence[int], v: int
) -> _Bins | None:
    """``v`` micro-batches, no more than sequences, of like seconds; None when a sequence finds no
    room."""
    bins: list[list[int]] = [[] for _ in range(v)]
    held = [0] * v
    heap = [(0.0, b) for b in range(v)]
    for i in members:
        length = tokens[i]
        at, b = heap[0]
        if held[b] + length <= cap:
            heapreplace(heap, (at + seconds[i], b))
        else:
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


def _fewest(tokens: list[int], cap: int, members: Sequence[int]) -> list[list[int]]:
    """Best-fit decreasing: into the micro-batch that it fills best, a new one when none has
    room."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in members:
        length = tokens[i]
        best = -1
        for b, free in enumerate(room):
            if length <= free and (best < 0 or free < room[best]):
                best = b
        if best < 0:
            bins.append([i])
            room.append(cap - length)
        else:
            bins[best].append(i)
            room[best] -= length
    return bins


def _improved(
    pipe: Pipe, tokens: list[int], seconds: list[float], filled: _Bins, enough_s: float
) -> float:
    """Moves and swaps out of the longest micro-batch until it takes ``enough_s``, in place; the
    pipeline's seconds."""
    bins, times, held = filled.members, filled.times, filled.held
    for _ in range(_STEPS if len(bins) > 1 else 0):
        top = times.index(max(times))
        if times[top] <= enough_s:
            break
        change = _change(pipe.cap, tokens, seconds, bins, times, held, top)
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
    return pipe.pipeline_s([time + pipe.c for time in times])


def _change(
    cap: int, tokens: list[int], seconds: list[float], bins: list[list[int]],
    times: list[float], held: list[int], top: int,
) -> tuple[int, int, int] | None:  # fmt: skip
    """(other micro-batch, sequence to it, sequence back or -1) that lowers the larger of the two
    the most; None when nothing does."""
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
            if least_s < most_s:
                for r in bins[b]:
                    if least_s < seconds[r] < most_s:
                        step = out - tokens[r]
                        larger = max(here_s - out_s + seconds[r], there_s + out_s - seconds[r])
                        if larger < best_s and there + step <= cap and here - step <= cap:
                            best_s, found = larger, (b, i, r)
        if found:
            break
    return found
