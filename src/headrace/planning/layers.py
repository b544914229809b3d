"""Which layers of a micro-batch recompute what: exact, by enumeration of counts.

Data        options o with seconds t_o, kept bytes k_o and transient bytes x_o of one layer, all
            functions of the pack; L equal layers; capacity M.
Variables   n_o >= 0, layers that take option o, and the order of the layers.
Constraint  sum_o n_o = L; at every moment what is kept so far, what this layer keeps and what it
            needs in passing fit: max_i (sum_{j <= i} k_j + x_i) <= M, and likewise at the ends.
Objective   minimise sum_o n_o t_o.

Kept bytes add and transient ones do not (ParaDySe's Algorithm 1 adds both). Swapping two
neighbours so that the larger transient comes first never raises the peak, so the order is settled
by the counts, and equal options stand together. Which option has the larger transient may change
with the tokens of the pack, so every order of the options is tried.

The seconds of a pack depend on it through sum(l^2) and sum(l), and the capacity through sum(l)
alone. So all counts together are one *frontier* per group size, made once: quadratics, each with
the most tokens that its layers can hold.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from headrace.costs import CostModel, OptionCost
from headrace.costs.cost_model import MOST_TOKENS
from headrace.spec import LayerOption, LayerPlan
from headrace.spec.plan import Working

__all__ = ["Frontier", "best_layers", "layer_frontier"]

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Layer plans of one group size, smallest capacity first.

    Plan i takes ``a[i] sum(l^2) + b[i] sum(l) + c[i]`` seconds, forward and backward, and holds
    ``caps[i]`` tokens; its layers are ``counts[i]`` of ``options``, in the order ``orders[i]``.
    """

    options: tuple[LayerOption, ...]
    a: Floats
    b: Floats
    c: Floats
    caps: tuple[int, ...]
    counts: Counts
    orders: Counts
    _plans: dict[int, LayerPlan] = field(default_factory=dict, repr=False, compare=False)

    @property
    def most_tokens(self) -> int:
        """Tokens that the thriftiest plan holds, 0 when nothing fits."""
        return self.caps[-1] if self.caps else 0

    @cached_property
    def rows(self) -> list[tuple[float, float, float]]:
        """(a, b, c) of every plan."""
        return list(zip(self.a.tolist(), self.b.tolist(), self.c.tolist(), strict=True))

    @cached_property
    def rules(self) -> list[bool]:
        """Whether plan i is at least as quick as every later one whatever the pack."""
        return [bool(rule) for rule in _ruling(self.a, self.b, self.c)]

    @cached_property
    def limits(self) -> Floats:
        """``caps`` as an array."""
        return np.array(self.caps, dtype=np.float64)

    @cached_property
    def shares(self) -> tuple[tuple[Floats, Floats, NDArray[np.bool_]], ...]:
        """Three ways to charge a sequence of a pack for the constant, as (b, c, rules): all of
        it, nothing, and by tokens, of which a pack holds at most the plan's capacity."""
        zero, spread = np.zeros_like(self.c), self.b + self.c / self.limits
        return tuple(
            (b, c, _ruling(self.a, b, c))
            for b, c in ((self.b, self.c), (self.b, zero), (spread, zero))
        )

    def best(self, squares: float, tokens: int) -> tuple[float, int] | None:
        """(seconds, plan) of the quickest plan that holds a pack of sum(l^2) ``squares`` and
        sum(l) ``tokens``; None when not even the thriftiest does."""
        first = bisect_left(self.caps, tokens)
        if first == len(self.caps):
            return None
        if not self.rules[first]:
            seconds = self.a[first:] * squares + self.b[first:] * tokens + self.c[first:]
            first += int(seconds.argmin())
        a, b, c = self.rows[first]
        return a * squares + b * tokens + c, first

    def layer_plan(self, index: int) -> LayerPlan:
        """The layer plan of one entry."""
        if index not in self._plans:
            options = [
                self.options[o] for o in self.orders[index] for _ in range(self.counts[index, o])
            ]
            self._plans[index] = LayerPlan(options=tuple(options))
        return self._plans[index]


def best_layers(
    costs: CostModel, lengths: Iterable[int], p: int, working: Working = "whole"
) -> LayerPlan | None:
    """The quickest layer plan that fits a micro-batch of ``lengths`` on p ranks; None when not
    even the thriftiest does. Whoever asks often keeps the frontier instead."""
    frontier, tokens = layer_frontier(costs, p, working), tuple(lengths)
    found = frontier.best(sum(n * n for n in tokens), sum(tokens))
    return None if found is None else frontier.layer_plan(found[1])


def layer_frontier(
    costs: CostModel,
    p: int,
    working: Working = "whole",
    sizes: Collection[int] = (),
    options: Collection[LayerOption] | None = None,
) -> Frontier:
    """The layer plans of group size p.

    ``sizes``: the other group sizes in which the ranks work in the same step, for the working
    weights they hold. ``options`` restricts the choice (all that have costs by default). The
    layers of one plan share their methods and differ in what they recompute.
    """
    allowed = tuple(
        option
        for option in map(LayerOption.parse, costs.options[p])
        if options is None or option in options
    )
    layers = [costs.option(p, option) for option in allowed]
    room = costs.capacity_bytes - costs.state_bytes - costs.held_bytes({p, *sizes}, working)
    counts = _counts(allowed, costs.architecture.layers)
    a, b, c = _seconds(costs, p, working, allowed, counts)
    caps, orders = _best_orders(costs.ends[p], layers, counts, room)
    chosen = np.flatnonzero((caps >= 1) & ~_beaten_by_uniform(a, b, c, caps, counts))
    chosen = chosen[np.lexsort((a[chosen] + b[chosen] + c[chosen], caps[chosen]))]
    return Frontier(
        options=allowed,
        a=a[chosen], b=b[chosen], c=c[chosen],
        caps=tuple(int(cap) for cap in caps[chosen]),
        counts=counts[chosen], orders=orders[chosen],
    )  # fmt: skip


def _ruling(a: Floats, b: Floats, c: Floats) -> NDArray[np.bool_]:
    """Which rows no later row beats in any coefficient."""
    table = np.column_stack([a, b, c])
    least = np.minimum.accumulate(table[::-1], axis=0)[::-1]
    ruling: NDArray[np.bool_] = np.logical_and.reduce(table <= least, axis=1)
    return ruling


def _counts(options: Sequence[LayerOption], layers: int) -> Counts:
    """Rows of how many layers take each option; one row never mixes methods."""
    blocks = [np.zeros((0, len(options)), dtype=np.int64)]
    for method in dict.fromkeys((o.attention, o.feed_forward) for o in options):
        columns = [i for i, o in enumerate(options) if (o.attention, o.feed_forward) == method]
        rows = _compositions(layers, len(columns))
        block = np.zeros((len(rows), len(options)), dtype=np.int64)
        block[:, columns] = rows
        blocks.append(block)
    return np.vstack(blocks)


def _compositions(total: int, parts: int) -> Counts:
    """All rows of ``parts`` counts >= 0 that sum to ``total``."""
    if parts == 1:
        return np.array([[total]], dtype=np.int64)
    blocks = []
    for first in range(total + 1):
        rest = _compositions(total - first, parts - 1)
        blocks.append(np.hstack([np.full((len(rest), 1), first, dtype=np.int64), rest]))
    return np.vstack(blocks)


def _seconds(
    costs: CostModel, p: int, working: Working, options: Sequence[LayerOption], counts: Counts
) -> tuple[Floats, Floats, Floats]:
    """Coefficients of forward and backward of whole micro-batches, one for each row of counts."""
    layers = [costs.option(p, option) for option in options]
    gathers = [sum(costs.gather_seconds(p, option, working)) for option in options]
    ends = costs.ends[p].forward + costs.ends[p].backward
    both = [layer.forward + layer.backward for layer in layers]
    table = np.array(
        [[x.a, x.b, x.c + gather] for x, gather in zip(both, gathers, strict=True)],
        dtype=np.float64,
    )
    whole = counts.astype(np.float64) @ table + np.array([ends.a, ends.b, ends.c])
    a, b, c = (whole * costs.scale).T
    return a.copy(), b.copy(), c.copy()


def _best_orders(
    ends: OptionCost, layers: Sequence[OptionCost], counts: Counts, room: int
) -> tuple[Floats, Counts]:
    """For each row of counts the most tokens that fit over all orders of the options, and the
    order that holds them."""
    caps = np.full(len(counts), -1.0)
    orders = np.zeros_like(counts)
    for used in np.unique(counts > 0, axis=0):
        rows = np.flatnonzero(((counts > 0) == used).all(axis=1))
        rest = tuple(np.flatnonzero(~used).tolist())
        # Of equal orders the one with the largest transient first wins.
        falling = sorted(
            np.flatnonzero(used).tolist(),
            key=lambda o: (-layers[o].transient.slope, -layers[o].transient.constant, o),
        )
        for order in permutations(falling):
            here = _caps(ends, layers, counts[rows], order, room)
            better = here > caps[rows]
            caps[rows] = np.where(better, here, caps[rows])
            orders[rows[better]] = (*order, *rest)
    return caps, orders


def _caps(
    ends: OptionCost, layers: Sequence[OptionCost], counts: Counts, order: Sequence[int], room: int
) -> Floats:
    """Tokens that fit when the options stand in ``order``, one for each row of counts."""
    slope = np.full(len(counts), ends.kept.slope)
    constant = np.full(len(counts), ends.kept.constant)
    most = np.full(len(counts), float(MOST_TOKENS))
    for o in order:
        number, transient = counts[:, o].astype(np.float64), layers[o].transient
        slope = slope + number * layers[o].kept.slope
        constant = constant + number * layers[o].kept.constant
        here = _tokens(room, slope + transient.slope, constant + transient.constant)
        most = np.minimum(most, here)
    last = _tokens(room, slope + ends.transient.slope, constant + ends.transient.constant)
    return np.floor(np.minimum(most, last))


def _tokens(room: int, slope: Floats, constant: Floats) -> Floats:
    """Tokens of which ``slope * tokens + constant`` bytes fit into ``room``; one thousandth of a
    byte is rounding."""
    free = room - constant
    per_token = np.where(slope > 0, slope, 1.0)
    some = np.where(slope > 0, (free + 1e-3) / per_token, float(MOST_TOKENS))
    return np.where(free < 0, 0.0, some)


def _beaten_by_uniform(
    a: Floats, b: Floats, c: Floats, caps: Floats, counts: Counts
) -> NDArray[np.bool_]:
    """Rows that a plan of equal layers beats in capacity and in all seconds."""
    beaten = np.zeros(len(counts), dtype=np.bool_)
    for u in np.flatnonzero((counts > 0).sum(axis=1) == 1):
        no_better = (a[u] <= a) & (b[u] <= b) & (c[u] <= c) & (caps[u] >= caps)
        equal = (a[u] == a) & (b[u] == b) & (c[u] == c) & (caps[u] == caps)
        beaten |= no_better & ~equal
    return beaten
