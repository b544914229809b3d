"""Moves and swaps that shorten the last pipeline of a dispatch.

A step takes the last pipeline and, from the least loaded upwards, others of every pipe: a sequence
goes over, or two change places, where both then end before the last one ended. Loads are told in
constant time from work, tokens and the longest sequence, the constants of all micro-batches
included, so that a move can save one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from heapq import nsmallest
from random import Random

from headrace.planning.pipelines.batch import Batch
from headrace.planning.pipelines.dispatch import Dispatch

__all__ = ["improve"]

_OTHERS = 6
_ENOUGH = 0.3  # of what two pipelines could gain by balancing
_GAIN = 1e-6
_GAIN_COARSE = 5e-4
_SHAKEN = 3
_GUESSES = 4
_OF_MANY = 8  # sequences to move
_GUESS_OFF = 1.02

Change = tuple[float, int, int]
"""The later end of two pipelines, the sequence over, the sequence back or -1."""


def improve(
    batch: Batch, found: Dispatch, *, steps: int, target_s: float, extra: Sequence[float] = (),
    coarse: bool = False,
) -> None:  # fmt: skip
    """Change ``found`` in place, ``steps`` times at most, until it is down to ``target_s``.
    ``extra[q]`` is what pipeline q takes beyond its load. ``coarse``: where stages and packing
    hide small differences, look at some of the sequences only, and for more than small gains."""
    loads = found.loads
    if len(loads) < 2:
        return
    for _ in range(steps):
        ends = [load + more for load, more in zip(loads, extra, strict=True)] if extra else loads
        last = max(range(len(ends)), key=ends.__getitem__)
        if ends[last] <= target_s or not _relieve(batch, found, last, ends, coarse):
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


def _relieve(batch: Batch, found: Dispatch, last: int, ends: Sequence[float], coarse: bool) -> bool:
    """One change that makes the later of two pipelines, one of them the last, end earlier."""
    others = _others(found.pipes, ends)
    best: tuple[float, int, int, int] | None = None
    limit_s = ends[last] * (1 - (_GAIN_COARSE if coarse else _GAIN))
    for q in others:
        if q == last:
            continue
        change = _best_change(batch, found, (last, q), ends, limit_s, coarse)
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


def _others(pipes: Sequence[int], ends: Sequence[float]) -> list[int]:
    """The least loaded pipelines, one of every pipe among them, the least loaded first."""
    order = sorted(range(len(ends)), key=ends.__getitem__)
    found, rest = order[: _OTHERS + 1], order[_OTHERS + 1 :]
    missing = set(pipes).difference([pipes[q] for q in found])
    for q in rest if missing else ():
        if pipes[q] in missing:
            missing.remove(pipes[q])
            found.append(q)
            if not missing:
                break
    return found


def _best_change(
    batch: Batch, found: Dispatch, pair: tuple[int, int], ends: Sequence[float], limit_s: float,
    coarse: bool,
) -> Change | None:  # fmt: skip
    """The best change between two pipelines, with a later end below ``limit_s``."""
    last, q = pair
    pipes = batch.world.pipes
    if pipes[found.pipes[last]].stages == pipes[found.pipes[q]].stages == 1:
        return _without_stages(batch, found, pair, ends, limit_s)
    here_s, there_s = found.work[last], max(found.work[q], 1e-9)
    most = _OF_MANY if coarse else sys.maxsize
    slopes = found.loads[last] / here_s, max(1.0, found.loads[q] / there_s)
    guesses = [
        (max(ends[last] + slopes[0] * (here - here_s),
             ends[q] + slopes[1] * (there - found.work[q])), i, r, here, there)
        for i, r, here, there in _options(batch, found, pair, ends, most)
    ]  # fmt: skip
    best = None
    for guess_s, i, r, here, there in nsmallest(_GUESSES, guesses):
        if guess_s < limit_s * _GUESS_OFF:
            later_s = _later_s(batch, found, pair, ends, (i, r, here, there))
            if later_s < limit_s:
                limit_s, best = later_s, (later_s, i, r)
    return best


def _options(
    batch: Batch, found: Dispatch, pair: tuple[int, int], ends: Sequence[float],
    most: int = sys.maxsize,
) -> Iterator[tuple[int, int, float, float]]:  # fmt: skip
    """(sequence over, sequence back or -1, work of the last then, work of the other then) of moves
    and of the swaps that come closest to levelling the two; of about ``most`` sequences over."""
    (last, q), tokens, pipes = pair, batch.tokens, batch.world.pipes
    k, j = found.pipes[last], found.pipes[q]
    ours, theirs = batch.seconds(k), batch.seconds(j)
    own, other, cap, room = found.members[last], found.members[q], pipes[j].cap, pipes[k].cap
    here, there = found.work[last], found.work[q]
    half_s, at = (ends[last] - ends[q]) / 2, 0
    for i in own[:: len(own) // most + 1]:
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
    k, j = found.pipes[last], found.pipes[q]
    pipe, there = pipes[k], pipes[j]
    ours, theirs = batch.seconds(k), batch.seconds(j)
    other = found.members[q]
    # Seconds without any of the constants: nothing held, nothing taken.
    bare_s = found.work[last] + ends[last] - found.loads[last]
    there_s = found.work[q] + ends[q] - found.loads[q]
    held_here, held_there = found.held[last], found.held[q]
    half_s, at, best = (ends[last] - ends[q]) / 2, 0, None
    for i in found.members[last]:
        length, ours_s = tokens[i], ours[i]
        if length > there.cap:
            continue
        wanted_s = ours_s - half_s
        while at < len(other) and ours[other[at]] > wanted_s:
            at += 1
        over_s, left_s = there_s + theirs[i], bare_s - ours_s
        for r in (-1, *other[max(0, at - 1) : at + 1]):
            step, then_s, here_s = length, over_s, left_s
            if r >= 0:
                step -= tokens[r]
                then_s -= theirs[r]
                here_s += ours[r]
                if step <= 0 or tokens[r] > pipe.cap:
                    continue
            if then_s < limit_s and here_s < limit_s:
                then_s -= there.c * (-(held_there + step) // there.cap)
                if then_s < limit_s:
                    here_s -= pipe.c * ((step - held_here) // pipe.cap)
                    if here_s < limit_s:
                        limit_s = max(then_s, here_s)
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
