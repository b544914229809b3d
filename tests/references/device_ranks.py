"""Ranks whose collectives are kernels: what NCCL does to a program, without a device.

A rank's host posts operations and goes on. Each communicator has a stream of its own; an operation
there starts when those before it have ended and when the tensors that it takes are there, and ends
when all its members have posted theirs and theirs have started. A communicator that was never used
is opened by all its members together, each of which stands still until then. And whenever it
likes, a host waits for all that it has posted: an allocation that fails first does so, and so does
loading a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from headrace.spec import (
    Action,
    Backward,
    Exchange,
    Forward,
    Program,
    Pull,
    Push,
    Recv,
    Send,
    Update,
)
from headrace.spec.walk import messages_of

__all__ = ["stuck"]

LINKS, MESSAGES = "links", "messages"


@dataclass(frozen=True, kw_only=True)
class Post:
    """One rank's part of an operation: ``key`` is that of all ``members``, ``needs`` are the keys
    of its own that must have ended before it starts. Those of one ``batch`` are one kernel."""

    key: tuple[Any, ...]
    members: tuple[int, ...]
    communicator: tuple[Any, ...]
    batch: int
    needs: tuple[tuple[Any, ...], ...]
    action: Action


@dataclass(kw_only=True)
class Host:
    """Where a rank stands: ``synchronises(place)`` says whether it waits before that post."""

    posts: list[Post]
    synchronises: Callable[[int], bool]
    place: int = 0
    posted: list[Post] = field(default_factory=list)


def stuck(
    programs: Sequence[Program],
    buckets: int,
    synchronises: Callable[[int, int], bool],
    *,
    opened: bool = True,
) -> list[tuple[int, Action]]:
    """(rank, action) of hosts that stand still for ever; ``synchronises(rank, place)`` says where
    one waits for its device. ``opened``: communicators were before the step."""
    world = tuple(program.rank for program in programs)
    hosts = {
        p.rank: Host(
            posts=list(_posts(p, world, buckets)),
            synchronises=lambda place, rank=p.rank: synchronises(rank, place),
        )
        for p in programs
    }
    state = _State(hosts=hosts, world=world, opened=opened)
    while state.move():
        pass
    return [
        (rank, host.posts[host.place].action)
        for rank, host in hosts.items()
        if host.place < len(host.posts)
    ]


@dataclass(kw_only=True)
class _State:
    hosts: dict[int, Host]
    world: tuple[int, ...]
    opened: bool
    ended: set[tuple[Any, ...]] = field(default_factory=set)
    open: set[tuple[Any, ...]] = field(default_factory=set)

    def move(self) -> bool:
        moved = False
        for host in self.hosts.values():
            while host.place < len(host.posts) and self._may_post(host):
                host.posted.append(host.posts[host.place])
                host.place += 1
                moved = True
        return self._end() or self._open() or moved

    def _may_post(self, host: Host) -> bool:
        post = host.posts[host.place]
        joined = host.place > 0 and host.posts[host.place - 1].batch == post.batch
        waits = host.synchronises(host.place) or isinstance(post.action, Update)
        if waits and not joined and any(p.key not in self.ended for p in host.posted):
            return False
        return self.opened or post.communicator in self.open

    def _open(self) -> bool:
        """Open communicators at which all members stand."""
        before = len(self.open)
        standing: dict[tuple[Any, ...], int] = {}
        for host in self.hosts.values():
            if host.place < len(host.posts):
                kind = host.posts[host.place].communicator
                standing[kind] = standing.get(kind, 0) + 1
        for kind, stands in standing.items():
            if stands == (len(self.world) if kind[0] in (LINKS, MESSAGES) else len(kind)):
                self.open.add(kind)
        return len(self.open) > before

    def _end(self) -> bool:
        """End operations that have started on all their members."""
        started: dict[tuple[Any, ...], int] = {}
        needed: dict[tuple[Any, ...], int] = {}
        for host in self.hosts.values():
            busy: dict[tuple[Any, ...], int] = {}
            for post in host.posted:
                if post.key in self.ended:
                    continue
                needed[post.key] = len(post.members)
                ready = all(key in self.ended for key in post.needs)
                if ready and busy.setdefault(post.communicator, post.batch) == post.batch:
                    started[post.key] = started.get(post.key, 0) + 1
                busy.setdefault(post.communicator, post.batch)
        done = {key for key, ranks in started.items() if ranks == needed[key]}
        self.ended |= done
        return bool(done)


def _posts(program: Program, world: tuple[int, ...], buckets: int) -> Iterator[Post]:
    """What a rank posts. What it computes waits for what it met last, and so do its next posts."""
    chain, batch = list[tuple[Any, ...]](), count()
    for action in program.actions:
        match action:
            case Pull(bucket=bucket):
                yield _linked(("pull", bucket), world, (), action, next(batch))
                chain.append(("pull", bucket))
            case Push(bucket=bucket):
                yield _linked(("push", bucket), world, tuple(chain), action, next(batch))
            case Forward(group=group) | Backward(group=group):
                forward = isinstance(action, Forward)
                for bucket in range(buckets) if forward else reversed(range(buckets)):
                    key = (action.kind, action.stage, action.micro_batch, bucket)
                    if len(group) > 1:
                        yield Post(
                            key=key,
                            members=group,
                            communicator=group,
                            batch=next(batch),
                            needs=tuple(chain),
                            action=action,
                        )
                        chain = [key]
                    if not forward and bucket in action.pushes:
                        yield _linked(("push", bucket), world, tuple(chain), action, next(batch))
            case Send() | Recv() | Exchange():
                came, together = list[tuple[Any, ...]](), next(batch)
                for message in messages_of(action):
                    key = message.key(program.rank)
                    yield Post(
                        key=key,
                        members=key[:2],
                        communicator=(MESSAGES,),
                        batch=together,
                        needs=tuple(chain),
                        action=action,
                    )
                    came += [] if message.sends else [key]
                chain = came or chain
            case Update():
                yield _linked(("update",), world, (), action, next(batch))


def _linked(
    key: tuple[Any, ...],
    world: tuple[int, ...],
    needs: tuple[tuple[Any, ...], ...],
    action: Action,
    batch: int,
) -> Post:
    return Post(
        key=key, members=world, communicator=(LINKS,), batch=batch, needs=needs, action=action
    )
