"""The command line: ``headrace COMMAND``. Data goes to stdout, the rest to stderr.

Commands import what they need when they run, so that planning works without torch and ``--help``
is quick.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from headrace.cli.app import Changes, Json, app, errors
from headrace.cli.foresight import plan, profile, rehearse, simulate
from headrace.errors import HeadraceError, MissingExtra

__all__ = ["app", "main", "plan", "profile", "rehearse", "simulate"]


@app.command
def train(
    config: Path,
    *,
    ranks: int | None = None,
    steps: int | None = None,
    out: Path | None = None,
    resume: Annotated[bool, Parameter(negative="")] = False,
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
    out
        Folder of the run; a new one under run.out when left out.
    resume
        Continue the run in OUT, or the newest run of this name, from its last checkpoint, on any
        number of ranks.
    """
    from headrace.cli.train import train as run

    return run(config, ranks=ranks, steps=steps, out=out, resume=resume, changes=changes)


@app.command
def report(
    run: Path, *, out: Path | None = None, text: Annotated[bool, Parameter(negative="")] = False
) -> int:
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
    from headrace.cli.report import report as write

    return write(run, out=out, text=text)


@app.command
def verify(
    what: Literal["native", "checkpoint"] = "native",
    path: Path | None = None,
    *,
    ranks: Annotated[list[int], Parameter(consume_multiple=True, negative="")] = [1, 2, 3, 4],  # noqa: B006
    steps: int = 3,
    seed: int = 0,
    tolerance: float = 1e-10,
    methods: Annotated[list[str], Parameter(consume_multiple=True, negative="")] = [],  # noqa: B006
) -> int:
    """Prove that what runs here is exact, or that a checkpoint is whole.

    ``native`` runs random plans (mixed group sizes, methods, token orders, packing, recompute) in
    fp64 on several ranks and compares the loss and every gradient with one plain process;
    ``checkpoint`` reads every file of a checkpoint and compares checksums:

        headrace verify native --ranks 2 4
        headrace verify native --methods all --ranks 2 4
        headrace verify native --methods metp megatron_ts
        headrace verify checkpoint runs/python-sources/checkpoints

    Parameters
    ----------
    what
        What to verify.
    path
        The checkpoint, or a folder of checkpoints.
    ranks
        Numbers of ranks to try.
    steps
        Random batches for each model and number of ranks.
    seed
        Seed of weights, documents and plans.
    tolerance
        Largest relative error; above it the exit code is 1.
    methods
        Methods to verify one by one, "all" for each; a mix of all is always verified.
    """
    from headrace.cli.verify import verify as run

    return run(
        what, path, ranks=ranks, steps=steps, seed=seed, tolerance=tolerance, methods=methods
    )


@app.command
def export(run: Path, *, out: Path) -> int:
    """Write the weights of a run's last checkpoint in the Hugging Face naming.

        headrace export runs/python-sources --out my-model

    Parameters
    ----------
    run
        Folder of the run.
    out
        Folder for model.safetensors and config.json.
    """
    from headrace.cli.export import export as write

    return write(run, out=out)


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
def config(*, schema: Annotated[bool, Parameter(negative="")] = False) -> int:
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 for a failed check, 2 for a user's mistake."""
    try:
        code = app(arguments, result_action="return_value")
    except HeadraceError as error:
        errors.print(f"[bold red]error:[/] {_escaped(str(error))}", soft_wrap=True)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "psutil", "safetensors"):
            raise
        missing = MissingExtra(error.name, extra="train", needed_for="this command")
        errors.print(f"[bold red]error:[/] {_escaped(str(missing))}", soft_wrap=True)
        return 2
    except BrokenPipeError:
        # The reader has seen enough (| head); nothing more can be written, at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 130
    return code if isinstance(code, int) else 0


def run() -> None:
    """Entry point of the ``headrace`` script."""
    sys.exit(main())


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")
