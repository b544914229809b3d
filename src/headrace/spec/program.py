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

Pulls, pushes and the update meet the whole world. A collective inside a layer is not an action:
it belongs to the method, and the group is recorded with the forward and backward.

[Note: exchanges] In the steady state of a pipeline a rank sends forwards and receives backwards
between the same two actions. Written as a send and a receive, two neighbours stand at two sends
and wait for each other wherever a send waits for its receiver; as one action they meet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from headrace.errors import SpecError

__all__ = [
    "Action",
    "Backward",
    "Exchange",
    "Forward",
    "Message",
    "Program",
    "Pull",
    "Push",
    "Recv",
    "Send",
    "Update",
    "parse_action",
    "pushes_of",
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
    """Run the forward of one micro-batch; ``group`` are the ranks that meet in it."""

    kind: ClassVar[str] = "forward"
    stage: int
    micro_batch: int
    group: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.stage}F{self.micro_batch}{_group_text(self.group)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """Run the backward of one micro-batch; ``group`` are the ranks that meet in it.

    ``pushes`` are the buckets whose push is issued in it, in this order, each when the segment
    that works with the bucket is done: the rank's last backward completes its gradients.
    """

    kind: ClassVar[str] = "backward"
    stage: int
    micro_batch: int
    group: tuple[int, ...]
    pushes: tuple[int, ...] = ()

    def __str__(self) -> str:
        text = f"{self.stage}B{self.micro_batch}{_group_text(self.group)}"
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


Action = Pull | Push | Forward | Backward | Send | Recv | Exchange | Update

_LINK = re.compile(r"([PG])(\d+)")
_COMPUTE = re.compile(r"(\d+)([FB])(\d+)\[(\d+(?:,\d+)*)\](?:\{(\d+(?:,\d+)*)\})?")
_MESSAGE = re.compile(r"([SR])([ag])(\d+)([<>])(\d+)\*(\d+)")
_EXCHANGE = re.compile(r"X\((S[^,()]+),(R[^,()]+)\)")


def pushes_of(action: Action) -> tuple[int, ...]:
    """The buckets whose push an action issues, in order."""
    if isinstance(action, Push):
        return (action.bucket,)
    return action.pushes if isinstance(action, Backward) else ()


def _group_text(group: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, group)) + "]"


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",")) if text else ()


def parse_action(text: str) -> Action:
    """Read one action back from its text."""
    action = Update() if text == "U" else _link(text) or _compute(text) or _traffic(text)
    if action is None:
        wanted = "P3, 0F4[0,1], 0B4[0,1]{3,2}, Sa4>2*128, Ra4<0*128, X(S..,R..), G3 or U"
        raise SpecError("action", got=repr(text), wanted=wanted)
    return action


def _link(text: str) -> Action | None:
    found = _LINK.fullmatch(text)
    if not found:
        return None
    kind = Pull if found[1] == "P" else Push
    return kind(bucket=int(found[2]))


def _compute(text: str) -> Action | None:
    found = _COMPUTE.fullmatch(text)
    if not found or (found[2] == "F" and found[5]):
        return None
    stage, micro, group = int(found[1]), int(found[3]), _numbers(found[4])
    if found[2] == "F":
        return Forward(stage=stage, micro_batch=micro, group=group)
    return Backward(stage=stage, micro_batch=micro, group=group, pushes=_numbers(found[5]))


def _traffic(text: str) -> Send | Recv | Exchange | None:
    pair = _EXCHANGE.fullmatch(text)
    if pair:
        send, recv = _traffic(pair[1]), _traffic(pair[2])
        both = isinstance(send, Send) and isinstance(recv, Recv)
        return Exchange(send=send, recv=recv) if both else None
    found = _MESSAGE.fullmatch(text)
    if not found or (found[1] == "S") != (found[4] == ">"):
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
        """The inverse of ``str``."""
        head, colon, body = text.partition(":")
        word, _, rank = head.strip().partition(" ")
        if not colon or word != "rank" or not rank.isdecimal():
            raise SpecError("program", got=repr(text[:40]), wanted="'rank N: ACTIONS'")
        return cls(rank=int(rank), actions=tuple(parse_action(word) for word in body.split()))
