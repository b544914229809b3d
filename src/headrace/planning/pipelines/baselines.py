"""What others do, with the interface of ours: each prepares from all iterations, then plans one
after the other.

    static         the homogeneous strategy (one scheme for all pipelines) that is best over all
                   iterations, sequences dispatched by cost
    max-length     the same, but sequences are packed to the longest's length as they come, and
                   the packs dealt out evenly (Megatron-LM)
    token-balance  the same, tokens balanced by Karmarkar and Karp's differencing

Several strategies in turn: :mod:`headrace.planning.pipelines.switching`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from headrace.errors import InfeasiblePlan
from headrace.planning.pipelines.batch import Batch
from headrace.planning.pipelines.bounds import Relaxation
from headrace.planning.pipelines.differencing import differenced
from headrace.planning.pipelines.dispatch import Dispatch
from headrace.planning.pipelines.plan import Iteration, iteration_of
from headrace.planning.pipelines.solution import Solution, packed, solved
from headrace.planning.pipelines.world import Counts, World

__all__ = ["by_cost", "by_length", "by_tokens", "max_length", "static", "token_balance"]

Planned = tuple[tuple[str, ...], Callable[[int, Batch], Iteration]]
Solve = Callable[[Batch, Counts], Solution | None]


def static(world: World, iterations: Sequence[Sequence[int]], seed: int) -> Planned:
    """One homogeneous strategy, sequences dispatched by cost, longest first."""
    return _best(world, iterations, by_cost)


def max_length(world: World, iterations: Sequence[Sequence[int]], seed: int) -> Planned:
    """Packs as long as the longest sequence, dealt out evenly."""
    context = max(max(lengths) for lengths in iterations)
    return _best(world, iterations, lambda batch, counts: by_length(batch, counts, context))


def token_balance(world: World, iterations: Sequence[Sequence[int]], seed: int) -> Planned:
    """The same tokens for every pipeline of one homogeneous strategy."""
    return _best(world, iterations, by_tokens)


def by_cost(batch: Batch, counts: Counts) -> Solution | None:
    """What :func:`static` makes of one batch; None where the strategy cannot hold it."""
    return solved(batch, counts, steps=0)


def by_length(batch: Batch, counts: Counts, context: int) -> Solution | None:
    """What :func:`max_length` makes of one batch with packs of up to ``context`` tokens."""
    k = _kind(batch, counts)
    if k is None or context > batch.world.pipes[k].cap:
        return None
    packs = _as_they_come(batch, context)
    dealt = [packs[q :: counts[k]] for q in range(counts[k])]
    pipe, seconds = batch.world.pipes[k], batch.seconds(k)
    return Solution(
        counts=counts, pipes=(k,) * counts[k],
        micro_batches=tuple(tuple(tuple(own) for own in bins) for bins in dealt),
        each_s=tuple(
            pipe.pipeline_s([sum(seconds[i] for i in own) + pipe.c for own in bins])
            for bins in dealt
        ),
    )  # fmt: skip


def by_tokens(batch: Batch, counts: Counts) -> Solution | None:
    """What :func:`token_balance` makes of one batch."""
    k = _kind(batch, counts)
    if k is None:
        return None
    members = differenced(batch.tokens, counts[k])
    return packed(batch, counts, Dispatch.of(batch, [k] * counts[k], members))


def _best(world: World, iterations: Sequence[Sequence[int]], solve: Solve) -> Planned:
    """Plans by the homogeneous strategy whose seconds over all iterations are the least."""
    batches = [Batch(world, lengths) for lengths in iterations]
    best_s, best = inf, None
    for counts in world.homogeneous():
        total = 0.0
        for batch in batches:
            solution = solve(batch, counts)
            total += inf if solution is None else solution.seconds
            if total >= best_s:
                break
        if total < best_s:
            best_s, best = total, counts
    if best is None:
        raise InfeasiblePlan("no homogeneous strategy holds every iteration")
    chosen = best

    def one(_: int, batch: Batch) -> Iteration:
        solution = solve(batch, chosen)
        assert solution is not None, "it held every iteration"
        return iteration_of(batch, solution, Relaxation(batch).bound())

    return (world.text(chosen),), one


def _kind(batch: Batch, counts: Counts) -> int | None:
    """The pipe of a homogeneous strategy, if it holds the batch."""
    k = next(k for k, n in enumerate(counts) if n)
    return k if batch.first[k] == 0 else None


def _as_they_come(batch: Batch, context: int) -> list[list[int]]:
    """Packs of up to ``context`` tokens, filled in the caller's order."""
    place = sorted(range(len(batch)), key=batch.order.__getitem__)
    packs, held = list[list[int]](), context
    for i in place:
        if held + batch.tokens[i] > context:
            packs.append([])
            held = 0
        packs[-1].append(i)
        held += batch.tokens[i]
    return packs
