"""The launcher's side: ranks are forked, watched until they end, and none is left behind."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from headrace.comm.exit import end, say
from headrace.comm.status import Death, StatusBoard
from headrace.errors import LaunchError

__all__ = ["bury", "caught", "fork", "live", "stopping", "supervise"]

_POLL_S = 0.02
_GRACE_S = 2.0  # for the last words of the others
_PR_SET_PDEATHSIG = 1


def stopping() -> tuple[signal.Signals, ...]:
    """What people, schedulers and terminals send to end a job (Slurm may warn by SIGUSR1); without
    SIGHUP where it is ignored, which is what nohup does."""
    found = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return found
    return (*found, signal.SIGHUP)


@contextmanager
def caught(*signals: signal.Signals) -> Iterator[list[int]]:
    """A list to which these signals are appended while the context lasts, instead of their usual
    effect. Handlers are set even where a shell started us with the signal ignored."""
    heard: list[int] = []
    before = {number: signal.getsignal(number) for number in signals}
    for number in signals:
        signal.signal(number, lambda got, _: heard.append(got))
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def fork(ranks: int, body: Callable[[int], int]) -> dict[int, int]:
    """Fork ``ranks`` children that each run ``body(rank)`` and end with its code; returns their
    process ids by rank. Children ignore SIGINT and SIGHUP, and die with this process, however it
    dies."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    children: dict[int, int] = {}
    for rank in range(ranks):
        try:
            pid = os.fork()
        except OSError as error:
            bury(children)
            raise LaunchError(f"rank {rank}", got=error, wanted="a process", hint="fewer ranks")
        if pid == 0:
            gc.freeze()  # a collection would write to, and so copy, every page of what was imported
            live(parent, rank, body)
        children[rank] = pid
    return children


def live(parent: int, rank: int, body: Callable[[int], int]) -> None:
    """The life of a child of ``parent``; never returns into the code that began it."""
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGHUP):  # the terminal sends it to all of us
            signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent:  # else it died before the line above
            code = body(rank)
    except BaseException:
        traceback.print_exc()
    finally:
        end(code)


def supervise(
    children: dict[int, int],
    board: StatusBoard,
    heard: list[int],
    each: Callable[[], None] = lambda: None,
) -> int:
    """Wait for all children; returns the exit code of the job.

    The first failure is put on the board, so that the others stop by themselves; those that have
    not after two seconds are killed. A signal in ``heard`` ends them all, a second one at once.
    ``each`` is called in every round, and once more when all have ended.
    """
    running, ranks = dict(children), len(children)
    kill_at, told = float("inf"), False
    while running:
        for rank, status in _reap(running):
            if (death := _autopsy(rank, status, board)) and not heard:
                kill_at = min(kill_at, time.monotonic() + _GRACE_S)
                if board.declare(death) == death:
                    say(str(death))
        if heard and not told:
            told, kill_at = True, time.monotonic() + _GRACE_S
            say(f"stopped by {signal.Signals(heard[0]).name}: {board.everyone(ranks)}")
            _signal_all(running, signal.SIGTERM)
        if len(heard) > 1 or time.monotonic() > kill_at:
            _signal_all(running, signal.SIGKILL)
        each()
        time.sleep(_POLL_S)
    each()
    if heard:
        return 128 + heard[0]
    death = board.death()
    return death.code if death else 0


def bury(children: dict[int, int]) -> None:
    """Kill and reap whichever of the children are still there."""
    for pid in children.values():
        with suppress(ProcessLookupError, ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _reap(running: dict[int, int]) -> list[tuple[int, int]]:
    """Rank and wait status of the children that have ended since; takes them out."""
    ended = []
    for rank, pid in list(running.items()):
        got, status = os.waitpid(pid, os.WNOHANG)  # ours only: the caller may have others
        if got:
            ended.append((rank, status))
            del running[rank]
    return ended


def _signal_all(running: dict[int, int], number: signal.Signals) -> None:
    for pid in running.values():
        os.kill(pid, number)  # not reaped yet, so the number is still its own


def _autopsy(rank: int, status: int, board: StatusBoard) -> Death | None:
    """How a rank failed; None when it ended well."""
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        beat = board.last(rank)
        if beat and beat.left:
            return None
    if code < 0:
        named = -code < signal.SIGRTMIN
        name = signal.Signals(-code).name if named else f"signal {-code}"
        how, code = f"was killed by {name}", 128 - code
    else:
        how, code = f"left with code {code}" if code else "left before its end", code or 1
    return Death(rank=rank, how=f"{how} ({board.where(rank)})", code=code)
