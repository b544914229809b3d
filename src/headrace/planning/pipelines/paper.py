"""Hydraulis' own planner, to compare with: its proposal, its greedy dispatch, one packing.

Algorithm 1 of its appendix E: sequences in random order, each to the pipeline that keeps the
slowest pipeline's sum_i T(l_i) + (P - 1) T(longest) lowest, the first of equals; the best of T
trials. All trials run side by side as arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from headrace.planning.pipelines.batch import Batch
from headrace.planning.pipelines.bounds import Relaxation
from headrace.planning.pipelines.dispatch import Dispatch
from headrace.planning.pipelines.dynamic_program import proposed
from headrace.planning.pipelines.plan import Iteration, iteration_of
from headrace.planning.pipelines.solution import Solution, packed
from headrace.planning.pipelines.world import Counts, World

__all__ = ["by_greedy", "greedy", "paper", "paper_candidates"]

_TRIALS = 100
_MOST_CANDIDATES = 40

Planned = tuple[tuple[str, ...], Callable[[int, Batch], Iteration]]


def paper(world: World, iterations: Sequence[Sequence[int]], seed: int) -> Planned:
    """The paper's planner: every candidate is dispatched and packed in every iteration."""
    candidates = paper_candidates(world, iterations)

    def one(number: int, batch: Batch) -> Iteration:
        tried = [by_greedy(batch, counts, seed=seed + number) for counts in candidates]
        found = [solution for solution in tried if solution is not None]
        best = min(found, key=lambda solution: solution.seconds)  # the first holds any sequence
        return iteration_of(batch, best, Relaxation(batch).bound())

    return tuple(world.text(counts) for counts in candidates), one


def paper_candidates(world: World, iterations: Sequence[Sequence[int]]) -> list[Counts]:
    """The strategies that are dispatched in every iteration; the first holds any sequence."""
    every = [tokens for lengths in iterations for tokens in lengths]
    # The authors' lists begin with pipelines of one scheme that hold any sequence. Those that hold
    # the longest come last from the programs, and first here.
    found = [world.homogeneous()[0], *reversed(proposed(world, every, relaxed=False))]
    found += reversed(proposed(world, every, relaxed=True))
    return list(dict.fromkeys(found))[:_MOST_CANDIDATES]


def by_greedy(batch: Batch, counts: Counts, *, seed: int) -> Solution | None:
    """What :func:`paper` makes of one batch and strategy; None where it cannot hold the batch."""
    if not _holds(batch.world, counts, batch.tokens[0]):
        return None
    return packed(batch, counts, greedy(batch, counts, seed=seed))


def greedy(batch: Batch, counts: Counts, *, seed: int, trials: int = _TRIALS) -> Dispatch:
    """Algorithm 1 of appendix E, for a strategy that holds the batch."""
    world = batch.world
    pipes = [k for k, n in enumerate(counts) for _ in range(n)]
    used = sorted(set(pipes))
    column = np.array([used.index(k) for k in pipes])
    seconds = np.stack([batch.array(k) for k in used], axis=1)  # [sequences, used pipes]
    closed = np.stack([batch.values > world.pipes[k].cap for k in used], axis=1)
    seconds[closed] = np.inf
    bubbles = np.array([world.pipes[k].stages - 1 for k in pipes], dtype=np.float64)
    random = np.random.default_rng(seed)
    orders = np.stack([random.permutation(len(batch)) for _ in range(trials)])
    work = np.zeros((trials, len(pipes)))
    longest = np.zeros((trials, len(pipes)))
    given = np.zeros((trials, len(batch)), dtype=np.int64)
    rows = np.arange(trials)
    for step in range(len(batch)):
        which = orders[:, step]
        own = seconds[which][:, column]
        with np.errstate(invalid="ignore"):
            extra = np.where(bubbles > 0, bubbles * np.maximum(longest, own), 0.0)
            slowest = (work + bubbles * longest).max(axis=1, keepdims=True)
            after = np.maximum(work + own + extra, slowest)
        chosen = after.argmin(axis=1)
        work[rows, chosen] += own[rows, chosen]
        longest[rows, chosen] = np.maximum(longest[rows, chosen], own[rows, chosen])
        given[rows, which] = chosen
    best = int((work + bubbles * longest).max(axis=1).argmin())
    members: list[list[int]] = [[] for _ in pipes]
    for i, q in enumerate(given[best].tolist()):
        members[q].append(i)
    return Dispatch.of(batch, pipes, members)


def _holds(world: World, counts: Counts, longest: int) -> bool:
    return any(n and pipe.cap >= longest for n, pipe in zip(counts, world.pipes, strict=True))
