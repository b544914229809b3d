"""Worlds of groups to plan for, a clock, and every plan of a tiny batch: written apart from the
planners, so that they can disagree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from hypothesis import strategies as st

from headrace.costs.group_costs import GroupCosts

__all__ = [
    "batches",
    "best_by_force",
    "clock_s",
    "launch_s",
    "plain_bound_s",
    "world_costs",
]

Launches = list[tuple[tuple[int, ...], float]]


def launch_s(costs: GroupCosts, lengths: Sequence[int], p: int) -> float:
    """The formula, spelled out."""
    work = sum(costs.a_s * n**2 + costs.b_s * n for n in lengths)
    return (work + costs.kappa_s[p] * sum(lengths)) / p + costs.c_s


def clock_s(devices: int, launches: Launches, semantics: str) -> float:
    """Event by event: a rank starts its next launch when all partners have come to it."""
    queues: list[list[int]] = [[] for _ in range(devices)]
    for n, (ranks, _) in enumerate(launches):
        for rank in ranks:
            queues[rank].append(n)
    now, busy, ends, total = [0.0] * devices, [0] * devices, 0.0, 0.0
    while any(busy[rank] < len(queues[rank]) for rank in range(devices)):
        heads = [q[busy[r]] if busy[r] < len(q) else -1 for r, q in enumerate(queues)]
        ready = {n for n in heads if n >= 0 and all(heads[r] == n for r in launches[n][0])}
        assert ready, "deadlock"
        total += max(launches[n][1] for n in ready)
        for n in ready:
            ranks, seconds = launches[n]
            end = max(now[rank] for rank in ranks) + seconds
            ends = max(ends, end)
            for rank in ranks:
                now[rank], busy[rank] = end, busy[rank] + 1
    return ends if semantics == "free" else total


def plain_bound_s(costs: GroupCosts, lengths: Sequence[int], devices: int) -> float:
    """All work shared by all ranks and one constant, or the longest sequence alone."""
    longest = max(lengths)
    alone = min(
        launch_s(costs, [longest], p)
        for p in costs.sizes
        if p <= devices and p * costs.cap_tokens >= longest
    )
    work = sum(costs.a_s * n**2 + costs.b_s * n for n in lengths)
    return max(work / devices + costs.c_s, alone)


@st.composite
def world_costs(draw: st.DrawFn) -> GroupCosts:
    """Groups of powers of two, of every size, or of a few; from free to dear launches and links;
    some world of at most 17 holds a million tokens."""
    every, some = tuple(range(1, 18)), (1, 2, 3, 4, 6, 8, 12)
    sizes = draw(st.sampled_from([(1, 2, 4, 8, 16), every, some, (1,), (2, 5)]))
    link = draw(st.sampled_from([0.0, 2e-5, 4e-4]))
    return GroupCosts(
        a_s=draw(st.sampled_from([0.0, 5e-9])),
        b_s=draw(st.sampled_from([2e-4, 1e-5])),
        c_s=draw(st.sampled_from([0.0, 0.02, 0.5])),
        cap_tokens=draw(st.sampled_from([1_000_000, 2_000_000])),
        kappa_s={p: link * (1 - 1 / p) * (1 + 4 * (p > 8)) for p in sizes},
    )


def batches(most: int = 40) -> st.SearchStrategy[list[int]]:
    """Lengths from one to a million: short, long, equal."""
    length = st.one_of(st.integers(1, 200), st.integers(1, 1_000_000), st.just(1024))
    return st.lists(length, min_size=1, max_size=most)


def best_by_force(costs: GroupCosts, lengths: Sequence[int], devices: int, semantics: str) -> float:
    """The least seconds of all plans: every partition into launches, every set of ranks for each,
    every order."""
    sets = [ranks for p in costs.sizes if p <= devices for ranks in combinations(range(devices), p)]
    best = float("inf")
    for parts in _partitions(tuple(range(len(lengths)))):
        packs = [[lengths[i] for i in part] for part in parts]
        best = _best_from(costs, packs, sets, [0.0] * devices, [], semantics, best)
    return best


def _best_from(
    costs: GroupCosts,
    packs: list[list[int]],
    sets: list[tuple[int, ...]],
    free: list[float],
    done: Launches,
    semantics: str,
    best: float,
) -> float:
    if semantics == "free" and max(free) >= best:
        return best
    if not packs:
        return min(best, clock_s(len(free), done, semantics))
    for n, pack in enumerate(packs):
        for ranks in sets:
            if sum(pack) <= costs.cap_tokens * len(ranks):
                seconds = launch_s(costs, pack, len(ranks))
                later = list(free)
                for rank in ranks:
                    later[rank] = max(free[r] for r in ranks) + seconds
                best = _best_from(
                    costs,
                    packs[:n] + packs[n + 1 :],
                    sets,
                    later,
                    [*done, (ranks, seconds)],
                    semantics,
                    best,
                )
    return best


def _partitions(items: tuple[int, ...]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    for parts in _partitions(items[1:]):
        yield [[items[0]], *parts]
        for n, part in enumerate(parts):
            yield [*parts[:n], [items[0], *part], *parts[n + 1 :]]
