"""The costs that a run is planned with: measured on its ranks, or read from the cache."""

from __future__ import annotations

import json

import torch

from headrace.comm.collectives import gather_bytes
from headrace.costs import CostModel, fingerprint_of
from headrace.costs.calibration import Calibration
from headrace.costs.library import memory_margin_of
from headrace.engine.agreement import agreed_profile
from headrace.engine.considered_methods import considered
from headrace.engine.cost_cache import (
    calibration_path,
    profile_path,
    remember_costs,
)
from headrace.engine.profile_fit import fitted_costs, require_fit
from headrace.engine.rank import Rank
from headrace.errors import CostError
from headrace.profiling.profiler import ProfileOptions, Profiler
from headrace.spec.profile import Profile
from headrace.units import counted, seconds_text

__all__ = ["learnt", "measured_costs"]


def measured_costs(rank: Rank, *, fresh: bool = False) -> tuple[CostModel, Profile]:
    """The costs to plan with and the profile that they are fitted to, the same on every rank.

    The profile is read from the cache where it has one of this set-up; it is measured where not,
    and always for ``fresh``. Cluster, memory limit and memory margin are not measured: they are
    those of this run. The first rank keeps the costs for other runs. Collective. Raises
    MissingExtra where ``planner.costs`` needs a library that is not installed.
    """
    require_fit(rank.config.planner)
    sizes, methods = considered(
        rank.config.planner,
        rank.storage.architecture,
        rank.world.ranks,
        gpu=rank.world.device != "cpu",
    )
    fingerprint = _fingerprint(rank, sizes, methods, _hosts(rank))

    def measure() -> Profile:
        """Measure the model on all ranks. Collective."""
        rank.enters("measuring costs")
        rank.say(f"measuring costs on {counted(rank.world.ranks, 'rank')} of {rank.cluster.device}")
        profile = _profiler(rank, sizes, methods).profile(fingerprint, rank.cluster)
        rank.say(f"measured {len(profile.points)} points in {seconds_text(profile.measured_in_s)}")
        return profile

    path = profile_path(rank.config, fingerprint)
    profile, _ = agreed_profile(path, fingerprint, measure, rank.groups, rank.say, fresh=fresh)
    costs = fitted_costs(
        profile, rank.config.planner, rank.groups, longest=rank.config.data.context, say=rank.say
    )
    margin = rank.config.planner.memory_margin
    if margin is None:
        margin = max(costs.memory_margin, memory_margin_of(rank.cluster.device))
    costs = costs.replace(cluster=rank.cluster, memory_margin=margin)
    if rank.first:
        try:
            remember_costs(rank.config, costs)
        except CostError as error:
            rank.say(f"costs are not kept for other runs ({error})")
    return costs, profile


def learnt(rank: Rank, fingerprint: str) -> Calibration:
    """The calibration of earlier runs for the costs of a fingerprint, from the first rank's file.

    Collective. A damaged file is reported and counts as none.
    """
    found = Calibration(fingerprint=fingerprint)
    if rank.first:
        try:
            path = calibration_path(rank.config, fingerprint)
            found = Calibration.load(path, fingerprint=fingerprint)
        except CostError as error:
            rank.say(f"what earlier runs learnt is not readable and is learnt again ({error})")
    payload = json.dumps(found.to_json()).encode()
    return Calibration.from_json(json.loads(gather_bytes(payload, rank.groups.world)[0]))


def _profiler(rank: Rank, sizes: tuple[int, ...], methods: tuple[str, ...]) -> Profiler:
    """The profiler of this rank for groups of ``sizes`` ranks and these methods, as the
    configuration says."""
    config = rank.config
    options = ProfileOptions(
        sizes=sizes,
        longest=config.profile.longest or config.data.context,
        methods=methods,
        point_s=config.profile.rung_s,
        levels=config.planner.recompute,
        repeats=config.profile.repeats,
    )
    return Profiler(
        rank.storage,
        rank.groups,
        options,
        dtype=rank.dtype,
        device=rank.world.device,
        progress=rank.progress,
    )


def _hosts(rank: Rank) -> dict[str, str]:
    """Facts of the machines of all ranks as texts by their names, the same on every rank. A fact in
    which machines differ has all its values, joined by `` + ``; ``nodes`` has the number of ranks
    on each machine, as ``8+8``. Collective."""
    machine, world = rank.machine, rank.world
    shown = {
        "processor": machine["host_cpu"],
        "cores": machine["cores"],
        "torch": machine["torch"],
        "threads": torch.get_num_threads(),
        "links": machine["links"],
    } | {key: machine[key] for key in ("attention",) if key in machine}
    payload = json.dumps([world.local_rank, world.local_ranks, shown]).encode()
    by_rank = [json.loads(text) for text in gather_bytes(payload, rank.groups.world)]
    ranks_of_nodes = [ranks for local, ranks, _ in by_rank if local == 0]
    hosts = dict[str, str]()
    for key in shown:
        values = {str(facts[key]) for _, _, facts in by_rank}
        hosts[key] = " + ".join(sorted(values))
    if len(ranks_of_nodes) == 1:
        del hosts["links"]  # no link between machines is used
    return hosts | {"nodes": "+".join(map(str, ranks_of_nodes))}


def _fingerprint(
    rank: Rank, sizes: tuple[int, ...], methods: tuple[str, ...], hosts: dict[str, str]
) -> str:
    """The fingerprint of a profile: a text of all that it depends on. ``hosts`` has the facts of
    the machines by their names, ``sizes`` the ranks of the groups that are measured."""
    config, node_sizes = rank.config, rank.groups.node_sizes
    return fingerprint_of(
        **hosts,
        model=rank.storage.architecture,
        ranks=rank.world.ranks,
        device=rank.cluster.device,
        dtype=str(rank.dtype).removeprefix("torch."),
        longest=config.profile.longest or config.data.context,
        rung_s=config.profile.rung_s,
        levels=",".join(config.planner.recompute),
        methods=",".join(methods),
        sizes=",".join(map(str, sizes)),
        **({"node_ranks": "+".join(map(str, node_sizes))} if node_sizes else {}),
    )
