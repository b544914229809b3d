"""Balancing by the method of Karmarkar and Karp, as verl balances data-parallel ranks.

The groups have one static size, the smallest that fits the longest sequence. Sequences are weighed
by w(l) = 24576 l + l^2, a formula that knows neither the model nor the machine, and dealt to groups
such that the weights are even; then every group's share to as many micro-batches as the fullest
group needs, again by weight. verl lets a micro-batch grow beyond its token limit; here there are
more of them until none does.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from headrace.planning.groups.clock import Job
from headrace.planning.groups.static import block_ranks, fitting_row
from headrace.planning.groups.work import Work

__all__ = ["karmarkar_karp", "token_balance_jobs"]

_LINEAR = 24576

# One partial solution: (weight, items) of every part, heaviest first.
_Parts = list[tuple[int, list[int]]]


def karmarkar_karp(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of ``weights`` in ``parts`` parts of about even weight.

    Largest differencing: of all partial solutions, the two whose heaviest and lightest parts differ
    most are joined, the heaviest part of one with the lightest of the other.
    """
    heap = list[tuple[int, int, _Parts]]()
    empty: _Parts = [(0, []) for _ in range(parts - 1)]
    for i, weight in enumerate(weights):
        heap.append((-weight if parts > 1 else 0, i, [(weight, [i]), *empty]))
    heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        one, other = heappop(heap)[2], heappop(heap)[2]
        joined = [(w + v, a + b) for (w, a), (v, b) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda part: (-part[0], part[1]))
        heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
        number += 1
    return [sorted(held) for _, held in heap[0][2]] if heap else [[] for _ in range(parts)]


def token_balance_jobs(work: Work) -> list[Job]:
    """Launches of the whole batch."""
    p = work.sizes[fitting_row(work)]
    cap, weights = work.costs.cap_tokens * p, [_LINEAR * n + n * n for n in work.tokens]
    shares = karmarkar_karp(weights, work.devices // p)
    count = max(-(-sum(work.tokens[i] for i in held) // cap) for held in shares)
    jobs = list[tuple[int, int, list[int]]]()
    for k, held in enumerate(shares):
        jobs += [(n, k, launch) for n, launch in enumerate(_split(work, held, weights, count, cap))]
    return [(block_ranks(p, k), launch) for _, k, launch in sorted(jobs)]


def _split(
    work: Work, held: list[int], weights: Sequence[int], count: int, cap: int
) -> list[list[int]]:
    """``held`` in ``count`` micro-batches of even weight, or more where some hold too much."""
    while True:
        parts = karmarkar_karp([weights[i] for i in held], min(count, max(1, len(held))))
        launches = [[held[x] for x in part] for part in parts if part]
        if all(sum(work.tokens[i] for i in launch) <= cap for launch in launches):
            return launches
        count += 1
