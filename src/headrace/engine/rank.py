"""The start of every rank of a job: its device, memory, corpus and storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
import torch.distributed as dist

from headrace.comm.collectives import agree, gather_floats
from headrace.comm.gpus import count_gpus
from headrace.comm.launch import World, join, lone_rank, start
from headrace.comm.mesh import Groups
from headrace.comm.variables import ranks_here, sees_own_gpus, under_torchrun
from headrace.config import Config
from headrace.config.model import JobConfig, OptimizerConfig
from headrace.engine.agreement import agreed_cluster
from headrace.engine.listener import Listener
from headrace.engine.setup import TrainingData, open_data
from headrace.errors import ConfigError, InfeasiblePlan
from headrace.native.machine import machine_facts
from headrace.native.optimizers import AdamW, Elementwise, OptimizerOptions
from headrace.native.storage import Storage
from headrace.ops.kernels_cuda import flash_as_before, take_newest_flash
from headrace.spec.architecture import Architecture, parameter_count
from headrace.spec.cluster import Cluster
from headrace.spec.hardware import filled_nodes
from headrace.units import bytes_text, counted

__all__ = ["Rank", "StepActions", "launch", "open_rank", "optimizer_options", "run_here"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank with its groups, data and storage, ready to measure or train. ``dtype`` is that of
    its work, ``machine`` the facts of its machine for reports, by their names."""

    world: World
    config: Config
    groups: Groups
    data: TrainingData
    storage: Storage
    cluster: Cluster
    dtype: torch.dtype
    machine: dict[str, Any]
    listener: Listener

    @property
    def first(self) -> bool:
        """Whether this is the first rank, which reports and writes files."""
        return self.world.rank == 0

    def say(self, text: str) -> None:
        """Send one line of text to the listener; on the first rank only."""
        if self.first:
            self.listener.tell(text)

    def enters(self, action: str, limit_s: float = inf) -> None:
        """Announce that this rank begins ``action``: other ranks report it should this rank die or
        hang. On a device, whose collectives the host does not wait for, the action has a time
        limit: ``limit_s``, at most that of collectives."""
        gpu = self.world.device != "cpu"
        self.world.watcher.enter(action, min(limit_s, self.world.timeout_s) if gpu else None)

    def progress(self, what: str, done: int, of: int) -> None:
        """Report that ``done`` of ``of`` parts of a preparation, named ``what``, are done; on the
        first rank only."""
        if self.first:
            self.listener.progress(what, done, of)


@dataclass(slots=True, kw_only=True, eq=False)
class StepActions:
    """Announces each action of the steps of ``rank``, on a device with a time limit: an action that
    takes much longer than its whole step was predicted to take counts as hung. The job then ends
    within minutes with an error that names the action."""

    rank: Rank
    # Seconds that an action of the step under way may take; no limit in the first step, which may
    # compile kernels.
    _limit_s: float = field(default=inf, init=False)
    _any_before: bool = field(default=False, init=False)  # whether a step has begun before

    def expect(self, predicted_s: float) -> None:
        """Set the time limit of actions as a step begins that is predicted to take
        ``predicted_s``."""
        if self._any_before:
            self._limit_s = max(_LEAST_LIMIT_S, _TIMES_PREDICTED * predicted_s)
        self._any_before = True

    def enters(self, action: str) -> None:
        """Announce that the rank begins an action of the step."""
        self.rank.enters(action, self._limit_s)


_LEAST_LIMIT_S, _TIMES_PREDICTED = 120.0, 20.0
"""Limit of an action on a device: at least so many seconds, and so many times the predicted seconds
of its step. Predictions are never that far off, and it is minutes where collectives have half an
hour."""


def launch(
    config: JobConfig,
    main: Callable[[World], int],
    each: Callable[[], None] = lambda: None,
    inherited: Sequence[int] = (),
) -> int:
    """Run ``main(world)`` on all ranks and return its exit code: under torchrun this process is one
    of them, else it starts them and waits. ``each`` is called time and again while ranks that were
    started here run; ``inherited`` are the descriptors of open files that ``main`` uses."""
    options = config.devices
    settings: dict[str, Any] = {
        "device": _device(config),
        "threads": options.threads or None,
        "timeout_s": options.timeout_s,
        "hang_s": options.hang_s,
        "deterministic": config.run.deterministic,
    }
    if under_torchrun():
        return join(main, stop_s=config.checkpoint.grace_s, **settings)
    return start(
        main,
        ranks=options.ranks,
        each=each,
        inherited=inherited,
        stop_s=config.checkpoint.grace_s,
        **settings,
    )


def run_here(config: JobConfig, main: Callable[[World], int]) -> int:
    """Run ``main(world)`` as the only rank, in this process; its errors are raised."""
    options = config.devices
    lone = lone_rank(
        device=_device(config),
        threads=options.threads or None,
        timeout_s=options.timeout_s,
        deterministic=config.run.deterministic,
    )
    with lone as world, flash_as_before():
        return main(world)


def _device(config: JobConfig) -> str:
    """``"cuda"`` or ``"cpu"``, as configured; where that is ``"auto"``, CUDA if this machine has a
    GPU for each of its ranks. Raises ConfigError where GPUs are wanted and too few."""
    wanted = config.devices.device
    count = count_gpus() if wanted != "cpu" else 0
    needed = ranks_here(config.devices.ranks)
    # A launcher may show each rank its own GPU only.
    enough = count >= needed or (count == 1 and sees_own_gpus())
    if wanted == "cuda" and not enough:
        raise ConfigError(
            "devices.device",
            got=f"'cuda' with {count} devices for {counted(needed, 'rank')}",
            wanted="a device for each rank",
            hint="lower devices.ranks, or device = 'cpu'",
        )
    if wanted == "auto":
        return "cuda" if enough else "cpu"
    return wanted


def open_rank(world: World, config: Config, listener: Listener | None = None) -> Rank:
    """Open the corpus, agree on it, and make this rank's storage. Collective."""
    listener = listener or Listener()
    groups = Groups(
        connections=world.rerendezvous.connections,
        device=world.device,
        backend=None if world.device == "cpu" else "nccl",
        node_sizes=_node_sizes(world, config.devices.node_ranks),
    )
    dtype: torch.dtype = getattr(torch, config.devices.dtype_on(gpu=world.device != "cpu"))
    stored = dtype if dtype.itemsize >= 4 else torch.float32  # type of the master weights
    world.watcher.enter("reading and tokenising the corpus")
    data = open_data(config, listener.progress if world.rank == 0 else None)
    agree("fingerprint of the corpus", data.corpus.fingerprint, groups.world)
    cluster = agreed_cluster(groups, world.device, config.devices.memory_bytes)
    _require_room(data.architecture, world.ranks, stored, cluster.memory_bytes)
    world.watcher.enter("making the weights")
    storage = Storage(
        data.architecture,
        groups,
        seed=config.run.seed,
        dtype=stored,
        device=world.device,
        working_dtype=dtype,
        options=optimizer_options(config.optimizer),
    )
    machine = machine_facts(world.device)
    if world.device != "cpu":
        machine["attention"] = take_newest_flash()
    return Rank(
        world=world,
        config=config,
        groups=groups,
        data=data,
        storage=storage,
        dtype=dtype,
        cluster=cluster,
        machine=machine,
        listener=listener,
    )


def _node_sizes(world: World, wanted: int) -> tuple[int, ...] | None:
    """The ranks of each node, for hierarchical exchanges of weights; None for no such exchanges.
    Nodes have ``wanted`` ranks, the last one the rest, where that is above 0. Else it is what the
    launcher says, or None on CPUs and where ranks of a node are not consecutive. Collective."""
    if wanted:
        return filled_nodes(world.ranks, wanted)
    if world.device == "cpu":
        return None
    # (local rank, ranks of its node) of every rank.
    local_by_rank = gather_floats([world.local_rank, world.local_ranks], dist.group.WORLD)
    sizes = [int(ranks) for local, ranks in local_by_rank if local == 0]
    in_order = [[local, ranks] for ranks in sizes for local in range(ranks)]
    return tuple(sizes) if in_order == local_by_rank else None


def _require_room(a: Architecture, ranks: int, stored: torch.dtype, limit_bytes: int) -> None:
    """Raise InfeasiblePlan where a rank's part of the master weights, of type ``stored``, alone
    exceeds ``limit_bytes``: the planner, which counts all that a rank needs, runs only later."""
    least = parameter_count(a) * stored.itemsize // ranks
    if least > limit_bytes:
        raise InfeasiblePlan(
            f"weights of {a}",
            got=f"{bytes_text(least)} on each of {counted(ranks, 'rank')}",
            wanted=f"at most {bytes_text(limit_bytes)}",
            hint="more ranks, or a smaller model",
        )


def optimizer_options(o: OptimizerConfig) -> OptimizerOptions:
    """The options of the optimizer that a configuration names."""
    if o.name == "adamw":
        options = {"beta1": o.beta1, "beta2": o.beta2, "eps": o.eps}
        given = {key: value for key, value in options.items() if value is not None}
        return AdamW(lr=o.lr, decay=o.decay, clip=o.clip, **given)
    return Elementwise(name=o.name, lr=o.lr, decay=o.decay, clip=o.clip, options=o.options)
