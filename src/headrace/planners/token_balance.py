"""Balancing by the method of Karmarkar and Karp.

By tokens, of pipelines: every pipeline of one scheme has about as many.

By weight, as verl balances data-parallel ranks: the groups have one static size, the smallest that
fits the longest sequence. Sequences are weighed by w(l) = 24576 l + l^2, a formula that knows
neither the model nor the machine, and dealt to groups such that the weights are even; then every
group's share to as many micro-batches as the fullest group needs, again by weight. verl lets a
micro-batch grow beyond its token limit; here there are more of them until none does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.planners.differencing import differenced
from headrace.planners.launched import fitting, interleaved
from headrace.planning.batch import PriceTable
from headrace.planning.schedule import Assignment, Group, placed

__all__ = ["by_tokens", "by_weight"]

_LINEAR = 24576  # the factor of l in verl's weight l^2 + 24576 l of a sequence of l tokens


def by_tokens(table: PriceTable, k: int) -> Assignment | None:
    """The schedule of pipelines of scheme k that all have about the same tokens; None where the
    scheme does not hold the longest sequence."""
    if not np.isfinite(table.alone[k, 0]):
        return None
    sets = differenced(table.tokens, table.devices // table.width[k])
    return Assignment.of(table, placed(table, [(k, held) for held in sets]), "token-balance")


def by_weight(table: PriceTable) -> list[Group]:
    """Launches of the whole batch on groups of one size, balanced by verl's weights; none where no
    group size holds the longest sequence."""
    k = fitting(table)
    if k is None:
        return []
    room, cap = table.room(k), table.cap[k]
    weights = [_LINEAR * tokens + tokens * tokens for tokens in table.tokens]
    shares = differenced(weights, table.devices // table.width[k])
    # As many micro-batches as the fullest group needs.
    count = max(-(-sum([room[i] for i in held]) // cap) for held in shares)
    return interleaved(table, k, [_split(held, weights, room, count, cap) for held in shares])


def _split(
    held: list[int], weights: Sequence[int], room: Sequence[int], count: int, cap: int
) -> list[list[int]]:
    """Split the positions ``held`` of one group into ``count`` micro-batches of about even weight,
    or into as many more as it takes until none has more than ``cap`` tokens. ``room`` are the
    tokens of each position; returns the positions of each micro-batch."""
    while held:
        parts = differenced([weights[i] for i in held], min(count, len(held)))
        launches = [[held[member] for member in part] for part in parts if part]
        if all(sum([room[i] for i in launch]) <= cap for launch in launches):
            return launches
        count += 1
    return []
