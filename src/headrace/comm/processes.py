"""The launcher's side: starts the processes of ranks, watches them, and leaves none running."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import pickle
import pickletools
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from headrace.comm.status import Death, StatusBoard
from headrace.errors import LaunchError
from headrace.units import seconds_text

__all__ = [
    "bury",
    "caught",
    "end",
    "execute",
    "flush",
    "fork",
    "live",
    "say",
    "say_traceback",
    "stop_text",
    "stopping",
    "supervise",
    "told_first",
]


def say(text: str) -> None:
    """One line ``headrace: text`` on stderr, in one write. Needs no lock: any thread may call."""
    with suppress(OSError):  # stderr may be closed; the exit code still tells
        os.write(2, f"headrace: {text}\n".encode(errors="replace"))


def say_traceback(rank: int, error: BaseException) -> None:
    """The traceback of ``error``, every line marked with its rank, in one write."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    with suppress(OSError):
        os.write(2, "".join(f"rank {rank}| {line}\n" for line in lines).encode(errors="replace"))


def flush(limit_s: float = 0.5) -> None:
    """Write out what Python still buffers, giving up after ``limit_s``: another thread may hold
    the buffer in a write that never ends."""
    thread = threading.Thread(target=_flush, daemon=True)
    thread.start()
    thread.join(limit_s)


def _flush() -> None:
    """Flush stdout and stderr; errors are ignored."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or its reader is gone
            stream.flush()


def end(code: int) -> None:
    """End the process with ``code`` now, from any thread, whatever its other threads wait for."""
    try:
        flush()
    finally:
        os._exit(code)


_POLL_S = 0.02
_GRACE_S = 2.0  # for the other ranks to print their errors
_PR_SET_PDEATHSIG = 1


def stopping() -> tuple[signal.Signals, ...]:
    """The signals by which people, schedulers and terminals end a job (Slurm may warn by SIGUSR1).
    SIGHUP is left out where it is ignored, as nohup has it."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return signals
    return (*signals, signal.SIGHUP)


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


@contextmanager
def told_first(tell: Callable[[signal.Signals], bool]) -> Iterator[None]:
    """Context in which ``tell(signal)`` is called first for a signal that ends a job: where it
    returns True the process goes on, else the signal has its former effect. Does nothing outside of
    the main thread, and for signals that are ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    all_handlers = {number: signal.getsignal(number) for number in stopping()}
    former_handlers = {
        number: handler for number, handler in all_handlers.items() if handler != signal.SIG_IGN
    }

    def handle(number: int, frame: Any) -> None:
        """The handler of all these signals."""
        if tell(signal.Signals(number)):
            return
        handler = former_handlers[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    for number in former_handlers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in former_handlers.items():
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
            gc.freeze()  # else a collection would copy shared pages of all modules
            live(parent, rank, body)
        children[rank] = pid
    return children


def live(parent: int, rank: int, body: Callable[[int], int]) -> None:
    """Run ``body(rank)`` as a child process of ``parent``, then end the process with its code;
    never returns to the caller."""
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGHUP):  # the terminal sends them to all
            signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent:  # else the parent died before prctl, which then does nothing
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
    stop_s: float = 0.0,
) -> int:
    """Wait for all children; returns the exit code of the job.

    The first failure is put on the board, so that the others stop by themselves; those that have
    not after two seconds are killed. A signal in ``heard`` ends them all, a second one at once;
    ranks that can stop in order have ``stop_s`` for it first.
    ``each`` is called in every round, and once more when all have ended.
    """
    running, ranks = dict(children), len(children)
    kill_at, terminated, stop_seen, stop_until = float("inf"), False, False, 0.0
    while running:
        # Deaths after SIGTERM was sent are its consequence; of others the board keeps the first.
        for rank, status in _reap(running):
            if (death := _autopsy(rank, status, board)) and not terminated:
                kill_at = min(kill_at, time.monotonic() + _GRACE_S)
                if board.declare(death) == death:
                    say(str(death))
        if heard and not stop_seen:
            stop_seen = True
            say(f"stopped by {signal.Signals(heard[0]).name}: {board.everyone(ranks)}")
            if stop_s and board.stoppable():
                stop_until = time.monotonic() + stop_s
                board.ask_stop(heard[0], "launcher")
                say(stop_text(stop_s))
        # The time to stop in order is over (it was none where ranks cannot stop so): end them all.
        if stop_seen and not terminated and time.monotonic() > stop_until:
            terminated, kill_at = True, time.monotonic() + _GRACE_S
            if stop_until:
                say(f"not stopped within {seconds_text(stop_s)}: {board.everyone(ranks)}")
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


def stop_text(grace_s: float) -> str:
    """The message to the user when a run that was asked to stop has ``grace_s`` seconds for it."""
    return (
        "the step under way is ended and a checkpoint written, in at most "
        f"{seconds_text(grace_s)}; a second signal ends all at once"
    )


def bury(children: dict[int, int]) -> None:
    """Kill and reap the children that still run."""
    for pid in children.values():
        with suppress(ProcessLookupError, ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _reap(running: dict[int, int]) -> list[tuple[int, int]]:
    """(rank, wait status) of each child that has ended since the last call; takes it out of
    ``running``."""
    ended = []
    for rank, pid in list(running.items()):
        got, status = os.waitpid(pid, os.WNOHANG)  # ours only: the caller may have others
        if got:
            ended.append((rank, status))
            del running[rank]
    return ended


def _signal_all(running: dict[int, int], number: signal.Signals) -> None:
    """Send a signal to all children that still run."""
    for pid in running.values():
        os.kill(pid, number)  # not reaped yet, so the number is still its own


def _autopsy(rank: int, status: int, board: StatusBoard) -> Death | None:
    """The failure of a rank by its wait status; None when it ended well."""
    code = os.waitstatus_to_exitcode(status)
    # a rank that ends well says in its last heartbeat that it has left
    if code == 0:
        beat = board.last(rank)
        if beat and beat.left:
            return None
    if code < 0:
        named = -code < signal.SIGRTMIN
        name = signal.Signals(-code).name if named else f"signal {-code}"
        # the code of a shell: 128 + signal
        how, code = f"was killed by {name}", 128 - code
    else:
        how, code = f"left with code {code}" if code else "left before its end", code or 1
    return Death(rank=rank, how=f"{how} ({board.where(rank)})", code=code)


_RANK = f"""
import sys
sys.path[:] = sys.argv[4:]  # before anything of the working folder is taken for a module
import signal
for number in {int(signal.SIGINT)}, {int(signal.SIGHUP)}:  # the terminal sends them to all of us
    signal.signal(number, signal.SIG_IGN)
from headrace.comm.processes import begin
begin(*map(int, sys.argv[1:4]))
"""


def execute(
    ranks: int, body: Callable[[int], int], inherited: Sequence[int] = ()
) -> dict[int, int]:
    """Start ``ranks`` new processes that each run ``body(rank)`` and end with its code, as
    :func:`headrace.comm.processes.fork` does; they have the open files ``inherited``.

    Raises LaunchError for a ``body`` that cannot be sent: it must be of a module, not a closure.
    """
    data = _to_bytes(body)
    children: dict[int, int] = {}
    try:
        memory = os.memfd_create("ranks")
        try:
            _write(memory, data)
            with _open_in_children((memory, *inherited)):
                for rank in range(ranks):
                    children[rank] = _spawn(memory, rank)
        finally:
            os.close(memory)
    except BaseException as error:
        bury(children)
        if not isinstance(error, OSError):
            raise
        hint = "fewer ranks" if error.errno in (errno.EAGAIN, errno.ENOMEM) else None
        raise LaunchError(f"rank {len(children)}", got=error, wanted="a process", hint=hint)
    return children


def _spawn(memory: int, rank: int) -> int:
    """Start a new Python process for a rank; returns its process id."""
    folders = [os.path.abspath(path) for path in sys.path if isinstance(path, str)]
    words = [*map(str, (memory, rank, os.getpid())), *folders]
    return os.posix_spawn(sys.executable, [sys.executable, "-c", _RANK, *words], dict(os.environ))


def begin(memory: int, rank: int, parent: int) -> None:
    """The main function of a new process: run the sent body as ``rank``, then end."""

    def body(rank: int) -> int:
        """The work of a new process: read the pickled function from the open file ``memory`` and
        run it; returns its exit code."""
        size = os.fstat(memory).st_size
        try:
            work: Callable[[int], int] = pickle.loads(os.pread(memory, size, 0))
        except (ImportError, AttributeError) as error:
            say(f"rank {rank}: the function to run cannot be imported in a new process ({error})")
            return 1
        os.close(memory)
        return work(rank)

    live(parent, rank, body)


def _to_bytes(body: Callable[[int], int]) -> bytes:
    """The function as bytes; raises LaunchError for one that a new process could not import."""
    try:
        data = pickle.dumps(body)
    except Exception as error:  # of any class that is asked for its state
        raise _unsendable(str(error)) from None
    if _names_main(data):
        raise _unsendable("of __main__")
    return data


def _unsendable(why: str) -> LaunchError:
    """The error for a function that cannot be sent to a new process, with the reason ``why``."""
    return LaunchError(
        "main function of ranks",
        got=f"one that cannot be sent to a new process ({why})",
        wanted="a function of an importable module: as CUDA or threads of torch have begun here, "
        "ranks cannot be forked",
        hint="start ranks before they begin, or with torchrun",
    )


def _names_main(data: bytes) -> bool:
    """Whether a pickle refers to the module ``__main__``, which is another one in a new process."""
    return any(value == "__main__" for _, value, _ in pickletools.genops(data))


def _write(file: int, data: bytes) -> None:
    """Write all of ``data``, which may take several calls."""
    while data:
        data = data[os.write(file, data) :]


@contextmanager
def _open_in_children(files: Sequence[int]) -> Iterator[None]:
    """Context in which new processes inherit these open file descriptors."""
    before = [os.get_inheritable(file) for file in files]
    try:
        for file in files:
            os.set_inheritable(file, True)
        yield
    finally:
        for file, inheritable in zip(files, before, strict=True):
            os.set_inheritable(file, inheritable)
