"""Which strategies are worth trying in every iteration (Hydraulis, section 7), ours.

The paper fills a table over devices and lengths. Without the demand for whole pipelines its problem
falls apart: each length takes the pipe on which it needs the fewest devices
(:mod:`headrace.planning.pipelines.bounds`). That relaxed optimum, rounded, is the start of a search
that exchanges pipelines, scored by the fluid estimate on sampled iterations, bubbles and constants
of micro-batches included. It is done for every class of longest sequence, for which other pipes
have room, with all pipes and with those of one stage; what the best of each really take on a sample
decides. Large samples are thinned, and the cluster with them, so the effort does not grow with the
number of devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

from headrace.planning.pipelines.batch import Batch
from headrace.planning.pipelines.bounds import Relaxation
from headrace.planning.pipelines.climb import climb, filled, rounded
from headrace.planning.pipelines.fluid import fluid
from headrace.planning.pipelines.solution import solved
from headrace.planning.pipelines.world import Counts, World

__all__ = ["Proposal", "propose"]

_SAMPLES = 4
_SEQUENCES = 1000  # of one sample; larger ones are thinned
_TRIES = 50
_LEAST_TRUNCATED = 0.5  # of the sequences: a class of batches with fewer is not met
_STAGES_EARN = 0.997
_SLOWER = 1.03  # a pipe that is in nothing better than this is not looked at again


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """``candidates`` for every iteration, and the pipes ``kinds`` that are in the good ones.
    ``classes`` says which strategy was best up to which longest sequence."""

    candidates: tuple[Counts, ...]
    kinds: tuple[int, ...]
    classes: tuple[tuple[int, Counts], ...]


def propose(world: World, iterations: Sequence[Sequence[int]], seed: int) -> Proposal:
    """Candidates from a few of the iterations; which is drawn from ``seed``."""
    picked = list(range(len(iterations)))
    if len(picked) > _SAMPLES:
        picked = sorted(Random(seed).sample(picked, _SAMPLES))
    thinned = [_thinned(world, iterations[i]) for i in picked]
    scales = {small.devices: times for small, times, _ in thinned}
    found: dict[Counts, None] = dict.fromkeys(world.homogeneous())
    kinds, classes = set[int](), list[tuple[int, Counts]]()
    for longest, samples in _classes(thinned):
        best = _best(samples)
        kinds.update(k for counts in best for k, n in enumerate(counts) if n)
        times = scales[samples[0].world.devices]
        whole = [_grown(world, counts, times) for counts in best]
        found.update(dict.fromkeys(whole))
        classes.append((longest, whole[0]))
    return Proposal(candidates=tuple(found), kinds=tuple(sorted(kinds)), classes=tuple(classes))


def _thinned(world: World, lengths: Sequence[int]) -> tuple[World, int, list[int]]:
    """Every so many of the sequences by length, and as much of the cluster."""
    most = max(pipe.devices for pipe in world.pipes)
    times = max(1, min(len(lengths) // _SEQUENCES, world.devices // (8 * most)))
    small = World(devices=world.devices // times, pipes=world.pipes)
    return small, times, sorted(lengths, reverse=True)[::times]


def _classes(
    thinned: Iterable[tuple[World, int, list[int]]],
) -> list[tuple[int, list[Batch]]]:
    """Samples by the rooms that change what fits: whole ones, and cut to each room."""
    samples = list(thinned)
    longest = max(lengths[0] for *_, lengths in samples)
    devices = samples[0][0].devices
    alike = [(w, lengths) for w, _, lengths in samples if w.devices == devices]
    caps = sorted({pipe.cap for pipe in samples[0][0].pipes if pipe.cap < longest})
    classes = list[tuple[int, list[Batch]]]()
    for w, lengths in alike:
        classes.append((lengths[0], [Batch(w, lengths)]))
    w, lengths = alike[0]
    for cap in caps:
        short = [tokens for tokens in lengths if tokens <= cap]
        if len(short) >= _LEAST_TRUNCATED * len(lengths):
            classes.append((cap, [Batch(w, short)]))
    return sorted(classes, key=lambda item: item[0])


def _best(samples: list[Batch]) -> list[Counts]:
    """The best strategies of one class, the best first."""
    world, batch = samples[0].world, samples[0]
    every = range(len(world.pipes))
    single = [k for k in every if world.pipes[k].stages == 1]
    several = [k for k in every if world.pipes[k].stages > 1]
    found = list[tuple[float, Counts]]()
    relaxation = Relaxation(batch)
    bound_s = relaxation.bound().seconds
    for kinds in (list(every), single, several):
        if not any(world.pipes[k].cap >= batch.tokens[0] for k in kinds):
            continue
        start = rounded(world, relaxation.start(bound_s, kinds), batch.tokens[0])
        starts = [start, *world.homogeneous()]
        scored = [(_score(samples, counts, inf), counts) for counts in starts
                  if all(n == 0 or k in kinds for k, n in enumerate(counts))]  # fmt: skip
        start_s, start = min(scored)
        if start_s == inf:
            continue

        def score(counts: Counts, below_s: float) -> float:
            return _score(samples, counts, below_s)

        *_, path = climb(world, start, start_s, score, kinds, _TRIES)
        for _, counts in path[-2:]:
            solution = solved(batch, counts, steps=0)
            if solution is not None:
                found.append((solution.seconds, counts))
    # Stages must earn their place: what has them is dearer to plan and packs less evenly.
    plain_s = [seconds for seconds, counts in found if not _staged(world, counts)]
    most_s = min(plain_s, default=inf) * _STAGES_EARN
    found = [item for item in found if item[0] < most_s or not _staged(world, item[1])]
    found.sort()
    limit_s = found[0][0] * _SLOWER
    return list(dict.fromkeys(counts for seconds, counts in found if seconds <= limit_s))


def _staged(world: World, counts: Counts) -> bool:
    return any(n and pipe.stages > 1 for n, pipe in zip(counts, world.pipes, strict=True))


def _score(samples: Sequence[Batch], counts: Counts, below_s: float) -> float:
    """The mean of the fluid estimates, infinite when not below."""
    if len(samples) == 1:
        return fluid(samples[0], counts, below_s=below_s).seconds
    total = sum(fluid(batch, counts).seconds for batch in samples) / len(samples)
    return total if total < below_s else inf


def _grown(world: World, counts: Counts, times: int) -> Counts:
    """A strategy of the thinned cluster for the whole one."""
    grown = tuple(n * times for n in counts)
    return filled(world, grown, [k for k, n in enumerate(counts) if n])
