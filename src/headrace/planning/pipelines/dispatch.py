"""Gives sequences to the pipelines of one strategy (Hydraulis, equations 2 and 3).

Longest first. The estimate of :mod:`headrace.planning.pipelines.fluid` says how long the step
should take and which run of sequences each pipe is for. The head is placed by
:mod:`headrace.planning.pipelines.head`; any other sequence goes to the least loaded pipeline of its
pipe while that stays within the time, else to another pipe's that does, else where it ends first.
Pipelines with stages are filled one after the other instead, as each pays for its longest sequence
P - 1 times: those of like length belong together.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import inf
from operator import neg

from headrace.planning.pipelines.batch import Batch
from headrace.planning.pipelines.fluid import Fluid, fluid
from headrace.planning.pipelines.head import Started, opened, place_head
from headrace.planning.pipelines.world import Counts

__all__ = ["Dispatch", "dispatch", "estimate_s"]

_SLACKS = (1e-9, 0.003, 0.01, 0.03)  # over the fluid's time, for the head
_SLACKS_TO_ESTIMATE = (1e-9, 0.01)
_TRIES = 4000  # places looked at, where the head is hard to place
_TRIES_TO_ESTIMATE = 200
_LAST_OF_IT = 0.02  # of the step


@dataclass(slots=True)
class Dispatch:
    """Who has what: by pipeline its pipe, sequences (places in the batch, longest first), seconds
    of work, tokens and expected seconds."""

    pipes: list[int]
    members: list[list[int]]
    work: list[float]
    held: list[int]
    loads: list[float]

    @property
    def seconds(self) -> float:
        """Expected seconds of the last pipeline."""
        return max(self.loads)

    @classmethod
    def of(cls, batch: Batch, pipes: list[int], members: list[list[int]]) -> Dispatch:
        """Loads of the sequences that pipelines have; ``members`` are sorted in place."""
        work, held, loads = list[float](), list[int](), list[float]()
        tokens = batch.tokens
        for k, own in zip(pipes, members, strict=True):
            own.sort()
            seconds = batch.seconds(k)
            work.append(sum([seconds[i] for i in own]))
            held.append(sum([tokens[i] for i in own]))
            longest = seconds[own[0]] if own else 0.0
            loads.append(batch.world.pipes[k].load_s(work[-1], held[-1], longest))
        return cls(pipes=pipes, members=members, work=work, held=held, loads=loads)


def estimate_s(batch: Batch, counts: Counts, below_s: float) -> float:
    """Seconds to expect of a strategy, told without a dispatch: the fluid's, or as much more as
    its head needs. Infinite when they are not below ``below_s``."""
    found = fluid(batch, counts, below_s=below_s)
    for slack in _SLACKS_TO_ESTIMATE if found.seconds < below_s else ():
        seconds = found.seconds * (1 + slack)
        if seconds >= below_s:
            break
        tries = _TRIES_TO_ESTIMATE
        if place_head(batch, counts, found.starts, seconds, tries=tries) is not None:
            return seconds
    return inf


def dispatch(
    batch: Batch, counts: Counts, estimate: Fluid, *, long_in_gaps: bool = False
) -> Dispatch:
    """Give every sequence of a batch, which the strategy can hold, to a pipeline. What the head
    leaves of its pipelines goes to short sequences at last, or first to long ones."""
    for slack in _SLACKS:
        limit_s = estimate.seconds * (1 + slack)
        begun = place_head(batch, counts, estimate.starts, limit_s, tries=_TRIES)
        if begun is not None:
            break
    else:
        begun = opened(batch, counts, estimate.starts)
    begun.settle(estimate.starts, estimate.seconds)
    filling = _Filling(begun, estimate)
    if long_in_gaps:
        filling.gaps()
    ends = [*(begin for _, begin in estimate.starts[1:]), len(batch)]
    for (k, begin), end in zip(estimate.starts, ends, strict=True):
        filling.run(k, max(begin, begun.placed), end)
    filling.rest()
    return Dispatch.of(batch, begun.pipes, begun.members)


class _Filling:
    """Gives what comes after the head. The loads of a pipe with one stage are a heap."""

    def __init__(self, begun: Started, fluid: Fluid) -> None:
        self.begun, self.limit_s = begun, fluid.seconds
        self.batch, self.world = begun.batch, begun.batch.world
        self.used = [k for k, _ in fluid.starts]
        self.taken = bytearray(len(self.batch))
        self.left = list[int]()

    def gaps(self) -> None:
        """Fill what the head left of its pipelines, but for the last of it, with the longest
        sequences that fit: short ones are worth more for levelling in the end."""
        margin_s, placed = self.limit_s * _LAST_OF_IT, self.begun.placed
        for k in self.used[:-1] if placed else ():
            if self.world.pipes[k].stages > 1:
                continue
            seconds, filled = self.batch.seconds(k), list[tuple[float, int]]()
            for load, q in self.begun.ready[k]:
                room_s = self.limit_s - load
                i = self.taken.find(0, bisect_left(seconds, -room_s, lo=placed, key=neg))
                while room_s > margin_s and i >= 0 and seconds[i] > margin_s / 2:
                    if seconds[i] > room_s:
                        i = self.taken.find(0, i + 1)
                        continue
                    self.taken[i] = 1
                    self.begun.members[q].append(i)
                    room_s -= seconds[i]
                    following = bisect_left(seconds, -room_s, lo=placed, key=neg)
                    i = self.taken.find(0, max(i + 1, following))
                filled.append((self.limit_s - room_s, q))
            heapify(filled)
            self.begun.ready[k] = filled

    def run(self, k: int, begin: int, end: int) -> None:
        """The sequences from ``begin`` to ``end``, meant for pipe ``k``, after those that other
        pipes with stages left over, if it has stages too."""
        heap, limit_s = self.begun.ready[k], self.limit_s
        others = [j for j in self.used if j != k]
        places = [i for i in range(begin, end) if not self.taken[i]]
        if self.world.pipes[k].stages > 1:
            first = self.batch.first[k]
            fitting = [i for i in self.left if i >= first]
            over = [i for i in self.left if i < first]
            self.left = over + self.begun.run(k, fitting + places, limit_s)
            after = self.used.index(k) + 1
            if after < len(self.used) and self.world.pipes[self.used[after]].stages == 1:
                for i in self.left:
                    self._elsewhere(i, others, k)
                self.left = []
            return
        seconds, members = self.batch.seconds(k), self.begun.members
        for i in places:
            load, q = heap[0]
            after = load + seconds[i]
            if after <= limit_s:
                heapreplace(heap, (after, q))
                members[q].append(i)
            else:
                self._elsewhere(i, others, k)

    def rest(self) -> None:
        """What is left over goes where it should end first, all pipelines being full by then."""
        begun, tokens = self.begun, self.batch.tokens
        kinds = [(k, self.world.pipes[k], self.batch.seconds(k), begun.ready[k]) for k in self.used]
        for i in self.left:
            best: tuple[float, int] | None = None
            for k, pipe, seconds, ready in kinds:
                if pipe.cap >= tokens[i]:
                    load, q = ready[begun.current[k] % len(ready)]
                    rate = load / begun.work[q] if pipe.stages > 1 and begun.work[q] else 1.0
                    after = load + rate * seconds[i]
                    if best is None or after < best[0]:
                        best = after, k
            assert best is not None, "the roomiest pipe holds every sequence"
            self._put(i, best[1])

    def _put(self, i: int, k: int) -> None:
        """Give sequence i to the pipeline of pipe ``k`` whose turn it is."""
        begun, ready = self.begun, self.begun.ready[k]
        at = begun.current[k] % len(ready)
        load, q = ready[at]
        if self.world.pipes[k].stages > 1:
            after = begun.load_with(q, i)
            begun.put(q, i)
        else:
            after = load + self.batch.seconds(k)[i]
            begun.members[q].append(i)
        if self.world.pipes[k].stages == 1 or begun.current[k] == len(ready):
            heapreplace(ready, (after, q))
        else:
            ready[at] = after, q

    def _elsewhere(self, i: int, others: list[int], home: int) -> None:
        """Put sequence i where it ends within the time, else where it ends first."""
        begun = self.begun
        best: tuple[float, int] | None = None
        for k in (*others, home):
            pipe, ready = self.world.pipes[k], begun.ready[k]
            if pipe.cap < self.batch.tokens[i]:
                continue
            load, q = ready[begun.current[k] % len(ready)]
            staged = pipe.stages > 1
            after = begun.load_with(q, i) if staged else load + self.batch.seconds(k)[i]
            if best is None or after < best[0]:
                best = after, k
            if after <= self.limit_s:
                break
        assert best is not None, "the roomiest pipe holds every sequence"
        self._put(i, best[1])
