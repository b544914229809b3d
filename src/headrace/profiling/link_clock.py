"""Clocks of a rehearsal, in which one rank runs its part of a job without partners.

The collectives of a fake process group take no time. A clock sees every operator that the rank
runs and adds what a collective would have cost, overlap included:

    issue      the collective starts when the link is free and the data that it sends has arrived;
               it lasts as long as the network model says for the bytes that leave this rank
    first use  of its results: the rank waits until the collective has ended (to make a view of them
               is no use)

Partners are taken to be as quick as this rank, so no time is lost on waiting for a slow one.

    Timed      operators run, and take the time that they take
    Modelled   operators have shapes only, and take what a roofline says:
               the most of FLOPs over the attained peak, bytes in and out over the attained memory
               bandwidth, and the launch of a kernel
"""

# ruff: noqa: SLF001  a storage is known by its address

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from headrace.errors import SpecError
from headrace.native.counted import sent_bytes, tensors_in
from headrace.ops.flops import ATTENTION, FLOPS
from headrace.ops.fused import FUSED
from headrace.spec.hardware import Hardware, Link

__all__ = ["LinkClock", "Modelled", "Timed"]


class LinkClock(TorchDispatchMode, ABC):
    """A clock that, used as a context manager, sees every operator and collective that runs, and
    whose :meth:`now` grows by what they take.

    ``comm_s`` are seconds that the link was busy, ``stalled_s`` those that the rank waited for it.
    """

    def __init__(self, hardware: Hardware) -> None:
        """A clock at 0 s, of links as in ``hardware``."""
        super().__init__()
        self.hardware = hardware
        self.comm_s = 0.0
        self.stalled_s = 0.0
        self._link_free_s = 0.0
        self._arrives: dict[int, float] = {}  # by storages' addresses: when their data has come
        self._links: dict[str, Link] = {}  # by names of process groups

    @abstractmethod
    def now(self) -> float:
        """Seconds since an arbitrary moment."""

    def mark(self) -> float:
        """The current time as a mark, in seconds."""
        return self.now()

    def between(self, start: float, end: float) -> float:
        """Seconds from one mark to a later one."""
        return end - start

    def _ran(self, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any) -> None:
        """Account for an operator that has run and that makes or changes tensors. Here nothing is
        to be done: a clock of real time has run on while the operator did."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator: a collective takes its time on the link, others wait for the data that
        they read and take time on the device."""
        rest = kwargs or {}
        sent = sent_bytes(func, args)
        if sent is not None:
            return self._collective(func, args, rest, sent)
        # Tensors are known by their storages, as views share the data that a collective delivers.
        read = {x.untyped_storage()._cdata for x in tensors_in((args, rest))}
        out = func(*args, **rest)
        if not _is_view(func, out, read):
            self._wait(read)
            self._ran(func, args, rest, out)
        return out

    def _collective(
        self, func: Any, args: tuple[Any, ...], rest: Any, sent: tuple[int, Any]
    ) -> Any:
        """Put a collective in the link's queue, and note when its results will be there; ``sent``
        is (bytes that leave this rank, the process group). Returns the collective's results."""
        count, group = sent
        name = group.group_name
        if name not in self._links:
            self._links[name] = self.hardware.link(dist.get_process_group_ranks(group))
        link = self._links[name]
        outputs, inputs = args[0], args[1]  # by c10d's schemas
        ready_s = [self._arrives.get(x.untyped_storage()._cdata, 0.0) for x in tensors_in(inputs)]
        seconds = self._seconds(link, count)
        start_s = max(self.now(), self._link_free_s, *ready_s)
        self._link_free_s = start_s + seconds
        self.comm_s += seconds
        for x in tensors_in(outputs):
            storage = x.untyped_storage()
            self._arrives[storage._cdata] = self._link_free_s
            # The address may be used again once the storage is freed.
            weakref.finalize(storage, self._arrives.pop, storage._cdata, None)
        return self._run_collective(func, args, rest)

    def _seconds(self, link: Link, count: int) -> float:
        """Seconds that the link takes for ``count`` bytes which leave this rank."""
        return link.seconds(count)

    def _run_collective(self, func: Any, args: tuple[Any, ...], rest: Any) -> Any:
        """Call a collective of the fake process group; returns its results and handle."""
        return func(*args, **rest)

    def _wait(self, read: set[int]) -> None:
        """Let time pass until the data of the storages ``read``, by their addresses, has come."""
        arrivals_s = [self._arrives.pop(key) for key in read & self._arrives.keys()]
        if arrivals_s:
            self._stall(max(0.0, max(arrivals_s) - self.now()))

    def _stall(self, seconds: float) -> None:
        """Let time pass in which the rank waits for the link."""
        self.stalled_s += seconds


class Timed(LinkClock):
    """Operators take the time that they take on ``device``."""

    def __init__(self, hardware: Hardware, device: str = "cpu") -> None:
        """A clock at 0 s, of operators that run on ``device``."""
        super().__init__(hardware)
        self._device = device
        self._began = time.perf_counter()

    def now(self) -> float:
        """Seconds since the clock was made, waits for the link included."""
        if self._device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - self._began + self.stalled_s


class Stalls(LinkClock):
    """Measures only the seconds that the rank waits for links. This clock intercepts every
    operator, which makes operators ``slower`` times as slow; it slows links down by the same
    factor, so that the same share of them overlaps with computation. Results are divided by
    ``slower``."""

    def __init__(self, hardware: Hardware, device: str = "cpu", slower: float = 1.0) -> None:
        """A clock at 0 s, of operators on ``device`` that it makes ``slower`` times as slow."""
        super().__init__(hardware)
        self._time, self._slower = Timed(hardware, device), slower

    def now(self) -> float:
        """Seconds since the clock was made, waits for the link included."""
        return self._time.now() + self.stalled_s

    def mark(self) -> float:
        """Seconds that the rank has waited for links so far, at normal speed."""
        return self.stalled_s / self._slower

    def _seconds(self, link: Link, count: int) -> float:
        """Seconds of ``count`` bytes on a link that is slowed down as much as operators are."""
        return link.seconds(count) * self._slower


class Modelled(LinkClock):
    """Operators take what the hardware's roofline says; for tensors of shapes only.

    Raises SpecError at the first product of a type that the device has no peak for.
    """

    def __init__(self, hardware: Hardware) -> None:
        """A clock at 0 s, of operators and links as fast as ``hardware``'s."""
        super().__init__(hardware)
        self._now_s = 0.0
        self._handle: Any = None  # of the first all-to-all: every later one is answered with it
        self._flops = {**flop_registry, **FLOPS}

    def now(self) -> float:
        """Seconds of all operators so far, waits for the link included."""
        return self._now_s

    def _run_collective(self, func: Any, args: tuple[Any, ...], rest: Any) -> Any:
        """Call a collective, of all-to-alls only the first and answer the others with its handle:
        nothing is sent or written, and torch takes milliseconds to see that among the sizes for
        each of a thousand ranks there is no tensor."""
        if func is not torch.ops.c10d.alltoall_base_.default:
            return super()._run_collective(func, args, rest)
        if self._handle is None:
            self._handle = super()._run_collective(func, args, rest)
        return self._handle

    def _stall(self, seconds: float) -> None:
        """Let modelled time pass in which the rank waits for the link."""
        super()._stall(seconds)
        self._now_s += seconds

    def _ran(self, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any) -> None:
        """Let modelled time pass for an operator: that of its kernels' launches, of the bytes that
        it moves or of its FLOPs, whichever is longest. Operators that only allocate take none."""
        if func.namespace not in ("aten", "headrace") or _allocates(func):
            return
        device = self.hardware.device
        kernels = FUSED[func._opname].kernels if func._opname in FUSED else 1
        tensors = [*tensors_in((args, kwargs)), *tensors_in(out)]
        moved_bytes = sum(x.nbytes for x in _one_of_each_storage(tensors))
        memory_s = moved_bytes / (device.memory_bytes_per_s * device.attained_memory)
        compute_s = self._compute_s(func, args, kwargs, out)
        self._now_s += max(kernels * device.launch_s, memory_s, compute_s)

    def _compute_s(self, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any) -> float:
        """Seconds of an operator's FLOPs at the speed of its type; 0 where it has none worth
        counting, SpecError for a type without a known speed."""
        packet = func._overloadpacket
        formula = self._flops.get(packet)
        if formula is None:
            return 0.0
        device = self.hardware.device
        # The type of the factors: what their product is added to may be wider.
        dtypes = [x.dtype for x in tensors_in(args) if x.is_floating_point()]
        dtype = str(min(dtypes, key=lambda kind: kind.itemsize)).removeprefix("torch.")
        peak = device.flops_per_s.get(dtype)
        if peak is None:
            raise SpecError(
                f"products of {dtype} on {device.name}",
                got="no peak known",
                wanted=f"one of {', '.join(device.flops_per_s)}",
            )
        share = device.attained_attention if packet in ATTENTION else device.attained_matmul
        return float(formula(*args, **kwargs, out_val=out)) / (peak * share)


def _one_of_each_storage(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of all tensors that share a storage only the largest."""
    largest: dict[int, torch.Tensor] = {}
    for x in tensors:
        key = x.untyped_storage()._cdata
        if key not in largest or largest[key].nbytes < x.nbytes:
            largest[key] = x
    return list(largest.values())


def _is_view(func: Any, out: Any, read: set[int]) -> bool:
    """Whether an operator that reads the storages ``read`` only makes a view of them, or queries a
    tensor's metadata."""
    if func._schema.is_mutable:
        return False
    out_storages = [x.untyped_storage()._cdata for x in tensors_in(out)]
    return all(key in read for key in out_storages)


def _allocates(func: Any) -> bool:
    """Whether an operator only allocates memory."""
    return func._schema.name.split("::")[1] in _ALLOCATING


_ALLOCATING = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
