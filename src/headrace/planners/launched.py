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
    """The ranks of group ``number`` of ``width``."""
    return tuple(range(number * width, (number + 1) * width))


def in_turn(table: PriceTable, k: int, launches: Sequence[list[int]]) -> list[Group]:
    """Launches dealt out to the groups of scheme k in turn."""
    width = table.width[k]
    groups = table.devices // width
    return [(k, block(width, n % groups), members) for n, members in enumerate(launches)]


def interleaved(table: PriceTable, k: int, taken: Sequence[Sequence[list[int]]]) -> list[Group]:
    """Launches of the groups of scheme k, ``taken`` for each group in its order, the first of
    every group before the second of any."""
    launches = sorted(
        (n, group, members) for group, own in enumerate(taken) for n, members in enumerate(own)
    )
    return [(k, block(table.width[k], group), members) for _, group, members in launches]
