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

    ``here`` is for messages on gloo, which the waiting thread itself carries out: a wait with a
    time limit would break them, so a helping thread waits for them instead.
    """

    def __init__(
        self,
        work: dist.Work | None,
        group: dist.ProcessGroup | None,
        x: torch.Tensor,
        *,
        here: bool = False,
    ) -> None:
        """Keep the handle ``work`` of an issued transfer of ``x``, and add it to the transfers that
        a freed rank has to leave behind."""
        assert work is not None, "issued asynchronously, by a rank of the group"
        self.work, self.group, self.here = work, group, here
        self._of_host = x.device.type == "cpu"
        _state.under_way.add(self)

    def wait(self) -> None:
        """Return when the transfer has ended. Raises Freed, or the error of a broken connection:
        the failure that caused it, where that becomes known (:func:`explain`)."""
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
        """Wait until the transfer has ended; after :func:`begin` in slices of time, with a look
        after each whether this rank is freed."""
        if not (_state.sliced and self._of_host):
            self.work.wait()
        elif self.here:
            _state.wait_in_helper(self)
        else:
            while not self._ends_in_slice():
                check()
        _state.under_way.discard(self)

    def _ends_in_slice(self) -> bool:
        """Wait for one slice of time; returns whether the transfer ended in it. Raises what broke
        it."""
        try:
            self.work.wait(timedelta(seconds=_SLICE_S))
        except RuntimeError:
            if not self.work.is_completed():
                return False
            self.work.wait()  # ended just now, or failed for another reason than time: raises it
        return True


class _Helper:
    """A thread that waits for transfers in place of another thread, which looks at other things
    meanwhile."""

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
            del transfer, answer  # else they would be kept until the next transfer comes


class _State:
    """How this process waits: one object for all transfers."""

    def __init__(self) -> None:
        """Begin without slices: waits are ordinary until :func:`begin` is called."""
        self.sliced = False
        self.under_way: set[Transfer] = set()
        self.others = 0  # contexts of `explained` that are open: transfers that are not headrace's
        self.freed = threading.Event()
        self.asked: Callable[[], bool] = self.freed.is_set  # whether this rank is to be freed
        self.cause: Callable[[], Exception | None] | None = None  # why another rank failed
        self._helper: _Helper | None = None

    def wait_in_helper(self, transfer: Transfer) -> None:
        """Have the helping thread wait for a transfer. A rank that is freed meanwhile abandons that
        thread, which may wait for ever; the next transfer gets a new one."""
        self._helper = self._helper or _Helper()
        try:
            self._helper.wait(transfer, check)
        except Freed:
            self._helper = None
            raise


_state = _State()


def begin() -> None:
    """Wait for transfers of the host in slices from now on. Nobody is freed yet."""
    _state.sliced = True
    _state.freed.clear()
    heed()


def heed(asked: Callable[[], bool] | None = None) -> None:
    """Have waits look at ``asked()`` between two slices: where it is True, this rank leaves what it
    waits for. Without ``asked`` it does so once :func:`free` was called."""
    _state.asked = asked or _state.freed.is_set


def explain(cause: Callable[[], Exception | None]) -> Callable[[], None]:
    """From now on ``cause()`` is asked for the failure of another rank, None while there is none:
    its error is raised in waits in slices, and in place of the error of a broken connection.
    Returns a function that ends this."""
    _state.cause = cause

    def forget() -> None:
        """Ask no more, unless another cause was set since."""
        if _state.cause is cause:
            _state.cause = None

    return forget


@contextmanager
def explained() -> Iterator[None]:
    """Context around transfers that are not headrace's (a wrapper's, torch's own): where a
    connection breaks in it, the failure that :func:`explain` knows of is raised instead, if there
    is one."""
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
    """Whether an error is of a broken connection."""
    return isinstance(error, dist.DistError) or any(words in str(error) for words in _BROKEN)


def under_way() -> bool:
    """Whether a transfer was begun and has not been waited for to its end, or may have been."""
    return bool(_state.under_way) or _state.others > 0


def _cause_of_break() -> Exception | None:
    """Why a connection broke, waiting a few seconds for it to become known; None where it does not,
    or this rank is freed."""
    deadline = time.monotonic() + _EXPLAINED_S
    while _state.cause is not None and not freed() and time.monotonic() < deadline:
        if (cause := _state.cause()) is not None:
            return cause
        time.sleep(0.02)
    return None


def freed() -> bool:
    """Whether this rank has been freed: then the results of its last transfers are not valid."""
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
    """Forget all transfers under way; their connections must have been closed before. Returns how
    many of them do not end: their groups are never destroyed, as that would wait for them for
    ever."""
    unfinished = {t for t in _state.under_way if not t.here}
    _state.under_way.clear()
    deadline = time.monotonic() + _CLOSING_S
    while unfinished and time.monotonic() < deadline:
        unfinished = {t for t in unfinished if not t.work.is_completed()}
        time.sleep(0.005 if unfinished else 0.0)
    for transfer in unfinished:
        # a reference too many keeps the group alive to the end of the process
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(transfer.group or dist.group.WORLD))
    return len(unfinished)
