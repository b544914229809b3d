"""Programs: the ordered actions of one rank for one plan.

[Note: actions] Each action prints and reads back:

    P3          issue the pull of bucket 3 (weights, storage to working); waited for at first use
    0F4[0,1]    stage 0 runs the forward of micro-batch 4; its methods meet the group (0, 1)
    0B4[0,1]    the backward of the same
    G3          issue the push of bucket 3 (gradients, working to storage); ``U`` waits for it
    U           clip, optimizer step; every rank meets here

Pulls, pushes and the update meet the whole world. A collective inside a layer is not an action:
it belongs to the method, and the group is recorded with the forward and backward.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from headrace.errors import SpecError

__all__ = ["Action", "Backward", "Forward", "Program", "Pull", "Push", "Update", "parse_action"]


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
    """Run the backward of one micro-batch; ``group`` are the ranks that meet in it."""

    kind: ClassVar[str] = "backward"
    stage: int
    micro_batch: int
    group: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.stage}B{self.micro_batch}{_group_text(self.group)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Wait for all pushes, then clip and step."""

    kind: ClassVar[str] = "update"

    def __str__(self) -> str:
        return "U"


Action = Pull | Push | Forward | Backward | Update

_TEXT = re.compile(
    r"^(?:(?P<pg>[PG])(?P<bucket>\d+)|(?P<u>U)"
    r"|(?P<stage>\d+)(?P<fb>[FB])(?P<micro>\d+)\[(?P<group>\d+(?:,\d+)*)\])$"
)


def _group_text(group: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, group)) + "]"


def parse_action(text: str) -> Action:
    """Read one action back from its text."""
    found = _TEXT.match(text)
    if not found:
        raise SpecError("action", got=repr(text), wanted="P3, 0F4[0,1], 0B4[0,1], G3 or U")
    if found["u"]:
        return Update()
    if found["pg"]:
        bucket = int(found["bucket"])
        return Pull(bucket=bucket) if found["pg"] == "P" else Push(bucket=bucket)
    group = tuple(int(rank) for rank in found["group"].split(","))
    kind = Forward if found["fb"] == "F" else Backward
    return kind(stage=int(found["stage"]), micro_batch=int(found["micro"]), group=group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The actions of one rank, in order. Text form: ``rank 0: P0 P1 0F0[0] 0B0[0] G1 G0 U``."""

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
