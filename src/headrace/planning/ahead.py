"""Plans the coming batches in other processes, while the current one trains.

Plans come in the order of the batches and depend on nothing but the batch, so they are the same
whatever the number of producers, and whichever of them dies. A producer is a process of its own
that imports the planning side only; one that dies is replaced, and what it had to plan is planned
again. One that is waited for and gives no sign of life is killed: it may be frozen, or swapped out.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Generic, TypeVar
from weakref import finalize

from headrace.errors import LaunchError, SpecError
from headrace.planning.producer import Producer

__all__ = ["PlanAhead"]

Item = TypeVar("Item")
Plan = TypeVar("Plan")

_MOST_DEATHS = 3  # over one batch: then it is the batch
_LOOK_S = 1.0  # between two looks who has been silent


class PlanAhead(Generic[Item, Plan]):
    """An iterator over ``plan(item)`` of all ``items``, in order, made by ``producers`` processes.

    At most ``depth`` items are in work or waiting to be taken; ``items`` is read no further ahead.
    ``plan`` and the items must be picklable, ``plan`` from a module that can be imported. An error
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
        producers: int = 1,
        depth: int = 2,
        tell: Callable[[str], None] | None = None,
        silent_s: float = 30.0,
    ) -> None:
        for name, value in (("producers", producers), ("depth", depth)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SpecError(name, got=repr(value), wanted="a whole number >= 1")
        self._function = _pickled("the function that plans", plan)
        self._items: Iterator[Item] | None = iter(items)
        self._depth, self._tell, self._silent_s = depth, tell, silent_s
        self._turn, self._read = 0, 0
        self._data: dict[int, bytes] = {}  # of items that are not answered
        self._waiting: deque[int] = deque()  # of them, those that no producer has
        self._answers: dict[int, tuple[bool, Any]] = {}
        self._deaths: dict[int, int] = {}
        self._most = min(producers, depth)
        self._team: list[Producer] = []
        self._finalizer = finalize(self, _disband, self._team)
        self._hand_out()

    def __iter__(self) -> Iterator[Plan]:
        return self

    def __next__(self) -> Plan:
        self._hand_out()
        since_s = time.monotonic()
        while self._turn not in self._answers:
            if self._turn == self._read:
                self.close()
                raise StopIteration
            self._receive(_LOOK_S)
            self._stop_silent(since_s)
            self._hand_out()
        planned, value = self._answers.pop(self._turn)
        self._turn += 1
        self._receive(0)
        self._hand_out()
        if not planned:
            raise value
        return value

    def __enter__(self) -> PlanAhead[Item, Plan]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all producers; plans that were not taken are lost."""
        self._items = None
        self._waiting.clear()
        self._read = self._turn
        self._answers.clear()
        self._finalizer()

    def _hand_out(self) -> None:
        """Read items as far as the depth goes, and give them to whoever has the fewest."""
        while self._items is not None and self._read < self._turn + self._depth:
            try:
                self._data[self._read] = _pickled(f"batch {self._read}", next(self._items))
            except StopIteration:
                self._items = None
                break
            except Exception as error:  # at its turn
                self._answers[self._read] = False, error
            else:
                self._waiting.append(self._read)
            self._read += 1
        while self._waiting:
            free = len(self._team) == self._most or any(not p.numbers for p in self._team)
            if not free:
                self._team.append(Producer(self._function))
            number = self._waiting.popleft()
            producer = min(self._team, key=lambda some: len(some.numbers))
            producer.numbers.append(number)
            with suppress(OSError):  # dead: noticed when its answer is waited for
                producer.connection.send((number, self._data[number]))

    def _receive(self, limit_s: float) -> None:
        """Take the answers that have come; wait for one, or for a death, up to ``limit_s``."""
        ready = wait([some.connection for some in self._team], limit_s)
        for producer in [some for some in self._team if some.connection in ready]:
            try:
                while producer.connection.poll():
                    number, planned, data = producer.connection.recv()
                    producer.heard()
                    if number < 0:
                        continue
                    producer.numbers.remove(number)
                    del self._data[number]
                    self._deaths.pop(number, None)
                    self._answers[number] = _loaded(planned, data)
            except (EOFError, OSError):
                self._replace(producer)

    def _stop_silent(self, since_s: float) -> None:
        """Kill producers that have said nothing for too long, of the time since ``since_s``: before
        nobody listened."""
        for producer in [some for some in self._team if some.numbers]:
            if time.monotonic() - max(since_s, producer.heard_s) > self._silent_s:
                producer.stop(f"gave no sign of life for {self._silent_s:g} s")

    def _replace(self, producer: Producer) -> None:
        """Put what a dead producer had back; the next to hand out starts another."""
        last, how = producer.buried()
        lost = list(producer.numbers)
        self._team.remove(producer)
        text = f"producer of plans (process {producer.process.pid}) {how}"
        if last in self._data:
            self._deaths[last] = self._deaths.get(last, 0) + 1
            text += f" while planning batch {last}"
        elif lost:
            # It never began: whatever is first in line counts, or producers that cannot start
            # would be replaced for ever.
            self._deaths[lost[0]] = self._deaths.get(lost[0], 0) + 1
        for number in [number for number in lost if self._deaths.get(number, 0) == _MOST_DEATHS]:
            lost.remove(number)
            del self._data[number], self._deaths[number]
            error = LaunchError(
                f"batch {number}",
                got=f"{_MOST_DEATHS} producers dead over it",
                wanted="a plan",
                hint=f"the last {how}",
            )
            self._answers[number] = False, error
            text += ", the third: it is given up"
        self._waiting = deque(sorted([*self._waiting, *lost]))
        if self._tell is not None:
            self._tell(text + ("; another takes over" if lost else ""))


def _pickled(what: str, value: object) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise SpecError(what, got=f"{type(error).__name__}: {error}", wanted="what can be pickled")


def _loaded(planned: bool, data: bytes) -> tuple[bool, Any]:
    try:
        return planned, pickle.loads(data)
    except Exception as error:  # at its turn
        return False, error


def _disband(team: list[Producer]) -> None:
    for producer in team:
        producer.connection.close()  # all at once, so that they end at the same time
    for producer in team:
        producer.end()
    team.clear()
