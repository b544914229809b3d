"""What every sequence of a batch costs on every group size: the tables that planners choose from.

Three lower bounds of what a sequence of l tokens costs on p ranks, over all layer plans o of the
size's frontier that hold it (a_o, b_o, c_o, cap_o):

    alone    min a l^2 + b l + c              seconds of the sequence in a micro-batch of its own
    work     min a l^2 + b l                  seconds without any constant
    spread   min a l^2 + (b + c / cap) l      seconds with its share of a constant: a micro-batch
                                              holds at most cap tokens, so this much c comes on l
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.planning.frontier import Frontier
from headrace.spec import Lengths

__all__ = ["Batch", "SizeTable"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch sorted for planning: position 0 is the longest sequence (ties by index)."""

    lengths: Lengths
    order: tuple[int, ...]
    tokens: tuple[int, ...]
    _rows: dict[int, tuple[Frontier, Floats]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def of(cls, lengths: Lengths) -> Batch:
        """Sort ``lengths``."""
        order = sorted(range(len(lengths)), key=lambda i: (-lengths.tokens[i], i))
        return cls(
            lengths=lengths,
            order=tuple(order),
            tokens=tuple(lengths.tokens[i] for i in order),
        )

    def row(self, frontier: Frontier) -> Floats:
        """(alone, work, spread) of every sequence under a frontier, worked out once."""
        key = id(frontier)  # the frontier stands beside its row, so the id stays its own
        if key not in self._rows:
            lengths = np.array(self.tokens, dtype=np.float64)
            self._rows[key] = (frontier, _lowest(frontier, lengths))
        return self._rows[key][1]


@dataclass(frozen=True, kw_only=True)
class SizeTable:
    """Seconds of every sequence (columns, by position) on every group size (rows); infinite
    where it does not fit. ``opening[row]`` is the least constant of a micro-batch."""

    sizes: tuple[int, ...]
    alone: Floats
    work: Floats
    spread: Floats
    opening: Floats

    @classmethod
    def of(cls, frontiers: Mapping[int, Frontier], batch: Batch) -> SizeTable:
        """The table of a batch over the frontiers of some sizes."""
        rows = np.full((3, len(frontiers), len(batch.tokens)), np.inf)
        for row, frontier in enumerate(frontiers.values()):
            rows[:, row] = batch.row(frontier)
        opening = np.array([frontier.c.min() for frontier in frontiers.values()])
        return cls(
            sizes=tuple(frontiers), alone=rows[0], work=rows[1], spread=rows[2], opening=opening
        )

    @classmethod
    def least(cls, tables: Sequence[SizeTable]) -> SizeTable:
        """The elementwise least of several tables of one batch, over the sizes of any."""
        sizes = tuple(sorted({p for table in tables for p in table.sizes}))
        rows = np.full((3, len(sizes), tables[0].alone.shape[1]), np.inf)
        opening = np.full(len(sizes), np.inf)
        for table in tables:
            at = [sizes.index(p) for p in table.sizes]
            values = np.stack([table.alone, table.work, table.spread])
            rows[:, at] = np.minimum(rows[:, at], values)
            opening[at] = np.minimum(opening[at], table.opening)
        return cls(sizes=sizes, alone=rows[0], work=rows[1], spread=rows[2], opening=opening)


def _lowest(frontier: Frontier, lengths: Floats) -> Floats:
    """(alone, work, spread) of sequences of ``lengths`` tokens, shape [3, sequences]."""
    a, caps = frontier.a, frontier.limits
    first = np.searchsorted(caps, lengths)
    fits = first < len(caps)
    out = np.full((3, len(lengths)), np.inf)
    for row, share in enumerate(frontier.shares):
        b, c = share.b, share.c
        # Where the first plan that holds a sequence is the quickest of all later ones, take it.
        quick = fits.copy()
        quick[fits] = share.rules[first[fits]]
        at, some = first[quick], lengths[quick]
        out[row, quick] = a[at] * some**2 + b[at] * some + c[at]
        slow = fits & ~quick
        every = np.arange(len(caps))
        for rows, which in ((share.quickest, slow & (first == 0)), (every, slow & (first > 0))):
            some = lengths[which]
            if len(some):
                values = np.outer(a[rows], some**2) + np.outer(b[rows], some) + c[rows][:, None]
                values[caps[rows][:, None] < some] = np.inf
                out[row, which] = values.min(axis=0)
    return out
