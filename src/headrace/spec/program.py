"""Programs: the ordered actions of one rank for one plan.

[Note: actions] Each action prints and reads back:

    P3             issue the pull of bucket 3 (weights, storage to working); waited for at first use
    1F4[2,3]       stage 1 runs the forward of micro-batch 4; its methods meet the group (2, 3)
    1B4[2,3]       the backward of the same
    1B4[2,3]{6,5}  the backward of the same, in which the pushes of buckets 6 and 5 are issued, each
                   as soon as its gradients are complete
    Sa4>2*128      send the activations of micro-batch 4, 128 rows, to rank 2 (``g``: gradients)
    Ra4<0*128      receive them from rank 0
    X(Sa5>3*96,Rg4<3*128)   both with one neighbour at once
    G3             issue the push of bucket 3 (gradients, working to storage); ``U`` waits for it
    U              clip, optimizer step; every rank meets here
    0F4.1[2,3]     the forward of the second pack of micro-batch 4, for models that take a
                   micro-batch in several calls
    I2             turn 2 without work: the rank takes part in what the whole world does at every
                   layer, with tokens that have no loss (plans in lockstep)

Pulls, pushes and the update meet the whole world. A collective inside a layer is not an action:
it belongs to the method, and the group is recorded with the forward and backward.

[Note: exchanges] In the steady state of a pipeline a rank sends forwards and receives backwards
between the same two actions. Written as a send and a receive, two neighbours stand at two sends
and wait for each other wherever a send waits for its receiver; as one action they meet.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from headrace.errors import SpecError
from headrace.spec.plan import MicroBatch, Pipeline, Plan
from headrace.spec.strategy import Stage

__all__ = [
    "Action",
    "Backward",
    "Exchange",
    "Forward",
    "Idle",
    "Message",
    "Packs",
    "Program",
    "Pull",
    "Push",
    "Recv",
    "Send",
    "Update",
    "compile_plan",
    "compile_rank",
    "compile_turns",
    "connected",
    "is_last",
    "last_of_ranks",
    "meeting",
    "meeting_key",
    "parse_action",
    "pushes_of",
    "rows_of",
    "turns_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Issue the pull of a bucket's weights."""

    kind: ClassVar[str] = "pull"
    bucket: int

    def __str__(self) -> str:
        return f"P{self.bucket}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """Issue the push of a bucket's gradients."""

    kind: ClassVar[str] = "push"
    bucket: int

    def __str__(self) -> str:
        return f"G{self.bucket}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Run the forward of one pack of a micro-batch; ``group`` are the ranks that meet in it."""

    kind: ClassVar[str] = "forward"
    stage: int
    micro_batch: int
    group: tuple[int, ...]
    pack: int = 0

    def __str__(self) -> str:
        return f"{self.stage}F{self.micro_batch}{_pack_text(self.pack)}{_group_text(self.group)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """Run the backward of one pack of a micro-batch; ``group`` are the ranks that meet in it.

    ``pushes`` are the buckets whose push is issued in it, in this order, each when the segment
    that works with the bucket is done: the rank's last backward completes its gradients.
    """

    kind: ClassVar[str] = "backward"
    stage: int
    micro_batch: int
    group: tuple[int, ...]
    pushes: tuple[int, ...] = ()
    pack: int = 0

    def __str__(self) -> str:
        text = f"{self.stage}B{self.micro_batch}{_pack_text(self.pack)}{_group_text(self.group)}"
        return text + "{" + ",".join(map(str, self.pushes)) + "}" if self.pushes else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """``rows`` rows of the activations (``a``) or their gradients (``g``) of a micro-batch, to or
    from rank ``peer``."""

    what: Literal["a", "g"]
    micro_batch: int
    peer: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a message to a neighbouring stage."""

    kind: ClassVar[str] = "send"
    message: Message

    def __str__(self) -> str:
        m = self.message
        return f"S{m.what}{m.micro_batch}>{m.peer}*{m.rows}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recv:
    """Receive a message from a neighbouring stage."""

    kind: ClassVar[str] = "recv"
    message: Message

    def __str__(self) -> str:
        m = self.message
        return f"R{m.what}{m.micro_batch}<{m.peer}*{m.rows}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Send and receive at once with one neighbour. Raises SpecError for two neighbours."""

    kind: ClassVar[str] = "exchange"
    send: Send
    recv: Recv

    def __post_init__(self) -> None:
        """Raise SpecError unless the send and the receive have the same neighbour."""
        if self.send.message.peer != self.recv.message.peer:
            raise SpecError(
                "exchange",
                wanted="one neighbour",
                got=f"ranks {self.send.message.peer} and {self.recv.message.peer}",
            )

    def __str__(self) -> str:
        return f"X({self.send},{self.recv})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Wait for all pushes, then clip and step."""

    kind: ClassVar[str] = "update"

    def __str__(self) -> str:
        return "U"


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Take part in what the whole world does at every layer of turn ``turn``, without work of this
    rank's own: in lockstep every rank runs a forward and a backward in every turn."""

    kind: ClassVar[str] = "idle"
    turn: int

    def __str__(self) -> str:
        return f"I{self.turn}"


Action = Idle | Pull | Push | Forward | Backward | Send | Recv | Exchange | Update

_LINK = re.compile(r"([PG])(\d+)")
_IDLE = re.compile(r"I(\d+)")
_COMPUTE = re.compile(r"(\d+)([FB])(\d+)(?:\.(\d+))?\[(\d+(?:,\d+)*)\](?:\{(\d+(?:,\d+)*)\})?")
_MESSAGE = re.compile(r"([SR])([ag])(\d+)([<>])(\d+)\*(\d+)")
_EXCHANGE = re.compile(r"X\((S[^,()]+),(R[^,()]+)\)")


def pushes_of(action: Action) -> tuple[int, ...]:
    """The buckets whose push an action issues, in order."""
    if isinstance(action, Push):
        return (action.bucket,)
    return action.pushes if isinstance(action, Backward) else ()


def _group_text(group: tuple[int, ...]) -> str:
    """The ranks of a group as an action's text has them, such as ``[2,3]``."""
    return "[" + ",".join(map(str, group)) + "]"


def _pack_text(pack: int) -> str:
    """The number of a pack as an action's text has it, such as ``.1``; empty for pack 0."""
    return f".{pack}" if pack else ""


def _numbers(text: str | None) -> tuple[int, ...]:
    """The numbers of a text such as ``2,3``; none for an empty or missing text."""
    return tuple(int(number) for number in text.split(",")) if text else ()


def parse_action(text: str) -> Action:
    """Read one action back from its text. Raises SpecError for a text of no action."""
    action = Update() if text == "U" else _link(text) or _compute(text) or _traffic(text)
    if action is None:
        wanted = "P3, 0F4[0,1], 0B4[0,1]{3,2}, Sa4>2*128, Ra4<0*128, X(S..,R..), G3, I2 or U"
        raise SpecError("action", got=repr(text), wanted=wanted)
    return action


def _link(text: str) -> Action | None:
    """The pull, push or idle turn that a text stands for; None for another action's text."""
    if idle := _IDLE.fullmatch(text):
        return Idle(turn=int(idle[1]))
    found = _LINK.fullmatch(text)
    if not found:
        return None
    kind = Pull if found[1] == "P" else Push
    return kind(bucket=int(found[2]))


def _compute(text: str) -> Action | None:
    """The forward or backward that a text stands for; None for another action's text."""
    found = _COMPUTE.fullmatch(text)
    if not found or (found[2] == "F" and found[6]):  # a forward pushes nothing
        return None
    stage, micro, group = int(found[1]), int(found[3]), _numbers(found[5])
    pack = int(found[4] or 0)
    if found[2] == "F":
        return Forward(stage=stage, micro_batch=micro, group=group, pack=pack)
    pushes = _numbers(found[6])
    return Backward(stage=stage, micro_batch=micro, group=group, pack=pack, pushes=pushes)


def _traffic(text: str) -> Send | Recv | Exchange | None:
    """The send, receive or paired exchange that a text stands for; None for another action's
    text."""
    pair = _EXCHANGE.fullmatch(text)
    if pair:
        send, recv = _traffic(pair[1]), _traffic(pair[2])
        both = isinstance(send, Send) and isinstance(recv, Recv)
        return Exchange(send=send, recv=recv) if both else None
    found = _MESSAGE.fullmatch(text)
    if not found or (found[1] == "S") != (found[4] == ">"):  # S goes with >, R with <
        return None
    message = Message(
        what="a" if found[2] == "a" else "g",
        micro_batch=int(found[3]),
        peer=int(found[5]),
        rows=int(found[6]),
    )
    return Send(message=message) if found[1] == "S" else Recv(message=message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The actions of one rank, in order. Text form: ``rank 0: P0 P1 0F0[0] 0B0[0]{1,0} U``."""

    rank: int
    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return f"rank {self.rank}: " + " ".join(map(str, self.actions))

    @classmethod
    def parse(cls, text: str) -> Program:
        """Read a program as ``str`` writes it. Raises SpecError for a malformed text."""
        head, colon, body = text.partition(":")
        word, _, rank = head.strip().partition(" ")
        if not colon or word != "rank" or not rank.isdecimal():
            raise SpecError("program", got=repr(text[:40]), wanted="'rank N: ACTIONS'")
        return cls(rank=int(rank), actions=tuple(parse_action(word) for word in body.split()))


Numbered = Sequence[tuple[int, MicroBatch]]
"""Micro-batches of one pipeline, each with its index in the plan."""


def rows_of(tokens: int, ranks: int, member: int) -> int:
    """Tokens of a pack that the ``member``-th of the ``ranks`` of a stage holds: an even share,
    where the first ranks take one more of those left over."""
    return tokens // ranks + (member < tokens % ranks)


def compile_rank(plan: Plan, rank: int, bucket_count: int, *, overlap: bool = True) -> Program:
    """The program of ``rank``: all pulls, its micro-batches, the update; pushes from the last
    bucket to the first, those of its layers within its last backward.

    A rank without work issues all pulls and pushes too, as it owns, serves and updates its part of
    the stored weights. Without ``overlap`` all pushes follow the last backward. Raises SpecError
    when a pipeline has more stages than the model (of ``bucket_count`` - 2 layers) has layers.
    """
    mine = [
        index
        for index, micro in enumerate(plan.micro_batches)
        if rank in plan.pipelines[micro.pipeline].ranks
    ]
    return _program_of(plan, rank, mine, last_of_ranks(plan), bucket_count, overlap=overlap)


def _program_of(
    plan: Plan,
    rank: int,
    mine: Sequence[int],
    last: Mapping[int, int],
    bucket_count: int,
    *,
    overlap: bool,
) -> Program:
    """The program of a rank that works on the micro-batches with the indices ``mine``; ``last`` is
    the index of the last micro-batch of each rank."""
    work = list(_work(plan, rank, mine, bucket_count - 2))
    actions: list[Action] = [*(Pull(bucket=b) for b in range(bucket_count)), *work]
    if overlap:
        actions = list(_with_pushes(plan, rank, actions, last, bucket_count))
    else:
        actions += [Push(bucket=bucket) for bucket in reversed(range(bucket_count))]
    return Program(rank=rank, actions=(*actions, Update()))


def compile_plan(plan: Plan, bucket_count: int, *, overlap: bool = True) -> tuple[Program, ...]:
    """The programs of all ranks of a plan over a model of ``bucket_count`` weight buckets."""
    indices_of_ranks: list[list[int]] = [[] for _ in range(plan.devices)]
    for index, micro in enumerate(plan.micro_batches):
        for rank in plan.pipelines[micro.pipeline].ranks:
            indices_of_ranks[rank].append(index)
    last = last_of_ranks(plan)
    return tuple(
        _program_of(plan, rank, indices_of_ranks[rank], last, bucket_count, overlap=overlap)
        for rank in range(plan.devices)
    )


Packs = Sequence[Sequence[tuple[int, ...]]]
"""For each micro-batch of a plan its packs: what the model takes in one call, by the ranks that
share it. They are some or all ranks of the micro-batch, as a short pack may have fewer tokens."""


def compile_turns(plan: Plan, packs: Packs, rank: int) -> Program:
    """The program of ``rank`` for a model that is handed micro-batches by a loop.

    Such a model holds its own weights, so nothing is pulled or pushed: each pack is a forward and
    its backward, in the plan's order. In lockstep the whole world meets at every layer, so every
    rank has as many turns as any other and is idle where it has no work.

    Args:
        plan: The plan of the step; its pipelines have one stage.
        packs: The packs of each micro-batch, the same on all ranks.
        rank: The rank whose program is made.

    Returns:
        The program, which ends with the update.
    """
    actions: list[Action] = []
    for number, turn in enumerate(turns_of(plan)):
        most_packs = max((len(packs[index]) for index in turn), default=0)
        # The micro-batch of this rank in the turn, of which it has one at most.
        mine = next(
            (i for i in turn if rank in plan.pipelines[plan.micro_batches[i].pipeline].ranks), None
        )
        for pack in range(most_packs):
            group = packs[mine][pack] if mine is not None and pack < len(packs[mine]) else ()
            if mine is not None and rank in group:
                actions.append(Forward(stage=0, micro_batch=mine, group=group, pack=pack))
                actions.append(Backward(stage=0, micro_batch=mine, group=group, pack=pack))
            elif plan.semantics == "lockstep":
                actions.append(Idle(turn=number))
    return Program(rank=rank, actions=(*actions, Update()))


def turns_of(plan: Plan) -> list[list[int]]:
    """The indices of a plan's micro-batches by turn. A rank has at most one micro-batch in a turn,
    and each micro-batch, in the plan's order, takes the first turn after those in which one of its
    ranks has work already."""
    next_free = [0] * plan.devices  # the first turn in which each rank has no work yet
    turns: list[list[int]] = []
    for index, micro in enumerate(plan.micro_batches):
        ranks = plan.pipelines[micro.pipeline].ranks
        turn = max(next_free[rank] for rank in ranks)
        for rank in ranks:
            next_free[rank] = turn + 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(index)
    return turns


def connected(plan: Plan, rank: int) -> tuple[int, ...]:
    """The ranks, ascending, on which the progress of ``rank`` depends before the update: the
    connected component of ``rank`` where pipelines with work connect all their ranks."""
    groups = {plan.pipelines[micro.pipeline].ranks for micro in plan.micro_batches}
    reached, touching = {rank}, True
    while touching:
        touching = {ranks for ranks in groups if not reached.isdisjoint(ranks)}
        groups -= touching
        reached = reached.union(*touching)
    return tuple(sorted(reached))


def _work(plan: Plan, rank: int, numbers: Sequence[int], layers: int) -> Iterator[Action]:
    """The forwards, backwards and messages of a rank that works on the micro-batches with the
    indices ``numbers``, of a model with ``layers`` layers."""
    mine = [(index, plan.micro_batches[index]) for index in numbers]
    used = [plan.pipelines[p] for p in dict.fromkeys(micro.pipeline for _, micro in mine)]
    staged = [pipeline for pipeline in used if pipeline.scheme.pipeline > 1]
    if staged:  # a rank of a staged pipeline is in no other, as plans check
        yield from _one_forward_one_backward(plan, staged[0], rank, mine, layers)
        return
    for index, micro in mine:
        group = plan.pipelines[micro.pipeline].stage_of(rank, layers).ranks
        yield Forward(stage=0, micro_batch=index, group=group)
        yield Backward(stage=0, micro_batch=index, group=group)


def _one_forward_one_backward(
    plan: Plan, pipeline: Pipeline, rank: int, micros: Numbered, layers: int
) -> Iterator[Action]:
    """The 1F1B schedule of one rank of a pipeline, over a model of ``layers`` layers: forwards
    until the stages after it are busy, then a forward and a backward in turn, then the backwards
    that remain. Messages carry activations (``a``) or gradients (``g``)."""
    stages = pipeline.stages(layers)
    stage = pipeline.stage_of(rank, layers)
    line = _Line(plan=plan, stages=stages, stage=stage, rank=rank, micros=micros)
    # Forwards that this stage is ahead of its backwards: as many as there are stages after it.
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
    """Makes the actions of ``rank``, which works in ``stage`` of a pipeline with ``stages``. An
    index ``i`` counts ``micros``, the micro-batches of this pipeline."""

    def __init__(
        self, *, plan: Plan, stages: tuple[Stage, ...], stage: Stage, rank: int, micros: Numbered
    ) -> None:
        self._plan, self._stages, self._stage, self._micros = plan, stages, stage, micros
        self._member = stage.ranks.index(rank)

    def forward(self, i: int) -> Action:
        """The forward of the i-th micro-batch on this rank."""
        stage = self._stage
        return Forward(stage=stage.index, micro_batch=self._micros[i][0], group=stage.ranks)

    def backward(self, i: int) -> Action:
        """The backward of the i-th micro-batch on this rank."""
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
        """Send ``out`` of the i-th micro-batch and receive ``back`` of the j-th as one action. One
        of them is activations, the other gradients, so both are with the same neighbouring stage;
        no action where there is no such stage."""
        send, recv = next(self.send(out, i), None), next(self.receive(back, j), None)
        if isinstance(send, Send) and isinstance(recv, Recv):
            yield Exchange(send=send, recv=recv)

    def _peer(self, step: int) -> int | None:
        """The rank with the same index in the stage ``step`` stages on (1) or back (-1); None where
        there is no such stage."""
        other = self._stage.index + step
        if not 0 <= other < self._stage.count:
            return None
        return self._stages[other].ranks[self._member]

    def _message(self, what: Literal["a", "g"], i: int, peer: int) -> Message:
        """The message with activations ("a") or gradients ("g") of the i-th micro-batch of this
        line."""
        index, micro = self._micros[i]
        tokens = sum(self._plan.tokens_of(micro))
        rows = rows_of(tokens, len(self._stage.ranks), self._member)
        return Message(what=what, micro_batch=index, peer=peer, rows=rows)


def _with_pushes(
    plan: Plan, rank: int, actions: list[Action], last_of: Mapping[int, int], bucket_count: int
) -> Iterator[Action]:
    """Add all pushes to the actions of a rank, from the last bucket to the first. Where its last
    backward is the last one of all ranks of its group (``last_of`` has their last micro-batches),
    the buckets of its stage are pushed within that backward; otherwise all pushes come at the end.
    """
    order = list(reversed(range(bucket_count)))
    last = max((i for i, a in enumerate(actions) if isinstance(a, Backward)), default=None)
    backward = None if last is None else actions[last]
    if last is None or not isinstance(backward, Backward) or not is_last(last_of, backward):
        yield from actions
        yield from (Push(bucket=b) for b in order)
        return
    pipeline = plan.pipelines[plan.micro_batches[backward.micro_batch].pipeline]
    own = pipeline.stage_of(rank, bucket_count - 2).buckets
    # Buckets of later stages are pushed before the rank waits for the gradients of its backward.
    before = last - 1 if isinstance(actions[last - 1], Recv) else last
    yield from actions[:before]
    yield from (Push(bucket=b) for b in order if b > own[-1])
    yield from actions[before:last]
    yield replace(backward, pushes=tuple(reversed(own)))
    yield from actions[last + 1 :]
    yield from (Push(bucket=b) for b in order if b < own[0])


def last_of_ranks(plan: Plan) -> dict[int, int]:
    """The index of the last micro-batch of every rank that has one, by rank."""
    last_of_pipelines = {micro.pipeline: index for index, micro in enumerate(plan.micro_batches)}
    last: dict[int, int] = {}
    for pipeline, index in last_of_pipelines.items():
        for rank in plan.pipelines[pipeline].ranks:
            last[rank] = max(index, last.get(rank, -1))
    return last


def is_last(last: Mapping[int, int], backward: Backward) -> bool:
    """Whether ``backward`` is the last one of all ranks of its group; ``last`` is the index of the
    last micro-batch of each rank (:func:`last_of_ranks`)."""
    return all(last[rank] <= backward.micro_batch for rank in backward.group)


def meeting(action: Action, rank: int, world: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks that all have to reach this action of ``rank`` before any of them goes on: the
    group of a forward or backward, all ranks for the update, else the rank alone."""
    match action:
        case Forward(group=group) | Backward(group=group):
            return group
        case Update():
            return world
    return (rank,)


def meeting_key(action: Action) -> tuple[Any, ...]:
    """The key by which ranks recognise that they stand at the same collective action. The pushes
    in a backward are no part of it, as each rank issues its own in its own last backward."""
    match action:
        case Forward() | Backward():
            return (action.kind, action.stage, action.micro_batch, action.group)
    return (action.kind,)
