"""The status board: messages between ranks through the store, besides their collectives.

    beat/{rank}   the rank's latest heartbeat: its action and how long it has been in it
    raised        how many ranks raised an error of ours, and the lowest of them
    lowest
    done          how many ranks have finished
    finished      set when all have
    left          how many ranks will not use the store again
    again/{n}     set when the n-th meeting anew is wanted: some rank cannot go on with its groups
    stoppable     "1" while ranks stop after a step when asked to
    stop          set when they are asked
    dead          the first failure of the job; it is set once and ends all ranks

Nothing here waits for a key: a client that waits holds its connection against other threads.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch.distributed as dist

from headrace.units import seconds_text

__all__ = ["Beat", "StatusBoard", "Death"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """One heartbeat: the ``count``-th of its rank, ``seconds`` into ``action`` ("" is between
    two actions); ``left`` when the rank has finished and will beat no more."""

    count: int
    action: str
    seconds: float
    left: bool = False

    @property
    def where(self) -> str:
        """``in 1F4``, ``between actions`` or ``already done``."""
        if self.left:
            return "already done"
        return f"in {self.action}" if self.action else "between actions"

    def __str__(self) -> str:
        return self.where if self.left else f"{self.where} for {seconds_text(self.seconds)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A failure: ``rank`` and ``how`` make a sentence ("rank 1" "was killed by SIGKILL").

    ``code`` is the exit code of the job; ``already_told`` where the error was printed already, so
    that the other ranks stop without a message.
    """

    rank: int
    how: str
    code: int = 1
    already_told: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} {self.how}"


class StatusBoard:
    """Reads and writes the keys above in ``store``, which holds one attempt of one job."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    @classmethod
    def of_attempt(cls, store: dist.Store, attempt: int) -> StatusBoard:
        """The board of the ``attempt``-th start: keys of dead attempts are never seen."""
        return cls(dist.PrefixStore(f"attempt{attempt}/board", store))

    def put(self, rank: int, beat: Beat) -> None:
        """Publish the latest heartbeat of ``rank``."""
        values = [beat.count, beat.action, beat.seconds, beat.left]
        self._store.set(f"beat/{rank}", json.dumps(values))

    def last(self, rank: int) -> Beat | None:
        """The latest heartbeat of a rank; None before its first."""
        key = f"beat/{rank}"
        if not self._store.check([key]):
            return None
        count, action, seconds, left = json.loads(self._store.get(key))
        return Beat(count=count, action=action, seconds=seconds, left=left)

    def where(self, rank: int) -> str:
        """Where a rank was when last heard of, for a sentence about it."""
        beat = self.last(rank)
        return f"last heard of {beat.where}" if beat else "never heard of"

    def everyone(self, ranks: int) -> str:
        """``rank 0 in 1F4 for 61 s, rank 1 ...``: the deadlock report."""
        beats = [self.last(rank) for rank in range(ranks)]
        return ", ".join(f"rank {rank} {beat or 'not started'}" for rank, beat in enumerate(beats))

    def note_raised(self, rank: int) -> None:
        """Note that a rank raised an error of this library: lower ``lowest``, count ``raised``."""
        expected = ""
        # compare_set returns the stored rank: a higher one is replaced, in another try, as other
        # ranks may write meanwhile.
        while (lowest := int(self._store.compare_set("lowest", expected, str(rank)))) > rank:
            expected = str(lowest)
        self._store.add("raised", 1)

    def raised(self) -> int:
        """Number of ranks that raised an error of this library."""
        return self._store.add("raised", 0)

    def lowest_raised(self) -> int:
        """The lowest rank that raised an error of this library; at least one must have."""
        return int(self._store.get("lowest"))

    def done(self) -> int:
        """Count one more rank as finished; returns how many are."""
        return self._store.add("done", 1)

    def finish(self) -> None:
        """Note that every rank is finished."""
        self._store.set("finished", "1")

    def finished(self) -> bool:
        """Whether every rank is finished."""
        return self._store.check(["finished"])

    def leave(self) -> int:
        """Count one more rank as needing the store no longer; returns how many."""
        return self._store.add("left", 1)

    def left(self) -> int:
        """How many ranks need the store no longer."""
        return self._store.add("left", 0)

    def ask_again(self, number: int) -> None:
        """Request the ``number``-th new rendezvous: all ranks leave their groups and meet."""
        self._store.set(f"again/{number}", "1")

    def asked_again(self, number: int) -> bool:
        """Whether some rank requested the ``number``-th new rendezvous."""
        return self._store.check([f"again/{number}"])

    def tell_stoppable(self, stoppable: bool) -> None:
        """Say whether ranks stop after a step, in order, when they are asked to."""
        self._store.set("stoppable", "1" if stoppable else "0")

    def stoppable(self) -> bool:
        """Whether ranks look now, between two steps, if they are to stop."""
        return self._store.check(["stoppable"]) and self._store.get("stoppable") == b"1"

    def ask_stop(self, number: int, who: str) -> bool:
        """Ask all ranks to stop after the step under way, because of signal ``number``. Returns
        whether ``who`` is the first to ask."""
        mine = f"{number} {who}"
        return self._store.compare_set("stop", "", mine).decode() == mine

    def stop_asked(self) -> bool:
        """Whether some process asked all ranks to stop."""
        return self._store.check(["stop"])

    def stopped_by(self) -> int:
        """The number of the signal that asked all ranks to stop; 0 where none has."""
        return int(self._store.get("stop").split()[0]) if self.stop_asked() else 0

    def declare(self, death: Death) -> Death:
        """Declare a failure; returns the one that counts, which is the first."""
        values = json.dumps([death.rank, death.how, death.code, death.already_told])
        return _death(self._store.compare_set("dead", "", values))

    def death(self) -> Death | None:
        """The failure that ends this attempt, if there is one."""
        return _death(self._store.get("dead")) if self._store.check(["dead"]) else None


def _death(values: bytes) -> Death:
    """The failure that :meth:`StatusBoard.declare` stored."""
    rank, how, code, already_told = json.loads(values)
    return Death(rank=rank, how=how, code=code, already_told=already_told)
