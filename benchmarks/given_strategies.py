"""Batches with published costs on strategies that are given, dispatched and packed by our parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.costs import published
from headrace.planning import Problem
from headrace.planning.batch import PriceTable, SortedBatch
from headrace.planning.formula_source import bounded, formula_table
from headrace.planning.generators import Known
from headrace.planning.improvement import Improvement
from headrace.planning.schedule import Assignment
from headrace.planning.side_by_side import Counts, SideBySide
from headrace.planning.static import static_schedule
from headrace.spec import Lengths

__all__ = ["counted", "dispatched", "table_of"]


_ANY = Problem(costs=published("hydraulis-7b"), devices=64)
"""What generators are told of; pipelines side by side are drafted from the table alone."""


def table_of(problem: Problem, lengths: Sequence[int]) -> PriceTable:
    """One iteration on all schemes that fit the devices."""
    return formula_table(problem, SortedBatch.of(Lengths(tokens=tuple(lengths))))


def counted(table: PriceTable, counts: Counts) -> str:
    """A strategy as the costs write it, larger pipelines first."""
    order = sorted((k for k, n in enumerate(counts) if n), key=lambda k: (-table.width[k], k))
    return " + ".join(f"{counts[k]}*{table.schemes[k]}" for k in order)


def dispatched(table: PriceTable, counts: Counts) -> Assignment | None:
    """The best schedule found on ``counts[k]`` pipelines of every scheme k; None where they do not
    hold the batch."""
    used = [k for k, n in enumerate(counts) if n]
    if not np.isfinite(table.alone[used, 0]).any():
        return None
    devices = sum(counts[k] * table.width[k] for k in used)
    own = PriceTable(table.batch, [table.schemes[k] for k in used], devices)
    low_s = bounded(own).seconds
    static = static_schedule(own, 0) if len(used) == 1 else None
    found = [] if static is None else [static]
    high_s = min((one.seconds for one in found), default=low_s * (1 + len(table.tokens)))
    most = [counts[k] for k in used]
    known = Known(problem=_ANY, bound_s=low_s, best_s=high_s, packed_s=high_s, most=most)
    return Improvement().scheduled(SideBySide().drafts(own, known), found, low_s)[0]
