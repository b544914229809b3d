"""Facts of the machine a rank runs on, for reports, fingerprints and ``headrace doctor``."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

__all__ = [
    "available_bytes",
    "give_back_memory",
    "copied_bytes_per_s",
    "is_out_of_memory",
    "machine_facts",
    "outside_bytes",
    "matmul_flops_per_s",
    "memory_left",
    "peak_bytes",
    "reset_peak_bytes",
]

# Both tables have the names of controllers as keys, as :func:`_memory_groups` gives them: "" in
# version 2 of Linux's control groups (cgroups), "memory" in version 1.
# The names of the files with a group's memory limit and its use, and the entry of memory.stat with
# the bytes of cached files that the system gives up when memory runs short.
_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
# The folders of /sys/fs/cgroup where the controller may be mounted.
_MOUNTS = {"": (".", "unified"), "memory": ("memory",)}


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still allocate before it reaches a memory limit of one of its
    control groups (cgroups); None where there is no limit. ``root`` is the root of the file system.
    Cached files that the system would give up are counted as free."""
    bytes_left = []
    for controller, group in _memory_groups(root / "proc/self/cgroup"):
        limit_name, used_name, cached_name = _FILES[controller]
        for folder in _levels(root / "sys/fs/cgroup", controller, group):
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None:
                cached = _entry(folder / "memory.stat", cached_name)
                bytes_left.append(max(0, limit - max(0, (used or 0) - cached)))
    return min(bytes_left, default=None)


def _memory_groups(path: Path) -> Iterator[tuple[str, str]]:
    """(controller, group) of each line of /proc/self/cgroup that is about memory: the controller is
    "memory" in version 1 of control groups, "" in version 2."""
    for line in _text(path).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not controllers:
            yield "", group
        elif "memory" in controllers.split(","):
            yield "memory", group


def _levels(top: Path, controller: str, group: str) -> Iterator[Path]:
    """The folders of a control group and of all groups above it, at each place under ``top`` where
    its controller may be mounted. A container sees its own group as the topmost, and a group
    outside of it as a path with "..", which is not followed."""
    parts = [name for name in group.split("/") if name and ".." not in group]
    for mount in _MOUNTS[controller]:
        for depth in range(len(parts), -1, -1):
            yield top / mount / Path(*parts[:depth])


def _text(path: Path) -> str:
    """The text of a file; empty where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """The whole number in a file; None where there is no such file, or something else in it
    ("max")."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _entry(path: Path, name: str) -> int:
    """The number behind ``name`` in a file whose lines are a name and a number, as memory.stat; 0
    where it has no such line."""
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdecimal():
            return int(value)
    return 0


def machine_facts(device: str) -> dict[str, Any]:
    """Facts of this machine by name: processor, cores, memory, device, versions and network
    links."""
    cuda = device != "cpu"
    return {
        "host_cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "system": f"{platform.system()} {platform.machine()}",
        "links": _links(),
    }


def available_bytes(device: str) -> int:
    """Bytes that new tensors could take: of the GPU's memory, or on a CPU of the host's, as far as
    the limits of control groups leave it."""
    if device != "cpu":
        # What torch's allocator keeps for tensors that are gone is free to new ones.
        cached_bytes = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info()[0]) + cached_bytes
    free = int(psutil.virtual_memory().available)
    left = memory_left()
    return free if left is None else min(free, left)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error reports a lack of memory, on a GPU or on the host: by torch's allocator, by
    a library that allocates by itself (cuBLAS, NCCL), or by the driver."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _NO_MEMORY)


# Parts of the texts, in lower case, of RuntimeErrors that report a lack of memory.
_NO_MEMORY = ("can't allocate memory", "out of memory", "alloc_failed", "alloc failed")


def matmul_flops_per_s(
    device: str, dtype: torch.dtype, size: int | None = None, products: int | None = None
) -> float:
    """Measure the FLOP/s of square matrix products, the peak against which utilisation is measured:
    the best of four rounds of ``products`` products of matrices [size, size]. On a GPU they are
    large, or it would be idle for most of the time. Numbers are random, as products of ones take
    less power and are faster than those of real data."""
    size = size or (768 if device == "cpu" else 8192)
    products = products or (1 if device == "cpu" else 8)
    matrix = torch.randn(size, size, dtype=dtype, device=device)
    best_s = float("inf")
    for _ in range(4):
        start_s = time.perf_counter()
        for _ in range(products):
            matrix @ matrix
        if device != "cpu":
            torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2.0 * products * size**3 / best_s


def copied_bytes_per_s(device: str) -> float:
    """Measure memory bandwidth: the bytes that a copy of a large tensor reads and writes, together,
    per second; the best of four."""
    size = 1 << (26 if device == "cpu" else 30)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_s = float("inf")
    for _ in range(4):
        start_s = time.perf_counter()
        target.copy_(source)
        if device != "cpu":
            torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - start_s)
    # each byte is read and written
    return 2.0 * size / best_s


def reset_peak_bytes(device: str) -> int:
    """Have :func:`peak_bytes` start from now where the system can; returns the bytes held now.

    On a CPU, where the resident memory of the process is measured, freed memory is first given back
    to the system: what the allocator kept of it would hide as much of the next peak.
    """
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated())
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    # Where it is refused, peaks count from the start of the process.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return int(psutil.Process().memory_info().rss)


def give_back_memory(device: torch.device) -> None:
    """Wait for the issued work of a GPU and free the cached blocks of its allocator, as later
    allocations may need blocks of other sizes. Does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def outside_bytes(device: str) -> int:
    """Bytes of a device that are held outside of torch's allocator: by communicators of NCCL, by
    libraries, by other processes. 0 on a CPU."""
    if device == "cpu":
        return 0
    free_bytes, all_bytes = torch.cuda.mem_get_info()
    return int(all_bytes - free_bytes - torch.cuda.memory_reserved())


def peak_bytes(device: str) -> int:
    """The most bytes held since the last reset: of tensors on a GPU, of this process's resident
    memory on a CPU."""
    if device != "cpu":
        return int(torch.cuda.max_memory_allocated())
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _processor() -> str:
    """The name of this machine's processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _links(folder: Path = Path("/sys/class/net")) -> str:
    """The speeds in Mbit/s of the network devices that are up, fastest first, such as
    ``10000+400``; ``unknown`` where none tells its speed. Virtual devices such as bridges, which
    come and go, do not count."""
    speeds = []
    for speed in folder.glob("*/speed"):
        with contextlib.suppress(OSError, ValueError):  # a link that is down does not tell
            if (speed.parent / "device").exists() and int(speed.read_text()) > 0:
                speeds.append(int(speed.read_text()))
    return "+".join(str(speed) for speed in sorted(speeds, reverse=True)) or "unknown"
