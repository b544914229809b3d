"""The commands that look ahead: plan, simulate, profile and rehearse. As all commands they import
what they need when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headrace.cli.app import Changes, Json, app

__all__ = ["plan", "profile", "rehearse", "simulate"]


@app.command
def plan(
    config: Path | None = None,
    *,
    batches: int = 1,
    ranks: int | None = None,
    lengths: str | None = None,
    costs: Path | None = None,
    hardware: str | None = None,
    devices: int | None = None,
    planner: str | None = None,
    semantics: str | None = None,
    picture: Path | None = None,
    seed: int = 0,
    json: Json = False,
    changes: Changes = [],  # noqa: B006
) -> int:
    """Plan batches and say why; needs no torch and no devices.

    Costs are those measured for this configuration by profile or train; without them, a formula
    (and the output says so), or the roofline of hardware that is not at hand:

        headrace plan examples/python-sources.toml --ranks 8
        headrace plan examples/python-sources.toml --ranks 64 --hardware h100
        headrace plan examples/python-sources.toml --ranks 64 --lengths "lognormal:median=700,sigma=1.5,max=8192"

    Without a configuration, costs and lengths come from files: costs of pipelines of schemes, or
    of groups of ranks; --json writes a plan file that anyone can check:

        headrace plan --costs costs.json --lengths lengths.json --devices 64 --json > plan.json
        headrace plan --costs groups.json --lengths lengths.json --devices 8 --semantics lockstep

    Both draw the plan that takes longest, devices over time and lengths by scheme:

        headrace plan --costs costs.json --lengths lengths.json --devices 64 --picture plan.svg

    Parameters
    ----------
    config
        The configuration, a TOML file; left out, --costs, --lengths and --devices are needed.
    batches
        How many batches to plan.
    ranks
        Devices to plan for (devices.ranks).
    lengths
        Draw lengths from a distribution instead of reading the corpus; without a configuration a
        JSON file of lengths.
    costs
        A cost model, as written by profile --json; without a configuration a JSON file of kind
        pipelines or groups.
    hardware
        Devices and links to plan for, DEVICE[+INSIDE][+ACROSS], by data sheets: h100,
        a100-80g+pcie4 (devices.hardware).
    devices
        Devices to plan for, without a configuration.
    planner
        Without a configuration: headrace, or one that it is compared with; for pipelines
        hydraulis, static, max-length, token-balance or switching, for groups static, best-static,
        karmarkar-karp, dp-balanced, hybrid-cp, bucket, packed or dcp.
    semantics
        Without a configuration, for groups: free (a group starts when its ranks are) or lockstep.
    picture
        Draw the plan that takes longest to a .svg, .png or .json file.
    seed
        Seed of the drawn lengths, and of planners that draw.
    """  # noqa: E501
    from headrace.cli.plan import plan as run

    if config is None:
        from headrace.cli.plan_files import PlanFiles, plan_files

        _only("a CONFIG", ranks=ranks, hardware=hardware, set=changes or None,
              batches=None if batches == 1 else batches)  # fmt: skip
        return plan_files(
            PlanFiles(
                costs=costs, lengths=lengths, devices=devices, planner=planner,
                semantics=semantics, picture=picture, seed=seed, as_json=json,
            )
        )  # fmt: skip
    _only(
        "no configuration beside it", "with one, --set changes it (planner.name, devices.ranks)",
        devices=devices, planner=planner, semantics=semantics,
    )  # fmt: skip
    return run(
        config, batches=batches, ranks=ranks, lengths=lengths, costs=costs, hardware=hardware,
        picture=picture, seed=seed, as_json=json, changes=changes,
    )  # fmt: skip


def _only(wanted: str, hint: str | None = None, /, **flags: object) -> None:
    """Raise ConfigError for a flag that is given and would not be obeyed."""
    from headrace.errors import ConfigError

    for name, value in flags.items():
        if value is not None:
            raise ConfigError(f"--{name}", got=repr(str(value)), wanted=wanted, hint=hint)


@app.command
def simulate(
    source: Path,
    *,
    batches: int = 1,
    ranks: int | None = None,
    lengths: str | None = None,
    costs: Path | None = None,
    hardware: str | None = None,
    trace: Path | None = None,
    programs: Annotated[bool, Parameter(negative="")] = False,
    seed: int = 0,
    json: Json = False,
    changes: Changes = [],  # noqa: B006
) -> int:
    """Run the programs of planned batches on a clock instead of devices.

    Shows every rank's timeline and memory as predicted, and checks the programs:

        headrace simulate examples/python-sources.toml --ranks 4 --trace step.json

    Parameters
    ----------
    source
        A configuration.
    batches
        How many batches to simulate.
    ranks
        Devices to plan for (devices.ranks).
    lengths
        Draw lengths from a distribution instead of reading the corpus.
    costs
        A cost model, as written by profile --json.
    hardware
        Devices and links to plan for, DEVICE[+INSIDE][+ACROSS], by data sheets: h100,
        a100-80g+pcie4 (devices.hardware).
    trace
        Write a Chrome trace of all batches (opens in Perfetto).
    programs
        Print the actions of every rank.
    seed
        Seed of the drawn lengths.
    """
    from headrace.cli.plan import simulate as run

    return run(
        source, batches=batches, ranks=ranks, lengths=lengths, costs=costs, hardware=hardware,
        trace=trace, programs=programs, seed=seed, as_json=json, changes=changes,
    )  # fmt: skip


@app.command
def profile(
    config: Path,
    *,
    ranks: int | None = None,
    fresh: Annotated[bool, Parameter(negative="")] = False,
    hybrid: Annotated[bool, Parameter(negative="")] = False,
    json: Json = False,
    changes: Changes = [],  # noqa: B006
) -> int:
    """Measure what a layer costs on these devices, per group size and recompute level.

    Ends with the longest documents that fit (MaxLen) and the shortest that keep a group busy
    (UtilLen). The result is cached; train measures the same when it starts:

        headrace profile examples/python-sources.toml
        headrace profile examples/python-sources.toml --hybrid
        headrace profile examples/python-sources.toml --ranks 4 --json > costs.json

    Parameters
    ----------
    config
        The configuration, a TOML file.
    ranks
        Processes to start (devices.ranks).
    fresh
        Measure again even when a profile is cached.
    hybrid
        Fit random forests within the profiled lengths and polynomials beyond them too (needs
        scikit-learn).
    """
    from headrace.cli.profile import profile as run

    return run(
        config, ranks=ranks, fresh=fresh, hybrid=hybrid, as_json=json, changes=changes
    )  # fmt: skip


@app.command
def rehearse(
    config: Path,
    *,
    ranks: int | None = None,
    rank: int = 0,
    sizes: tuple[int, ...] = (),
    length: str | None = None,
    hardware: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    costs: Path | None = None,
    json: Json = False,
    changes: Changes = [],  # noqa: B006
) -> int:
    """Play one rank of a job without the others: how long a sequence fits, how long a step takes.

    Methods run with tensors that have shapes only: bytes are counted exactly, seconds are a
    roofline of the hardware. With --device, kernels really run there and only collectives are
    modelled. The costs can be planned with:

        headrace rehearse examples/llama-8b.toml --ranks 8
        headrace rehearse examples/llama-8b.toml --ranks 16 --hardware a100-80g --length 1Mi
        headrace rehearse examples/llama-8b.toml --sizes 1 --sizes 8 --costs costs.json
        headrace rehearse examples/python-sources.toml --ranks 4 --device cpu

    Parameters
    ----------
    config
        The configuration, a TOML file.
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
    dtype
        Type of activations and working weights: bfloat16 where the hardware knows it.
    device
        Run kernels and hold memory here: cpu or cuda.
    costs
        Write the cost model to a file that plan and simulate read.
    """
    from headrace.cli.rehearse import RehearseOptions
    from headrace.cli.rehearse import rehearse as run

    options = RehearseOptions(
        ranks=ranks, rank=rank, sizes=sizes, length=length, hardware=hardware, dtype=dtype,
        device=device, costs=costs, as_json=json,
    )  # fmt: skip
    return run(config, options, changes)
