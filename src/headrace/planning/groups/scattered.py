"""First schedules on groups of any ranks, for sizes that do not divide each other.

Larger groups first. For every size the ranks are sorted by when they are free and cut into groups
in that order, so that the ranks of a group are free at about the same time: little is lost where
groups of different sizes meet, and a world that no size divides leaves only its latest ranks out.
"""

from __future__ import annotations

from heapq import heapify, heapreplace

import numpy as np

from headrace.planning.groups.clock import Job
from headrace.planning.groups.packing import packed
from headrace.planning.groups.work import Work

__all__ = ["scattered"]


def scattered(work: Work, target_s: float) -> list[Job]:
    """Every sequence on the size of least area that runs it within ``target_s`` (else the
    quickest), size by size from the largest, longest first onto the group that is free first."""
    alone = work.seconds + work.c_s
    area = np.where(alone > target_s, np.inf, work.area)
    chosen = np.where(np.isinf(area).all(axis=0), alone.argmin(axis=0), area.argmin(axis=0))
    free, jobs = np.zeros(work.devices), list[Job]()
    for row in range(len(work.sizes) - 1, -1, -1):
        held = np.flatnonzero(chosen == row).tolist()
        if held:
            jobs += _deal(work, row, held, free)
    return jobs


def _deal(work: Work, row: int, held: list[int], free: np.ndarray) -> list[Job]:
    p, cap = work.sizes[row], work.costs.cap_tokens
    by_time = free.argsort(kind="stable").tolist()
    groups = [tuple(sorted(by_time[k * p : (k + 1) * p])) for k in range(work.devices // p)]
    heap = [(float(free[list(ranks)].max()) + work.c_s, k) for k, ranks in enumerate(groups)]
    heapify(heap)
    share = work.share_s[row].tolist()
    taken: list[list[int]] = [[] for _ in groups]
    for i in held:
        at, k = heap[0]
        taken[k].append(i)
        heapreplace(heap, (at + share[i], k))
    jobs = list[Job]()
    for ranks, some in zip(groups, taken, strict=True):
        launches = packed(work.tokens, some, cap * p)
        if launches:
            seconds = float(work.seconds[row, some].sum()) + len(launches) * work.c_s
            free[list(ranks)] = free[list(ranks)].max() + seconds
            jobs += [(ranks, launch) for launch in launches]
    return jobs
