"""A strategy with every sequence in a micro-batch, and what it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from headrace.planning.pipelines.batch import Batch
from headrace.planning.pipelines.differencing import differenced
from headrace.planning.pipelines.dispatch import Dispatch, dispatch
from headrace.planning.pipelines.fluid import Fluid, fluid
from headrace.planning.pipelines.levelled import levelled
from headrace.planning.pipelines.local import improve, shaken
from headrace.planning.pipelines.packing import Packed, pack
from headrace.planning.pipelines.world import Counts

__all__ = ["FEW", "Solution", "alike", "packed", "polished", "solved"]

_REPACKED = 3
_REPACKED_FAST = 2
_FAST = 12  # steps, and no more: a look at a strategy
_LOOSE = (1.03, 1.1, 1.25, 1.6)  # longer times to fill up to, for few sequences
FEW = 40
_SEVERAL = 1000
_SHORT_OF = 1.02
_MOSTLY = 0.5
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
    few = len(batch) <= FEW
    if few and found.seconds > target_s:
        for factor in _LOOSE:
            loose = Fluid(seconds=estimate.seconds * factor, starts=estimate.starts)
            other = dispatch(batch, counts, loose)
            if other.seconds < found.seconds:
                found = other
    best = _improved(batch, counts, found, steps, target_s)
    # Loads tell what one stage takes, the estimate about what several do; nothing, a mixture.
    staged = _staged(batch, found)
    if staged:
        expected_s = estimate.seconds * _SHORT_OF if staged > _MOSTLY else 0.0
    if few or best.seconds > expected_s * _OVERSHOOT:
        draft = levelled(batch, counts)
        if few or draft.seconds < best.seconds * _HOPELESS:
            other = _improved(batch, counts, draft, steps, target_s)
            if other.seconds < best.seconds:
                best = other
    return best


def polished(batch: Batch, best: Solution, *, steps: int, target_s: float) -> Solution:
    """The best of other dispatches of the same strategy, with more steps of local search."""
    estimate, before_s = fluid(batch, best.counts), best.seconds

    def better(draft: Dispatch, best: Solution) -> Solution:
        if best.seconds <= target_s or draft.seconds >= best.seconds * _HOPELESS:
            return best
        other = _improved(batch, best.counts, draft, steps, target_s)
        return min(best, other, key=lambda solution: solution.seconds)

    best = better(levelled(batch, best.counts), best)
    if len(estimate.starts) > 1:  # else there is no head and no gap
        best = better(dispatch(batch, best.counts, estimate, long_in_gaps=True), best)
    if best.seconds == before_s or len(batch) <= _SEVERAL:
        best = better(dispatch(batch, best.counts, estimate), best)
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
    # Before packing, loads are not worth a search where most pipelines have stages.
    if len(batch) > FEW and steps <= _FAST and _staged(batch, found) > _MOSTLY:
        return _repacked(batch, counts, found, steps, target_s)
    before = [list(own) for own in found.members]
    improve(batch, found, steps=steps, target_s=target_s)
    if len(batch) <= FEW and steps:
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
    if steps and best.seconds > found.seconds * _OVERSHOOT:
        coarse = len(batch) > _SEVERAL and steps <= _FAST
        best = _moved(batch, counts, found, packs, best, _REPACKED, steps, coarse=coarse)
    return best


def _repacked(
    batch: Batch, counts: Counts, found: Dispatch, steps: int, target_s: float
) -> Solution:
    """The same with stages, where only packing tells how long a pipeline takes: the last one
    counts, so others need not be packed better than that."""
    last_s = max(found.seconds, target_s)
    packs: list[Packed] = [(0.0, [])] * len(found.pipes)
    for q in sorted(range(len(packs)), key=found.loads.__getitem__, reverse=True):
        packs[q] = pack(batch, found.pipes[q], found.members[q], enough_s=last_s)
        last_s = max(last_s, packs[q][0])
    best = _solution(counts, found, packs)
    if steps and best.seconds > target_s:
        best = _moved(batch, counts, found, packs, best, _REPACKED_FAST, steps, coarse=True)
    return best


def _moved(
    batch: Batch, counts: Counts, found: Dispatch, packs: list[Packed], best: Solution, rounds: int,
    steps: int, *, coarse: bool = False,
) -> Solution:  # fmt: skip
    """The best after moves that know what each pipeline takes beyond its load."""
    for _ in range(rounds):
        extra = [max(0.0, s - load) for (s, _), load in zip(packs, found.loads, strict=True)]
        before = [list(own) for own in found.members]
        improve(batch, found, steps=steps, target_s=0.0, extra=extra, coarse=coarse)
        changed = [q for q, own in enumerate(found.members) if own != before[q]]
        if not changed:
            break
        same_s = max((packs[q][0] for q in set(range(len(packs))).difference(changed)), default=0.0)
        for q in changed:
            packs[q] = pack(batch, found.pipes[q], found.members[q], enough_s=same_s)
        again = _solution(counts, found, packs)
        if again.seconds < best.seconds:
            best = again
        if best.seconds <= found.seconds * _OVERSHOOT:
            break
    return best


def _staged(batch: Batch, found: Dispatch) -> float:
    """The part of the pipelines that have stages."""
    staged = {k for k in set(found.pipes) if batch.world.pipes[k].stages > 1}
    return sum([k in staged for k in found.pipes]) / len(found.pipes)


def _solution(counts: Counts, found: Dispatch, packs: Sequence[Packed]) -> Solution:
    return Solution(
        counts=counts,
        pipes=tuple(found.pipes),
        micro_batches=tuple(tuple(tuple(own) for own in bins) for _, bins in packs),
        each_s=tuple(seconds for seconds, _ in packs),
    )
