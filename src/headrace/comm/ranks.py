"""One rank from start to end: it joins the world, runs its main function, and leaves in a way
that no other rank hangs."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from headrace.comm.gpus import begin_gpu
from headrace.comm.processes import say, say_traceback
from headrace.comm.rerendezvous import Rerendezvous
from headrace.comm.sockets import hurry
from headrace.comm.status import StatusBoard
from headrace.comm.waiting import Freed
from headrace.comm.watcher import Lifeline, Watcher
from headrace.errors import HeadraceError, LaunchError

__all__ = ["RankPlace", "Settings", "World", "here", "is_broken_connection", "run_rank"]

_NOTICE_S = 1.5  # a broken connection is a consequence: this long for its cause to become known
_BROKEN = ("gloo", "Connection closed by peer", "Connection reset", "Application timeout caused")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The rank's numbers in the job and on its machine, the number of the ``attempt`` (0 for the
    first start, one more after each restart), and the address of the job's store."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    attempt: int
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How ranks run: ``device`` "cpu" or "cuda"; ``threads`` per rank (None: an even share of the
    cores); ``timeout_s`` of collectives; the watcher's ``heartbeat_s`` and ``hang_s``; on devices
    ``deterministic`` kernels only."""

    device: str
    threads: int | None
    timeout_s: float
    heartbeat_s: float
    hang_s: float
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise LaunchError("device", got=repr(self.device), wanted="'cpu' or 'cuda'")
        if self.threads is not None and self.threads < 1:
            raise LaunchError("threads", got=self.threads, wanted="at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A rank's view of its job; torch.distributed is initialised.

    ``attempt`` counts restarts from 0; ``device`` is "cpu" or "cuda:K" and has been made current;
    ``watcher`` publishes each action; ``timeout_s`` is that of collectives.
    ``rerendezvous`` lets ranks whose groups have failed create new ones.
    """

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    attempt: int
    device: str
    watcher: Watcher
    timeout_s: float
    rerendezvous: Rerendezvous


def run_rank(
    main: Callable[[World], int],
    place: RankPlace,
    settings: Settings,
    store: dist.Store,
    *,
    obey: tuple[signal.Signals, ...] = (),
    grace_s: float = 0.0,
    lifeline: Lifeline | None = None,
) -> int:
    """Run ``main`` as one rank and return its exit code, having notified the other ranks of a
    failure.

    ``store`` is a client for the process groups; the watcher gets its own. Signals in ``obey`` end
    the rank with a line that says where it was; a broken ``lifeline`` tells that the rank before
    has ended, where no launcher does. After any code but 0 the caller must end the
    process with ``os._exit``, unless torch.distributed has ended: transfers may be under way that
    nothing can cancel. Ranks that stopped in order within ``grace_s`` give 128 + signal.
    """
    watcher = _watcher(place, settings, lifeline)
    try:
        device = _device(place, settings)
        watcher.start()
        if obey:
            watcher.obey(*obey, grace_s=grace_s)
        code = main(_join(place, settings, store, watcher, device))
    except SystemExit as error:
        code = _code(error)
    except BaseException as error:
        return _report_failure(error, place.rank, watcher)
    if code:
        watcher.fail(f"left with code {code}", code=code)
        return code
    watcher.part()
    dist.destroy_process_group()
    number = watcher.stopped_by() if obey else 0
    watcher.close()
    return 128 + number if number else 0


@contextmanager
def here(place: RankPlace, settings: Settings, store: dist.Store) -> Iterator[World]:
    """A world of one rank, this process, until the context ends."""
    device, watcher = _device(place, settings), _watcher(place, settings)
    watcher.start()
    try:
        yield _join(place, settings, store, watcher, device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        watcher.part()
        watcher.close()


def _watcher(place: RankPlace, settings: Settings, lifeline: Lifeline | None = None) -> Watcher:
    """The watcher of this rank, not started, with a connection of its own to the job's store."""
    own_store = dist.TCPStore(place.host, place.port, is_master=False)
    hurry(place.port)
    return Watcher(
        StatusBoard.of_attempt(own_store, place.attempt),
        rank=place.rank,
        ranks=place.ranks,
        heartbeat_s=settings.heartbeat_s,
        hang_s=settings.hang_s,
        lifeline=lifeline,
    )


def _join(
    place: RankPlace, settings: Settings, store: dist.Store, watcher: Watcher, device: str
) -> World:
    """Meet the other ranks and make the world of this one, with as many threads as its part of the
    machine's cores. Collective."""
    watcher.enter("the start, meeting the other ranks")
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(settings.threads or max(1, cores // place.local_ranks))
    rerendezvous = Rerendezvous(
        # The store outlives a failed attempt, and so would the addresses of dead processes in it.
        store=dist.PrefixStore(f"attempt{place.attempt}/groups", store),
        rank=place.rank,
        ranks=place.ranks,
        timeout_s=settings.timeout_s,
        watcher=watcher,
        store_port=place.port,
        backend="gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
    )
    rerendezvous.meet()
    watcher.leave()
    return World(
        rank=place.rank,
        ranks=place.ranks,
        local_rank=place.local_rank,
        local_ranks=place.local_ranks,
        attempt=place.attempt,
        device=device,
        watcher=watcher,
        timeout_s=settings.timeout_s,
        rerendezvous=rerendezvous,
    )


def _device(place: RankPlace, settings: Settings) -> str:
    """This rank's device, initialized. It is called before the watcher starts: CUDA holds Python's
    lock while it is initialized, longer than a rank may be silent, and a rank counts as silent only
    after its first heartbeat."""
    if settings.device == "cpu":
        return "cpu"
    return begin_gpu(place.local_rank, deterministic=settings.deterministic)


def _code(error: SystemExit) -> int:
    """The exit code of a ``sys.exit``. A text in place of a code is printed on stderr and means 1,
    as in Python."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    sys.stderr.write(f"{error.code}\n")
    return 1


def _report_failure(error: BaseException, rank: int, watcher: Watcher) -> int:
    """Tell all ranks what this one raised and print it, unless another rank failed first; returns
    the exit code."""
    if isinstance(error, HeadraceError):
        watcher.refuse(str(error))
        return 2
    if is_broken_connection(error):
        time.sleep(_NOTICE_S)  # the watcher ends the process when the cause is known
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    # Another rank may have failed before: its failure then counts, and is what is reported.
    death = watcher.fail(f"raised {text}")
    if death.rank == rank:
        say_traceback(rank, error)
    else:
        say(f"rank {rank} stops: {death}; this rank raised {' '.join(text.split())}")
    return 1


def is_broken_connection(error: BaseException) -> bool:
    """Whether an error is a consequence of another rank's end, never the cause itself."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, dist.DistError):  # NCCL's, and the store's
            return True
        if isinstance(cause, Freed):  # from waiting for it
            return True
        if isinstance(cause, RuntimeError) and any(text in str(cause) for text in _BROKEN):
            return True
        cause = cause.__cause__
    return False
