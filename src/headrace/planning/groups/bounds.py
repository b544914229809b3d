"""What no plan of a batch on groups can beat, under either semantics.

Claim. Let a plan take tau seconds. For a sequence of l tokens and a group size p let

    alone = (a l^2 + b l + kappa_p l) / p + c      seconds of a launch of its own
    area  = p (alone - c) + c l / cap              device-seconds with its share of the constants
    bare  = p (alone - c)                          device-seconds without

1. The launch that holds the sequence, on p ranks, takes at least alone, so alone <= tau.
2. A launch on p ranks keeps p ranks busy and holds at most p cap tokens: the p c device-seconds of
   its constant are at least c / cap for every token. So the ranks together are busy at least

       A(tau) = sum_i min { area[p, i] : alone[p, i] <= tau },

   and no rank longer than tau: A(tau) <= N tau.
3. Each of the k <= N ranks that work takes part in a launch and pays c or more on top of its part
   of B(tau), the same sum over bare. The busiest of them takes B(tau) / k + c or more, so
   B(tau) / N + c <= tau.
4. Sequences that no two can end within tau on the same rank need ranks of their own. For a
   sequence let need = the least p with alone <= tau. Let h(tau) hold the sequences i with
   2 (shortest[i] - c) + c > tau, shortest[i] being the least seconds of i on *any* size: two of h
   that share a rank, in one launch or in two, take at least (shortest[i] - c) + (shortest[j] - c)
   + c > tau. So each of h has need ranks to itself: sum over h of need <= N.

Hence f(tau) = max(A / N, B / N + c) <= tau, the quickest launch of each sequence <= tau, and the
ranks of 4 <= N. The left sides of 1 and 2, 3 fall while tau rises, as more sizes are allowed; h and
need shrink too. So the least tau that satisfies all of them is a bound. In lockstep every launch
waits for others and starts no earlier than in the free plan of the same order, which takes no
longer; so the bound holds there too. It is never below max(sum_i (a l_i^2 + b l_i) / N + c, the
quickest launch of the longest).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.planning.groups.work import Work

__all__ = ["Bound", "lower_bound"]

# The bound is a sum in another order than the prediction: this much relative error is rounding.
_ROUNDING = 1e-12
_HALVINGS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Seconds that no plan can beat, and what makes them: ``longest_s`` is the quickest launch of
    the longest sequence, ``work_s`` the share of a rank in all work and constants."""

    seconds: float
    longest_s: float
    work_s: float


def lower_bound(work: Work) -> Bound:
    """The bound of a batch."""
    ranks = np.array(work.sizes, dtype=np.float64)[:, None]
    alone, bare = work.seconds + work.c_s, ranks * work.seconds
    shortest_s = work.seconds.min(axis=0)
    longest_s = float(shortest_s.max()) + work.c_s

    def share_s(tau: float) -> float:
        closed = alone > tau
        area = np.where(closed, np.inf, work.area).min(axis=0).sum() / work.devices
        return float(max(area, np.where(closed, np.inf, bare).min(axis=0).sum() / work.devices
                         + work.c_s))  # fmt: skip

    def possible(tau: float) -> bool:
        if share_s(tau) > tau:
            return False
        apart = 2 * shortest_s + work.c_s > tau
        need = np.where(alone[:, apart] <= tau, ranks, np.inf).min(axis=0).sum()
        return bool(need <= work.devices)

    low, high = longest_s, max(longest_s, share_s(longest_s))
    while not possible(high):
        low, high = high, 2 * high
    if possible(low):
        high = low
    else:
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if possible(middle) else (middle, high)
            if high - low <= _ROUNDING * high:
                break
        high = low
    return Bound(seconds=high * (1 - _ROUNDING), longest_s=longest_s, work_s=share_s(high))
