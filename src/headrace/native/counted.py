"""Counting bytes: of live tensors, and on the wire.

On a CPU no allocator tells the peak; so the storages of every operator's results are counted when
they appear and when they are freed. On a CUDA device the allocator's own counters are used instead.
Storages are identified by their addresses, which torch has as ``_cdata``.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ByteCounter", "DeviceBytes", "SavedBytes", "TrafficCounter", "sent_bytes", "tensors_in"]

_PASSING = 3
"""Factor for temporary tensors of a backward, in sizes of the largest saved tensor: its gradient,
the result computed from that, and a copy."""


class ByteCounter(TorchDispatchMode):
    """``with ByteCounter() as counter``: bytes of storages made inside and still alive.

    Each :meth:`look` first waits ``settle_s`` seconds, as gloo's threads free a sent buffer only a
    moment after it has arrived.
    """

    def __init__(self, *, settle_s: float = 0.0) -> None:
        """Start the count at 0 bytes."""
        super().__init__()
        self._settle_s = settle_s
        self.current_bytes = 0
        self.peak_bytes = 0
        # the addresses of storages that were counted and are not freed
        self._alive: set[int] = set()

    def look(self) -> tuple[int, int]:
        """(bytes alive now, the most bytes alive since the last look); starts a new peak."""
        if self._settle_s:
            time.sleep(self._settle_s)
        seen = self.current_bytes, self.peak_bytes
        self.peak_bytes = self.current_bytes
        return seen

    def reset_peak(self) -> None:
        """Start a new peak from what is alive now."""
        self.peak_bytes = self.current_bytes

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Called by torch for every operator: runs it and counts the storages of its results,
        except those of its arguments, as views and results in place have them."""
        known = {x.untyped_storage()._cdata for x in tensors_in(args)}
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            self._count(tensor.untyped_storage(), known)
        return out

    def _count(self, storage: torch.UntypedStorage, known: set[int]) -> None:
        """Add a storage's bytes to the current ones, and take them off when it is freed. Does
        nothing where it was counted before or is one of ``known``, the addresses of the storages of
        the operator's arguments."""
        key = storage._cdata
        if key in self._alive or key in known:
            return
        count = storage.nbytes()  # first: gloo's threads free storages between two calls
        self._alive.add(key)
        self.current_bytes += count
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, count: int) -> None:
        """Take off the ``count`` bytes of a storage that was freed, which had address ``key``."""
        self._alive.discard(key)
        self.current_bytes -= count


class SavedBytes:
    """Counts the bytes that autograd saves for the backward. It takes the place of a
    :class:`ByteCounter` where models are compiled, as a dispatch mode would prevent that. Temporary
    tensors are not seen: they are estimated as ``_PASSING`` times the largest saved one."""

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        """Start at 0 bytes; tensors that share a storage with a ``known`` one, such as a weight,
        will not count."""
        self._known = {x.untyped_storage()._cdata for x in known}
        # bytes of saved storages that are not freed, by their addresses; most bytes of any one
        self._alive: dict[int, int] = {}
        self._largest = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._hooks.__exit__(*exc)

    def look(self) -> tuple[int, int]:
        """(bytes saved now, estimate of the peak since the last look)."""
        kept = sum(self._alive.values())
        return kept, kept + _PASSING * self._largest

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        """The hook for each tensor ``x`` that autograd saves: counts its storage once, until that
        is freed. Returns ``x``, so that autograd saves it as it is."""
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._known and key not in self._alive:
            self._alive[key] = storage.nbytes()
            self._largest = max(self._largest, storage.nbytes())
            weakref.finalize(storage, self._alive.pop, key, None)
        return x


class DeviceBytes:
    """Reads the CUDA allocator's own counters; it takes the place of a :class:`ByteCounter`."""

    def __enter__(self) -> Self:
        torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def look(self) -> tuple[int, int]:
        """(bytes of tensors alive now, the most since the last look); starts a new peak."""
        seen = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return seen


class TrafficCounter(TorchDispatchMode):
    """``with TrafficCounter() as counter``: bytes that collectives inside send to other ranks."""

    def __init__(self) -> None:
        """Start the count at 0 bytes."""
        super().__init__()
        self.sent_bytes = 0

    def take(self) -> int:
        """Return the bytes sent since the last call, and start again from 0."""
        sent, self.sent_bytes = self.sent_bytes, 0
        return sent

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Called by torch for every operator: runs it, and adds the bytes that it sends where it is
        one of the collectives of :func:`sent_bytes`."""
        sent = sent_bytes(func, args)
        if sent is not None:
            self.sent_bytes += sent[0]
        return func(*args, **(kwargs or {}))


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """All tensors in an operator's arguments or results. Lists that begin with a number are skipped
    unread: a collective has two with a number for every rank."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))
    elif isinstance(values, tuple) or (
        isinstance(values, list) and values and not isinstance(values[0], int)
    ):
        for value in values:
            yield from tensors_in(value)


def sent_bytes(
    func: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[int, dist.ProcessGroup] | None:
    """(bytes that leave this rank, the group) where ``func``, called with ``args``, is a collective
    that :mod:`headrace.comm.collectives` calls, an all-to-all or an all-gather; else None."""
    if func is torch.ops.c10d.alltoall_base_.default:
        out, x, boxed, received, sent = args[:5]
        group = dist.ProcessGroup.unbox(boxed)
        # ``sent`` and ``received`` are rows by rank; those for this rank itself do not leave it
        own = sent[group.rank()]
        return (sum(sent) - own) * _row_bytes(x, out, sum(sent), sum(received)), group
    if func is torch.ops.c10d._allgather_base_.default:
        group = dist.ProcessGroup.unbox(args[2])
        return args[1].nbytes * (group.size() - 1), group
    return None


def _row_bytes(x: torch.Tensor, out: torch.Tensor, sent: int, received: int) -> int:
    """Bytes of one row of an all-to-all: from ``x``, whose ``sent`` rows are sent, or from ``out``
    with ``received`` rows where none is sent; 0 where there are no rows."""
    if sent:
        return x.nbytes // sent
    return out.nbytes // received if received else 0
