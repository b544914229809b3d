"""A priced scheme: what every source of costs gives a planner.

A scheme, how its weights are held, and a frontier: rows of seconds ``a sum(l^2) + b sum(l) + c`` of
a micro-batch on one stage, each with the tokens that it holds and, where the source knows one, its
layer plan. A published scheme has one row; a measured one has a row for every layer plan worth
keeping.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, exp, floor, inf, log, sqrt

import numpy as np
from numpy.typing import NDArray

from headrace.costs import CostModel, Linear
from headrace.costs.cost_model import (
    MOST_TOKENS,
    held_bytes,
    message_s,
    stage_gather,
)
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

_STEP = 1e-3
"""Seconds within this share of each other count as equal when plans are picked."""

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
        b: Seconds per token of each row, the constant's share included [rows].
        c: Seconds of the constant that a sequence bears whole [rows].
        rules: Whether each row is as quick as every later one for any sequence [rows].
        quickest: Numbers of the rows that are the quickest for some length if memory is no matter.
    """

    b: Floats
    c: Floats
    rules: NDArray[np.bool_]
    quickest: Counts


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Layer plans of one scheme, smallest capacity first; published costs have rows without plans.

    Attributes:
        options: Layer options of the plans.
        a: Seconds per squared token of each plan, forward and backward [plans].
        b: Seconds per token of each plan [plans].
        c: Seconds per micro-batch of each plan [plans].
        caps: Tokens that a micro-batch of each plan holds.
        layers: The option of every layer by its number [plans, layers].
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
        """Rows (a, b, c) of one capacity, without layer plans, as published costs have them."""
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
        """A frontier of one of the plans."""
        return Frontier(
            options=self.options,
            a=self.a[[row]],
            b=self.b[[row]],
            c=self.c[[row]],
            caps=(self.caps[row],),
            layers=self.layers[[row]],
        )

    def columns(self, first: int) -> Columns:
        """Columns a, b, c, c / cap and cap of the rows from ``first`` on, each [rows, 1] to meet
        the lengths of sequences."""
        a, b, c, c_per_token, caps = self._columns
        return a[first:], b[first:], c[first:], c_per_token[first:], caps[first:]

    @cached_property
    def quick(self) -> Columns:
        """The columns of the rows in :attr:`quickest`, each [rows, 1]."""
        a, b, c, share, caps = self._columns
        rows = self.quickest
        return a[rows], b[rows], c[rows], share[rows], caps[rows]

    @cached_property
    def _columns(self) -> Columns:
        """The columns of all rows, each [rows, 1]."""
        share = self.c / self.limits
        a, b, c, share, caps = (
            each[:, None] for each in (self.a, self.b, self.c, share, self.limits)
        )
        return a, b, c, share, caps

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
        """Whether each plan is at least as quick as every later one whatever the micro-batch."""
        return [bool(rule) for rule in _ruling(self.a, self.b, self.c)]

    @cached_property
    def limits(self) -> Floats:
        """``caps`` as an array of floats [rows], in tokens."""
        return np.array(self.caps, dtype=np.float64)

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """Three ways to charge a sequence of a pack for the constant: all of it, nothing, and by
        tokens, of which a pack holds at most the plan's capacity."""
        zero, spread = np.zeros_like(self.c), self.b + self.c / self.limits
        return tuple(
            Share(
                b=b,
                c=c,
                rules=_ruling(self.a, b, c),
                quickest=_quickest(np.column_stack([self.a, b, c])),
            )
            for b, c in ((self.b, self.c), (self.b, zero), (spread, zero))
        )

    @cached_property
    def quickest(self) -> Counts:
        """Plans that are the quickest for some sequence if memory is no matter, however it is
        charged."""
        return np.unique(np.concatenate([share.quickest for share in self.shares]))

    def best(self, squares: float, tokens: int) -> tuple[float, int] | None:
        """(seconds, number of the plan) of the quickest plan that holds a micro-batch of ``tokens``
        tokens whose squared lengths sum to ``squares``; None when not even the thriftiest does."""
        first = bisect_left(self.caps, tokens)
        if first == len(self.caps):
            return None
        if not self.rules[first]:
            first += int(self._table[first:].dot(np.array((squares, tokens, 1.0))).argmin())
        a, b, c = self.rows[first]
        return a * squares + b * tokens + c, first

    def nearly_best(self, squares: float, tokens: int) -> tuple[float, int] | None:
        """:meth:`best`, but quicker to answer: micro-batches of about the same mean length and
        tokens that the same plans hold share an answer."""
        first = bisect_left(self.caps, tokens)
        if first == len(self.caps):
            return None
        if not self.rules[first]:
            key = int(log(squares / tokens) * _LIKE), int(log(tokens) * _LIKE), first
            row = self._nearly.get(key)
            if row is None:
                row = first + int(self._table[first:].dot(_alike(*key[:2])).argmin())
                self._nearly[key] = row
            first = row
        a, b, c = self.rows[first]
        return a * squares + b * tokens + c, first

    def quickest_cap(self, squares: float, tokens: int) -> int:
        """Tokens that the plan holds which would be quickest, or close to it, for a micro-batch of
        ``tokens`` tokens and ``squares`` squared ones if memory were no matter."""
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
    """Which of many plans to keep, smallest capacity first, by their coefficients ``seconds``
    [plans, 3] and capacities; of equal ones the first."""
    found = np.flatnonzero(caps >= 1)
    if len(found) > _EXACT:
        found = found[_thinned(seconds[found], caps[found])]
    found = found[_unbeaten(seconds[found], caps[found])]
    order = np.lexsort((seconds[found].sum(axis=1), caps[found]))
    kept: Counts = found[order].astype(np.int64)
    return kept


def _alike(mean: int, tokens: int) -> Floats:
    """(sum of squared tokens, sum of tokens, 1) in the middle of the micro-batches that are alike,
    given the rounded logarithms of their mean length and tokens."""
    length, total = exp((mean + 0.5) / _LIKE), exp((tokens + 0.5) / _LIKE)
    return np.array((length * total, total, 1.0))


def _ruling(a: Floats, b: Floats, c: Floats) -> NDArray[np.bool_]:
    """Which rows no later row beats in any coefficient."""
    table = np.column_stack([a, b, c])
    least = np.minimum.accumulate(table[::-1], axis=0)[::-1]
    ruling: NDArray[np.bool_] = np.logical_and.reduce(table <= least, axis=1)
    return ruling


def _unbeaten(seconds: Floats, caps: Floats) -> Counts:
    """Plans that no other beats in every coefficient and in capacity."""
    table = np.column_stack([seconds, -caps])
    no_worse = np.ones((len(table), len(table)), dtype=np.bool_)
    for column in table.T:
        no_worse &= column[:, None] <= column[None, :]
    first = np.arange(len(table))
    beats = no_worse & (~no_worse.T | (first[:, None] < first[None, :]))
    unbeaten: Counts = np.flatnonzero(~beats.any(axis=0)).astype(np.int64)
    return unbeaten


def _quickest(table: Floats) -> Counts:
    """Indices of the rows that no other row beats in every column, of equal ones the first; quick
    where these are few."""
    left, found = np.argsort(table.sum(axis=1), kind="stable"), list[int]()
    while len(left):
        best = int(left[0])
        found.append(best)
        left = left[(table[left] < table[best]).any(axis=1)]
    return np.array(sorted(found), dtype=np.int64)


def _thinned(seconds: Floats, caps: Floats) -> Counts:
    """Indices of plans to keep, of many: for each shape of pack the quickest among those that hold
    as much, where they differ by a step of seconds."""
    falling = np.argsort(-caps, kind="stable")
    packs = np.array([(length, 1.0, 1.0 / tokens) for length, tokens in _PACKS])
    per_token = packs @ seconds[falling].T
    least = np.minimum.accumulate(per_token, axis=1)
    better = np.ones(per_token.shape, dtype=np.bool_)
    better[:, 1:] = per_token[:, 1:] < least[:, :-1]
    kept = np.zeros(len(falling), dtype=np.bool_)
    for row, here in zip(per_token, better, strict=True):
        at = np.flatnonzero(here)
        steps = np.floor(np.log(np.maximum(row[at], 1e-300)) / _STEP)
        kept[at[np.append(True, steps[1:] != steps[:-1])]] = True
        kept[at[-1]] = True
    thinned: Counts = np.sort(falling[kept]).astype(np.int64)
    return thinned


Row = tuple[float, float, float]
"""Seconds ``a sum(l^2) + b sum(l) + c`` of a micro-batch, forward and backward."""


def shares_of(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Layers of each stage: as even as can be, then with fewer and fewer for the last one."""
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
        layers: The option of every layer by its number [plans, layers].
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
        number: dict[LayerOption, int] = {}
        layers = [
            [at for o, count in plan.counts for at in [number.setdefault(o, len(number))] * count]
            for plan in plans
        ]
        listed = [costs.option(scheme.width, option) for option in number]
        seconds = list[Row]()
        for option, cost in zip(number, listed, strict=True):
            both = cost.forward + cost.backward
            gathered = sum(stage_gather(costs, scheme, option, working))
            seconds.append((both.a, both.b, both.c + gathered))
        return cls(
            plans=tuple(plans),
            options=tuple(number),
            layers=np.array(layers, dtype=np.int64),
            seconds=np.array(seconds),
            kept=_lines([cost.kept for cost in listed]),
            passing=_lines([cost.transient for cost in listed]),
        )

    def only(self, numbers: Counts) -> LayerTable:
        """The table with the layer plans of the given numbers only."""
        return replace(
            self,
            plans=tuple(self.plans[i] for i in numbers.tolist()),
            layers=self.layers[numbers],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Least:
    """The least that micro-batches take on stages of a width, in seconds of all stages together.

    Attributes:
        width: Ranks of a stage.
        depth: Number of stages.
        alone: Rows for a sequence in a micro-batch of its own.
        dealt: Rows for a sequence that bears its share of the constants, one way or another to
            count it: what a batch takes by any of them is a bound.
        over_s: Seconds by which the constants of each of ``dealt`` may be too high in one pipeline.
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
        shares: Layers of each stage.
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
        """Bytes for activations on a rank of each stage."""
        free = self.costs.capacity_bytes - self.costs.state_bytes
        return tuple(free - held for held in held_bytes(self.costs, self.pipeline, self.working))

    @cached_property
    def rows(self) -> Floats:
        """Coefficients (a, b, c) of the seconds of a micro-batch of each plan on each stage,
        messages included [plans, stages, 3]."""
        width, table = self.scheme.width, self.table
        starts = [stage.start for stage in self.stages]
        rows: Floats = np.add.reduceat(table.seconds[table.layers], starts, axis=1)
        ends = self.costs.ends[width]
        both = ends.forward + ends.backward
        rows[:, -1] += (both.a, both.b, both.c)
        if len(self.stages) > 1:
            # Activations to the next stage and gradients back, or from and to the one before.
            rows[:, :, 1] += 2 * message_s(self.costs, 1) / width
        return rows

    @cached_property
    def bytes(self) -> list[tuple[Floats, Floats]]:
        """For each stage slope and constant of the bytes that it keeps of a micro-batch by plan
        [plans, 2], and of those at each moment that may be its peak [plans, moments, 2]."""
        return [self._moments(stage) for stage in self.stages]

    @cached_property
    def slowest(self) -> list[Row]:
        """For each plan coefficients (a, b, c) of seconds that no stage exceeds."""
        return [(a, b, c) for a, b, c in self.rows.max(axis=1).tolist()]

    @property
    def pace_s(self) -> float:
        """Seconds per token of short sequences on the slowest stage, by the quickest plan."""
        return float(self.rows[:, :, 1].max(axis=1).min())

    @cached_property
    def caps(self) -> list[int]:
        """For each plan the most tokens of a micro-batch of which as many fit as are in flight."""
        return self.caps_at(len(self.stages))

    def variants(self) -> Iterator[StageCosts]:
        """These shares of the layers, and others with a layer more or less in the last stage."""
        yield self
        layers, last = self.costs.shape.layers, self.shares[-1]
        for shares in shares_of(layers, self.scheme.pipeline):
            if abs(shares[-1] - last) == 1:
                yield replace(self, shares=shares)

    @cached_property
    def least(self) -> tuple[Least, ...]:
        """Rows that no pipeline beats, whatever its shares of the layers and the order of its
        micro-batches, in seconds of all stages together without messages. A pipeline is one of two
        kinds: many layers are in its last stage, or many in another one; each has its rows, which
        count all stages or that one alone, as if the others took as long."""
        caps = np.array([variant.caps_at(1) for variant in self.variants()]).max(axis=0)
        full = np.array([variant.in_flight for variant in self.variants()]).max(axis=0)
        full = np.maximum(full, 1.0)  # of what fits nowhere nothing is claimed
        table, ends, depth = self.table, self.costs.ends[self.scheme.width], self.scheme.pipeline
        both = ends.forward + ends.backward
        end = np.array([both.a, both.b, both.c])
        total = table.seconds[table.layers].sum(axis=1) + end
        # A stage may have the quickest of a plan's layers.
        pairs = [(r, o) for r, own in enumerate(table.layers) for o in np.unique(own).tolist()]
        plan, layer = np.array(pairs).T
        last, other = self._fullest(end)
        kinds = [depth * (last * table.seconds[layer] + end), depth * other * table.seconds[layer]]
        alone = _least_rows(total, caps)
        counted, over_s = _dealt_rows(total, caps, full, depth)
        found = list[Least]()
        for rows in kinds:
            dealt, own_over_s = _dealt_rows(rows, caps[plan], full[plan], depth)
            found.append(
                Least(
                    width=self.scheme.width,
                    depth=depth,
                    alone=alone,
                    dealt=(counted, dealt),
                    over_s=(over_s, own_over_s),
                )
            )
        return tuple(found)

    def _fullest(self, end: Floats) -> tuple[int, int]:
        """(x, y) such that the last stage has at least x layers or another one at least y, chosen
        so that either takes short sequences long; ``end`` are the coefficients of what the last
        stage has besides."""
        layers, others = self.costs.shape.layers, self.scheme.pipeline - 1
        head = float(end[1] / self.table.seconds[:, 1].min())
        pairs = [(x, -(-(layers - x + 1) // others)) for x in range(1, -(-layers // others) + 1)]
        return max(pairs, key=lambda pair: min(pair[0] + head, pair[1]))

    @property
    def in_flight(self) -> Floats:
        """Tokens of each of as many micro-batches as there are stages, if they alone filled the
        first stage's memory [plans]."""
        held, _ = self._moments(self.stages[0])
        slope = len(self.stages) * held[:, 0]
        most = np.full(len(slope), float(MOST_TOKENS))
        return np.divide(max(0, self.rooms[0]), slope, out=most, where=slope > 0)

    def caps_at(self, at_once: int) -> list[int]:
        """For each plan the most tokens of a micro-batch of which up to ``at_once`` are in flight
        and fit every stage."""
        table, depth = self.table, len(self.stages)
        most = np.full(len(table.plans), float(MOST_TOKENS))
        for s, (stage, room) in enumerate(zip(self.stages, self.rooms, strict=True)):
            held, peaks = self._moments(stage)
            lines = (min(at_once, depth - s) - 1) * held[:, None] + peaks
            slope, free = lines[:, :, 0], room - lines[:, :, 1]
            fits = np.where(slope > 0, free / np.where(slope > 0, slope, 1.0), float(MOST_TOKENS))
            most = np.minimum(most, np.where(free < 0, 0.0, fits).min(axis=1))
        return [floor(tokens) for tokens in most.tolist()]

    def _moments(self, stage: Stage) -> tuple[Floats, Floats]:
        """Slopes and constants of the bytes that a stage keeps of a micro-batch [plans, 2], and of
        those at each moment that may be its peak [plans, moments, 2]."""
        chosen = self.table.layers[:, stage.start : stage.stop]
        kept, passing = self.table.kept[chosen], self.table.passing[chosen]
        held = kept.cumsum(axis=1)
        if not stage.last:
            return held[:, -1], held + passing
        ends = self.costs.ends[self.scheme.width]
        first, head = _lines([ends.kept, ends.transient])
        kept[:, 0] += first
        so_far = kept.cumsum(axis=1)
        return held[:, -1] + first, np.concatenate(
            [so_far + passing, so_far[:, -1:] + head], axis=1
        )

    def seconds(self, squares: Floats, tokens: Floats) -> Floats:
        """Seconds of micro-batches on the slowest stage by plan [micro-batches, plans], given the
        sums of their squared tokens and of their tokens, each [micro-batches]."""
        sums = np.stack([squares, tokens, np.ones(len(tokens))])
        each: Floats = (self.rows @ sums).max(axis=1)
        return each.T

    def needs(self, plan: int, tokens: int) -> int:
        """Bytes that the fullest stage lacks for micro-batches of ``tokens`` tokens with the layers
        of a plan, as many as are in flight; 0 or less where they fit."""
        depth, own = len(self.stages), np.array([float(tokens), 1.0])
        lacks = [
            (depth - s - 1) * float(kept[plan] @ own) + float((peaks[plan] @ own).max()) - room
            for s, ((kept, peaks), room) in enumerate(zip(self.bytes, self.rooms, strict=True))
        ]
        return -floor(-max(lacks))

    def fits(self, packs: Sequence[tuple[int, int]]) -> bool:
        """Whether micro-batches, as (tokens, plan) in their order, fit the memory of every stage,
        each forward beside those in flight and each backward beside those still behind it."""
        depth, at = len(self.stages), np.arange(len(packs))
        tokens, plans = np.array(packs, dtype=np.int64).T
        values = np.stack([tokens.astype(np.float64), np.ones(len(packs))])
        for s, ((held, peaks), room) in enumerate(zip(self.bytes, self.rooms, strict=True)):
            kept = (held[plans].T * values).sum(axis=0)
            over = (peaks[plans] * values.T[:, None]).sum(axis=2).max(axis=1) - kept
            sums = np.concatenate([[0.0], np.cumsum(kept)])
            beside = depth - s - 1
            before = sums[at + 1] - sums[np.maximum(at - beside, 0)]
            behind = sums[np.minimum(at + beside, len(packs) - 1) + 1] - sums[at]
            if (np.maximum(before, behind) + over > room + _ROUNDING_BYTES).any():
                return False
        return True


def _least_rows(rows: Floats, caps: Counts) -> Frontier:
    """A frontier of rows (a, b, c) that hold something, each with the tokens that it holds."""
    order = np.argsort(caps, kind="stable")
    order = order[caps[order] > 0]
    a, b, c = rows[order].T
    return _bare(a, b, c, tuple(caps[order].tolist()))


def _dealt_rows(rows: Floats, caps: Counts, full: Floats, depth: int) -> tuple[Frontier, float]:
    """The same with each token's share of the constants, if ``depth`` micro-batches of ``full``
    tokens fit at once, and the seconds by which these may be too high in a pipeline."""
    least_c = float(rows[:, 2].min())
    dealt = rows.copy()
    dealt[:, 1] += least_c / full
    dealt[:, 2] = 0.0
    return _least_rows(dealt, caps), least_c * (depth - 1) / depth


def _bare(a: Floats, b: Floats, c: Floats, caps: tuple[int, ...]) -> Frontier:
    """A frontier without layer plans: coefficients and capacities, each [rows]."""
    layers = np.zeros((len(caps), 0), dtype=np.int64)
    return Frontier(options=(), a=a.copy(), b=b.copy(), c=c.copy(), caps=caps, layers=layers)


_ROUNDING_BYTES = 1e-3
"""Bytes that are forgiven as rounding of sums."""


def _lines(lines: Sequence[Linear]) -> Floats:
    """Slopes and constants of some lines [lines, 2]."""
    return np.array([(line.slope, line.constant) for line in lines])


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A pipeline by one row of its scheme.

    Attributes:
        stages: Number of stages.
        c: Seconds of the constant of a micro-batch on each stage.
        cap: Tokens that a micro-batch holds.
        util: Tokens from which on a micro-batch keeps the devices busy.
    """

    stages: int
    c: float
    cap: int
    util: int = 1

    def count(self, work_s: float, tokens: float, longest_s: float) -> int:
        """How many micro-batches to expect for sequences of ``work_s`` seconds together, the
        longest of them ``longest_s``.

        One stage: the fewest that hold the tokens. More: with V alike micro-batches a pipeline
        takes work + c V + (P - 1) max(longest, work / V), least at V = sqrt(work (P - 1) / c), or
        where the longest sequence fills a micro-batch alone. No more than keep the devices busy.
        """
        least = max(1, ceil(tokens / self.cap))
        if self.stages == 1 or work_s <= 0:
            return least
        even = work_s / longest_s if longest_s > 0 else 1.0
        if self.c > 0:
            even = min(even, sqrt(work_s * (self.stages - 1) / self.c))
        most = max(least, int(tokens // self.util))
        floor = max(least, int(even))
        if floor >= most:
            return most
        bubbles = self.stages - 1
        low = self.c * floor + bubbles * max(longest_s, work_s / floor)
        high = self.c * (floor + 1) + bubbles * max(longest_s, work_s / (floor + 1))
        return floor if low <= high else floor + 1

    def usable_s(self, limit_s: float, longest_s: float) -> float:
        """Seconds of work on one stage that a pipeline ends within ``limit_s`` seconds, if its
        longest sequence takes ``longest_s``."""
        return self.usable(limit_s, longest_s)[0]

    def usable(self, limit_s: float, longest_s: float) -> tuple[float, int]:
        """Seconds of work on one stage that a pipeline ends within ``limit_s`` seconds, if its
        longest sequence takes ``longest_s``, and the tokens of the V micro-batches whose constants
        are paid then.

        With V micro-batches, work + c V + (P - 1) (max(longest, work / V) + c) <= limit. More of
        them help until the longest sequence fills one, or their constants cost more than the
        bubbles.
        """
        if self.stages == 1:
            return limit_s - self.c, self.cap
        bubbles = self.stages - 1
        rest_s = limit_s - bubbles * self.c
        if rest_s <= 0 or longest_s == inf:  # no micro-batch holds such a sequence
            return 0.0, 0
        count = (rest_s - bubbles * longest_s) / (longest_s + self.c) if longest_s else rest_s
        if self.c > 0:
            count = min(count, sqrt(limit_s * bubbles / self.c) - bubbles)
        v = max(int(count + 0.5), 1)
        by_count = (rest_s - self.c * v) * v / (v + bubbles)
        return min(by_count, rest_s - self.c * v - bubbles * longest_s), v * self.cap


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
        """Whether all of ``devices`` hold the weights together, a part each."""
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
