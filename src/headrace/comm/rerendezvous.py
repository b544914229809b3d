"""A second rendezvous of the ranks, when one of them cannot go on with a step.

A rank that fails in the middle of a collective leaves the others waiting in it. It requests a
rendezvous on the status board and cuts its connections; ranks that wait for it get an error, see
the request and join; ranks that wait for another rank, or for a device, are freed by their
watchers. All leave the old world, with transfers that never end, and create a new one under new
keys of the store. A rank that cannot leave in time ends the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from headrace.comm import waiting
from headrace.comm.mesh import Groups
from headrace.comm.sockets import Connections
from headrace.comm.watcher import Watcher

__all__ = ["Rerendezvous"]

_NOTICE_S = 1.5  # a broken connection may be seen first: the request follows within this


_MEET_S = 300.0
"""The most seconds that ranks take to leave a world and to meet in a new one, unless collectives
have fewer: thousands of ranks need a minute."""


class Rerendezvous:
    """The worlds of one rank, one after the other. ``store`` is the attempt's, and listens
    at ``store_port`` of whatever machine."""

    def __init__(
        self,
        *,
        store: dist.Store,
        rank: int,
        ranks: int,
        timeout_s: float,
        watcher: Watcher,
        backend: str,
        store_port: int,
    ) -> None:
        """Keep how to meet: the store of addresses, this rank, and the backend of the groups;
        :meth:`meet` does it."""
        self._store, self._rank, self._ranks = store, rank, ranks
        self._timeout_s, self._watcher, self._backend = timeout_s, watcher, backend
        self._number = 0  # of the world, counted from the start of the attempt
        self.connections = Connections(spared=store_port)

    def meet(self) -> None:
        """Create the world and its default group. Collective."""
        with self.connections.opening():
            dist.init_process_group(
                self._backend,
                store=dist.PrefixStore(f"world{self._number}", self._store),
                rank=self._rank,
                world_size=self._ranks,
                timeout=timedelta(seconds=self._timeout_s),
            )
        assert dist.group.WORLD is not None
        self.connections.keep(dist.group.WORLD)
        # A rank that leaves at once would break the connections of those still making theirs.
        dist.all_reduce(torch.zeros(1))
        waiting.begin()
        self._watcher.free(self._number + 1, self._free)

    def ask(self) -> None:
        """Request a new rendezvous of all ranks."""
        self._watcher.board.ask_again(self._number + 1)

    def asked(self) -> bool:
        """Whether some rank requests a rendezvous, even if the request is only seen a moment
        later."""
        deadline = time.monotonic() + _NOTICE_S
        while not (requested := self._watcher.board.asked_again(self._number + 1)):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return requested

    def meet_anew(self, groups: Groups, drop_attempt: Callable[[], object] = lambda: None) -> None:
        """Leave the old world and create a new one, for ``groups`` too. Collective.
        ``drop_attempt`` is called when no rank waits any more; afterwards nothing may refer to
        transfers of the old world."""
        self._watcher.enter("meeting anew", limit_s=min(_MEET_S, self._timeout_s))
        self._watcher.keep()  # first: the watcher must not cut connections of the new world
        self.connections.cut()
        self.connections.settle()
        waiting.leave_behind()
        drop_attempt()
        groups.forget()
        dist.destroy_process_group()
        self._number += 1
        self.meet()
        groups.renew()
        self._watcher.leave()

    def _free(self) -> None:
        """Free this rank from what it waits for; the watcher's thread calls it."""
        waiting.free()  # first: a thread that returns from an aborted kernel must see it
        self.connections.cut()
