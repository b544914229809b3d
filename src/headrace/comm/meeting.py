"""The rendezvous of ranks on several machines, through the job's store: the ranks agree on the
number of the attempt and learn each other's addresses.

An agent (torchrun's) counts the restarts of its own node only, so ranks of one attempt may be given
different counts, and the store still holds the keys of a dead attempt. So each start of a rank
registers with a new random token. When all ranks have registered, the first rank invites them under
a new attempt number; a rank that finds its own token invited answers, and the attempt begins when
all have answered. A rank that died meanwhile never answers; when it has been restarted and has
registered again, all are invited again::

    here/{rank}      registration of a rank: token and addresses
    attempts         number of invitations so far; the last one has this number less one
    call/{rank}      invitation of a rank: token, number of the attempt, addresses
    answers/{n}      ranks that answered invitation n
    begun/{n}        set when all ranks have answered
    old              tokens of the last attempt that began: the next attempt ignores them
"""

from __future__ import annotations

import ipaddress
import json
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

from headrace.errors import LaunchError
from headrace.units import seconds_text

__all__ = [
    "JoinRequest",
    "JoinedAttempt",
    "interface_of",
    "reach_store",
    "route",
    "join_attempt",
]

_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """The registration of a rank: its own ``address`` on the route to the store, the address of the
    ``store`` as this rank sees it, and the ``port`` at which the next rank watches it."""

    address: str
    store: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedAttempt:
    """The result of the rendezvous for one rank: the number of the ``attempt``, its own ``address``
    as other machines reach it, and the address and port of the rank ``before`` it."""

    attempt: int
    address: str
    before: tuple[str, int]


def join_attempt(
    store: dist.Store, request: JoinRequest, *, rank: int, ranks: int, limit_s: float
) -> JoinedAttempt:
    """Register this rank, and return when all ranks have joined the same attempt. Collective; ranks
    may be restarted meanwhile.

    Raises LaunchError when some rank has not come within ``limit_s``.
    """
    token, deadline = secrets.token_hex(8), time.monotonic() + limit_s
    store = dist.PrefixStore("meeting", store)
    inviter = _Inviter(store, ranks) if rank == 0 else None
    registration = [token, request.address, request.store, request.port]
    store.set(f"here/{rank}", json.dumps(registration))
    joined: JoinedAttempt | None = None
    while True:
        if inviter is not None:
            inviter.invite_if_new()
        invitation = _invitation(store, rank, token)
        if invitation is not None and invitation != joined:
            joined = invitation
            store.add(f"answers/{joined.attempt}", 1)
        if joined is not None and store.check([f"begun/{joined.attempt}"]):
            return joined
        if time.monotonic() > deadline:
            raise LaunchError(
                "ranks of the job",
                got=_missing(store, ranks),
                wanted=f"all {ranks} within {seconds_text(limit_s)}",
                hint="see what the other machines say",
            )
        time.sleep(_POLL_S)


class _Inviter:
    """The first rank's part of the rendezvous: it invites all ranks once they have registered, and
    again after restarts."""

    def __init__(self, store: dist.Store, ranks: int) -> None:
        self._store, self._ranks = store, ranks
        # Tokens of the last attempt that began: its ranks have to register anew.
        self._begun_tokens = set(json.loads(store.get("old"))) if store.check(["old"]) else set()
        self._invited: list[list[Any]] = []  # registrations that the last invitations were for
        self._attempt = 0

    def invite_if_new(self) -> None:
        """Invite all ranks if their registrations are new, and begin the attempt when all have
        answered."""
        registrations = self._registrations()
        if registrations and registrations != self._invited:
            self._invited = registrations
            self._attempt = self._store.add("attempts", 1) - 1  # numbered from 0
            self._invite()
        # Adding 0 reads the counter.
        if self._invited and self._store.add(f"answers/{self._attempt}", 0) == self._ranks:
            self._store.set(f"begun/{self._attempt}", "1")
            self._store.set("old", json.dumps([token for token, *_ in self._invited]))

    def _registrations(self) -> list[list[Any]]:
        """The registrations [token, address, store, port] of all ranks for a new attempt; empty
        while a rank is missing or has only registered for the last one."""
        keys = [f"here/{rank}" for rank in range(self._ranks)]
        if not self._store.check(keys):
            return []
        registrations = [json.loads(value) for value in self._store.multi_get(keys)]
        is_old = any(token in self._begun_tokens for token, *_ in registrations)
        return [] if is_old else registrations

    def _invite(self) -> None:
        """Write for each rank which attempt begins, its own address and the address and port of the
        rank before it."""
        # A machine may see only 127.0.0.1 as its own address; others know the store's machine.
        store_addresses = [store for _, _, store, _ in self._invited if not _is_loopback(store)]
        addresses = [
            store_addresses[0] if store_addresses and _is_loopback(address) else address
            for _, address, _, _ in self._invited
        ]
        ports = [port for *_, port in self._invited]
        for rank, (token, *_) in enumerate(self._invited):
            before = [addresses[rank - 1], ports[rank - 1]]
            invitation = [token, self._attempt, addresses[rank], before]
            self._store.set(f"call/{rank}", json.dumps(invitation))


def _invitation(store: dist.Store, rank: int, token: str) -> JoinedAttempt | None:
    """The invitation of this rank; None while there is none for its ``token``."""
    if not store.check([f"call/{rank}"]):
        return None
    invited_token, attempt, address, (host, port) = json.loads(store.get(f"call/{rank}"))
    return (
        JoinedAttempt(attempt=attempt, address=address, before=(host, port))
        if invited_token == token
        else None
    )


def _missing(store: dist.Store, ranks: int) -> str:
    """Words for the error: which ranks have not registered."""
    missing = [str(rank) for rank in range(ranks) if not store.check([f"here/{rank}"])]
    shown = ", ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")
    return f"no rank {shown}" if missing else "ranks that have not come again after a restart"


def _is_loopback(address: str) -> bool:
    """Whether an address is reached from its own machine only; an IPv6 zone (``%eth0``) is
    ignored."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def reach_store(host: str, port: int, *, serve: bool, limit_s: float) -> dist.TCPStore:
    """A client of the store at ``host:port``, which this process hosts itself if ``serve``.

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
    """Wait until something listens at ``host:port``; raises LaunchError after ``deadline``.
    Otherwise torch's own client would print pages of errors while nothing does."""
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
    """A client of the store; None where no store answers within the limit. It is made in a thread,
    as its constructor waits for ever for a server that is no store."""
    made: list[dist.TCPStore] = []

    def make() -> None:
        """Connect to the store, and hand over the client."""
        with suppress(RuntimeError):  # a server of another protocol answered
            made.append(
                dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=limit_s))
            )

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(limit_s)
    return made[0] if made else None


def route(host: str, port: int) -> tuple[str, str]:
    """The addresses at both ends of the network route to ``host``: (this machine's, the host's).
    Nothing is sent. Raises OSError when there is no route."""
    kind, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0]), str(probe.getpeername()[0])


def interface_of(address: str) -> str | None:
    """The name of the network interface with this address; None when it is not this machine's."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None
