"""Gradient accumulation after Data-Centric Parallel, with idle time weighted by devices.

The samples of the step are given here. In the paper they are chosen by what fills the devices:
:mod:`headrace.planners.drawn_iterations`.

1. Every bucket of like lengths takes the size p and the batch b of the best throughput, tokens per
   device-second (equation 1). That makes B launches of T seconds of it.
2. Groups work in parallel, each on one bucket, with g accumulation steps. The paper minimises the
   idle seconds summed over groups (equation 3), as if an idle group of eight wasted as much as an
   idle rank. Weighted by devices, idle time is N max_j g_j T_j less the device-seconds of all
   launches, which do not depend on g. So the least time tau is sought in which

       sum over the buckets of p ceil(B / floor(tau / T)) <= N

   ranks suffice; each bucket's launches are spread evenly over its groups.
3. Buckets that need more ranks than there are, even one group each, work in several rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.planners.buckets import buckets
from headrace.planners.launched import fitting
from headrace.planning.batch import PriceTable
from headrace.planning.schedule import Group, launch_s

__all__ = ["accumulated", "accumulated_s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batches:
    """The launches of a bucket, all on groups of one scheme.

    Attributes:
        k: The scheme of their groups.
        width: Ranks of a group.
        seconds: Seconds of the slowest launch.
        launches: Positions of the sequences of each launch.
    """

    k: int
    width: int
    seconds: float
    launches: list[list[int]]

    def groups(self, tau_s: float) -> int:
        """How many groups the bucket needs for its launches to end within ``tau_s`` seconds; more
        than it has launches where not even one ends in time."""
        launches_each = (
            int(tau_s / self.seconds * (1 + 1e-12)) if self.seconds else len(self.launches)
        )
        return -(-len(self.launches) // launches_each) if launches_each else len(self.launches) + 1


def accumulated_s(table: PriceTable) -> float:
    """Seconds that the schedule of :func:`accumulated` cannot beat: the device-seconds of its
    launches over all devices."""
    if fitting(table) is None:
        return 0.0
    busy_s = sum(
        batches.width * launch_s(table, batches.k, members)
        for batches in _all_batches(table)
        for members in batches.launches
    )
    return busy_s / table.devices


def accumulated(table: PriceTable) -> list[Group]:
    """Launches of the whole batch by gradient accumulation; none where no group size holds the
    longest sequence. Buckets, the widest groups first, go into the first round that has ranks for
    one group of theirs."""
    if fitting(table) is None:
        return []
    rounds = list[list[_Batches]]()
    widest_first = sorted(
        _all_batches(table), key=lambda batches: (-batches.width, batches.launches[0][0])
    )
    for batches in widest_first:
        ranks_used = [sum(other.width for other in in_round) for in_round in rounds]
        first_fit = next(
            (
                number
                for number, ranks in enumerate(ranks_used)
                if ranks + batches.width <= table.devices
            ),
            None,
        )
        if first_fit is None:
            rounds.append([batches])
        else:
            rounds[first_fit].append(batches)
    return [launch for in_round in rounds for launch in _round(table.devices, in_round)]


def _all_batches(table: PriceTable) -> list[_Batches]:
    """The launches of every bucket."""
    return [_best_batches(table, bucket) for bucket in buckets(table)]


def _best_batches(table: PriceTable, bucket: list[int]) -> _Batches:
    """The launches of a bucket, with the scheme and batch of the most tokens per device-second for
    its longest sequence."""
    longest = bucket[0]
    best = (float("inf"), 0, 1)  # (device-seconds of a sequence, scheme, batch)
    for k, width in enumerate(table.width):
        if width <= table.devices and table.seconds(k)[longest] < float("inf"):
            batch = min(table.cap[k] // table.room(k)[longest], len(bucket))
            launch_seconds = batch * table.seconds(k)[longest] + table.c[k]
            best = min(best, (width * launch_seconds / batch, k, batch))
    _, k, batch = best
    launches = [bucket[start : start + batch] for start in range(0, len(bucket), batch)]
    slowest_s = launch_s(table, k, launches[0])
    return _Batches(k=k, width=table.width[k], seconds=slowest_s, launches=launches)


def _round(devices: int, in_round: Sequence[_Batches]) -> list[Group]:
    """The launches of one round: its buckets work at the same time, each on as many groups as it
    needs so that all end within the least time for which the devices suffice."""
    # What a bucket needs changes only at multiples of its launch's seconds.
    end_times_s = sorted(
        {
            steps * batches.seconds
            for batches in in_round
            for steps in range(1, 1 + len(batches.launches))
        }
    )
    low, high = 0, len(end_times_s) - 1  # binary search of the least sufficient time
    while low < high:
        middle = (low + high) // 2
        ranks_needed = sum(
            batches.width * batches.groups(end_times_s[middle]) for batches in in_round
        )
        if ranks_needed <= devices:
            high = middle
        else:
            low = middle + 1
    launches = list[tuple[int, int, Group]]()  # (accumulation step, first rank, launch)
    start_rank = 0
    for batches in in_round:
        groups = batches.groups(end_times_s[low])
        for number, members in enumerate(batches.launches):
            first_rank = start_rank + number % groups * batches.width
            ranks = tuple(range(first_rank, first_rank + batches.width))
            launches.append((number // groups, first_rank, (batches.k, ranks, members)))
        start_rank += groups * batches.width
    return [launch for _, _, launch in sorted(launches, key=lambda item: item[:2])]
