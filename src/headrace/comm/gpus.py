"""GPUs of this machine: how many there are, whose is which, and how one begins.

[Note: forks] Ranks are forked where they can be, and CUDA does not live on in a child of a process
that has begun it; for some questions (is there a device? how many, where the driver's library for
management is missing) torch begins it. So the launcher has a child ask.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from headrace.comm.variables import sees_own_gpus
from headrace.errors import LaunchError

__all__ = ["VARIABLES", "begin_gpu", "count_gpus", "cuda_begun", "gpu_of"]

VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS",
)
"""Environment variables that :func:`begin_gpu` sets."""


def count_gpus() -> int:
    """GPUs that this process would see; it may be forked afterwards."""
    if not torch.backends.cuda.is_built():
        return 0
    if torch.cuda.is_initialized():
        return torch.cuda.device_count()
    return _asked(torch.cuda.device_count)


def cuda_begun() -> bool:
    """Whether CUDA was begun in this process, or asked for, so that no fork of it can use it."""
    if not torch.backends.cuda.is_built():
        return False
    return torch.cuda.is_initialized() or bool(_asked(torch.cuda._is_in_bad_fork))  # noqa: SLF001


def _asked(question: Callable[[], int]) -> int:
    """What a forked child answers; 0 where it does not."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(theirs, str(int(question())).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return int(said or 0)


def begin_gpu(local_rank: int, *, deterministic: bool = False) -> str:
    """Begin this rank's GPU and make it the current one; its name.

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
    # Packs have new sizes all the time: without it freed memory is in pieces, and given back.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # torch's watchdog would end the process when a communicator is aborted, or fails; who failed,
    # and where, is said by our own. torchrun sets the first one.
    os.environ |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
    if deterministic:
        _take_deterministic_kernels()
    torch.cuda.set_device(index)
    torch.ones(8, 8, device="cuda").mm(torch.ones(8, 8, device="cuda"))
    torch.cuda.synchronize()
    return f"cuda:{index}"


def _take_deterministic_kernels() -> None:
    """Before the device begins: cuBLAS reads its variable then. torch warns of what has no such
    kernel, by name."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    # Else every new tensor is filled; here all of it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def gpu_of(local_rank: int, count: int, *, own: bool) -> int:
    """The GPU of a rank that sees ``count``: its ``own`` where a launcher shows each rank another.
    Raises LaunchError where there is none for it."""
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
