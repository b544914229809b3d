"""Layer plans where every layer's methods are given: only what is recomputed is open.

The layers stand as the list has them, so the peak is that of the list's order, and layers of the
same methods differ in their place. Among them the levels with the larger transient come first,
where the least is kept yet. Counts of levels are chosen for every kind of layer apart, all of
them while that makes no more than six thousand plans, in coarser steps beyond. With so many
kinds that not even the plans of one level for each are that few, levels change along the list
instead: the first layers take one, the next another, whatever their kind. Plans in which all
layers take the same level are always among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import comb, prod

import numpy as np
from numpy.typing import NDArray

from headrace.costs.cost_model import MOST_TOKENS
from headrace.planning.mixtures import MOST_TRIED, Table
from headrace.planning.priced import Frontier, worth_keeping
from headrace.spec import LayerOption
from headrace.spec.layer_plan import RECOMPUTE

__all__ = ["listed_frontier"]

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Kind = tuple[int, ...]
"""The options of a layer by their numbers in the table, the largest transient first: layers of one
kind may take the same options."""


def listed_frontier(table: Table, slots: Sequence[tuple[LayerOption, ...]]) -> Frontier:
    """The layer plans that take for layer j one of the options ``slots[j]`` of a table."""
    kinds = [_falling(table, slot) for slot in slots]
    distinct = list(dict.fromkeys(kinds))
    if prod(len(kind) for kind in distinct) <= MOST_TRIED:
        layers = _by_kind(kinds, distinct)
    else:
        layers = _along(table, kinds)
    seconds = table.seconds[layers].sum(axis=1) + table.seconds[-1]
    caps = _caps(table, layers)
    kept = worth_keeping(seconds, caps)
    a, b, c = seconds[kept].T
    return Frontier(
        options=table.options,
        a=a.copy(),
        b=b.copy(),
        c=c.copy(),
        caps=tuple(int(cap) for cap in caps[kept]),
        layers=layers[kept],
    )


def _falling(table: Table, slot: Sequence[LayerOption]) -> Kind:
    """Options of one layer as indices, the largest transient first."""
    found = [table.options.index(option) for option in slot]
    passing = table.passing.tolist()
    return tuple(sorted(found, key=lambda o: (-passing[o][0], -passing[o][1], o)))


def _by_kind(kinds: Sequence[Kind], distinct: Sequence[Kind]) -> Counts:
    """Layer plans [plans, layers] as numbers of options: all counts of levels of all kinds, or
    coarser ones. ``kinds`` are those of the layers, ``distinct`` each of these once."""
    numbers = [kinds.count(kind) for kind in distinct]
    steps = max(numbers)
    while (
        prod(
            comb(min(steps, n) + len(k) - 1, len(k) - 1)
            for n, k in zip(numbers, distinct, strict=True)
        )
        > MOST_TRIED
        and steps > 1
    ):
        steps -= 1
    blocks = [
        np.array([np.repeat(kind, counts) for counts in _counts(n, len(kind), min(steps, n))])
        for n, kind in zip(numbers, distinct, strict=True)
    ]
    places = [[i for i, own in enumerate(kinds) if own == kind] for kind in distinct]
    picks = np.array(list(product(*(range(len(block)) for block in blocks))), dtype=np.int64)
    layers = np.zeros((len(picks), len(kinds)), dtype=np.int64)
    for block, place, pick in zip(blocks, places, picks.T, strict=True):
        layers[:, place] = block[pick]
    return layers


def _counts(total: int, parts: int, steps: int) -> list[tuple[int, ...]]:
    """All rows of ``parts`` counts >= 0 that sum to ``total``, where counts change by about
    ``total / steps``."""
    marks = [round(total * step / steps) for step in range(steps + 1)]
    inner = product(marks, repeat=parts - 1)
    ends = [(0, *cut, total) for cut in inner if list(cut) == sorted(cut)]
    return [tuple(np.diff(row).tolist()) for row in ends]


def _along(table: Table, kinds: Sequence[Kind]) -> Counts:
    """Layer plans [plans, layers] as numbers of options in which the levels change at most twice
    along the list; a layer for which a level is not open takes its first option."""
    levels = [option.recompute for option in table.options]
    by_level = np.array(
        [
            [next((o for o in kind if levels[o] == level), kind[0]) for kind in kinds]
            for level in reversed(RECOMPUTE)
        ],
        dtype=np.int64,
    )
    rows = [
        np.repeat(range(len(RECOMPUTE)), counts)
        for counts in _counts(len(kinds), len(RECOMPUTE), len(kinds))
    ]
    return by_level[np.array(rows), np.arange(len(kinds))]


def _caps(table: Table, layers: Counts) -> Floats:
    """Tokens that a micro-batch of each layer plan holds [plans], with its ``layers``, numbers of
    options [plans, layers], in this order."""
    most = np.full(len(layers), float(MOST_TOKENS))
    slope = np.full(len(layers), table.kept[-1, 0])
    constant = np.full(len(layers), table.kept[-1, 1])
    for o in layers.T:
        slope = slope + table.kept[o, 0]
        constant = constant + table.kept[o, 1]
        here = table.tokens(slope + table.passing[o, 0], constant + table.passing[o, 1])
        most = np.minimum(most, here)
    last = table.tokens(slope + table.passing[-1, 0], constant + table.passing[-1, 1])
    return np.floor(np.minimum(most, last))
