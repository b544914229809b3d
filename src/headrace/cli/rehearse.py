"""``headrace rehearse``: how long a sequence fits and how long it takes, without the cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from headrace.cli.display import out_console, tell
from headrace.cli.flags import RehearseFlags, overrides
from headrace.config import Config
from headrace.costs import CostModel, fingerprint_of
from headrace.costs.limits import MemoryParts, memory_parts
from headrace.costs.rates import Rates
from headrace.costs.sources.measured import costs_from_profile
from headrace.engine.considered_methods import considered
from headrace.engine.listener import ProgressLines
from headrace.engine.plans import make_problem, plan
from headrace.engine.setup import architecture_of, assumed_by
from headrace.errors import ConfigError, InfeasiblePlan
from headrace.planners.drawn_iterations import IterationDrawer
from headrace.profiling.rehearsal import Rehearsal
from headrace.spec.cluster import Cluster
from headrace.spec.hardware import Hardware
from headrace.spec.implementation import Implementation
from headrace.spec.layer_plan import LayerOption, LayerPlan
from headrace.spec.plan import Plan, Working
from headrace.units import bytes_text, counted, parse_count, seconds_text

__all__ = ["rehearse"]

_MARGIN = 0.1
"""Fraction of memory to leave free on a device that is not at hand, where the configuration says
nothing: for its context, the buffers of collectives and fragments."""

_BAR = 40
"""Characters of a bar of all of a rank's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One layer option, the same in all layers, on groups of ``p`` ranks.

    ``kept_bytes`` and ``transient_bytes`` are those of a layer for each token: kept for the
    backward, and in passing. ``longest`` are the most tokens that fit. The other fields are of one
    sequence of the length that was asked for: how its weights are held, its seconds, and the peak
    bytes of a rank.
    """

    p: int
    option: LayerOption
    kept_bytes: float
    transient_bytes: float
    longest: int
    working: Working
    forward_s: float
    backward_s: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """What a group runs at once where iterations choose their own samples: ``samples`` of
    ``length`` tokens each on ``ranks`` ranks, in ``seconds``."""

    ranks: int
    samples: int
    length: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"a launch of an iteration: {counted(self.samples, 'sample')} of {self.length:,} "
            f"tokens on {counted(self.ranks, 'rank')}, {seconds_text(self.seconds)}"
        )


def rehearse(config_path: Path, flags: RehearseFlags) -> int:
    """Play one rank of a job alone, and print which sequences fit and how long a step takes;
    returns the exit code."""
    keys = {
        "devices.ranks": flags.ranks,
        "devices.hardware": flags.hardware,
        "devices.implementation": flags.implementation,
    }
    config = Config.load(config_path, *overrides(flags.changes, keys))
    if config.planner.costs == "hybrid":
        wanted = "'quadratic': a rehearsal measures too few lengths for a forest"
        raise ConfigError("planner.costs", got="'hybrid'", wanted=wanted)
    length = parse_count(flags.length) if flags.length else config.data.context
    if length < 1:
        raise ConfigError("--length", got=length, wanted=">= 1 token")
    if flags.costs is not None and not flags.costs.absolute().parent.is_dir():
        raise ConfigError("--costs", got=flags.costs, wanted="a file in a folder that exists")
    played = _rehearsal(config, flags)
    tell(
        f"rehearsing rank {played.rank} of {played.ranks} on {played.hardware}: "
        + (
            "shapes only, seconds from a roofline"
            if played.device is None
            else f"kernels run on {played.device}, collectives are modelled"
        )
    )
    cluster = Cluster(
        devices=played.ranks,
        device=played.hardware.device.name,
        memory_bytes=config.devices.memory_bytes or played.hardware.device.memory_bytes,
    )
    profile = played.profile(_fingerprint(played, config), cluster, ProgressLines())
    margin = config.planner.memory_margin
    costs = costs_from_profile(profile).replace(memory_margin=_MARGIN if margin is None else margin)
    if flags.costs is not None:
        costs.save(flags.costs)
        tell(f"costs for headrace plan in {flags.costs}")
    rows = sorted(_rows(costs, length), key=lambda row: (row.p, row.forward_s + row.backward_s))
    _check_that_something_fits(costs, rows)
    chosen = _plan_step(costs, config, length)
    launch = _launch_of(costs, config, length, most=max(row.longest for row in rows))
    parts = _memory_parts_of(costs, chosen, length) if chosen else None
    rates = None
    if chosen is not None:
        assumed = assumed_by(config, costs, precision=str(played.dtype).removeprefix("torch."))
        rates = Rates.of((length,), chosen.predicted_s, played.architecture, assumed)
    if flags.json:
        found = _json(played, costs, length, rows, chosen, parts) | {
            "forecast": None if rates is None else rates.to_json(),
            "launch": None if launch is None else asdict(launch),
        }
        print(json.dumps(found))
    else:
        _print(played, costs, length, rows, chosen, parts)
        if launch is not None:
            print(f"\n{launch}")
        if rates is not None:
            print(f"\n{rates}\nassumed: {rates.assumed}")
    return 0


def _rehearsal(config: Config, flags: RehearseFlags) -> Rehearsal:
    """The rehearsal that configuration and flags ask for; raises ConfigError for ranks and sizes
    that the job does not have."""
    a = architecture_of(config)
    ranks = config.devices.ranks
    if not 0 <= flags.rank < ranks:
        raise ConfigError("--rank", got=flags.rank, wanted=f"0 to {ranks - 1}")
    wrong = [p for p in flags.sizes if not 1 <= p <= ranks]
    if wrong:
        raise ConfigError("--sizes", got=wrong[0], wanted=f"1 to {ranks}")
    hardware = Hardware.parse(config.devices.hardware or "cpu")
    kernels = Implementation.named(config.devices.implementation)
    hardware = replace(hardware, device=kernels.applied(hardware.device))
    _, methods = considered(config.planner, a, ranks, gpu=not hardware.device.is_cpu)
    length = parse_count(flags.length) if flags.length else 0
    return Rehearsal(
        architecture=a,
        hardware=hardware,
        ranks=ranks,
        rank=flags.rank,
        sizes=tuple(sorted(set(flags.sizes))) or (ranks,),
        longest=max(length, config.data.context),
        methods=methods,
        levels=config.planner.recompute,
        dtype=_dtype(flags, config, hardware),
        device=_device(flags.device),
    )


def _dtype(flags: RehearseFlags, config: Config, hardware: Hardware) -> torch.dtype:
    """The type of activations and working weights; raises ConfigError for one of which the speed of
    the hardware is not known."""
    known = hardware.device.flops_per_s
    name = flags.dtype or config.devices.dtype_on(gpu=not hardware.device.is_cpu)
    if name not in known:
        raise ConfigError("--dtype", got=repr(name), wanted=f"one of {', '.join(known)}")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), "peaks are known by torch's names"
    return dtype


def _device(name: str | None) -> str | None:
    """The device that ``--device`` has kernels run on, None for shapes alone; raises ConfigError
    for one that is not here."""
    if name not in (None, "cpu", "cuda"):
        raise ConfigError("--device", got=repr(name), wanted="cpu or cuda, or left out")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device", got="cuda without a CUDA device", hint="leave it out")
    return name


def _fingerprint(played: Rehearsal, config: Config) -> str:
    """Text of all that the costs of a rehearsal depend on."""
    return fingerprint_of(
        source="rehearsal",
        model=played.architecture,
        ranks=played.ranks,
        rank=played.rank,
        hardware=played.hardware,
        implementation=config.devices.implementation,
        dtype=str(played.dtype).removeprefix("torch."),
        device=played.device or "none",
        torch=torch.__version__,
    )


def _rows(costs: CostModel, length: int) -> Iterator[_Row]:
    """A row for each group size and each layer option with one method for both attention and
    feed-forward. The weights of the sequence of ``length`` tokens are replicated where it fits so,
    else sharded."""
    a = costs.shape
    for p, options in costs.options.items():
        for text, cost in options.items():
            option = LayerOption.parse(text)
            if option.attention != option.feed_forward:
                continue
            layers = LayerPlan.uniform(option, a.layers)
            fits: dict[Working, int] = {
                working: costs.max_tokens(p, layers, working)
                for working in ("replicated", "sharded")
            }
            working: Working = "replicated" if fits["replicated"] >= length else "sharded"
            forward_s, backward_s = costs.micro_batch_s([length], p, layers, working)
            yield _Row(
                p=p,
                option=option,
                kept_bytes=cost.kept.slope,
                transient_bytes=cost.transient.slope,
                longest=max(fits.values()),
                working=working,
                forward_s=forward_s,
                backward_s=backward_s,
                peak_bytes=costs.micro_batch_bytes(length, p, layers, working),
            )


def _check_that_something_fits(costs: CostModel, rows: list[_Row]) -> None:
    """Raise InfeasiblePlan where no layer option holds even one token."""
    if any(row.longest for row in rows):
        return
    least = min(costs.state_bytes + costs.held_bytes((p,), "sharded") for p in costs.group_sizes)
    raise InfeasiblePlan(
        f"no sequence fits on {costs.cluster}",
        got=f"{bytes_text(least)} for weights, gradients and optimizer alone",
        wanted=f"less than {bytes_text(costs.capacity_bytes)}",
        hint="more ranks, larger groups (--sizes), or hardware with more memory",
    )


def _plan_step(costs: CostModel, config: Config, length: int) -> Plan | None:
    """The plan of a step of one sequence of ``length`` tokens; None when it fits nowhere."""
    try:
        problem = make_problem(costs, config.planner.model_copy(update={"group_sizes": ()}))
        return plan((length,), problem)
    except InfeasiblePlan:
        return None


def _launch_of(costs: CostModel, config: Config, length: int, *, most: int) -> _Launch | None:
    """The launch with the most tokens per second and device, if all samples have ``length`` tokens
    and no group holds more than ``most`` tokens. None where a sample does not fit, and where the
    configuration does not let iterations choose their own samples."""
    options = config.data.iterations
    if options is None or most < length:
        return None
    problem = make_problem(costs, config.planner.model_copy(update={"group_sizes": ()}))
    samples = [length] * (most // length)
    # One bucket of lengths, as all samples are of one length: so one setting.
    (setting,) = IterationDrawer(problem, samples, options.options(config.run.seed)).settings
    return _Launch(
        ranks=setting.width, samples=setting.batch, length=length, seconds=setting.mean_s
    )


def _memory_parts_of(costs: CostModel, chosen: Plan, length: int) -> MemoryParts:
    """What fills a rank's memory while it runs the one sequence of ``length`` tokens of the chosen
    plan, in bytes."""
    micro = chosen.micro_batches[0]
    p = len(chosen.pipelines[micro.pipeline].ranks)
    return memory_parts(costs, length, p, micro.layers, chosen.working)


def _json(
    played: Rehearsal,
    costs: CostModel,
    length: int,
    rows: list[_Row],
    chosen: Plan | None,
    parts: MemoryParts | None,
) -> dict[str, Any]:
    """The results of a rehearsal as JSON; ``chosen`` and ``parts`` are None where the sequence does
    not fit."""
    return {
        "architecture": played.architecture.to_json(),
        "hardware": str(played.hardware),
        "ranks": played.ranks,
        "rank": played.rank,
        "dtype": str(played.dtype).removeprefix("torch."),
        "device": played.device,
        "capacity_bytes": costs.capacity_bytes,
        "length": length,
        "options": [asdict(row) | {"option": str(row.option)} for row in rows],
        "plan": chosen.to_json() if chosen else None,
        "memory_bytes": asdict(parts) | {"peak": parts.peak} if parts else None,
    }


def _print(
    played: Rehearsal,
    costs: CostModel,
    length: int,
    rows: list[_Row],
    chosen: Plan | None,
    parts: MemoryParts | None,
) -> None:
    """Print the results of a rehearsal: the limits of each option, and the step and memory of the
    chosen plan where the sequence fits."""
    out = out_console()
    dtype = str(played.dtype).removeprefix("torch.")
    out.print(f"{played.architecture} in {dtype}")
    out.print(
        f"rank {played.rank} of {played.ranks} on {played.hardware}, "
        f"{bytes_text(costs.capacity_bytes)} to use of {bytes_text(costs.cluster.memory_bytes)}"
    )
    out.print(_table(rows, length))
    if chosen is None or parts is None:
        longest = max(rows, key=lambda row: row.longest)
        out.print(
            f"{length:,} tokens do not fit; the longest sequence is {longest.longest:,} tokens "
            f"({longest.option} on cp{longest.p})"
        )
        return
    _print_step(out, costs, chosen, length)
    _print_memory(out, parts)


def _table(rows: list[_Row], length: int) -> Table:
    """A table with a line for each row: the option's bytes for each token, the longest sequence in
    tokens, and seconds and peak of a sequence of ``length`` tokens."""
    table = Table(box=None, pad_edge=False)
    names = (
        "group",
        "layers",
        "kept/token",
        "passing/token",
        "longest",
        "weights",
        "forward",
        "backward",
        "peak",
    )
    for i, name in enumerate(names):
        right = i > 1 and name != "weights"
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    table.title, table.title_justify = f"longest sequence, and one of {length:,} tokens", "left"
    for row in rows:
        table.add_row(
            f"cp{row.p}",
            str(row.option),
            bytes_text(row.kept_bytes),
            bytes_text(row.transient_bytes),
            f"{row.longest:,}",
            row.working,
            seconds_text(row.forward_s),
            seconds_text(row.backward_s),
            bytes_text(row.peak_bytes),
        )
    return table


def _print_step(out: Console, costs: CostModel, chosen: Plan, length: int) -> None:
    """Print how long the step of the one sequence takes and how it is spread."""
    micro, exchange = chosen.micro_batches[0], costs.exchange_s
    out.print(
        f"\na step of one sequence of {length:,} tokens: {seconds_text(chosen.predicted_s)} on "
        f"{chosen.strategy}, {micro.layers}, weights {chosen.working} (pull "
        f"{seconds_text(exchange.pull_s)}, push {seconds_text(exchange.push_s)}, update "
        f"{seconds_text(exchange.update_s)})"
    )


def _print_memory(out: Console, parts: MemoryParts) -> None:
    """Print what a rank's memory holds at the peak, with a bar for each part."""
    named = {
        "stored weights, gradients, optimizer": parts.stored,
        "working weights and gradients": parts.working,
        "kept by the layers": parts.layers,
        "kept by the ends": parts.ends,
        "in passing": parts.passing,
        "free": max(0, parts.free),
    }
    total = max(1, sum(named.values()))
    for name, count in named.items():
        cells = round(_BAR * count / total)
        bar = ("." if name == "free" else "#") * cells
        out.print(f"{name:<38}{bytes_text(count):>10}  {bar}", markup=False)
