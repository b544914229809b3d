"""Waves: groups that start together and end with the slowest."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.planning.groups.clock import Job
from headrace.planning.groups.filling import Filler, Group
from headrace.planning.groups.work import Work

__all__ = ["Wave", "sorted_into_waves", "wave_jobs", "waves_s"]

Wave = list[Group]


def waves_s(filler: Filler, waves: Sequence[Wave]) -> float:
    """Seconds of some waves, one after the other."""
    return sum(max(filler.group_s(group) for group in wave) for wave in waves)


def sorted_into_waves(filler: Filler, groups: Sequence[Group], count: int) -> list[Wave] | None:
    """The groups in ``count`` waves, longest first; None when they do not fit."""
    sizes, devices = filler.work.sizes, filler.work.devices
    timed = [(filler.group_s(group), group) for group in groups]
    by_time = sorted(timed, key=lambda item: (-item[0], item[1][1][0]))
    by_size = sorted(timed, key=lambda item: (-item[1][0], -item[0], item[1][1][0]))
    for order in (by_time, by_size):
        rooms, first = [devices] * count, 0
        waves: list[list[tuple[float, Group]]] = [[] for _ in range(count)]
        for seconds, group in order:
            p = sizes[group[0]]
            while first < count and rooms[first] < sizes[0]:
                first += 1
            at = next((w for w in range(first, count) if rooms[w] >= p), None)
            if at is None:
                break
            rooms[at] -= p
            waves[at].append((seconds, group))
        else:
            used = sorted((wave for wave in waves if wave), key=lambda w: -max(s for s, _ in w))
            return [[group for _, group in wave] for wave in used]
    return None


def wave_jobs(work: Work, waves: Sequence[Wave]) -> list[Job]:
    """The launches of waves: in each the largest groups first, on neighbouring ranks."""
    jobs = list[Job]()
    for wave in waves:
        start = 0
        for row, held in sorted(wave, key=lambda group: (-group[0], min(group[1]))):
            p = work.sizes[row]
            jobs.append((tuple(range(start, start + p)), sorted(held)))
            start += p
    return jobs
