"""``headrace train``: a run with progress on the terminal, and its report."""

from __future__ import annotations

import shlex
import signal
from functools import partial
from pathlib import Path

from headrace.cli.display import Terminal, tell
from headrace.cli.foreign_models import made
from headrace.comm.launch import World
from headrace.comm.variables import number, under_torchrun
from headrace.comm.watcher import STOPPED
from headrace.config import Config
from headrace.config.clips_config import ClipsConfig
from headrace.config.model import JobConfig
from headrace.engine.rank import launch
from headrace.engine.record import require_trackers, steps_done
from headrace.engine.training import Training
from headrace.engine.training_run import TrainingRun, choose_folder
from headrace.errors import ConfigError
from headrace.native import checkpoint

__all__ = ["train"]


def train(
    config: Config | ClipsConfig, *, model: str | None, out: Path | None, resume: bool, again: str
) -> int:
    """Train; prints the path of the report (or of the run's folder) to stdout, and returns the exit
    code. ``model`` names the factory of an adopted model; ``again`` is the command of this run
    without ``--out`` and ``--resume``, for people who go on with it."""
    factory = None if model is None else partial(made, model)
    if isinstance(config, ClipsConfig):
        from headrace.engine.video import shape_of, train_clips

        shape_of(config)  # raises before any rank is started
        if factory is not None:
            raise ConfigError("--model", got=model, wanted="a configuration over tokens")
    folder = choose_folder(config, out, resume=resume)
    require_trackers(tensorboard=config.report.tensorboard, wandb=config.report.wandb)
    ranks_here: list[int] = []

    def main(world: World) -> int:
        """Train on this rank, with progress on its terminal."""
        ranks_here.append(world.rank)
        if isinstance(config, ClipsConfig):
            train_clips(world, config, folder, Terminal(), resume=resume)
        else:
            Training(config=config, folder=folder, resume=resume, model=factory)(world, Terminal())
        return 0

    code = launch(config, main)
    # Whether this process prints: as rank 0 under torchrun, else as the one that started the ranks
    # and is none of them.
    speaks = ranks_here in ([], [0])
    if code >= STOPPED and speaks:  # not ended by a mistake that would be made again
        why = "interrupted" if code == 128 + signal.SIGINT else "stopped"
        out_again = shlex.quote(str(folder))
        tell(
            f"{why}{_where_it_stands(folder)}; continue with: {_launch_command(again)} "
            f"--out {out_again} --resume"
        )
    # The ranks have parted: nobody waits while the report is drawn.
    if code == 0 and speaks:
        _finish(TrainingRun(folder), config)
    return code


def _launch_command(again: str) -> str:
    """The command ``again``, under torchrun where this process was started by it."""
    if not under_torchrun():
        return again
    local_ranks, ranks = number("LOCAL_WORLD_SIZE", 1), number("WORLD_SIZE")
    where = "" if local_ranks == ranks else "(on each node, with the options of before) "
    return f"{where}torchrun --nproc-per-node {local_ranks} -m {again}"


def _where_it_stands(folder: Path) -> str:
    """In words, which follow "stopped": after which step a run ended, and its last checkpoint."""
    done, newest = steps_done(folder), checkpoint.latest(folder / "checkpoints")
    if newest is None:
        return (
            f" after step {done}; no checkpoint was written" if done else " before its first step"
        )
    again = ", later steps are taken again" if checkpoint.step_of(newest) != done else ""
    return f" after step {done}; checkpoint {newest}{again}"


def _finish(run: TrainingRun, config: JobConfig) -> None:
    """Say where a run's checkpoint and metrics are, and print where its report is: made now, or
    its folder where the configuration wants none."""
    tell(f"checkpoint    {checkpoint.latest(run.folder / 'checkpoints')}")
    tell(f"metrics       {run.folder / 'metrics.jsonl'}")
    print(run.report() if config.report.html else run.folder, flush=True)
