"""A priced scheme: what every source of costs gives a planner.

A scheme, how its weights are held, and a frontier: rows of seconds ``a sum(l^2) + b sum(l) + c`` of
a micro-batch on one stage, each with the tokens that it holds and, where the source knows one, its
layer plan. A published scheme has one row; a measured one has a row for every layer plan worth
keeping. The constant c is what a micro-batch costs whatever it has.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import groupby, pairwise, product
from math import ceil, exp, floor, inf, log, sqrt
from typing import overload

import numpy as np
from numpy.typing import NDArray

from headrace.costs import CostModel, Linear
from headrace.costs.cost_model import (
    MOST_TOKENS,
    held_bytes,
    message_s,
    stage_gather,
)
from headrace.planning.tolerances import CLOSE
from headrace.spec import LayerOption, LayerPlan, Pipeline, Scheme
from headrace.spec.plan import TokenOrder, Working
from headrace.spec.strategy import Stage, share_layers

__all__ = [
    "Columns",
    "Frontier",
    "LayerTable",
    "Least",
    "Line",
    "PricedScheme",
    "Row",
    "Share",
    "StageCosts",
    "shares_of",
    "worth_keeping",
]

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

_EXACT = 300
"""Up to so many plans are compared with one another; of more, some are picked by packs."""

_LIKE = 8
"""Micro-batches whose mean length and tokens agree within a factor of exp(1 / 8) count as alike."""

_PACKS = [(length, length * many) for length in (64, 1024, 16_384, 262_144) for many in (1, 64)]
"""Micro-batches by which plans are picked: (tokens of a sequence, tokens of the micro-batch)."""


Columns = tuple[Floats, Floats, Floats, Floats, Floats]
"""Columns a, b, c, c / cap and cap of the rows of a frontier, each [rows, 1]."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """The rows of a frontier when a sequence is charged for the constant in one of three ways.

    Attributes:
        b: Seconds per token of each row, with the part of the constant that tokens bear [rows].
        c: Seconds of the constant that one sequence bears [rows].
        rules: Whether each row is at least as quick as every later one for any sequence [rows].
        quickest: Numbers of the rows that are the quickest for some length if memory is no matter.
    """

    b: Floats
    c: Floats
    rules: NDArray[np.bool_]
    quickest: Counts


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Layer plans of one scheme, smallest capacity first; published costs have rows without plans.
    Each plan is a row (a, b, c, cap): a micro-batch of it takes ``a sum(l^2) + b sum(l) + c``
    seconds on one stage and holds at most cap tokens.

    Attributes:
        options: Layer options of the plans, each once.
        a: Seconds per squared token of each plan, forward and backward [plans].
        b: Seconds per token of each plan [plans].
        c: Seconds per micro-batch of each plan [plans].
        caps: Tokens that a micro-batch of each plan holds.
        layers: The number of every layer's option in ``options`` [plans, layers].
    """

    options: tuple[LayerOption, ...]
    a: Floats
    b: Floats
    c: Floats
    caps: tuple[int, ...]
    layers: Counts
    _plans: dict[int, LayerPlan] = field(default_factory=dict, repr=False, compare=False)
    _nearly: dict[tuple[int, int, int], int] = field(
        default_factory=dict, repr=False, compare=False
    )
    _quickest: dict[tuple[int, int], int] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[float, float, float]], cap: int) -> Frontier:
        """A frontier of rows (a, b, c), in seconds, that all hold ``cap`` tokens and have no layer
        plans, as published costs have them."""
        a, b, c = np.array(rows, dtype=np.float64).T
        return cls(
            options=(),
            a=a.copy(),
            b=b.copy(),
            c=c.copy(),
            caps=(cap,) * len(rows),
            layers=np.zeros((len(rows), 0), dtype=np.int64),
        )

    def columns(self, first: int) -> Columns:
        """Columns a, b, c, c / cap and cap of the rows from ``first`` on, each [rows, 1], so that
        they broadcast with the lengths of sequences [sequences]."""
        a, b, c, c_per_token, caps = self._columns
        return a[first:], b[first:], c[first:], c_per_token[first:], caps[first:]

    @cached_property
    def quick(self) -> Columns:
        """The columns a, b, c, c / cap and cap of the rows in :attr:`quickest`, each [rows, 1]."""
        a, b, c, c_per_token, caps = self._columns
        rows = self.quickest
        return a[rows], b[rows], c[rows], c_per_token[rows], caps[rows]

    @cached_property
    def _columns(self) -> Columns:
        """The columns a, b, c, c / cap and cap of all rows, each [rows, 1]."""
        c_per_token = self.c / self.limits
        a, b, c, c_per_token, caps = (
            column[:, None] for column in (self.a, self.b, self.c, c_per_token, self.limits)
        )
        return a, b, c, c_per_token, caps

    @property
    def most_tokens(self) -> int:
        """Tokens that the thriftiest plan holds, 0 when nothing fits."""
        return self.caps[-1] if self.caps else 0

    @cached_property
    def rows(self) -> list[tuple[float, float, float]]:
        """Coefficients (a, b, c) of the seconds of every plan."""
        return list(zip(self.a.tolist(), self.b.tolist(), self.c.tolist(), strict=True))

    @cached_property
    def least(self) -> tuple[float, float, float]:
        """The least a, the least b and the least c of all plans, each by itself."""
        return float(self.a.min()), float(self.b.min()), float(self.c.min())

    @cached_property
    def _table(self) -> Floats:
        """Coefficients (a, b, c) of every plan [plans, 3]."""
        return np.column_stack([self.a, self.b, self.c])

    @cached_property
    def rules(self) -> list[bool]:
        """Whether each plan is at least as quick as every later, roomier one, whatever the
        micro-batch."""
        return [bool(rule) for rule in _ruling(self.a, self.b, self.c)]

    @cached_property
    def limits(self) -> Floats:
        """``caps`` as an array of floats [rows], in tokens."""
        return np.array(self.caps, dtype=np.float64)

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """Three ways to charge a sequence for the constant of its micro-batch: all of it; nothing;
        and for each token c / cap, the least that a token can bear, as a micro-batch holds at most
        cap tokens."""
        no_c, b_with_c = np.zeros_like(self.c), self.b + self.c / self.limits
        return tuple(
            Share(
                b=b,
                c=c,
                rules=_ruling(self.a, b, c),
                quickest=_quickest(np.column_stack([self.a, b, c])),
            )
            for b, c in ((self.b, self.c), (self.b, no_c), (b_with_c, no_c))
        )

    @cached_property
    def quickest(self) -> Counts:
        """Numbers of the plans, rising, among which is the quickest for a sequence of any length if
        memory is no matter, by any of the three :attr:`shares` of the constant."""
        return np.unique(np.concatenate([share.quickest for share in self.shares]))

    def best(self, squares: float, tokens: int) -> tuple[float, int] | None:
        """(seconds, number of the plan) of the quickest plan that holds a micro-batch of ``tokens``
        tokens whose squared lengths sum to ``squares``; None when not even the thriftiest does."""
        row = bisect_left(self.caps, tokens)  # the first plan that holds so many tokens
        if row == len(self.caps):
            return None
        if not self.rules[row]:  # a roomier plan may be quicker
            row += int(self._table[row:].dot(np.array((squares, tokens, 1.0))).argmin())
        a, b, c = self.rows[row]
        return a * squares + b * tokens + c, row

    def nearly_best(self, squares: float, tokens: int) -> tuple[float, int] | None:
        """:meth:`best`, but quicker to answer and not always exact: micro-batches whose mean length
        and tokens are about the same, and which the same plans hold, share one cached answer."""
        first = bisect_left(self.caps, tokens)
        if first == len(self.caps):
            return None
        if not self.rules[first]:
            # One answer for each cell of a logarithmic grid of mean lengths and tokens.
            key = int(log(squares / tokens) * _LIKE), int(log(tokens) * _LIKE), first
            row = self._nearly.get(key)
            if row is None:
                row = first + int(self._table[first:].dot(_alike(*key[:2])).argmin())
                self._nearly[key] = row
            first = row
        a, b, c = self.rows[first]
        return a * squares + b * tokens + c, first

    def quickest_cap(self, squares: float, tokens: int) -> int:
        """How many tokens the plan holds that would be about the quickest for a micro-batch of
        ``tokens`` tokens, whose squared lengths sum to ``squares``, if memory were no matter."""
        if self.rules[0]:
            return self.caps[0]
        key = int(log(squares / tokens) * _LIKE), int(log(tokens) * _LIKE)
        if key not in self._quickest:
            self._quickest[key] = self.caps[int(self._table.dot(_alike(*key)).argmin())]
        return self._quickest[key]

    def layer_plan(self, index: int) -> LayerPlan:
        """The layer plan of row ``index``."""
        if index not in self._plans:
            chosen = self.layers[index].tolist()
            self._plans[index] = LayerPlan(options=tuple(self.options[o] for o in chosen))
        return self._plans[index]


def worth_keeping(seconds: Floats, caps: Floats) -> Counts:
    """Which of many plans to keep, as numbers with the smallest capacity first, given their
    coefficients ``seconds`` [plans, 3] and the tokens ``caps`` that they hold [plans]: those that
    no other beats in everything; of equal ones the first."""
    plans = np.flatnonzero(caps >= 1)
    if len(plans) > _EXACT:
        plans = plans[_thinned(seconds[plans], caps[plans])]
    plans = plans[_unbeaten(seconds[plans], caps[plans])]
    order = np.lexsort((seconds[plans].sum(axis=1), caps[plans]))
    kept: Counts = plans[order].astype(np.int64)
    return kept


def _alike(mean_step: int, token_step: int) -> Floats:
    """The factors (sum of squared lengths, tokens, 1) of (a, b, c) for the micro-batch in the
    middle of a cell of the grid by which :meth:`Frontier.nearly_best` caches. The cell is given by
    its steps of log mean length, weighted by tokens, and of log tokens."""
    mean_length, tokens = exp((mean_step + 0.5) / _LIKE), exp((token_step + 0.5) / _LIKE)
    return np.array((mean_length * tokens, tokens, 1.0))


def _ruling(a: Floats, b: Floats, c: Floats) -> NDArray[np.bool_]:
    """Whether each row (a, b, c) is at most every later row in all three coefficients [rows]."""
    rows = np.column_stack([a, b, c])
    least_from_here = np.minimum.accumulate(rows[::-1], axis=0)[::-1]
    ruling: NDArray[np.bool_] = np.logical_and.reduce(rows <= least_from_here, axis=1)
    return ruling


def _unbeaten(seconds: Floats, caps: Floats) -> Counts:
    """Numbers of the plans that no other beats: none is at most as large in every coefficient and
    holds as many tokens. Of equal plans the first stays."""
    columns = np.column_stack([seconds, -caps])
    # In this order only earlier plans beat one, and what a beaten one beats another beats, too.
    order = np.lexsort(columns.T[::-1])
    kept, numbers = columns[:0], list[Counts]()
    for start in range(0, len(order), _EXACT):
        block = columns[order[start : start + _EXACT]]
        rivals = np.concatenate([kept, block])
        beats = np.triu(np.ones((len(rivals), len(block)), dtype=np.bool_), 1 - len(kept))
        for column in range(1, columns.shape[1]):
            beats &= rivals[:, column, None] <= block[None, :, column]
        unbeaten = np.flatnonzero(~beats.any(axis=0))
        numbers.append(order[start + unbeaten])
        kept = np.concatenate([kept, block[unbeaten]])
    return np.sort(np.concatenate(numbers or [order])).astype(np.int64)


def _quickest(rows: Floats) -> Counts:
    """Numbers, rising, of the rows [rows, 3] that no other row is at most as large as in every
    column; of equal rows the first. This is quick where few such rows exist."""
    unbeaten, kept = np.argsort(rows.sum(axis=1), kind="stable"), list[int]()
    while len(unbeaten):
        best = int(unbeaten[0])  # no row beats the one with the least sum
        kept.append(best)
        # Only rows that are less than it in some column are left.
        unbeaten = unbeaten[(rows[unbeaten] < rows[best]).any(axis=1)]
    return np.array(sorted(kept), dtype=np.int64)


def _thinned(seconds: Floats, caps: Floats) -> Counts:
    """Numbers of the plans to keep of many, rising: for each of the typical micro-batches
    ``_PACKS``, the plans that are quicker than every roomier one, one of them for each step of
    seconds."""
    by_cap = np.argsort(-caps, kind="stable")  # the roomiest first
    # Seconds of each micro-batch over its tokens: a length + b + c / tokens [packs, plans].
    packs = np.array([(length, 1.0, 1.0 / tokens) for length, tokens in _PACKS])
    per_token = packs @ seconds[by_cap].T
    least_so_far = np.minimum.accumulate(per_token, axis=1)
    improves = np.ones(per_token.shape, dtype=np.bool_)
    improves[:, 1:] = per_token[:, 1:] < least_so_far[:, :-1]
    kept = np.zeros(len(by_cap), dtype=np.bool_)
    for plan_seconds, is_better in zip(per_token, improves, strict=True):
        better_plans = np.flatnonzero(is_better)
        steps = np.floor(np.log(np.maximum(plan_seconds[better_plans], 1e-300)) / CLOSE)
        kept[better_plans[np.append(True, steps[1:] != steps[:-1])]] = True
        kept[better_plans[-1]] = True  # the quickest of all
    thinned: Counts = np.sort(by_cap[kept]).astype(np.int64)
    return thinned


Row = tuple[float, float, float]
"""Seconds ``a sum(l^2) + b sum(l) + c`` of a micro-batch, forward and backward."""


def shares_of(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """How many layers each of ``stages`` stages gets: first as evenly as can be, then with fewer
    and fewer layers in the last stage, which has the head besides."""
    even = share_layers(layers, stages)
    yield even
    for last in range(even[-1] - 1, 0, -1) if stages > 1 else ():
        yield (*share_layers(layers - last, stages - 1), last)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerTable:
    """Layer plans on one scheme, and what one layer of each option costs.

    Attributes:
        options: The layer options in the plans.
        layers: The number of every layer's option in ``options`` [plans, layers].
        seconds: Coefficients (a, b, c) of the seconds of one layer's forward and backward
            [options, 3].
        kept: Slope and constant of the bytes that a layer keeps for its backward [options, 2].
        passing: Slope and constant of the bytes that it needs in passing [options, 2].
    """

    options: tuple[LayerOption, ...]
    layers: Counts
    seconds: Floats
    kept: Floats
    passing: Floats

    @classmethod
    def of(
        cls, costs: CostModel, scheme: Scheme, working: Working, plans: Sequence[LayerPlan]
    ) -> LayerTable:
        """The table of ``plans`` on a scheme whose ranks hold weights as ``working`` says."""
        numbers: dict[LayerOption, int] = {}  # of each option, in the order in which they occur
        layers = list[list[int]]()
        for plan in plans:
            plan_layers = list[int]()
            for option, count in plan.counts:
                plan_layers += [numbers.setdefault(option, len(numbers))] * count
            layers.append(plan_layers)
        listed = [costs.option(scheme.width, option) for option in numbers]
        seconds = list[Row]()
        for option, cost in zip(numbers, listed, strict=True):
            both = cost.forward + cost.backward
            gathered = sum(stage_gather(costs, scheme, option, working))
            seconds.append((both.a, both.b, both.c + gathered))
        return cls(
            options=tuple(numbers),
            layers=np.array(layers, dtype=np.int64),
            seconds=np.array(seconds),
            kept=_lines([cost.kept for cost in listed]),
            passing=_lines([cost.transient for cost in listed]),
        )

    def __len__(self) -> int:
        return len(self.layers)


_MEMORY = (0.0, 0.04)
"""Weights of memory against time in a bound of pipelines; any weight up to 1 gives a bound."""

_GRID = 512
"""Lengths for which a bound works out what pipelines take, at most."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Least:
    """Lower bounds of what micro-batches take in pipelines of one width and depth, in seconds of
    all stages together (:mod:`headrace.planning.bounds` proves them). A micro-batch keeps ranks
    busy, and it keeps memory of the first stage taken until it has passed all stages twice.

    Attributes:
        width: Ranks of a stage.
        depth: Number of stages.
        alone: Rows for a sequence in a micro-batch of its own.
        busy: Coefficients (a, b, c) of each row, for each way to count what keeps ranks busy: on
            all stages together, or ``depth`` times on one stage [ways, rows, 3].
        kept: The share of the first stage's memory for activations that a micro-batch of each row
            keeps for its backward, as slope and constant of its tokens [rows, 2].
    """

    width: int
    depth: int
    alone: Frontier
    busy: Floats
    kept: Floats

    @classmethod
    def of(
        cls, width: int, depth: int, caps: Sequence[int], total: Floats, busy: Floats, kept: Floats
    ) -> Least:
        """The bounds of rows that hold ``caps`` tokens and take ``total`` (a, b, c) on all stages
        together [rows, 3]; rows that hold none are left out."""
        order = np.argsort(caps, kind="stable")
        order = order[np.array(caps)[order] > 0]
        a, b, c = total[order].T
        alone = Frontier(
            options=(),
            a=a.copy(),
            b=b.copy(),
            c=c.copy(),
            caps=tuple(caps[row] for row in order.tolist()),
            layers=np.zeros((len(order), 0), dtype=np.int64),
        )
        return cls(width=width, depth=depth, alone=alone, busy=busy[:, order], kept=kept[order])

    def spread(self, lengths: Floats, counts: Floats) -> Floats:
        """Seconds that sequences of each run take at least of the time and memory of a pipeline,
        with their share of constants [runs]; infinite where no row holds them.

        Args:
            lengths: Tokens of a sequence of each run, falling [runs].
            counts: Sequences of each run [runs].
        """
        # Each way is a bound: take the tightest, by about what all sequences take that a row holds.
        some, ways = _spaced(len(lengths), _GRID // 8), self._ways
        tried_s = self._per_token_s(ways, lengths[some]) * lengths[some]
        held = np.isfinite(tried_s[0])
        totals_s = tried_s[:, held] @ np.add.reduceat(counts, some)[held]
        way = ways[int(totals_s.argmax())]
        # Seconds per token grow with the length, so those of the next shorter length are a bound.
        grid = _spaced(len(lengths), _GRID)
        shorter = np.searchsorted(grid, np.arange(len(lengths)))
        found: Floats = lengths * self._per_token_s([way], lengths[grid])[0, shorter]
        return found

    def roughly(self, lengths: Floats, counts: Floats) -> Floats:
        """Seconds (alone, work, spread) of a sequence of each run, a percent or so less than they
        are, from what is worked out once for all batches [3, runs]; as for :meth:`spread`."""
        grid, alone_and_work, per_token_s = self._of_all_lengths
        # All of them grow with the length, so those of the next shorter length are bounds.
        shorter = np.searchsorted(grid, lengths, side="right") - 1
        tried_s = per_token_s[:, shorter] * lengths
        held = lengths <= self.alone.most_tokens
        way = int((tried_s[:, held] @ counts[held]).argmax())
        return np.where(held, np.stack([*alone_and_work[:, shorter], tried_s[way]]), inf)

    @cached_property
    def _ways(self) -> list[tuple[int, float]]:
        """Ways to count what a pipeline takes, each as (number in ``busy``, weight of memory)."""
        return list(product(range(len(self.busy)), _MEMORY if self.kept.any() else (0.0,)))

    @cached_property
    def _of_all_lengths(self) -> tuple[Floats, Floats, Floats]:
        """Lengths from 1 to the most tokens that a row holds, rising; of sequences of these lengths
        the seconds (alone, work) [2, lengths], and the least seconds per token in each of the ways
        [ways, lengths]."""
        most = self.alone.most_tokens
        grid = np.unique(np.geomspace(1, most, _GRID).round())
        a, b, c, _, caps = self.alone.columns(0)
        work_s = np.where(grid <= caps, (a * grid + b) * grid, inf)  # [rows, lengths]
        alone_and_work = np.stack([(work_s + c).min(axis=0), work_s.min(axis=0)])
        return grid, alone_and_work, self._per_token_s(self._ways, grid)

    def _per_token_s(self, ways: Sequence[tuple[int, float]], lengths: Floats) -> Floats:
        """Least seconds per token of sequences of ``lengths`` [ways, lengths], over all rows and
        over all tokens of the micro-batch that each may be in. In each of ``ways``, (number in
        ``busy``, weight), time counts by these rows and by 1 - weight, memory by the weight."""
        a, b, c, _, caps = self.alone.columns(0)  # [rows, 1] each
        too_long, most = lengths > caps, np.maximum(caps, lengths)
        through_s = a * lengths + b  # per token, on all stages
        least = np.empty((len(ways), len(lengths)))
        for way, (number, weight) in enumerate(ways):  # one by one, as their arrays stay in caches
            busy_a, busy_b, busy_c = (1 - weight) * self.busy[number].T[:, :, None]
            slope, constant = weight * self.depth * self.kept.T[:, :, None]
            seconds, by_number, tokens = busy_a * lengths, busy_c + constant * c, most
            seconds += busy_b + slope * c
            if weight:
                by_tokens = slope * through_s
                # Of the best micro-batch: the most that fit where tokens in flight cost nothing.
                tokens = np.sqrt(by_number / np.maximum(by_tokens, 1e-300))
                np.clip(tokens, lengths, most, out=tokens)
                seconds += constant * through_s
                seconds += by_tokens * tokens
            seconds += by_number / tokens
            seconds[too_long] = inf
            np.minimum.reduce(seconds, axis=0, out=least[way])
        return least


@dataclass(frozen=True, kw_only=True, eq=False)
class StageCosts:
    """What micro-batches cost the stages of a pipeline, by layer plan; plans go by their number.

    Attributes:
        costs: The model's costs, without their scale.
        scheme: The degrees of the pipeline.
        shares: Number of layers of each stage.
        working: How its ranks hold weights.
        table: The layer plans.
        simple: The layer plans that :meth:`mixed` mixed to those of the table, if it did.
    """

    costs: CostModel
    scheme: Scheme
    shares: tuple[int, ...]
    working: Working
    table: LayerTable
    simple: LayerTable | None = None

    @cached_property
    def pipeline(self) -> Pipeline:
        """The pipeline as if it stood on the first ranks."""
        ranks = tuple(range(self.scheme.devices))
        return Pipeline(scheme=self.scheme, ranks=ranks, shares=self.shares)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the pipeline, the first one first."""
        return self.pipeline.stages(self.costs.shape.layers)

    @cached_property
    def rooms(self) -> tuple[int, ...]:
        """Bytes that a rank of each stage has left for activations beside its state and working
        weights."""
        free = self.costs.capacity_bytes - self.costs.state_bytes
        return tuple(free - held for held in held_bytes(self.costs, self.pipeline, self.working))

    @cached_property
    def rows(self) -> Floats:
        """Coefficients (a, b, c) of the seconds of a micro-batch of each plan on each stage,
        messages included [plans, stages, 3]."""
        width, table = self.scheme.width, self.table
        starts = [stage.start for stage in self.stages]  # the first layer of each
        # Sums of the coefficients of each stage's layers.
        rows: Floats = np.add.reduceat(table.seconds[table.layers], starts, axis=1)
        ends = self.costs.ends[width]
        both = ends.forward + ends.backward
        rows[:, -1] += (both.a, both.b, both.c)  # embedding and head count to the last stage
        if len(self.stages) > 1:
            # A stage waits for a message and back in every second micro-batch, as one is ahead.
            rows[:, :, 1] += message_s(self.costs, 1) / width
        return rows

    @cached_property
    def bytes(self) -> tuple[Floats, Floats]:
        """Bytes of a micro-batch's activations on each stage, as slope and constant of its tokens:
        (bytes kept until its backward [stages, plans, 2], bytes at each moment that may be the peak
        [stages, plans, moments, 2])."""
        layers, lines = self.table.layers, list[tuple[Floats, Floats]]()
        # Stages of as many layers are worked out at once; the last has the head besides.
        alike = groupby(self.stages, key=lambda stage: (stage.stop - stage.start, stage.last))
        for (_, last), stages in alike:
            parts = [layers[:, stage.start : stage.stop] for stage in stages]
            kept, peaks = self._moments(np.concatenate(parts), last=last)
            lines += zip(np.split(kept, len(parts)), np.split(peaks, len(parts)), strict=True)
        most = max(peaks.shape[1] for _, peaks in lines)
        # Stages with fewer moments repeat their last one.
        peaks = [
            np.concatenate([peaks, *[peaks[:, -1:]] * (most - peaks.shape[1])], axis=1)
            for _, peaks in lines
        ]
        return np.stack([kept for kept, _ in lines]), np.stack(peaks)

    @cached_property
    def slowest(self) -> list[Row]:
        """For each plan the largest a, b and c of any stage: by these coefficients no micro-batch
        takes less than on its slowest stage."""
        return [(a, b, c) for a, b, c in self.rows.max(axis=1).tolist()]

    @property
    def pace_s(self) -> float:
        """Seconds per token of short sequences on the slowest stage, by the quickest plan."""
        return float(self.rows[:, :, 1].max(axis=1).min())

    @cached_property
    def caps(self) -> list[int]:
        """For each plan the most tokens of a micro-batch such that as many micro-batches fit at
        once as there are stages."""
        return self.caps_at(len(self.stages))

    @cached_property
    def variants(self) -> tuple[StageCosts, ...]:
        """These costs, with mixed plans, and the same for each split with one layer more or one
        less in the last stage."""
        layers, last = self.costs.shape.layers, self.shares[-1]
        others = [
            replace(self, shares=shares, table=self.simple or self.table).mixed()
            for shares in shares_of(layers, self.scheme.pipeline)
            if abs(shares[-1] - last) == 1
        ]
        return (self, *(other for other in others if len(other.table)))

    def mixed(self) -> StageCosts:
        """The same with the plans worth keeping: of the table's own and of mixtures of two.

        A stage keeps more micro-batches for their backwards the earlier it is, so it has to
        recompute more. For every count of layers of the first stage that take the thriftier of two
        plans, each later stage has as few of them as it needs to hold as many tokens. They come
        first, as thriftier plans need more in passing.
        """
        table = self.table
        layers = np.concatenate([table.layers, self._mixtures(self._pairs())])
        every = replace(self, table=replace(table, layers=layers))
        caps = np.array(every.caps, dtype=np.float64)
        kept = worth_keeping(np.array(every.slowest), caps)
        return replace(self, table=replace(table, layers=layers[kept]), simple=table)

    def _pairs(self) -> Counts:
        """Pairs of the table's plans worth mixing, each as (thriftier, quicker) [pairs, 2]: for
        sequences of some length, no third plan takes less than a mixture of them that holds as
        much."""
        caps, slowest = np.array(self.caps, dtype=np.float64), np.array(self.slowest)
        plans = worth_keeping(slowest, caps)
        pairs = set[tuple[int, int]]()
        for length in sorted({length for length, _ in _PACKS}):
            a, b, c = slowest[plans].T
            per_token_s = a * length + b + c / caps[plans]
            corners = plans[_lower_hull(1 / caps[plans], per_token_s)].tolist()
            pairs.update(pairwise(corners))
        return np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)

    def _mixtures(self, pairs: Counts) -> Counts:
        """The layers of mixtures of two of the table's plans [mixtures, layers] for each of
        ``pairs``, which :meth:`mixed` explains."""
        both, by_stage = self.table.layers[pairs], list[Counts]()  # [pairs, 2, layers]
        targets = np.zeros((len(pairs), 0))  # tokens that mixtures hold [pairs, mixtures of each]
        known = dict[tuple[bool, bytes], tuple[Floats, Floats]]()
        for s, stage in enumerate(self.stages if len(pairs) else ()):
            thrifty, quick = both[:, :, None, stage.start : stage.stop].swapaxes(0, 1)
            number = np.arange(stage.stop - stage.start)
            # Of 0, 1, ... all layers of the stage the first ones thriftily [pairs, counts, layers].
            thriftily = number < np.arange(len(number) + 1)[:, None]
            layers = np.where(thriftily, thrifty, quick)
            flat = layers.reshape(-1, len(number))
            key = stage.last, flat.tobytes()  # most stages have the same mixtures
            if key not in known:
                known[key] = self._moments(flat, last=stage.last)
            kept, peaks = known[key]
            at_once = len(self.stages)
            tokens = self._fitting(kept[None], peaks[None], at_once, slice(s, s + 1))
            tokens = tokens.reshape(len(pairs), -1)
            targets = tokens if s == 0 else targets
            holds = tokens[:, None] >= targets[:, :, None]  # [pairs, mixtures, counts]
            count = np.where(holds.any(axis=2), holds.argmax(axis=2), len(number))
            by_stage.append(np.take_along_axis(layers, count[:, :, None], axis=1))
        mixtures = np.concatenate(by_stage, axis=2) if by_stage else both[:, :1]
        return mixtures.reshape(-1, both.shape[2])

    @cached_property
    def frontier(self) -> Frontier:
        """The plans as a frontier, in seconds of the slowest stage."""
        a, b, c = np.array(self.slowest).T
        return Frontier(
            options=self.table.options,
            a=a.copy(),
            b=b.copy(),
            c=c.copy(),
            caps=tuple(self.caps),
            layers=self.table.layers,
        )

    @cached_property
    def least(self) -> Least:
        """Rows (a, b, c) that no pipeline of this scheme and split beats, whatever the order of its
        micro-batches, in seconds of all stages together without messages. They count all stages, or
        ``depth`` times the last stage or the fullest other one, which is busy for no longer than
        the pipeline takes. The proof is in :mod:`headrace.planning.bounds`."""
        table, depth, ends = self.table, self.scheme.pipeline, self.costs.ends[self.scheme.width]
        both = ends.forward + ends.backward
        end = np.array([both.a, both.b, both.c])
        layers = table.seconds[table.layers]  # [plans, layers, 3]
        fullest = self.stages[self.shares.index(max(self.shares[:-1]))]  # of all but the last
        many, last = layers[:, fullest.start : fullest.stop], layers[:, -self.shares[-1] :]
        total = layers.sum(axis=1) + end
        kept = self.bytes[0][0]  # in the first stage
        return Least.of(
            width=self.scheme.width,
            depth=depth,
            caps=self.caps_at(1),
            total=total,
            busy=np.stack([total, depth * many.sum(axis=1), depth * (last.sum(axis=1) + end)]),
            kept=kept / max(1, self.rooms[0]),
        )

    def caps_at(self, at_once: int) -> list[int]:
        """For each plan the most tokens of a micro-batch such that every stage has memory for as
        many as it has in flight, at most ``at_once``."""
        kept, peaks = self.bytes
        fitting = self._fitting(kept, peaks, at_once, slice(None))
        return [floor(tokens) for tokens in fitting.min(axis=0).tolist()]

    def _fitting(self, kept: Floats, peaks: Floats, at_once: int, stages: slice) -> Floats:
        """For each plan and each of some ``stages`` the most tokens of a micro-batch such that the
        stage has memory for as many as it has in flight, at most ``at_once`` [stages, plans], given
        the bytes of :attr:`bytes`: ``kept`` [stages, plans, 2] and ``peaks`` [stages, plans,
        moments, 2]."""
        # Stage s holds up to depth - s micro-batches: one at its peak, what is kept of others.
        beside = np.minimum(self._beside, at_once - 1)[stages, None, None, None]
        needs = beside * kept[:, :, None] + peaks
        slope = needs[..., 0]
        free = np.array(self.rooms, dtype=np.float64)[stages, None, None] - needs[..., 1]
        fitting = np.where(slope > 0, free / np.where(slope > 0, slope, 1.0), float(MOST_TOKENS))
        tokens: Floats = np.where(free < 0, 0.0, fitting).min(axis=2)
        return np.minimum(tokens, float(MOST_TOKENS))

    def _moments(self, layers: Counts, *, last: bool) -> tuple[Floats, Floats]:
        """Bytes of a micro-batch in a stage as lines, slope and constant of its tokens: those kept
        until its backward [plans, 2], and those at each moment that may be the peak [plans,
        moments, 2], while the last of some alike layers runs or the head does. While a layer runs,
        it and all layers before it keep theirs. What the ends keep counts from the ``last`` stage's
        first layer on, which is never less than is there. ``layers`` are the options of the stage's
        layers in each plan [plans, layers of the stage]."""
        kept, passing = self.table.kept[layers], self.table.passing[layers]
        ends = self.costs.ends[self.scheme.width]
        end_kept, end_passing = _lines([ends.kept, ends.transient])
        if last:
            kept[:, 0] += end_kept
        held = kept.cumsum(axis=1)
        # The last of alike layers in a row, of each plan as many as of the plan with the most.
        is_last = np.column_stack([layers[:, 1:] != layers[:, :-1], np.ones(len(layers), bool)])
        latest_first = np.argsort(~is_last[:, ::-1], axis=1, kind="stable")
        most = int(is_last.sum(axis=1).max(initial=1))
        moments = (layers.shape[1] - 1 - latest_first[:, :most])[:, :, None]
        peaks = np.take_along_axis(held + passing, moments, axis=1)
        if last:
            peaks = np.concatenate([peaks, held[:, -1:] + end_passing], axis=1)
        return held[:, -1], peaks

    def seconds(self, squares: Floats, tokens: Floats) -> Floats:
        """Seconds of micro-batches on the slowest stage by plan [micro-batches, plans], given the
        sums of their squared tokens and of their tokens, each [micro-batches]."""
        sums = np.stack([squares, tokens, np.ones(len(tokens))])
        seconds: Floats = (self.rows @ sums).max(axis=1)
        return seconds.T

    def needs(self, plan: int, tokens: int) -> int:
        """Bytes that the fullest stage lacks for micro-batches of ``tokens`` tokens, as many as are
        in flight, with the layers of plan number ``plan``; 0 or less where they fit."""
        kept_lines, peak_lines = self.bytes
        tokens_and_one = np.array([float(tokens), 1.0])
        kept = kept_lines[:, plan] @ tokens_and_one
        peaks = (peak_lines[:, plan] @ tokens_and_one).max(axis=1)
        return ceil((self._beside * kept + peaks - self.rooms).max())

    @cached_property
    def _beside(self) -> Counts:
        """Micro-batches that each stage has in flight besides one [stages]."""
        return np.arange(len(self.stages))[::-1]

    def crowded(self, tokens: Floats, plans: Counts) -> range | None:
        """Micro-batches that are in flight together and do not fit the memory of some stage, by
        their place in the order; None where all fit: each forward beside the micro-batches in
        flight before it, and each backward beside those that come after it and are in flight then.

        Args:
            tokens: Tokens of each micro-batch in its order.
            plans: The number of the layer plan of each.
        """
        in_forward, in_backward = self._in_flight(tokens, plans)
        needed = np.maximum(in_forward, in_backward)
        crowded = np.argwhere(needed > np.array(self.rooms)[:, None] + _ROUNDING_BYTES)
        if not len(crowded):
            return None
        s, at = crowded[0].tolist()
        beside = int(self._beside[s])
        if in_forward[s, at] >= in_backward[s, at]:
            return range(max(0, at - beside), at + 1)
        return range(at, min(len(plans), at + beside + 1))

    def _in_flight(self, tokens: Floats, plans: Counts) -> tuple[Floats, Floats]:
        """Bytes on each stage at the peak of each micro-batch, beside those that are in flight in
        its forward and in its backward, each [stages, micro-batches], given the ``tokens`` and
        ``plans`` of all in order."""
        kept_lines, peak_lines = self.bytes
        kept_lines, peak_lines = kept_lines[:, plans], peak_lines[:, plans]
        kept = kept_lines[..., 0] * tokens + kept_lines[..., 1]
        peaks = (peak_lines[..., 0] * tokens[:, None] + peak_lines[..., 1]).max(axis=2)
        so_far = np.zeros((len(kept), len(plans) + 1))  # kept by all before each one
        np.cumsum(kept, axis=1, out=so_far[:, 1:])
        number, beside = np.arange(len(plans)), self._beside[:, None]
        first = np.maximum(number - beside, 0)
        last = np.minimum(number + beside, len(plans) - 1)
        extra = peaks - kept  # what each takes at its own peak beyond what it keeps
        in_forward = so_far[:, 1:] - np.take_along_axis(so_far, first, axis=1) + extra
        in_backward = np.take_along_axis(so_far, last + 1, axis=1) - so_far[:, :-1] + extra
        return in_forward, in_backward

    def quicken(self, tokens: Floats, plans: Counts, seconds: Floats) -> None:
        """Give micro-batches quicker layer plans, in place, where every stage has memory for all
        that is in flight; those with the most to gain come first.

        Args:
            tokens: Tokens of each micro-batch in its order.
            plans: The number of the layer plan of each; all fit.
            seconds: Seconds of each micro-batch by each plan [micro-batches, plans].
        """
        kept_lines, peak_lines = self.bytes
        beside, widest = self._beside[:, None], len(self.stages) - 1
        rooms = np.array(self.rooms)[:, None] + _ROUNDING_BYTES
        present_s = seconds[np.arange(len(plans)), plans]
        gains = present_s - seconds.min(axis=1)
        in_forward, in_backward = self._in_flight(tokens, plans)
        for j in np.argsort(-gains, kind="stable")[: np.count_nonzero(gains > 0)].tolist():
            # Others whose backward or forward is beside this one, by their distance.
            before, after = slice(max(0, j - widest), j), slice(j + 1, j + 1 + widest)
            backward_beside, forward_beside = in_backward[:, before], in_forward[:, after]
            distance_before = np.arange(backward_beside.shape[1], 0, -1)
            distance_after = np.arange(1, forward_beside.shape[1] + 1)
            met_before, met_after = distance_before <= beside, distance_after <= beside
            others = np.maximum(
                np.where(met_before, backward_beside, 0.0).max(axis=1, initial=0.0),
                np.where(met_after, forward_beside, 0.0).max(axis=1, initial=0.0),
            )[:, None]
            quicker = np.argsort(seconds[j], kind="stable")
            quicker = quicker[: np.count_nonzero(seconds[j] < present_s[j])]
            line = np.array([tokens[j], 1.0])
            both = [int(plans[j]), *quicker.tolist()]
            kept = kept_lines[:, both] @ line  # [stages, plans], the present one first
            extra = (peak_lines[:, both] @ line).max(axis=2) - kept
            more = kept[:, 1:] - kept[:, :1]
            own = np.maximum(in_forward, in_backward)[:, j, None] - extra[:, :1]
            fits = (others + more <= rooms) & (own + more + extra[:, 1:] <= rooms)
            fitting = np.flatnonzero(fits.all(axis=0))
            if len(fitting):
                chosen = int(fitting[0])
                plans[j] = quicker[chosen]
                added = more[:, chosen, None]
                backward_beside += np.where(met_before, added, 0.0)
                forward_beside += np.where(met_after, added, 0.0)
                at_own_peak = (more + extra[:, 1:])[:, chosen] - extra[:, 0]
                in_forward[:, j] += at_own_peak
                in_backward[:, j] += at_own_peak


@lru_cache(maxsize=8)
def _spaced(count: int, most: int) -> Counts:
    """Up to ``most`` of the numbers 0 to ``count`` - 1, rising, close to one another at first; the
    last one is among them."""
    spaced: Counts = np.unique(np.geomspace(1, count, min(most, count)).astype(np.int64)) - 1
    spaced.setflags(write=False)  # it is shared by all that ask for it
    return spaced


def _lower_hull(x: Floats, y: Floats) -> list[int]:
    """Numbers of the points (x, y) on the lower left of their convex hull, x rising and y falling:
    for every x, no mixture of two others has less y."""
    hull = list[int]()
    for point in np.lexsort((y, x)).tolist():
        if hull and y[point] >= y[hull[-1]]:
            continue
        while len(hull) > 1:
            first, middle = hull[-2:]
            rise = (y[middle] - y[first]) * (x[point] - x[first])
            if rise < (y[point] - y[first]) * (x[middle] - x[first]):
                break
            hull.pop()
        hull.append(point)
    return hull


FORWARD = 1 / 3
"""Share of a micro-batch's seconds that its forward takes."""

_ROUNDING_BYTES = 1e-3
"""Bytes that are forgiven as rounding of sums."""


def _lines(lines: Sequence[Linear]) -> Floats:
    """Slope and constant of each line, as an array [lines, 2]."""
    return np.array([(line.slope, line.constant) for line in lines])


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A pipeline of a scheme, all of whose micro-batches are priced by one row (a, b, c).

    Attributes:
        stages: Number of stages.
        c: Seconds of the constant of a micro-batch on each stage.
        cap: Tokens that a micro-batch holds.
        util: Tokens from which on a micro-batch keeps the devices busy.
        pull_s: Seconds in which weights arrive, of those that a computation may hide.
        push_s: Seconds in which gradients leave, likewise.
        idle: The share of ``stages`` - 1 of its longest micro-batches for which its devices are
            idle.
    """

    stages: int
    c: float
    cap: int
    util: int = 1
    pull_s: float = 0.0
    push_s: float = 0.0
    idle: float = 1.0

    @property
    def bubbles(self) -> float:
        """For how many of its longest micro-batches its devices are idle."""
        return self.idle * (self.stages - 1)

    def count(self, work_s: float, tokens: float, longest_s: float) -> int:
        """How many micro-batches to expect for sequences of ``work_s`` seconds together, the
        longest of them ``longest_s``.

        One stage: the fewest that hold the tokens. More: with V alike micro-batches a pipeline
        takes work + c V + (P - 1) max(longest, work / V), least at V = sqrt(work (P - 1) / c), or
        where the longest sequence fills a micro-batch alone. There are no more than have ``util``
        tokens each, as smaller ones do not keep the devices busy.
        """
        fewest = max(1, ceil(tokens / self.cap))
        if self.stages == 1 or work_s <= 0:
            return fewest
        # With so many the longest sequence alone fills a micro-batch: more do not shorten bubbles.
        best_count = work_s / longest_s if longest_s > 0 else 1.0
        if self.c > 0:
            best_count = min(best_count, sqrt(work_s * (self.stages - 1) / self.c))
        most_count = max(fewest, int(tokens // self.util))
        lower = max(fewest, int(best_count))
        if lower >= most_count:
            return most_count
        # Both neighbouring whole numbers are compared by the formula.
        bubbles = self.stages - 1
        lower_s = self.c * lower + bubbles * max(longest_s, work_s / lower)
        upper_s = self.c * (lower + 1) + bubbles * max(longest_s, work_s / (lower + 1))
        return lower if lower_s <= upper_s else lower + 1

    def usable_s(self, limit_s: float, longest_s: float) -> float:
        """Seconds of work that a pipeline can do on each stage within ``limit_s`` seconds, if its
        longest sequence takes ``longest_s``."""
        return self.usable(limit_s, longest_s)[0]

    def usable(self, limit_s: float, longest_s: float) -> tuple[float, int]:
        """(seconds of work that a pipeline can do on each stage within ``limit_s`` seconds, if its
        longest sequence takes ``longest_s``; tokens that the V micro-batches hold whose constants
        are paid for it).

        With V micro-batches, work + c V + (P - 1) (max(longest, work / V) + c) <= limit. Solved for
        the work, with R = limit - (P - 1) c, that is the smaller of (R - c V) V / (V + P - 1) and
        R - c V - (P - 1) longest. More micro-batches help until the longest sequence fills one,
        where both are equal, or their constants cost more than the bubbles, where the first is
        largest: at V = sqrt(limit (P - 1) / c) - (P - 1). What such micro-batches do not hide of
        the exchange comes off.
        """
        if self.stages == 1:
            return limit_s - self.c, self.cap
        bubbles = self.bubbles
        rest_s = limit_s - bubbles * self.c
        if rest_s <= 0 or longest_s == inf:  # no micro-batch holds such a sequence
            return 0.0, 0
        # V at which an even micro-batch takes as long as the longest sequence; any large number
        # where that takes no time.
        count = (rest_s - bubbles * longest_s) / (longest_s + self.c) if longest_s else rest_s
        if self.c > 0:  # V of the most work by ``by_count``
            count = min(count, sqrt(limit_s * bubbles / self.c) - bubbles)
        number = max(int(count + 0.5), 1)  # V, a whole number
        by_count = (rest_s - self.c * number) * number / (number + bubbles)
        usable_s = min(by_count, rest_s - self.c * number - bubbles * longest_s)
        if self.pull_s or self.push_s:
            usable_s -= self.wait_s(max(longest_s, usable_s / number) + self.c)
        return usable_s, number * self.cap

    @overload
    def wait_s(self, micro_batch_s: float) -> float: ...

    @overload
    def wait_s(self, micro_batch_s: Floats) -> Floats: ...

    def wait_s(self, micro_batch_s: float | Floats) -> float | Floats:
        """Seconds that a pipeline with stages waits for weights before its first micro-batch and
        for gradients after its last, if both take ``micro_batch_s`` seconds on each stage: one
        number, or an array of any shape."""
        pull_wait_s = self.pull_s - self.stages * micro_batch_s * FORWARD
        push_wait_s = self.push_s - micro_batch_s
        # Half of x + |x| is max(x, 0), of a number and of an array.
        return (pull_wait_s + abs(pull_wait_s) + push_wait_s + abs(push_wait_s)) / 2


@dataclass(frozen=True, kw_only=True, eq=False)
class PricedScheme:
    """A scheme with its prices.

    Attributes:
        scheme: The degrees of its pipelines.
        frontier: Seconds and tokens of a micro-batch on one stage, by layer plan.
        weights: How its ranks hold weights.
        name: How the source of the costs writes the scheme.
        util: Tokens from which on a micro-batch keeps the devices busy: no more micro-batches are
            made than hold so many.
        stages: What each stage takes and holds, where the source knows; its plans have the numbers
            of the frontier's rows.
    """

    scheme: Scheme
    frontier: Frontier
    weights: Working = "replicated"
    name: str = ""
    util: int = 1
    stages: StageCosts | None = None
    _orders: dict[int, TokenOrder] = field(default_factory=dict, repr=False)

    @cached_property
    def splits(self) -> tuple[PricedScheme, ...]:
        """The scheme with each split of its layers among the stages that is tried, its own first;
        the scheme alone where the source knows no stages."""
        if self.stages is None:
            return (self,)
        others = self.stages.variants[1:]
        return (self, *(replace(self, frontier=o.frontier, stages=o, _orders={}) for o in others))

    @property
    def devices(self) -> int:
        """Devices of one pipeline of the scheme."""
        return self.scheme.devices

    @property
    def depth(self) -> int:
        """Stages of one pipeline of the scheme."""
        return self.scheme.pipeline

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest sequence that a micro-batch holds."""
        return self.frontier.most_tokens

    def shards_over(self, devices: int) -> bool:
        """Whether each of ``devices`` holds a different part of the weights: one stage of this
        scheme spans all of them and its weights are sharded."""
        return self.weights == "sharded" and self.scheme.width == devices

    def layer_plan(self, row: int) -> LayerPlan | None:
        """The layer plan of a row; None where the source knows none."""
        return self.frontier.layer_plan(row) if self.frontier.options else None

    def order_of(self, row: int, costs: CostModel) -> TokenOrder:
        """The token order of micro-batches with a row's layers."""
        if row not in self._orders:
            layers = self.layer_plan(row)
            self._orders[row] = costs.order_of(self.scheme.width, layers) if layers else "natural"
        return self._orders[row]

    def __str__(self) -> str:
        return self.name or str(self.scheme)
