"""Bucket parallel and packed parallel, the two classes that Data-Centric Parallel starts from.

Both keep one size for all groups, the smallest that fits the longest sequence.

bucket   Sequences of like length (within a factor of two) form a bucket. A launch holds sequences
         of one bucket, as many as memory allows, but no more than take as long as one sequence of
         the longest bucket: "decrease the batch size for slow batches".
packed   Sequences are packed to the most tokens that memory allows, whatever their lengths, and
         the packs dealt out evenly.

Launches go to the groups in turn, the longest first.
"""

from __future__ import annotations

from itertools import groupby

from headrace.planners.launched import fitting, in_turn
from headrace.planning.batch import PriceTable, best_fit
from headrace.planning.schedule import Group

__all__ = ["bucket", "buckets", "packed"]


def buckets(table: PriceTable) -> list[list[int]]:
    """The positions of a batch in buckets of like lengths, 2^(k-1) + 1 to 2^k tokens each, the
    longest bucket first."""
    tokens = table.tokens
    grouped = groupby(range(len(tokens)), key=lambda i: (tokens[i] - 1).bit_length())
    return [list(bucket) for _, bucket in grouped]


def bucket(table: PriceTable) -> list[Group]:
    """Launches of the whole batch as bucket parallel makes them; none where no group size holds the
    longest sequence."""
    k = fitting(table)
    if k is None:
        return []
    seconds, room = table.seconds(k), table.room(k)
    launches = list[list[int]]()
    for members in buckets(table):
        # Sequences of a launch: what memory holds of the bucket's longest, and no more than take as
        # long as the batch's longest.
        by_memory, longest_s = table.cap[k] // room[members[0]], seconds[members[0]]
        by_time = int(seconds[0] / longest_s) if longest_s > 0 else by_memory
        size = max(1, min(by_memory, by_time))
        launches += [members[first : first + size] for first in range(0, len(members), size)]
    return in_turn(table, k, launches)


def packed(table: PriceTable) -> list[Group]:
    """Launches of the whole batch as packed parallel makes them, with packs as full as memory
    allows; none where no group size holds the longest sequence."""
    k = fitting(table)
    if k is None:
        return []
    room, everyone = table.room(k), range(len(table.tokens))
    whole = [list(everyone)] if sum(room) <= table.cap[k] else []
    return in_turn(table, k, whole or best_fit(room, everyone, table.cap[k]))
