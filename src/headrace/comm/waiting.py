"""Waiting for transfers in a way that a rank can be freed from.

When a connection breaks, gloo raises in a thread that waits for a message that has not begun. If
the message is partly received, it does not: the thread waits for the timeout of its group, and
nothing wakes it (torch 2.13). So where ranks may have to leave their groups they wait in slices,
check between two slices whether they have been freed, and keep references to unfinished transfers:
destroying a group would wait for them.

The host does not wait for a transfer of a device: the device does. The result of one that was
aborted (:mod:`headrace.comm.sockets`) may hold anything, so the host asks by :func:`check` before
it is used.

There is one of these per process, as there is one torch.distributed.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from queue import Empty, SimpleQueue

import torch
import torch.distributed as dist

__all__ = [
    "Freed",
    "Transfer",
    "begin",
    "check",
    "explain",
    "explained",
    "free",
    "freed",
    "heed",
    "leave_behind",
    "under_way",
]

_SLICE_S = 0.25
_EXPLAINED_S = 3.0  # for the cause of a broken connection to become known
_CLOSING_S = 1.0  # after this a transfer of closed connections will not end


class Freed(RuntimeError):
    """Raised in a waiting rank when all ranks are asked to leave their groups."""


class Transfer:
    """A collective or message of ``x`` in flight; :meth:`wait` for it at most once.

    ``here`` where it is the waiting thread that drives the transfer (messages on gloo): a limited
    wait would break it, so another thread waits in its place.
    """

    def __init__(
        self,
        work: dist.Work | None,
        group: dist.ProcessGroup | None,
        x: torch.Tensor,
        *,
        here: bool = False,
    ) -> None:
        """Keep a transfer that was issued, in the list of those that a freed rank has to give
        up."""
        assert work is not None, "issued asynchronously, by a rank of the group"
        self.work, self.group, self.here = work, group, here
        self._of_host = x.device.type == "cpu"
        _state.under_way.add(self)

    def wait(self) -> None:
        """Return when it has ended. Raises Freed, or what broke it: the cause where that becomes
        known (:func:`explain`)."""
        try:
            self._wait()
        except Freed:
            raise
        except RuntimeError as error:
            if (cause := _cause_of_break()) is not None:
                _state.under_way.discard(self)
                raise cause from error
            raise

    def _wait(self) -> None:
        """Wait until the transfer has ended; where waits are sliced, look between two slices
        whether this rank is freed."""
        if not (_state.sliced and self._of_host):
            self.work.wait()
        elif self.here:
            _state.wait_there(self)
        else:
            while not self._ends_in_slice():
                check()
        _state.under_way.discard(self)

    def _ends_in_slice(self) -> bool:
        """Whether it ended within one slice."""
        try:
            self.work.wait(timedelta(seconds=_SLICE_S))
        except RuntimeError:
            if not self.work.is_completed():
                return False
            self.work.wait()  # ended just now, or it was no matter of time: raises what broke it
        return True


class _Helper:
    """A thread that waits in place of another."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[tuple[Transfer, SimpleQueue[BaseException | None]]]
        self._asked = SimpleQueue()
        threading.Thread(target=self._run, name="waiter", daemon=True).start()

    def wait(self, transfer: Transfer, between: Callable[[], None]) -> None:
        """Have the thread wait for a transfer, and call ``between`` every slice of time meanwhile;
        raises what the transfer raised."""
        answer: SimpleQueue[BaseException | None] = SimpleQueue()
        self._asked.put((transfer, answer))
        while True:
            with suppress(Empty):
                error = answer.get(timeout=_SLICE_S)
                break
            between()
        if error is not None:
            raise error

    def _run(self) -> None:
        """The thread: waits for one transfer after the other and answers with None or the error."""
        while True:
            transfer, answer = self._asked.get()
            try:
                transfer.work.wait()
                answer.put(None)
            except BaseException as error:
                answer.put(error)
            del transfer, answer


class _State:
    """How this process waits: one object for all transfers."""

    def __init__(self) -> None:
        """Begin without slices: waits are ordinary until somebody may free this rank."""
        self.sliced = False
        self.under_way: set[Transfer] = set()
        self.others = 0  # what may wait for transfers that are not of headrace
        self.freed = threading.Event()
        self.asked: Callable[[], bool] = self.freed.is_set
        self.cause: Callable[[], Exception | None] | None = None
        self._helper: _Helper | None = None

    def wait_there(self, transfer: Transfer) -> None:
        """Wait for a transfer in the helping thread; one that may hang for ever is left behind when
        this rank is freed."""
        self._helper = self._helper or _Helper()
        try:
            self._helper.wait(transfer, check)
        except Freed:
            self._helper = None  # it may wait for ever
            raise


_state = _State()


def begin() -> None:
    """Wait for transfers of the host in slices from now on. Nobody is freed yet."""
    _state.sliced = True
    _state.freed.clear()
    heed()


def heed(asked: Callable[[], bool] | None = None) -> None:
    """Look at ``asked`` between two slices of waiting whether this rank is to leave what it waits
    for; without it, at whether :func:`free` was called."""
    _state.asked = asked or _state.freed.is_set


def explain(cause: Callable[[], Exception | None]) -> Callable[[], None]:
    """From now on raise what ``cause()`` gives, once it gives something, in ranks that wait in
    slices, and in the place of what a broken connection raises. Returns what ends this."""
    _state.cause = cause

    def forget() -> None:
        if _state.cause is cause:
            _state.cause = None

    return forget


@contextmanager
def explained() -> Iterator[None]:
    """Within it a connection that breaks in a transfer of others (a wrapper's, torch's own) raises
    the cause too, where that becomes known."""
    _state.others += 1
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, Freed) or not _is_broken(error):
            raise
        if (cause := _cause_of_break()) is None:
            raise
        raise cause from error
    finally:
        _state.others -= 1


_BROKEN = ("gloo", "onnection closed by peer", "onnection reset", "Broken pipe")
"""Parts of what is raised where another rank has ended."""


def _is_broken(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or any(words in str(error) for words in _BROKEN)


def under_way() -> bool:
    """Whether a transfer was begun and has not been waited for to its end, or may have been."""
    return bool(_state.under_way) or _state.others > 0


def _cause_of_break() -> Exception | None:
    """Why a connection broke, even if that is only known a moment later."""
    deadline = time.monotonic() + _EXPLAINED_S
    while _state.cause is not None and not freed() and time.monotonic() < deadline:
        if (found := _state.cause()) is not None:
            return found
        time.sleep(0.02)
    return None


def freed() -> bool:
    """Whether this rank has been freed: what it waited for since may hold anything."""
    return _state.asked()


def check() -> None:
    """Raise Freed where this rank has been freed, and the cause where another rank has failed."""
    if _state.cause is not None and (cause := _state.cause()) is not None:
        raise cause
    if freed():
        raise Freed("freed from a transfer, to meet the other ranks anew")


def free() -> None:
    """Free this rank from what it waits for, within a fraction of a second. From any thread."""
    _state.freed.set()


def leave_behind() -> int:
    """Forget all transfers under way, which must have no connection any more. Groups of those that
    never end are never destroyed, not even at the end of the process. Returns how many transfers
    that are."""
    left = {t for t in _state.under_way if not t.here}
    _state.under_way.clear()
    deadline = time.monotonic() + _CLOSING_S
    while left and time.monotonic() < deadline:
        left = {t for t in left if not t.work.is_completed()}
        time.sleep(0.005 if left else 0.0)
    for transfer in left:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(transfer.group or dist.group.WORLD))
    return len(left)
