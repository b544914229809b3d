"""The store of a job: reaching it at a given address, or saying plainly why it cannot be."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from headrace.errors import LaunchError

__all__ = ["reach_store"]


def reach_store(host: str, port: int, *, serve: bool, limit_s: float) -> dist.TCPStore:
    """A client of the store at ``host:port``, which this process keeps itself if ``serve``.

    Raises LaunchError when the port is taken, or when no store answers within ``limit_s``.
    """
    where = f"store of the job at {host}:{port}"
    if serve:
        try:
            return dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
        except (RuntimeError, ValueError) as error:
            got = "the port in use" if "EADDRINUSE" in str(error) else str(error).splitlines()[0]
            raise LaunchError(where, got=got, wanted="a free port", hint="set MASTER_PORT")
    deadline = time.monotonic() + limit_s
    _knock(host, port, where, deadline)
    store = _enter(host, port, limit_s=max(0.1, deadline - time.monotonic()))
    if store is None:
        raise LaunchError(
            where,
            got="no answer, or none of a store",
            wanted="the store that torchrun keeps",
            hint="another program may listen on MASTER_PORT: set a free one",
        )
    return store


def _knock(host: str, port: int, where: str, deadline: float) -> None:
    """Return once somebody listens: torch's own attempt prints pages when nobody does."""
    while True:
        try:
            socket.create_connection((host, port), timeout=1).close()
            return
        except (OSError, OverflowError) as error:
            if isinstance(error, OverflowError) or time.monotonic() > deadline:
                raise LaunchError(
                    where,
                    got=error,
                    wanted="a connection",
                    hint="MASTER_ADDR and MASTER_PORT must be those of the first machine",
                )
        time.sleep(0.1)


def _enter(host: str, port: int, limit_s: float) -> dist.TCPStore | None:
    """A client, made in a thread: its constructor waits forever for whoever listens there but is
    no store."""
    made: list[dist.TCPStore] = []

    def make() -> None:
        with suppress(RuntimeError):  # somebody answered, in another language
            made.append(
                dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=limit_s))
            )

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(limit_s)
    return made[0] if made else None
