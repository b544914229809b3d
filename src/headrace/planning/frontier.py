"""The layer plans of one group size: as many as are worth keeping of all that were tried.

The seconds of a pack depend on it through sum(l^2) and sum(l), and the capacity of a layer plan
bounds sum(l). So the plans together are quadratics, each with the most tokens that its layers
hold. Up to three hundred of them are reduced to those that no other beats in every coefficient and
in capacity, which loses nothing. More are *thinned*: for packs of several shapes those are kept
that are quickest among all that hold as much, in steps of a thousandth of the seconds. Of packs
of those shapes the quickest kept is thus within a thousandth of the quickest tried, and what
holds the most tokens is always kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from headrace.spec import LayerOption, LayerPlan

__all__ = ["Columns", "Frontier", "Share", "worth_keeping"]

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

_EXACT = 300
"""As many plans are compared with one another."""

_STEP = 1e-3

_LIKE = 8
"""Mean lengths, and tokens, within a factor of exp(1 / 8) are alike."""

_PACKS = [(length, length * many) for length in (64, 1024, 16_384, 262_144) for many in (1, 64)]
"""(tokens of a sequence, tokens of a pack of such sequences) for which plans are thinned."""


Columns = tuple[Floats, Floats, Floats, Floats, Floats]
"""a, b, c, c for each token and tokens of some plans [plans, 1]."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """Coefficients of the plans of a frontier when a sequence bears some of the constant; which
    plans rule all later ones, and which are quickest for some sequence if memory is no matter."""

    b: Floats
    c: Floats
    rules: NDArray[np.bool_]
    quickest: Counts


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Layer plans of one group size, smallest capacity first.

    Plan i takes ``a[i] sum(l^2) + b[i] sum(l) + c[i]`` seconds, forward and backward, and holds
    ``caps[i]`` tokens; its layer j is ``options[layers[i, j]]``.
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

    def columns(self, first: int) -> Columns:
        """The columns of the plans from ``first`` on."""
        a, b, c, share, caps = self._columns
        return a[first:], b[first:], c[first:], share[first:], caps[first:]

    @cached_property
    def quick(self) -> Columns:
        """The columns of :attr:`quickest`."""
        a, b, c, share, caps = self._columns
        some = self.quickest
        return a[some], b[some], c[some], share[some], caps[some]

    @cached_property
    def _columns(self) -> Columns:
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
        """(a, b, c) of every plan."""
        return list(zip(self.a.tolist(), self.b.tolist(), self.c.tolist(), strict=True))

    @cached_property
    def least(self) -> tuple[float, float, float]:
        """The least a, b and c of all plans."""
        return float(self.a.min()), float(self.b.min()), float(self.c.min())

    @cached_property
    def _table(self) -> Floats:
        return np.column_stack([self.a, self.b, self.c])

    @cached_property
    def rules(self) -> list[bool]:
        """Whether plan i is at least as quick as every later one whatever the pack."""
        return [bool(rule) for rule in _ruling(self.a, self.b, self.c)]

    @cached_property
    def limits(self) -> Floats:
        """``caps`` as an array."""
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
        """(seconds, plan) of the quickest plan that holds a pack of sum(l^2) ``squares`` and
        sum(l) ``tokens``; None when not even the thriftiest does."""
        first = bisect_left(self.caps, tokens)
        if first == len(self.caps):
            return None
        if not self.rules[first]:
            first += int(self._table[first:].dot(np.array((squares, tokens, 1.0))).argmin())
        a, b, c = self.rows[first]
        return a * squares + b * tokens + c, first

    def nearly_best(self, squares: float, tokens: int) -> tuple[float, int] | None:
        """:meth:`best` as searches ask it, many times: of packs of about the same mean length and
        tokens that the same plans hold, one plan is taken to be the quickest."""
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
        """Capacity of the plan that would be quickest, or close to it, for a pack if memory were no
        matter."""
        if self.rules[0]:
            return self.caps[0]
        key = int(log(squares / tokens) * _LIKE), int(log(tokens) * _LIKE)
        if key not in self._quickest:
            self._quickest[key] = self.caps[int(self._table.dot(_alike(*key)).argmin())]
        return self._quickest[key]

    def layer_plan(self, index: int) -> LayerPlan:
        """The layer plan of one entry."""
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
    """(sum of squared lengths, sum of lengths, 1) in the middle of packs that are alike."""
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
    """Rows that no other beats in every column, where these are few; of equal ones the first."""
    left, found = np.argsort(table.sum(axis=1), kind="stable"), list[int]()
    while len(left):
        best = int(left[0])
        found.append(best)
        left = left[(table[left] < table[best]).any(axis=1)]
    return np.array(sorted(found), dtype=np.int64)


def _thinned(seconds: Floats, caps: Floats) -> Counts:
    """For every shape of pack the quickest of all that hold as much, in steps of seconds."""
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
