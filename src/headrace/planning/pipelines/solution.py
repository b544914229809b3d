"""A strategy with every sequence in a micro-batch, and what it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from headrace.planning.pipelines.batch import Batch
from headrace.planning.pipelines.differencing import differenced
from headrace.planning.pipelines.dispatch import Dispatch, dispatch
from headrace.planning.pipelines.fluid import Fluid, fluid
from headrace.planning.pipelines.levelled import levelled
from headrace.planning.pipelines.local import improve, shaken
from headrace.planning.pipelines.packing import pack
from headrace.planning.pipelines.world import Counts

__all__ = ["Solution", "alike", "packed", "polished", "solved"]

_REPACKED = 3
_LOOSE = (1.03, 1.1, 1.25, 1.6)  # longer times to fill up to, for few sequences
_FEW = 40
_ROUNDS = 8
_OVERSHOOT = 1.001
_HOPELESS = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """``micro_batches[q]`` are the micro-batches of pipeline q, which has the pipe ``pipes[q]``
    and takes ``each_s[q]``; sequences are places in the batch. ``seconds`` is the step: the
    longest pipeline's sum_j t_j + (P - 1) max_j t_j."""

    counts: Counts
    pipes: tuple[int, ...]
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    each_s: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The longest pipeline's."""
        return max(self.each_s)


def solved(batch: Batch, counts: Counts, *, steps: int, target_s: float = 0.0) -> Solution | None:
    """Dispatch and pack one strategy, with so many steps of local search until ``target_s``; None
    when the strategy cannot hold the batch."""
    estimate = fluid(batch, counts)
    if estimate.seconds == inf:
        return None
    found = dispatch(batch, counts, estimate)
    expected_s = found.seconds
    few = len(batch) <= _FEW
    if few and found.seconds > target_s:
        for factor in _LOOSE:
            loose = Fluid(seconds=estimate.seconds * factor, starts=estimate.starts)
            other = dispatch(batch, counts, loose)
            if other.seconds < found.seconds:
                found = other
    best = _improved(batch, counts, found, steps, target_s)
    if few or _staged(batch, found) or best.seconds > expected_s * _OVERSHOOT:
        other = _improved(batch, counts, levelled(batch, counts), steps, target_s)
        if other.seconds < best.seconds:
            best = other
    return best


def polished(batch: Batch, best: Solution, *, steps: int, target_s: float) -> Solution:
    """The best of other dispatches of the same strategy, with more steps of local search."""
    estimate = fluid(batch, best.counts)
    for draft in (
        levelled(batch, best.counts),
        dispatch(batch, best.counts, estimate, long_in_gaps=True),
        dispatch(batch, best.counts, estimate),
    ):
        if best.seconds > target_s and draft.seconds < best.seconds * _HOPELESS:
            other = _improved(batch, best.counts, draft, steps, target_s)
            best = min(best, other, key=lambda solution: solution.seconds)
    return best


def alike(batch: Batch, counts: Counts, *, steps: int) -> Iterator[Solution]:
    """Other solutions of a strategy whose pipelines are all alike: tokens or seconds balanced by
    differencing, which longest first rarely loses to, but sometimes."""
    used = [k for k, n in enumerate(counts) if n]
    if len(used) == 1 and batch.first[used[0]] == 0 and counts[used[0]] > 1:
        for weights in (batch.tokens, batch.seconds(used[0])):
            members = differenced(weights, counts[used[0]])
            found = Dispatch.of(batch, used * counts[used[0]], members)
            yield packed(batch, counts, found)
            if steps:
                yield _improved(batch, counts, found, steps, 0.0)


def _improved(
    batch: Batch, counts: Counts, found: Dispatch, steps: int, target_s: float
) -> Solution:
    before = [list(own) for own in found.members]
    improve(batch, found, steps=steps, target_s=target_s)
    if len(batch) <= _FEW and steps:
        found = shaken(batch, found, rounds=_ROUNDS, steps=steps, target_s=target_s)
    expected_s = found.seconds
    best = packed(batch, counts, found, steps=steps)
    if steps and best.seconds > expected_s * _OVERSHOOT:
        # What is level by loads need not pack well; what was there before may.
        plain = packed(batch, counts, Dispatch.of(batch, found.pipes, before))
        best = min(best, plain, key=lambda solution: solution.seconds)
    return best


def packed(batch: Batch, counts: Counts, found: Dispatch, *, steps: int = 0) -> Solution:
    """Pack a dispatch. Where a pipeline takes longer than its load says, by stages or by sequences
    that do not fill micro-batches, the difference is added to its load and sequences are moved
    again."""
    packs = [pack(batch, k, own) for k, own in zip(found.pipes, found.members, strict=True)]
    best = _solution(counts, found, packs)
    for _ in range(_REPACKED if steps else 0):
        if best.seconds <= found.seconds * _OVERSHOOT:
            break
        extra = [max(0.0, s - load) for (s, _), load in zip(packs, found.loads, strict=True)]
        before = [list(own) for own in found.members]
        improve(batch, found, steps=steps, target_s=0.0, extra=extra)
        changed = [q for q, own in enumerate(found.members) if own != before[q]]
        if not changed:
            break
        for q in changed:
            packs[q] = pack(batch, found.pipes[q], found.members[q])
        again = _solution(counts, found, packs)
        if again.seconds < best.seconds:
            best = again
    return best


def _staged(batch: Batch, found: Dispatch) -> bool:
    return any(batch.world.pipes[k].stages > 1 for k in set(found.pipes))


def _solution(
    counts: Counts, found: Dispatch, packs: list[tuple[float, list[list[int]]]]
) -> Solution:
    return Solution(
        counts=counts,
        pipes=tuple(found.pipes),
        micro_batches=tuple(tuple(tuple(own) for own in bins) for _, bins in packs),
        each_s=tuple(seconds for seconds, _ in packs),
    )
