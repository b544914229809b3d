"""Groups on CPUs whose transfers end as those of NCCL do when they are aborted.

What a device would do is done by threads over gloo. A transfer never fails: it ends when all have
come, or when its own group is aborted, and then as if all were well, with anything in its results.
Nobody is told that another has aborted his. An aborted group takes no more transfers. Connections
of a device's transfers are made when a group is first used, and only :meth:`Kernels.abort` knows
them; those of the host (:data:`references.device_runs.HOST`) are gloo's, made with the group.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from headrace.comm.sockets import Connections
from headrace.comm.waiting import Transfer
from references.device_runs import of_the_host

__all__ = ["Kernels", "register"]

_LEFT: list[Any] = []  # to destroy a group of gloo is to wait for all that is under way in it
_POSTS = {"all_gather_single": "_allgather_base", "all_to_all_single": "alltoall_base"} | {
    name: name
    for name in (
        "_allgather_base",
        "allreduce",
        "alltoall_base",
        "broadcast",
        "gather",
        "recv",
        "send",
    )
}
"""Methods of groups of any torch, and gloo's."""


def register() -> None:
    """Make ``kernels`` a backend of torch.distributed in this process, and what it transfers that
    of a device."""
    dist.Backend.register_backend("kernels", Kernels, devices=["cpu"])
    begin = Transfer.__init__

    def made(transfer: Transfer, work: Any, *args: Any, **named: Any) -> None:
        begin(transfer, work, *args, **named)
        transfer._of_host = not isinstance(work, Kernel)

    Transfer.__init__ = made  # type: ignore[method-assign]


class Kernels(dist.ProcessGroup):
    """One group."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._made = store, rank, size, timeout
        self._host = dist.ProcessGroupGloo(dist.PrefixStore("host", store), rank, size, timeout)
        self._device: dist.ProcessGroupGloo | None = None
        self._connections = Connections()
        self.aborted = threading.Event()

    def getBackendName(self) -> str:
        return "kernels"

    def _get_backend(self, device: torch.device) -> Any:
        return self._host

    def abort(self) -> None:
        self.aborted.set()
        _LEFT.append(self._device)
        self._connections.cut()

    def shutdown(self) -> None:
        _LEFT.append(self._host)

    def _post(self, name: str, args: tuple[Any, ...]) -> Any:
        if of_the_host():
            return getattr(self._host, name)(*args)
        if self.aborted.is_set():
            raise dist.DistBackendError("the communicator was aborted")
        if self._device is None:
            store, *rest = self._made
            with self._connections.opening():
                self._device = dist.ProcessGroupGloo(dist.PrefixStore("device", store), *rest)
        return Kernel(self, getattr(self._device, name)(*args), _results(name, args))


def _posting(name: str) -> Any:
    return lambda self, *args: self._post(name, args)


for _name, _of_gloo in _POSTS.items():
    setattr(Kernels, _name, _posting(_of_gloo))


def _results(name: str, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors that an operation writes."""
    if name == "send":
        return []
    first = args[0]
    return [first] if isinstance(first, torch.Tensor) else list(first)


class Kernel(dist.Work):
    """A transfer that a device waits for: the host's wait, too, since it computes here."""

    def __init__(self, group: Kernels, work: dist.Work, results: list[torch.Tensor]) -> None:
        super().__init__()
        self._group, self._results = group, results
        self._ended = threading.Event()
        self._work = work
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._work.wait()
        except RuntimeError:  # another has aborted his
            return
        self._ended.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        while not self._ended.wait(0.002):
            if self._group.aborted.is_set():
                for x in self._results:
                    x.copy_(torch.randn(x.shape) * 1e3)
                return True
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set() or self._group.aborted.is_set()
