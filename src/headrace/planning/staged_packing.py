"""Packs the sequences of a pipeline with stages, all micro-batches by one row of its frontier.

The number V of micro-batches is enumerated from the tokens' least to ``util``'s most, in the order
of

    sum T + c V + (P - 1) (max(longest T, sum T / V, pigeons) + c),

which no packing into V beats, with T the seconds of the sequences, c the constant of a micro-batch
and P stages: the mean is no more than the largest, and of the m V + 1 longest
sequences some micro-batch has m + 1, together no less than the m + 1 shortest of them. It stops
where that is no better than what is found. One V is filled longest first, into the micro-batch with
the least seconds that has room, then improved by moves and swaps out of the largest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import accumulate, chain
from math import inf

from headrace.planning.batch import best_fit
from headrace.planning.priced import Line
from headrace.planning.tolerances import CLOSE, GAIN

__all__ = ["COUNTS_TRIED", "pack_stages"]

COUNTS_TRIED = 2  # numbers V of micro-batches, and rows of the frontier, that are tried at most

Seconds = Mapping[int, float] | Sequence[float]
"""Seconds that each sequence, by its position, adds to its micro-batch on every stage."""

Tokens = Mapping[int, int] | Sequence[int]
"""Tokens of its micro-batch that each sequence, by its position, fills."""


def pack_stages(
    line: Line,
    tokens: Tokens,
    seconds: Seconds,
    members: Sequence[int],
    below_s: float = inf,
) -> tuple[float, list[list[int]]] | None:
    """Pack the sequences of a pipeline with stages.

    Args:
        line: The pipeline by one row of its scheme.
        tokens: Tokens of every position.
        seconds: Seconds that each member adds to its micro-batch on every stage.
        members: Positions of the sequences, longest first, each of which fits a micro-batch.
        below_s: Seconds below which the pipeline is of use.

    Returns:
        Seconds of the pipeline, and the positions of each micro-batch; None where a bound says that
        it takes ``below_s`` or longer.
    """
    tokens_held = sum([tokens[i] for i in members])
    work_s, longest_s = sum([seconds[i] for i in members]), seconds[members[0]]
    bubbles = line.stages - 1
    fewest = -(-tokens_held // line.cap)
    most = min(len(members), max(fewest, tokens_held // line.util))
    expected = line.count(work_s, tokens_held, longest_s)
    counts = range(max(fewest, expected - COUNTS_TRIED), min(most, expected + COUNTS_TRIED) + 1)
    prefix_s = list(accumulate([seconds[i] for i in members], initial=0.0))
    # (bound of the pipeline's seconds, count, bound of the longest micro-batch) of each count V.
    candidates = []
    for count in counts or [fewest]:
        # Of the longest micro-batch without its constant.
        level_s = max(longest_s, work_s / count, _pigeons_s(prefix_s, count))
        candidates.append((work_s + line.c * count + bubbles * (level_s + line.c), count, level_s))
    candidates.sort()
    if candidates[0][0] >= below_s:
        return None
    best: tuple[float, list[list[int]]] | None = None
    tried = 0
    for bound_s, count, level_s in candidates:
        if best is not None and (bound_s >= best[0] or tried >= COUNTS_TRIED):
            break
        filled = _longest_first(tokens, seconds, line.cap, members, count)
        if filled is not None:
            tried += 1
            seconds_found = _improved(line, tokens, seconds, filled, level_s * (1 + CLOSE))
            if best is None or seconds_found < best[0]:
                best = seconds_found, filled.members
    if best is None:
        filled = _first_fit(tokens, seconds, line.cap, members)
        best = _improved(line, tokens, seconds, filled, longest_s), filled.members
    return best


def _pigeons_s(prefix_s: Sequence[float], count: int) -> float:
    """Least seconds of the fullest of ``count`` micro-batches by the pigeonhole principle: of the m
    ``count`` + 1 longest sequences some m + 1 share one, and take at least what the shortest m + 1
    of them take. ``prefix_s`` are prefix sums of the seconds of the sequences, longest first."""
    m = (len(prefix_s) - 2) // count
    if m < 1:
        return 0.0
    end = m * count + 1
    # For the largest m, and for m = 1: the m + 1 shortest of the m count + 1 longest.
    return max(prefix_s[end] - prefix_s[end - m - 1], prefix_s[count + 1] - prefix_s[count - 1])


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
    tokens: Tokens, seconds: Seconds, cap: int, members: Sequence[int], count: int
) -> _Bins | None:
    """Put ``members``, longest first, each into the one of ``count`` micro-batches that has the
    least seconds and room within ``cap`` tokens; None when a sequence finds no room. ``count`` is
    at most the number of sequences."""
    bins: list[list[int]] = [[] for _ in range(count)]
    tokens_held = [0] * count
    by_load = [(0.0, b) for b in range(count)]
    # Micro-batches without room, the roomiest first: as tokens fall they may get room again.
    full = list[tuple[int, float, int]]()
    for i in members:
        need = tokens[i]
        while full and full[0][0] + need <= cap:
            _, load_s, b = heappop(full)
            heappush(by_load, (load_s, b))
        while by_load and tokens_held[by_load[0][1]] + need > cap:
            load_s, b = heappop(by_load)
            heappush(full, (tokens_held[b], load_s, b))
        if not by_load:
            return None
        load_s, b = by_load[0]
        heapreplace(by_load, (load_s + seconds[i], b))
        tokens_held[b] += need
        bins[b].append(i)
    times = [0.0] * count
    for load_s, b in chain(by_load, ((load_s, b) for _, load_s, b in full)):
        times[b] = load_s
    return _Bins(members=bins, times=times, held=tokens_held)


def _first_fit(tokens: Tokens, seconds: Seconds, cap: int, members: Sequence[int]) -> _Bins:
    """Micro-batches of up to ``cap`` tokens, as few as best fit finds: each sequence, longest
    first, goes into the fullest with room."""
    bins = best_fit(tokens, members, cap)
    return _Bins(
        members=bins,
        times=[sum([seconds[i] for i in held]) for held in bins],
        held=[sum([tokens[i] for i in held]) for held in bins],
    )


def _improved(
    line: Line, tokens: Tokens, seconds: Seconds, filled: _Bins, enough_s: float
) -> float:
    """Move and swap sequences of the longest and the shortest micro-batch, in place, until the
    longest takes at most ``enough_s`` seconds on one stage or nothing helps. Returns the seconds
    of the pipeline."""
    bins, times, held = filled.members, filled.times, filled.held
    while times[longest := times.index(max(times))] > enough_s:
        shortest = times.index(min(times))
        change = _change(line.cap, tokens, seconds, filled, longest, shortest)
        if change is None:
            break
        given, back = change  # -1 stands for no sequence back
        for source, target, moved in ((longest, shortest, given), (shortest, longest, back)):
            if moved >= 0:
                bins[source].remove(moved)
                bins[target].append(moved)
                times[source] -= seconds[moved]
                times[target] += seconds[moved]
                held[source] -= tokens[moved]
                held[target] += tokens[moved]
    return sum(times) + line.c * len(times) + (line.stages - 1) * (max(times) + line.c)


def _change(
    cap: int, tokens: Tokens, seconds: Seconds, filled: _Bins, longest: int, shortest: int
) -> tuple[int, int] | None:
    """The move or swap between micro-batches ``longest`` and ``shortest`` after which the longer of
    both is shortest, as (sequence that goes to the shortest, sequence that comes back or -1); None
    where nothing helps."""
    bins, times, held = filled.members, filled.times, filled.held
    best_s, best = times[longest] * (1 - GAIN), None
    longest_s, longest_tokens = times[longest], held[longest]
    other_s, other_tokens = times[shortest], held[shortest]
    for i in bins[longest] if longest != shortest else ():
        moved_s, moved_tokens = seconds[i], tokens[i]
        later_s = max(longest_s - moved_s, other_s + moved_s)
        if later_s < best_s and other_tokens + moved_tokens <= cap:
            best_s, best = later_s, (i, -1)
        # A sequence back must bring both below the best, so its seconds lie in between.
        least_s, most_s = other_s + moved_s - best_s, best_s - longest_s + moved_s
        for back in bins[shortest] if least_s < most_s else ():
            if least_s < seconds[back] < most_s:
                more_tokens = moved_tokens - tokens[back]
                later_s = max(
                    longest_s - moved_s + seconds[back], other_s + moved_s - seconds[back]
                )
                if (
                    later_s < best_s
                    and other_tokens + more_tokens <= cap
                    and longest_tokens - more_tokens <= cap
                ):
                    best_s, best = later_s, (i, back)
    return best
