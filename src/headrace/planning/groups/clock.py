"""When launches end, under either semantics.

free      launches are issued in order; one starts when all its ranks are free
lockstep  the i-th launch of every rank starts together with every other i-th: ranks that share
          a launch wait until all of them have come to it, and each step lasts as long as its
          slowest launch
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from headrace.planning.groups.work import Work

__all__ = ["Job", "Semantics", "group_sizes", "jobs_s", "launches_s"]

Semantics = Literal["free", "lockstep"]

Job = tuple[tuple[int, ...], list[int]]
"""A launch while planning: its ranks, and the positions of its sequences."""


def group_sizes(jobs: Iterable[Job]) -> tuple[int, ...]:
    """The sizes of all launches, largest first."""
    return tuple(sorted((len(ranks) for ranks, _ in jobs), reverse=True))


def launches_s(
    devices: int, launches: Iterable[tuple[Sequence[int], float]], semantics: Semantics
) -> float:
    """Seconds until the last of ``launches`` (ranks and seconds, in order) has ended."""
    if semantics == "free":
        free = [0.0] * devices
        for ranks, seconds in launches:
            end = max([free[rank] for rank in ranks]) + seconds
            for rank in ranks:
                free[rank] = end
        return max(free)
    done, steps = [0] * devices, list[float]()
    for ranks, seconds in launches:
        step = max([done[rank] for rank in ranks])
        if step == len(steps):
            steps.append(seconds)
        else:
            steps[step] = max(steps[step], seconds)
        for rank in ranks:
            done[rank] = step + 1
    return sum(steps)


def jobs_s(work: Work, jobs: Iterable[Job], semantics: Semantics) -> float:
    """Seconds of launches that hold positions of a batch."""
    timed = [(ranks, work.launch_s(len(ranks), held)) for ranks, held in jobs]
    return launches_s(work.devices, timed, semantics)
