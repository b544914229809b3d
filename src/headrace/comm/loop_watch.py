"""Who failed, told to the ranks of a user's loop by name.

headrace did not start these processes and may not end them as it likes. So a thread of each rank
publishes the step that it is in, and watches a connection to the rank before, which the system
breaks when that process ends, however it ends. The first who sees it writes it down for all. A rank
that waits for others then raises :class:`PeerLost`; one that nothing wakes (a transfer of a device,
or one that has half arrived) ends its process with the same words.
"""

from __future__ import annotations

import atexit
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from headrace.comm import waiting
from headrace.comm.collectives import gather_bytes
from headrace.comm.mesh import Groups
from headrace.comm.processes import end, say
from headrace.comm.status import Beat, Death, StatusBoard
from headrace.comm.watcher import STOPPED, Lifeline
from headrace.errors import LaunchError, PeerLost

__all__ = ["CallWatch", "LoopWatch", "watched_beginning"]

_ROUND_S = 0.2  # between two looks at the other ranks
_NOTICE_S = 0.6  # for a rank that raised an error to say which
_GRACE_S = 10.0  # for a waiting rank to be woken by the broken connection


class LoopWatch:
    """Watches the other ranks of a user's loop for failures, in a thread. ``where()`` says in words
    which step and action this rank is in; that thread calls it.

    Attributes:
        may_end: Whether this process may end, without an error, although it has not come to rest:
            of batches that are given nobody knows which is the last.
    """

    def __init__(self, groups: Groups, where: Callable[[], str]) -> None:
        """Start the watching thread of this rank; each rank holds a connection to the one before
        it, whose address all exchange here. Collective."""
        self._rank, self._ranks, self._where = groups.rank, groups.ranks, where
        self._death: Death | None = None
        self._known_s = 0.0
        self._count, self._published = 0, ""
        self._resting = True  # between steps: this rank may end
        self.may_end = False
        self._told = False  # whether the error about a lost rank was raised here
        self._stop_asked = False
        self._forget: Callable[[], None] = lambda: None
        # The run, and with it this watch, may be freed while its thread publishes.
        self._publishing = threading.RLock()
        self._closed = threading.Event()
        self._lifeline = Lifeline()
        # start time (names the job's keys in the store), port and host of each rank
        own_address = f"{time.time_ns()} {self._lifeline.port} {socket.gethostname()}"
        addresses = [
            payload.decode().split() for payload in gather_bytes(own_address.encode(), groups.world)
        ]
        self._board = StatusBoard(
            dist.PrefixStore(f"headrace/loop {addresses[0][0]}", _own_store())
        )
        _, port, host = addresses[(self._rank - 1) % self._ranks]
        same_machine = host == addresses[self._rank][2]
        with suppress(LaunchError):  # a name that nobody knows: the store alone tells then
            self._lifeline.hold(("127.0.0.1" if same_machine else host, int(port)))
        self._forget = waiting.explain(self.cause)
        atexit.register(self._leave)
        self._thread = threading.Thread(target=self._run, name="loop watch", daemon=True)
        self._thread.start()

    def describe(self, where: Callable[[], str]) -> None:
        """From now on ``where()`` says in which step and action this rank is."""
        self._where = where

    def enter(self) -> None:
        """This rank begins a step: from now on its end is a failure."""
        self._change(resting=False)

    def rest(self) -> None:
        """The loop is over: from now on the end of this rank is no failure."""
        self._change(resting=True)

    def _change(self, *, resting: bool) -> None:
        """Publish at once whether this rank is between steps (``resting``)."""
        self._resting = resting
        with suppress(RuntimeError):  # the thread notices that the store is gone
            self._publish()

    def cause(self) -> PeerLost | None:
        """The error to raise in a rank that waits for another, None while nobody is known to have
        failed."""
        if self._death is None or self._death.rank == self._rank:
            return None
        self._told = True
        return PeerLost(
            f"rank {self._death.rank}",
            got=self._death.how,
            wanted="all ranks of the loop",
            hint=f"this is rank {self._rank}, in {self._where()}; go on from the last checkpoint",
        )

    def ask_stop(self, number: int) -> bool:
        """Ask the first rank to stop all ranks, because of signal ``number``. Returns whether this
        rank is the first to ask."""
        return self._board.ask_stop(number, f"rank {self._rank}")

    def stop_asked(self) -> bool:
        """On the first rank, whether some rank asked to stop, as of this rank's last look at the
        board; always False on other ranks."""
        return self._stop_asked

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that ``error`` ends the work of this one, stop watching, and wait
        for the end of the thread."""
        self._declare(error)
        self.close()
        self._thread.join(timeout=2 * _NOTICE_S)

    def _declare(self, error: BaseException) -> None:
        """Write down for all ranks that this one raised ``error``, unless one has failed before."""
        text = " ".join(f"raised {type(error).__name__}: {error} (in {self._where()})".split())
        with suppress(RuntimeError):  # who holds the store has ended
            self._board.declare(Death(rank=self._rank, how=text))

    def leave(self) -> None:
        """Stop watching, and come to rest before where this rank may end."""
        if self.may_end:
            self.rest()
        self.close()

    def close(self) -> None:
        """Stop watching. A rank that has not come to rest counts as lost once this is gone."""
        self._closed.set()
        self._forget()
        atexit.unregister(self._leave)

    def _leave(self) -> None:
        """Tell the other ranks, at the end of this process, which error ended it. Then end the
        thread: one that uses the store while the interpreter shuts down would abort the process."""
        error = getattr(sys, "last_value", None)
        if error is not None and not self._resting:
            self._declare(error)
        elif self.may_end:
            self.rest()
        self._closed.set()
        self._thread.join(timeout=2 * _NOTICE_S)

    def _run(self) -> None:
        """The thread: publishes this rank's state, looks for a failed one, and ends the process
        where it is stuck after a failure."""
        while not self._closed.wait(_ROUND_S):
            try:
                self._publish()
                self._look()
            except RuntimeError:  # every error of the store: who holds it has ended
                self._hear(Death(rank=0, how="ended, or who held the store of the ranks"))
            if self._death is not None and self._is_stuck():
                say(f"rank {self._rank} stops: {self.cause() or self._death}")
                end(STOPPED)

    def _publish(self) -> None:
        """Publish where this rank is, when that has changed."""
        where = self._where()
        with self._publishing:
            text = "" if self._resting else where
            if text != self._published:
                self._count, self._published = self._count + 1, text
                beat = Beat(count=self._count, action=text, seconds=0.0, left=self._resting)
                self._board.put(self._rank, beat)

    def _look(self) -> None:
        """Read from the board whether a stop was asked for or a rank failed; where the connection
        to the rank before broke, declare that rank dead."""
        if not self._rank and not self._stop_asked:
            self._stop_asked = self._board.stop_asked()
        if self._death is None and (death := self._board.death()) is not None:
            self._hear(death)
        before = (self._rank - 1) % self._ranks
        how = self._lifeline.what_broke()
        beat = self._board.last(before) if how else None
        if not how or beat is None or beat.left:
            return
        # The failed rank may have raised an error and be about to say so: its words are the better
        # ones.
        deadline = time.monotonic() + _NOTICE_S
        while (death := self._board.death()) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        self._hear(death or self._board.declare(Death(rank=before, how=f"{how} ({beat.where})")))

    def _hear(self, death: Death) -> None:
        """Keep the first failure that this rank hears of, and when it did."""
        if self._death is None:
            self._death, self._known_s = death, time.monotonic()

    def _is_stuck(self) -> bool:
        """Whether this rank still waits for another, long after it should have been woken."""
        late = time.monotonic() - self._known_s > _GRACE_S
        return late and not (self._resting or self._told) and waiting.under_way()


@contextmanager
def watched_beginning(groups: Groups) -> Iterator[LoopWatch | None]:
    """Watch the other ranks while a loop begins, where there are any. Yields the watch, which the
    loop keeps and which is at rest afterwards; an error is told to the other ranks and ends it.
    Collective."""
    if groups.ranks == 1:
        yield None
        return
    if groups.device.type == "cpu" and dist.get_backend() == "gloo":
        waiting.begin()  # a rank hears of the others' errors even while it waits for them
    watch = LoopWatch(groups, lambda: "the beginning of the loop")
    watch.enter()
    try:
        yield watch
    except BaseException as error:
        watch.fail(error)
        raise
    watch.rest()


class CallWatch:
    """Watches the other ranks from the first batch of a spread model on, which a loop calls as it
    likes. Others are told of this rank the number of its batch and its action."""

    def __init__(self) -> None:
        self._watch: LoopWatch | None = None
        self._batches, self._action = 0, ""

    def begin(self, groups: Groups) -> None:
        """Watch from now on, where there are other ranks; it may be called again. Collective."""
        if self._watch is None and groups.ranks > 1:
            self._watch = LoopWatch(groups, self._where)
            self._watch.enter()

    def count(self) -> None:
        """Note that another batch begins here."""
        self._batches += 1

    @contextmanager
    def during(self, action: str) -> Iterator[None]:
        """This rank is in ``action``. Raises PeerLost where another has failed meanwhile."""
        before, self._action = self._action, action
        try:
            with waiting.explained():
                yield
        finally:
            self._action = before

    def close(self) -> None:
        """Stop watching: this rank may end when it likes."""
        if self._watch is not None:
            self._watch.rest()
            self._watch.close()
            self._watch = None

    def _where(self) -> str:
        """The number of the batch and the action that this rank is in, in words."""
        return f"batch {self._batches}" + (f", {self._action}" if self._action else "")


def _own_store() -> dist.Store:
    """A new client of the user's store for this thread alone: a thread that waits for a key blocks
    all others that use the same client."""
    default_store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001
    return default_store.clone()  # type: ignore[no-any-return]
