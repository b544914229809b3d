"""GPUs of this machine: their number, their assignment to ranks, and their initialization.

[Note: forks] Ranks are forked where possible, and CUDA cannot be used in a child of a process that
has initialized it; some queries of torch initialize it (is there a device? how many, where the
driver's management library is missing). So the launcher runs such queries in a child. Nor can
autograd be used in a child of a process that has used it on a machine with devices, not even on
CPUs: it has a thread for each device.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from headrace.comm.variables import sees_own_gpus
from headrace.errors import LaunchError

__all__ = [
    "VARIABLES",
    "begin_gpu",
    "count_gpus",
    "forks_fail",
    "gpu_of",
    "make_current",
    "settings_text",
]

VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS",
)
"""Environment variables that :func:`begin_gpu` sets."""


def count_gpus() -> int:
    """Number of GPUs visible to this process, which may still fork afterwards."""
    if not torch.backends.cuda.is_built():
        return 0
    if torch.cuda.is_initialized():
        return torch.cuda.device_count()
    # The query may initialize CUDA, which would forbid this process to fork: see [Note: forks].
    return _ask_child(torch.cuda.device_count)


def forks_fail() -> bool:
    """Whether forks of this process could not compute: CUDA was initialized here, or only queried,
    or autograd ran where there are devices, as its threads ask for them."""
    if not torch.backends.cuda.is_built():
        return False
    return torch.cuda.is_initialized() or not _ask_child(_child_computes)


def _child_computes() -> bool:
    """Whether a forked child can use CUDA and autograd. It runs in such a child: torch raises there
    where it knows that it cannot."""
    torch.ones(1, requires_grad=True).sum().backward()
    driver_count = torch._C._cuda_getDeviceCount()  # noqa: SLF001  the driver's count, not the manager's
    return not torch.cuda._is_in_bad_fork() and driver_count == torch.cuda.device_count()  # noqa: SLF001


def _ask_child(question: Callable[[], int]) -> int:
    """The answer of ``question`` in a forked child; 0 where the child fails."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write_end, str(int(question())).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return int(answer or 0)


def begin_gpu(local_rank: int, *, deterministic: bool = False) -> str:
    """Initialize this rank's GPU and make it the current one; returns its name, ``cuda:K``.

    Raises LaunchError where there is none for it, and in a child of a process that asked for CUDA.
    """
    if torch.cuda._is_in_bad_fork():  # noqa: SLF001
        raise LaunchError(
            "a rank of this process",
            got="CUDA begun, or only asked for, before it was forked",
            wanted="neither",
            hint="start ranks from a new process, or with torchrun",
        )
    index = gpu_of(local_rank, torch.cuda.device_count(), own=sees_own_gpus())
    # Packs have ever new sizes: without this the freed memory is fragmented, and returned.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # torch's watchdog would end the process when a communicator is aborted, or fails; which rank,
    # and where, is said by our own. torchrun sets the first one.
    os.environ |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
    if deterministic:
        _take_deterministic_kernels()
    torch.cuda.set_device(index)
    # a first product, so that CUDA and cuBLAS are initialized now
    torch.ones(8, 8, device="cuda").mm(torch.ones(8, 8, device="cuda"))
    torch.cuda.synchronize()
    return f"cuda:{index}"


def settings_text() -> str:
    """A line for people: the settings of NCCL and of torch's allocator that decide whether ranks
    recover from a lack of memory, and how much of it is lost to fragments."""
    sharp = os.environ.get("NCCL_NVLS_ENABLE", "unset: NVLink SHARP where there is one")
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "torch's own")
    return f"settings      NCCL_NVLS_ENABLE {sharp}; PYTORCH_CUDA_ALLOC_CONF {allocator}"


def _take_deterministic_kernels() -> None:
    """Choose deterministic kernels; torch warns where an operator has none. It has to be called
    before CUDA is initialized, as cuBLAS reads its variable then."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    # Else every new tensor is filled; here all of it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def make_current(device: str | torch.device) -> None:
    """Make a GPU the current one of this process: kernels that are not torch's run on it, and new
    communicators are made on it, wherever their tensors are. Does nothing for a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)


def gpu_of(local_rank: int, count: int, *, own: bool) -> int:
    """The index of the GPU of a rank that sees ``count`` GPUs; ``own`` where the launcher shows
    each rank a GPU of its own. Raises LaunchError where there is none for this rank."""
    if own and count == 1:
        return 0
    if local_rank >= count:
        raise LaunchError(
            f"GPU of local rank {local_rank}",
            got=f"{count} GPUs",
            wanted="one for each rank of a machine",
            hint="start fewer ranks, or use device = cpu",
        )
    return local_rank
