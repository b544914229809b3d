"""What planners of groups share: the size that a user would configure, and launches in turn."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace

import numpy as np

from headrace.planning.batch import PriceTable
from headrace.planning.schedule import Group
from headrace.spec.plan import Semantics

__all__ = ["block", "dealt", "fitting", "in_turn", "interleaved"]


def fitting(table: PriceTable) -> int | None:
    """The scheme of the fewest devices that holds the longest sequence; None where none does."""
    holds = np.isfinite(table.alone[:, 0]).tolist()
    return next(
        (k for k, width in enumerate(table.width) if holds[k] and width <= table.devices), None
    )


def block(width: int, number: int) -> tuple[int, ...]:
    """The ranks of group ``number`` where neighbouring groups of ``width`` ranks are counted from
    rank 0."""
    return tuple(range(number * width, (number + 1) * width))


def in_turn(table: PriceTable, k: int, launches: Sequence[list[int]]) -> list[Group]:
    """The ``launches`` in order, each with the scheme and ranks of its group: they go to the groups
    of scheme k in turn."""
    width = table.width[k]
    groups = table.devices // width
    return [(k, block(width, number % groups), members) for number, members in enumerate(launches)]


def dealt(launch_s: Sequence[float], groups: int, semantics: Semantics) -> tuple[list[int], float]:
    """Deal launches that take ``launch_s`` seconds, in this order, each to the group that is free
    first; in lockstep, where all groups are free at once, in turn. Returns the group of each, and
    the seconds until the last has ended."""
    if semantics == "lockstep":
        rounds = range(0, len(launch_s), groups)
        end_s = sum(max(launch_s[first : first + groups]) for first in rounds)
        return [number % groups for number in range(len(launch_s))], end_s
    free = [(0.0, group) for group in range(groups)]  # a heap of (seconds until it is free, group)
    group_of = list[int]()
    for seconds in launch_s:
        free_s, group = free[0]
        heapreplace(free, (free_s + seconds, group))
        group_of.append(group)
    return group_of, max(free)[0]


def interleaved(table: PriceTable, k: int, taken: Sequence[Sequence[list[int]]]) -> list[Group]:
    """Launches of the groups of scheme k, in order: the first of every group comes before the
    second of any. ``taken`` has the launches of each group."""
    launches = sorted(
        (number, group, members)
        for group, of_group in enumerate(taken)
        for number, members in enumerate(of_group)
    )
    return [(k, block(table.width[k], group), members) for _, group, members in launches]
