"""Starting ranks: by ``start`` on this machine, or by ``join`` as one rank of a torchrun job.

Both give every rank the same :class:`World`. ``start`` forks after one import of torch, so ranks
are ready a tenth of a second later, or starts new processes where it cannot fork; the launcher
hosts the store, so it outlives every rank and can report which one died.
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from headrace.comm.gpus import VARIABLES, forks_fail
from headrace.comm.meeting import JoinRequest, interface_of, join_attempt, reach_store, route
from headrace.comm.processes import bury, caught, end, execute, fork, stopping, supervise
from headrace.comm.ranks import RankPlace, Settings, World, here, run_rank
from headrace.comm.status import StatusBoard
from headrace.comm.variables import number, under_torchrun, variable
from headrace.comm.watcher import Lifeline
from headrace.errors import LaunchError

__all__ = [
    "World",
    "join",
    "lone_rank",
    "start",
]

_LOCALHOST = "127.0.0.1"
_used_threads = threading.Event()  # set once a lone rank has computed on several threads here


def start(
    main: Callable[[World], int],
    *,
    ranks: int,
    device: str = "cpu",
    threads: int | None = None,
    timeout_s: float = 1800,
    heartbeat_s: float = 0.2,
    hang_s: float = 30.0,
    deterministic: bool = False,
    port: int = 0,
    each: Callable[[], None] = lambda: None,
    inherited: Sequence[int] = (),
    forked: bool | None = None,
    stop_s: float = 0.0,
) -> int:
    """Run ``main`` on ``ranks`` ranks of this machine and return the job's exit code.

    The code is 0 when every rank returned 0; 130 on Ctrl-C, 143 on SIGTERM, 129 on SIGHUP (but for
    nohup), 138 on SIGUSR1; 2 for an error of headrace, a HeadraceError (its text is printed once);
    128 + signal for a rank that was killed; 75 for one that hung; else the code of the first rank
    that failed. Who died, and in what action, is on stderr.

    ``threads`` are those of each rank (None: an even share of the cores), ``timeout_s`` is that of
    collectives, ``heartbeat_s`` the time between two signs of life of a rank. A rank without one
    for ``hang_s`` counts as dead, so ``main`` must not hold Python's lock that long. With
    ``deterministic`` the result has the same bits each time, on devices too. ``port`` is the
    store's, 0 for any free one. ``stop_s`` is the time that ranks have after a first signal to stop
    in order, where they are :meth:`~headrace.comm.watcher.Watcher.stoppable`; a second signal ends
    them at once. ``each`` is called here time and again while the ranks run, and once more when
    they have ended; what it raises ends them.

    Ranks are forked, or are new processes where this one has begun CUDA, has used autograd where
    there are devices, or was a rank that computed on several threads, none of which survives a
    fork; ``forked`` is that choice, made here where None. New processes get ``main`` pickled: it
    must be a value of a module, no closure, and of open files it can use only those ``inherited``.
    Call it from the main thread. Raises LaunchError when ranks cannot be started.
    """
    settings = Settings(
        device=device,
        threads=threads,
        timeout_s=timeout_s,
        heartbeat_s=heartbeat_s,
        hang_s=hang_s,
        deterministic=deterministic,
    )
    _check(ranks)
    if forked is None:
        # Where torch has computed on several threads here, a fork that does so again would wait for
        # threads that it does not have.
        many_threads = (threads or len(os.sched_getaffinity(0)) // ranks) > 1
        forked = not ((_used_threads.is_set() and many_threads) or forks_fail())
    # torch's optimizers import it when they are first made: once here, not on every rank.
    importlib.import_module("torch._dynamo")
    gc.collect()  # ranks would join the threads of a leftover store, and abort
    children: dict[int, int] = {}
    with _listen(port) as listener, caught(*stopping()) as signals_heard:
        rank_main = _RankMain(
            main=main,
            ranks=ranks,
            port=listener.getsockname()[1],
            settings=settings,
            precision=torch.get_float32_matmul_precision(),
        )

        def in_child(rank: int) -> int:
            """Run a forked rank, which has no use for the launcher's listening socket."""
            listener.close()
            return rank_main(rank)

        try:
            children = fork(ranks, in_child) if forked else execute(ranks, rank_main, inherited)
            # After the fork, as the store's threads would not survive it.
            store = _serve(listener, rank_main.port)
            board = StatusBoard.of_attempt(store, 0)
            return supervise(children, board, signals_heard, each, stop_s)
        finally:
            bury(children)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankMain:
    """The main function of a rank process, which may be pickled: it sets up torch, connects to the
    store and runs ``main``."""

    main: Callable[[World], int]
    ranks: int
    port: int
    settings: Settings
    precision: str

    def __call__(self, rank: int) -> int:
        """Run this rank in its new process, with the launcher's precision of products and its store
        on this machine."""
        torch.set_float32_matmul_precision(self.precision)  # as in the starting process
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever networks come and go
        place = RankPlace(
            rank=rank,
            ranks=self.ranks,
            local_rank=rank,
            local_ranks=self.ranks,
            attempt=0,
            host=_LOCALHOST,
            port=self.port,
        )
        client = dist.TCPStore(_LOCALHOST, self.port, is_master=False)
        return run_rank(self.main, place, self.settings, client)


@contextmanager
def lone_rank(
    *,
    device: str = "cpu",
    threads: int | None = None,
    timeout_s: float = 1800,
    deterministic: bool = False,
) -> Iterator[World]:
    """The only rank of a job, in this process: torch.distributed is initialised within the context
    and as before after it. Errors are the caller's to handle.

    The rest is as for :func:`start`. Raises LaunchError where
    torch.distributed is initialised already.
    """
    if dist.is_initialized():
        raise LaunchError(
            "a rank in this process",
            got="torch.distributed initialised",
            wanted="a process that is no rank yet",
            hint="dist.destroy_process_group() ends it",
        )
    settings = Settings(
        device=device,
        threads=threads,
        timeout_s=timeout_s,
        heartbeat_s=0.2,
        hang_s=float("inf"),
        deterministic=deterministic,
    )
    former_threads = torch.get_num_threads()
    former_variables = {name: os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", *VARIABLES)}
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    os.environ["GLOO_SOCKET_IFNAME"] = former_variables["GLOO_SOCKET_IFNAME"] or "lo"
    store = dist.TCPStore(_LOCALHOST, 0, is_master=True, wait_for_workers=False)
    place = RankPlace(
        rank=0, ranks=1, local_rank=0, local_ranks=1, attempt=0, host=_LOCALHOST, port=store.port
    )
    try:
        with here(place, settings, store) as world:
            yield world
    finally:
        if torch.get_num_threads() > 1:
            _used_threads.set()
        torch.set_num_threads(former_threads)
        torch.use_deterministic_algorithms(was_deterministic, warn_only=warned_only)
        for name, value in former_variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _check(ranks: int) -> None:
    """Raise LaunchError for fewer ranks than one, and for a call outside of the main thread, where
    signals cannot be handled."""
    if ranks < 1:
        raise LaunchError("ranks", got=ranks, wanted="at least 1")
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError("start", got="another thread", wanted="a call from the main thread")


def _listen(port: int) -> socket.socket:
    """A listening socket on this machine's own address, port 0 for any free one; raises LaunchError
    for a port in use."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((_LOCALHOST, port))
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        listener.close()
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        got = "in use" if in_use else error
        raise LaunchError(f"port {port}", got=got, wanted="free", hint="0 takes any free port")
    return listener


def _serve(listener: socket.socket, port: int) -> dist.TCPStore:
    """The store of the job on a socket that listens already."""
    return dist.TCPStore(
        _LOCALHOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def join_world(device: str) -> None:
    """Begin torch.distributed unless it was begun: in the world of torchrun, or alone."""
    if dist.is_initialized():
        return
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    if under_torchrun():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def join(
    main: Callable[[World], int],
    *,
    device: str = "cpu",
    threads: int | None = None,
    timeout_s: float = 1800,
    heartbeat_s: float = 0.2,
    hang_s: float = 30.0,
    deterministic: bool = False,
    connect_s: float = 120.0,
    stop_s: float = 0.0,
) -> int:
    """Run ``main`` as the rank that the environment describes, as set by torchrun; returns 0, or
    128 and the signal's number where ranks stopped in order, within ``stop_s`` as for
    :func:`start`.

    When ``main`` fails, the other ranks are notified, and the process ends itself with the code
    that :func:`start` would return for this rank. Signals end it too, as with :func:`start`, with a
    line that says where it was: torchrun sends them when another rank has died. All ranks meet in
    the store first, so that a restart on any machine is a new attempt for all.

    ``connect_s`` is the time to reach the store; the rest is as for :func:`start`. gloo talks
    through the interface on the way to the store, unless GLOO_SOCKET_IFNAME names another. Raises
    LaunchError when the variables are missing or malformed, or the store or other ranks cannot be
    reached.
    """
    settings = Settings(
        device=device,
        threads=threads,
        timeout_s=timeout_s,
        heartbeat_s=heartbeat_s,
        hang_s=hang_s,
        deterministic=deterministic,
    )
    place = _place()
    # Where no agent keeps the store (launchers other than torchrun), rank 0 does.
    serve = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = reach_store(place.host, place.port, serve=serve, limit_s=connect_s)
    lifeline = Lifeline()
    place = _meet(place, store, lifeline, limit_s=timeout_s)
    code = run_rank(
        main, place, settings, store, obey=stopping(), grace_s=stop_s, lifeline=lifeline
    )
    # Ranks that a signal stopped in order (code 128 + signal) have ended torch.distributed and may
    # return; after other failures transfers may be under way that nothing can cancel.
    if code and not (code > 128 and not dist.is_initialized()):
        end(code)
    return code


def _meet(place: RankPlace, store: dist.Store, lifeline: Lifeline, *, limit_s: float) -> RankPlace:
    """Run the rendezvous with the other ranks; returns ``place`` with the number of the attempt."""
    own_address, store_address = route(place.host, place.port)
    joined = join_attempt(
        store,
        JoinRequest(address=own_address, store=store_address, port=lifeline.port),
        rank=place.rank,
        ranks=place.ranks,
        limit_s=limit_s,
    )
    if place.ranks > 1:
        lifeline.hold(joined.before)
    if not os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ["GLOO_SOCKET_IFNAME"] = _interface(joined.address)
    return replace(place, attempt=joined.attempt)


def _interface(address: str) -> str:
    """The name of the network interface with this address, for gloo; raises LaunchError where there
    is none."""
    name = interface_of(address)
    if name is None:
        raise LaunchError(
            f"address {address} of this machine",
            got="no network interface with it",
            wanted="one",
            hint="set GLOO_SOCKET_IFNAME to the interface that leads to the others",
        )
    return name


def _place() -> RankPlace:
    """This rank's place in the job from torchrun's environment variables; raises LaunchError where
    they do not fit."""
    ranks = number("WORLD_SIZE")
    place = RankPlace(
        rank=number("RANK"),
        ranks=ranks,
        local_rank=number("LOCAL_RANK"),
        local_ranks=number("LOCAL_WORLD_SIZE", ranks),
        attempt=0,  # the ranks agree on it: torchrun's count is that of one node
        host=variable("MASTER_ADDR"),
        port=number("MASTER_PORT"),
    )
    if not place.rank < ranks:
        raise LaunchError("RANK", got=place.rank, wanted=f"less than WORLD_SIZE = {ranks}")
    return place
