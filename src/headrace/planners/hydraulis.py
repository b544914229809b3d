"""Hydraulis' own planner: its proposal, its greedy dispatch, one packing.

Every strategy that is proposed (:mod:`headrace.planners.dynamic_program`) is dispatched
and packed for every batch. Algorithm 1 of its appendix E: sequences in random order, each to the
pipeline that keeps the slowest pipeline's sum_i T(l_i) + (P - 1) T(longest) lowest, the first of
equals; the best of T trials. All trials run side by side as arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.planners.dynamic_program import proposed
from headrace.planners.homogeneous import BatchPlanner, roomiest_first
from headrace.planning.batch import PriceTable
from headrace.planning.filling import Pipelines
from headrace.planning.schedule import Assignment, placed
from headrace.planning.side_by_side import Counts

__all__ = ["by_greedy", "greedy", "hydraulis", "hydraulis_candidates"]

_TRIALS = 100  # random orders of the sequences
_MOST_CANDIDATES = 40  # strategies that are dispatched for a batch


def hydraulis(tables: Sequence[PriceTable], seed: int) -> BatchPlanner:
    """The paper's planner: every candidate is dispatched and packed for every batch."""
    candidates = hydraulis_candidates(tables)

    def planned(number: int, table: PriceTable) -> Assignment:
        best: Assignment | None = None
        for counts in candidates:
            if best is not None and _least_s(table, counts) >= best.seconds:
                continue
            made = by_greedy(table, counts, seed=seed + number)
            if made is not None and (best is None or made.seconds < best.seconds):
                best = made
        assert best is not None, "the first candidate holds any sequence"
        return best

    return planned


def hydraulis_candidates(tables: Sequence[PriceTable]) -> list[Counts]:
    """The strategies that are dispatched for every batch; the first holds any sequence."""
    table, lengths = tables[0], [tokens for batch in tables for tokens in batch.tokens]
    roomiest = roomiest_first(table)[0]
    first = [0] * len(table)
    first[roomiest] = table.devices // table.width[roomiest]
    # The authors' lists begin with pipelines of one scheme that hold any sequence. Those that hold
    # the longest come last from the programs, and first here.
    found = [tuple(first), *reversed(proposed(table, lengths, relaxed=False))]
    found += reversed(proposed(table, lengths, relaxed=True))
    return list(dict.fromkeys(found))[:_MOST_CANDIDATES]


def _least_s(table: PriceTable, counts: Counts) -> float:
    """Seconds that no dispatch of a strategy beats: all devices busy, and the longest sequence."""
    used = [k for k, count in enumerate(counts) if count]
    devices = sum(counts[k] * table.width[k] for k in used)
    area = (table.ranks * table.spread)[used].min(axis=0)
    longest_s = float((table.stages * table.alone)[used, 0].min())
    return max(longest_s, float(area @ table.batch.counts) / devices) * (1 - 1e-9)


def by_greedy(table: PriceTable, counts: Counts, *, seed: int) -> Assignment | None:
    """What :func:`hydraulis` makes of one batch and strategy; None where it cannot hold the
    batch."""
    if not any(n and np.isfinite(table.alone[k, 0]) for k, n in enumerate(counts)):
        return None
    return Assignment.of(table, placed(table, greedy(table, counts, seed=seed)), "hydraulis")


def greedy(table: PriceTable, counts: Counts, *, seed: int, trials: int = _TRIALS) -> Pipelines:
    """Algorithm 1 of appendix E.

    Args:
        table: The prices.
        counts: A strategy that holds the batch: the pipelines of each scheme.
        seed: Seed of the random orders.
        trials: Number of random orders.

    Returns:
        (scheme, sequences) of each pipeline.
    """
    pipes = [k for k in roomiest_first(table) for _ in range(counts[k])]
    used, sequences = sorted(set(pipes)), len(table.tokens)
    column = np.array([used.index(k) for k in pipes])
    seconds = np.array([table.seconds(k) for k in used]).T  # [sequences, used schemes]
    bubbles = np.array([table.depth[k] - 1 for k in pipes], dtype=np.float64)
    random = np.random.default_rng(seed)
    orders = np.stack([random.permutation(sequences) for _ in range(trials)])
    work = np.zeros((trials, len(pipes)))
    longest = np.zeros((trials, len(pipes)))
    given = np.zeros((trials, sequences), dtype=np.int64)
    rows = np.arange(trials)
    for step in range(sequences):
        which = orders[:, step]
        own = seconds[which][:, column]
        with np.errstate(invalid="ignore"):
            extra = np.where(bubbles > 0, bubbles * np.maximum(longest, own), 0.0)
            slowest = (work + bubbles * longest).max(axis=1, keepdims=True)
            after = np.maximum(work + own + extra, slowest)
        chosen = after.argmin(axis=1)
        work[rows, chosen] += own[rows, chosen]
        longest[rows, chosen] = np.maximum(longest[rows, chosen], own[rows, chosen])
        given[rows, which] = chosen
    best = int((work + bubbles * longest).max(axis=1).argmin())
    members: list[list[int]] = [[] for _ in pipes]
    for i, q in enumerate(given[best].tolist()):
        members[q].append(i)
    return list(zip(pipes, members, strict=True))
