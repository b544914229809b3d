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
        """(sender, receiver, what, micro-batch) of the message that ``rank`` posts: the same key at
        both ends."""
        pair = (rank, self.peer) if self.sends else (self.peer, rank)
        return (*pair, self.what, self.micro_batch)


def messages_of(action: Action) -> tuple[Posted, ...]:
    """The messages that an action posts: two for an exchange, one for a send or a receive, none for
    others."""
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
    """Pairs (rank, action) at which ranks wait for ever; empty when all programs run to their end.

    ``programs`` are those of ranks that wait for no others before the update, and no message is in
    a program twice. The result begins with the ranks of a cycle, each of which waits for the next
    one and the last for the first: that is the cause of all others.
    """
    world = tuple(program.rank for program in programs)
    return _stuck({p.rank: [_step(a, p.rank, world) for a in p.actions] for p in programs})


def disordered(programs: Sequence[Program]) -> list[tuple[int, Action]]:
    """As :func:`waiting`, in a stricter walk: a push waits for all ranks, and a backward has its
    ranks meet at each bucket that one of them pushes in it (see the module's note on one order).
    Empty when all ranks post their collectives in one order."""
    world = tuple(program.rank for program in programs)
    # Buckets that some rank pushes within each backward, by the key of the backward.
    pushed: dict[tuple[Any, ...], list[int]] = {}
    for program in programs:
        for action in program.actions:
            if isinstance(action, Backward):
                buckets = pushed.setdefault(meeting_key(action), [])
                buckets += [bucket for bucket in action.pushes if bucket not in buckets]
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
    """The whole action of ``rank`` as one step."""
    return _Step(action=action, key=meeting_key(action), group=meeting(action, rank, world))


def _parts(
    action: Action, rank: int, world: tuple[int, ...], pushed: dict[tuple[Any, ...], list[int]]
) -> Iterator[_Step]:
    """The steps of an action in the stricter walk of :func:`disordered`. A push is a step of all
    ranks. A backward in which some rank pushes (``pushed``) has a step for each of these buckets,
    from the last to the first, each followed by the push where this rank does it."""
    if isinstance(action, Push):
        yield _Step(action=action, key=("push", action.bucket), group=world)
    elif isinstance(action, Backward) and (buckets := pushed[meeting_key(action)]):
        for bucket in sorted(buckets, reverse=True):
            key = (*meeting_key(action), bucket)
            yield _Step(action=action, key=key, group=meeting(action, rank, world))
            if bucket in action.pushes:
                yield _Step(action=action, key=("push", bucket), group=world)
        yield _step(action, rank, world)  # the rest of the backward, after its last push
    else:
        yield _step(action, rank, world)


def _stuck(steps: dict[int, list[_Step]]) -> list[tuple[int, Action]]:
    """Walk the ``steps`` of all ranks as far as they go: pairs (rank, action) at which ranks wait
    for ever, a cycle of ranks that wait for each other first; empty where all come to their
    ends."""
    walk = _Walk(steps)
    walk.run()
    heads = {rank: step.action for rank in walk.world if (step := walk.head(rank)) is not None}
    cycle = walk.cycle(next(iter(heads))) if heads else []
    others = [rank for rank in heads if rank not in cycle]
    return [(rank, heads[rank]) for rank in (*cycle, *others)]


class _Walk:
    """The state of a walk: the step at which every rank stands, which ranks have come to which
    collective, which messages are posted, and which ranks have issued which pull."""

    def __init__(self, steps: dict[int, list[_Step]]) -> None:
        """Put every rank, a key of ``steps``, before its first step."""
        self._steps = steps
        self.world = tuple(steps)
        self._next_step = dict.fromkeys(self.world, 0)
        self._come: dict[tuple[Any, ...], set[int]] = {}  # ranks at a collective, by its key
        self._posted: set[tuple[bool, tuple[int, int, str, int]]] = set()  # (sends, message key)
        self._issued: dict[int, set[int]] = {}  # ranks that have issued the pull of a bucket
        self._under_way: dict[int, list[int]] = {rank: [] for rank in self.world}  # pulls of a rank
        self._pulling: list[int] = []  # ranks that wait for pulls
        self._ready = list(self.world)  # ranks that may be able to move

    def head(self, rank: int) -> _Step | None:
        """The step at which ``rank`` stands; None at the end of its list."""
        steps, number = self._steps[rank], self._next_step[rank]
        return steps[number] if number < len(steps) else None

    def run(self) -> None:
        """Move every rank on until none can go on."""
        while self._ready:
            self._move(self._ready.pop())

    def cycle(self, rank: int) -> list[int]:
        """Follow who waits for whom from ``rank`` on: the ranks of the cycle that this ends in, the
        lowest one first; all ranks on the way where it ends at one that waits for nobody."""
        way: list[int] = []
        at: int | None = rank
        while at is not None and at not in way:
            way.append(at)
            at = self._partner(at)
        if at is None:
            return way
        ranks = way[way.index(at) :]
        first = ranks.index(min(ranks))
        return ranks[first:] + ranks[:first]

    def _partner(self, rank: int) -> int | None:
        """A rank that ``rank`` waits for; None when it is at its end, or waits only for ranks that
        are at theirs."""
        step = self.head(rank)
        if step is None:
            return None
        action, group, key = step.action, step.group, step.key
        # Ranks that have not issued a pull, come to the collective, or posted the other end.
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
        """Move ``rank`` past its step, with all ranks of the step's group, if it waits for nobody
        any more. Otherwise whoever it waits for makes it ready again."""
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
        """Note that ``rank`` has issued the pull of ``bucket``. When all ranks have, those that
        wait for pulls are ready to look again."""
        self._issued.setdefault(bucket, set()).add(rank)
        self._under_way[rank].append(bucket)
        if not self._is_late(bucket):
            self._ready += self._pulling
            self._pulling = []

    def _pulls_awaited(self, action: Action, rank: int) -> list[int]:
        """The buckets whose pulls an action of ``rank`` waits for: for a forward those that the
        rank has issued and others have not."""
        if isinstance(action, Forward):
            self._under_way[rank] = [b for b in self._under_way[rank] if self._is_late(b)]
            return self._under_way[rank]
        return []

    def _is_late(self, bucket: int) -> bool:
        """Whether some rank has not issued the pull of ``bucket`` yet."""
        return len(self._issued[bucket]) < len(self.world)

    def _late(self, bucket: int) -> list[int]:
        """The ranks that have not issued the pull of ``bucket`` yet."""
        return sorted(set(self.world) - self._issued[bucket])

    def _arrive(self, step: _Step, rank: int) -> bool:
        """Note that ``rank`` has come to a collective step. True once all ranks of the step's group
        have come."""
        come = self._come.setdefault(step.key, set())
        come.add(rank)
        if not come.issuperset(step.group):
            return False
        del self._come[step.key]
        return True

    def _post(self, action: Action, rank: int) -> bool:
        """Post the messages of ``action``. True when all of them are posted at the other end too,
        so that the rank can go on."""
        messages = messages_of(action)
        if not messages:
            return True
        own_ends = {(message.sends, message.key(rank)) for message in messages}
        if not self._posted.issuperset(own_ends):
            self._posted |= own_ends
            # A peer that waits for one of these messages may go on now.
            self._ready += [m.peer for m in messages if m.peer in self._steps]
        return self._posted.issuperset((not sends, key) for sends, key in own_ends)
