"""Hydraulis' own planner: its proposal, its greedy dispatch, one packing.

Every strategy that is proposed (:mod:`headrace.planners.dynamic_program`) is dispatched
and packed for every batch. Algorithm 1 of its appendix E: sequences in random order, each to the
pipeline that keeps the slowest pipeline's sum_i T(l_i) + (P - 1) T(longest) lowest; the best of T
trials. All trials run side by side as arrays.

hydraulis        as the authors' code: the dynamic program pays a micro-batch's constant for every
                 sequence, and of pipelines that keep the slowest one alike the first is taken
hydraulis-tuned  the same idea where its code gives time away: the program runs a second time, with
                 the share of the constant that a sequence's tokens have of a full micro-batch;
                 devices that its strategies leave idle are filled; the strategies of one scheme are
                 candidates too, dispatched as ``static`` does besides; one trial has the longest
                 sequences first, and of pipelines that keep the slowest one alike the one that ends
                 first is taken

As the static schedules of a batch are among its own, the tuned planner is never behind ``static``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from headrace.planners.dynamic_program import proposed
from headrace.planners.homogeneous import BatchPlanner, roomiest_first
from headrace.planning.batch import PriceTable
from headrace.planning.filling import Pipelines
from headrace.planning.schedule import Assignment, placed
from headrace.planning.side_by_side import Counts
from headrace.planning.static import best_static

__all__ = ["by_greedy", "greedy", "hydraulis", "hydraulis_candidates", "hydraulis_tuned"]

_TRIALS = 100  # random orders of the sequences
_MOST_CANDIDATES = 40  # strategies of the dynamic program that are dispatched for a batch


def hydraulis(tables: Sequence[PriceTable], seed: int) -> BatchPlanner:
    """The paper's planner: every candidate is dispatched and packed for every batch."""
    candidates = hydraulis_candidates(tables)

    def planned(number: int, table: PriceTable) -> Assignment:
        best = _best(table, candidates, None, seed + number, tuned=False)
        assert best is not None, "the first candidate holds any sequence"
        return best

    return planned


def hydraulis_tuned(tables: Sequence[PriceTable], seed: int) -> BatchPlanner:
    """The paper's planner with what this module's docstring says of it; in no batch behind the best
    schedule of one scheme."""
    candidates = hydraulis_candidates(tables, tuned=True)

    def planned(number: int, table: PriceTable) -> Assignment:
        best = _best(table, candidates, best_static(table), seed + number, tuned=True)
        assert best is not None, "the first candidate holds any sequence"
        return best

    return planned


def hydraulis_candidates(tables: Sequence[PriceTable], *, tuned: bool = False) -> list[Counts]:
    """The strategies that are dispatched for every batch; the first holds any sequence."""
    table, lengths = tables[0], [tokens for batch in tables for tokens in batch.tokens]
    # The authors' lists begin with pipelines of one scheme that hold any sequence.
    homogeneous = [_of_one_scheme(table, k) for k in roomiest_first(table)]
    theirs = _of_program(table, lengths, amortized=False)
    if not tuned:
        return list(dict.fromkeys([homogeneous[0], *theirs]))[:_MOST_CANDIDATES]
    mended = _of_program(table, lengths, amortized=True)
    found = [*mended[:_MOST_CANDIDATES], *theirs[:_MOST_CANDIDATES]]
    return list(dict.fromkeys([*homogeneous, *_filled(table, found)]))


def _of_program(table: PriceTable, lengths: Sequence[int], *, amortized: bool) -> list[Counts]:
    """The strategies of the dynamic program, whole and relaxed, those for the longest sequences
    first."""
    found = list[Counts]()
    for relaxed in (False, True):
        found += reversed(proposed(table, lengths, relaxed=relaxed, amortized=amortized))
    return list(dict.fromkeys(found))


def _filled(table: PriceTable, strategies: Sequence[Counts]) -> Iterator[Counts]:
    """The strategies, and each that leaves devices idle with more pipelines of its schemes: as many
    as there is room for of one of them, then of the others, the widest first."""
    for counts in strategies:
        yield counts
        used = [k for k, n in enumerate(counts) if n]
        for first in used:
            filled = list(counts)
            for k in (first, *reversed(used)):
                idle = table.devices - sum(n * w for n, w in zip(filled, table.width, strict=True))
                filled[k] += idle // table.width[k]
            yield tuple(filled)


def _of_one_scheme(table: PriceTable, k: int) -> Counts:
    """The strategy of as many pipelines of scheme k as the devices have room for."""
    return tuple(table.devices // width if j == k else 0 for j, width in enumerate(table.width))


def _best(
    table: PriceTable,
    candidates: Sequence[Counts],
    best: Assignment | None,
    seed: int,
    *,
    tuned: bool,
) -> Assignment | None:
    """The quickest of ``best`` and of the candidates that may be quicker, dispatched and packed."""
    for counts in candidates:
        if best is not None and _least_s(table, counts) >= best.seconds:
            continue
        made = by_greedy(table, counts, seed=seed, tuned=tuned)
        if made is not None and (best is None or made.seconds < best.seconds):
            best = made
    return best


def _least_s(table: PriceTable, counts: Counts) -> float:
    """Seconds that no dispatch of a strategy beats: all devices busy, and the longest sequence."""
    used = [k for k, count in enumerate(counts) if count]
    devices = sum(counts[k] * table.width[k] for k in used)
    area = (table.ranks * table.spread)[used].min(axis=0)
    longest_s = float((table.stages * table.alone)[used, 0].min())
    return max(longest_s, float(area @ table.batch.counts) / devices) * (1 - 1e-9)


def by_greedy(
    table: PriceTable, counts: Counts, *, seed: int, tuned: bool = False
) -> Assignment | None:
    """What :func:`hydraulis` makes of one batch and strategy, or :func:`hydraulis_tuned`; None
    where it cannot hold the batch."""
    if not any(n and np.isfinite(table.alone[k, 0]) for k, n in enumerate(counts)):
        return None
    name = "hydraulis-tuned" if tuned else "hydraulis"
    given = greedy(table, counts, seed=seed, tuned=tuned)
    return Assignment.of(table, placed(table, given), name)


def greedy(
    table: PriceTable, counts: Counts, *, seed: int, trials: int = _TRIALS, tuned: bool = False
) -> Pipelines:
    """Algorithm 1 of appendix E.

    Args:
        table: The prices.
        counts: A strategy that holds the batch: the pipelines of each scheme.
        seed: Seed of the random orders.
        trials: Number of random orders.
        tuned: The first order has the longest first, and of pipelines that keep the slowest one
            alike the one that ends first is taken; else the first.

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
    if tuned:
        orders[0] = range(sequences)
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
            ends = work + own + extra
        after = np.maximum(ends, slowest)
        if tuned:
            after = np.where(after == after.min(axis=1, keepdims=True), ends, np.inf)
        chosen = after.argmin(axis=1)
        work[rows, chosen] += own[rows, chosen]
        longest[rows, chosen] = np.maximum(longest[rows, chosen], own[rows, chosen])
        given[rows, which] = chosen
    best = int((work + bubbles * longest).max(axis=1).argmin())
    members: list[list[int]] = [[] for _ in pipes]
    for i, q in enumerate(given[best].tolist()):
        members[q].append(i)
    return list(zip(pipes, members, strict=True))
