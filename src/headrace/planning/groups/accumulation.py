"""Gradient accumulation after Data-Centric Parallel, with idle time weighted by devices.

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

from headrace.planning.groups.buckets import buckets
from headrace.planning.groups.clock import Job
from headrace.planning.groups.work import Work

__all__ = ["accumulation_jobs", "accumulation_s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batches:
    """A bucket's launches, on groups of ``p``, each of at most ``seconds``."""

    p: int
    seconds: float
    launches: list[list[int]]

    def groups(self, tau_s: float) -> int:
        """How many groups end within ``tau_s``."""
        steps = int(tau_s / self.seconds * (1 + 1e-12)) if self.seconds else len(self.launches)
        return -(-len(self.launches) // steps) if steps else len(self.launches) + 1


def accumulation_s(work: Work) -> float:
    """What :func:`accumulation_jobs` cannot beat: the device-seconds of its launches."""
    busy_s = sum(
        batches.p * work.launch_s(batches.p, held)
        for batches in _all_batches(work)
        for held in batches.launches
    )
    return busy_s / work.devices


def accumulation_jobs(work: Work) -> list[Job]:
    """Launches of the whole batch."""
    rounds = list[list[_Batches]]()
    for batches in sorted(_all_batches(work), key=lambda some: (-some.p, some.launches[0][0])):
        used = [sum(other.p for other in some) for some in rounds]
        at = next((n for n, p in enumerate(used) if p + batches.p <= work.devices), None)
        if at is None:
            rounds.append([batches])
        else:
            rounds[at].append(batches)
    return [job for some in rounds for job in _round(work.devices, some)]


def _all_batches(work: Work) -> list[_Batches]:
    return [_best_batches(work, bucket) for bucket in buckets(work)]


def _best_batches(work: Work, bucket: list[int]) -> _Batches:
    """The size and batch of the best throughput for the bucket's longest sequence."""
    longest = bucket[0]
    best = (float("inf"), 0, 1)
    for row, p in enumerate(work.sizes):
        batch = min(work.costs.cap_tokens * p // work.tokens[longest], len(bucket))
        if batch:
            seconds = batch * float(work.seconds[row, longest]) + work.c_s
            best = min(best, (p * seconds / batch, row, batch))
    _, row, batch = best
    launches = [bucket[n : n + batch] for n in range(0, len(bucket), batch)]
    p = work.sizes[row]
    return _Batches(p=p, seconds=work.launch_s(p, launches[0]), launches=launches)


def _round(devices: int, some: Sequence[_Batches]) -> list[Job]:
    times = sorted(
        {
            steps * batches.seconds
            for batches in some
            for steps in range(1, 1 + len(batches.launches))
        }
    )
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        if sum(batches.p * batches.groups(times[middle]) for batches in some) <= devices:
            high = middle
        else:
            low = middle + 1
    jobs, start = list[tuple[int, int, Job]](), 0
    for batches in some:
        count = batches.groups(times[low])
        for n, held in enumerate(batches.launches):
            first = start + n % count * batches.p
            jobs.append((n // count, first, (tuple(range(first, first + batches.p)), held)))
        start += count * batches.p
    return [job for _, _, job in sorted(jobs, key=lambda item: item[:2])]
