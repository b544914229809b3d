"""The flags of commands that have many, one value each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from headrace.cli.app import Changes, Json, Whole
from headrace.errors import ConfigError

__all__ = [
    "ForecastFlags",
    "PlanFlags",
    "ProfileFlags",
    "RehearseFlags",
    "SimulateFlags",
    "VerifyFlags",
    "overrides",
]

Switch = Annotated[bool, Parameter(negative="")]
"""A flag without a value."""

Several = Parameter(consume_multiple=True, negative="")
"""A flag that takes all values up to the next flag."""


def overrides(changes: list[str], keys: Mapping[str, object]) -> list[str]:
    """The changes of a configuration: those of --set, then the ``keys`` whose flag was given.
    Raises ConfigError for a flag with an empty text, which would unset its key."""
    for key, value in keys.items():
        if value == "":
            hint = f"leave its flag out; --set {key}= unsets it"
            raise ConfigError(key, got="an empty text", wanted="a value", hint=hint)
    return [*changes, *(f"{key}={value}" for key, value in keys.items() if value is not None)]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags:
    """The flags of ``headrace plan``.

    Parameters
    ----------
    batches
        How many batches to plan.
    ranks
        Devices to plan for (devices.ranks).
    lengths
        Draw lengths from a distribution, a preset or a histogram (file:PATH) instead of reading the
        corpus; without a configuration a JSON file of lengths.
    costs
        A cost model, as written by profile --json; without a configuration a JSON file of kind
        pipelines or groups.
    hardware
        Devices and links to plan for, DEVICE[+INSIDE][+ACROSS], by data sheets: h100,
        a100-80g+pcie4 (devices.hardware).
    implementation
        Kernels that a forecast for hardware is of: headrace, eager, compiled, fused, ...
        (devices.implementation).
    pessimistic
        Of hardware that is not at hand, take the plan that is best in the worst case: attention or
        links 20 % slower or faster than assumed.
    devices
        Devices to plan for, without a configuration.
    planner
        headrace, or one that it is compared with: hydraulis, hydraulis-tuned, flexsp, static,
        max-length, token-balance, karmarkar-karp, dp-balanced, hybrid-cp, bucket, packed or dcp;
        with a configuration paradyse, too (planner.name); without one best-static, and for
        pipelines switching.
    semantics
        Without a configuration, for groups: free (a group starts when its ranks are) or lockstep.
    picture
        Draw the plan that takes longest to a .svg, .png or .json file.
    seed
        Seed of drawn lengths or of the corpus' order, and of planners that draw (run.seed).
    """

    batches: Whole = 1
    ranks: Whole | None = None
    lengths: str | None = None
    costs: Path | None = None
    hardware: str | None = None
    implementation: str | None = None
    pessimistic: Switch = False
    devices: Whole | None = None
    planner: str | None = None
    semantics: str | None = None
    picture: Path | None = None
    seed: Whole | None = None
    json: Json = False
    changes: Changes = field(default_factory=list)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateFlags:
    """The flags of ``headrace simulate``.

    Parameters
    ----------
    batches
        How many batches to simulate and compare.
    ranks
        Devices to plan for (devices.ranks).
    lengths
        Draw lengths from a distribution, a preset or a histogram (file:PATH) instead of reading the
        corpus.
    costs
        A cost model, as written by profile --json.
    hardware
        Devices and links to plan for, DEVICE[+INSIDE][+ACROSS], by data sheets: h100,
        a100-80g+pcie4 (devices.hardware).
    implementation
        Kernels that a forecast for hardware is of: headrace, eager, compiled, fused, ...
        (devices.implementation).
    trace
        Write a Chrome trace of all batches (opens in Perfetto).
    page
        Write the comparison of planners as a page with figures, an .html file.
    programs
        Print the actions of every rank.
    seed
        Seed of drawn lengths or of the corpus' order, and of planners that draw (run.seed).
    """

    batches: Whole = 1
    ranks: Annotated[Whole | None, Parameter(name=("--ranks", "--devices"))] = None
    lengths: str | None = None
    costs: Path | None = None
    hardware: str | None = None
    implementation: str | None = None
    trace: Path | None = None
    page: Path | None = None
    programs: Switch = False
    seed: Whole | None = None
    json: Json = False
    changes: Changes = field(default_factory=list)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastFlags:
    """The flags of ``headrace forecast``.

    Parameters
    ----------
    layout
        How the model is spread, parts joined by x: DP, ZERO1, ZERO2, FSDP, TP, CP, PP and VP, each
        with its size.
    hardware
        Devices and links, DEVICE[+INSIDE][+ACROSS]: h100, h100-96g-500w, a100-80g+pcie4.
    implementation
        Kernels that run: headrace, eager, eager-2023, compiled, fused or ideal.
    length
        Tokens of each sequence (8Ki; the context of a configuration).
    local_batch
        Sequences of a micro-batch of each group.
    accumulation
        Micro-batches of a step for each group.
    recompute
        none, selective (first products again, attention kept) or full.
    """

    layout: str
    hardware: str | None = None
    implementation: str | None = None
    length: str | None = None
    local_batch: Whole = 1
    accumulation: Whole = 1
    recompute: Literal["none", "selective", "full"] = "none"
    json: Json = False
    changes: Changes = field(default_factory=list)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileFlags:
    """The flags of ``headrace profile``.

    Parameters
    ----------
    ranks
        Processes to start (devices.ranks).
    efficiency
        Write what one device attains to a file: --hardware measured:FILE plans for many of them.
    fresh
        Measure again even when a profile is cached.
    hybrid
        Fit random forests within the profiled lengths and polynomials beyond them too, and compare
        them with the quadratics on lengths held out (needs scikit-learn).
    """

    ranks: Whole | None = None
    efficiency: Path | None = None
    fresh: Switch = False
    hybrid: Switch = False
    json: Json = False
    changes: Changes = field(default_factory=list)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class RehearseFlags:
    """The flags of ``headrace rehearse``.

    Parameters
    ----------
    ranks
        Ranks of the job (devices.ranks).
    rank
        The one to play.
    sizes
        Group sizes to play; all ranks in one group when left out.
    length
        A sequence in tokens (128Ki) whose time and memory are shown (data.context).
    hardware
        Devices and links, DEVICE[+INSIDE][+ACROSS]: h100, a100-80g+pcie4 (devices.hardware; the
        cpu when that is left out).
    implementation
        Kernels that seconds are of, where none really run: headrace, eager, compiled, fused, ...
        (devices.implementation).
    dtype
        Type of activations and working weights: bfloat16 where the hardware knows it.
    device
        Run kernels and hold memory here: cpu or cuda.
    costs
        Write the cost model to a file that plan and simulate read.
    """

    ranks: Whole | None = None
    rank: Whole = 0
    sizes: tuple[Whole, ...] = ()
    length: str | None = None
    hardware: str | None = None
    implementation: str | None = None
    dtype: str | None = None
    device: str | None = None
    costs: Path | None = None
    json: Json = False
    changes: Changes = field(default_factory=list)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyFlags:
    """The flags of ``headrace verify``.

    Parameters
    ----------
    ranks
        Numbers of ranks to try.
    steps
        Random batches for each model and number of ranks.
    seed
        Seed of weights, documents and plans.
    tolerance
        Largest relative error; above it the exit code is 1. 1e-10 for native models and those
        on shards of axes (wan 1e-6), 1e-5 for others, many of which compute in fp32 in places.
    backend
        Of models that nobody here wrote: compile them with this backend of torch.compile.
    json
        Of models that nobody here wrote: print the cases as JSON.
    methods
        Methods to verify one by one, "all" for each; a mix of all is always verified.
    """

    ranks: Annotated[tuple[Whole, ...], Several] = (1, 2, 3, 4)
    steps: Whole = 3
    seed: Whole = 0
    tolerance: float | None = None
    backend: str | None = None
    json: bool = False
    methods: Annotated[tuple[str, ...], Several] = ()
