"""Walking programs: every rank stands at one action, and whoever can move moves.

Every wait names fixed partners, so where the walk ends does not depend on who moves first. A send
waits for its receiver here: it is done when both ranks stand at the message. An exchange posts both
its messages on arrival.

[Note: pulls] A pull is issued and waits for nobody, but what works with its weights waits until all
ranks have issued it. Here a forward waits for every pull that its rank has issued, until all ranks
of the walk have. That stands for the world: where ranks issue their pulls in one order and come
through alone, what comes before a pull needs earlier pulls only, of any rank.

[Note: one order] On devices a collective is a kernel that spins until all its members have posted
theirs, and whatever has the host wait for the device (an allocation that fails first, the first use
of a communicator) waits for all that it has posted. Two ranks that post a push and a collective of
their own in different orders may then wait for each other. So there is a second walk, in which
pushes are met as well, and a backward is one meeting for each bucket: who comes through it may wait
for the device wherever it likes, as everybody posts what he shares with others in one order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.spec.program import (
    Action,
    Backward,
    Exchange,
    Forward,
    Program,
    Pull,
    Push,
    Recv,
    Send,
    meeting,
    meeting_key,
)

__all__ = ["Posted", "disordered", "messages_of", "waiting"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """One message of an action: sent to ``peer`` or received from it."""

    sends: bool
    what: str
    micro_batch: int
    peer: int
    rows: int

    def key(self, rank: int) -> tuple[int, int, str, int]:
        """(from, to, what, micro-batch) when ``rank`` posts it: equal at both ends."""
        pair = (rank, self.peer) if self.sends else (self.peer, rank)
        return (*pair, self.what, self.micro_batch)


def messages_of(action: Action) -> tuple[Posted, ...]:
    """The messages of an action."""
    match action:
        case Exchange(send=send, recv=recv):
            return (*messages_of(send), *messages_of(recv))
        case Send(message=m) | Recv(message=m):
            return (
                Posted(
                    sends=isinstance(action, Send),
                    what=m.what,
                    micro_batch=m.micro_batch,
                    peer=m.peer,
                    rows=m.rows,
                ),
            )
    return ()


def waiting(programs: Sequence[Program]) -> list[tuple[int, Action]]:
    """The (rank, action) where ranks wait for ever; empty when all lists run to their end.

    The programs are those of ranks that wait for no others before the update. First come ranks of
    which each waits for the next one, and the last for the first: the cause of all others. No
    message may stand in a list twice.
    """
    world = tuple(program.rank for program in programs)
    return _stuck({p.rank: [_step(a, p.rank, world) for a in p.actions] for p in programs})


def disordered(programs: Sequence[Program]) -> list[tuple[int, Action]]:
    """The same where ranks meet in pushes too, and in every bucket of a backward: empty when ranks
    post what they share with others in one order. A push stands for the whole world's."""
    world = tuple(program.rank for program in programs)
    pushed: dict[tuple[Any, ...], list[int]] = {}
    for program in programs:
        for action in program.actions:
            if isinstance(action, Backward):
                known = pushed.setdefault(meeting_key(action), [])
                known += [bucket for bucket in action.pushes if bucket not in known]
    return _stuck(
        {
            p.rank: [step for a in p.actions for step in _parts(a, p.rank, world, pushed)]
            for p in programs
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """An action, or a part of one, in which the ranks of ``group`` meet by ``key``."""

    action: Action
    key: tuple[Any, ...]
    group: tuple[int, ...]


def _step(action: Action, rank: int, world: tuple[int, ...]) -> _Step:
    return _Step(action=action, key=meeting_key(action), group=meeting(action, rank, world))


def _parts(
    action: Action, rank: int, world: tuple[int, ...], pushed: dict[tuple[Any, ...], list[int]]
) -> Iterator[_Step]:
    """What is met in an action one after the other."""
    if isinstance(action, Push):
        yield _Step(action=action, key=("push", action.bucket), group=world)
    elif isinstance(action, Backward) and (buckets := pushed[meeting_key(action)]):
        for bucket in sorted(buckets, reverse=True):
            key = (*meeting_key(action), bucket)
            yield _Step(action=action, key=key, group=meeting(action, rank, world))
            if bucket in action.pushes:
                yield _Step(action=action, key=("push", bucket), group=world)
        yield _step(action, rank, world)  # what is left of it
    else:
        yield _step(action, rank, world)


def _stuck(steps: dict[int, list[_Step]]) -> list[tuple[int, Action]]:
    """The (rank, action) at which each rank waits for ever, a circle of ranks that wait for each
    other first; empty where all come to their ends."""
    walk = _Walk(steps)
    walk.run()
    heads = {rank: step.action for rank in walk.world if (step := walk.head(rank)) is not None}
    circle = walk.circle(next(iter(heads))) if heads else []
    return [(rank, heads[rank]) for rank in (*circle, *(r for r in heads if r not in circle))]


class _Walk:
    """Where every rank stands, who has come to which meeting, which messages are posted, and who
    has issued which pull."""

    def __init__(self, steps: dict[int, list[_Step]]) -> None:
        """Put every rank, a key of ``steps``, before its first step."""
        self._steps = steps
        self.world = tuple(steps)
        self._next_step = dict.fromkeys(self.world, 0)
        self._come: dict[tuple[Any, ...], set[int]] = {}
        self._posted: set[tuple[bool, tuple[int, int, str, int]]] = set()
        self._issued: dict[int, set[int]] = {}
        self._under_way: dict[int, list[int]] = {rank: [] for rank in self.world}
        self._pulling: list[int] = []
        self._ready = list(self.world)

    def head(self, rank: int) -> _Step | None:
        """The step at which ``rank`` stands; None at the end of its list."""
        steps, number = self._steps[rank], self._next_step[rank]
        return steps[number] if number < len(steps) else None

    def run(self) -> None:
        """Move every rank on until none can go on."""
        while self._ready:
            self._move(self._ready.pop())

    def circle(self, rank: int) -> list[int]:
        """Who waits for whom, from ``rank`` on, until it goes round, from the lowest rank of the
        circle; the whole way when it ends at a rank that waits for nobody."""
        way: list[int] = []
        at: int | None = rank
        while at is not None and at not in way:
            way.append(at)
            at = self._partner(at)
        if at is None:
            return way
        found = way[way.index(at) :]
        first = found.index(min(found))
        return found[first:] + found[:first]

    def _partner(self, rank: int) -> int | None:
        """One that ``rank`` waits for; None when it, or who it waits for, is at its end."""
        step = self.head(rank)
        if step is None:
            return None
        action, group, key = step.action, step.group, step.key
        late = [other for pull in self._pulls_awaited(action, rank) for other in self._late(pull)]
        late += [other for other in group if other != rank and other not in self._come.get(key, ())]
        late += [
            message.peer
            for message in messages_of(action)
            if (not message.sends, message.key(rank)) not in self._posted
        ]
        stuck = [other for other in late if other in self.world and self.head(other) is not None]
        return stuck[0] if stuck else None

    def _move(self, rank: int) -> None:
        """One action of ``rank``, with those who meet in it, if it waits for nobody any more."""
        step = self.head(rank)
        if step is None:
            return
        action, group = step.action, step.group
        if self._pulls_awaited(action, rank):
            self._pulling.append(rank)
            return
        if isinstance(action, Pull):
            self._issue(action.bucket, rank)
        if group != (rank,) and not self._arrive(step, rank):
            return
        if self._post(action, rank):
            for other in group:
                self._next_step[other] += 1
            self._ready += group

    def _issue(self, bucket: int, rank: int) -> None:
        """Take an issued pull; those who wait for pulls look again when all have issued it."""
        self._issued.setdefault(bucket, set()).add(rank)
        self._under_way[rank].append(bucket)
        if not self._is_late(bucket):
            self._ready += self._pulling
            self._pulling = []

    def _pulls_awaited(self, action: Action, rank: int) -> list[int]:
        """The pulls that an action of ``rank`` waits for."""
        if isinstance(action, Forward):
            self._under_way[rank] = [b for b in self._under_way[rank] if self._is_late(b)]
            return self._under_way[rank]
        return []

    def _is_late(self, bucket: int) -> bool:
        """Whether some rank has not issued a pull."""
        return len(self._issued[bucket]) < len(self.world)

    def _late(self, bucket: int) -> list[int]:
        """Who has not issued a pull."""
        return sorted(set(self.world) - self._issued[bucket])

    def _arrive(self, step: _Step, rank: int) -> bool:
        """Let a rank come to a collective step; True once all ranks of the step's group have
        come."""
        come = self._come.setdefault(step.key, set())
        come.add(rank)
        if not come.issuperset(step.group):
            return False
        del self._come[step.key]
        return True

    def _post(self, action: Action, rank: int) -> bool:
        """Post the messages of ``action``; whether all of them are posted at both ends."""
        messages = messages_of(action)
        if not messages:
            return True
        mine = {(message.sends, message.key(rank)) for message in messages}
        if not self._posted.issuperset(mine):
            self._posted |= mine
            # A peer that waits for one of them may go on now.
            self._ready += [m.peer for m in messages if m.peer in self._steps]
        return self._posted.issuperset((not sends, key) for sends, key in mine)
