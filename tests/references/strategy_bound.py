"""A lower bound of the plans of one given strategy: how far a dispatch can be from the best.

1. Each sequence runs somewhere: the longest on its quickest pipe, P_k (T_k(l) + c_k).
2. Pigeons. Of the j n + 1 longest sequences that only the n pipelines of the roomiest pipe hold,
   some pipeline has j + 1, together no less than the j + 1 shortest of them.
3. Shares. With share_k(l, tau) as in :mod:`headrace.planning.bounds`, a plan of tau
   seconds has x_ik in {0, 1} with sum_k x_ik = 1 and sum_i x_ik share_k(l_i, tau) <= n_k. If no
   fractional x does, tau is too short: a linear program in each step of a bisection. (It is the
   strategy's own relaxation: here pipelines are given, so devices cannot be traded.)
"""

from __future__ import annotations

from itertools import accumulate

import highspy
import numpy as np

from headrace.planning.batch import PriceTable
from headrace.planning.bounds import BoundRows
from headrace.planning.side_by_side import Counts

__all__ = ["strategy_bound_s"]

_STEPS = 30
_CLOSE = 1e-4


def strategy_bound_s(table: PriceTable, counts: Counts) -> float:
    """Seconds that no plan of a strategy, which holds the batch, gets below."""
    used = [k for k, n in enumerate(counts) if n]
    rows = BoundRows.of(table)
    longest_s = float((table.stages * table.alone)[used, 0].min())
    low_s = max(longest_s, _pigeons_s(table, counts, used))
    high_s = low_s
    while not _fits(rows, counts, used, high_s):
        low_s, high_s = high_s, high_s * 1.3
    for _ in range(_STEPS if high_s > low_s else 0):
        if high_s - low_s <= _CLOSE * low_s:
            break
        middle_s = (low_s + high_s) / 2
        if _fits(rows, counts, used, middle_s):
            high_s = middle_s
        else:
            low_s = middle_s
    return low_s * (1 - 1e-9)


def _pigeons_s(table: PriceTable, counts: Counts, used: list[int]) -> float:
    """The bound by 2, for one stage."""
    used = sorted(used, key=lambda k: -table.cap[k])
    first = used[0]
    held = len(table.tokens)
    if len(used) > 1:
        held = int(table.batch.each(np.isinf(table.alone[used[1]])).sum())
    seconds, n = list(accumulate(table.seconds(first), initial=0.0)), counts[first]
    best = 0.0
    if table.depth[first] > 1:
        return best
    for j in range(1, (held - 1) // n + 1):
        end = j * n + 1
        best = max(best, seconds[end] - seconds[end - j - 1] + table.c[first])
    return best


def _fits(rows: BoundRows, counts: Counts, used: list[int], tau: float) -> bool:
    """Whether fractions of sequences on the strategy's pipes fit into ``tau``."""
    shares = rows.shares(tau)[used] / rows.ranks[used] * rows.counts  # of whole runs
    if not np.isfinite(shares).any(axis=0).all():
        return False
    if len(used) == 1:
        return bool(shares.sum() <= counts[used[0]])
    kinds, places = np.nonzero(np.isfinite(shares))
    model = highspy.Highs()
    model.silent()
    columns, sequences = len(kinds), shares.shape[1]
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = columns + 1, sequences + len(used)
    # Minimise the overload z of all pipes: sum_i x_ik share_ik - z n_k <= 0, sum_k x_ik = 1.
    lp.col_cost_ = np.append(np.zeros(columns), 1.0)
    lp.col_lower_ = np.zeros(columns + 1)
    lp.col_upper_ = np.append(np.ones(columns), highspy.kHighsInf)
    lp.row_lower_ = np.append(np.ones(sequences), np.full(len(used), -highspy.kHighsInf))
    lp.row_upper_ = np.append(np.ones(sequences), np.zeros(len(used)))
    starts = np.append(np.arange(columns) * 2, 2 * columns)
    index = np.stack([places, sequences + kinds], axis=1).ravel()
    value = np.stack([np.ones(columns), shares[kinds, places]], axis=1).ravel()
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.append(starts, 2 * columns + len(used)).astype(np.int32)
    lp.a_matrix_.index_ = np.append(index, sequences + np.arange(len(used))).astype(np.int32)
    lp.a_matrix_.value_ = np.append(value, [-float(counts[k]) for k in used])
    model.passModel(lp)
    model.run()
    return bool(model.getInfo().objective_function_value <= 1 + 1e-9)
