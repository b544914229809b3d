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

from headrace.planning.groups.clock import Job
from headrace.planning.groups.packing import packed
from headrace.planning.groups.static import block_ranks, fitting_row
from headrace.planning.groups.work import Work

__all__ = ["bucket_jobs", "buckets", "packed_jobs"]


def buckets(work: Work) -> list[list[int]]:
    """Positions of like length: (2^(k-1), 2^k] tokens, longest bucket first."""
    grouped = groupby(range(len(work.tokens)), key=lambda i: (work.tokens[i] - 1).bit_length())
    return [list(some) for _, some in grouped]


def bucket_jobs(work: Work) -> list[Job]:
    """Launches of the whole batch by bucket parallel."""
    row = fitting_row(work)
    limit_s, cap = float(work.seconds[row, 0]), work.costs.cap_tokens * work.sizes[row]
    launches = list[list[int]]()
    for bucket in buckets(work):
        fit = cap // work.tokens[bucket[0]]
        slowest_s = float(work.seconds[row, bucket[0]])
        even = int(limit_s / slowest_s) if slowest_s > 0 else fit
        size = max(1, min(fit, even))
        launches += [bucket[n : n + size] for n in range(0, len(bucket), size)]
    return _in_turn(work, row, launches)


def packed_jobs(work: Work) -> list[Job]:
    """Launches of the whole batch by packed parallel."""
    row = fitting_row(work)
    cap = work.costs.cap_tokens * work.sizes[row]
    return _in_turn(work, row, packed(work.tokens, range(len(work.tokens)), cap))


def _in_turn(work: Work, row: int, launches: list[list[int]]) -> list[Job]:
    p = work.sizes[row]
    groups = work.devices // p
    return [(block_ranks(p, n % groups), held) for n, held in enumerate(launches)]
