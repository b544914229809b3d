"""Whole runs as a device would have them: what ranks posted, played again with NCCL's rules.

:class:`Posted` notes, on each rank of a real run, what it posts, when it waits for it, when its
host meets others and when it waits for its device. :func:`played` then lets hosts and devices run
as NCCL's do: a wait is the device's and holds nobody up; an operation starts in the order of its
communicator when all that was waited for before it was posted has ended, and ends when all its
members' have started; a communicator is opened by all its members, who stand still until then; and
a host may at any post wait for all that it has posted.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.comm.waiting import Transfer
from headrace.native.spans import HostClock

__all__ = ["HOST", "Event", "Posted", "of_the_host", "played"]

HOST = {"agree", "gather_floats", "gather_bytes", "gather_to_first", "from_first", "meet"}
"""Functions whose collectives are of the host, on any device."""


class Event(NamedTuple):
    """``post`` and ``host``: on ``group`` of ``members``, a message to or from ``peer`` where there
    is one; what is posted in one ``batch`` is one kernel. ``wait``: for the post ``of`` that
    number. ``sync``: the host waits for its device."""

    kind: Literal["post", "host", "wait", "sync"]
    group: str = ""
    members: tuple[int, ...] = ()
    name: str = ""
    peer: int | None = None
    batch: int = 0
    of: int = 0


class Posted(TorchDispatchMode):
    """``with Posted() as posted``: the events of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._posts = 0
        self._unclaimed: list[int] = []  # posts whose handle was not made yet
        self._numbers: dict[int, int] = {}  # of handles
        self._batch = 0

    def __enter__(self) -> Self:
        begin, wait, noted = Transfer.__init__, Transfer.wait, self

        def made(transfer: Transfer, *args: Any, **named: Any) -> None:
            begin(transfer, *args, **named)
            noted._numbers[id(transfer)] = noted._unclaimed.pop(0)

        def waited(transfer: Transfer) -> None:
            number = noted._numbers.pop(id(transfer))
            if number >= 0:
                noted.events.append(Event("wait", of=number))
            wait(transfer)

        self._before = begin, wait
        Transfer.__init__, Transfer.wait = made, waited  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        Transfer.__init__, Transfer.wait = self._before  # type: ignore[method-assign]

    def sync(self) -> None:
        """The host waits for its device here."""
        self.events.append(Event("sync"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place, _, name = str(func._overloadpacket).rpartition(".")
        if place == "c10d":
            self._note(name, args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: tuple[Any, ...]) -> None:
        group = next(
            dist.ProcessGroup.unbox(x)
            for x in args
            if not isinstance(x, list | int | float | bool) and _is_group(x)
        )
        members = tuple(dist.get_process_group_ranks(group))
        event = Event("post", group=group.group_name, members=members, name=name)
        if of_the_host():
            self.events.append(event._replace(kind="host"))
            self._unclaimed.append(-1)
            return
        message = name in ("send", "recv_")
        if not (message and self._unclaimed):
            self._batch += 1
        peer = members[next(x for x in args if isinstance(x, int))] if message else None
        self.events.append(event._replace(peer=peer, batch=self._batch))
        self._unclaimed.append(self._posts)
        self._posts += 1


def _is_group(x: Any) -> bool:
    return type(x).__name__ == "ScriptObject"


def of_the_host() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in HOST:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class DeviceClock(HostClock):
    """A clock whose moments the host has to wait for, as those of a device."""

    def __init__(self, posted: Posted) -> None:
        self._posted = posted

    def past(self, mark: float) -> bool:
        return False

    def reach(self, mark: float) -> None:
        self._posted.sync()


@dataclass(kw_only=True)
class _Kernel:
    key: tuple[Any, ...]
    members: tuple[int, ...]
    batch: int
    after: int  # so many of the rank's waits


@dataclass(kw_only=True)
class _Rank:
    events: Sequence[Event]
    place: int = 0
    counts: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    queues: dict[str, list[_Kernel]] = field(default_factory=dict)
    posted: list[_Kernel] = field(default_factory=list)
    waits: list[tuple[Any, ...]] = field(default_factory=list)
    reached: int = 0


def played(
    runs: Sequence[Sequence[Event]], synchronises: Callable[[int, int], bool]
) -> list[tuple[int, Event]]:
    """(rank, event) at which hosts stand for ever; ``synchronises(rank, place)`` says at which
    posts a host waits for its device."""
    play = _Play([_Rank(events=list(events)) for events in runs], synchronises)
    while play.move():
        pass
    return [
        (r, rank.events[rank.place])
        for r, rank in enumerate(play.ranks)
        if rank.place < len(rank.events)
    ]


class _Play:
    def __init__(self, ranks: list[_Rank], synchronises: Callable[[int, int], bool]) -> None:
        self.ranks, self._synchronises = ranks, synchronises
        self._ended: set[tuple[Any, ...]] = set()
        self._open: set[str] = set()
        self._met: set[tuple[Any, ...]] = set()

    def move(self) -> bool:
        moved = False
        for r, rank in enumerate(self.ranks):
            while rank.place < len(rank.events) and self._step(r, rank):
                rank.place += 1
                moved = True
        return self._end() or self._meet() or moved

    def _step(self, r: int, rank: _Rank) -> bool:
        """Whether a host gets past its event."""
        event = rank.events[rank.place]
        if event.kind == "wait":
            rank.waits.append(rank.posted[event.of].key)
            return True
        if event.kind == "host":
            return self._key(r, rank, event) in self._met and bool(self._count(r, rank, event))
        joined = bool(rank.posted) and rank.posted[-1].batch == event.batch
        syncs = event.kind == "sync" or (not joined and self._synchronises(r, rank.place))
        if syncs and any(kernel.key not in self._ended for kernel in rank.posted):
            return False
        if event.kind == "sync":
            return True
        if event.group not in self._open:
            return False
        key = self._count(r, rank, event)
        members = event.members if event.peer is None else (r, event.peer)
        kernel = _Kernel(key=key, members=members, batch=event.batch, after=len(rank.waits))
        rank.posted.append(kernel)
        rank.queues.setdefault(event.group, []).append(kernel)
        return True

    def _key(self, r: int, rank: _Rank, event: Event) -> tuple[Any, ...]:
        kind: tuple[Any, ...] = (event.group, event.kind)
        if event.peer is not None:
            kind = (event.group, *((r, event.peer) if event.name == "send" else (event.peer, r)))
        return *kind, rank.counts[kind]

    def _count(self, r: int, rank: _Rank, event: Event) -> tuple[Any, ...]:
        key = self._key(r, rank, event)
        rank.counts[key[:-1]] += 1
        return key

    def _end(self) -> bool:
        """End what has started on all its members."""
        started: Counter[tuple[Any, ...]] = Counter()
        members: dict[tuple[Any, ...], int] = {}
        for rank in self.ranks:
            while rank.reached < len(rank.waits) and rank.waits[rank.reached] in self._ended:
                rank.reached += 1
            for queue in rank.queues.values():
                while queue and queue[0].key in self._ended:
                    queue.pop(0)
                for kernel in queue:
                    if kernel.batch != queue[0].batch or kernel.after > rank.reached:
                        break
                    started[kernel.key] += kernel.key not in self._ended
                    members[kernel.key] = len(kernel.members)
        done = {key for key, ranks in started.items() if ranks == members[key]}
        self._ended |= done
        return bool(done)

    def _meet(self) -> bool:
        """Open communicators, and let hosts go on, at which all members stand."""
        standing: Counter[tuple[Any, ...]] = Counter()
        wanted: dict[tuple[Any, ...], int] = {}
        for r, rank in enumerate(self.ranks):
            if rank.place == len(rank.events):
                continue
            event = rank.events[rank.place]
            if event.kind in ("post", "host"):
                key = ("open", event.group) if event.kind == "post" else self._key(r, rank, event)
                standing[key] += 1
                wanted[key] = len(event.members)
        met = {key for key, ranks in standing.items() if ranks == wanted[key]}
        opened = {key[1] for key in met if key[0] == "open"} - self._open
        hosts = {key for key in met if key[0] != "open"} - self._met
        self._open |= opened
        self._met |= hosts
        return bool(opened or hosts)
