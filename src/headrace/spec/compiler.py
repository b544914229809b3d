"""From a plan to one program per rank.

[Note: 1F1B] A pipeline of S stages runs its micro-batches in the plan's order. Stage s first runs
min(S - 1 - s, micro-batches) forwards, then one forward and one backward in turn, then what
backwards are left: so stage s holds the activations of at most S - s micro-batches. Micro-batches
may have any sizes: those of their messages follow from the plan. A rank of pipelines without
stages runs forward and backward of each of its micro-batches in the plan's order.

[Note: order of pushes] Pushes meet the whole world, so all ranks issue them in one order, from the
last bucket to the first, in which gradients become complete in a backward. A rank of an early
stage issues those of later layers, for which it has nothing, before the gradients of its last
micro-batch come, as they left there before that message.

What ranks share they post in one order (rule 6): where a group's last backward is that of all its
ranks, pushes stand between its layers on all of them. Where a rank has more to do, its group's
collectives come before its pushes, so those of the others do, too. That costs nothing: a push waits
for the rank that is busy longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from headrace.spec.plan import MicroBatch, Pipeline, Plan
from headrace.spec.program import (
    Action,
    Backward,
    Exchange,
    Forward,
    Message,
    Program,
    Pull,
    Push,
    Recv,
    Send,
    Update,
)
from headrace.spec.stage import Stage

__all__ = ["compile_plan", "compile_rank", "connected", "is_last", "rows_of"]

Numbered = Sequence[tuple[int, MicroBatch]]


def rows_of(tokens: int, ranks: int, member: int) -> int:
    """Tokens of a pack that a member of a stage holds: shares are even, larger ones first."""
    return tokens // ranks + (member < tokens % ranks)


def compile_rank(plan: Plan, rank: int, bucket_count: int, *, overlap: bool = True) -> Program:
    """The program of ``rank``: all pulls, its micro-batches, the update; pushes from the last
    bucket to the first, those of its layers within its last backward.

    Ranks without work pull nothing but still issue every world collective: they own, serve and
    update their part of the storage. Without ``overlap`` all pushes follow the last backward.
    Raises SpecError when a pipeline has more stages than the model (of ``bucket_count`` - 2 layers)
    has layers.
    """
    work = list(_work(plan, rank, bucket_count - 2))
    actions: list[Action] = [*(Pull(bucket=b) for b in range(bucket_count)), *work]
    if overlap:
        actions = list(_with_pushes(plan, rank, actions, bucket_count))
    else:
        actions += [Push(bucket=bucket) for bucket in reversed(range(bucket_count))]
    return Program(rank=rank, actions=(*actions, Update()))


def compile_plan(plan: Plan, bucket_count: int, *, overlap: bool = True) -> tuple[Program, ...]:
    """The programs of all ranks of a plan over a model of ``bucket_count`` weight buckets."""
    return tuple(
        compile_rank(plan, rank, bucket_count, overlap=overlap) for rank in range(plan.devices)
    )


def connected(plan: Plan, rank: int) -> tuple[int, ...]:
    """The ranks, ascending, on which the progress of ``rank`` depends before the update: those of
    its pipelines that have work, those of theirs, and so on."""
    groups = {plan.pipelines[micro.pipeline].ranks for micro in plan.micro_batches}
    found, met = {rank}, True
    while met:
        met = {ranks for ranks in groups if not found.isdisjoint(ranks)}
        groups -= met
        found = found.union(*met)
    return tuple(sorted(found))


def _work(plan: Plan, rank: int, layers: int) -> Iterator[Action]:
    mine = [
        (index, micro)
        for index, micro in enumerate(plan.micro_batches)
        if rank in plan.pipelines[micro.pipeline].ranks
    ]
    staged = [p for p in plan.pipelines if rank in p.ranks and p.scheme.pipeline > 1]
    if staged and mine:
        yield from _one_forward_one_backward(plan, staged[0], rank, mine, layers)
        return
    for index, micro in mine:
        group = plan.pipelines[micro.pipeline].stage_of(rank, layers).ranks
        yield Forward(stage=0, micro_batch=index, group=group)
        yield Backward(stage=0, micro_batch=index, group=group)


def _one_forward_one_backward(
    plan: Plan, pipeline: Pipeline, rank: int, micros: Numbered, layers: int
) -> Iterator[Action]:
    stages = pipeline.stages(layers)
    stage = pipeline.stage_of(rank, layers)
    line = _Line(plan=plan, stages=stages, stage=stage, rank=rank, micros=micros)
    ahead, count = min(stage.count - 1 - stage.index, len(micros)), len(micros)
    for i in range(ahead):
        yield from line.receive("a", i)
        yield line.forward(i)
        yield from line.send("a", i)
    if ahead < count:
        yield from line.receive("a", ahead)
    for i in range(ahead, count):
        yield line.forward(i)
        yield from line.exchange("a", i, "g", i - ahead)
        yield line.backward(i - ahead)
        if i + 1 < count:
            yield from line.exchange("g", i - ahead, "a", i + 1)
        else:
            yield from line.send("g", i - ahead)
    for i in range(count - ahead, count):
        yield from line.receive("g", i)
        yield line.backward(i)
        yield from line.send("g", i)


class _Line:
    """One rank's place in a pipeline: its actions on the i-th micro-batch."""

    def __init__(
        self, *, plan: Plan, stages: tuple[Stage, ...], stage: Stage, rank: int, micros: Numbered
    ) -> None:
        self._plan, self._stages, self._stage, self._micros = plan, stages, stage, micros
        self._member = stage.ranks.index(rank)

    def forward(self, i: int) -> Action:
        """The forward."""
        stage = self._stage
        return Forward(stage=stage.index, micro_batch=self._micros[i][0], group=stage.ranks)

    def backward(self, i: int) -> Action:
        """The backward."""
        stage = self._stage
        return Backward(stage=stage.index, micro_batch=self._micros[i][0], group=stage.ranks)

    def send(self, what: Literal["a", "g"], i: int) -> Iterator[Action]:
        """Activations to the next stage or gradients to the one before, where there is one."""
        peer = self._peer(1 if what == "a" else -1)
        if peer is not None:
            yield Send(message=self._message(what, i, peer))

    def receive(self, what: Literal["a", "g"], i: int) -> Iterator[Action]:
        """Activations of the stage before or gradients of the next one, where there is one."""
        peer = self._peer(-1 if what == "a" else 1)
        if peer is not None:
            yield Recv(message=self._message(what, i, peer))

    def exchange(
        self, out: Literal["a", "g"], i: int, back: Literal["a", "g"], j: int
    ) -> Iterator[Action]:
        """Send one kind and receive the other, from and to the same side."""
        send, recv = next(self.send(out, i), None), next(self.receive(back, j), None)
        if isinstance(send, Send) and isinstance(recv, Recv):
            yield Exchange(send=send, recv=recv)

    def _peer(self, step: int) -> int | None:
        other = self._stage.index + step
        if not 0 <= other < self._stage.count:
            return None
        return self._stages[other].ranks[self._member]

    def _message(self, what: Literal["a", "g"], i: int, peer: int) -> Message:
        index, micro = self._micros[i]
        tokens = sum(self._plan.tokens_of(micro))
        rows = rows_of(tokens, len(self._stage.ranks), self._member)
        return Message(what=what, micro_batch=index, peer=peer, rows=rows)


def _with_pushes(
    plan: Plan, rank: int, actions: list[Action], bucket_count: int
) -> Iterator[Action]:
    """The actions with all pushes, those of the last backward's buckets inside it where it is the
    last one of all ranks that meet in it."""
    order = list(reversed(range(bucket_count)))
    last = max((i for i, a in enumerate(actions) if isinstance(a, Backward)), default=None)
    backward = None if last is None else actions[last]
    if last is None or not isinstance(backward, Backward) or not is_last(plan, backward):
        yield from actions
        yield from (Push(bucket=b) for b in order)
        return
    pipeline = plan.pipelines[plan.micro_batches[backward.micro_batch].pipeline]
    own = pipeline.stage_of(rank, bucket_count - 2).buckets
    before = last - 1 if isinstance(actions[last - 1], Recv) else last
    yield from actions[:before]
    yield from (Push(bucket=b) for b in order if b > own[-1])
    yield from actions[before:last]
    yield replace(backward, pushes=tuple(reversed(own)))
    yield from actions[last + 1 :]
    yield from (Push(bucket=b) for b in order if b < own[0])


def is_last(plan: Plan, backward: Backward) -> bool:
    """Whether none of a backward's ranks has a later micro-batch."""
    group = set(backward.group)
    later = plan.micro_batches[backward.micro_batch + 1 :]
    return all(group.isdisjoint(plan.pipelines[micro.pipeline].ranks) for micro in later)
