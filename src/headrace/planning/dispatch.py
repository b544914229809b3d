"""Gives sequences to blocks of ranks, from the largest group size to the smallest.

A *block* (p, k) is the group of ranks [k p, (k + 1) p). The ranks of a block may work in blocks
of other sizes before and after; larger groups come first, so that short sequences fill the gaps
that long ones leave. A block can start when the last of its ranks is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heapreplace

import numpy as np
from numpy.typing import NDArray

from headrace.planning.sizing import SizeTable

__all__ = [
    "Block",
    "Members",
    "deadline_schedule",
    "finish_times",
    "list_schedule",
    "order_of",
]

Block = tuple[int, int]
Members = dict[Block, list[int]]


def order_of(blocks: Iterable[Block]) -> list[Block]:
    """Blocks in the order of execution: larger groups first."""
    return sorted(blocks, key=lambda block: (-block[0], block[1]))


def finish_times(devices: int, seconds: Iterable[tuple[Block, float]]) -> list[float]:
    """When every rank is free, given blocks in order of execution and how long each runs."""
    free = [0.0] * devices
    for (p, k), length in seconds:
        if p == 1:
            free[k] += length
        else:
            start = k * p
            free[start : start + p] = [max(free[start : start + p]) + length] * p
    return free


def list_schedule(
    devices: int,
    sizes: Sequence[int],
    chosen: Sequence[int],
    seconds: Sequence[Sequence[float]],
    opening: Sequence[float],
) -> tuple[float, Members]:
    """Longest first onto the block that is free first (Graham's rule), size by size.

    ``chosen[i]`` is the row of sequence i (longest first) in ``sizes``; ``seconds[row][i]`` what it
    takes there; ``opening[row]`` what a block's first sequence costs on top. Returns the
    estimated seconds and the sequences of each block, longest first.
    """
    by_row: list[list[int]] = [[] for _ in sizes]
    for i, row in enumerate(chosen):
        by_row[row].append(i)
    free = [0.0] * devices
    members: Members = {}
    for row in sorted(range(len(sizes)), key=lambda row: -sizes[row]):
        if not by_row[row]:
            continue
        p, times = sizes[row], seconds[row]
        heap = [(max(free[k * p : (k + 1) * p]) + opening[row], k) for k in range(devices // p)]
        heapify(heap)
        held: list[list[int]] = [[] for _ in heap]
        for i in by_row[row]:
            at, k = heap[0]
            held[k].append(i)
            heapreplace(heap, (at + times[i], k))
        for at, k in heap:
            if held[k]:
                free[k * p : (k + 1) * p] = [at] * p
                members[p, k] = held[k]
    return max(free), members


def deadline_schedule(devices: int, table: SizeTable, deadline_s: float) -> Members:
    """Longest first, each sequence where it costs the least device-seconds and still ends by
    ``deadline_s``; there into the block that it fills best.

    A dual approximation: where few sequences meet many ranks, a time is guessed and the choice of
    sizes made to fit the room that is left, which a choice in advance cannot. A sequence that
    meets the deadline nowhere goes where it ends first. Returns the sequences of each block.
    """
    cost = np.array(table.sizes, dtype=np.float64)[:, None] * table.spread
    cost[table.alone > deadline_s] = np.inf
    cheapest = cost.argsort(axis=0, kind="stable").T.tolist()
    within = np.isfinite(cost).sum(axis=0).tolist()
    seconds = table.spread.tolist()
    free = np.zeros(devices)
    opening = [
        np.full(devices // p, c) for p, c in zip(table.sizes, table.opening.tolist(), strict=True)
    ]
    members: Members = {}
    for i, (rows, count) in enumerate(zip(cheapest, within, strict=True)):
        found: tuple[float, int, int] | None = None
        for row in rows[:count]:
            ends = _block_free(free, table.sizes[row]) + opening[row] + seconds[row][i]
            k = int(np.where(ends <= deadline_s, ends, -1.0).argmax())
            if ends[k] <= deadline_s:
                found = float(ends[k]), row, k
                break
        if found is None:
            found = min(_earliest(free, table.sizes, opening, seconds, i))
        end_s, row, k = found
        p = table.sizes[row]
        free[k * p : (k + 1) * p] = end_s
        opening[row][k] = 0.0
        members.setdefault((p, k), []).append(i)
    return members


def _block_free(free: NDArray[np.float64], p: int) -> NDArray[np.float64]:
    """When each block of p ranks is free."""
    blocks = len(free) // p
    return free if p == 1 else free[: blocks * p].reshape(blocks, p).max(axis=1)


def _earliest(
    free: NDArray[np.float64],
    sizes: Sequence[int],
    opening: Sequence[NDArray[np.float64]],
    seconds: Sequence[Sequence[float]],
    i: int,
) -> Iterator[tuple[float, int, int]]:
    """(end, row, block) of sequence i on the best block of every size."""
    for row, p in enumerate(sizes):
        ends = _block_free(free, p) + opening[row] + seconds[row][i]
        k = int(ends.argmin())
        yield float(ends[k]), row, k
