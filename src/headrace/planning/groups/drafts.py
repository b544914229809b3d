"""First schedules under the free semantics: which block of ranks gets which sequences.

A *block* (p, k) is the group of the ranks [k p, (k + 1) p). Where every size divides the next, two
blocks are disjoint or one lies in the other. Larger blocks run first; then all ranks of a block
are free at once, no rank ever waits for another, and a rank is free when what is given to the
blocks it lies in is done. So the problem is one of balancing loads on a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

import numpy as np

from headrace.planning.groups.work import Floats, Work

__all__ = ["Block", "Members", "by_deadline", "by_target"]

Block = tuple[int, int]
Members = dict[Block, list[int]]

_SHORT = 1 / 8  # of a deadline: shorter sequences are dealt out at the end, one size for all


def by_target(work: Work, rows: Sequence[int], target_s: float) -> Members:
    """Every sequence on the size of least area that runs it within ``target_s`` (else the
    quickest), size by size from the largest, longest first onto the block that is free first."""
    allowed = list(rows)
    alone = work.seconds[allowed] + work.c_s
    area = np.where(alone > target_s, np.inf, work.area[allowed])
    chosen = np.where(np.isinf(area).all(axis=0), alone.argmin(axis=0), area.argmin(axis=0))
    free, members = np.zeros(work.devices), Members()
    for at in range(len(allowed) - 1, -1, -1):
        held = np.flatnonzero(chosen == at).tolist()
        if held:
            _deal(work, allowed[at], held, free, members)
    return members


def by_deadline(
    work: Work, rows: Sequence[int], deadline_s: float, order: Sequence[int]
) -> tuple[float, Members]:
    """Long sequences in ``order``, each on the size of least area on which it still ends by
    ``deadline_s``, in the block it fills best; one that meets the deadline nowhere where it ends
    first. Then the short ones, longest first, onto the rank that is free first.

    A dual approximation: a time is guessed and sizes chosen to fit the room that is left. Returns
    the seconds, with fractions of launches, and the sequences of each block.
    """
    allowed = list(rows)
    share, alone = work.share_s[allowed], work.seconds[allowed] + work.c_s
    area = np.where(alone > deadline_s, np.inf, work.area[allowed])
    cheapest = area.argsort(axis=0, kind="stable").T.tolist()
    within = np.isfinite(area).sum(axis=0).tolist()
    short = (share[0] < _SHORT * deadline_s).tolist()
    free, members = np.zeros(work.devices), Members()
    opening = [np.full(work.devices // work.sizes[row], work.c_s) for row in allowed]
    times = share.tolist()
    for i in order:
        if short[i]:
            continue
        best: tuple[float, int, int] | None = None
        for at in cheapest[i][: within[i]]:
            ends = block_free(free, work.sizes[allowed[at]]) + opening[at] + times[at][i]
            k = int(np.where(ends <= deadline_s, ends, -1.0).argmax())
            if ends[k] <= deadline_s:
                best = float(ends[k]), at, k
                break
        if best is None:
            best = _earliest(work, allowed, free, opening, times, i)
        end_s, at, k = best
        p = work.sizes[allowed[at]]
        free[k * p : (k + 1) * p] = end_s
        opening[at][k] = 0.0
        members.setdefault((p, k), []).append(i)
    rest = [i for i, is_short in enumerate(short) if is_short]
    if rest:
        _deal(work, allowed[0], rest, free, members)
    for held in members.values():
        held.sort()
    return float(free.max()), members


def block_free(free: Floats, p: int) -> Floats:
    """When each block of p ranks is free."""
    blocks = len(free) // p
    return free if p == 1 else free[: blocks * p].reshape(blocks, p).max(axis=1)


def _deal(work: Work, row: int, held: Sequence[int], free: Floats, members: Members) -> None:
    """Positions ``held``, longest first, each onto the block of ``sizes[row]`` that is free first
    (Graham's rule); ``free`` and ``members`` are brought up to date."""
    p, share = work.sizes[row], work.share_s[row].tolist()
    starts = block_free(free, p).tolist()
    heap = [(at + (0.0 if (p, k) in members else work.c_s), k) for k, at in enumerate(starts)]
    heapify(heap)
    taken: list[list[int]] = [[] for _ in heap]
    for i in held:
        at, k = heap[0]
        taken[k].append(i)
        heapreplace(heap, (at + share[i], k))
    for at, k in heap:
        if taken[k]:
            free[k * p : (k + 1) * p] = at
            members[p, k] = members.get((p, k), []) + taken[k]


def _earliest(
    work: Work, allowed: Sequence[int], free: Floats, opening: Sequence[Floats],
    times: Sequence[Sequence[float]], i: int,
) -> tuple[float, int, int]:  # fmt: skip
    """(end, row, block) of sequence i on the block where it ends first."""
    found = []
    for at, row in enumerate(allowed):
        ends = block_free(free, work.sizes[row]) + opening[at] + times[at][i]
        k = int(ends.argmin())
        found.append((float(ends[k]), at, k))
    return min(found)
