"""A lower bound of every plan of one batch: what no schedule, packing or order can beat.

Claim. Let a plan compute for tau seconds if every weight is there at once. Scheme k has N_k
devices and P_k stages; alone, work and spread are as in :mod:`headrace.planning.batch`, c_k is the
least constant of a micro-batch. A pipeline takes sum_j t_j + (P - 1) max_j t_j for micro-batches
of t_j seconds a stage.

1. Longest sequence. Sequence i is in some micro-batch, which takes at least alone_k(i) on every
   stage. So i runs on a scheme that is *open* to it: P_k alone_k(i) <= tau.
2. Devices. Let a rank spend the part beta of its time in pipelines of scheme k, whose sequences S
   keep it busy.
   a. Micro-batches hold no more than their rows' tokens, so sum_j t_j >= sum_S spread, and
      max_j t_j >= alone(i) for each i in S:

          sum_S spread(i) / (tau - (P_k - 1) alone(i)) <= beta.

   b. max_j t_j is no less than the mean, U / V + c_k with U = sum_S work, in V micro-batches. So
      U + c_k V + (P_k - 1) (U / V + c_k) <= beta tau. The left side is least at V = sqrt(U (P_k -
      1) / c_k), hence U <= (sqrt tau - sqrt((P_k - 1) c_k))^2 for a pipeline that has its ranks for
      itself, as those with stages have. With one stage V >= 1 gives U <= beta (tau - c_k).

   Each says: the shares that sequences take of a pipeline sum to at most beta. Either may be taken
   for a scheme. Times N_k and summed over all ranks,

       W(tau) = sum_i min { N_k share_k(i, tau) : k open to i } <= N.

3. Ranks of their own. Two sequences of one pipeline take at least (P + 1) / 2 times the sum of
   their work and a constant, whatever the scheme. Those that no two can end within tau on a rank
   that they share need ranks apart: sum over them of the fewest ranks open to each <= N.

Where pipelines share no device, each holds its own for all of tau, also one that has little to do:

4. A pipeline for the longest. Some scheme k open to it has a pipeline. Let there be y_j of scheme
   j, so y_k >= 1, sum_j N_j y_j <= N, and by 2 the shares of a pipeline's sequences sum to at most
   y_j. For any price p in [0, 1] of the devices that k has anyway

       N >= p N_k y_k + (1 - p) N_k y_k + sum_{j != k} N_j y_j
         >= p N_k + sum_i min { (1 - p) N_k share_k(i), N_j share_j(i) : j != k }.

   The largest right side has the p at which what is cheaper on k just fills one pipeline. The least
   of these over all k open to the longest is <= N.

Everything falls while tau rises, so the least tau that satisfies all of them is a bound; it is
found by narrowing an interval from below.

Where costs know the stages, which may differ, rows of whole models stand for them, for each split
of the layers that the planner tries (:attr:`headrace.planning.priced.StageCosts.variants`). A
micro-batch keeps the width's ranks busy for what it takes, in sum over the stages, and passes all
of them one after the other. No stage is busy for longer than tau, so P times what one stage takes
may stand for the sum: the last one, which has the model's end, or the fullest other one. Schemes
that no search looks at, as they hardly ever pay, count too: by what is least of all that have their
width and depth, for the next shorter of some lengths.

Memory takes part. The first stage keeps a share r_j n_j of its room for activations (and a constant
share, which counts likewise) for micro-batch j of n_j tokens from the start of its forward to the
end of its backward there, so for no less than the T_j seconds that j takes on all stages, one after
the other. At no moment is more kept than there is room:
sum_j r_j n_j T_j <= tau. With B_j for what counts as busy, sum_j B_j <= P tau, and any weight w in
[0, 1],

    sum_j (1 - w) B_j + w P r_j n_j T_j <= P tau.

The rows of j give B_j = A sum l^2 + B n_j + C and T_j = a sum l^2 + b n_j + c, so a token of a
sequence of l tokens bears

    (1 - w) (A l + B + C / n_j) + w P r_j n_j (a l + b + c / n_j),   n_j >= l,

of it. The least over n_j, where the terms in n_j and in 1 / n_j are equal or at n_j = l or at the
most tokens that fit, and over all rows is what the sequence takes whatever is packed with it.

Pulls and pushes overlap with computations, so of the whole step

5. No layer runs before its own and the embedding's weights are there, so before x = the pulls of
   the first two buckets nothing runs. A pipeline's last computation is a backward of its first
   layer, and only then are the gradients of that layer and the embedding complete, whose pushes
   are the last two: y seconds. Waits in between make no rank quicker. Without the update, a step
   takes at least x + tau + y.
6. The loss needs the last pull, and the first push a gradient of the loss. Pulls move one after
   the other, and so do pushes: without the update, a step takes at least pull + push.

All ranks meet at the update, which adds: max(x + tau + y, pull + push) + update is a bound. Plans
of one group of all devices that shards weights move a share s of pull and push only: with their own
tau', max(s x + tau' + s y, s (pull + push)) + update is a bound of them, and the smaller of both is
one of all plans. In lockstep every micro-batch waits for others and starts no earlier than it
could: the bound holds, and :mod:`headrace.planning.wave_bounds` has a closer one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, sqrt

import numpy as np
from numpy.typing import NDArray

from headrace.costs import CostModel
from headrace.planning.batch import PriceTable, SortedBatch
from headrace.planning.priced import Least
from headrace.planning.tolerances import CLOSE, GAIN, ROUNDING
from headrace.simulator import exposed_s

__all__ = ["Bound", "BoundRows", "allows", "lower_bound", "step_bound_s"]

Floats = NDArray[np.float64]

# The fields of BoundRows that have one row for each scheme.
_COLUMNS = ("ranks", "stages", "least_c", "shared", "alone", "work", "spread")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Seconds of computing that no plan beats, without the costs' scale.

    Attributes:
        seconds: The bound.
        longest_s: Least seconds of the sequence that takes the longest, alone on the scheme on
            which it is quickest.
        by_wave: Whether the reason is what the longest wave leaves to the others
            (:mod:`headrace.planning.wave_bounds`).
        exact: Whether it is the time of the best plan, which a dynamic program has found
            (:mod:`headrace.planning.exact_waves`).
        sharded_s: The bound of plans of one group of all devices that shards weights, which move
            less of them; infinite where there are none or they move as much.
    """

    seconds: float
    longest_s: float
    by_wave: bool = False
    exact: bool = False
    sharded_s: float = inf

    @property
    def by_longest(self) -> bool:
        """Whether the longest sequence alone is the bound."""
        return self.seconds <= self.longest_s


@dataclass(frozen=True, kw_only=True, eq=False)
class BoundRows:
    """What the claim needs to know of schemes and runs.

    Attributes:
        ranks: Ranks of a pipeline of each scheme [schemes, 1].
        stages: Stages of a pipeline of each scheme [schemes, 1].
        least_c: Least seconds of a micro-batch's constant [schemes, 1].
        shared: Least seconds of a pipeline of two sequences for each second of their work, by part
            3 of the claim [schemes, 1].
        alone: Least seconds of a micro-batch of its own, as in :mod:`headrace.planning.batch`
            [schemes, runs].
        work: Least seconds without any constant [schemes, runs].
        spread: Least seconds with a share of the constant [schemes, runs].
        counts: Sequences of each run [runs].
    """

    ranks: Floats
    stages: Floats
    least_c: Floats
    shared: Floats
    alone: Floats
    work: Floats
    spread: Floats
    counts: Floats

    @classmethod
    def of(cls, table: PriceTable) -> BoundRows:
        """The rows of all schemes of a table, in its order."""
        return cls(
            ranks=table.ranks,
            stages=table.stages,
            least_c=table.least_c,
            shared=(table.stages + 1) / 2,
            alone=table.alone,
            work=table.work,
            spread=table.spread,
            counts=table.batch.counts.astype(np.float64),
        )

    @classmethod
    def of_models(cls, batch: SortedBatch, models: Sequence[Least]) -> BoundRows:
        """One row for each of ``models``, pipelines whose stages may differ, as the module's
        docstring explains after part 4: a micro-batch keeps the ranks of one stage busy for its
        seconds on all stages together, so each counts as a pipeline of one stage."""
        counts = batch.counts.astype(np.float64)
        rows = [
            (*batch.row(model.alone)[:2], model.spread(batch.run_values, counts))
            for model in models
        ]
        return cls._staged(batch, models, np.stack(rows, axis=1))

    @classmethod
    def of_shapes(cls, batch: SortedBatch, models: Sequence[Least]) -> BoundRows:
        """One row for each width and depth of ``models``, by what is least of all that have them: a
        bound that is a little looser than :meth:`of_models` and takes less time."""
        counts = batch.counts.astype(np.float64)
        shapes = dict[tuple[int, int], Least]()
        least = dict[tuple[int, int], Floats]()
        for model in models:
            shape, row = (model.width, model.depth), model.roughly(batch.run_values, counts)
            shapes[shape], least[shape] = model, np.minimum(row, least.get(shape, row))
        return cls._staged(batch, list(shapes.values()), np.stack(list(least.values()), axis=1))

    @classmethod
    def _staged(cls, batch: SortedBatch, models: Sequence[Least], prices: Floats) -> BoundRows:
        """Rows of pipelines with stages, one for each of ``models``, given their ``prices``: alone,
        work and spread [3, models, runs]."""
        alone, work, spread = prices
        ones = np.ones((len(models), 1))
        return cls(
            ranks=np.array([[float(model.width)] for model in models]),
            stages=ones,
            least_c=0 * ones,
            shared=np.array([[1 / model.depth] for model in models]),
            alone=alone,
            work=work,
            spread=spread,
            counts=batch.counts.astype(np.float64),
        )

    @classmethod
    def joined(cls, parts: Sequence[BoundRows]) -> BoundRows:
        """The schemes of all parts, which are of the same batch, one part after the other."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS},
            counts=parts[0].counts,
        )

    def only(self, schemes: Sequence[int]) -> BoundRows:
        """The rows of the given schemes only, by their numbers."""
        return BoundRows(
            **{name: getattr(self, name)[list(schemes)] for name in _COLUMNS}, counts=self.counts
        )

    @cached_property
    def elapsed(self) -> Floats:
        """Least seconds of a sequence of each run through all stages of a pipeline
        [schemes, runs]."""
        return self.stages * self.alone

    @cached_property
    def _sums_from(self) -> tuple[Floats, Floats]:
        """Two arrays [schemes, runs + 1], of ``spread`` and of ``work``: column r has the seconds
        of all sequences of run r and of all shorter runs together; the last column is 0."""
        spread, work = np.zeros((2, len(self.ranks), len(self.counts) + 1))
        for sums, per_sequence in ((spread, self.spread), (work, self.work)):
            np.cumsum((per_sequence * self.counts)[:, ::-1], axis=1, out=sums[:, -2::-1])
        return spread, work

    def shares(self, tau: float) -> Floats:
        """Devices that a sequence of each run takes of each scheme within ``tau`` seconds
        [schemes, runs], infinite where the scheme is not open to it: by part 2a of the claim or by
        2b, whichever sums to more."""
        bubbles, closed = self.stages - 1, self.elapsed > tau
        # Seconds of all sequences to which each scheme is open [schemes, 1]. A scheme is closed to
        # the longest ones, so the number of closed runs is the first run that is open.
        first_open = closed.sum(axis=1, keepdims=True)
        spread, work = (np.take_along_axis(sums, first_open, axis=1) for sums in self._sums_from)
        with np.errstate(divide="ignore", invalid="ignore"):
            # Part 2b: the most work within ``tau``, with stages and without.
            root = np.maximum(sqrt(tau) - np.sqrt(bubbles * self.least_c), 0.0)
            usable = np.where(bubbles > 0, root**2, np.maximum(tau - self.least_c, 0.0))
            # Devices for each second of ``spread`` by 2a, and of ``work`` by 2b.
            per_spread_s, per_work_s = self.ranks / tau, self.ranks / usable
            by_spread = (bubbles == 0) & (spread * per_spread_s >= work * per_work_s)
            shares = np.where(by_spread, self.spread, self.work) * np.where(
                by_spread, per_spread_s, per_work_s
            )
            staged = np.flatnonzero(bubbles)
            if len(staged):  # part 2a with stages: each sequence's own ``alone`` is taken off
                spare = tau - bubbles[staged] * self.alone[staged]
                staged_shares = self.ranks[staged] * self.spread[staged] / spare
                staged_shares[closed[staged]] = 0.0
                tighter = staged_shares @ self.counts >= (work * per_work_s)[staged, 0]
                shares[staged[tighter]] = staged_shares[tighter]
        shares[closed] = np.inf
        return shares

    def held(self, shares: Floats) -> float:
        """Least devices by part 4 of the claim: some pipeline has the longest sequence, and
        pipelines share no device. ``shares`` are those of :meth:`shares` [schemes, runs]."""
        opened = np.flatnonzero(np.isfinite(shares[:, 0])).tolist()
        return min((self._with_one(shares, k) for k in opened), default=float("inf"))

    def _with_one(self, shares: Floats, k: int) -> float:
        """Least devices by part 4 of the claim if the longest sequence is in a pipeline of scheme
        k, at the price p that makes this largest. ``shares`` are those of :meth:`shares` [schemes,
        runs]."""
        own_shares, ranks = shares[k], float(self.ranks[k, 0])
        others = np.delete(shares, k, axis=0).min(axis=0, initial=np.inf)
        fits_k = np.isfinite(own_shares)
        # The share that a sequence takes of the cheapest other scheme over that of k.
        ratio = np.where(fits_k, np.inf, 0.0)
        np.divide(others, own_shares, out=ratio, where=fits_k & (own_shares > 0))
        # What gains most from k fills its one pipeline; the last run that fits sets the price.
        order = np.argsort(-ratio, kind="stable")
        filled_ranks = np.cumsum(np.where(fits_k, own_shares * self.counts, 0.0)[order])
        last_run = int(np.searchsorted(filled_ranks, ranks))
        price = 1.0 if last_run == len(order) else max(0.0, 1 - float(ratio[order[last_run]]))
        own_priced = np.full_like(own_shares, np.inf)
        np.multiply(own_shares, 1 - price, out=own_priced, where=fits_k)
        return price * ranks + float(np.minimum(others, own_priced) @ self.counts)


def lower_bound(
    rows: BoundRows,
    devices: int,
    *,
    close: float = GAIN,
    apart: bool = False,
    known_s: float = 0.0,
) -> Bound:
    """The bound of a batch in seconds, without the costs' scale: the least time that satisfies the
    claim.

    Args:
        rows: The schemes; some holds each sequence.
        devices: All devices.
        close: How far, relatively, it may be below the tightest that the claim proves.
        apart: Whether pipelines share no device.
        known_s: A bound that is known; the result is no looser.

    Returns:
        The bound.
    """
    crowding, longest_s = _Crowding(rows, devices, apart), _longest_s(rows)
    work = float((rows.ranks * rows.spread).min(axis=0) @ rows.counts)
    low_s = max(longest_s, known_s, work / devices)  # the latter by 2a
    start_s = low_s * (1 + 2 * close) if low_s > longest_s else low_s
    if (needed := crowding(start_s)) > 1:
        low_s = _least_tau(crowding, start_s, needed, close)
    seconds = max(known_s, low_s * (1 - ROUNDING))
    return Bound(seconds=seconds, longest_s=longest_s * (1 - ROUNDING))


def allows(rows: BoundRows, devices: int, tau: float) -> bool:
    """Whether the lower bound of a batch on ``devices`` is at most ``tau`` seconds, which is
    answered without working out the bound."""
    return _longest_s(rows) <= tau and _Crowding(rows, devices)(tau) <= 1


def _longest_s(rows: BoundRows) -> float:
    """The seconds of the slowest sequence if each runs alone, through all stages of the scheme on
    which it is quickest (part 1 of the claim)."""
    return float(rows.elapsed.min(axis=0).max())


class _Crowding:
    """A function of the time tau in seconds: the least devices that sequences need within tau, over
    the devices there are. Above 1 no plan ends within tau. The needs are the largest of parts 2, 3
    and, for pipelines that share no device (``apart``), 4 of the claim."""

    def __init__(self, rows: BoundRows, devices: int, apart: bool = False) -> None:
        self.rows, self.devices, self.apart = rows, devices, apart
        # Least seconds of two sequences of a run in one pipeline [runs].
        self.pair_s = 2 * (rows.shared * rows.work).min(axis=0) + float(rows.least_c.min())

    def __call__(self, tau: float) -> float:
        rows, shares = self.rows, self.rows.shares(tau)
        needed = float(shares.min(axis=0) @ rows.counts)
        if self.apart:
            needed = max(needed, rows.held(shares))
        unpaired = self.pair_s > tau  # part 3: no two of these can share ranks
        if unpaired.any():
            fewest_ranks = np.where(rows.elapsed[:, unpaired] <= tau, rows.ranks, np.inf).min(
                axis=0
            )
            needed = max(needed, float(fewest_ranks @ rows.counts[unpaired]))
        return needed / self.devices


def _least_tau(
    crowding: Callable[[float], float], low_s: float, low_need: float, close: float
) -> float:
    """A time in seconds, at most the share ``close`` below the least one in which ``crowding`` is
    at most 1. It is ``low_need``, above 1, at ``low_s`` seconds. Needs are about inverse to the
    time less a constant, so the next guess is where a hyperbola through both ends of the interval
    crosses 1. Where that has not halved the interval, one end is near: then the guess is where the
    need would be 1 if it were inverse to the time, and after that the middle."""
    high_s = low_s * min(low_need, 4.0) * (1 + CLOSE)
    high_need = crowding(high_s)
    while high_need > 1:
        low_s, low_need = high_s, high_need
        high_s *= max(1.01, min(high_need * (1 + CLOSE), 4.0))
        high_need = crowding(high_s)
    stuck = 0  # guesses in a row that have not halved the interval
    while (width_s := high_s - low_s) > close * low_s:
        # Where in the interval to guess, as a share of its width: by default in the middle.
        margin, step = close * low_s / (2 * width_s), 0.5
        if stuck == 0 and 0 < high_need < low_need:
            # 1 / need is linear in time there; a little off, so that both ends close in
            step = (1 - 1 / low_need) / (1 / high_need - 1 / low_need)
            step += margin if step < 0.5 else -margin
        elif stuck == 1:
            near_s = high_s * high_need if low_need + high_need > 2 else low_s * low_need
            step = (near_s - low_s) / width_s
        guess_s = low_s + width_s * min(max(step, margin), 1 - margin)
        need = crowding(guess_s)
        if need > 1:
            low_s, low_need = guess_s, need
        else:
            high_s, high_need = guess_s, need
        stuck = (stuck + 1) % 3 if high_s - low_s > width_s / 2 else 0
    return low_s


def step_bound_s(costs: CostModel, bound: Bound) -> float:
    """The lower bound of a whole step in scaled seconds, with the moving of weights and gradients,
    given the ``bound`` of its computations (parts 5 and 6 of the claim)."""
    exchange = costs.exchange_s
    exposed, moved_s = exposed_s(costs), exchange.pull_s + exchange.push_s

    def with_share(compute_s: float, share: float) -> float:
        """The bound without update if computing takes ``compute_s`` and this share is moved."""
        return max(compute_s + share * exposed * (1 - ROUNDING), share * moved_s * (1 - ROUNDING))

    least_s = with_share(bound.seconds, 1.0)
    if bound.sharded_s < inf:
        least_s = min(least_s, with_share(bound.sharded_s, exchange.sharded_share))
    return (least_s + exchange.update_s) * costs.scale
