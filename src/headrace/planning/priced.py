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
from functools import cached_property
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

    def only(self, row: int) -> Frontier:
        """The frontier with the single plan of number ``row``."""
        return Frontier(
            options=self.options,
            a=self.a[[row]],
            b=self.b[[row]],
            c=self.c[[row]],
            caps=(self.caps[row],),
            layers=self.layers[[row]],
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
    no_worse = np.ones((len(columns), len(columns)), dtype=np.bool_)
    for column in columns.T:
        no_worse &= column[:, None] <= column[None, :]
    number = np.arange(len(columns))
    beats = no_worse & (~no_worse.T | (number[:, None] < number[None, :]))
    unbeaten: Counts = np.flatnonzero(~beats.any(axis=0)).astype(np.int64)
    return unbeaten


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
        plans: The layer plans.
        options: The layer options in them.
        layers: The number of every layer's option in ``options`` [plans, layers].
        seconds: Coefficients (a, b, c) of the seconds of one layer's forward and backward
            [options, 3].
        kept: Slope and constant of the bytes that a layer keeps for its backward [options, 2].
        passing: Slope and constant of the bytes that it needs in passing [options, 2].
    """

    plans: tuple[LayerPlan, ...]
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
            plans=tuple(plans),
            options=tuple(numbers),
            layers=np.array(layers, dtype=np.int64),
            seconds=np.array(seconds),
            kept=_lines([cost.kept for cost in listed]),
            passing=_lines([cost.transient for cost in listed]),
        )

    def only(self, numbers: Counts) -> LayerTable:
        """The table with the layer plans of the given ``numbers`` alone."""
        return replace(
            self,
            plans=tuple(self.plans[i] for i in numbers.tolist()),
            layers=self.layers[numbers],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Least:
    """Lower bounds of what micro-batches take in pipelines of one width and depth, as frontiers in
    seconds of all stages together (:mod:`headrace.planning.bounds` proves them).

    Attributes:
        width: Ranks of a stage.
        depth: Number of stages.
        alone: Rows for a sequence in a micro-batch of its own.
        dealt: Rows for a sequence that bears its share of the constants, for each way to count
            this share one frontier: what a batch takes by any of them is a bound.
        over_s: For each frontier of ``dealt``, the seconds by which these shares may sum to more
            than the constants that one pipeline really pays.
    """

    width: int
    depth: int
    alone: Frontier
    dealt: tuple[Frontier, ...]
    over_s: tuple[float, ...] = (0.0,)


@dataclass(frozen=True, kw_only=True, eq=False)
class StageCosts:
    """What micro-batches cost the stages of a pipeline, by layer plan; plans go by their number.

    Attributes:
        costs: The model's costs, without their scale.
        scheme: The degrees of the pipeline.
        shares: Number of layers of each stage.
        working: How its ranks hold weights.
        table: The layer plans.
    """

    costs: CostModel
    scheme: Scheme
    shares: tuple[int, ...]
    working: Working
    table: LayerTable

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
    def bytes(self) -> list[tuple[Floats, Floats]]:
        """For each stage the bytes of a micro-batch's activations, as slope and constant of its
        tokens: (bytes kept until its backward [plans, 2], bytes at each moment that may be the peak
        [plans, moments, 2])."""
        return [self._moments(stage) for stage in self.stages]

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

    def variants(self) -> Iterator[StageCosts]:
        """These costs, and the same for each split with one layer more or one less in the last
        stage."""
        yield self
        layers, last = self.costs.shape.layers, self.shares[-1]
        for shares in shares_of(layers, self.scheme.pipeline):
            if abs(shares[-1] - last) == 1:
                yield replace(self, shares=shares)

    @cached_property
    def least(self) -> tuple[Least, ...]:
        """Rows (a, b, c) that no pipeline of this scheme beats, whatever its split of the layers
        and order of micro-batches, in seconds of all stages together without messages. Either the
        last stage has many layers or another one has: there is one entry for each case. Its rows
        count all stages, or ``depth`` times that one stage, which is busy for no longer than the
        pipeline takes. The proof is in :mod:`headrace.planning.bounds`."""
        caps = np.array([variant.caps_at(1) for variant in self.variants()]).max(axis=0)
        fill_tokens = np.array([variant.in_flight for variant in self.variants()]).max(axis=0)
        fill_tokens = np.maximum(fill_tokens, 1.0)  # of what fits nowhere nothing is claimed
        table, ends, depth = self.table, self.costs.ends[self.scheme.width], self.scheme.pipeline
        both = ends.forward + ends.backward
        end = np.array([both.a, both.b, both.c])
        total = table.seconds[table.layers].sum(axis=1) + end  # of the whole model [plans, 3]
        # The layers of the one stage may all have the plan's quickest option. Which one that is
        # depends on the length, so there is a row for each pair of a plan and an option in it.
        plan_layers = [
            (row, number)
            for row, plan_options in enumerate(table.layers)
            for number in np.unique(plan_options).tolist()
        ]
        plan_of_row, option = np.array(plan_layers).T
        last_layers, other_layers = self._fullest(end)
        stage_rows = [
            depth * (last_layers * table.seconds[option] + end),
            depth * other_layers * table.seconds[option],
        ]
        alone_rows = _least_rows(total, caps)
        summed, summed_over_s = _dealt_rows(total, caps, fill_tokens, depth)
        found = list[Least]()
        for rows in stage_rows:
            one_stage, one_stage_over_s = _dealt_rows(
                rows, caps[plan_of_row], fill_tokens[plan_of_row], depth
            )
            found.append(
                Least(
                    width=self.scheme.width,
                    depth=depth,
                    alone=alone_rows,
                    dealt=(summed, one_stage),
                    over_s=(summed_over_s, one_stage_over_s),
                )
            )
        return tuple(found)

    def _fullest(self, end: Floats) -> tuple[int, int]:
        """Numbers of layers (x, y) such that in any split the last stage has at least x layers, or
        another stage at least y. Of all such pairs it is the one that gives the highest bound for
        short sequences: whose quicker case takes longest. ``end`` has the coefficients (a, b, c) of
        the head and embedding in the last stage."""
        layer_count, others = self.costs.shape.layers, self.scheme.pipeline - 1
        # The head's seconds per token, in layers of the quickest option.
        head_layers = float(end[1] / self.table.seconds[:, 1].min())
        # If the last stage has fewer than x layers, one of the others has its share of the rest.
        pairs = [
            (last, -(-(layer_count - last + 1) // others))
            for last in range(1, -(-layer_count // others) + 1)
        ]
        return max(pairs, key=lambda pair: min(pair[0] + head_layers, pair[1]))

    @property
    def in_flight(self) -> Floats:
        """For each plan [plans] the tokens of a micro-batch such that P of them, P being the number
        of stages, just fill the first stage's memory for activations with what they keep for their
        backwards."""
        held, _ = self._moments(self.stages[0])
        slope = len(self.stages) * held[:, 0]  # bytes for each token
        fill_tokens = np.full(len(slope), float(MOST_TOKENS))
        return np.divide(max(0, self.rooms[0]), slope, out=fill_tokens, where=slope > 0)

    def caps_at(self, at_once: int) -> list[int]:
        """For each plan the most tokens of a micro-batch such that every stage has memory for as
        many as it has in flight, at most ``at_once``."""
        table, depth = self.table, len(self.stages)
        cap_tokens = np.full(len(table.plans), float(MOST_TOKENS))
        for s, (stage, room) in enumerate(zip(self.stages, self.rooms, strict=True)):
            held, peaks = self._moments(stage)
            # Stage s holds up to depth - s micro-batches: one at its peak, what is kept of others.
            needs = (min(at_once, depth - s) - 1) * held[:, None] + peaks
            slope, free = needs[:, :, 0], room - needs[:, :, 1]
            fitting = np.where(
                slope > 0, free / np.where(slope > 0, slope, 1.0), float(MOST_TOKENS)
            )
            cap_tokens = np.minimum(cap_tokens, np.where(free < 0, 0.0, fitting).min(axis=1))
        return [floor(tokens) for tokens in cap_tokens.tolist()]

    def _moments(self, stage: Stage) -> tuple[Floats, Floats]:
        """Bytes of a micro-batch in a stage as lines, slope and constant of its tokens: those kept
        until its backward [plans, 2], and those at each moment that may be the peak [plans,
        moments, 2], one while each layer runs and in the last stage one while the head does. While
        a layer runs, it and all layers before it keep theirs. What the ends keep counts from the
        last stage's first layer on, which is never less than is there."""
        options = self.table.layers[:, stage.start : stage.stop]
        kept, passing = self.table.kept[options], self.table.passing[options]
        held = kept.cumsum(axis=1)
        if not stage.last:
            return held[:, -1], held + passing
        ends = self.costs.ends[self.scheme.width]
        end_kept, end_passing = _lines([ends.kept, ends.transient])
        kept[:, 0] += end_kept
        so_far = kept.cumsum(axis=1)
        moments = np.concatenate([so_far + passing, so_far[:, -1:] + end_passing], axis=1)
        return so_far[:, -1], moments

    def seconds(self, squares: Floats, tokens: Floats) -> Floats:
        """Seconds of micro-batches on the slowest stage by plan [micro-batches, plans], given the
        sums of their squared tokens and of their tokens, each [micro-batches]."""
        sums = np.stack([squares, tokens, np.ones(len(tokens))])
        seconds: Floats = (self.rows @ sums).max(axis=1)
        return seconds.T

    def needs(self, plan: int, tokens: int) -> int:
        """Bytes that the fullest stage lacks for micro-batches of ``tokens`` tokens, as many as are
        in flight, with the layers of plan number ``plan``; 0 or less where they fit."""
        depth, tokens_and_one = len(self.stages), np.array([float(tokens), 1.0])
        lacking = [
            (depth - s - 1) * float(kept_line[plan] @ tokens_and_one)
            + float((peak_lines[plan] @ tokens_and_one).max())
            - room
            for s, ((kept_line, peak_lines), room) in enumerate(
                zip(self.bytes, self.rooms, strict=True)
            )
        ]
        return -floor(-max(lacking))  # rounded up

    def fits(self, packs: Sequence[tuple[int, int]]) -> bool:
        """Whether micro-batches, given as (tokens, number of the layer plan) in their order, fit
        the memory of every stage: each forward beside the micro-batches in flight before it, and
        each backward beside those that come after it and are in flight then."""
        depth, number = len(self.stages), np.arange(len(packs))
        pack_tokens, plans = np.array(packs, dtype=np.int64).T
        tokens_and_one = np.stack([pack_tokens.astype(np.float64), np.ones(len(packs))])
        for s, ((kept_lines, peak_lines), room) in enumerate(
            zip(self.bytes, self.rooms, strict=True)
        ):
            kept = (kept_lines[plans].T * tokens_and_one).sum(axis=0)
            # What a micro-batch takes at its own peak beyond what it keeps.
            peak_extra = (peak_lines[plans] * tokens_and_one.T[:, None]).sum(axis=2).max(
                axis=1
            ) - kept
            kept_so_far = np.concatenate([[0.0], np.cumsum(kept)])
            beside = depth - s - 1  # micro-batches in flight besides its own
            in_forward = kept_so_far[number + 1] - kept_so_far[np.maximum(number - beside, 0)]
            in_backward = (
                kept_so_far[np.minimum(number + beside, len(packs) - 1) + 1] - kept_so_far[number]
            )
            if (np.maximum(in_forward, in_backward) + peak_extra > room + _ROUNDING_BYTES).any():
                return False
        return True


def _least_rows(rows: Floats, caps: Counts) -> Frontier:
    """A frontier of rows (a, b, c) [rows, 3], smallest capacity first; ``caps`` are the tokens that
    each holds, and rows that hold none are left out."""
    order = np.argsort(caps, kind="stable")
    order = order[caps[order] > 0]
    a, b, c = rows[order].T
    return _bare(a, b, c, tuple(caps[order].tolist()))


def _dealt_rows(
    rows: Floats, caps: Counts, fill_tokens: Floats, depth: int
) -> tuple[Frontier, float]:
    """(frontier of ``rows`` [rows, 3] whose constants are charged to tokens instead, seconds of one
    pipeline by which these charges may exceed the constants that are really paid).

    A token is charged g_j = (c_j + (P - 1) c) / (P cap_j), as :mod:`headrace.planning.bounds`
    explains, with P the ``depth``, c the least constant of all rows and cap_j the ``fill_tokens``
    of each row. ``caps`` are the tokens that a micro-batch of each row holds.
    """
    least_c = float(rows[:, 2].min())
    charged = rows.copy()
    charged[:, 1] += (rows[:, 2] + (depth - 1) * least_c) / depth / fill_tokens
    charged[:, 2] = 0.0
    return _least_rows(charged, caps), least_c * (depth - 1) / depth


def _bare(a: Floats, b: Floats, c: Floats, caps: tuple[int, ...]) -> Frontier:
    """A frontier without layer plans of the given coefficients and capacities in tokens, each
    [rows]."""
    layers = np.zeros((len(caps), 0), dtype=np.int64)
    return Frontier(options=(), a=a.copy(), b=b.copy(), c=c.copy(), caps=caps, layers=layers)


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
    """

    stages: int
    c: float
    cap: int
    util: int = 1
    pull_s: float = 0.0
    push_s: float = 0.0

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
        bubbles = self.stages - 1
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
