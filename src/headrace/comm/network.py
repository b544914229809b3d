"""Addresses of this machine: which one others reach it by, and through which interface."""

from __future__ import annotations

import socket

import psutil

__all__ = ["interface_of", "route"]


def route(host: str, port: int) -> tuple[str, str]:
    """The addresses at both ends of the way to ``host``: this machine's and that one's. Nothing is
    sent. Raises OSError when there is no way."""
    kind, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0]), str(probe.getpeername()[0])


def interface_of(address: str) -> str | None:
    """The name of the network interface with this address; None when it is not this machine's."""
    for name, found in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in found):
            return name
    return None
