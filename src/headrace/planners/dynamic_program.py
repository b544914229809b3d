"""The strategies that the paper proposes (Hydraulis, section 7): a dynamic program over devices and
lengths, each range of lengths on pipelines of its own.

    t[n][l] = min over k, d, l' of max(t[n - d N_k][l - l'], (1 / d) sum of T_k over (l - l', l])

and t[n][l] <= t[n - 1][l]. As in the authors' code the sum runs over the whole data set, so that
bubbles play no part, and T has the constant of a micro-batch for every sequence; amortized, a
sequence of l tokens has c l / MaxLen of it, as if all micro-batches were full.

Whole pipelines: d is a number. Relaxed: d is any multiple of a fraction of a pipeline. Then among
all k the one with the fewest device-seconds for the range, N_k sum T_k, is best whatever d is,
which takes k out of the innermost loops. What is found is rounded up and down in all ways that fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from headrace.planners.homogeneous import roomiest_first
from headrace.planning.batch import PriceTable
from headrace.planning.side_by_side import Counts

__all__ = ["proposed"]

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]
Part = tuple[int, float]
"""A scheme and how many pipelines of it."""

_BINS = 32  # ranges of lengths
_UNITS = 128  # steps in which devices are counted, at most
_FRACTIONS = 4  # a relaxed step is at least one device over this


def proposed(
    table: PriceTable,
    lengths: Sequence[int],
    *,
    relaxed: bool,
    amortized: bool = False,
    bins: int = _BINS,
    units: int = _UNITS,
) -> list[Counts]:
    """The different strategies S[N][l] of a table's schemes for all l of a data set, in the order
    of l; ``bins`` ranges of lengths, devices in at most ``units`` steps, relaxed ones of at least a
    quarter of a device. ``amortized`` spreads constants over the tokens of full micro-batches."""
    program = _Program(table, lengths, relaxed, amortized, bins, units)
    found: dict[Counts, None] = {}
    for at in range(1, len(program.edges)):
        amounts = [0.0] * len(table)
        for k, d in program.parts(at):
            amounts[k] += d
        found.update(dict.fromkeys(_rounded(table, amounts)))
    return list(found)


class _Program:
    """The dynamic program: ``best[s][u]`` are the least seconds of all sequences up to edge s on u
    steps of devices."""

    def __init__(
        self,
        table: PriceTable,
        lengths: Sequence[int],
        relaxed: bool,
        amortized: bool,
        bins: int,
        units: int,
    ) -> None:
        self.table, self.relaxed, self.kinds = table, relaxed, roomiest_first(table)
        values = np.sort(np.array(lengths, dtype=np.float64))
        top = float(values[-1])
        edges = np.unique(np.ceil(np.linspace(0, top, bins + 1)))
        # Ranges without sequences are joined to the next.
        filled = np.diff(np.searchsorted(values, edges, side="right")) > 0
        self.edges = np.concatenate([[0.0], edges[1:][filled]])
        at = np.searchsorted(values, self.edges, side="right")
        # Work of scheme k, by its usual row, on everything up to an edge: [schemes, edges].
        rows = [
            scheme.frontier.rows[row] for scheme, row in zip(table.schemes, table.rows, strict=True)
        ]
        self.work = np.stack(
            [
                np.concatenate([[0.0], np.cumsum((a * values + b) * values + constants)])[at]
                for (a, b, _), constants in zip(
                    rows, self._constants(values, amortized), strict=True
                )
            ]
        )
        self.units = min(units, table.devices * (_FRACTIONS if relaxed else 1))
        self.step = table.devices / self.units
        self.widths = np.array(table.width, dtype=np.float64)
        shape = (len(self.edges), self.units + 1)
        self.best: Floats = np.full(shape, np.inf)
        self.best[0] = 0.0
        self.choice: dict[tuple[int, int], tuple[int, int, Part]] = {}
        for s in range(1, len(self.edges)):
            self._row(s)

    def _constants(self, values: Floats, amortized: bool) -> Iterator[Floats]:
        """Seconds of constants that sequences of ``values`` tokens pay on each scheme."""
        for c, share in zip(self.table.c, self.table.share, strict=True):
            yield share * values if amortized else np.full(len(values), c)

    def _row(self, s: int) -> None:
        """Fill the row of the table whose micro-batches begin at edge s."""
        row = np.full(self.units + 1, np.inf)
        came = np.full((self.units + 1, 3), -1, dtype=np.int64)
        none = np.full(self.units, np.inf)
        for before in range(s):
            kinds, taken = self._ways(before, s)
            if not len(kinds):
                continue
            seconds = (self.work[kinds, s] - self.work[kinds, before]) / self._number(kinds, taken)
            # The row of the edge before, that many steps later, for every way.
            rows = sliding_window_view(np.concatenate([none, self.best[before]]), self.units + 1)
            tried = np.maximum(rows[self.units - taken], seconds[:, None])
            first = tried.argmin(axis=0)
            least = np.take_along_axis(tried, first[None], axis=0)[0]
            better = least < row
            row[better] = least[better]
            came[better] = np.stack(
                [np.full(len(first), before), kinds[first], taken[first]], axis=1
            )[better]
        for u in range(1, self.units + 1):
            if row[u - 1] <= row[u]:
                row[u], came[u] = row[u - 1], came[u - 1]
        self.best[s] = row
        for u, (before, k, taken) in enumerate(came.tolist()):
            if k >= 0:
                number = float(self._number(np.array([k]), np.array([taken]))[0])
                self.choice[s, u] = before, taken, (k, number)

    def _number(self, kinds: Whole, taken: Whole) -> Floats:
        """How many pipelines of each scheme the ``taken`` steps of devices are."""
        number = taken * self.step / self.widths[kinds]
        return number if self.relaxed else np.floor(number)

    def _ways(self, before: int, s: int) -> tuple[Whole, Whole]:
        """Schemes that may serve the range of lengths between two edges, each with a number of
        steps of devices."""
        table = self.table
        fitting = [k for k in self.kinds if table.schemes[k].most_tokens >= self.edges[s]]
        if not fitting:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        if self.relaxed:
            work = self.work[:, s] - self.work[:, before]
            k = min(fitting, key=lambda k: table.width[k] * work[k])
            return np.full(self.units, k), np.arange(1, self.units + 1)
        most = [table.devices // table.width[k] for k in fitting]
        number = np.concatenate([np.arange(1, n + 1) for n in most])
        kinds = np.repeat(fitting, most)
        return kinds, np.ceil(number * self.widths[kinds] / self.step).astype(np.int64)

    def parts(self, s: int) -> list[Part]:
        """The schemes and their numbers that serve everything up to edge s on all devices."""
        found, u = list[Part](), self.units
        while s > 0:
            # Where a row stops getting better the smaller number of steps is meant.
            if (s, u) not in self.choice:
                return []
            before, taken, part = self.choice[s, u]
            found.append(part)
            while u > taken and self.best[s, u - 1] <= self.best[s, u]:
                u -= 1
            s, u = before, u - taken
        return found


def _rounded(table: PriceTable, amounts: Sequence[float]) -> Iterator[Counts]:
    """All ways to round to whole pipelines that fit the devices, at least one pipeline."""
    ways = [sorted({int(n + 1e-9), -int(-(n - 1e-9) // 1)}) for n in amounts]
    for counts in product(*ways):
        used = sum(n * width for n, width in zip(counts, table.width, strict=True))
        if any(counts) and used <= table.devices:
            yield counts
