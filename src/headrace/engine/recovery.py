"""Going on when a rank runs out of memory in the middle of a step.

Nothing is written before the update, so a step that failed before it can be taken again: all ranks
leave what they wait in, agree on who ran out, and get a thriftier plan of the same batch.
Randomness is keyed by sample and step, so the loss is the one that it would have been.

There are two ways to leave, as there are two owners of the world:

    LeaveWorld   ranks that headrace started destroy all process groups and initialize new ones; on
                 devices their watchers abort waiting collectives. Ranks meet only after a failure.
    LeaveGroups  a world that the user made stays. A rank asks for a meeting in the store and leaves
                 its groups, whose connections break; ranks that wait notice the broken connection,
                 or poll the store while they wait. Ranks of other groups do not notice, so all
                 ranks meet at the end of every attempt. Only on gloo with replicated weights: no
                 watcher is there to abort NCCL, and a gather of FSDP2 cannot be left.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist

from headrace.comm import waiting
from headrace.comm.collectives import gather_bytes
from headrace.comm.mesh import Groups
from headrace.comm.ranks import is_broken_connection
from headrace.comm.rerendezvous import Rerendezvous
from headrace.errors import HeadraceError, PlanMismatch
from headrace.native.machine import is_out_of_memory
from headrace.spec.step import Exhausted

__all__ = ["LeaveGroups", "LeaveWorld", "Recovery", "WayToLeave"]


class WayToLeave(Protocol):
    """How this rank leaves the collectives that it waits in, and learns that another rank asks for
    it."""

    @property
    def meets_always(self) -> bool:
        """Whether all ranks meet at the end of every attempt, not only after a failure."""
        ...

    def begin(self) -> None:
        """Begin an attempt at a step."""
        ...

    def possible(self, error: Exception, action: str) -> bool:
        """Whether the step can be taken again after ``error`` in ``action``, as it was not this
        rank that ran out of memory but another, which asked all to leave."""
        ...

    def ask(self, action: str) -> bool:
        """Ask all ranks to leave, as this one ran out of memory in ``action``; False where that is
        not possible."""
        ...

    def leave(self, drop_attempt: Callable[[], None]) -> None:
        """Leave the collectives that this rank or others wait in. ``drop_attempt`` frees the memory
        of the step; it is called when no rank waits any more."""
        ...

    def end(self) -> None:
        """End an attempt: no rank is asked to leave any more."""
        ...


@dataclass(slots=True, kw_only=True)
class Recovery:
    """The part of one rank in recovery from a lack of memory.

    Attributes:
        way: How this rank leaves collectives that it waits in.
        groups: The groups of this rank; ranks meet in their world.
    """

    way: WayToLeave
    groups: Groups
    # The action in which this rank ran out of memory in this attempt, None where it did not.
    _ran_out_in: str | None = field(default=None, init=False)
    _failed: bool = field(default=False, init=False)
    # What this rank refuses of the attempt, which all ranks are told of at its end.
    _refusal: HeadraceError | None = field(default=None, init=False)

    @property
    def failed(self) -> bool:
        """Whether this rank's attempt has ended with an error that it survives."""
        return self._failed

    def begin(self) -> None:
        """Begin an attempt at a step."""
        self._ran_out_in, self._failed, self._refusal = None, False, None
        self.way.begin()

    def refuse(self, error: HeadraceError | None) -> None:
        """Have all ranks raise an ``error`` of this one, if it is one and the first of the attempt,
        where they meet at the attempt's end: others may wait for this rank until then."""
        self._refusal = self._refusal or error

    def survives(self, error: BaseException, action: str) -> bool:
        """Note that this rank's attempt ended with an error, and tell the others where it was a
        lack of memory.

        Args:
            error: What ended the attempt.
            action: Where this rank was, in words that name it.

        Returns:
            Whether the step can be taken again: some rank ran out of memory, and nothing was
            written.
        """
        if not isinstance(error, Exception):
            return False
        if is_out_of_memory(error) and not waiting.freed():
            survived = self.way.ask(action)
            self._ran_out_in = action if survived else None
        else:
            # Once another rank has asked to leave, any error, a lack of memory too, may come from
            # transfers that were aborted half way.
            survived = self.way.possible(error, action)
        self._failed = self._failed or survived
        return survived

    def meet(self, loss: float, drop_attempt: Callable[[], None]) -> tuple[float, Exhausted | None]:
        """End an attempt. No exception of the failed attempt may be alive: its frames hold what the
        step held. Collective.

        Args:
            loss: This rank's part of the step's loss.
            drop_attempt: Drops what the step held, called where the attempt failed on any rank.

        Returns:
            The sum of all ranks' losses, and the ranks that ran out of memory, if any did. Where
            ranks meet only after a failure the loss is returned as it is.

        Raises:
            HeadraceError: When the attempt failed and no rank ran out of memory, and on all ranks
                where one has refused the attempt (:meth:`refuse`).
            PlanMismatch: Where a rank has left the attempt and asks for something else.
        """
        failed = self._failed
        if failed:
            self.way.leave(drop_attempt)
        elif not self.way.meets_always:
            return loss, None
        self.way.end()
        own = self._refusal
        refused = None if own is None else [own.what, own.got, own.wanted, own.hint]
        payload = json.dumps([loss, self._ran_out_in, refused]).encode()
        by_rank = [json.loads(text) for text in gather_bytes(payload, self.groups.world)]
        for rank, answer in enumerate(by_rank):
            if not isinstance(answer, list):  # an object: what a rank says that left its loop
                raise PlanMismatch(
                    f"step on rank {rank}",
                    got=f"a loop that left it, and {answer.get('asks')}",
                    wanted="a loop over all its micro-batches",
                )
        actions = tuple((rank, action) for rank, (_, action, _) in enumerate(by_rank) if action)
        if not actions:
            self._require_none_refused([fields for _, _, fields in by_rank], drop_attempt)
        if failed and not actions:
            raise HeadraceError("step", got="a broken connection", wanted="ranks that all answer")
        if actions and not failed:  # only other ranks ran out: this one leaves now
            self.way.leave(drop_attempt)
            self.way.end()
        exhausted = Exhausted(actions=actions) if actions else None
        return sum(part for part, _, _ in by_rank), exhausted

    def _require_none_refused(
        self, by_rank: Sequence[list[str] | None], drop_attempt: Callable[[], None]
    ) -> None:
        """Raise HeadraceError where a rank has refused the attempt: its own error, or that of the
        first one that has, whose fields are in ``by_rank``."""
        for rank, fields in enumerate(by_rank):
            if fields is not None:
                drop_attempt()
                if self._refusal is not None:
                    raise self._refusal
                what, got, wanted, hint = fields
                raise HeadraceError(f"{what} on rank {rank}", got=got, wanted=wanted, hint=hint)


@dataclass(slots=True, kw_only=True)
class LeaveWorld:
    """Leave the whole world and make a new one; collectives that cannot be aborted stay behind.

    Attributes:
        rerendezvous: The worlds of this rank, one after the other.
        groups: The groups of this rank, which are made anew.
        recoverable: Whether nothing of the step was written, so that it can be taken again.
        prepared: Whether the step's groups are made: a rank that waits in their making cannot be
            freed.
    """

    rerendezvous: Rerendezvous
    groups: Groups
    recoverable: Callable[[], bool]
    prepared: Callable[[], bool]

    @property
    def meets_always(self) -> bool:
        """False: a rank that waits for a failed rank is freed by its watcher."""
        return False

    def begin(self) -> None:
        """Do nothing: the current world is used."""

    def possible(self, error: Exception, action: str) -> bool:
        """Whether nothing was written and another rank asks for a new world, now or within the
        short time that this waits for such a request."""
        return self.recoverable() and self.rerendezvous.asked()

    def ask(self, action: str) -> bool:
        """Ask all ranks to meet in a new world, if the step's groups are made and nothing was
        written; returns whether it did."""
        if self.recoverable() and self.prepared():
            self.rerendezvous.ask()
            return True
        return False

    def leave(self, drop_attempt: Callable[[], None]) -> None:
        """Leave the old world and meet in a new one. Collective."""
        self.rerendezvous.meet_anew(self.groups, drop_attempt)

    def end(self) -> None:
        """Do nothing: no request is open in the new world."""


@dataclass(slots=True, kw_only=True)
class LeaveGroups:
    """Leave the groups within a world that the user made.

    Attributes:
        groups: The groups of this rank.
        possible_here: Whether groups can be left at all.
    """

    groups: Groups
    possible_here: bool
    _attempt: int = field(default=0, init=False)

    @property
    def meets_always(self) -> bool:
        """True: ranks of other groups do not know that a rank failed."""
        return True

    def begin(self) -> None:
        """Poll the store while waiting, from now on."""
        self._attempt += 1
        if self.possible_here:
            waiting.begin()
            waiting.heed(self._is_asked)

    def possible(self, error: Exception, action: str) -> bool:
        """Whether another rank has asked to leave, and ``error`` is one that follows from that or
        may come with it: a broken connection, or a lack of memory on this rank too."""
        expected = is_broken_connection(error) or is_out_of_memory(error)
        return self.possible_here and expected and self._is_asked()

    def ask(self, action: str) -> bool:
        """Write the request to the store, with ``action``; False where groups cannot be left."""
        if self.possible_here:
            _store().set(self._key, action)
        return self.possible_here

    def leave(self, drop_attempt: Callable[[], None]) -> None:
        """Leave all groups but the world, then free the memory of the step."""
        self.groups.leave()
        drop_attempt()

    def end(self) -> None:
        """Stop polling the store while waiting."""
        if self.possible_here:
            waiting.heed(lambda: False)

    @property
    def _key(self) -> str:
        """The key in the store under which a rank asks to leave the current attempt."""
        return f"headrace/loop/out of memory/{self._attempt}"

    def _is_asked(self) -> bool:
        """Whether a rank has asked to leave the current attempt."""
        return bool(_store().check([self._key]))


def _store() -> dist.Store:
    """The store of the user's default process group."""
    found: Callable[[], dist.Store] = dist.distributed_c10d._get_default_store  # noqa: SLF001
    return found()
