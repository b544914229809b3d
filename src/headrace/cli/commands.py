"""The commands. They import what they need when they run, so that planning works without torch and
``--help`` is quick."""

from __future__ import annotations

import shlex
from pathlib import Path

from headrace.cli.app import Changes, Json, Whole, app
from headrace.cli.flags import (
    ForecastFlags,
    PlanFlags,
    ProfileFlags,
    RehearseFlags,
    SimulateFlags,
    Switch,
    VerifyFlags,
    overrides,
)

__all__ = [
    "config",
    "doctor",
    "export",
    "forecast",
    "papers",
    "plan",
    "profile",
    "rehearse",
    "report",
    "simulate",
    "train",
    "verify",
]

_PLAN, _SIMULATE, _PROFILE = PlanFlags(), SimulateFlags(), ProfileFlags()
_REHEARSE, _VERIFY = RehearseFlags(), VerifyFlags()


@app.command
def train(
    config: Path,
    *,
    ranks: Whole | None = None,
    steps: Whole | None = None,
    model: str | None = None,
    out: Path | None = None,
    resume: Switch = False,
    changes: Changes = [],  # noqa: B006
) -> int:
    """Train a model on a corpus; ends with a checkpoint, metrics and a report.

    Starts its own ranks on this machine, or runs as one rank under torchrun:

        headrace train examples/python-sources.toml --ranks 2
        torchrun --nproc-per-node 8 -m headrace train my.toml

    Parameters
    ----------
    config
        The configuration, a TOML file.
    ranks
        Processes to start (devices.ranks).
    steps
        Optimizer steps in all (run.steps).
    model
        MODULE:FUNCTION, a function without arguments that makes a torch.nn.Module, in the place of
        the section [model]; this command runs its code.
    out
        Folder of the run; a new one under run.out when left out.
    resume
        Continue the run in OUT, or the newest run of this name, from its last checkpoint, on any
        number of ranks.
    """
    from headrace.cli.train_run import train as run
    from headrace.config.kinds import read_any

    read = read_any(config, overrides(changes, {"devices.ranks": ranks, "run.steps": steps}))
    command = ["headrace", "train", str(config)]
    for flag, value in {"--ranks": ranks, "--steps": steps, "--model": model}.items():
        if value is not None:
            command += [flag, str(value)]
    for change in changes:
        command += ["--set", change]
    return run(read, model=model, out=out, resume=resume, again=shlex.join(command))


@app.command
def plan(config: Path | None = None, *, flags: PlanFlags = _PLAN) -> int:
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
    """  # noqa: E501
    from headrace.cli.plan_batches import plan as run

    if config is None:
        from headrace.cli.plan_files import PlanFiles, plan_files

        _refuse(
            "a CONFIG",
            ranks=flags.ranks,
            hardware=flags.hardware,
            implementation=flags.implementation,
            pessimistic=flags.pessimistic or None,
            set=flags.changes or None,
            batches=None if flags.batches == 1 else flags.batches,
        )
        return plan_files(
            PlanFiles(
                costs=flags.costs,
                lengths=flags.lengths,
                devices=flags.devices,
                planner=flags.planner,
                semantics=flags.semantics,
                picture=flags.picture,
                seed=flags.seed or 0,
                as_json=flags.json,
            )
        )
    wanted = "no configuration beside it"
    _refuse(wanted, "with one, --ranks says how many", devices=flags.devices)
    _refuse(wanted, "with one, groups are free", semantics=flags.semantics)
    return run(config, flags)


def _refuse(wanted: str, hint: str | None = None, /, **flags: object) -> None:
    """Raise ConfigError, which says ``wanted`` and ``hint``, for the first of ``flags`` that is
    given (not None): it would not be obeyed."""
    from headrace.errors import ConfigError

    for name, value in flags.items():
        if value is not None:
            raise ConfigError(f"--{name}", got=repr(str(value)), wanted=wanted, hint=hint)


@app.command
def simulate(source: Path, *, flags: SimulateFlags = _SIMULATE) -> int:
    """Run planned batches on a clock instead of devices, and compare them with other planners.

    Shows timelines and memory of the first batch's ranks as predicted, and checks the programs.
    Then the seconds of all batches, beside the best single group size, bucket and packed parallel,
    as a table, as JSON or as a page of figures:

        headrace simulate examples/python-sources.toml --ranks 4 --trace step.json
        headrace simulate examples/llama-8b.toml --devices 64 --batches 20 --lengths file:lengths.csv --page plans.html
        headrace simulate my.toml --devices 1024 --hardware h100 --batches 20 --json > plans.json

    Parameters
    ----------
    source
        A configuration.
    """  # noqa: E501
    from headrace.cli.simulate_batches import simulate as run

    return run(source, flags)


@app.command
def forecast(model: str, *, flags: ForecastFlags) -> int:
    """Forecast what a fixed layout takes on hardware that is not at hand: seconds, tokens/s,
    memory.

    For layouts as others publish them, or as a run has them today; what headrace would do instead
    is planned by plan. The last line says what the answer assumes:

        headrace forecast llama-8b --hardware h100 --layout "FSDP 8" --local-batch 2
        headrace forecast llama-70b --hardware h100 --layout "FSDP 32 x TP 8" --recompute full --implementation compiled
        headrace forecast examples/llama-8b.toml --hardware h200 --layout "CP 8" --length 1Mi --recompute full --json

    Parameters
    ----------
    model
        A model by its name, or a configuration, a TOML file.
    """  # noqa: E501
    from headrace.cli.forecast_layout import forecast as run

    return run(model, flags)


@app.command
def profile(config: Path, *, flags: ProfileFlags = _PROFILE) -> int:
    """Measure what a layer costs on these devices, per group size and recompute level.

    Ends with the longest documents that fit (MaxLen) and the shortest that keep a group busy
    (UtilLen). The result is cached; train measures the same when it starts:

        headrace profile examples/python-sources.toml
        headrace profile examples/python-sources.toml --hybrid
        headrace profile examples/python-sources.toml --ranks 1 --efficiency device.json
        headrace profile examples/python-sources.toml --ranks 4 --json > costs.json

    Parameters
    ----------
    config
        The configuration, a TOML file.
    """
    from headrace.cli.profile_layers import profile as run

    return run(config, flags)


@app.command
def rehearse(config: Path, *, flags: RehearseFlags = _REHEARSE) -> int:
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
    """
    from headrace.cli.rehearse import rehearse as run

    return run(config, flags)


@app.command
def report(run: Path, *, out: Path | None = None, text: Switch = False) -> int:
    """Write the report of a run: one HTML file with pictures.

        headrace report runs/python-sources

    Parameters
    ----------
    run
        Folder of the run.
    out
        The HTML file to write; report.html in the run's folder when left out.
    text
        Print a summary instead.
    """
    from headrace.cli.display import tell
    from headrace.engine.training_run import TrainingRun

    training_run = TrainingRun(run)
    if text:
        print(training_run.summary())
        return 0
    tell(f"writing the report of {run}")
    print(training_run.report(out))
    return 0


@app.command
def verify(
    what: str = "native",
    path: Path | None = None,
    *,
    flags: VerifyFlags = _VERIFY,
) -> int:
    """Prove that what runs here is exact, or that a checkpoint is whole.

    ``native`` runs random plans (mixed group sizes, methods, token orders, packing, recompute) in
    fp64 on several ranks and compares the loss and every gradient with one plain process;
    ``checkpoint`` reads every file of a checkpoint and compares checksums. Anything else is a model
    that nobody here wrote: a type of transformers (a tiny one with random weights), a folder, or
    MODULE:FUNCTION, whose code is run. Its losses and gradients with sequence parallelism are
    compared with one process'; the exit code is 0 when they are equal, 1 when not, 2 when the model
    is refused.
    ``latte``, ``wan``, ``timesformer``, ``transformer-2d`` and functions that make an AxisExample
    run on shards of their axes:

        headrace verify llama --ranks 2 4
        headrace verify latte --ranks 4
        headrace verify my_package.models:make_gpt --ranks 2 --backend inductor
        headrace verify native --ranks 2 4
        headrace verify native --methods all --ranks 2 4
        headrace verify native --methods metp megatron_ts
        headrace verify checkpoint runs/python-sources/checkpoints

    Parameters
    ----------
    what
        What to verify: native, checkpoint, or a model.
    path
        The checkpoint, or a folder of checkpoints.
    """
    from headrace.cli.verify import verify as run

    return run(what, path, flags)


@app.command
def export(run: Path, *, out: Path) -> int:
    """Write a run's last checkpoint as a model of the Hugging Face, with its tokenizer.

        headrace export runs/python-sources --out my-model

    Parameters
    ----------
    run
        Folder of the run.
    out
        Folder for model.safetensors, config.json and the files of the tokenizer.
    """
    from headrace.engine.checkpoints import Checkpoints

    print(Checkpoints(folder=run).latest().export(out))
    return 0


@app.command
def doctor(*, json: Json = False) -> int:
    """Say what is installed, what this machine has, and what will and will not work here.

    The exit code is 1 when nothing can be trained:

        headrace doctor
        headrace doctor --json
    """
    from headrace.cli.doctor import doctor as examine

    return examine(as_json=json)


@app.command
def config(*, schema: Switch = False) -> int:
    """List every key of a configuration file with its default and meaning.

    Editors complete and check files by the schema:

        headrace config
        headrace config --schema > headrace.schema.json

    Parameters
    ----------
    schema
        Write the JSON schema (for editors) instead.
    """
    from headrace.cli.reference import print_config

    return print_config(schema=schema)


@app.command
def papers(name: str | None = None, *, quick: Switch = False, out: Path | None = None) -> int:
    """Hold the claims of the papers beside what headrace gets, a row each; needs a clone.

    Each row says theirs, ours, the ratio, whether ours is measured or simulated and with which
    costs, and why, where it is behind:

        headrace papers
        headrace papers dcp --quick

    Parameters
    ----------
    name
        The paper (autosp, dcp, dsp, hydraulis, paradyse) or planner, which holds one planner for
        everything beside each paper's decisions alone; all of them when left out.
    quick
        Fewer cells and repetitions.
    out
        Folder to write the rows to, as NAME.json.
    """
    from headrace.cli.paper_claims import papers as run

    return run(name, quick=quick, out=out)
