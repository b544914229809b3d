"""Plans the coming batches in other processes, while the current one trains.

Plans come in the order of the batches and depend on nothing but the batch, so they are the same
whatever the number of producers, and whichever of them dies. A producer is a process of its own
that imports the planning side only; one that dies is replaced, and what it had to plan is planned
again. One that is waited for and gives no sign of life is killed: it may be frozen, or swapped out.

A second function of each batch (``after``) runs once its plan is sent and no other batch waits. Its
result is lost with the process that computes it, and skipped for batches that are trained by then.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from queue import PriorityQueue, SimpleQueue
from struct import Struct
from tempfile import TemporaryFile
from threading import Thread
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import finalize

from headrace.errors import LaunchError, SpecError

__all__ = [
    "ALIVE",
    "Answer",
    "PlanAhead",
    "Producer",
    "command",
    "noted",
    "serve",
]


class Answer(NamedTuple):
    """The answer of a producer for the item ``number``: ``data`` is the pickled result, or the
    error where it ``failed``. ``after`` distinguishes results of the second function from plans."""

    number: int
    data: bytes
    failed: bool = False
    after: bool = False


ALIVE = Answer(number=-1, data=b"")
"""The answer that only shows that a producer is alive."""

_NUMBER = Struct("q")
_POLL_S = 1.0  # between two looks whether the parent is still there


def command(fd: int, note: int) -> list[str]:
    """The command line of a producer that talks over the file descriptor ``fd``, and writes the
    number of the item that it plans to the file descriptor ``note``. It does not import the main
    program, and with it torch, as multiprocessing would."""
    text = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from headrace.comm.workers import serve; serve({fd}, {note}, {os.getpid()})"
    )
    return [sys.executable, "-c", text]


def noted(note: int) -> int:
    """The number of the item that a producer began last; -1 for none."""
    data = os.pread(note, _NUMBER.size, 0)
    return int(_NUMBER.unpack(data)[0]) if len(data) == _NUMBER.size else -1


_Work = tuple[bool, int, bytes]
"""(whether the item is planned already, its number, the pickled item): plans come first."""

_Said = tuple[Answer, bytes | None]
"""(an answer, the pickled item of the answered plan)"""


def serve(fd: int, note: int, parent: int) -> None:
    """The loop of a producer, a process of its own: plan the items that arrive over ``fd``, and
    write the number of each to ``note`` as it is begun. The first message has the pickled functions
    (planning, and the second one) and the most items in work; each later one is (number, pickled
    item). It ends when the process ``parent`` is gone. :func:`_send` puts planned items back into
    the queue for the second function."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all ranks
    connection = Connection(fd)
    plan, after, depth = _received_functions(connection)
    work: PriorityQueue[_Work] = PriorityQueue()
    answers: SimpleQueue[_Said] = SimpleQueue()
    Thread(target=_receive, args=(connection, parent, work, answers), daemon=True).start()
    Thread(target=_send, args=(connection, work, answers), daemon=True).start()
    newest_number = -1
    while True:
        # Items to plan come before planned ones (False < True), each kind by number.
        planned, number, item = work.get()
        if not planned:
            newest_number = number
            os.pwrite(note, _NUMBER.pack(number), 0)
            answers.put((_answer(plan, number, item), item))
        elif after is not None and number >= newest_number - depth:  # older ones are trained by now
            answers.put((_answer(after, number, item)._replace(after=True), None))


def _received_functions(
    connection: Connection,
) -> tuple[Callable[[Any], Any], Callable[[Any], Any] | None, int]:
    """(planning, the second function or None, the most items in work), from the first message.
    Where they cannot be unpickled, planning is a function that raises the reason."""
    try:
        data = connection.recv_bytes()
    except (EOFError, OSError):
        os._exit(0)
    try:
        plan, after, depth = pickle.loads(data)
        return plan, after, depth
    except Exception as error:
        text = f"{type(error).__name__}: {error}"

    def unknown(_: Any) -> Any:
        """In the place of planning: raise why that could not be unpickled."""
        raise ImportError(f"the function cannot be loaded where plans are made ({text})")

    return unknown, None, 1


def _answer(plan: Callable[[Any], Any], number: int, item: bytes) -> Answer:
    """The answer to item ``number``: the pickled plan, or the pickled error of planning it."""
    try:
        return Answer(number, pickle.dumps(plan(pickle.loads(item))))
    except Exception as error:
        with suppress(Exception):  # some errors cannot be pickled, or not read back
            data = pickle.dumps(error)
            pickle.loads(data)
            return Answer(number, data, failed=True)
        # Such an error is replaced by one with its text.
        text = f"{type(error).__name__}: {error}"
        return Answer(number, pickle.dumps(RuntimeError(text)), failed=True)


def _receive(
    connection: Connection,
    parent: int,
    work: PriorityQueue[_Work],
    answers: SimpleQueue[_Said],
) -> None:
    """The reading thread of a producer: puts items into ``work``, says that it is alive while it
    has nothing else to say, and ends the process when its parent ends."""
    try:
        while os.getppid() == parent:
            if connection.poll(_POLL_S):
                work.put((False, *connection.recv()))
            elif answers.empty():
                answers.put((ALIVE, None))
    except (EOFError, OSError):
        pass
    os._exit(0)


def _send(connection: Connection, work: PriorityQueue[_Work], answers: SimpleQueue[_Said]) -> None:
    """The writing thread of a producer: sends answers, and puts each planned item back into
    ``work``, for the second function."""
    try:
        while True:
            answer, item = answers.get()
            connection.send(answer)
            if item is not None and not answer.failed:
                work.put((True, answer.number, item))
    except OSError:
        os._exit(0)


_GRACE_S = 2.0  # for a producer whose connection was closed to end by itself


class Producer:
    """One process that plans, and the ``numbers`` of the items that it was given and has not
    answered, oldest first; ``heard_s`` is when it last sent something, or was started.
    """

    def __init__(self, functions: bytes) -> None:
        """Start a process that plans, and send it its pickled functions; raises LaunchError where
        no process can be started."""
        ours, theirs = Pipe()
        self.note = TemporaryFile(buffering=0)  # noqa: SIM115 - open as long as the process
        self.connection: Connection[Any, Any] = ours
        self.numbers: deque[int] = deque()
        self.heard_s = time.monotonic()
        self._silent = ""  # why it was killed, if it was
        with theirs:
            try:
                self.process = subprocess.Popen(
                    command(theirs.fileno(), self.note.fileno()),
                    pass_fds=(theirs.fileno(), self.note.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            except OSError as error:
                ours.close()
                self.note.close()
                raise LaunchError("producer of plans", got=error.strerror, wanted="a process")
        with suppress(OSError):  # dead already: noticed while waiting for its answer
            self.connection.send_bytes(functions)

    def end(self) -> None:
        """End the process and wait until it is gone."""
        self.connection.close()
        try:
            self.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.note.close()

    def heard(self) -> None:
        """Note that the process has just sent something."""
        self.heard_s = time.monotonic()

    def stop(self, why: str) -> None:
        """Kill the process, which may be frozen, because of ``why``: :meth:`buried` gives this as
        its end."""
        self._silent = why
        self.process.kill()

    def buried(self) -> tuple[int, str]:
        """Wait for a dying process. Returns the number of the unanswered item that it was planning,
        -1 where there is none, and how it ended, in words."""
        last = noted(self.note.fileno())
        self.end()
        code = self.process.returncode
        if self._silent:
            how = self._silent
        elif code >= 0:
            how = f"left with code {code}"
        else:
            has_name = -code in {named.value for named in signal.Signals}
            how = f"was killed by {signal.Signals(-code).name if has_name else f'signal {-code}'}"
        return last if last in self.numbers else -1, how


Item = TypeVar("Item")
Plan = TypeVar("Plan")
After = TypeVar("After")

_MOST_DEATHS = 3  # producers that die on one batch: then the batch is at fault
_WAITED_S = 0.1  # seconds of waiting for a plan after which one more process is worth its start
_LOOK_S = 1.0  # between two checks for silent producers


class PlanAhead(Generic[Item, Plan, After]):
    """An iterator over ``plan(item)`` of all ``items``, in order, made by ``producers`` processes.

    Each time the caller waits for a plan, other than the first ``depth``, one more process may be
    started, up to ``most``: plans for thousands of devices may take longer than steps do.
    At most ``depth`` items are in work or waiting to be taken; ``items`` is read no further ahead.
    ``after(item)`` is made once the plan is sent and no other item waits: :meth:`made_after`.
    Both functions and the items must be picklable, from a module that can be imported. An error
    of a plan, or of ``items``, is raised at its turn; the plans after it still come. ``tell`` gets
    one line when a producer has died. A batch over which three have died raises LaunchError. A
    producer that is silent for ``silent_s`` seconds of waiting is killed.
    Use it as a context, or :meth:`close` it; no process outlives it.
    """

    def __init__(
        self,
        plan: Callable[[Item], Plan],
        items: Iterable[Item],
        *,
        after: Callable[[Item], After] | None = None,
        producers: int = 1,
        most: int | None = None,
        depth: int = 2,
        tell: Callable[[str], object] | None = None,
        silent_s: float = 30.0,
    ) -> None:
        """Plan ``items`` in up to ``producers`` processes, later up to ``most``, ``depth`` items
        ahead; ``after`` is computed there for each planned item."""
        most = producers if most is None else most
        for name, value in (("producers", producers), ("most", most), ("depth", depth)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SpecError(name, got=repr(value), wanted="a whole number >= 1")
        self._functions = _to_bytes("the function that plans", (plan, after, depth))
        self._items: Iterator[Item] | None = iter(items)
        self._depth, self._tell, self._silent_s = depth, tell, silent_s
        self._turn = 0  # number of the item whose plan is returned next
        self._read = 0  # number of items read from `items`
        self._data: dict[int, bytes] = {}  # pickled items by number, until answered
        self._waiting: deque[int] = deque()  # numbers of items that no producer has
        # by number: (whether it failed, the plan or the error), and the same of the second function
        self._answers: dict[int, tuple[bool, Any]] = {}
        self._afters: dict[int, tuple[bool, Any]] = {}
        self._deaths: dict[int, int] = {}  # by number: producers that died over it
        self._at_once = min(producers, depth)  # producers at once, until plans are waited for
        self._most = min(max(producers, most), depth)  # what that number may grow to
        self._team: list[Producer] = []
        self._finalizer = finalize(self, _disband, self._team)
        self._hand_out()

    def __iter__(self) -> Iterator[Plan]:
        return self

    def __next__(self) -> Plan:
        """The next item's plan, in the order of the items; raises what planning raised."""
        self._hand_out()
        since_s = time.monotonic()
        while self._turn not in self._answers:
            # nothing more was read: the items have come to an end
            if self._turn == self._read:
                self.close()
                raise StopIteration
            self._receive(_LOOK_S)
            self._stop_silent(since_s)
            self._hand_out()
        # Plans of the first items are waited for in any case.
        if self._turn >= self._depth and time.monotonic() - since_s > _WAITED_S:
            self._at_once = min(self._at_once + 1, self._most)
        failed, value = self._answers.pop(self._turn)
        self._turn += 1
        # made_after() is for the plan that is returned now: the one before is late
        self._afters.pop(self._turn - 2, None)
        self._receive(0)
        self._hand_out()
        if failed:
            raise value
        return value

    def extend(self, items: Iterable[Item]) -> None:
        """Plan more items, after all that were given before; also where these had come to an
        end."""
        self._items = iter(items) if self._items is None else chain(self._items, items)
        self._hand_out()

    def made_after(self) -> After | None:
        """The second function's result for the item whose plan was taken last; None where it is not
        there yet. Raises the error of that function."""
        self._receive(0)
        failed, value = self._afters.pop(self._turn - 1, (False, None))
        if failed:
            raise value
        return value

    def __enter__(self) -> PlanAhead[Item, Plan, After]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the processes that produce, finished or not."""
        self.close()

    def close(self) -> None:
        """End all producers; plans that were not taken are lost."""
        self._items = None
        self._waiting.clear()
        self._read = self._turn
        self._answers.clear()
        self._afters.clear()
        self._finalizer()

    def _hand_out(self) -> None:
        """Read items until ``depth`` of them are not taken, and give each to the producer with the
        fewest; a new one is started while all are busy and there may be more."""
        while self._items is not None and self._read < self._turn + self._depth:
            try:
                self._data[self._read] = _to_bytes(f"batch {self._read}", next(self._items))
            except StopIteration:
                self._items = None
                break
            except Exception as error:  # at its turn
                self._answers[self._read] = True, error
            else:
                self._waiting.append(self._read)
            self._read += 1
        while self._waiting:
            enough = len(self._team) >= self._at_once or any(not p.numbers for p in self._team)
            if not enough:
                self._team.append(Producer(self._functions))
            number = self._waiting.popleft()
            producer = min(self._team, key=lambda some: len(some.numbers))
            producer.numbers.append(number)
            with suppress(OSError):  # dead: noticed while waiting for its answer
                producer.connection.send((number, self._data[number]))

    def _receive(self, limit_s: float) -> None:
        """Take the answers that have come; wait for one, or for a death, up to ``limit_s``."""
        ready = wait([some.connection for some in self._team], limit_s)
        for producer in [some for some in self._team if some.connection in ready]:
            try:
                while producer.connection.poll():
                    number, data, failed, after = producer.connection.recv()
                    producer.heard()
                    if number < 0:  # ALIVE
                        continue
                    if after:
                        if number >= self._turn - 1:  # else too late: its batch is trained
                            self._afters[number] = _from_bytes(data, failed)
                        continue
                    producer.numbers.remove(number)
                    del self._data[number]
                    self._deaths.pop(number, None)
                    self._answers[number] = _from_bytes(data, failed)
            except (EOFError, OSError):
                self._replace(producer)

    def _stop_silent(self, since_s: float) -> None:
        """Kill producers that have been silent for too long. Silence is counted from ``since_s`` at
        the earliest, when this process began to wait: it read no answers before."""
        for producer in [some for some in self._team if some.numbers]:
            if time.monotonic() - max(since_s, producer.heard_s) > self._silent_s:
                producer.stop(f"gave no sign of life for {self._silent_s:g} s")

    def _replace(self, producer: Producer) -> None:
        """Take the items of a dead producer back; the next hand-out starts another process."""
        planned, how = producer.buried()
        unanswered = list(producer.numbers)
        self._team.remove(producer)
        message = f"producer of plans (process {producer.process.pid}) {how}"
        if planned in self._data:
            self._deaths[planned] = self._deaths.get(planned, 0) + 1
            message += f" while planning batch {planned}"
        elif unanswered:
            # It never began: whatever is first in line counts, or producers that cannot start
            # would be replaced for ever.
            self._deaths[unanswered[0]] = self._deaths.get(unanswered[0], 0) + 1
        for number in [
            number for number in unanswered if self._deaths.get(number, 0) == _MOST_DEATHS
        ]:
            unanswered.remove(number)
            del self._data[number], self._deaths[number]
            error = LaunchError(
                f"batch {number}",
                got=f"{_MOST_DEATHS} producers dead over it",
                wanted="a plan",
                hint=f"the last {how}",
            )
            self._answers[number] = True, error
            message += ", the third: it is given up"
        self._waiting = deque(sorted([*self._waiting, *unanswered]))
        if self._tell is not None:
            self._tell(message + ("; another takes over" if unanswered else ""))


def _to_bytes(what: str, value: object) -> bytes:
    """The pickled value; raises SpecError, which begins with ``what``, for one that cannot be
    pickled."""
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise SpecError(what, got=f"{type(error).__name__}: {error}", wanted="what can be pickled")


def _from_bytes(data: bytes, failed: bool) -> tuple[bool, Any]:
    """(whether it failed, the value or the error), from an answer's bytes."""
    try:
        return failed, pickle.loads(data)
    except Exception as error:  # at its turn
        return True, error


def _disband(team: list[Producer]) -> None:
    """End the processes of all producers, and empty ``team``."""
    for producer in team:
        producer.connection.close()  # all at once, so that they end at the same time
    for producer in team:
        producer.end()
    team.clear()
