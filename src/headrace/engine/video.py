"""One rank's part of a run over clips: a training loop over :func:`headrace.attach`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from headrace.adopt.known_models import adapt_transformer_2d
from headrace.comm.collectives import gather_bytes
from headrace.comm.mesh import Groups
from headrace.comm.ranks import World
from headrace.config.clips_config import ClipsConfig
from headrace.engine.adopted_run import run_loop, user_optimizer
from headrace.engine.attach import Attached, attach
from headrace.engine.attach_options import MeasureOptions, SampleOptions
from headrace.engine.listener import Listener
from headrace.engine.loop_runner import LoopMicroBatch
from headrace.engine.synthetic_clips import SyntheticClips
from headrace.engine.training_run import lock_wait_s, locked
from headrace.models.transformer_2d import SHAPES_2D, Shape2D, Transformer2D
from headrace.units import count_text, counted

__all__ = ["shape_of", "train_clips"]


def shape_of(config: ClipsConfig) -> Shape2D:
    """The model's sizes: those of its preset, if it has one, where the configuration gives no
    others. Raises SpecError for sizes that contradict each other."""
    names = ("layers", "hidden", "heads", "channels")
    sizes: dict[str, Any] = {}
    preset = SHAPES_2D.get(config.model.preset or "")
    if preset:
        sizes = {name: getattr(preset, name) for name in names}
    for name in names:
        given = getattr(config.model, name)
        if given is not None:
            sizes[name] = given
    return Shape2D(**sizes)


def train_clips(
    world: World, config: ClipsConfig, folder: Path, listener: Listener, *, resume: bool
) -> None:
    """Train the Transformer-2D of a configuration on synthetic clips as one rank, in the first
    rank's ``folder``. Collective."""
    groups, first = Groups(device=world.device), world.rank == 0
    shared = Path(gather_bytes(str(folder).encode(), groups.world)[0].decode())
    wait_s = lock_wait_s(world.attempt)
    with locked(shared, wait_s=wait_s) if first else nullcontext():
        world.watcher.enter("measuring")
        run = _attach(world, config, shared, listener)
        model, channels = run.model, shape_of(config).channels

        def loss(micro: LoopMicroBatch) -> torch.Tensor:
            """This rank's part of the mean squared error of the model's noise against that of the
            clip, []: over all tokens of the step and all channels."""
            error = model(**micro.inputs) - micro.labels
            return error.square().sum() / (micro.targets * channels)

        run_loop(world, config, run, shared, listener, loss, resume=resume)


def _attach(world: World, config: ClipsConfig, folder: Path, listener: Listener) -> Attached:
    """Make the Transformer-2D, its optimizer and the synthetic clips of a configuration, and attach
    them to plans. The first rank tells what is trained. Collective."""
    dtype = torch.float64 if config.devices.dtype == "float64" else torch.float32
    shape, data, o = shape_of(config), config.data, config.optimizer
    torch.manual_seed(config.run.seed)
    model = Transformer2D(shape).to(world.device, dtype)
    clips = SyntheticClips(
        data.clips,
        dict(zip(data.sizes, data.shapes.values(), strict=True)),
        channels=shape.channels,
        seed=config.run.seed,
        dtype=dtype,
    )
    optimizer, scheduler = user_optimizer(model, o, config.run.steps)
    if world.rank == 0:
        parameters = sum(p.numel() for p in model.parameters())
        listener.tell(
            f"data          {len(clips):,} synthetic clips of {len(data.shapes)} shapes, "
            f"{count_text(int(clips.lengths.mean()))} places in the mean, at most "
            f"{count_text(int(clips.lengths.max()))}\n"
            f"model         Transformer-2D, {shape.layers} layers of {shape.hidden} features, "
            f"{count_text(parameters)} parameters\n"
            f"devices       {counted(world.ranks, 'rank')} of {world.device}\n"
            f"run           {folder}"
        )
    return attach(
        adapt_transformer_2d(model),
        optimizer,
        clips,
        batch_tokens=data.batch_tokens,
        batch_sequences=data.batch_sequences,
        scheduler=scheduler,
        clip=o.clip or None,
        steps=config.run.steps,
        seed=config.run.seed,
        planner=config.planner,
        samples=SampleOptions(lengths=clips.lengths),
        measure=MeasureOptions(
            memory=None if config.devices.memory == "auto" else config.devices.memory,
            cache=data.cache_folder,
        ),
        out=folder,
        say=listener.tell,
        on_step=lambda step: listener.step(step, ()),
    )
