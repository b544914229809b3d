"""Mixtures: how many layers take which of at most three options, and what they then hold.

[Note: what is tried] First the options go that another beats in everything: swapping the better
one in never takes longer nor more memory. Of what is left all single options are tried, and pairs
and triples with all counts where that makes no more than six thousand: then nothing is missing but
mixtures of four. Else they are tried with counts from a geometric row that begins with 1 (near the
memory's end single layers matter), triples only of options of which pairs are worth keeping, and
those that turned out worth keeping with all counts. Ten times as many bring a pack
0.0002 % on average, 0.1 % at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product
from math import comb

import numpy as np
from numpy.typing import NDArray

from headrace.costs import CostModel, Linear
from headrace.costs.cost_model import MOST_TOKENS
from headrace.planning.priced import Frontier, worth_keeping
from headrace.spec import LayerOption
from headrace.spec.plan import Working

__all__ = ["MOST_TRIED", "Table", "mixed_frontier"]

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

MOST_TRIED = 6_000
"""Layer plans that are tried, at most."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """What layer options cost on one group size, as arrays with a last row for the ends, embedding
    and head.

    Attributes:
        options: The options.
        seconds: Coefficients (a, b, c) of the seconds of one layer's forward and backward
            [options + 1, 3].
        kept: Slope and constant of the bytes that a layer keeps for its backward
            [options + 1, 2].
        passing: Slope and constant of the bytes that it needs in passing [options + 1, 2].
        room: Bytes of a rank that are left for activations.
    """

    options: tuple[LayerOption, ...]
    seconds: Floats
    kept: Floats
    passing: Floats
    room: int

    @classmethod
    def of(
        cls, costs: CostModel, p: int, working: Working, options: Sequence[LayerOption], room: int
    ) -> Table:
        """The table of some options on ``p`` ranks that hold weights as ``working`` says, with
        ``room`` bytes left for activations."""
        layers = [*(costs.option(p, option) for option in options), costs.ends[p]]
        gathers = [*(sum(costs.gather_seconds(p, option, working)) for option in options), 0.0]
        both = [layer.forward + layer.backward for layer in layers]
        rows = [(x.a, x.b, x.c + gather) for x, gather in zip(both, gathers, strict=True)]
        return cls(
            options=tuple(options),
            seconds=np.array(rows, dtype=np.float64) * costs.scale,
            kept=_lines([layer.kept for layer in layers]),
            passing=_lines([layer.transient for layer in layers]),
            room=room,
        )

    def pruned(self) -> Table:
        """The table without the options that another beats in everything, the largest transient
        first."""
        table = np.hstack([self.seconds, self.kept, self.passing])[:-1]
        no_worse = (table[:, None] <= table[None, :]).all(axis=2)
        first = np.arange(len(table))
        beats = no_worse & (~no_worse.T | (first[:, None] < first[None, :]))
        left = np.flatnonzero(~beats.any(axis=0))
        left = left[np.lexsort((-self.passing[left, 1], -self.passing[left, 0]))]
        rows = [*left.tolist(), len(self.options)]
        return Table(
            options=tuple(self.options[i] for i in left),
            seconds=self.seconds[rows],
            kept=self.kept[rows],
            passing=self.passing[rows],
            room=self.room,
        )

    def tokens(self, slope: Floats, constant: Floats) -> Floats:
        """Tokens of which ``slope * tokens + constant`` bytes fit; a thousandth of a byte is
        rounding. All arrays are [plans]."""
        free = self.room - constant
        per_token = np.where(slope > 0, slope, 1.0)
        fitting = np.where(slope > 0, (free + 1e-3) / per_token, float(MOST_TOKENS))
        return np.where(free < 0, 0.0, np.minimum(fitting, float(MOST_TOKENS)))


@dataclass(frozen=True, kw_only=True)
class _Mixtures:
    """Layer plans by counts of options.

    Attributes:
        chosen: Numbers of the options of each plan [plans, options of a plan], in the order of the
            layers.
        counts: How many layers take each of them [plans, options of a plan].
        seconds: Coefficients (a, b, c) of each plan [plans, 3].
        caps: Tokens that each plan holds [plans].
    """

    chosen: Counts
    counts: Counts
    seconds: Floats
    caps: Floats


def mixed_frontier(table: Table, layers: int) -> Frontier:
    """The layer plans of ``layers`` layers that mix at most three options of a table."""
    table = table.pruned()
    options = len(table.options)
    tried = list[_Mixtures]()
    for size in range(1, min(3, options, layers) + 1):
        ways, among = comb(layers - 1, size - 1), range(options)
        if size > 2 and comb(options, size) * ways > MOST_TRIED:
            among = np.unique(_worth_keeping(tried)).tolist()
        subsets = _subsets(among, size)
        if size > 1 and len(subsets) * ways > MOST_TRIED:
            coarse = _of_all(table, subsets, _coarse(layers, size, len(subsets)))
            subsets = _promising([*tried, coarse], layers)
            tried.append(coarse)
        tried.append(_of_all(table, subsets, _compositions(layers, size)))
    seconds = np.vstack([mixtures.seconds for mixtures in tried])
    caps = np.concatenate([mixtures.caps for mixtures in tried])
    kept = worth_keeping(seconds, caps)
    a, b, c = seconds[kept].T
    return Frontier(
        options=table.options,
        a=a.copy(),
        b=b.copy(),
        c=c.copy(),
        caps=tuple(int(cap) for cap in caps[kept]),
        layers=_layers(tried, kept, layers),
    )


def _lines(lines: Sequence[Linear]) -> Floats:
    """Slopes and constants of some lines [lines, 2]."""
    return np.array([(line.slope, line.constant) for line in lines], dtype=np.float64)


def _subsets(options: Iterable[int], size: int) -> Counts:
    """All subsets of ``size`` options [subsets, size]."""
    return np.array(list(combinations(options, size)), dtype=np.int64).reshape(-1, size)


def _compositions(total: int, parts: int) -> Counts:
    """All rows of ``parts`` counts >= 1 that sum to ``total`` [rows, parts]."""
    before = list(product(range(1, total + 1), repeat=parts - 1))
    grid = np.array(before, dtype=np.int64).reshape(len(before), parts - 1)
    last = total - grid.sum(axis=1)
    return np.column_stack([grid, last])[last >= 1]


def _coarse(total: int, parts: int, subsets: int) -> Counts:
    """Rows of ``parts`` counts that sum to ``total`` [rows, parts], all but one of each row from a
    geometric series that is as fine as :data:`MOST_TRIED` mixtures of ``subsets`` subsets allow."""
    found = _of_row(total, parts, (1, max(1, total - parts + 1)))
    for marks in range(3, total):
        row = np.geomspace(1, total - parts + 1, marks).round().astype(int).tolist()
        finer = _of_row(total, parts, row)
        if len(finer) * subsets > MOST_TRIED:
            break
        found = finer
    return np.array(found, dtype=np.int64)


def _of_row(total: int, parts: int, row: Sequence[int]) -> list[tuple[int, ...]]:
    """All rows of ``parts`` counts that sum to ``total``, all but one of each from ``row``."""
    summing = [
        (*counts, total - sum(counts))
        for counts in product(set(row), repeat=parts - 1)
        if sum(counts) < total
    ]
    return sorted({order for counts in summing for order in permutations(counts)})


def _of_all(table: Table, subsets: Counts, counts: Counts) -> _Mixtures:
    """The mixtures of every subset of options [subsets, options of a plan] with every row of
    ``counts``, in the order of layers that holds the most tokens."""
    chosen, counts = np.repeat(subsets, len(counts), axis=0), np.tile(counts, (len(subsets), 1))
    seconds = np.tile(table.seconds[-1], (len(chosen), 1))
    for o, number in zip(chosen.T, counts.T, strict=True):
        seconds += table.seconds[o] * number[:, None]
    caps = _caps(table, chosen, counts)
    # Options stand with the larger transient first. Where that depends on the tokens, as one has
    # the larger slope and the other the larger constant, other orders may hold more.
    passing = table.passing[chosen, 1]
    unclear = np.flatnonzero((np.diff(passing, axis=1) > 0).any(axis=1))
    if len(unclear):
        first = chosen[unclear].copy(), counts[unclear].copy()
        for order in list(permutations(range(chosen.shape[1])))[1:]:
            other = first[0][:, order], first[1][:, order]
            here = _caps(table, *other)
            better = here > caps[unclear]
            rows = unclear[better]
            chosen[rows], counts[rows], caps[rows] = (
                other[0][better],
                other[1][better],
                here[better],
            )
    return _Mixtures(chosen=chosen, counts=counts, seconds=seconds, caps=caps)


def _caps(table: Table, chosen: Counts, counts: Counts) -> Floats:
    """Tokens that each mixture holds [plans] when its options, ``chosen`` with ``counts`` layers
    each, stand in the order of the columns."""
    slope = np.full(len(chosen), table.kept[-1, 0])
    constant = np.full(len(chosen), table.kept[-1, 1])
    most = np.full(len(chosen), float(MOST_TOKENS))
    for o, number in zip(chosen.T, counts.T, strict=True):
        slope = slope + number * table.kept[o, 0]
        constant = constant + number * table.kept[o, 1]
        here = table.tokens(slope + table.passing[o, 0], constant + table.passing[o, 1])
        most = np.minimum(most, here)
    last = table.tokens(slope + table.passing[-1, 0], constant + table.passing[-1, 1])
    return np.floor(np.minimum(most, last))


def _promising(tried: Sequence[_Mixtures], layers: int) -> Counts:
    """The subsets of options that the last mixtures worth keeping use most often, as many as can be
    tried with all counts."""
    found, often = np.unique(np.sort(_worth_keeping(tried), axis=1), axis=0, return_counts=True)
    most = max(1, MOST_TRIED // comb(layers - 1, found.shape[1] - 1))
    return found[np.argsort(-often, kind="stable")[:most]]


def _worth_keeping(tried: Sequence[_Mixtures]) -> Counts:
    """The options of those of the last mixtures that are worth keeping [kept, options]."""
    kept = worth_keeping(
        np.vstack([mixtures.seconds for mixtures in tried]),
        np.concatenate([mixtures.caps for mixtures in tried]),
    )
    before = sum(len(mixtures.caps) for mixtures in tried[:-1])
    return tried[-1].chosen[kept[kept >= before] - before]


def _layers(tried: Sequence[_Mixtures], kept: Counts, layers: int) -> Counts:
    """The option of every layer [kept, layers]."""
    rows = np.zeros((len(kept), layers), dtype=np.int64)
    start = 0
    for mixtures in tried:
        inside = np.flatnonzero((kept >= start) & (kept < start + len(mixtures.caps)))
        for at in inside:
            row = kept[at] - start
            rows[at] = np.repeat(mixtures.chosen[row], mixtures.counts[row])
        start += len(mixtures.caps)
    return rows
