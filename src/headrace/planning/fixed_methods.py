"""Layer plans where every layer's methods are given: only what is recomputed is open.

A layer keeps bytes for its backward and, while it runs, needs *transient* bytes besides. The layers
stand as the list has them, so the peak is that of the list's order, and layers of the same methods
differ in their place. Among them the levels with the larger transient come first, where the least
is kept yet. Counts of levels are chosen for every kind of layer apart, all of them while that makes
no more than six thousand plans, in coarser steps beyond. With so many kinds that not even the plans
of one level for each are that few, levels change along the list instead: the first layers take one,
the next another, whatever their kind. Plans in which all layers take the same level are always
among them.
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
    """The frontier of layer plans in which layer j takes one of the options ``slots[j]``, which are
    all in the ``table``."""
    kinds = [_falling(table, slot) for slot in slots]
    distinct = list(dict.fromkeys(kinds))
    # So many plans give each kind of layer one level.
    if prod(len(kind) for kind in distinct) <= MOST_TRIED:
        layers = _by_kind(kinds, distinct)
    else:
        layers = _along(table, kinds)
    # Seconds add up over the layers and the model's ends, the table's last row.
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
    """The options of one layer as their numbers in the table, the largest transient first."""
    found = [table.options.index(option) for option in slot]
    passing = table.passing.tolist()
    return tuple(sorted(found, key=lambda o: (-passing[o][0], -passing[o][1], o)))


def _by_kind(kinds: Sequence[Kind], distinct: Sequence[Kind]) -> Counts:
    """Layer plans [plans, layers], as numbers of options. Every kind of layer splits its layers
    among its options in all ways; in coarser steps where that makes too many plans. ``kinds`` has
    the kind of each layer, ``distinct`` each kind once."""
    layer_counts = [kinds.count(kind) for kind in distinct]
    # A kind's layers are split in so many equal steps: the most that make few enough plans. There
    # are comb(steps + options - 1, options - 1) ways to split steps among options.
    steps = max(layer_counts)
    while (
        prod(
            comb(min(steps, count) + len(options) - 1, len(options) - 1)
            for count, options in zip(layer_counts, distinct, strict=True)
        )
        > MOST_TRIED
        and steps > 1
    ):
        steps -= 1
    # For each kind the options of its layers in all these ways [ways, layers of the kind].
    fillings = [
        np.array(
            [np.repeat(kind, counts) for counts in _counts(count, len(kind), min(steps, count))]
        )
        for count, kind in zip(layer_counts, distinct, strict=True)
    ]
    layers_of = [
        [i for i, layer_kind in enumerate(kinds) if layer_kind == kind] for kind in distinct
    ]
    # Every way of every kind with every way of the others [plans, kinds].
    choices = np.array(
        list(product(*(range(len(filling)) for filling in fillings))), dtype=np.int64
    )
    layers = np.zeros((len(choices), len(kinds)), dtype=np.int64)
    for filling, layer_numbers, chosen in zip(fillings, layers_of, choices.T, strict=True):
        layers[:, layer_numbers] = filling[chosen]
    return layers


def _counts(total: int, parts: int, steps: int) -> list[tuple[int, ...]]:
    """All rows of ``parts`` counts >= 0 that sum to ``total``, each about a multiple of ``total /
    steps``: the distances between rising borders that are drawn at ``steps`` + 1 even marks."""
    marks = [round(total * step / steps) for step in range(steps + 1)]
    cuts = product(marks, repeat=parts - 1)
    borders = [
        (0, *inner_marks, total) for inner_marks in cuts if list(inner_marks) == sorted(inner_marks)
    ]
    return [tuple(np.diff(row).tolist()) for row in borders]


def _along(table: Table, kinds: Sequence[Kind]) -> Counts:
    """Layer plans [plans, layers], as numbers of options: along the list of layers the recompute
    level changes at most twice, whatever the kinds. A layer that has no option of a level takes its
    first."""
    levels = [option.recompute for option in table.options]
    # The option of each layer at each level [levels, layers].
    by_level = np.array(
        [
            [next((o for o in kind if levels[o] == level), kind[0]) for kind in kinds]
            for level in reversed(RECOMPUTE)
        ],
        dtype=np.int64,
    )
    # The level of each layer, as a row of ``by_level``.
    rows = [
        np.repeat(range(len(RECOMPUTE)), counts)
        for counts in _counts(len(kinds), len(RECOMPUTE), len(kinds))
    ]
    return by_level[np.array(rows), np.arange(len(kinds))]


def _caps(table: Table, layers: Counts) -> Floats:
    """Tokens that a micro-batch holds by each plan [plans]. ``layers`` are the numbers of the
    options of each plan's layers in their order [plans, layers]."""
    most = np.full(len(layers), float(MOST_TOKENS))
    slope = np.full(len(layers), table.kept[-1, 0])
    constant = np.full(len(layers), table.kept[-1, 1])
    # Bytes kept so far begin with those of the ends; each layer adds its own and needs its
    # transient bytes beside them while it runs.
    for option in layers.T:
        slope = slope + table.kept[option, 0]
        constant = constant + table.kept[option, 1]
        fitting = table.tokens(
            slope + table.passing[option, 0], constant + table.passing[option, 1]
        )
        most = np.minimum(most, fitting)
    last = table.tokens(slope + table.passing[-1, 0], constant + table.passing[-1, 1])
    return np.floor(np.minimum(most, last))
