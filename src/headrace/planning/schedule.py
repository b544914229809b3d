"""A schedule: pipelines on ranks, with their sequences in micro-batches.

Pipelines stand in the order in which their ranks run them, larger ones first. Pipelines side by
side share no ranks; nested ones lie one in another, so that short sequences fill the gaps that long
ones leave. A pipeline starts when the last of its ranks is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.planning.batch import PriceTable
from headrace.planning.packing import Packed, pack
from headrace.spec import Strategy

__all__ = ["Group", "Schedule", "placed"]

Group = tuple[int, tuple[int, ...], list[int]]
"""A pipeline: the number of its scheme in the table, its ranks, its sequences (positions)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """``packs[g]`` are the micro-batches of ``groups[g]``. ``seconds`` is when the last rank has
    nothing left to compute if all weights are there at once, without the costs' scale."""

    table: PriceTable
    groups: tuple[Group, ...]
    packs: tuple[Packed, ...]
    seconds: float
    source: str

    @classmethod
    def of(cls, table: PriceTable, groups: Iterable[Group], source: str) -> Schedule:
        """Pack ``groups``, each with its sequences longest first; ``source`` names what made
        them."""
        order = tuple(group for group in groups if group[2])
        packs = tuple(pack(table, k, members) for k, _, members in order)
        timed = zip((ranks for _, ranks, _ in order), packs, strict=True)
        seconds = last_free_s(table.devices, ((ranks, own.seconds) for ranks, own in timed))
        return cls(table=table, groups=order, packs=packs, seconds=seconds, source=source)

    @property
    def strategy(self) -> Strategy:
        """The schemes of all pipelines."""
        return Strategy.of(self.table.schemes[k].scheme for k, _, _ in self.groups)

    @property
    def names(self) -> str:
        """The strategy as the costs write it, ``1*tp16 + 6*tp8``, larger pipelines first."""
        counts: dict[int, int] = {}
        for k, _, _ in self.groups:
            counts[k] = counts.get(k, 0) + 1
        order = sorted(counts, key=lambda k: (-self.table.width[k], k))
        return " + ".join(f"{counts[k]}*{self.table.schemes[k]}" for k in order)


def last_free_s(devices: int, runs: Iterable[tuple[Sequence[int], float]]) -> float:
    """When the last rank is free, given (ranks, seconds) in the order in which they run."""
    free = [0.0] * devices
    for ranks, seconds in runs:
        if len(ranks) == 1:
            free[ranks[0]] += seconds
            continue
        end = max([free[rank] for rank in ranks]) + seconds
        for rank in ranks:
            free[rank] = end
    return max(free)


def placed(table: PriceTable, some: Iterable[tuple[int, list[int]]]) -> list[Group]:
    """Pipelines side by side, (scheme, sequences), on ranks from the first: wide tensor blocks
    first, and among equals large pipelines; so blocks start at multiples of their width wherever
    widths divide one another."""
    first, groups = 0, list[Group]()

    def key(item: tuple[int, list[int]]) -> tuple[int, int, int]:
        scheme = table.schemes[item[0]].scheme
        return -scheme.tensor, -scheme.devices, item[0]

    for k, members in sorted(some, key=key):
        width = table.width[k]
        groups.append((k, tuple(range(first, first + width)), members))
        first += width
    return groups
