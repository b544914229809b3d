"""What every rank of a command does first: device, memory, storage, costs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.cli.display import Stopwatch, tell
from headrace.cli.methods import considered
from headrace.cli.wiring import (
    Data,
    calibration_path,
    memory_margin_of,
    open_data,
    profile_path,
    remember_costs,
)
from headrace.comm.collectives import agree, gather_bytes, gather_floats
from headrace.comm.launch import World, join, start, under_torchrun
from headrace.comm.mesh import Groups
from headrace.config import Config
from headrace.config.model import OptimizerConfig
from headrace.costs import CostModel, fingerprint_of
from headrace.costs.learning.calibration import Calibration
from headrace.costs.sources.profile import costs_from_profile
from headrace.errors import ConfigError, CostError, SpecError
from headrace.profiling.branches import ProfileOptions
from headrace.profiling.profiler import Profiler
from headrace.runtime.machine import available_bytes, machine_facts
from headrace.runtime.optimizers import AdamW, Elementwise, OptimizerOptions
from headrace.runtime.storage import Storage
from headrace.spec.cluster import Cluster
from headrace.spec.profile import Profile
from headrace.units import seconds_text

__all__ = ["Rank", "launch", "learnt", "measured_costs", "open_rank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank, ready to work."""

    world: World
    config: Config
    groups: Groups
    data: Data
    storage: Storage
    cluster: Cluster
    dtype: torch.dtype
    machine: dict[str, Any]

    @property
    def first(self) -> bool:
        """Whether this is the rank that speaks and writes."""
        return self.world.rank == 0

    def say(self, text: str) -> None:
        """One line to stderr, from the first rank."""
        if self.first:
            tell(text)


def launch(config: Config, main: Any) -> int:
    """Run ``main(world)`` on all ranks: this process is one under torchrun, else starts them."""
    options = config.devices
    device = _device(config)
    threads = options.threads or None
    if under_torchrun():
        return join(
            main, device=device, threads=threads, timeout_s=options.timeout_s,
            hang_s=options.hang_s,
        )  # fmt: skip
    return start(
        main, ranks=options.ranks, device=device, threads=threads, timeout_s=options.timeout_s,
        hang_s=options.hang_s,
    )  # fmt: skip


def _device(config: Config) -> str:
    wanted = config.devices.device
    # device_count asks the driver's library without initialising CUDA, so ranks may be forked.
    count = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "cuda" and count < (1 if under_torchrun() else config.devices.ranks):
        raise ConfigError(
            "devices.device", got=f"'cuda' with {count} devices for {config.devices.ranks} ranks",
            wanted="a device for each rank", hint="lower devices.ranks, or device = 'cpu'",
        )  # fmt: skip
    if wanted == "auto":
        return "cuda" if count >= config.devices.ranks else "cpu"
    return wanted


def open_rank(world: World, config: Config) -> Rank:
    """Open the corpus, agree on it, and make this rank's storage."""
    groups = Groups(connections=world.rerendezvous.connections)
    dtype: torch.dtype = getattr(torch, config.devices.dtype)
    stored = dtype if dtype.itemsize >= 4 else torch.float32
    data = open_data(config, Stopwatch() if world.rank == 0 else None)
    agree("fingerprint of the corpus", data.corpus.fingerprint, groups.world)
    free = available_bytes(world.device) if world.device == "cpu" else 0
    limit = config.devices.memory_bytes or int(
        0.8 * (free / world.local_ranks if free else available_bytes(world.device))
    )
    agreed = int(min(row[0] for row in gather_floats([float(limit)], groups.world)))
    kind = "cpu" if world.device == "cpu" else torch.cuda.get_device_name()
    storage = Storage(
        data.architecture, groups, seed=config.run.seed, dtype=stored, device=world.device,
        working_dtype=dtype, options=_optimizer(config.optimizer),
    )  # fmt: skip
    return Rank(
        world=world, config=config, groups=groups, data=data, storage=storage, dtype=dtype,
        cluster=Cluster(devices=world.ranks, memory_bytes=agreed, device=kind),
        machine=machine_facts(world.device),
    )  # fmt: skip


def _optimizer(o: OptimizerConfig) -> OptimizerOptions:
    if o.name == "adamw":
        return AdamW(lr=o.lr, beta1=o.beta1, beta2=o.beta2, eps=o.eps, decay=o.decay, clip=o.clip)
    return Elementwise(name=o.name, lr=o.lr, decay=o.decay, clip=o.clip, options=o.options)


def measured_costs(rank: Rank, *, fresh: bool = False) -> tuple[CostModel, Profile]:
    """The cached profile of this set-up, or a new one; the same on every rank.

    Collective. The memory limit is not part of what is measured: it is taken from this run.
    """
    fingerprint = _fingerprint(rank)
    path = profile_path(rank.config, fingerprint)
    profile = None if fresh else _read(path, fingerprint)
    have = all(row[0] for row in gather_floats([float(profile is not None)], rank.groups.world))
    if not have or profile is None:
        rank.say(f"measuring costs on {rank.world.ranks} ranks of {rank.cluster.device}")
        profile = _profiler(rank).profile(fingerprint, rank.cluster)
        rank.say(f"measured {len(profile.points)} points in {seconds_text(profile.measured_in_s)}")
    text = json.dumps(profile.to_json())
    agree("profile", text, rank.groups.world)
    costs = costs_from_profile(profile)
    margin = rank.config.planner.memory_margin
    if margin is None:
        margin = max(costs.memory_margin, memory_margin_of(rank.cluster.device))
    costs = costs.replace(cluster=rank.cluster, memory_margin=margin)
    if rank.first:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        remember_costs(rank.config, costs)
    return costs, profile


def learnt(rank: Rank, fingerprint: str) -> Calibration:
    """What earlier runs learnt about the costs of a fingerprint, as the first rank's file says.

    Collective. A damaged file is told and counts as none.
    """
    found = Calibration(fingerprint=fingerprint)
    if rank.first:
        try:
            path = calibration_path(rank.config, fingerprint)
            found = Calibration.load(path, fingerprint=fingerprint)
        except CostError as error:
            tell(f"what earlier runs learnt is not readable and is learnt again ({error})")
    payload = json.dumps(found.to_json()).encode()
    return Calibration.from_json(json.loads(gather_bytes(payload, rank.groups.world)[0]))


def _profiler(rank: Rank) -> Profiler:
    config = rank.config
    longest = config.profile.longest or config.data.context
    sizes, methods = considered(config.planner, rank.storage.architecture, rank.world.ranks)
    return Profiler(
        rank.storage, rank.groups,
        ProfileOptions(
            sizes=sizes, longest=longest, methods=methods, point_s=config.profile.rung_s,
            levels=config.planner.recompute, repeats=config.profile.repeats,
        ),
        dtype=rank.dtype, device=rank.world.device,
        progress=Stopwatch() if rank.first else lambda what, done, of: None,
    )  # fmt: skip


def _fingerprint(rank: Rank) -> str:
    machine, config = rank.machine, rank.config
    sizes, methods = considered(config.planner, rank.storage.architecture, rank.world.ranks)
    return fingerprint_of(
        model=rank.storage.architecture,
        ranks=rank.world.ranks,
        device=rank.cluster.device,
        processor=machine["host_cpu"],
        cores=machine["cores"],
        threads=torch.get_num_threads(),
        torch=machine["torch"],
        dtype=config.devices.dtype,
        longest=config.profile.longest or config.data.context,
        rung_s=config.profile.rung_s,
        levels=",".join(config.planner.recompute),
        methods=",".join(methods),
        sizes=",".join(map(str, sizes)),
    )


def _read(path: Path, fingerprint: str) -> Profile | None:
    try:
        profile = Profile.from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, SpecError) as error:
        tell(f"profile {path} is not readable and is measured again ({error})")
        return None
    return profile if profile.fingerprint == fingerprint else None
