"""Two schedulers of Megatron-Core: ``dp_balanced`` and hybrid context parallel.

dp_balanced   Groups have one static size. Sequences are packed greedily in the order of the batch;
              packs are split from the back until their number is a multiple of the groups, and
              dealt out in turn, so that all groups have as many launches.
hybrid        A sequence runs alone on the fewest ranks, of the sizes, that hold it: no packing. In
              rounds, longest first, it goes to the group of its size with the least load, or to a
              new group if ranks are left. A round ends when nothing more can be placed, or when
              a smaller size has begun and loads (l^2 / p: another formula that knows no machine)
              differ by at most 5 %. Ranks that a round leaves idle go to its smallest groups,
              which grow to the next size while that fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappush, heapreplace

from headrace.planning.groups.clock import Job
from headrace.planning.groups.static import block_ranks, fitting_row
from headrace.planning.groups.work import Work

__all__ = ["dp_balanced_jobs", "hybrid_jobs"]

_EVEN = 0.05


def dp_balanced_jobs(work: Work) -> list[Job]:
    """Launches of the whole batch by dp_balanced."""
    p = work.sizes[fitting_row(work)]
    groups, cap = work.devices // p, work.costs.cap_tokens * p
    packs: list[list[int]] = [[]]
    room = cap
    for i in sorted(range(len(work.tokens)), key=lambda i: work.order[i]):
        if work.tokens[i] > room:
            packs.append([])
            room = cap
        packs[-1].append(i)
        room -= work.tokens[i]
    packs = [pack for pack in packs if pack]
    missing, at = -len(packs) % groups, len(packs) - 1
    while missing and at >= 0:
        if len(packs[at]) > 1:
            packs.append([packs[at].pop()])
            missing -= 1
        else:
            at -= 1
    return [(block_ranks(p, n % groups), sorted(pack)) for n, pack in enumerate(packs)]


@dataclass(slots=True)
class _Group:
    row: int
    held: list[int] = field(default_factory=list)
    load: float = 0.0


def hybrid_jobs(work: Work) -> list[Job]:
    """Launches of the whole batch by hybrid context parallel, one sequence each."""
    rows = [
        next(row for row, p in enumerate(work.sizes) if p * work.costs.cap_tokens >= length)
        for length in work.tokens
    ]
    jobs, left = list[Job](), list(range(len(work.tokens)))
    while left:
        groups, left = _round(work, rows, left)
        for start, group in _placed(work, _grown(work, groups)):
            ranks = tuple(range(start, start + work.sizes[group.row]))
            jobs += [(ranks, [i]) for i in group.held]
    return jobs


def _round(work: Work, rows: list[int], some: list[int]) -> tuple[list[_Group], list[int]]:
    """The groups of one round, and the sequences for later rounds."""
    groups, left, idle, first = list[_Group](), list[int](), work.devices, rows[some[0]]
    heaps: dict[int, list[tuple[float, int]]] = {row: [] for row in rows}  # (load, group)
    for n, i in enumerate(some):
        p, heap = work.sizes[rows[i]], heaps[rows[i]]
        if idle >= p:
            heappush(heap, (0.0, len(groups)))
            groups.append(_Group(rows[i]))
            idle -= p
        if not heap:
            left.append(i)
            continue
        group = groups[heap[0][1]]
        group.held.append(i)
        group.load += work.tokens[i] ** 2 / p
        heapreplace(heap, (group.load, heap[0][1]))
        if rows[i] < first and not idle:
            loads = [group.load for group in groups]
            if max(loads) - min(loads) <= _EVEN * max(loads):
                return groups, left + some[n + 1 :]
    return groups, left


def _grown(work: Work, groups: list[_Group]) -> list[_Group]:
    idle = work.devices - sum(work.sizes[group.row] for group in groups)
    while True:
        group = min(groups, key=lambda group: group.row)
        if group.row + 1 == len(work.sizes):
            return groups
        more = work.sizes[group.row + 1] - work.sizes[group.row]
        if more > idle:
            return groups
        group.row += 1
        idle -= more


def _placed(work: Work, groups: list[_Group]) -> Iterator[tuple[int, _Group]]:
    """Groups with the first of their ranks, larger groups first."""
    start = 0
    for group in sorted(groups, key=lambda group: -group.row):
        yield start, group
        start += work.sizes[group.row]
