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
    """The launches of a bucket.

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
        """How many groups end within ``tau_s``."""
        steps = int(tau_s / self.seconds * (1 + 1e-12)) if self.seconds else len(self.launches)
        return -(-len(self.launches) // steps) if steps else len(self.launches) + 1


def accumulated_s(table: PriceTable) -> float:
    """What :func:`accumulated` cannot beat: the device-seconds of its launches."""
    if fitting(table) is None:
        return 0.0
    busy_s = sum(
        batches.width * launch_s(table, batches.k, members)
        for batches in _all_batches(table)
        for members in batches.launches
    )
    return busy_s / table.devices


def accumulated(table: PriceTable) -> list[Group]:
    """Launches of the whole batch; none where no size holds the longest."""
    if fitting(table) is None:
        return []
    rounds = list[list[_Batches]]()
    widest_first = sorted(
        _all_batches(table), key=lambda batches: (-batches.width, batches.launches[0][0])
    )
    for batches in widest_first:
        used = [sum(other.width for other in beside) for beside in rounds]
        at = next((n for n, own in enumerate(used) if own + batches.width <= table.devices), None)
        if at is None:
            rounds.append([batches])
        else:
            rounds[at].append(batches)
    return [launch for beside in rounds for launch in _round(table.devices, beside)]


def _all_batches(table: PriceTable) -> list[_Batches]:
    """The launches of every bucket."""
    return [_best_batches(table, bucket) for bucket in buckets(table)]


def _best_batches(table: PriceTable, bucket: list[int]) -> _Batches:
    """The size and batch of the best throughput for the bucket's longest sequence."""
    longest = bucket[0]
    best = (float("inf"), 0, 1)
    for k, width in enumerate(table.width):
        if width <= table.devices and table.seconds(k)[longest] < float("inf"):
            batch = min(table.cap[k] // table.room(k)[longest], len(bucket))
            seconds = batch * table.seconds(k)[longest] + table.c[k]
            best = min(best, (width * seconds / batch, k, batch))
    _, k, batch = best
    launches = [bucket[n : n + batch] for n in range(0, len(bucket), batch)]
    slowest_s = launch_s(table, k, launches[0])
    return _Batches(k=k, width=table.width[k], seconds=slowest_s, launches=launches)


def _round(devices: int, beside: Sequence[_Batches]) -> list[Group]:
    """The launches of one round: buckets ``beside`` each other, each on as many groups as all need
    to end within the least time."""
    times = sorted(
        {
            steps * batches.seconds
            for batches in beside
            for steps in range(1, 1 + len(batches.launches))
        }
    )
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        if sum(batches.width * batches.groups(times[middle]) for batches in beside) <= devices:
            high = middle
        else:
            low = middle + 1
    launches, start = list[tuple[int, int, Group]](), 0
    for batches in beside:
        count = batches.groups(times[low])
        for n, held in enumerate(batches.launches):
            first = start + n % count * batches.width
            ranks = tuple(range(first, first + batches.width))
            launches.append((n // count, first, (batches.k, ranks, held)))
        start += count * batches.width
    return [launch for _, _, launch in sorted(launches, key=lambda item: item[:2])]
