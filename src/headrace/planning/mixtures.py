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
        kept: Slope and constant of the bytes that a layer keeps for its backward, as lines in the
            tokens of a micro-batch [options + 1, 2].
        passing: Slope and constant of the transient bytes that it needs while it runs
            [options + 1, 2].
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
        """The table of some options on groups of ``p`` ranks that hold weights as ``working`` says,
        with ``room`` bytes of a rank left for activations. Gathering sharded weights counts to a
        layer's constant c."""
        layers = [*(costs.option(p, option) for option in options), costs.ends[p]]
        gathers = [*(sum(costs.gather_seconds(p, option, working)) for option in options), 0.0]
        both = [layer.forward + layer.backward for layer in layers]
        coefficients = [
            (line.a, line.b, line.c + gather) for line, gather in zip(both, gathers, strict=True)
        ]
        return cls(
            options=tuple(options),
            seconds=np.array(coefficients, dtype=np.float64) * costs.scale,
            kept=_lines([layer.kept for layer in layers]),
            passing=_lines([layer.transient for layer in layers]),
            room=room,
        )

    def pruned(self) -> Table:
        """The table without the options that another beats in seconds, kept bytes and transient
        bytes; of equal options the first stays. They are sorted by transient bytes, the largest
        first."""
        costs = np.hstack([self.seconds, self.kept, self.passing])[:-1]  # without the ends
        no_worse = (costs[:, None] <= costs[None, :]).all(axis=2)  # the first than the second
        number = np.arange(len(costs))  # of equal options the earlier beats the later
        beats = no_worse & (~no_worse.T | (number[:, None] < number[None, :]))
        unbeaten = np.flatnonzero(~beats.any(axis=0))
        unbeaten = unbeaten[np.lexsort((-self.passing[unbeaten, 1], -self.passing[unbeaten, 0]))]
        rows = [*unbeaten.tolist(), len(self.options)]
        return Table(
            options=tuple(self.options[i] for i in unbeaten),
            seconds=self.seconds[rows],
            kept=self.kept[rows],
            passing=self.passing[rows],
            room=self.room,
        )

    def tokens(self, slope: Floats, constant: Floats) -> Floats:
        """For each plan the most tokens for which ``slope * tokens + constant`` bytes fit into the
        table's room, give or take a thousandth of a byte for rounding. All arrays are [plans]."""
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
    """The frontier of layer plans of ``layers`` layers that mix at most three options of a table;
    which mixtures are tried is said in the note at the head of this module."""
    table = table.pruned()
    options = len(table.options)
    tried = list[_Mixtures]()
    for size in range(1, min(3, options, layers) + 1):
        # Ways to split the layers into ``size`` counts of at least one.
        splits, candidates = comb(layers - 1, size - 1), range(options)
        # Too many triples: only of options of which pairs are worth keeping.
        if size > 2 and comb(options, size) * splits > MOST_TRIED:
            candidates = np.unique(_worth_keeping(tried)).tolist()
        subsets = _subsets(candidates, size)
        # Still too many: with some counts first, then the subsets that do well with all counts.
        if size > 1 and len(subsets) * splits > MOST_TRIED:
            coarse = _all_mixtures(table, subsets, _coarse(layers, size, len(subsets)))
            subsets = _promising([*tried, coarse], layers)
            tried.append(coarse)
        tried.append(_all_mixtures(table, subsets, _compositions(layers, size)))
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
    """Slope and constant of each line, as an array [lines, 2]."""
    return np.array([(line.slope, line.constant) for line in lines], dtype=np.float64)


def _subsets(options: Iterable[int], size: int) -> Counts:
    """All subsets of ``size`` options [subsets, size]."""
    return np.array(list(combinations(options, size)), dtype=np.int64).reshape(-1, size)


def _compositions(total: int, parts: int) -> Counts:
    """All ways to write ``total`` as an ordered sum of ``parts`` counts >= 1 [ways, parts]."""
    heads = list(product(range(1, total + 1), repeat=parts - 1))  # all counts but the last
    counts = np.array(heads, dtype=np.int64).reshape(len(heads), parts - 1)
    last = total - counts.sum(axis=1)  # what the other counts leave; dropped below 1
    return np.column_stack([counts, last])[last >= 1]


def _coarse(total: int, parts: int, subsets: int) -> Counts:
    """Some ways to write ``total`` as a sum of ``parts`` counts >= 1 [ways, parts]: all counts but
    one come from a geometric series, the finest with which ``subsets`` subsets of options make at
    most :data:`MOST_TRIED` mixtures."""
    found = _with_counts_of(total, parts, (1, max(1, total - parts + 1)))
    for steps in range(3, total):
        allowed = np.geomspace(1, total - parts + 1, steps).round().astype(int).tolist()
        finer = _with_counts_of(total, parts, allowed)
        if len(finer) * subsets > MOST_TRIED:
            break
        found = finer
    return np.array(found, dtype=np.int64)


def _with_counts_of(total: int, parts: int, allowed: Sequence[int]) -> list[tuple[int, ...]]:
    """All ways to write ``total`` as an ordered sum of ``parts`` counts >= 1, all of which but one,
    at any place, are in ``allowed``."""
    sums = [
        (*counts, total - sum(counts))
        for counts in product(set(allowed), repeat=parts - 1)
        if sum(counts) < total
    ]
    return sorted({row for counts in sums for row in permutations(counts)})


def _all_mixtures(table: Table, subsets: Counts, counts: Counts) -> _Mixtures:
    """The mixtures of every subset of options [subsets, options of a plan] with every row of layer
    ``counts`` [rows, options of a plan]. In each the options stand in the order that holds the most
    tokens."""
    # Every subset beside every row of counts.
    chosen, counts = np.repeat(subsets, len(counts), axis=0), np.tile(counts, (len(subsets), 1))
    seconds = np.tile(table.seconds[-1], (len(chosen), 1))
    for option, count in zip(chosen.T, counts.T, strict=True):
        seconds += table.seconds[option] * count[:, None]
    caps = _caps(table, chosen, counts)
    # Options stand with the larger transient first. Where that depends on the tokens, as one has
    # the larger slope and the other the larger constant, other orders may hold more.
    passing = table.passing[chosen, 1]
    unclear = np.flatnonzero((np.diff(passing, axis=1) > 0).any(axis=1))
    if len(unclear):
        original = chosen[unclear].copy(), counts[unclear].copy()
        for order in list(permutations(range(chosen.shape[1])))[1:]:
            reordered = original[0][:, order], original[1][:, order]
            reordered_caps = _caps(table, *reordered)
            better = reordered_caps > caps[unclear]
            rows = unclear[better]
            chosen[rows], counts[rows], caps[rows] = (
                reordered[0][better],
                reordered[1][better],
                reordered_caps[better],
            )
    return _Mixtures(chosen=chosen, counts=counts, seconds=seconds, caps=caps)


def _caps(table: Table, chosen: Counts, counts: Counts) -> Floats:
    """Tokens that each mixture holds [plans] if its first option, of ``chosen`` [plans, options of
    a plan], takes the first layers, as many as ``counts`` say, and so on."""
    # Bytes kept so far, in the order of layers, begin with those of the ends (last row). The peak
    # of an option is in its last layer: all kept before, and its transient bytes.
    slope = np.full(len(chosen), table.kept[-1, 0])
    constant = np.full(len(chosen), table.kept[-1, 1])
    most = np.full(len(chosen), float(MOST_TOKENS))
    for option, count in zip(chosen.T, counts.T, strict=True):
        slope = slope + count * table.kept[option, 0]
        constant = constant + count * table.kept[option, 1]
        fitting = table.tokens(
            slope + table.passing[option, 0], constant + table.passing[option, 1]
        )
        most = np.minimum(most, fitting)
    last = table.tokens(slope + table.passing[-1, 0], constant + table.passing[-1, 1])
    return np.floor(np.minimum(most, last))


def _promising(tried: Sequence[_Mixtures], layers: int) -> Counts:
    """The subsets of options [subsets, options of a plan] that plans worth keeping of the last of
    ``tried`` use most often: as many as can be tried with all counts of ``layers`` layers."""
    subsets, uses = np.unique(np.sort(_worth_keeping(tried), axis=1), axis=0, return_counts=True)
    most = max(1, MOST_TRIED // comb(layers - 1, subsets.shape[1] - 1))
    return subsets[np.argsort(-uses, kind="stable")[:most]]


def _worth_keeping(tried: Sequence[_Mixtures]) -> Counts:
    """The options [kept, options of a plan] of the plans of the last of ``tried`` that are worth
    keeping when all plans of ``tried`` are compared."""
    kept = worth_keeping(
        np.vstack([mixtures.seconds for mixtures in tried]),
        np.concatenate([mixtures.caps for mixtures in tried]),
    )
    earlier = sum(len(mixtures.caps) for mixtures in tried[:-1])
    return tried[-1].chosen[kept[kept >= earlier] - earlier]


def _layers(tried: Sequence[_Mixtures], kept: Counts, layers: int) -> Counts:
    """The option of every layer [kept, layers] of the plans with the numbers ``kept``, which count
    through all of ``tried`` one after the other."""
    options = np.zeros((len(kept), layers), dtype=np.int64)
    start = 0
    for mixtures in tried:
        places = np.flatnonzero((kept >= start) & (kept < start + len(mixtures.caps)))
        for place in places:
            plan = kept[place] - start
            options[place] = np.repeat(mixtures.chosen[plan], mixtures.counts[plan])
        start += len(mixtures.caps)
    return options
