"""How long a strategy would take if sequences could be cut: quick to tell, at any size.

Given a time, the pipes of a strategy are filled up to it with the longest sequences first, the
roomiest pipe first; the time is enough when nothing is left. Longest first is best when long
sequences are what roomy pipes are comparatively good at, which attention's square makes so. A
sequence may be cut between two pipes, but it must fit both and end in time on the first. Sums over
runs of sequences are differences of prefix sums, so one time costs some bisections per pipe,
whatever the number of sequences and devices.

This is an estimate that ranks strategies, no bound: what is cut here may not balance there.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import ceil, inf

from headrace.planning.pipelines.batch import Batch
from headrace.planning.pipelines.world import Counts, Pipe

__all__ = ["Fluid", "fluid"]

_FULL = 0.985  # what of a micro-batch's room can be filled with whole sequences
_CHUNKS = 4  # groups of pipelined pipelines that take sequences of like length
_STEPS = 24
_STRAIGHT = 8  # of them on the line through both ends; jumps are found by halving
_CLOSE = 5e-4
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Fluid:
    """``seconds`` of a strategy (infinite: it cannot hold the batch), and where each of its pipes
    begins among the sequences, longest first: ``(pipe, first sequence)``."""

    seconds: float
    starts: tuple[tuple[int, int], ...] = ()


def fluid(batch: Batch, counts: Counts, *, below_s: float = inf) -> Fluid:
    """Estimate a strategy. Infinite seconds when it does not get below ``below_s``: that much is
    told by one filling."""
    used = [(k, n) for k, n in enumerate(counts) if n]
    never = Fluid(seconds=inf)
    if not used or batch.first[used[0][0]] > 0:
        return never
    filling = _Filling(batch, used)
    low_s = filling.least_s()
    if below_s < inf:
        high_s = below_s
        high = filling.short_of(high_s)
        if high > 0:
            return never
    else:
        high_s = low_s * 1.25
        high = filling.short_of(high_s)
        for _ in range(60):
            if high <= 0:
                break
            low_s, high_s = high_s, high_s * 1.5
            high = filling.short_of(high_s)
        else:
            return never
    low = filling.short_of(low_s)
    if low <= 0:
        return Fluid(seconds=low_s, starts=filling.starts())
    for step in range(_STEPS):
        if high_s - low_s <= _CLOSE * high_s:
            break
        middle_s = (low_s + high_s) / 2
        if low < inf and high < 0 and step < _STRAIGHT:
            guess_s = low_s + (high_s - low_s) * low / (low - high)
            edge_s = (high_s - low_s) / 16
            middle_s = min(max(guess_s, low_s + edge_s), high_s - edge_s)
        short = filling.short_of(middle_s)
        if short <= 0:
            high_s, high = middle_s, short
        else:
            low_s, low = middle_s, short
    filling.short_of(high_s)
    return Fluid(seconds=high_s, starts=filling.starts())


class _Filling:
    """One strategy being filled with one batch: a place (i, part) says that the sequences before i
    have gone, and so much of i."""

    def __init__(self, batch: Batch, used: list[tuple[int, int]]) -> None:
        pipes = batch.world.pipes
        self.batch = batch
        self.used = [(pipes[k], n, batch.work(k), batch.seconds(k)) for k, n in used]
        self.numbers = [k for k, _ in used]
        self.begins = [0] * len(used)

    def starts(self) -> tuple[tuple[int, int], ...]:
        """Where each pipe began in the last filling."""
        return tuple(zip(self.numbers, self.begins, strict=True))

    def least_s(self) -> float:
        """The quickest run of the longest sequence."""
        longest = self.batch.tokens[0]
        return min(pipe.alone_s(longest) for pipe, *_ in self.used if pipe.cap >= longest)

    def short_of(self, limit_s: float) -> float:
        """Device-seconds that are missing to run everything in ``limit_s``, negative when there
        are some to spare, infinite when a sequence is too long for what is left."""
        tokens, end = self.batch.tokens, len(self.batch.tokens)
        i, part = 0, 0.0
        spare = 0.0
        for number, (pipe, n, work, seconds) in enumerate(self.used):
            self.begins[number] = i
            if i >= end:
                spare += n * pipe.devices * limit_s
                continue
            if tokens[i] > pipe.cap or pipe.stages * (seconds[i] + pipe.c) > limit_s:
                # A roomier pipe came before: what it left must fit here.
                return inf if tokens[i] > pipe.cap else _missing(pipe, work, i, part) + limit_s
            for group in _groups(pipe, n):
                i, part, left_s = self._fill(pipe, group, work, seconds[i], i, part, limit_s)
                if i >= end:
                    spare += left_s * pipe.devices
                    break
        if i >= end:
            return -spare
        pipe, _, work, _ = self.used[-1]
        return _missing(pipe, work, i, part)

    def _fill(
        self, pipe: Pipe, n: int, work: list[float], longest_s: float, i: int, part: float,
        limit_s: float,
    ) -> tuple[int, float, float]:  # fmt: skip
        """The place after ``n`` pipelines have taken what they can, and the seconds they spare."""
        sums = self.batch.sums
        done = work[i] + part * (work[i + 1] - work[i])
        held = sums[i] + part * (sums[i + 1] - sums[i])
        room = n * pipe.cap * _FULL
        in_time = n * pipe.usable_s(limit_s, longest_s, 1)
        tokens = _at(sums, work, done + in_time) - held
        taken = in_time
        if tokens > room or pipe.stages > 1:
            count = max(1, ceil(tokens / room))
            fewer = _tokens_work(work, sums, held + room * (count - 1)) - done
            in_time = n * pipe.usable_s(limit_s, longest_s, count)
            taken = min(in_time, _tokens_work(work, sums, held + room * count) - done)
            if count > 1 and pipe.stages == 1 and fewer > taken:
                in_time = n * pipe.usable_s(limit_s, longest_s, count - 1)
                taken = min(fewer, in_time)
        if taken <= 0:
            return i, part, 0.0
        reach, end = done + taken, work[-1]
        if reach >= end * (1 - _ROUNDING):
            return len(sums) - 1, 0.0, in_time - (end - done)
        j = bisect_right(work, reach) - 1
        return j, (reach - work[j]) / (work[j + 1] - work[j]), 0.0


def _groups(pipe: Pipe, n: int) -> tuple[int, ...]:
    """Pipelines filled at once: all, or when pipelined a few groups, each with its own longest."""
    if pipe.stages == 1 or n == 1:
        return (n,)
    chunks = min(n, _CHUNKS)
    return tuple(n * (j + 1) // chunks - n * j // chunks for j in range(chunks))


def _at(sums: list[int], work: list[float], reach: float) -> float:
    """Tokens before the place at which the work reaches ``reach``."""
    if reach >= work[-1]:
        return sums[-1]
    j = max(0, bisect_right(work, reach) - 1)
    return sums[j] + (sums[j + 1] - sums[j]) * (reach - work[j]) / (work[j + 1] - work[j])


def _tokens_work(work: list[float], sums: list[int], held: float) -> float:
    """Work before the place at which the tokens reach ``held``."""
    if held >= sums[-1]:
        return work[-1]
    j = bisect_right(sums, held) - 1
    return work[j] + (work[j + 1] - work[j]) * (held - sums[j]) / (sums[j + 1] - sums[j])


def _missing(pipe: Pipe, work: list[float], i: int, part: float) -> float:
    """Device-seconds of what is left after a place, on ``pipe``."""
    return pipe.devices * (work[-1] - work[i] - part * (work[i + 1] - work[i]))
