"""Environment variables that a launcher such as torchrun sets for each process. No torch here."""

from __future__ import annotations

import os

from headrace.errors import LaunchError

__all__ = ["number", "ranks_here", "sees_own_gpus", "speaks_here", "under_torchrun", "variable"]

_WITH_TORCHRUN = "start it with torchrun, or leave its variables unset"


def under_torchrun() -> bool:
    """Whether this process was started as one rank of a job (by torchrun, or alike)."""
    return "TORCHELASTIC_RUN_ID" in os.environ or {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def ranks_here(started: int) -> int:
    """The number of ranks on this machine: as the launcher says, or ``started`` where there is no
    launcher and this process starts them itself."""
    if not under_torchrun():
        return started
    return number("LOCAL_WORLD_SIZE", number("WORLD_SIZE", 1))


def sees_own_gpus() -> bool:
    """Whether the launcher shows each rank GPUs of its own: Slurm does with --gpus-per-task."""
    per_task = {"SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"}
    return under_torchrun() and not per_task.isdisjoint(os.environ)


def speaks_here() -> bool:
    """Whether this process prints messages that otherwise all ranks of this machine would print
    alike before they are connected: only the rank with LOCAL_RANK 0 does, or a process without a
    launcher."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def variable(name: str) -> str:
    """The value of an environment variable. Raises LaunchError where it is missing."""
    value = os.environ.get(name)
    if not value:
        raise LaunchError(f"variable {name}", got="none", wanted="a value", hint=_WITH_TORCHRUN)
    return value


def number(name: str, default: int | None = None) -> int:
    """An environment variable as a whole number. Raises LaunchError where its value is not one, and
    where it is missing and there is no default."""
    if default is not None and not os.environ.get(name):
        return default
    text = variable(name)
    if not text.isdecimal():
        raise LaunchError(f"variable {name}", got=repr(text), wanted="a whole number")
    return int(text)
