"""A pipeline with stages, alone on its ranks: when each stage computes, sends and receives.

Every stage does its micro-batches in one order (:mod:`headrace.spec.program`): as many forwards
ahead as stages follow, then a forward and a backward in turn, then the backwards that are left.
Messages go to the neighbours. With F_s and B_s the seconds of a micro-batch on stage s and m those
of its message,

    a forward starts when the stage is free and the message of the stage before has come,
    a backward when it is free and the message of the stage behind has come;
    two messages to one neighbour leave one after the other, m seconds each.

Weights arrive bucket by bucket (a bucket is the embedding, one layer, or what follows the last):
until all are there, a forward waits for each, and a backward for all of them. When the gradients of
a bucket are complete its push is *issued*. The times are those of
:class:`headrace.simulator.step_clock.Walk` for the programs of the stages' first ranks, which have
the most rows of every message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ProgramError
from headrace.spec.strategy import Stage

__all__ = ["StagedPipeline"]

Floats = NDArray[np.float64]


class _Act(NamedTuple):
    """What a stage does next; each part is left out where it is None.

    Attributes:
        out: A message that it sends first, as (``a`` for activations or ``g`` for gradients,
            micro-batch).
        back: A message that it then waits for, likewise.
        work: What it then computes, as (``f`` for a forward or ``b`` for a backward, micro-batch).
    """

    out: tuple[str, int] | None = None
    back: tuple[str, int] | None = None
    work: tuple[str, int] | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class StagedPipeline:
    """The clock of one pipeline.

    Attributes:
        stages: Its stages, in order.
        forward: Seconds of the forward of each micro-batch by weight bucket
            [micro-batches, buckets].
        backward: Seconds of the backward of each micro-batch by weight bucket
            [micro-batches, buckets].
        message_s: Seconds of a message of each micro-batch.
        there_s: Seconds until the weights of each bucket are there [buckets].
        issued: Seconds until the last stage issues the push of each bucket [buckets].
        end_s: Seconds until the last stage has nothing left to do or to send.
    """

    stages: tuple[Stage, ...]
    forward: Floats
    backward: Floats
    message_s: Sequence[float]
    there_s: Floats
    issued: Floats = field(init=False)
    end_s: float = field(default=0.0, init=False)

    def run(self) -> None:
        """Follow all stages to their end, and set ``issued`` and ``end_s``. A stage goes on until a
        message is missing, and again once that is sent. Raises ProgramError for a deadlock."""
        stages = [_StageClock(self, stage) for stage in self.stages]
        # A message is (receiving stage, kind, micro-batch), with seconds until it has arrived.
        arrived: dict[tuple[int, str, int], float] = {}
        ready = stages[::-1]
        waiting: dict[tuple[int, str, int], _StageClock] = {}
        while ready:
            clock = ready.pop()
            for key in clock.go_on(arrived):
                if key in waiting:
                    ready.append(waiting.pop(key))
            if clock.wants is not None:
                waiting[clock.wants] = clock
        if waiting:
            raise ProgramError("stages of a pipeline", got="a wait for ever", wanted="an end")
        self.issued = np.max([clock.issued for clock in stages], axis=0)
        self.end_s = max(clock.end_s for clock in stages)


class _StageClock:
    """One ``stage`` of a ``pipeline`` on its way through its micro-batches: the time that it has
    come to, what it does next, and the message that it waits for."""

    def __init__(self, pipeline: StagedPipeline, stage: Stage) -> None:
        self.pipeline, self.stage = pipeline, stage
        own = list(stage.buckets)  # of weights
        # Seconds by the stage's buckets [micro-batches, own buckets], and their sums.
        self.own_forward, self.own_backward = pipeline.forward[:, own], pipeline.backward[:, own]
        self.forward_s = self.own_forward.sum(axis=1).tolist()
        self.backward_s = self.own_backward.sum(axis=1).tolist()
        self.own_there = pipeline.there_s[own].tolist()
        self.all_there_s = float(pipeline.there_s[-1])
        self.acts = _acts(stage.index, stage.count, len(pipeline.message_s))
        self.at, self.now_s = 0, 0.0  # index of the current act, seconds that the stage has come to
        # When the newest message has left: activations to the next stage, gradients to the one
        # before.
        self.leaves = {"a": 0.0, "g": 0.0}
        # Whether the current act's message is under way already, and when it was posted.
        self.sent, self.posted_s = False, 0.0
        # The message that it waits for, (receiving stage, kind, micro-batch); None at its end.
        self.wants: tuple[int, str, int] | None = None
        self.issued = np.zeros(len(pipeline.there_s))  # when it issues the push of each bucket
        self.before_last_s = 0.0  # when the stage came to its last backward, before any wait

    @property
    def end_s(self) -> float:
        """Seconds until the stage is free and its messages have left."""
        return max(self.now_s, *self.leaves.values())

    def go_on(self, arrived: dict[tuple[int, str, int], float]) -> Iterator[tuple[int, str, int]]:
        """Go on until a message is missing, which ``wants`` then names, or to the end. Messages
        that the stage sends are noted in ``arrived`` (seconds until they arrive), and their keys
        are given, (receiving stage, kind, micro-batch)."""
        self.wants = None
        last = len(self.pipeline.message_s) - 1  # micro-batch
        while self.at < len(self.acts):
            out, back, work = self.acts[self.at]
            if work == ("b", last):
                self.before_last_s = self.now_s
            if out is not None and not self.sent:
                # One message to a neighbour is under way at a time.
                posted_s = max(self.now_s, self.leaves[out[0]])
                self.leaves[out[0]] = posted_s + self.pipeline.message_s[out[1]]
                key = (self.stage.index + (1 if out[0] == "a" else -1), *out)
                arrived[key], self.sent = self.leaves[out[0]], True
                self.posted_s = posted_s
                yield key
            if back is not None and (self.stage.index, *back) not in arrived:
                self.wants = (self.stage.index, *back)
                return
            if self.sent:  # sending keeps the stage until the message is posted, not until it left
                self.now_s, self.sent = self.posted_s, False
            if back is not None:
                self.now_s = max(self.now_s, arrived.pop((self.stage.index, *back)))
            if work is not None:
                self._work(*work, last=work == ("b", last))
            self.at += 1
        self._end()

    def _work(self, kind: str, i: int, *, last: bool) -> None:
        """Compute the forward (``f``) or backward (``b``) of micro-batch ``i``; the ``last``
        backward completes the gradients of the stage's buckets."""
        if kind == "f":
            if self.now_s >= self.all_there_s:
                self.now_s += self.forward_s[i]
                return
            # Until all weights are there, each bucket's part waits for its own.
            for there_s, seconds in zip(self.own_there, self.own_forward[i].tolist(), strict=True):
                self.now_s = max(self.now_s, there_s) + seconds
            return
        self.now_s = max(self.now_s, self.all_there_s)
        if last:
            buckets = list(self.stage.buckets)
            # The backward goes through the buckets from the last to the first.
            complete_s = np.cumsum(self.own_backward[i][::-1])[::-1]
            self.issued[buckets] = self.now_s + complete_s
        self.now_s += self.backward_s[i]

    def _end(self) -> None:
        """Set when the stage issues the pushes of other stages' buckets, as every rank takes part
        in every push, in the order from the last bucket to the first. It has nothing to add to
        them: so for later stages when it came to its last backward, and for earlier ones at its
        end."""
        own = self.stage.buckets
        self.issued[own[-1] + 1 :] = self.before_last_s
        self.issued[: own[0]] = self.now_s


@lru_cache(maxsize=256)
def _acts(index: int, stages: int, micro_batches: int) -> tuple[_Act, ...]:
    """The acts of stage ``index`` of ``stages`` stages in order, for ``micro_batches``
    micro-batches: one forward, one backward (1F1B). A message to a neighbour and the next one from
    it are one act, as both are posted at once."""
    has_previous, has_next = index > 0, index < stages - 1
    ahead = min(stages - 1 - index, micro_batches)
    acts = list[_Act]()
    # Warm-up: as many forwards as stages follow.
    for i in range(ahead):
        acts.append(_Act(back=("a", i) if has_previous else None, work=("f", i)))
        acts.append(_Act(out=("a", i) if has_next else None))
    if ahead < micro_batches and has_previous:  # the input of the first forward that follows
        acts.append(_Act(back=("a", ahead)))
    # Steady state: a forward of micro-batch i, then the backward of the oldest one in flight.
    for i in range(ahead, micro_batches):
        oldest, has_more = i - ahead, i + 1 < micro_batches
        acts.append(_Act(work=("f", i)))
        if has_next:
            acts.append(_Act(out=("a", i), back=("g", oldest)))
        acts.append(_Act(work=("b", oldest)))
        if has_previous:
            acts.append(_Act(out=("g", oldest), back=("a", i + 1) if has_more else None))
    # Cool-down: the backwards that are left.
    for i in range(micro_batches - ahead, micro_batches):
        acts.append(_Act(back=("g", i) if has_next else None, work=("b", i)))
        acts.append(_Act(out=("g", i) if has_previous else None))
    return tuple(acts)
