"""Generators of static schedules: what a user configures by hand, never to be worse than.

A static schedule of one scheme cuts the devices into as many pipelines of it as there is room for
(devices that are left over stay idle), and gives the longest sequence first to the pipeline that
ends first, which packs what it got. In lockstep its micro-batches are issued one by one, those of
each group with the longest first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from math import inf
from operator import lt

import numpy as np

from headrace.planning.batch import PriceTable
from headrace.planning.filling import Filler, Pipelines, deal
from headrace.planning.generators import FEW, Effort, Known, Role, least_time
from headrace.planning.packing import pack
from headrace.planning.schedule import Assignment, launched, placed
from headrace.planning.tolerances import NEAR

__all__ = [
    "Homogeneous",
    "Static",
    "best_static",
    "best_statics",
    "static_bounds",
    "static_in_lockstep",
    "static_s",
    "static_schedule",
]


_STATIC = Role(
    name="static", tables="one size", semantics=("free", "lockstep"), beyond=-inf, final=True
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """Schedules of one scheme everywhere: of the problem's ``static_size`` where it is given.

    Attributes:
        role: For which problems it is, and when it is asked: whatever the gap, as no plan may be
            worse than the best static one.
    """

    role: Role = _STATIC

    def drafts(self, table: PriceTable, known: Known) -> Iterator[Assignment]:
        """The static schedules that may be the best, or that of the given size."""
        size, lockstep = known.problem.static_size, known.problem.semantics == "lockstep"
        if size is not None:
            if size not in table.width:
                return
            table = PriceTable.like(table, [table.schemes[table.width.index(size)]])
        if lockstep:
            found = static_in_lockstep(table)
        elif known.latest_s is not None and size is None:
            yield from best_statics(table, known.latest_s)
            return
        else:
            found = best_static(table)
        if found is not None:
            yield found


_HOMOGENEOUS = Role(
    name="homogeneous", tables="every scheme", costs=("model",), final=True, last=True
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Homogeneous:
    """Schedules of one scheme with stages or tensor blocks everywhere, for few sequences.

    The other generators compare seconds of computing. Where sequences are few the exchange may be
    most of a step, and stages hide more of it than groups do, also where groups compute in less:
    each of these schedules that may be the quickest is timed by the clock.

    Attributes:
        role: For which problems it is, and when it is asked: last, as the others may have come
            close to the bound.
        moving: Share of the bound from which on it matters what pulls and pushes take.
    """

    role: Role = _HOMOGENEOUS
    moving: float = 0.1

    def drafts(self, table: PriceTable, known: Known) -> Iterator[Assignment]:
        """The schedules that may have a quicker step than all before."""
        deeper = [
            scheme for scheme in table.schemes if scheme.depth > 1 or scheme.scheme.tensor > 1
        ]
        moved_s = table.exchange.pull_s + table.exchange.push_s
        if not deeper or len(table.tokens) > FEW or moved_s < self.moving * known.bound_s:
            return
        for schedule in best_statics(PriceTable.like(table, deeper), known.latest_s):
            yield replace(schedule, source="homogeneous")


def static_schedule(
    table: PriceTable, k: int, below_s: float = inf, *, late: Callable[[float], bool] | None = None
) -> Assignment | None:
    """The static schedule of one scheme.

    Args:
        table: The prices.
        k: The scheme.
        below_s: Seconds that pipelines with stages must stay below.
        late: A function that says whether a schedule is of no use if one of its pipelines, without
            stages, takes the given seconds.

    Returns:
        The schedule; None when the scheme does not hold the longest sequence, or takes too long.
    """
    count = table.devices // table.width[k]
    if not count or not np.isfinite(table.alone[k, 0]):
        return None
    if table.depth[k] > 1:
        found = _staged(table, k, count, below_s)
        return None if found is None else Assignment.of(table, placed(table, found), "static")
    pipelines: Pipelines = [(k, []) for _ in range(count)]
    deal(table, pipelines, range(len(table.tokens)))
    if late is not None:  # pack first the pipeline that seems to end last: it may be too late
        seconds = table.seconds(k)
        _, busiest = max(pipelines, key=lambda item: sum([seconds[i] for i in item[1]]))
        if late(pack(table, k, busiest).seconds):
            return None
    return Assignment.of(table, placed(table, pipelines), "static")


def best_static(table: PriceTable) -> Assignment | None:
    """The static schedule of the least seconds, of equal ones that of the fewest devices; None
    where no scheme holds the longest sequence."""
    return next(iter(best_statics(table)), None)


def best_statics(
    table: PriceTable, latest_s: Callable[[Assignment | None], float] | None = None
) -> list[Assignment]:
    """Static schedules that may be the best. Schemes whose bound is too high are left out.

    Args:
        table: The prices.
        latest_s: A function from the quickest schedule so far (None before there is one) to the
            seconds of computing from which on no other schedule can have a quicker step. A step
            also moves weights, of which schemes need not move the same, so a schedule that
            computes longer may still be of use. Left out, a step takes what computing takes.

    Returns:
        The schedules, the quickest first.
    """
    found = _Statics(latest_s)
    # Those with stages take a search, which is short where there is something to be better than.
    for bound_s, k in sorted(
        static_bounds(table), key=lambda item: (table.depth[item[1]] > 1, item)
    ):
        if not found.is_late(bound_s):
            made = static_schedule(table, k, found.best_s, late=found.is_late)
            if made is not None:
                found.add(k, made)
    return [schedule for _, _, schedule in found.sorted()]


class _Statics:
    """The static schedules made so far, and which further ones may be of use.

    Args:
        latest_s: A function from the quickest schedule made so far, or None, to the seconds of
            computing from which on no other schedule can have a quicker step; None where a step
            takes what computing takes.

    Attributes:
        made: (seconds of computing, scheme, schedule) of each schedule made.
        best_s: The least of these seconds, infinite without any.
    """

    def __init__(self, latest_s: Callable[[Assignment | None], float] | None) -> None:
        self.latest_s = latest_s
        self.made = list[tuple[float, int, Assignment]]()
        self.best_s = inf

    def add(self, k: int, schedule: Assignment) -> None:
        """Keep ``schedule``, the static schedule of scheme k."""
        self.made.append((schedule.seconds, k, schedule))
        self.best_s = min(self.best_s, schedule.seconds)

    def sorted(self) -> list[tuple[float, int, Assignment]]:
        """(seconds, scheme, schedule) of all schedules, the quickest first; of equal ones that of
        the fewest devices first."""
        return sorted(self.made, key=lambda item: item[:2])

    def is_late(self, seconds: float) -> bool:
        """Whether a static schedule that computes for ``seconds`` is of no use beside those made so
        far. What computes in less than all of them is always of use. Otherwise the limit is what
        ``latest_s`` gives for the quickest one, or without ``latest_s`` its own seconds: one that
        takes just as long is still of use, as it may need fewer devices."""
        if self.made and seconds < self.best_s:
            return False
        if self.latest_s is None:
            return bool(self.made) and seconds > self.best_s
        best = self.sorted()[0][2] if self.made else None
        return seconds >= self.latest_s(best)


def static_in_lockstep(table: PriceTable) -> Assignment | None:
    """The best static schedule in lockstep, where the i-th micro-batches of all ranks start
    together; None where no scheme holds the longest sequence."""
    best, best_s, bounds = None, inf, list(static_bounds(table))
    # Bounds up to this count as equal. Of these the widest groups come first, as fewer launches
    # wait for each other.
    equal_s = min((bound_s for bound_s, _ in bounds), default=0.0) * (1 + NEAR)
    for bound_s, k in sorted(bounds, key=lambda item: (max(item[0], equal_s), -item[1])):
        if bound_s <= best_s:
            # Whether seconds are above a limit, with a margin, as launches may be priced by slower
            # rows.
            late = partial(lt, (1 + NEAR) * best_s)
            schedule = _in_lockstep(table, static_schedule(table, k, late=late), late)
            if schedule is not None and schedule.seconds <= best_s:
                best, best_s = schedule, schedule.seconds
    return best


def _in_lockstep(
    table: PriceTable, schedule: Assignment | None, late: Callable[[float], bool]
) -> Assignment | None:
    """The static ``schedule`` issued launch by launch, in lockstep; None where there is none or its
    steps take so long that it is ``late``."""
    if schedule is None:
        return None
    falling_times = [sorted(packed.times, reverse=True) for packed in schedule.packs]
    # The n-th longest micro-batches of all pipelines run together; each step takes its longest.
    if late(sum(map(max, zip_longest(*falling_times, fillvalue=0.0)))):
        return None
    return launched(schedule)


def static_bounds(table: PriceTable) -> Iterator[tuple[float, int]]:
    """(lower bound in seconds of its static schedule, scheme) for each scheme that holds the
    longest sequence and fits the devices."""
    for k in range(len(table)):
        if table.width[k] <= table.devices and np.isfinite(table.alone[k, 0]):
            yield static_s(table, k), k


def static_s(table: PriceTable, k: int) -> float:
    """Lower bound in seconds of the static schedule of scheme k: an even share of all work for each
    pipeline, or the longest sequence alone through all stages, whichever is more."""
    count = table.devices // table.width[k]
    work_s = float(table.work[k] @ table.batch.counts) / count + float(table.least_c[k, 0])
    busy_s = max(float(table.spread[k] @ table.batch.counts) / count, work_s)
    return max(busy_s, table.depth[k] * float(table.alone[k, 0]))


def _staged(table: PriceTable, k: int, count: int, below_s: float) -> Pipelines | None:
    """Fill ``count`` pipelines of scheme k, which has stages, in about the least time, so that each
    gets sequences of like length; None where that seems to take ``below_s`` seconds or more."""
    counts = [count if other == k else 0 for other in range(len(table))]
    filler, low_s = Filler(table, most=counts), static_s(table, k)
    # All sequences on one pipeline, each in a micro-batch of its own, certainly end by then.
    high_s = table.depth[k] * (table.sum_s(k) + table.c[k] * len(table.tokens)) + low_s
    if below_s < high_s:
        if isinstance(filler.fill(below_s, measured=False), float):
            return None
        high_s = below_s
    effort = Effort(growth=1.0, least=0.01, close=0.01)
    found = least_time(filler.fill, low_s, high_s, effort)
    return None if found is None else found.result
