"""A lower bound of every plan of pipelines side by side, or one after the other, of one batch.

Claim. Let a plan take tau seconds. For every width w of a stage (tensor x context) let

    work_w(l)  = min over layer options, layer by layer, of a l^2 + b l, plus that of the ends
    alone_w(l) = the same with the constants c

of forward and backward, fetched weights and messages left out: no layer plan, tensor degree,
recomputation or way to hold weights takes less. A micro-batch on stages of width w takes, summed
over its stages, what it takes on one stage, as each layer is in one of them and the ends are
charged once. So the number of stages does not enter:

1. Longest sequence. A micro-batch goes forward through all stages, then backward: it takes at
   least alone_w(l) for each l in it. So every sequence i is on a width with alone_w(l_i) <= tau.
2. Devices. A stage keeps w ranks busy for its seconds, so a sequence costs w work_w(l) rank-seconds
   of the N tau that there are: sum_i min { w work_w(l_i) : alone_w(l_i) <= tau } <= N tau.

A width is open to a sequence that one stage of it holds, or any where stages could be added: more
of them need less memory for each. With that :func:`headrace.planning.bounds.lower_bound` finds the
least tau that satisfies 1 and 2 (the constants of a micro-batch are dealt out to stages, so its
other terms are zero here). What pull, push and update add is said there. The plans of one strategy
have only its schemes' widths and options, and only its ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.planning.bounds import Bound, lower_bound
from headrace.planning.sizing import SizeTable
from headrace.planning.strategies.schemes import Schemes, Slots
from headrace.spec import Scheme, Strategy
from headrace.spec.plan import Working

__all__ = ["bound_of", "strategy_bound_s"]

_WORKINGS: tuple[Working, ...] = ("whole", "sharded")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A width of stages, the options of their layers, and up to which length it is open."""

    width: int
    slots: Slots
    most_tokens: float


def bound_of(schemes: Schemes, lengths: Sequence[int]) -> Bound:
    """The bound between the first layer's weights and gradients, without the costs' scale, of
    sequences (longest first) of which some width holds each."""
    problem = schemes.problem
    rows = [
        _Row(width=width, slots=problem.slots[width], most_tokens=_most_tokens(schemes, width))
        for width in problem.group_sizes
    ]
    return _bound(schemes, rows, lengths, schemes.devices)


def strategy_bound_s(schemes: Schemes, strategy: Strategy, lengths: Sequence[int]) -> float:
    """The same for plans of one strategy, which holds the sequences."""
    rows = [
        _Row(
            width=scheme.width, slots=schemes.slots(scheme),
            most_tokens=_roomiest(schemes, [scheme]),
        )
        for scheme, _ in strategy.counts
    ]  # fmt: skip
    return _bound(schemes, rows, lengths, strategy.devices).seconds


def _bound(schemes: Schemes, rows: Sequence[_Row], lengths: Sequence[int], devices: int) -> Bound:
    tokens = np.array(lengths, dtype=np.float64)
    powers = np.stack([tokens**2, tokens, np.ones_like(tokens)])
    alone, work = (np.full((len(rows), len(tokens)), np.inf) for _ in range(2))
    for at, row in enumerate(rows):
        holds = tokens <= row.most_tokens
        lines = _lines(schemes, row)
        for found, some in ((work, 2), (alone, 3)):
            seconds = sum((line[:, :some] @ powers[:some]).min(axis=0) for line in lines)
            found[at] = np.where(holds, seconds, np.inf)
    table = SizeTable(
        sizes=tuple(row.width for row in rows), alone=alone, work=work, spread=work,
        opening=np.zeros(len(rows)),
    )  # fmt: skip
    return lower_bound(table, devices)


def _lines(schemes: Schemes, row: _Row) -> list[NDArray[np.float64]]:
    """For every layer what its options take, forward and backward [options, 3], then the ends."""
    costs, number = schemes.costs, schemes.costs.shape.layers
    found = [
        np.array(
            [
                (cost.forward.a + cost.backward.a, cost.forward.b + cost.backward.b,
                 cost.forward.c + cost.backward.c)
                for cost in some
            ]
        )
        for some in (
            *([costs.option(row.width, option) for option in slot] for slot in row.slots),
            [costs.ends[row.width]],
        )
    ]  # fmt: skip
    if len(row.slots) == 1:
        return [*(found[:1] * number), found[-1]]
    return found


def _most_tokens(schemes: Schemes, width: int) -> float:
    """The longest sequence to which a width may be open."""
    if schemes.costs.shape.layers > 1 and 2 * width <= schemes.devices:
        return float("inf")
    degrees = (t for t in range(1, width + 1) if width % t == 0)
    return _roomiest(schemes, (Scheme(tensor=t, context=width // t) for t in degrees))


def _roomiest(schemes: Schemes, some: Iterable[Scheme]) -> float:
    shapes = [schemes.shape(scheme, working) for scheme in some for working in _WORKINGS]
    return max((shape.most_tokens for shape in shapes if shape is not None), default=0)
