"""The plain way to dispatch: longest first, each sequence where it would end first.

Constants are dealt out to tokens, as if micro-batches could always be filled. Where rooms are tight
and every pipeline should have long sequences and short ones to fill up beside them, this beats
grouping by length; both are tried there.
"""

from __future__ import annotations

from heapq import heapreplace

from headrace.planning.pipelines.batch import Batch
from headrace.planning.pipelines.dispatch import Dispatch
from headrace.planning.pipelines.world import Counts

__all__ = ["levelled"]


def levelled(batch: Batch, counts: Counts) -> Dispatch:
    """Dispatch a batch that the strategy can hold."""
    world, tokens = batch.world, batch.tokens
    used = [k for k, n in enumerate(counts) if n]
    pipes = [k for k in used for _ in range(counts[k])]
    members: list[list[int]] = [[] for _ in pipes]
    heaps, dealt = list[list[tuple[float, int]]](), list[list[float]]()
    first = 0
    for k in used:
        pipe = world.pipes[k]
        heaps.append([(0.0, q) for q in range(first, first + counts[k])])
        dealt.append((batch.array(k) + pipe.c / pipe.cap * batch.values).tolist())
        first += counts[k]
    for i in range(len(batch)):
        best = None
        for row, k in enumerate(used):
            if tokens[i] <= world.pipes[k].cap:
                after = heaps[row][0][0] + dealt[row][i]
                if best is None or after < best[0]:
                    best = after, row
        assert best is not None, "the roomiest pipe holds every sequence"
        after, row = best
        _, q = heapreplace(heaps[row], (after, heaps[row][0][1]))
        members[q].append(i)
    return Dispatch.of(batch, pipes, members)
