"""Places the longest sequences, which only some pipelines hold: few, hard to place, decisive.

Of a strategy's pipes the least roomy holds the short sequences, most of them. Those that it cannot
hold are the head. Short sequences fill every gap that the head leaves, so the head need not be
level; it must fit into the time: a question of bins, for which each sequence, longest first, goes
where it leaves the least room. Where that fails, a search tries other places, the best fitting
first, and gives up after a while.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify
from itertools import accumulate
from math import ceil

from headrace.planning.pipelines.batch import Batch
from headrace.planning.pipelines.world import Counts, Pipe

__all__ = ["Started", "opened", "place_head"]

_SEARCHED = 40  # sequences; more of them leave small gaps by themselves

Starts = tuple[tuple[int, int], ...]
Ready = list[tuple[float, int]]


@dataclass(slots=True)
class Started:
    """A dispatch being made, its head placed. ``pipes[q]`` is the pipe of pipeline q,
    ``members[q]`` its sequences; ``ready[k]`` are the pipelines of pipe k with their loads, the
    least first; ``placed`` sequences have a place.

    Pipelines with stages are filled one after the other, as each pays for its longest sequence
    P - 1 times: ``current[k]`` is the one being filled. When all have had their turn the least
    loaded comes first there too. ``work`` and ``held`` are kept for them alone.
    """

    batch: Batch
    pipes: list[int]
    members: list[list[int]]
    ready: dict[int, Ready]
    work: list[float]
    held: list[int]
    current: dict[int, int]
    placed: int = 0

    def staged(self, k: int, i: int, limit_s: float) -> bool:
        """Put sequence i on the pipeline of pipe ``k`` being filled, or on the next empty one, if
        it ends within ``limit_s``."""
        ready = self.ready[k]
        while self.current[k] < len(ready):
            at = self.current[k]
            _, q = ready[at]
            load = self.load_with(q, i)
            if load <= limit_s:
                self.put(q, i)
                ready[at] = (load, q)
                return True
            if not self.members[q]:
                return False
            self.current[k] += 1
            if self.current[k] == len(ready):
                heapify(ready)
        return False

    def run(self, k: int, places: Sequence[int], limit_s: float) -> list[int]:
        """The same for a run of sequences, longest first: as many as end in time on one pipeline,
        then on the next. Returns those for which none was left."""
        ready, pipe, batch = self.ready[k], self.batch.world.pipes[k], self.batch
        seconds, tokens, end = batch.seconds(k), batch.tokens, len(places)
        if end == 0:
            return []
        sums = list(accumulate([seconds[i] for i in places], initial=0.0))
        helds = list(accumulate([tokens[i] for i in places], initial=0))
        at, left = 0, list[int]()
        while at < end and self.current[k] < len(ready):
            _, q = ready[self.current[k]]
            own, before, held = self.members[q], self.work[q] - sums[at], self.held[q] - helds[at]
            longest = seconds[own[0]] if own else seconds[places[at]]

            def load_s(j: int) -> float:
                return pipe.run_s(sums, at, j, before, held + helds[j], longest)  # noqa: B023

            usable = pipe.usable_s(limit_s, longest)
            j = min(end, max(at + 1, bisect_right(sums, usable - before) - 1))
            step, load = 1, load_s(j)
            while load > limit_s and j > at + 1:
                j, step = max(at + 1, j - step), step * 2
                load = load_s(j)
            while step > 1:
                step //= 2
                if j + step <= end and (more := load_s(j + step)) <= limit_s:
                    j, load = j + step, more
            if load > limit_s and not own:
                left.append(places[at])
                at += 1
                continue
            if load <= limit_s:
                own += places[at:j]
                self.work[q], self.held[q] = before + sums[j], held + helds[j]
                ready[self.current[k]] = load, q
                at = j
            if at < end:
                self.current[k] += 1
        if self.current[k] == len(ready):
            heapify(ready)
        return left + list(places[at:])

    def settle(self, starts: Starts, limit_s: float) -> None:
        """Add to the loads of pipelines with one stage the constants to come, if each is filled
        up to ``limit_s`` with sequences such as its pipe's; their loads become a heap."""
        batch = self.batch
        ends = [*(begin for _, begin in starts[1:]), len(batch)]
        for (k, begin), end in zip(starts, ends, strict=True):
            pipe, work = batch.world.pipes[k], batch.work(k)
            if pipe.stages > 1:
                continue
            low, high = max(begin, self.placed), end
            if low >= high:
                low, high = min(self.placed, len(batch) - 1), len(batch)
            density = (batch.sums[high] - batch.sums[low]) / (work[high] - work[low])
            settled = []
            for load, q in self.ready[k]:
                held, more = self.held[q], max(0.0, limit_s - load) * density
                first = max(1, -(-held // pipe.cap))
                # Each micro-batch more leaves time for fewer tokens.
                lost = pipe.c * density
                count = max(first, ceil((held + more + lost * (first - 1)) / (pipe.cap + lost)))
                settled.append((load + pipe.c * (count - first), q))
            heapify(settled)
            self.ready[k] = settled

    def load_with(self, q: int, i: int) -> float:
        """Expected seconds of a pipeline with stages if it had sequence i too."""
        k, own = self.pipes[q], self.members[q]
        seconds = self.batch.seconds(k)
        longest = seconds[own[0]] if own else seconds[i]
        work, held = self.work[q] + seconds[i], self.held[q] + self.batch.tokens[i]
        return self.batch.world.pipes[k].load_s(work, held, longest)

    def put(self, q: int, i: int) -> None:
        """Give sequence i to a pipeline with stages."""
        self.members[q].append(i)
        self.work[q] += self.batch.seconds(self.pipes[q])[i]
        self.held[q] += self.batch.tokens[i]


def place_head(
    batch: Batch, counts: Counts, starts: Starts, limit_s: float, *, tries: int
) -> Started | None:
    """Pipelines with the head placed so that each ends within ``limit_s``; None when no way is
    found, a search through ``tries`` places included."""
    begun = opened(batch, counts, starts)
    used = [k for k, _ in starts]
    pipes = batch.world.pipes
    end = batch.first[used[-1]]
    homes = _homes(starts, end)
    for i in range(end):
        for k in (homes[i], *used):
            if batch.tokens[i] <= pipes[k].cap and _fitted(begun, k, i, limit_s):
                break
        else:
            return _searched(batch, counts, starts, end, limit_s, tries)
    begun.placed = end
    return begun


def opened(batch: Batch, counts: Counts, starts: Starts) -> Started:
    """Empty pipelines."""
    used = [k for k, _ in starts]
    pipes = [k for k in used for _ in range(counts[k])]
    ready: dict[int, Ready] = {}
    first = 0
    for k in used:
        pipe = batch.world.pipes[k]
        opening = pipe.c if pipe.stages == 1 else 0.0
        ready[k] = [(opening, q) for q in range(first, first + counts[k])]
        first += counts[k]
    return Started(
        batch=batch, pipes=pipes, members=[[] for _ in pipes], ready=ready,
        work=[0.0] * len(pipes), held=[0] * len(pipes), current=dict.fromkeys(used, 0),
    )  # fmt: skip


def _homes(starts: Starts, end: int) -> list[int]:
    """The pipe for which each of the first ``end`` sequences is meant."""
    homes = [starts[0][0]] * end
    for k, begin in starts[1:]:
        homes[begin:end] = [k] * max(0, end - begin)
    return homes


def _fitted(begun: Started, k: int, i: int, limit_s: float) -> bool:
    """Put sequence i on the fullest pipeline of pipe ``k`` that ends in time."""
    pipe = begun.batch.world.pipes[k]
    if pipe.stages > 1:
        return begun.staged(k, i, limit_s)
    ready, seconds = begun.ready[k], begun.batch.seconds(k)[i]
    tokens = begun.batch.tokens[i]
    at = bisect_right(ready, (limit_s - seconds, len(begun.pipes)))
    while at > 0:
        at -= 1
        load, q = ready[at]
        after = load + seconds + _more(pipe, begun.held[q], tokens)
        if after <= limit_s:
            del ready[at]
            insort(ready, (after, q))
            begun.members[q].append(i)
            begun.held[q] += tokens
            return True
    return False


def _more(pipe: Pipe, held: int, tokens: int) -> float:
    """Constants of the micro-batches that ``tokens`` more make necessary; the first is paid."""
    return pipe.c * (-(-(held + tokens) // pipe.cap) - max(1, -(-held // pipe.cap)))


def _searched(
    batch: Batch, counts: Counts, starts: Starts, end: int, limit_s: float, tries: int
) -> Started | None:
    """Depth first over the places of each sequence, longest first, those that it fills best
    first. Equal pipelines (same pipe and load) are one place."""
    pipes, used = batch.world.pipes, [k for k, _ in starts]
    if end > _SEARCHED or tries <= 0 or any(pipes[k].stages > 1 for k in used[:-1]):
        return None
    begun = opened(batch, counts, starts)
    loads, held = {q: load for ready in begun.ready.values() for load, q in ready}, begun.held
    by_pipe = {k: [q for q, own in enumerate(begun.pipes) if own == k] for k in used}
    seconds = {k: batch.seconds(k) for k in used}

    def go(i: int) -> bool:
        nonlocal tries
        if i == end:
            return True
        places: dict[tuple[int, float], tuple[float, int, float]] = {}
        tokens = batch.tokens[i]
        for k in used:
            if tokens > pipes[k].cap:
                break
            tries -= len(by_pipe[k])
            for q in by_pipe[k]:
                after = loads[q] + seconds[k][i] + _more(pipes[k], held[q], tokens)
                if after <= limit_s:
                    places[k, loads[q]] = (limit_s - after) * pipes[k].devices, q, after
        for _, q, after in sorted(places.values()):
            if tries < 0:
                return False
            before, loads[q] = loads[q], after
            held[q] += tokens
            begun.members[q].append(i)
            if go(i + 1):
                return True
            begun.members[q].pop()
            held[q] -= tokens
            loads[q] = before
        return False

    if not go(0):
        return None
    for k, own in by_pipe.items():
        begun.ready[k] = sorted((loads[q], q) for q in own)
    begun.placed = end
    return begun
