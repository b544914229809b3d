"""A lower bound of every plan of one batch: what no strategy, dispatch or packing can beat.

Claim. Let a plan take tau seconds. Pipe k has N_k devices, P_k stages, room M_k and constant c_k;
T_k(l) are the seconds of a sequence of l tokens on one of its stages.

1. Longest sequence. It is in some micro-batch, which takes at least T_k(l) + c_k on every stage
   of its pipeline, and the pipeline at least P_k (T_k(l) + c_k). So tau is no less than the least
   of these over the pipes that hold l; and any sequence i runs on a pipe that is open to it: one
   that holds it with P_k (T_k(l_i) + c_k) <= tau.
2. Devices. Let a pipeline of pipe k hold the sequences S, in V micro-batches of t_j seconds.
   a. V M_k >= sum_S l, and max_j t_j >= T_k(l_i) + c_k for every i in S. So from
      sum_j t_j + (P_k - 1) max_j t_j <= tau follows, for the longest i in S and then for all,

          sum_S (T_k(l) + c_k l / M_k) <= tau - (P_k - 1) (T_k(l_i) + c_k).

   b. max_j t_j is no less than the mean, U / V + c_k with U = sum_S T_k. So
      U + c_k V + (P_k - 1) (U / V + c_k) <= tau. The left side is least at V = sqrt(U (P_k - 1) /
      c_k), where it is (sqrt U + sqrt((P_k - 1) c_k))^2, hence
      U <= (sqrt tau - sqrt((P_k - 1) c_k))^2. With one stage V >= 1 gives U <= tau - c_k.

   Each says: the shares that sequences take of a pipeline, T_k(l) + ... over the right side, sum
   to at most one. Either may be taken for a pipe. Times N_k and summed over pipelines,

       W(tau) = sum_i min { N_k share_k(l_i, tau) : k open to i } <= sum of pipelines' N_k <= N,

   whatever strategy: each length simply takes the pipe on which it needs the fewest devices.

W falls while tau rises. So the least tau with 1 and W(tau) <= N, found by bisection from below, is
a bound. The shares at that tau, summed by pipe, say how many pipelines of each the relaxed optimum
has: where the search for strategies starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.planning.pipelines.batch import Batch
from headrace.planning.pipelines.world import Counts

__all__ = ["Relaxation", "Relaxed"]

Floats = NDArray[np.float64]

_STEPS = 40
_CLOSE = 1e-4
# The bound is a sum in another order than the prediction: this much relative error is rounding.
_ROUNDING = 1e-10


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """``seconds`` that no plan beats; ``longest_s``, the longest sequence's quickest run;
    ``pipelines``, the relaxed optimum's pipelines of each pipe, which are no whole numbers."""

    seconds: float
    longest_s: float
    pipelines: tuple[float, ...]

    @property
    def by_longest(self) -> bool:
        """Whether the longest sequence alone is the bound."""
        return self.seconds >= self.longest_s * (1 - 1e-9) and self.seconds <= self.longest_s


class Relaxation:
    """The relaxed problem of a batch, each of whose sequences some pipe holds."""

    def __init__(self, batch: Batch) -> None:
        pipes, values = batch.world.pipes, batch.values
        self.devices, self.first = batch.world.devices, batch.first
        self.each = _column([pipe.devices for pipe in pipes])
        self.c = _column([pipe.c for pipe in pipes])
        self.bubbles = _column([pipe.stages - 1 for pipe in pipes])
        caps = _column([pipe.cap for pipe in pipes])
        self.work = np.stack([batch.array(k) for k in range(len(pipes))])
        self.dealt = self.work + self.c / caps * values
        self.alone = (self.bubbles + 1) * (self.work + self.c)
        self.alone[values > caps] = np.inf
        # Sequences are sorted, so the longest binds 1.
        self.longest_s = float(self.alone[:, 0].min())

    def shares(self, tau: float) -> Floats:
        """Devices that each sequence takes of each pipe [pipes, sequences], infinite where it is
        not open: by 2a or by 2b, whichever sums to more."""
        with np.errstate(divide="ignore", invalid="ignore"):
            rest = tau - self.bubbles * (self.work + self.c)
            dealt = self.dealt / rest
            root = np.sqrt(tau) - np.sqrt(self.bubbles * self.c)
            usable = np.where(self.bubbles > 0, np.maximum(root, 0.0) ** 2, tau - self.c)
            even = self.work / np.maximum(usable, 0.0)
            closed = self.alone > tau
            dealt[closed] = even[closed] = 0.0
            larger = dealt.sum(axis=1) >= even.sum(axis=1)
            shares = self.each * np.where(larger[:, None], dealt, even)
        shares[closed] = np.inf
        return shares

    def bound(self) -> Relaxed:
        """The least time at which the relaxed problem fits the devices."""
        low_s = high_s = self.longest_s
        shares = self.shares(high_s)
        while self._devices(shares) > self.devices:
            low_s, high_s = high_s, high_s * max(1.05, self._devices(shares) / self.devices)
            shares = self.shares(high_s)
        for _ in range(_STEPS):
            if high_s - low_s <= _CLOSE * low_s:
                break
            middle_s = (low_s + high_s) / 2
            tried = self.shares(middle_s)
            if self._devices(tried) > self.devices:
                low_s = middle_s
            else:
                high_s, shares = middle_s, tried
        return Relaxed(
            seconds=low_s * (1 - _ROUNDING),
            longest_s=self.longest_s,
            pipelines=self.pipelines(shares),
        )

    def closed(self, counts: Counts, shares: Floats) -> bool:
        """Whether no plan of a strategy, given the shares at a time, gets down to that time: what
        only its roomiest pipes hold would take more devices than they have, or everything more
        than all have."""
        used = [k for k, n in enumerate(counts) if n]
        least, devices = np.full(shares.shape[1], np.inf), 0.0
        for k, after in zip(used, [*used[1:], None], strict=True):
            least = np.minimum(least, shares[k])
            devices += counts[k] * float(self.each[k, 0])
            end = len(least) if after is None else self.first[after]
            if float(least[:end].sum()) > devices * (1 + _ROUNDING):
                return True
        return False

    def start(self, seconds: float, kinds: Sequence[int]) -> tuple[float, ...]:
        """The relaxed optimum of a time with only the pipes ``kinds``, one of which holds every
        sequence: pipelines of each pipe. They may need more devices than there are."""
        rows = sorted(kinds)
        seconds = max(seconds, float(self.alone[rows, 0].min()) * (1 + _ROUNDING))
        shares = self.shares(seconds)
        shares[[k for k in range(len(shares)) if k not in rows]] = np.inf
        return self.pipelines(shares)

    def pipelines(self, shares: Floats) -> tuple[float, ...]:
        """How many of each pipe the least shares make."""
        chosen, least = shares.argmin(axis=0), shares.min(axis=0)
        held = np.bincount(chosen, weights=least, minlength=len(self.each))
        return tuple((held / self.each[:, 0]).tolist())

    @staticmethod
    def _devices(shares: Floats) -> float:
        return float(shares.min(axis=0).sum())


def _column(numbers: Sequence[float]) -> Floats:
    return np.array(numbers, dtype=np.float64)[:, None]
