"""A lower bound of every plan in lockstep: what the longest wave leaves to the others.

Claim. In lockstep all launches of a wave start together, so a wave of D seconds keeps N ranks for
D seconds, and T is the sum over the waves. Scheme k has N_k ranks, holds cap_k tokens, and each
launch pays c_k at least; alone, work and spread are as in :mod:`headrace.planning.batch`. Let D be
the longest wave.

1. No launch takes longer, so i runs on a scheme with alone_k(i) <= D: it is *open* to i.
2. A launch of d <= D seconds with the sequences S has sum_S spread_k <= d, and sum_S work_k <= d -
   c_k, so sum_S work_k D / (D - c_k) <= d. Let time_k(i) be N_k times either, the same for all i:
   the rank-seconds that i takes of its wave, D times its share by 2 of
   :mod:`headrace.planning.bounds`. And room_k(i) = N_k l_i / cap_k are the ranks whose memory i
   takes, sum_S room_k <= N_k.
3. Let the longest wave hold the sequences L, those on scheme k in launches on r_k ranks in all.
   The other waves have N (T - D) rank-seconds for the rest:

       N (T - D) >= sum_{i not in L} min_k time_k(i),    sum_k r_k <= N,
       sum_{i in L on k} time_k(i) <= r_k D,             sum_{i in L on k} room_k(i) <= r_k.

4. For any price p in [0, 1] of a rank-second of the longest wave, and any part a_k in [0, p] of it
   that scheme k pays for time, the rest for memory, the last three sum to

       sum_{i in L} a_k time_k(i) + (p - a_k) D room_k(i) <= p N D,

   so whichever sequences are in L,

       T >= (1 - p) D + 1/N sum_i min_{k open} min { time_k(i),
                                                     a_k time_k(i) + (p - a_k) D room_k(i) }.

D is not known: T is at least the least right side for any D from the longest sequence's quickest
launch on. Of an interval of D the begin counts as seconds, and the end opens schemes and divides
constants; intervals are split where the right side is least. With p = a_k = 1 the claim is that of
all work shared by all ranks. It adds this: on few ranks a long sequence makes its wave so long that
the memory of the other ranks holds too little to fill it, and on many ranks it takes more
rank-seconds. Any prices are right; good ones are sought on samples of the sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from headrace.planning.batch import PriceTable
from headrace.planning.bounds import BoundRows
from headrace.planning.tolerances import NEAR, NEVER, ROUNDING

__all__ = ["SAMPLES", "wave_bound_s"]

Floats = NDArray[np.float64]

_INTERVALS = 12  # intervals of D at first, and new ones of each round of splits
SAMPLES = 128  # runs, or chunks of sequences, that stand for all where estimates are enough
_GRID = np.linspace(0.0, 1.0, 9)  # prices p, and values of a_k / p, that are tried at first
_ROUNDS = 3  # rounds in which intervals are split, each with prices twice as close


def wave_bound_s(table: PriceTable, known_s: float, most_s: float) -> float:
    """A lower bound of the seconds of all plans in waves.

    Args:
        table: The prices; all schemes have one stage.
        known_s: Seconds that no waves beat, too; the result is no less.
        most_s: Seconds of some waves; the result is no more.

    Returns:
        The bound.
    """
    sequences = _Sequences.of(table)
    if not sequences.least_s < most_s:
        return max(known_s, min(sequences.least_s, most_s))
    sample = sequences.sampled()
    ends = np.geomspace(sequences.least_s, most_s, _INTERVALS + 1)
    intervals = _bounded(sequences, sample, ends, _GRID[1:])
    # In each round the intervals with the least bounds are split and their prices sought closer.
    for finer in range(1, _ROUNDS + 1):
        intervals.sort(key=lambda interval: interval.bound_s)
        low_s = intervals[0].bound_s
        if low_s >= most_s:
            break
        split = [interval for interval in intervals if interval.bound_s <= low_s * (1 + NEAR)]
        intervals, step = intervals[len(split) :], _GRID[1] / 2**finer
        for interval in split:
            ends = np.geomspace(
                interval.begin_s, interval.end_s, max(2, _INTERVALS // len(split)) + 1
            )
            price = interval.price
            prices = np.linspace(price - 2 * step, price + 2 * step, 5).clip(0.0, 1.0)
            intervals += _bounded(sequences, sample, ends, prices)
    low_s = min(interval.bound_s for interval in intervals)
    return min(most_s, max(known_s, low_s * (1 - ROUNDING)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Interval:
    """An interval of seconds that the longest wave may take.

    Attributes:
        begin_s: Its begin.
        end_s: Its end.
        bound_s: Seconds that no plan with such a longest wave beats.
        price: The price p at which that is shown.
    """

    begin_s: float
    end_s: float
    bound_s: float
    price: float


def _bounded(
    sequences: _Sequences, sample: _Sequences, ends_s: Floats, prices: Floats
) -> list[_Interval]:
    """Bounds for the intervals of the longest wave's seconds between neighbours of the rising
    ``ends_s``. For each, the price, of ``prices``, and every scheme's part of it are those that
    give the ``sample`` the highest bound; the bound is then worked out for all ``sequences``, and
    holds for any price."""
    best = zip(pairwise(ends_s.tolist()), *_best(sample, ends_s, prices), strict=True)
    return [
        _Interval(
            begin_s=begin_s,
            end_s=end_s,
            price=price,
            bound_s=sequences.bound_s(begin_s, end_s, price, parts),
        )
        for (begin_s, end_s), price, parts in best
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sequences:
    """What the claim needs to know of runs, each the sequences of equal length.

    Attributes:
        devices: Number N of ranks.
        rows: Seconds of a sequence of every run on every scheme, as the bound of
            :mod:`headrace.planning.bounds` takes them, and how many sequences each run has.
        room: Ranks whose memory a sequence takes, room_k of the claim [schemes, runs].
    """

    devices: int
    rows: BoundRows
    room: Floats

    @classmethod
    def of(cls, table: PriceTable) -> _Sequences:
        """The runs of equal sequences of a table."""
        caps = np.array([[float(scheme.most_tokens)] for scheme in table.schemes])
        room = table.ranks * table.batch.run_values / caps
        return cls(devices=table.devices, rows=BoundRows.of(table), room=room)

    @property
    def least_s(self) -> float:
        """The seconds of the slowest sequence if each is launched alone on the scheme on which it
        is quickest: the longest wave takes no less."""
        return float(self.rows.alone.min(axis=0).max())

    def sampled(self) -> _Sequences:
        """About the same sequences in fewer runs: runs are merged to at most ``SAMPLES`` samples
        of about equal work, and the middle run of each stands for all its work."""
        rows = self.rows
        per_sequence = (rows.ranks * rows.spread).min(axis=0)
        work = per_sequence * rows.counts
        # The number of each run's sample, by the share of all work up to it.
        share = np.cumsum(work) / max(float(work.sum()), 1e-300)
        number = np.minimum((share * SAMPLES).astype(np.int64), SAMPLES - 1)
        starts = np.flatnonzero(np.diff(number, prepend=-1))
        middles = (starts + np.append(starts[1:], len(number)) - 1) // 2
        counts = np.add.reduceat(work, starts) / np.maximum(per_sequence[middles], 1e-300)
        sampled = replace(
            rows,
            alone=rows.alone[:, middles],
            work=rows.work[:, middles],
            spread=rows.spread[:, middles],
            counts=counts,
        )
        return _Sequences(devices=self.devices, rows=sampled, room=self.room[:, middles])

    def times(self, end_s: float) -> Floats:
        """Rank-seconds that a sequence takes of a wave of at most ``end_s`` seconds, by part 2 of
        the claim [schemes, runs]."""
        return np.minimum(self.rows.shares(end_s) * end_s, NEVER)

    def bound_s(self, begin_s: float, end_s: float, price: float, parts: Floats) -> float:
        """The right side of part 4 of the claim, in seconds, for a longest wave of ``begin_s`` to
        ``end_s`` seconds, at a ``price`` p and with ``parts`` a_k / p [schemes]."""
        times, part = self.times(end_s), parts[:, None]
        # a_k time + (p - a_k) D room, with a_k = p part.
        paid = price * (part * times + (1 - part) * begin_s * self.room)
        paid[times >= NEVER] = NEVER
        each = np.minimum(times, paid).min(axis=0)
        return (1 - price) * begin_s + float(each @ self.rows.counts) / self.devices


def _best(sample: _Sequences, ends_s: Floats, prices: Floats) -> tuple[list[float], Floats]:
    """For each interval between neighbours of ``ends_s``, the price of ``prices`` that gives the
    highest bound [intervals], and the schemes' parts a_k / p at it [intervals, schemes]. The parts
    are improved scheme by scheme, for all prices at once."""
    # In the claim's words: times are time_k, rooms D room_k, price p, parts a_k / p, and paid what
    # a sequence of the longest wave takes, a_k time_k + (p - a_k) D room_k.
    begins_s, schemes = ends_s[:-1], range(len(sample.room))
    times = np.stack([sample.times(end_s) for end_s in ends_s[1:]])  # [intervals, schemes, runs]
    rooms = np.where(times < NEVER, begins_s[:, None, None] * sample.room, NEVER)
    price = prices[:, None, None]
    parts = np.ones((len(prices), len(begins_s), len(schemes)))
    paid = [price * times[:, k] for k in schemes]  # [prices, intervals, runs] of each scheme
    least = np.broadcast_to(times.min(axis=1), paid[0].shape)
    part = _GRID[:, None, None, None]
    for k in schemes:
        # The part of scheme k that gives the highest bound while the other parts stay.
        others = np.minimum.reduce([least, *(paid_j for j, paid_j in enumerate(paid) if j != k)])
        tried = price * (part * times[:, k] + (1 - part) * rooms[:, k])
        totals = np.minimum(others, tried) @ sample.rows.counts  # [parts, prices, intervals]
        chosen = totals.argmax(axis=0)
        parts[:, :, k] = _GRID[chosen]
        paid[k] = np.take_along_axis(tried, chosen[None, :, :, None], axis=0)[0]
    totals = np.minimum.reduce([least, *paid]) @ sample.rows.counts / sample.devices
    totals += (1 - price[:, :, 0]) * begins_s
    chosen = totals.argmax(axis=0)
    return prices[chosen].tolist(), parts[chosen, np.arange(len(begins_s))]
