"""What a side of a comparison costs: bytes it keeps, needs in passing and sends; seconds.

The counters see through torch's tensor subclasses (DTensor and results that still travel), and a
collective they cannot count is an error, not a zero.
"""

# ruff: noqa: SLF001  a storage is known by its address

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from headrace.comm.collectives import gather_floats
from headrace.native.counted import ByteCounter, TrafficCounter

__all__ = ["Costs", "Counted", "Side", "Storages", "Traffic", "seconds", "settled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One way to run some layers on these ranks.

    ``places`` [t] are the tokens of the sequence that this rank holds; ``forward`` maps their x
    [t, h] to [t, h]; ``gradients`` gives what this rank adds to each whole gradient; they are zero
    at first, and ``clear`` forgets them. ``on`` holds what must be switched on while forward and
    backward run. An ``alone`` side runs on the first rank only.
    """

    name: str
    kind: str
    held: str
    by_torch: bool
    alone: bool
    places: torch.Tensor
    forward: Callable[[torch.Tensor], torch.Tensor]
    gradients: Callable[[], dict[str, torch.Tensor]]
    clear: Callable[[], None]
    on: Callable[[], AbstractContextManager[None]]

    @property
    def runs_here(self) -> bool:
        """Whether this rank takes part."""
        return not self.alone or dist.get_rank() == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Of one forward and backward, the most of any rank."""

    sent_bytes: float
    kept_bytes: float
    peak_bytes: float


@contextmanager
def settled() -> Iterator[None]:
    """Garbage is collected when :func:`seconds` says so, and what is there already never."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


@dataclass(slots=True, kw_only=True)
class Counted:
    """Counters around the first forward and backward of a side (what it fills and empties later
    is made there), and what was kept between the two."""

    wire: Traffic
    memory: Storages
    kept_bytes: int = 0

    def forward_done(self) -> None:
        """Note what is kept."""
        time.sleep(0.05)  # gloo's threads let go of what they have sent
        self.kept_bytes = self.memory.current_bytes

    def costs(self) -> Costs:
        """The most of any rank. Collective."""
        here = [self.wire.sent_bytes, self.kept_bytes, self.memory.peak_bytes]
        rows = gather_floats([float(count) for count in here], dist.group.WORLD)
        sent, kept, peak = (max(row[i] for row in rows) for i in range(3))
        return Costs(sent_bytes=sent, kept_bytes=kept, peak_bytes=peak)


def seconds(side: Side, x: torch.Tensor, dy: torch.Tensor) -> tuple[float, float]:
    """(wall seconds of the slowest rank, CPU seconds of a rank on average) of one forward and
    backward. Garbage is collected around it and not within."""
    here = [0.0, 0.0]
    leaf, grad = x[side.places], dy[side.places]
    side.clear()
    gc.collect()
    dist.barrier()
    if side.runs_here:
        with side.on():
            leaf.requires_grad_()
            wall, cpu = time.perf_counter(), time.process_time()
            side.forward(leaf).backward(grad)
            here = [time.perf_counter() - wall, time.process_time() - cpu]
    rows = gather_floats(here, dist.group.WORLD)
    ranks = 1 if side.alone else len(rows)
    return max(row[0] for row in rows), sum(row[1] for row in rows) / ranks


def _is_wrapped(types: Any) -> bool:
    """Whether an operator is still to be taken apart by a tensor subclass."""
    return any(issubclass(t, (DTensor, AsyncCollectiveTensor)) for t in types)


class Storages(ByteCounter):
    """Bytes of storages made inside and alive, at the size they have now: FSDP2 empties its
    storages and fills them again."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._storages: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_wrapped(types):
            return NotImplemented
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for key, found in list(self._storages.items()):
            storage = found()
            if storage is not None:
                self._set(key, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        return out

    def _count(self, storage: torch.UntypedStorage, known: set[int]) -> None:
        if storage.device.type == "meta":  # DTensor tries shapes out
            return
        if storage._cdata not in self._sizes and storage._cdata not in known:
            self._watch(storage)

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        self._storages[key], self._sizes[key] = weakref.ref(storage), 0
        self._set(key, storage.nbytes())
        weakref.finalize(storage, self._freed, key, 0)

    def _set(self, key: int, size: int) -> None:
        before = self._sizes.get(key)
        if before is not None:
            self._sizes[key] = size
            self.current_bytes += size - before

    def _freed(self, key: int, count: int) -> None:
        self.current_bytes -= self._sizes.pop(key, 0)
        self._storages.pop(key, None)


_SILENT = {"wait_tensor", "_wrap_tensor_autograd", "barrier", "recv_"}


class Traffic(TrafficCounter):
    """Bytes sent by any collective of torch.distributed, functional or not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_wrapped(types):
            return NotImplemented
        before = self.sent_bytes
        out = super().__torch_dispatch__(func, types, args, kwargs)
        place, _, name = str(getattr(func, "_overloadpacket", "")).rpartition(".")
        if place in ("c10d", "_c10d_functional") and name not in _SILENT:
            if name in ("alltoall_base_", "_allgather_base_"):
                return out  # counted by the parent
            assert self.sent_bytes == before
            self.sent_bytes += _SENT[f"{place}.{name}"](*args, **(kwargs or {}))
        return out


def _ranks(group: Any) -> int:
    return int(dist.ProcessGroup.unbox(group).size())


def _exchanged(x: torch.Tensor, receive: Any, send: Any, name: Any) -> int:
    group = dist.distributed_c10d._resolve_process_group(name)
    return x.nbytes // max(1, sum(send)) * (sum(send) - send[group.rank()])


_SENT: dict[str, Callable[..., int]] = {
    "c10d._reduce_scatter_base_": lambda out, x, group, *rest: out.nbytes * (_ranks(group) - 1),
    "c10d.allreduce_": lambda xs, group, *rest: (  # a ring: scattered and gathered
        2 * sum(x.nbytes for x in xs) * (_ranks(group) - 1) // _ranks(group)
    ),
    "c10d.send": lambda xs, *rest: sum(x.nbytes for x in xs),
    "_c10d_functional.all_gather_into_tensor": lambda x, ranks, name: x.nbytes * (ranks - 1),
    "_c10d_functional.reduce_scatter_tensor": lambda x, op, ranks, name: (
        x.nbytes * (ranks - 1) // ranks
    ),
    "_c10d_functional.all_reduce": lambda x, op, name: (
        2
        * x.nbytes
        * (dist.distributed_c10d._resolve_process_group(name).size() - 1)
        // dist.distributed_c10d._resolve_process_group(name).size()
    ),
    "_c10d_functional.all_to_all_single": _exchanged,
}
