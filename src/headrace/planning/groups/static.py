"""Static degrees: all groups of one size, as a user configures sequence parallelism by hand.

A static plan of p cuts the ranks into groups of exactly p (ranks that are left over stay idle) and
gives the longest sequence first to the group that is free first, which packs what it got. The
degree is the smallest that fits the longest sequence, or the best of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

from headrace.planning.groups.clock import Job, Semantics, jobs_s
from headrace.planning.groups.packing import packed
from headrace.planning.groups.work import Work

__all__ = ["best_static_jobs", "block_ranks", "fitting_row", "static_jobs", "static_s"]


def fitting_row(work: Work) -> int:
    """The row of the smallest size that fits the longest sequence."""
    return next(
        row for row, p in enumerate(work.sizes) if p * work.costs.cap_tokens >= work.tokens[0]
    )


def block_ranks(p: int, k: int) -> tuple[int, ...]:
    """The ranks of the k-th group of p."""
    return tuple(range(k * p, (k + 1) * p))


def static_s(work: Work, row: int) -> float:
    """What groups of ``sizes[row]`` ranks alone cannot beat: their share of the sequences, and
    the longest in a launch of its own."""
    groups = work.devices // work.sizes[row]
    seconds = work.seconds[row]
    busy_s = max(work.share_s[row].sum() / groups, seconds.sum() / groups + work.c_s)
    return float(max(busy_s, seconds[0] + work.c_s))


def static_jobs(work: Work, row: int) -> list[Job]:
    """Every sequence on groups of ``sizes[row]`` ranks, which must hold the longest."""
    p, share = work.sizes[row], work.share_s[row].tolist()
    heap = [(0.0, k) for k in range(work.devices // p)]
    heapify(heap)
    taken: list[list[int]] = [[] for _ in heap]
    for i in range(len(work.tokens)):
        at, k = heap[0]
        taken[k].append(i)
        heapreplace(heap, (at + share[i], k))
    return interleaved(work, p, taken)


def interleaved(work: Work, p: int, taken: Sequence[Sequence[int]]) -> list[Job]:
    """Launches of groups of p that hold ``taken``, the first of every group before the second of
    any, each group's longest launch first."""
    row = work.sizes.index(p)
    jobs = list[tuple[int, int, list[int]]]()
    for k, some in enumerate(taken):
        launches = packed(work.tokens, sorted(some), work.costs.cap_tokens * p)
        launches.sort(key=lambda held: (-work.seconds[row, held].sum(), held[0]))
        jobs += [(n, k, held) for n, held in enumerate(launches)]
    return [(block_ranks(p, k), held) for _, k, held in sorted(jobs)]


def best_static_jobs(
    work: Work, semantics: Semantics, *, without: int | None = None
) -> tuple[int, list[Job]]:
    """(row, launches) of the static degree with the least seconds (ties: the smaller), but not of
    the row ``without``; no launches if there is no other. Sizes that cannot beat what is found are
    left out."""
    rows = [row for row in range(fitting_row(work), len(work.sizes)) if row != without]
    bounds = sorted((static_s(work, row), row) for row in rows)
    best_s, best = float("inf"), (0, list[Job]())
    for bound_s, row in bounds:
        if bound_s < best_s:
            jobs = static_jobs(work, row)
            seconds = jobs_s(work, jobs, semantics)
            if seconds < best_s:
                best_s, best = seconds, (row, jobs)
    return best
