"""Pipelines with stages, each alone on its ranks: when their stages compute, send and receive.

Every stage does its micro-batches in one order (:mod:`headrace.spec.program`): as many forwards
ahead as stages follow, then a forward and a backward in turn, then the backwards that are left
(1F1B). Messages go to the neighbours. With F_s and B_s the seconds of a micro-batch on stage s and
m those of its message,

    a forward starts when the stage is free and the message of the stage before has come,
    a backward when it is free and the message of the stage behind has come;
    two messages to one neighbour leave one after the other, m seconds each, and a stage goes on
    when its message has begun to leave.

Weights arrive bucket by bucket (a bucket is the embedding, one layer, or what follows the last):
until all are there, a forward waits for each, and a backward for all of them. When the gradients of
a bucket are complete its push is *issued*.

The order is known, so no events are looked for. Of P stages, stage s does the forward of
micro-batch i in *turn* 2 i + s and the backward in turn 2 i + 2 P - 1 - s: turns rise along the
order of every stage, and a message is sent in the turn before the one that waits for it. In a turn
all stages of many pipelines go on at once, as arrays; a stage without work keeps its time. A
forward that starts at t ends at max(t + F, max_b (there_b + the parts from bucket b on)).

The times are those of :class:`headrace.simulator.step_clock.Walk` for the programs of the stages'
first ranks, which have the most rows of every message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.spec.strategy import Stage

__all__ = ["StagedPipeline", "StagedTimes", "run_pipelines"]

Floats = NDArray[np.float64]

_NEVER = -np.inf  # the time in seconds of what does not happen: nothing is delayed by it
_MOST_PLACES = 1 << 20  # places (turn, stage, pipeline) of an array, 8 bytes each


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedPipeline:
    """What a pipeline has to do.

    Attributes:
        stages: Its stages, in order.
        forward: Seconds of the forward of each micro-batch by weight bucket
            [micro-batches, buckets].
        backward: Seconds of the backward of each micro-batch by weight bucket
            [micro-batches, buckets].
        message_s: Seconds of a message of each micro-batch [micro-batches].
        there_s: Seconds until the weights of each bucket are there [buckets].
    """

    stages: tuple[Stage, ...]
    forward: Floats
    backward: Floats
    message_s: Floats
    there_s: Floats

    @property
    def turns(self) -> int:
        """In how many turns all its stages come to their end."""
        return 2 * (len(self.message_s) + len(self.stages) - 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedTimes:
    """When a pipeline has done it.

    Attributes:
        issued: Seconds until the last stage issues the push of each bucket [buckets].
        end_s: Seconds until the last stage has nothing left to do or to send.
    """

    issued: Floats
    end_s: float


def run_pipelines(pipelines: Sequence[StagedPipeline]) -> list[StagedTimes]:
    """Follow all stages of pipelines to their end.

    Args:
        pipelines: The pipelines. Each is alone on its ranks.

    Returns:
        The times of each.
    """
    found = dict[int, StagedTimes]()
    by_turns = sorted(range(len(pipelines)), key=lambda n: pipelines[n].turns)
    while by_turns:  # the longest first, and beside them as many as memory is for
        longest = pipelines[by_turns[-1]]
        count = max(1, _MOST_PLACES // (longest.turns * max(len(p.stages) for p in pipelines)))
        by_turns, chosen = by_turns[:-count], by_turns[-count:]
        found |= zip(chosen, _run_at_once([pipelines[n] for n in chosen]), strict=True)
    return [found[n] for n in range(len(pipelines))]


def _run_at_once(pipelines: Sequence[StagedPipeline]) -> list[StagedTimes]:
    """:func:`run_pipelines` with all of them side by side in arrays."""
    turns = _Turns.of(pipelines)
    shape = turns.work_s.shape[1:]  # stages, pipelines
    now_s, left_s = np.zeros(shape), np.zeros((2, *shape))
    sent_s = np.full((shape[0] + 2, shape[1]), _NEVER)  # with a row before and one behind
    came_s, ready_s = np.empty((2, *turns.work_s.shape))
    arrived_s = np.empty(shape)
    for turn, (work_s, least_s, message_s, may_send) in enumerate(turns):
        forwards, backwards = slice(turn % 2, None, 2), slice(1 - turn % 2, None, 2)
        arrived_s[forwards] = sent_s[:-2][forwards]  # by the stage before
        arrived_s[backwards] = sent_s[2:][backwards]  # by the stage behind
        came_s[turn] = now_s
        np.maximum(now_s, arrived_s, out=now_s)
        ready_s[turn] = now_s
        now_s += work_s
        np.maximum(now_s, least_s, out=now_s)
        # Messages forward of even stages and backward of odd ones leave in even turns.
        left = left_s[turn % 2]
        np.maximum(now_s, left + may_send, out=now_s)
        np.add(now_s, message_s, out=sent_s[1:-1])
        np.maximum(left, sent_s[1:-1], out=left)
    ends_s = np.maximum(now_s, left_s.max(axis=0))
    return [
        _times(pipeline, came_s[:, :, n], ready_s[:, :, n], now_s[:, n], ends_s[:, n])
        for n, pipeline in enumerate(pipelines)
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Turns:
    """What every stage of every pipeline does in every turn. All arrays are [turns, stages,
    pipelines].

    Attributes:
        work_s: Seconds of computing.
        least_s: The earliest end of the computing in seconds of the step, as weights arrive.
        message_s: Seconds of the message that the stage sends; minus infinity where it sends none.
        may_send: 0 where the stage sends a message, else minus infinity.
    """

    work_s: Floats
    least_s: Floats
    message_s: Floats
    may_send: Floats

    @classmethod
    def of(cls, pipelines: Sequence[StagedPipeline]) -> _Turns:
        """The turns of all pipelines, those of the shorter ones with nothing at their end."""
        turns = max(pipeline.turns for pipeline in pipelines)
        depth = max(len(pipeline.stages) for pipeline in pipelines)
        shape = (turns, depth, len(pipelines))
        work_s, least_s = np.zeros(shape), np.full(shape, _NEVER)
        message_s = np.full(shape, _NEVER)
        for n, pipeline in enumerate(pipelines):
            count = len(pipeline.message_s)
            for s, stage in enumerate(pipeline.stages):
                own = slice(stage.buckets[0], stage.buckets[-1] + 1)
                forward, backward = pipeline.forward[:, own], pipeline.backward[:, own]
                there_s = pipeline.there_s[own]
                # Seconds of each forward from each bucket on, as no part starts without weights.
                from_here_s = forward[:, ::-1].cumsum(axis=1)[:, ::-1]
                backward_s = backward.sum(axis=1)
                first_turn, last_turn = s, 2 * len(pipeline.stages) - 1 - s
                forwards = slice(first_turn, first_turn + 2 * count - 1, 2)
                backwards = slice(last_turn, last_turn + 2 * count - 1, 2)
                work_s[forwards, s, n] = forward.sum(axis=1)
                least_s[forwards, s, n] = (there_s + from_here_s).max(axis=1)
                work_s[backwards, s, n] = backward_s
                least_s[backwards, s, n] = pipeline.there_s[-1] + backward_s
                if not stage.last:
                    message_s[forwards, s, n] = pipeline.message_s
                if not stage.first:
                    message_s[backwards, s, n] = pipeline.message_s
        may_send = np.where(message_s == _NEVER, _NEVER, 0.0)
        return cls(work_s=work_s, least_s=least_s, message_s=message_s, may_send=may_send)

    def __iter__(self) -> Iterator[tuple[Floats, Floats, Floats, Floats]]:
        """The four arrays of every turn, each [stages, pipelines]."""
        return zip(self.work_s, self.least_s, self.message_s, self.may_send, strict=True)


def _times(
    pipeline: StagedPipeline, came_s: Floats, ready_s: Floats, now_s: Floats, ends_s: Floats
) -> StagedTimes:
    """The times of one pipeline. ``came_s`` has when each of its stages came to each turn before
    any wait, and ``ready_s`` when its message had arrived [turns, stages]; ``now_s`` when they
    have computed, and ``ends_s`` when they have sent all [stages]."""
    depth, last = len(pipeline.stages), len(pipeline.message_s) - 1
    issued = np.zeros(len(pipeline.there_s))
    for s, stage in enumerate(pipeline.stages):
        own, turn = stage.buckets, 2 * last + 2 * depth - 1 - s  # of the last backward
        # The backward goes through the buckets from the last to the first.
        begin_s = max(ready_s[turn, s], pipeline.there_s[-1])
        complete_s = np.cumsum(pipeline.backward[last, own[0] : own[-1] + 1][::-1])[::-1]
        # Every rank takes part in every push, in the order from the last bucket to the first: it
        # issues those of later stages when it comes to its last backward, of earlier ones at its
        # end.
        stage_issued = np.full_like(issued, came_s[turn, s])
        stage_issued[own[0] : own[-1] + 1] = begin_s + complete_s
        stage_issued[: own[0]] = now_s[s]
        np.maximum(issued, stage_issued, out=issued)
    return StagedTimes(issued=issued, end_s=float(ends_s[:depth].max()))
