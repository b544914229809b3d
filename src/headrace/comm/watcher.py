"""The watcher: a thread per rank that publishes its action and stops it when another rank died.

Neither gloo nor NCCL tells who died, and gloo's sends and receives may wait for their whole
timeout when a peer is killed in the middle of a transfer; nothing but the end of the process
unblocks them. So each rank publishes its action five times a second and looks for the notice of a
death; each watches the heartbeat of the rank before it, so that the traffic grows with the ranks,
not with their square, and no two clocks are ever compared. A rank that cannot reach the store can
tell and hear nothing: it stops as well.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from headrace.comm.processes import end, say, stop_text
from headrace.comm.sockets import make_impatient
from headrace.comm.status import Beat, Death, StatusBoard
from headrace.errors import LaunchError
from headrace.units import seconds_text

__all__ = [
    "AwakeClock",
    "Lifeline",
    "STOPPED",
    "Watcher",
]

_CONNECT_S = 30.0


class Lifeline:
    """The liveness connections of this rank: the next rank connects to its ``port``, and it
    connects to the rank before."""

    def __init__(self) -> None:
        """Open a port to which the next rank connects; the system breaks the connection when this
        process ends."""
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        # Never accepted by us: the system does, and breaks the connections when this process ends.
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
        self._before: socket.socket | None = None

    @property
    def port(self) -> int:
        """The port to which the next rank connects."""
        return int(self._listener.getsockname()[1])

    def hold(self, before: tuple[str, int]) -> None:
        """Connect to the rank before. Raises LaunchError when it cannot be reached."""
        try:
            self._before = socket.create_connection(before, timeout=_CONNECT_S)
        except OSError as error:
            raise LaunchError(
                f"rank before this one at {before[0]}:{before[1]}",
                got=error,
                wanted="a connection",
                hint="machines of a job must reach each other on all ports",
            )
        make_impatient(self._before)
        self._before.setblocking(False)

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """The sockets that become readable when the rank before is gone."""
        return () if self._before is None else (self._before,)

    def what_broke(self) -> str:
        """How the rank before ended, as a phrase after "rank N"; empty while it runs."""
        if self._before is None:
            return ""
        try:
            self._before.recv(1)
            why = "ended without a word"
        except BlockingIOError:
            return ""
        except ConnectionError:
            why = "ended without a word"
        except OSError:
            why = "cannot be reached any more"
        self._before.close()
        self._before = None
        return why

    def close(self) -> None:
        """Close the listening socket and the connection to the rank before."""
        for held in (self._listener, *self.sockets):
            held.close()


_ASLEEP_S = 1.0  # a tick this late means that this process was stopped, or starved


class AwakeClock:
    """Seconds in which this process ran: time in which it was stopped itself (Ctrl-Z, a suspended
    machine) or another thread held Python's lock does not count.

    ``too_long(seconds)`` is called once :meth:`answered` was not called for ``limit_s`` of them.
    """

    def __init__(
        self, *, tick_s: float, limit_s: float, too_long: Callable[[float], object]
    ) -> None:
        """A clock, not started, that calls ``too_long`` with the seconds since the last answer once
        these are above ``limit_s``."""
        self._tick_s, self._limit_s, self._too_long = tick_s, limit_s, too_long
        self._tick = (0.0, time.monotonic())  # (seconds asleep until the last tick, its time)
        self._answered_s = self.seconds()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clock", daemon=True)

    def start(self) -> None:
        """Start the thread that ticks."""
        self._tick = (0.0, time.monotonic())
        self.answered()
        self._thread.start()

    def seconds(self) -> float:
        """Seconds that this process was awake, from an arbitrary zero."""
        now_s = time.monotonic()
        return now_s - self._asleep(now_s)

    def answered(self) -> None:
        """Note that the awaited answer has come; the wait for the next one starts."""
        self._answered_s = self.seconds()

    @property
    def waited_s(self) -> float:
        """Seconds awake since the last answer."""
        return self.seconds() - self._answered_s

    def close(self) -> None:
        """End the thread, and wait for it."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        """The thread: ticks every ``tick_s``, adds up the time in which this process did not run,
        and calls ``too_long`` where an answer is missing."""
        while not self._ended.wait(self._tick_s):
            now_s = time.monotonic()
            self._tick = (self._asleep(now_s), now_s)
            if self.waited_s > self._limit_s:
                self._too_long(self.waited_s)

    def _asleep(self, now_s: float) -> float:
        """Seconds up to ``now_s`` in which this process did not run: the delay of a tick counts
        where it is more than a second."""
        asleep_s, last_s = self._tick
        late_s = now_s - last_s - self._tick_s
        return asleep_s + (late_s if late_s > _ASLEEP_S else 0.0)


STOPPED = 75
"""Exit code of a rank that stops because another failed (``EX_TEMPFAIL``: try again)."""

_NOTICE_S = 0.5  # for a rank or launcher that knows the cause to report it
_CUT_OFF_S = 1.0  # connections to a dead store break at once, to an unreachable one after this


class Watcher:
    """Publishes every ``heartbeat_s`` seconds, from a thread, what one of ``ranks`` ranks does, and
    ends its process when another one has failed. The rank before this one is declared dead after
    ``hang_s`` seconds without a heartbeat.

    The store client behind ``board`` must be this watcher's own; one that does not answer for
    ``hang_s`` ends this rank. With a ``lifeline`` to the rank before, its end is seen at once. Time
    in which this process was stopped itself (Ctrl-Z, a suspended machine) never counts against
    anybody.
    """

    def __init__(
        self,
        board: StatusBoard,
        *,
        rank: int,
        ranks: int,
        heartbeat_s: float = 0.2,
        hang_s: float = 30.0,
        lifeline: Lifeline | None = None,
    ) -> None:
        """A watcher, not started, of rank ``rank`` of ``ranks``, which beats every ``heartbeat_s``
        and calls a silent rank hung after ``hang_s``."""
        self.board, self._rank, self._ranks = board, rank, ranks
        self._heartbeat_s, self._hang_s, self._lifeline = heartbeat_s, hang_s, lifeline
        self._count = 0  # heartbeats published
        self._clock = AwakeClock(tick_s=heartbeat_s, limit_s=hang_s, too_long=self._cut_off)
        # (name, the clock's seconds at its begin, limit in seconds)
        self._action: tuple[str, float, float | None] = ("", self._clock.seconds(), None)
        # (the last new heartbeat of the rank before, when it was seen)
        self._before: tuple[Beat, float] | None = None
        self._ending = False  # this rank ends by itself: the thread stops nothing any more
        self._stoppable = self._stop_asked = False
        self._obeyed: dict[signal.Signals, Any] = {}  # signals to obey, and their former handlers
        self._grace_s = 0.0
        self._stopping: tuple[signal.Signals, float] | None = None  # by what, and until when
        # (number of the awaited rendezvous, what breaks this rank's connections)
        self._again: tuple[int, Callable[[], object]] | None = None
        self._again_lock = threading.Lock()
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def start(self) -> None:
        """Begin: the first heartbeat is out when this returns."""
        self._clock.start()
        self._publish()
        self._thread.start()

    def enter(self, action: str, limit_s: float | None = None) -> None:
        """The rank begins ``action``. Costs an assignment; the thread publishes it.

        Longer than ``limit_s`` in it means no progress: all ranks' actions are reported and the
        job ends.
        """
        self._action = (action, self._clock.seconds(), limit_s)

    def free(self, number: int, cut: Callable[[], object]) -> None:
        """From now on call ``cut`` as soon as some rank requests the ``number``-th new rendezvous:
        it breaks the connections in which this rank may wait."""
        with self._again_lock:
            self._again = (number, cut)

    def keep(self) -> None:
        """Stop cutting connections; a cut that had begun is over when this returns."""
        with self._again_lock:
            self._again = None

    def leave(self) -> None:
        """The rank has ended its action and begun no other."""
        self.enter("")

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Context in which ranks can stop in order: between two steps they look whether they were
        asked to, so that whoever ends the job asks first. Used on the first rank, which decides for
        all; does nothing on others."""
        if self._rank:
            yield
            return
        self.board.tell_stoppable(True)
        self._stoppable = True
        try:
            yield
        finally:
            self._stoppable = False
            with suppress(RuntimeError):  # the store is gone: nobody asks
                self.board.tell_stoppable(False)

    def stop_asked(self) -> bool:
        """Whether all ranks are to stop now, as of the first rank's last look at the board; always
        False on other ranks."""
        return self._stop_asked

    def stop_lone(self, number: signal.Signals) -> bool:
        """Ask the only rank of a job to stop in order, because of a signal. Returns whether it
        will: only while its steps are :meth:`stoppable`, and for the first signal."""
        if not self._stoppable or not self.board.ask_stop(number, f"rank {self._rank}"):
            return False
        say(f"stopped by {number.name}: the step under way is ended and a checkpoint written")
        return True

    def obey(self, *signals: signal.Signals, grace_s: float = 0.0) -> None:
        """Let these signals end the process from the thread, with a line that says where it was: a
        handler in Python never runs while the main thread waits in a collective. Main thread only.

        Where ranks are :meth:`stoppable` a first signal asks all of them to stop in order, and only
        those that have not after ``grace_s`` end so.
        """
        self._grace_s = grace_s
        os.set_blocking(self._waker, False)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for number in signals:
            self._obeyed[number] = signal.signal(number, lambda *_: None)

    def fail(self, text: str, *, code: int = 1, already_told: bool = False) -> Death:
        """This rank fails: ``text`` says how, after "rank N". Returns the failure that counts.

        The caller then ends the process; the thread beats on until it does, and stops nothing.
        """
        self._ending = True
        text = f"{' '.join(text.split())} ({self._beat().where})"
        mine = Death(rank=self._rank, how=text, code=code, already_told=already_told)
        try:
            return self.board.declare(mine)
        except RuntimeError:  # the store is gone: no rank can be notified
            return mine

    def refuse(self, text: str, *, code: int = 2, wait_s: float = 0.3) -> None:
        """This rank raised an error meant for the user: ``text`` is printed once for the job, by
        the lowest rank that raises within ``wait_s``. The caller then ends the process."""
        self._ending = True
        try:
            self.board.note_raised(self._rank)
            _poll(lambda: self.board.raised() == self._ranks, wait_s)
            # A lower rank raised too and prints the error; this one waits until that is declared.
            if self._rank > self.board.lowest_raised():
                _poll(lambda: self.board.death() is not None, wait_s)
                return
            all_raised = self.board.raised() == self._ranks
        except RuntimeError:
            all_raised = False
        if self.fail(f"refused: {text}", code=code, already_told=True).rank == self._rank:
            say(text if all_raised else f"rank {self._rank}: {text}")

    def part(self) -> None:
        """Wait until every rank is done. Without this the end of one rank breaks connections that
        slower ones still read from. A death meanwhile ends the process as ever."""
        self.enter("the end, waiting for the other ranks")
        if self.board.done() == self._ranks:
            self.board.finish()
        _poll(self.board.finished)
        self._ending = True

    def close(self) -> None:
        """End the thread, and say that this rank has left, after :meth:`part`."""
        self._ending = True
        if self._obeyed:
            signal.set_wakeup_fd(-1)
        for number, handler in self._obeyed.items():
            signal.signal(number, handler)
        os.write(self._waker, b"\0")
        self._thread.join()
        with suppress(RuntimeError):
            left = self.board.leave()  # after the thread's last beat
            if self._rank == 0 and left < self._ranks:  # it may host the store: it leaves last
                _poll(lambda: self.board.left() == self._ranks, limit_s=2.0)
        self._clock.close()
        if self._lifeline is not None:
            self._lifeline.close()
        os.close(self._wake)
        os.close(self._waker)

    def _beat(self, *, left: bool = False) -> Beat:
        """The heartbeat of now: this rank's action and the seconds in it."""
        action, since_s, _ = self._action
        seconds = max(0.0, self._clock.seconds() - since_s)
        return Beat(count=self._count, action=action, seconds=seconds, left=left)

    def _publish(self, *, left: bool = False) -> None:
        """Write the next heartbeat to the board."""
        self._count += 1
        self.board.put(self._rank, self._beat(left=left))

    def _run(self) -> None:
        """The thread: one round after the other until the rank ends; a store that is gone ends the
        process."""
        try:
            while not self._sleep():
                self._round()
            self._publish(left=True)
        except RuntimeError as error:  # every error of the store
            if self._ending:
                return
            if self._clock.waited_s > _CUT_OFF_S:
                self._cut_off(self._clock.waited_s)
            self._stop(f"the store is gone, so is the launcher ({str(error).splitlines()[0]})")

    def _cut_off(self, seconds: float) -> None:
        """End the process, as the store has not answered for ``seconds``."""
        self._stop(f"cut off from the store for {seconds_text(seconds)}")

    def _sleep(self) -> bool:
        """Wait until the next round is due, a signal has come (which is obeyed here) or the rank
        before has ended. Returns True when the watcher shall end."""
        lifeline = () if self._lifeline is None or self._ending else self._lifeline.sockets
        if self._wake not in select.select([self._wake, *lifeline], [], [], self._heartbeat_s)[0]:
            return False
        # signals write their numbers here, and close() writes 0
        received = os.read(self._wake, 64)
        for number in self._obeyed:
            if number in received:
                self._hear(number)
        return 0 in received

    def _hear(self, number: signal.Signals) -> None:
        """Obey a signal: the first one asks all ranks to stop in order, where they can; any other
        one ends this process."""
        if death := self.board.death():  # the signal is torchrun's, as another rank failed
            self._obey_death(death, code=128 + number)
        can_stop = self._grace_s and (self.board.stoppable() or self.board.stop_asked())
        if not can_stop or self._stopping is not None:
            self._stop(number.name, code=128 + number)
        # The signal may have come because the rank before has ended: then that is the failure.
        self._check_lifeline()
        self._stopping = (number, self._clock.seconds() + self._grace_s)
        if self.board.ask_stop(number, f"rank {self._rank}"):
            say(f"stopped by {number.name}: {self.board.everyone(self._ranks)}")
            say(stop_text(self._grace_s))

    def _check_grace(self) -> None:
        """End the process where the time to stop after a signal has run out."""
        if self._stopping is None or self._clock.seconds() < self._stopping[1]:
            return
        number = self._stopping[0]
        late = f"not stopped within {seconds_text(self._grace_s)} of {number.name}"
        self._stop(late, code=128 + number)

    def stopped_by(self) -> int:
        """The number of the signal after which all ranks stop in order; 0 where none has come."""
        return self.board.stopped_by()

    def _round(self) -> None:
        """Publish a heartbeat, read the board for failures and requests, and check the rank before,
        limits and signals."""
        self._publish()
        self._clock.answered()
        if self._ending:
            return
        if death := self.board.death():
            self._obey_death(death)
        with self._again_lock:
            if self._again is not None and self.board.asked_again(self._again[0]):
                self._again[1]()
        if self._stoppable and not self._stop_asked:
            self._stop_asked = self.board.stop_asked()
        self._check_lifeline()
        self._check_before()
        self._check_limit()
        self._check_grace()

    def _obey_death(self, death: Death, *, code: int = STOPPED) -> None:
        """End this process because of a failure, with a line about it unless it was printed."""
        if death.already_told:
            end(code)
        self._stop(str(death), code=code)

    def _check_lifeline(self) -> None:
        """End the job if the process of the rank before this one is gone."""
        how = "" if self._lifeline is None else self._lifeline.what_broke()
        if not how:
            return
        _poll(lambda: self.board.finished() or self.board.death() is not None, _NOTICE_S)
        if self.board.finished():
            return
        before = (self._rank - 1) % self._ranks
        how = f"{how} ({self.board.where(before)})"
        self._obey_death(self.board.declare(Death(rank=before, how=how, code=STOPPED)))

    def _check_before(self) -> None:
        """Declare the rank before this one dead if it has not beaten for too long."""
        before = (self._rank - 1) % self._ranks
        beat = self.board.last(before) if before != self._rank else None
        if beat is None:  # it may not have started: the launcher watches that
            return
        # a new heartbeat restarts the count of silent seconds
        if self._before is None or self._before[0].count != beat.count:
            self._before = (beat, self._clock.seconds())
        elif (silent_s := self._clock.seconds() - self._before[1]) > self._hang_s:
            silent = f"gave no sign of life for {seconds_text(silent_s)}"
            how = f"{silent} (last heard of {beat.where}; devices.hang_s is the limit)"
            self._obey_death(self.board.declare(Death(rank=before, how=how, code=STOPPED)))

    def _check_limit(self) -> None:
        """End the job where this rank has been in its action for longer than the action's limit,
        and nobody has failed before."""
        beat, limit_s = self._beat(), self._action[2]
        if limit_s is None or beat.seconds <= limit_s:
            return
        mine = Death(
            rank=self._rank, how=f"was {beat}, limit {seconds_text(limit_s)}", code=STOPPED
        )
        # only the rank whose failure counts reports it
        if (declared := self.board.declare(mine)) == mine:
            say(f"no progress: {self.board.everyone(self._ranks)}")
            end(STOPPED)
        self._obey_death(declared)

    def _stop(self, why: str, *, code: int = STOPPED) -> None:
        """Print why and where this rank stops, and end the process with ``code``."""
        line = f"rank {self._rank} stops: {why}; this rank was {self._beat()}"
        if code != STOPPED and self._before is not None:  # the killed rank cannot report it itself
            line += f"; rank {(self._rank - 1) % self._ranks} last heard of {self._before[0].where}"
        say(line)
        end(code)


def _poll(holds: Callable[[], bool], limit_s: float = float("inf")) -> None:
    """Wait until ``holds()`` is true, polling at growing intervals, for at most ``limit_s``."""
    deadline, pause_s = time.monotonic() + limit_s, 0.002
    while not holds() and time.monotonic() < deadline:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)
