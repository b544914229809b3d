"""A lower bound of every plan's step: what no dispatch, packing or order can beat, with layer plans
of the frontiers.

Claim. Let a plan of the free semantics be done with all forwards and backwards within tau seconds
if every weight is there at once. For every sequence i and group size p let ``alone``, ``work`` and
``spread`` be as in :mod:`headrace.planning.sizing`.

1. Some size takes each sequence within the time: min_p alone[p, i] <= tau, since the micro-batch
   that holds i costs at least what i alone would cost with the same layers, which hold i.
2. So i runs on a size p with alone[p, i] <= tau. Ranks are busy p seconds for each second of a
   micro-batch on p of them. Summed over the sequences, and with the constants of a micro-batch
   dealt out to its tokens (at most cap of them), busy time is at least

       W1(tau) = sum_i min { p spread[p, i] : alone[p, i] <= tau },

   and no rank is busy longer than tau, so W1(tau) <= N tau.
3. Without the constants busy time is at least W0(tau), the same sum over ``work``. Each of the
   k <= N ranks that work takes part in some micro-batch and pays its constant, at least c. The
   busiest of them has W0(tau) / k + c or more, so W0(tau) / N + c <= tau.

Hence f(tau) = max(W1(tau) / N, W0(tau) / N + c) <= tau. f falls while tau rises, as more sizes
are allowed, so every plan takes at least the least tau with f(tau) <= tau that also satisfies 1;
that tau is the bound of the computations.

Pulls and pushes overlap with computations, so of the whole step

4. No layer runs before its own and the embedding's weights are there, so before x = the pulls of
   the first two buckets nothing runs. A pipeline's last computation is a backward of its first
   layer, and only then are the gradients of that layer and the embedding complete, whose pushes
   are the last two: y seconds. Waits in between make no rank quicker. Without the update, a step
   takes at least x + tau + y.
5. The loss needs the last pull, and the first push a gradient of the loss. Pulls move one after
   the other, and so do pushes: without the update, a step takes at least pull + push.

All ranks meet at the update, which adds. So max(x + tau + y, pull + push) + update is a bound. It
holds for pipelines with stages too, with a tau of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.costs import CostModel
from headrace.planning.sizing import SizeTable
from headrace.simulator import exposed_s

__all__ = ["Bound", "lower_bound", "step_bound_s"]

# The bound is a sum in another order than the prediction: this much relative error is rounding.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Seconds of computation that no plan can beat, and why: ``longest_s`` is the longest
    sequence's quickest run, ``work_s`` all sequences' share of the ranks."""

    seconds: float
    longest_s: float
    work_s: float


def lower_bound(table: SizeTable, devices: int) -> Bound:
    """The bound of a batch from its table, in seconds without the costs' scale. ``table`` must
    have a finite entry for every sequence."""
    longest_s = float(table.alone.min(axis=0).max())
    ranks = np.array(table.sizes, dtype=np.float64)[:, None]
    work, spread = ranks * table.work, ranks * table.spread
    opening = float(table.opening.min())

    def share_s(limit_s: float) -> float:
        """f(limit_s)."""
        closed = table.alone > limit_s
        busy = np.where(closed, np.inf, spread).min(axis=0).sum()
        bare = np.where(closed, np.inf, work).min(axis=0).sum()
        return float(max(busy / devices, bare / devices + opening))

    steps = np.unique(table.alone[(table.alone > longest_s) & np.isfinite(table.alone)])
    limits = [longest_s, *steps.tolist()]
    # The first limit (f changes at limits only) at which f is not above it.
    low, high = 0, len(limits)
    while low < high:
        middle = (low + high) // 2
        if share_s(limits[middle]) <= limits[middle]:
            high = middle
        else:
            low = middle + 1
    if low == 0:
        seconds = longest_s
    else:
        seconds = share_s(limits[low - 1])
        seconds = min(seconds, limits[low]) if low < len(limits) else seconds
    return Bound(seconds=seconds * (1 - _ROUNDING), longest_s=longest_s, work_s=share_s(seconds))


def step_bound_s(costs: CostModel, compute_s: float) -> float:
    """The bound of a whole step, scaled, from that of its computations, which is not."""
    exchange = costs.exchange_s
    moved_s = (exchange.pull_s + exchange.push_s) * (1 - _ROUNDING)
    seconds = max(compute_s + exposed_s(costs) * (1 - _ROUNDING), moved_s) + exchange.update_s
    return seconds * costs.scale
