"""What planners of groups share: the size that a user would configure, and launches in turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.planning.batch import PriceTable
from headrace.planning.schedule import Group

__all__ = ["block", "fitting", "in_turn", "interleaved"]


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


def interleaved(table: PriceTable, k: int, taken: Sequence[Sequence[list[int]]]) -> list[Group]:
    """Launches of the groups of scheme k, in order: the first of every group comes before the
    second of any. ``taken`` has the launches of each group."""
    launches = sorted(
        (number, group, members)
        for group, of_group in enumerate(taken)
        for number, members in enumerate(of_group)
    )
    return [(k, block(table.width[k], group), members) for _, group, members in launches]
