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
from math import ceil, floor

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
    """The different strategies that the dynamic program finds on all devices: for each l, in rising
    order, the best one for the sequences of at most l tokens.

    ``lengths`` are those of a data set, which are cut into ``bins`` ranges; l are the ends of the
    ranges. Devices are counted in at most ``units`` steps: of whole devices, or if ``relaxed`` of
    at least a quarter of one. ``amortized`` spreads constants over the tokens of full
    micro-batches. Returns the number of pipelines of each scheme, for each strategy."""
    program = _Program(table, lengths, relaxed=relaxed, amortized=amortized, bins=bins, units=units)
    strategies: dict[Counts, None] = {}
    for edge in range(1, len(program.edges)):
        amounts = [0.0] * len(table)
        for k, number in program.parts(edge):
            amounts[k] += number
        strategies.update(dict.fromkeys(_rounded(table, amounts)))
    return list(strategies)


class _Program:
    """The dynamic program. ``edges`` are the ends of the ranges of lengths, in tokens, from 0 on;
    devices are counted in ``units`` steps of ``step`` devices each.

    ``best[s][u]`` are the least seconds of all sequences up to edge s on u steps of devices;
    ``choice[s, u]`` is how they are reached: (edge before, steps of devices for the range in
    between, (scheme, number of pipelines) that serves it)."""

    def __init__(
        self,
        table: PriceTable,
        lengths: Sequence[int],
        *,
        relaxed: bool,
        amortized: bool,
        bins: int,
        units: int,
    ) -> None:
        """Solve the program for the ``lengths`` of a data set; arguments as for
        :func:`proposed`."""
        self.table, self.relaxed, self.fitting_schemes = table, relaxed, roomiest_first(table)
        values = np.sort(np.array(lengths, dtype=np.float64))
        longest = float(values[-1])
        edges = np.unique(np.ceil(np.linspace(0, longest, bins + 1)))
        # Ranges without sequences are joined to the next.
        filled = np.diff(np.searchsorted(values, edges, side="right")) > 0
        self.edges = np.concatenate([[0.0], edges[1:][filled]])
        sequences_below = np.searchsorted(values, self.edges, side="right")
        # Seconds of each scheme for all sequences up to each edge [schemes, edges]. A scheme counts
        # with its usual row, one row of its frontier.
        rows = [
            scheme.frontier.rows[row] for scheme, row in zip(table.schemes, table.rows, strict=True)
        ]
        work = list[Floats]()
        for (a, b, _), constants in zip(rows, self._constants(values, amortized), strict=True):
            sums = np.cumsum((a * values + b) * values + constants)
            work.append(np.concatenate([[0.0], sums])[sequences_below])
        self.work = np.stack(work)
        self.units = min(units, table.devices * (_FRACTIONS if relaxed else 1))
        self.step = table.devices / self.units
        self.widths = np.array(table.width, dtype=np.float64)
        shape = (len(self.edges), self.units + 1)
        self.best: Floats = np.full(shape, np.inf)
        self.best[0] = 0.0
        self.choice: dict[tuple[int, int], tuple[int, int, Part]] = {}
        for edge in range(1, len(self.edges)):
            self._row(edge)

    def _constants(self, values: Floats, amortized: bool) -> Iterator[Floats]:
        """For each scheme the seconds of constants that sequences of ``values`` tokens pay
        [sequences]."""
        for c, share in zip(self.table.c, self.table.share, strict=True):
            yield share * values if amortized else np.full(len(values), c)

    def _row(self, s: int) -> None:
        """Fill ``best[s]`` and ``choice[s, ...]``. The last range of lengths, which ends at edge s,
        begins at some edge before, and some scheme serves it on some steps of devices: all such
        ways are tried for every number of steps."""
        row = np.full(self.units + 1, np.inf)
        # (edge before, scheme, steps taken) of each number of steps.
        way_of = np.full((self.units + 1, 3), -1, dtype=np.int64)
        impossible = np.full(self.units, np.inf)
        for before in range(s):
            schemes, taken = self._ways(before, s)
            if not len(schemes):
                continue
            # Seconds of the range, shared by the pipelines of each way [ways].
            range_work = self.work[schemes, s] - self.work[schemes, before]
            seconds = range_work / self._number(schemes, taken)
            # For every way the row of the edge before, shifted by the steps that the way takes:
            # [ways, units + 1]. Infinite where the way takes more steps than there are.
            before_s = sliding_window_view(
                np.concatenate([impossible, self.best[before]]), self.units + 1
            )
            ways_s = np.maximum(before_s[self.units - taken], seconds[:, None])
            best_way = ways_s.argmin(axis=0)
            least_s = np.take_along_axis(ways_s, best_way[None], axis=0)[0]
            better = least_s < row
            row[better] = least_s[better]
            way_of[better] = np.stack(
                [np.full(len(best_way), before), schemes[best_way], taken[best_way]], axis=1
            )[better]
        # More devices are never worse.
        for units in range(1, self.units + 1):
            if row[units - 1] <= row[units]:
                row[units], way_of[units] = row[units - 1], way_of[units - 1]
        self.best[s] = row
        for units, (before, k, taken) in enumerate(way_of.tolist()):
            if k >= 0:
                number = float(self._number(np.array([k]), np.array([taken]))[0])
                self.choice[s, units] = before, taken, (k, number)

    def _number(self, schemes: Whole, taken: Whole) -> Floats:
        """How many pipelines of each of ``schemes`` the ``taken`` steps of devices make: whole
        ones, or fractions if relaxed."""
        number = taken * self.step / self.widths[schemes]
        return number if self.relaxed else np.floor(number)

    def _ways(self, before: int, s: int) -> tuple[Whole, Whole]:
        """Ways to serve the range of lengths from edge ``before`` to edge ``s``: two arrays [ways],
        the scheme and the steps of devices that it takes."""
        table = self.table
        fitting = [k for k in self.fitting_schemes if table.schemes[k].most_tokens >= self.edges[s]]
        if not fitting:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        if self.relaxed:  # the scheme of the fewest device-seconds is best on any steps
            work = self.work[:, s] - self.work[:, before]
            k = min(fitting, key=lambda k: table.width[k] * work[k])
            return np.full(self.units, k), np.arange(1, self.units + 1)
        most = [table.devices // table.width[k] for k in fitting]
        pipelines = np.concatenate([np.arange(1, count + 1) for count in most])
        schemes = np.repeat(fitting, most)
        return schemes, np.ceil(pipelines * self.widths[schemes] / self.step).astype(np.int64)

    def parts(self, s: int) -> list[Part]:
        """(scheme, number of pipelines) of every range of lengths up to edge s, if all devices
        serve them: the choices traced back from the last range. Empty where they cannot."""
        parts, steps = list[Part](), self.units
        while s > 0:
            if (s, steps) not in self.choice:
                return []
            before, taken, part = self.choice[s, steps]
            parts.append(part)
            # A choice was copied to all larger numbers of steps that are no better: it belongs to
            # the smallest of these.
            while steps > taken and self.best[s, steps - 1] <= self.best[s, steps]:
                steps -= 1
            s, steps = before, steps - taken
        return parts


def _rounded(table: PriceTable, amounts: Sequence[float]) -> Iterator[Counts]:
    """All strategies of whole pipelines that round the ``amounts`` of each scheme up or down, fit
    the devices and have at least one pipeline."""
    # 1e-9 forgives rounding: what is nearly a whole number is rounded to it both ways.
    roundings = [sorted({floor(amount + 1e-9), ceil(amount - 1e-9)}) for amount in amounts]
    for counts in product(*roundings):
        used = sum(number * width for number, width in zip(counts, table.width, strict=True))
        if any(counts) and used <= table.devices:
            yield counts
