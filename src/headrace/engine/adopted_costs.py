"""The costs of an adopted model on the ranks at hand: its profile, measured or kept."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule

from headrace.adopt.axis_probe import WholeFails
from headrace.adopt.held_weights import HeldWeights, state_bytes
from headrace.adopt.model_layers import are_in_checkpoints, find_layers
from headrace.adopt.spread_model import Item, SpreadModel
from headrace.comm.collectives import gather_bytes, gather_floats
from headrace.comm.mesh import Groups
from headrace.config.model import PlannerConfig
from headrace.costs import CostModel, fingerprint_of
from headrace.costs.library import memory_margin_of
from headrace.engine.agreement import agreed_cluster, agreed_profile
from headrace.engine.loop_costs import LoopProfiler, ModelProbes, shape_of, sizes_for
from headrace.engine.profile_fit import fitted_costs, require_fit
from headrace.errors import CostError, HeadraceError, InfeasiblePlan
from headrace.native.machine import machine_facts
from headrace.native.spans import clock_of
from headrace.profiling.probe import seconds_of
from headrace.profiling.sweep import block
from headrace.spec.cluster import Cluster
from headrace.spec.known_methods import SINGLE_RANK
from headrace.spec.layer_plan import LayerOption, LayerPlan
from headrace.spec.profile import Profile
from headrace.units import bytes_text, counted, seconds_text

__all__ = ["LoopSetup", "ModelCosts", "measured"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoopSetup:
    """Everything that the costs and plans of a training loop depend on.

    Attributes:
        model: The user's model, spread.
        held: How its weights are held.
        optimizer: The user's.
        groups: The groups of this rank.
        device: The device of the model, as torch names it.
        options: The options of the planner.
        document: The most tokens of a sample.
        longest: The most tokens of a pack that is measured.
        memory_bytes: Memory that a rank may use; None for 80 % of what is free.
        cache: The folder of measured costs.
        costs: Costs that the user gave; None to measure them.
        say: Called with lines for people.
        progress: Called as ``progress(what, done, of)``.
    """

    model: SpreadModel
    held: HeldWeights
    optimizer: torch.optim.Optimizer
    groups: Groups
    device: str
    options: PlannerConfig
    document: int
    longest: int
    memory_bytes: int | None
    cache: Path
    costs: CostModel | None
    say: Callable[[str], object]
    progress: Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelCosts:
    """The probes of a model and its costs.

    ``profile`` is what the costs were fitted to, None where the user gave costs. ``compared`` is a
    sentence on how far the prediction from two layers was from a run of the whole model; empty
    where the profile was not measured now.
    """

    probes: ModelProbes
    profile: Profile | None
    costs: CostModel
    compared: str = ""


def measured(setup: LoopSetup, sample: Item) -> ModelCosts:
    """The costs of a model on these ranks: those that the user gave, or those of a kept or a newly
    measured profile. The state of torch's random numbers is left as it was. Collective. Raises
    CostError for given costs of another number of ranks or layers."""
    with torch.random.fork_rng([] if setup.device == "cpu" else [setup.device]):
        try:
            return _find_costs(setup, sample)
        finally:
            setup.model.release()


def _find_costs(setup: LoopSetup, sample: Item) -> ModelCosts:
    """Do what :func:`measured` describes, without restoring the random state and without releasing
    the model afterwards. Collective."""
    probes = _probes(setup, sample)
    if setup.costs is not None:
        return ModelCosts(
            probes=probes, profile=None, costs=_checked_costs(setup, probes, setup.costs)
        )
    require_fit(setup.options)  # a missing package is reported before minutes of measuring
    fingerprint = _fingerprint(setup, probes)
    digest = hashlib.sha256(fingerprint.encode()).hexdigest()[:24]
    path = setup.cache / "profiles" / f"loop-{digest}.json"
    cluster = agreed_cluster(setup.groups, setup.device, setup.memory_bytes)
    held_bytes = _largest_on_any_rank(setup, state_bytes(setup.held.model, setup.optimizer))
    profile, measured_now = agreed_profile(
        path,
        fingerprint,
        lambda: _profile(setup, probes, cluster, held_bytes, fingerprint),
        setup.groups,
        setup.say,
    )
    costs = fitted_costs(profile, setup.options, setup.groups, longest=setup.longest, say=setup.say)
    compared = ""
    if measured_now and probes.layers is not None:
        compared = _compare_with_whole_model(setup, probes, costs.replace(cluster=cluster))
        setup.say(compared)
    margin = setup.options.memory_margin
    if margin is None:  # not configured: at least what is usual for the device
        margin = max(costs.memory_margin, memory_margin_of(cluster.device))
    costs = costs.replace(cluster=cluster, memory_margin=margin, state_bytes=held_bytes)
    return ModelCosts(probes=probes, profile=profile, costs=costs, compared=compared)


def _compare_with_whole_model(setup: LoopSetup, probes: ModelProbes, costs: CostModel) -> str:
    """Run a forward and backward of the whole model, on a pack that takes about half of the memory,
    and compare its seconds with those predicted from two layers; returns a sentence. Collective."""
    p = costs.group_sizes[0]
    no_recompute = LayerPlan.uniform(
        LayerOption.of(SINGLE_RANK if p == 1 else setup.model.exchanges[0]), costs.shape.layers
    )
    tokens = min(setup.longest, costs.max_tokens(p, no_recompute) // 2)
    own_group = block(setup.groups, p)  # None for a rank left over by groups of p
    measured_s = 0.0  # stays so on a rank that runs nothing
    if tokens >= p and own_group is not None:
        probe = probes.complete(setup.groups, own_group, (tokens,), setup.model.exchanges[0])
        clock = clock_of(setup.device)
        # Forward plus backward; the better of two runs, as the first warms up.
        measured_s = min(sum(seconds_of(probe, clock)) for _ in range(2))
    measured_s = max(row[0] for row in gather_floats([measured_s], setup.groups.world))
    for parameter in setup.held.trained:
        parameter.grad = None
    if not measured_s:
        return "two layers are not compared with the whole model: it fits no pack of them"
    lengths = probes.documents(tokens)
    predicted_s = sum(costs.micro_batch_s(lengths, p, no_recompute))
    return (
        f"the whole model takes {seconds_text(measured_s)} for {tokens:,} tokens, two layers "
        f"foretell {seconds_text(predicted_s)} ({predicted_s / measured_s - 1:+.0%})"
    )


def _checked_costs(setup: LoopSetup, probes: ModelProbes, costs: CostModel) -> CostModel:
    """Return ``costs``, which the user gave, if they are of as many ranks and layers as there are
    here; raises CostError for others. A model without known layers counts as one layer."""
    ranks, layers = setup.groups.ranks, len(probes.layers) if probes.layers else 1
    if (costs.cluster.devices, costs.shape.layers) != (ranks, layers):
        raise CostError(
            "costs of a loop",
            got=f"{counted(costs.cluster.devices, 'rank')}, {costs.shape.layers} layers",
            wanted=f"{counted(ranks, 'rank')}, {layers} layers",
        )
    return costs


def _probes(setup: LoopSetup, sample: Item) -> ModelProbes:
    """Make the probes that measure a model. They measure single layers if a forward of ``sample``
    shows which modules the layers are, else the model as a whole."""
    model, inner = setup.model, setup.held.inner
    probes = ModelProbes(
        model=model,
        layers=None,
        levels=None,
        sample=sample,
        device=setup.device,
        document=setup.document,
    )
    if model.whole:  # such as a compiled one, whose layers cannot be called one by one
        return probes
    this_rank_alone, length = (setup.groups.rank,), model.few(sample)
    shard = probes.shard(setup.groups, this_rank_alone, (length,), model.exchanges[0])
    model.take(shard)
    again = False
    try:
        probes.layers = find_layers(inner, lambda: inner(**shard.inputs))
        if probes.layers is not None:
            again = are_in_checkpoints(probes.layers, lambda: inner(**shard.inputs))
    except HeadraceError:
        raise
    except Exception as error:
        raise WholeFails(
            f"{type(inner).__name__} on one small sample",
            got=f"{type(error).__name__}: {error}",
            wanted="results, to find its layers",
            hint="a sample must have all inputs of the model: call it with one by yourself",
        ) from error
    apart = probes.layers is not None and any(map(_has_shards_within, probes.layers.modules))
    if probes.layers is not None and set(setup.options.recompute) - {"none"}:
        if again:
            setup.say("layers are computed again as the model's own checkpoints say")
        elif apart:
            setup.say(
                "layers are not computed again: FSDP2 shards parts of them by themselves, and "
                "gathers these in another order where a layer is"
            )
        else:
            probes.levels = model.levels(probes.layers.modules)
    units = () if probes.layers is None else probes.layers.modules
    if apart and not all(isinstance(layer, FSDPModule) for layer in units):
        probes.layers = None  # what is no unit of FSDP2 cannot run without the model
    return probes


def _has_shards_within(layer: torch.nn.Module) -> bool:
    """Whether FSDP2 shards parts of a layer by themselves: ranks that compute the layer again would
    gather these in another order than ranks that do not."""
    return any(isinstance(part, FSDPModule) for part in layer.modules() if part is not layer)


def _profile(
    setup: LoopSetup, probes: ModelProbes, cluster: Cluster, held_bytes: int, fingerprint: str
) -> Profile:
    """Measure the profile of the model on all group sizes. ``held_bytes`` of a rank's memory are
    taken by weights, gradients and optimizer. Collective; raises InfeasiblePlan where these leave
    no room."""
    if held_bytes >= cluster.memory_bytes:
        raise InfeasiblePlan(
            "memory of a rank",
            got=f"{bytes_text(held_bytes)} for weights, gradients and optimizer",
            wanted=f"less than {bytes_text(cluster.memory_bytes)}",
            hint="more memory, or weights sharded by FSDP2",
        )
    setup.say(f"measuring the model on {counted(cluster.devices, 'rank')} of {cluster.device}")
    configured_sizes = tuple(p for p in setup.options.group_sizes if p <= cluster.devices)
    profiler = LoopProfiler(
        probes=probes,
        held=setup.held,
        groups=setup.groups,
        exchanges=setup.model.exchanges,
        sizes=configured_sizes or sizes_for(setup.groups.ranks, setup.held.semantics),
        longest=setup.longest,
        cluster=cluster,
        state_bytes=held_bytes,
        device=setup.device,
        progress=setup.progress,
    )
    profile = profiler.profile(fingerprint, shape_of(setup.held.inner, probes))
    setup.say(
        f"measured {len(profile.points)} points in {seconds_text(profile.measured_in_s)}, "
        + ("the model as a whole" if probes.layers is None else f"{len(probes.layers)} layers")
    )
    return profile


def _largest_on_any_rank(setup: LoopSetup, value: int) -> int:
    """The largest of all ranks' values, the same on all of them. Collective."""
    return max(int(row[0]) for row in gather_floats([float(value)], setup.groups.world))


def _fingerprint(setup: LoopSetup, probes: ModelProbes) -> str:
    """A text of everything that changes what is measured: model, weights, hosts, torch, options.
    Collective, as it has the hosts of all ranks."""
    machine, inner = machine_facts(setup.device), setup.held.inner
    parameters = hashlib.sha256()
    for name, parameter in inner.named_parameters():
        parameters.update(f"{name} {tuple(parameter.shape)} {parameter.dtype};".encode())
    host = f"{platform.node()} {machine['host_cpu']} {machine['cores']} {machine['device']}"
    hosts = gather_bytes(host.encode(), setup.groups.world)
    return fingerprint_of(
        model=f"{type(inner).__name__} {parameters.hexdigest()[:16]}",
        weights=f"{type(setup.held.model).__name__} {setup.held.semantics}",
        hosts=hashlib.sha256(b"\n".join(sorted(hosts))).hexdigest()[:16],
        torch=machine["torch"],
        threads=torch.get_num_threads(),
        ranks=setup.groups.ranks,
        device=setup.device,
        exchanges=",".join(setup.model.exchanges),
        longest=setup.longest,
        document=setup.document,
        sizes=",".join(map(str, setup.options.group_sizes)),
        levels=",".join(setup.options.recompute) if probes.levels else "none",
        training=inner.training,
        dtype=str(torch.get_default_dtype()),
    )
