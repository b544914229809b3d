"""Searches strategies by exchanging pipelines of one scheme for those of another.

Filling (:mod:`headrace.planning.side_by_side`) opens pipelines as sequences come, which is good
where there are many pipelines. Few large ones are a choice of their own: from the best strategy
known, 1, 2, 4, ... pipelines of a scheme take the place of another's, and a strategy is better if
its pipelines can be filled in a little less time. Effort is counted in fillings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from headrace.planning.batch import PriceTable
from headrace.planning.bounds import BoundRows
from headrace.planning.search import Searched
from headrace.planning.side_by_side import Filler, Pipelines

__all__ = ["climbed", "counts_of", "worthwhile"]

Counts = tuple[int, ...]
"""A strategy: how many pipelines of each of a table's schemes."""

_GAIN = 1e-3  # share of the time by which an exchange has to be quicker
_KINDS = 8  # schemes that take part in exchanges, at most


def counts_of(table: PriceTable, pipelines: Pipelines) -> Counts:
    """The strategy of some pipelines."""
    counts = [0] * len(table)
    for k, _ in pipelines:
        counts[k] += 1
    return tuple(counts)


def worthwhile(table: PriceTable, tau: float) -> list[int]:
    """The schemes on which sequences need the fewest devices, and for the longest ones the
    quickest, at most eight."""
    shares = BoundRows.of(table).shares(tau)
    least, chosen = shares.min(axis=0), shares.argmin(axis=0)
    finite = np.where(np.isfinite(least), least, 0.0) * table.batch.counts
    weight = np.bincount(chosen, weights=finite, minlength=len(table))
    near = (shares <= least * 1.1) @ table.batch.counts
    order = sorted(range(len(table)), key=lambda k: (-weight[k], -int(near[k]), k))
    return sorted(k for k in order[:_KINDS] if near[k])


def climbed(
    table: PriceTable,
    starts: Sequence[Counts],
    kinds: Sequence[int],
    best_s: float,
    bound_s: float,
    work: int,
) -> Iterator[tuple[Filler, Searched[Pipelines]]]:
    """Fillings that take less and less than ``best_s`` seconds, found by exchanges from ``starts``,
    the most promising first, in at most ``work`` fillings."""
    seen, waiting = set(starts), list(starts)
    shares = cache(BoundRows.of(table).shares)

    @cache
    def needed(tau: float, held: tuple[int, ...]) -> float:
        """Devices that sequences take of the cheapest of some schemes, as if it did not matter how
        many pipelines there are of each."""
        return float(shares(tau)[list(held)].min(axis=0) @ table.batch.counts)

    while waiting and work > 0 and best_s > bound_s * (1 + _GAIN):
        start = waiting.pop(0)
        for counts in _neighbours(table, start, kinds):
            if counts in seen:
                continue
            if work <= 0:
                return
            seen.add(counts)
            gain, tau, found = _GAIN, best_s * (1 - _GAIN), None
            held = tuple(k for k, number in enumerate(counts) if number)
            if needed(tau, held) > sum(counts[k] * table.width[k] for k in held):
                continue
            filler = Filler(table, most=counts)
            while True:
                filled = filler.fill(tau, measured=False)
                work -= 1
                if not isinstance(filled, float):
                    found = Searched(seconds=tau, result=filled)
                    gain *= 2
                elif gain > _GAIN:
                    gain = _GAIN
                else:
                    break
                assert found is not None, "a gain grows where something was found"
                tau = found.seconds * (1 - gain)
            if found is not None:
                best_s = found.seconds
                yield filler, found
                waiting.insert(0, counts)
                break


def _neighbours(table: PriceTable, counts: Counts, kinds: Sequence[int]) -> Iterator[Counts]:
    """Strategies with 1, 2, 4, ... pipelines of one kind more in place of another's; what is left
    over is filled with the kinds, the largest first."""
    widths = table.width
    idle = table.devices - sum([n * width for n, width in zip(counts, widths, strict=True)])
    held = [k for k in range(len(counts)) if counts[k]]
    largest = max((counts[k] * widths[k] for k in held), default=0)
    falling, amount = sorted(kinds, key=lambda k: (-widths[k], k)), 1
    while amount <= max(1, largest):
        for j in held:
            for k in kinds:
                taken = max(0, -(-(amount * widths[k] - idle) // widths[j]))
                if k == j or taken > counts[j]:
                    continue
                changed = list(counts)
                changed[j] -= taken
                changed[k] += amount
                left = idle + taken * widths[j] - amount * widths[k]
                for other in falling if left else ():
                    if left >= widths[other]:
                        changed[other] += left // widths[other]
                        left %= widths[other]
                yield tuple(changed)
        amount *= 2
