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
    """The paper's planner: for every batch all candidate strategies are dispatched and packed, and
    the quickest is taken. Candidates are proposed once, from all batches together."""
    candidates = hydraulis_candidates(tables)

    def planned(number: int, table: PriceTable) -> Assignment:
        """The quickest schedule of one batch over all candidates."""
        best = _best(table, candidates, best=None, seed=seed + number, tuned=False)
        assert best is not None, "the first candidate holds any sequence"
        return best

    return planned


def hydraulis_tuned(tables: Sequence[PriceTable], seed: int) -> BatchPlanner:
    """The paper's planner with the improvements that the head of this module lists; in no batch
    slower than the best schedule of one scheme."""
    candidates = hydraulis_candidates(tables, tuned=True)

    def planned(number: int, table: PriceTable) -> Assignment:
        """The quickest schedule of one batch over all candidates and the best static schedule."""
        static = best_static(table)
        best = _best(table, candidates, best=static, seed=seed + number, tuned=True)
        assert best is not None, "the first candidate holds any sequence"
        return best

    return planned


def hydraulis_candidates(tables: Sequence[PriceTable], *, tuned: bool = False) -> list[Counts]:
    """The strategies that are dispatched for every batch, proposed from all batches of a data set;
    the first holds any sequence."""
    table, lengths = tables[0], [tokens for batch in tables for tokens in batch.tokens]
    # The authors' lists begin with pipelines of one scheme that hold any sequence.
    one_scheme = [_of_one_scheme(table, k) for k in roomiest_first(table)]
    published = _of_program(table, lengths, amortized=False)
    if not tuned:
        return list(dict.fromkeys([one_scheme[0], *published]))[:_MOST_CANDIDATES]
    amortized = _of_program(table, lengths, amortized=True)
    proposals = [*amortized[:_MOST_CANDIDATES], *published[:_MOST_CANDIDATES]]
    return list(dict.fromkeys([*one_scheme, *_filled(table, proposals)]))


def _of_program(table: PriceTable, lengths: Sequence[int], *, amortized: bool) -> list[Counts]:
    """The strategies that the dynamic program proposes for the ``lengths`` of a data set: first
    those of whole pipelines, then those rounded from fractions of pipelines, each with the
    strategies for the longest sequences in front."""
    strategies = list[Counts]()
    for relaxed in (False, True):
        strategies += reversed(proposed(table, lengths, relaxed=relaxed, amortized=amortized))
    return list(dict.fromkeys(strategies))


def _filled(table: PriceTable, strategies: Sequence[Counts]) -> Iterator[Counts]:
    """Each of ``strategies``, followed by variants in which more pipelines of its schemes fill the
    idle devices: one variant for each scheme, which gets as many pipelines as there is room for
    before the other schemes do, the widest of these first."""
    for counts in strategies:
        yield counts
        used = [k for k, count in enumerate(counts) if count]
        for first in used:
            filled = list(counts)
            for k in (first, *reversed(used)):
                busy = sum(count * width for count, width in zip(filled, table.width, strict=True))
                filled[k] += (table.devices - busy) // table.width[k]
            yield tuple(filled)


def _of_one_scheme(table: PriceTable, k: int) -> Counts:
    """The strategy of as many pipelines of scheme k as the devices have room for."""
    return tuple(
        table.devices // width if other == k else 0 for other, width in enumerate(table.width)
    )


def _best(
    table: PriceTable,
    candidates: Sequence[Counts],
    best: Assignment | None,
    seed: int,
    *,
    tuned: bool,
) -> Assignment | None:
    """The quickest of the schedule ``best`` and of all ``candidates``, dispatched and packed;
    candidates that cannot be quicker are left out."""
    for counts in candidates:
        if best is not None and _least_s(table, counts) >= best.seconds:
            continue
        made = by_greedy(table, counts, seed=seed, tuned=tuned)
        if made is not None and (best is None or made.seconds < best.seconds):
            best = made
    return best


def _least_s(table: PriceTable, counts: Counts) -> float:
    """Seconds that no dispatch of a strategy beats: either its devices share all work evenly, each
    sequence on its cheapest scheme, or the longest sequence alone takes longer."""
    used = [k for k, count in enumerate(counts) if count]
    devices = sum(counts[k] * table.width[k] for k in used)
    # Least device-seconds of a sequence of each run of equal ones, with its share of a constant.
    device_s = (table.ranks * table.spread)[used].min(axis=0)
    # Alone, a sequence passes through all stages of its pipeline one after the other.
    longest_s = float((table.stages * table.alone)[used, 0].min())
    shared_s = float(device_s @ table.batch.counts) / devices
    return max(longest_s, shared_s) * (1 - 1e-9)  # less what may be rounding


def by_greedy(
    table: PriceTable, counts: Counts, *, seed: int, tuned: bool = False
) -> Assignment | None:
    """The schedule of one batch by one strategy with the greedy dispatch, plain or ``tuned``; None
    where the strategy cannot hold the batch."""
    if not any(count and np.isfinite(table.alone[k, 0]) for k, count in enumerate(counts)):
        return None
    name = "hydraulis-tuned" if tuned else "hydraulis"
    given = greedy(table, counts, seed=seed, tuned=tuned)
    return Assignment.of(table, placed(table, given), name)


def greedy(
    table: PriceTable, counts: Counts, *, seed: int, trials: int = _TRIALS, tuned: bool = False
) -> Pipelines:
    """Deal sequences out to pipelines greedily in many random orders, and keep the best (Algorithm
    1 of appendix E).

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
    # The column of ``seconds`` of each pipeline's scheme.
    scheme_column = np.array([used.index(k) for k in pipes])
    seconds = np.array([table.seconds(k) for k in used]).T  # [sequences, used schemes]
    bubbles = np.array([table.depth[k] - 1 for k in pipes], dtype=np.float64)
    random = np.random.default_rng(seed)
    orders = np.stack([random.permutation(sequences) for _ in range(trials)])
    if tuned:
        orders[0] = range(sequences)
    work_s = np.zeros((trials, len(pipes)))
    longest_s = np.zeros((trials, len(pipes)))
    pipe_of = np.zeros((trials, sequences), dtype=np.int64)
    all_trials = np.arange(trials)
    # All trials place their next sequence at once; arrays are [trials, pipelines].
    for step in range(sequences):
        sequence = orders[:, step]
        own_s = seconds[sequence][:, scheme_column]
        with np.errstate(invalid="ignore"):
            # Filling and draining take the longest micro-batch once per further stage.
            bubbles_s = np.where(bubbles > 0, bubbles * np.maximum(longest_s, own_s), 0.0)
            slowest_s = (work_s + bubbles * longest_s).max(axis=1, keepdims=True)
            ends_s = work_s + own_s + bubbles_s
        # Seconds of the slowest pipeline if the sequence goes to each pipeline.
        slowest_after = np.maximum(ends_s, slowest_s)
        if tuned:  # of pipelines that tie, the one that ends first; argmin takes the first of all
            slowest_after = np.where(
                slowest_after == slowest_after.min(axis=1, keepdims=True), ends_s, np.inf
            )
        chosen = slowest_after.argmin(axis=1)
        work_s[all_trials, chosen] += own_s[all_trials, chosen]
        longest_s[all_trials, chosen] = np.maximum(
            longest_s[all_trials, chosen], own_s[all_trials, chosen]
        )
        pipe_of[all_trials, sequence] = chosen
    best = int((work_s + bubbles * longest_s).max(axis=1).argmin())
    members: list[list[int]] = [[] for _ in pipes]
    for i, pipe in enumerate(pipe_of[best].tolist()):
        members[pipe].append(i)
    return list(zip(pipes, members, strict=True))
