"""Moves and swaps that shorten the last pipeline of a dispatch.

A step takes the last pipeline and, from the least loaded upwards, others of every pipe: a sequence
goes over, or two change places, where both then end before the last one ended. Loads are told in
constant time from work, tokens and the longest sequence, the constants of all micro-batches
included, so that a move can save one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import nsmallest
from random import Random

from headrace.planning.pipelines.batch import Batch
from headrace.planning.pipelines.dispatch import Dispatch

__all__ = ["improve"]

_OTHERS = 6
_ENOUGH = 0.3  # of what two pipelines could gain by balancing
_GAIN = 1e-6
_SHAKEN = 3
_GUESSES = 4
_GUESS_OFF = 1.02

Change = tuple[float, int, int]
"""The later end of two pipelines, the sequence over, the sequence back or -1."""


def improve(
    batch: Batch, found: Dispatch, *, steps: int, target_s: float, extra: Sequence[float] = ()
) -> None:
    """Change ``found`` in place, ``steps`` times at most, until it is down to ``target_s``.
    ``extra[q]`` is what pipeline q takes beyond its load."""
    loads = found.loads
    if len(loads) < 2:
        return
    for _ in range(steps):
        ends = [load + more for load, more in zip(loads, extra, strict=True)] if extra else loads
        last = max(range(len(ends)), key=ends.__getitem__)
        if ends[last] <= target_s or not _relieve(batch, found, last, ends):
            return


def shaken(batch: Batch, found: Dispatch, *, rounds: int, steps: int, target_s: float) -> Dispatch:
    """The best after some rounds that move sequences at random and improve again: a way out where
    no single change helps. The dice are those of the batch."""
    random, best = Random(batch.sums[-1]), found
    pipes, tokens = batch.world.pipes, batch.tokens
    for _ in range(rounds if len(found.pipes) > 1 else 0):
        if best.seconds <= target_s:
            break
        members = [list(own) for own in best.members]
        last = max(range(len(members)), key=best.loads.__getitem__)
        for _ in range(_SHAKEN):
            source = last if members[last] else random.randrange(len(members))
            if not members[source]:
                continue
            i = random.choice(members[source])
            open_to = [q for q, k in enumerate(best.pipes) if tokens[i] <= pipes[k].cap]
            members[source].remove(i)
            members[random.choice(open_to)].append(i)
            last = random.randrange(len(members))
        tried = Dispatch.of(batch, best.pipes, members)
        improve(batch, tried, steps=steps, target_s=target_s)
        if tried.seconds < best.seconds:
            best = tried
    return best


def _relieve(batch: Batch, found: Dispatch, last: int, ends: Sequence[float]) -> bool:
    """One change that makes the later of two pipelines, one of them the last, end earlier."""
    others = nsmallest(_OTHERS + 1, range(len(ends)), key=ends.__getitem__)
    best: tuple[float, int, int, int] | None = None
    limit_s = ends[last] * (1 - _GAIN)
    for q in others:
        if q == last:
            continue
        change = _best_change(batch, found, (last, q), ends, limit_s)
        if change is not None:
            limit_s, i, r = change
            best = limit_s, q, i, r
            if ends[last] - limit_s >= _ENOUGH * (ends[last] - ends[q]) / 2:
                break
    if best is None:
        return False
    _, q, i, r = best
    _apply(batch, found, last, q, i, r)
    return True


def _best_change(
    batch: Batch, found: Dispatch, pair: tuple[int, int], ends: Sequence[float], limit_s: float
) -> Change | None:
    """The best change between two pipelines, with a later end below ``limit_s``."""
    last, q = pair
    pipes = batch.world.pipes
    if pipes[found.pipes[last]].stages == pipes[found.pipes[q]].stages == 1:
        return _without_stages(batch, found, pair, ends, limit_s)
    here_s, there_s = found.work[last], max(found.work[q], 1e-9)
    slopes = found.loads[last] / here_s, max(1.0, found.loads[q] / there_s)
    guesses = [
        (max(ends[last] + slopes[0] * (here - here_s),
             ends[q] + slopes[1] * (there - found.work[q])), i, r, here, there)
        for i, r, here, there in _options(batch, found, pair, ends)
    ]  # fmt: skip
    best = None
    for guess_s, i, r, here, there in nsmallest(_GUESSES, guesses):
        if guess_s < limit_s * _GUESS_OFF:
            later_s = _later_s(batch, found, pair, ends, (i, r, here, there))
            if later_s < limit_s:
                limit_s, best = later_s, (later_s, i, r)
    return best


def _options(
    batch: Batch, found: Dispatch, pair: tuple[int, int], ends: Sequence[float]
) -> Iterator[tuple[int, int, float, float]]:
    """(sequence over, sequence back or -1, work of the last then, work of the other then) of moves
    and of the swaps that come closest to levelling the two."""
    (last, q), tokens, pipes = pair, batch.tokens, batch.world.pipes
    k, j = found.pipes[last], found.pipes[q]
    ours, theirs = batch.seconds(k), batch.seconds(j)
    own, other, cap, room = found.members[last], found.members[q], pipes[j].cap, pipes[k].cap
    here, there = found.work[last], found.work[q]
    half_s, at = (ends[last] - ends[q]) / 2, 0
    for i in own:
        if tokens[i] > cap:
            continue
        here_s, there_s = here - ours[i], there + theirs[i]
        yield i, -1, here_s, there_s
        # Both lists fall, so the place in the other only goes on.
        wanted_s = ours[i] - half_s
        while at < len(other) and ours[other[at]] > wanted_s:
            at += 1
        for r in other[max(0, at - 1) : at + 1]:
            if tokens[r] < tokens[i] and tokens[r] <= room:
                yield i, r, here_s + ours[r], there_s - theirs[r]


def _without_stages(
    batch: Batch, found: Dispatch, pair: tuple[int, int], ends: Sequence[float], limit_s: float
) -> Change | None:
    """The same where both have one stage: loads are told here, as nothing runs more often."""
    (last, q), tokens, pipes = pair, batch.tokens, batch.world.pipes
    ours, theirs = pipes[found.pipes[last]], pipes[found.pipes[q]]
    more_here, more_there = ends[last] - found.loads[last], ends[q] - found.loads[q]
    held_here, held_there = found.held[last], found.held[q]
    best = None
    for i, r, here, there in _options(batch, found, pair, ends):
        if here + more_here < limit_s and there + more_there < limit_s:
            step = tokens[i] - (tokens[r] if r >= 0 else 0)
            end_s = there + more_there - theirs.c * (-(held_there + step) // theirs.cap)
            if end_s < limit_s:
                # Nothing held, nothing taken: the work is then zero too.
                here_s = here + more_here - ours.c * ((step - held_here) // ours.cap)
                if here_s < limit_s:
                    limit_s = max(end_s, here_s)
                    best = limit_s, i, r
    return best


def _later_s(
    batch: Batch, found: Dispatch, pair: tuple[int, int], ends: Sequence[float],
    option: tuple[int, int, float, float],
) -> float:  # fmt: skip
    """The later end of two pipelines after a change."""
    (last, q), (i, r, here, there), pipes = pair, option, batch.world.pipes
    k, j = found.pipes[last], found.pipes[q]
    step = batch.tokens[i] - (batch.tokens[r] if r >= 0 else 0)
    longest = _longest(batch.seconds(k), found.members[last], i, r)
    here_s = pipes[k].load_s(here, found.held[last] - step, longest)
    longest = _longest(batch.seconds(j), found.members[q], r, i)
    there_s = pipes[j].load_s(there, found.held[q] + step, longest)
    return max(here_s + ends[last] - found.loads[last], there_s + ends[q] - found.loads[q])


def _longest(seconds: list[float], own: list[int], out: int, back: int) -> float:
    """Seconds of the longest sequence of ``own`` without ``out`` and with ``back``."""
    rest = own[0] if own and own[0] != out else own[1] if len(own) > 1 else -1
    longest = seconds[rest] if rest >= 0 else 0.0
    return max(longest, seconds[back]) if back >= 0 else longest


def _apply(batch: Batch, found: Dispatch, last: int, q: int, i: int, r: int) -> None:
    for source, target, moved in ((last, q, i), (q, last, r)):
        if moved >= 0:
            found.members[source].remove(moved)
            found.members[target].append(moved)
    for side in (last, q):
        own, k = found.members[side], found.pipes[side]
        own.sort()
        seconds = batch.seconds(k)
        found.work[side] = sum([seconds[m] for m in own])
        found.held[side] = sum([batch.tokens[m] for m in own])
        longest = seconds[own[0]] if own else 0.0
        found.loads[side] = batch.world.pipes[k].load_s(found.work[side], found.held[side], longest)
