"""Small models with axes, to verify that shards of them are exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from headrace.adopt.axis_model import AxisModel
from headrace.adopt.gradients import gradient_error
from headrace.adopt.known_models import adapt
from headrace.errors import MissingExtra
from headrace.models.transformer_2d import SHAPES_2D, Transformer2D

__all__ = [
    "EXAMPLES",
    "AxisExample",
    "cogvideox",
    "hunyuan",
    "latte",
    "ltx",
    "mochi",
    "timesformer",
    "transformer_2d",
    "wan",
]

Results = Callable[[Any], Sequence[tuple[torch.Tensor, str]]]
"""Gives (tensor, its dims as text) of each tensor in a model's result."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AxisExample:
    """A small model of several axes, to verify that shards of its axes are exact.

    Attributes:
        model: The model.
        inputs: Inputs for it, by name.
        results: Gives the tensors of a result, each with its dims; those without places of the axis
            are alike on all ranks.
        adapted: Makes the model run on shards.
        single: Whether the model computes some of its result in single precision even on fp64
            inputs, so that larger errors are rounding.
    """

    model: torch.nn.Module
    inputs: Mapping[str, Any]
    results: Results
    adapted: Callable[[torch.nn.Module], AxisModel] = field(default=adapt)
    single: bool = False

    def errors(self, alone: torch.nn.Module) -> tuple[float, float]:
        """How far the model on all ranks is from the same model on one. Collective.

        The loss is a sum of all values of the results, with weights that are drawn.

        Args:
            alone: A copy of the model, which runs on this rank alone.

        Returns:
            Relative errors, of the loss and of the worst gradient.

        Raises:
            ModelError: For a model that cannot run on shards.
        """
        whole = self.results(alone(**self.inputs))
        generator = torch.Generator().manual_seed(len(whole))
        weights = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x, _ in whole]
        sums = [(x * w).sum() for (x, _), w in zip(whole, weights, strict=True)]
        wanted = torch.stack(sums).sum()
        wanted.backward()
        run = self.adapted(self.model)
        run.check = False  # a probe would raise where the error is to be measured
        out = run(**run.shard(self.inputs))
        loss = torch.zeros(())
        for (x, dims), weight in zip(self.results(out), weights, strict=True):
            part = (x * run.local(weight, dims)).sum()
            # What the ``mates`` ranks with the same samples all have whole counts once in the sum.
            loss = loss + (part if run.is_sharded(dims) else part / run.mates)
        run.backward(loss)
        total = float(run.add_up(loss))
        run.detach()
        grads = ([p.grad for p in model.parameters()] for model in (self.model, alone))
        return abs(total / float(wanted.detach()) - 1), gradient_error(*grads)


def latte(
    frames: int = 5, side: int = 6, samples: int = 2, *, checkpoints: bool = False
) -> AxisExample:
    """A small Latte of diffusers in fp64. Raises MissingExtra without it."""
    try:
        from diffusers.models.transformers.latte_transformer_3d import LatteTransformer3DModel
    except ImportError:
        raise MissingExtra("diffusers", extra="video", needed_for="Latte") from None
    torch.manual_seed(0)
    model: Any = LatteTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        cross_attention_dim=16,
        caption_channels=12,
        sample_size=side,
        patch_size=2,
        video_length=frames,
        attention_bias=True,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
    )
    model = model.double().train()
    if checkpoints:
        model.enable_gradient_checkpointing()
    video = torch.randn(samples, 4, frames, side, side, dtype=torch.float64)
    return AxisExample(
        model=model,
        inputs={
            "hidden_states": video,
            "timestep": torch.randint(0, 1000, (samples,)),
            "encoder_hidden_states": torch.randn(samples, 3, 12, dtype=torch.float64),
        },
        results=lambda out: [(out.sample, "b c t y x")],
    )


def timesformer(
    frames: int = 5, side: int = 20, samples: int = 2, *, checkpoints: bool = False
) -> AxisExample:
    """A small TimeSformer of transformers in fp64; its result is the patches and, in front of them,
    the token of the clip. Raises MissingExtra without it."""
    try:
        from transformers import TimesformerConfig, TimesformerModel
    except ImportError:
        raise MissingExtra("transformers", extra="video", needed_for="TimeSformer") from None
    torch.manual_seed(0)
    config = TimesformerConfig(
        image_size=side,
        patch_size=4,
        num_frames=frames,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
    )
    model: Any = TimesformerModel(config).double().train()
    if checkpoints:
        model.activation_checkpointing_enable()
    clip = torch.randn(samples, frames, 3, side, side, dtype=torch.float64)
    return AxisExample(
        model=model,
        inputs={"pixel_values": clip},
        results=lambda out: [
            (out.last_hidden_state[:, 1:], "b (h w t) d"),
            (out.last_hidden_state[:, :1], "b k d"),
        ],
    )


def wan(
    frames: int = 5,
    side: int = 6,
    samples: int = 2,
    *,
    checkpoints: bool = False,
    steps_of_places: bool = False,
) -> AxisExample:
    """A small Wan of diffusers, which takes norms in single precision. With ``steps_of_places``
    each place has its own timestep, as in TI2V, else each sample has. Raises MissingExtra without
    diffusers."""
    try:
        from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
    except ImportError:
        raise MissingExtra("diffusers", extra="video", needed_for="Wan") from None
    torch.manual_seed(0)
    model: Any = WanTransformer3DModel(
        num_attention_heads=3,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        ffn_dim=24,
        text_dim=12,
        freq_dim=16,
        rope_max_seq_len=32,
    )
    model = model.double().train()
    if checkpoints:
        model.enable_gradient_checkpointing()
    step_shape = (samples, frames * (side // 2) ** 2) if steps_of_places else (samples,)
    return AxisExample(
        model=model,
        single=True,
        inputs={
            "hidden_states": torch.randn(samples, 4, frames, side, side, dtype=torch.float64),
            "timestep": torch.randint(0, 1000, step_shape),
            "encoder_hidden_states": torch.randn(samples, 3, 12, dtype=torch.float64),
        },
        results=lambda out: [(out.sample, "b c t y x")],
    )


def cogvideox(
    frames: int = 5,
    side: int = 6,
    samples: int = 2,
    *,
    checkpoints: bool = False,
    rotary: bool = True,
) -> AxisExample:
    """A small CogVideoX of diffusers in fp64, with rotary positions as the 5B has, or added ones as
    the 2B. Raises MissingExtra without diffusers."""
    try:
        from diffusers.models.transformers.cogvideox_transformer_3d import (
            CogVideoXTransformer3DModel,
        )
    except ImportError:
        raise MissingExtra("diffusers", extra="video", needed_for="CogVideoX") from None
    torch.manual_seed(0)
    words, places = 4, frames * (side // 2) ** 2
    model: Any = CogVideoXTransformer3DModel(
        num_attention_heads=3,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=12,
        num_layers=2,
        sample_width=side,
        sample_height=side,
        max_text_seq_length=words,
        use_rotary_positional_embeddings=rotary,
    )
    model = model.double().train()
    if checkpoints:
        model.enable_gradient_checkpointing()
    angles = torch.randn(places, 16, dtype=torch.float64)
    positions = {"image_rotary_emb": (angles.cos(), angles.sin())} if rotary else {}
    return AxisExample(
        model=model,
        inputs={
            "hidden_states": torch.randn(samples, frames, 4, side, side, dtype=torch.float64),
            "timestep": torch.randint(0, 1000, (samples,)),
            "encoder_hidden_states": torch.randn(samples, words, 12, dtype=torch.float64),
            **positions,
        },
        results=lambda out: [(out.sample, "b t c y x")],
    )


def hunyuan(
    frames: int = 5, side: int = 6, samples: int = 2, *, checkpoints: bool = False
) -> AxisExample:
    """A small HunyuanVideo of diffusers in fp64; two of six words are padding. Raises MissingExtra
    without diffusers."""
    try:
        from diffusers.models.transformers.transformer_hunyuan_video import (
            HunyuanVideoTransformer3DModel,
        )
    except ImportError:
        raise MissingExtra("diffusers", extra="video", needed_for="HunyuanVideo") from None
    torch.manual_seed(0)
    model: Any = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=3,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=12,
        pooled_projection_dim=8,
        rope_axes_dim=(4, 6, 6),
    )
    model = model.double().train()
    if checkpoints:
        model.enable_gradient_checkpointing()
    return AxisExample(
        model=model,
        inputs={
            "hidden_states": torch.randn(samples, 4, frames, side, side, dtype=torch.float64),
            "timestep": torch.randint(0, 1000, (samples,)),
            "encoder_hidden_states": torch.randn(samples, 6, 12, dtype=torch.float64),
            "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]] * samples),
            "pooled_projections": torch.randn(samples, 8, dtype=torch.float64),
            "guidance": torch.full((samples,), 6.0, dtype=torch.float64),
        },
        results=lambda out: [(out.sample, "b c t y x")],
    )


def ltx(
    frames: int = 5, side: int = 3, samples: int = 2, *, checkpoints: bool = False
) -> AxisExample:
    """A small LTX-Video of diffusers in fp64. Raises MissingExtra without it."""
    try:
        from diffusers.models.transformers.transformer_ltx import LTXVideoTransformer3DModel
    except ImportError:
        raise MissingExtra("diffusers", extra="video", needed_for="LTX-Video") from None
    torch.manual_seed(0)
    model: Any = LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=3,
        attention_head_dim=8,
        cross_attention_dim=24,
        num_layers=2,
        caption_channels=12,
    )
    model = model.double().train()
    if checkpoints:
        model.enable_gradient_checkpointing()
    word_mask = torch.tensor([[1, 1, 1]] + [[1, 1, 0]] * (samples - 1))
    return AxisExample(
        model=model,
        inputs={
            "hidden_states": torch.randn(samples, frames * side * side, 4, dtype=torch.float64),
            "timestep": torch.randint(0, 1000, (samples,)),
            "encoder_hidden_states": torch.randn(samples, 3, 12, dtype=torch.float64),
            "encoder_attention_mask": word_mask,
            "num_frames": frames,
            "height": side,
            "width": side,
        },
        results=lambda out: [(out.sample, "b s c")],
    )


def mochi(
    frames: int = 5, side: int = 6, samples: int = 2, *, checkpoints: bool = False
) -> AxisExample:
    """A small Mochi of diffusers, some of whose numbers are in single precision; two of six words
    are padding. Raises MissingExtra without diffusers."""
    try:
        from diffusers.models.transformers.transformer_mochi import MochiTransformer3DModel
    except ImportError:
        raise MissingExtra("diffusers", extra="video", needed_for="Mochi") from None
    torch.manual_seed(0)
    model: Any = MochiTransformer3DModel(
        num_attention_heads=3,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=8,
        in_channels=4,
        text_embed_dim=16,
        time_embed_dim=8,
    )
    model = model.double().train()
    if checkpoints:
        model.enable_gradient_checkpointing()
    return AxisExample(
        model=model,
        single=True,
        inputs={
            "hidden_states": torch.randn(samples, 4, frames, side, side, dtype=torch.float64),
            "timestep": torch.randint(0, 1000, (samples,)),
            "encoder_hidden_states": torch.randn(samples, 6, 16, dtype=torch.float64),
            "encoder_attention_mask": torch.tensor([[True] * 4 + [False] * 2] * samples),
        },
        results=lambda out: [(out.sample, "b c t y x")],
    )


def transformer_2d(frames: int = 5, patches: int = 6, samples: int = 2) -> AxisExample:
    """A small Transformer-2D in fp64."""
    torch.manual_seed(0)
    model = Transformer2D(SHAPES_2D["tiny"]).double()
    return AxisExample(
        model=model,
        inputs={
            "x": torch.randn(samples, frames, patches, 4, dtype=torch.float64),
            "timestep": torch.randint(0, 1000, (samples,)),
            "frames": torch.arange(frames),
            "patches": torch.arange(patches),
        },
        results=lambda out: [(out, "b t s c")],
    )


EXAMPLES: dict[str, dict[str, Callable[[], AxisExample]]] = {
    name: {"5 frames": make, "one frame, 4 samples": partial(make, frames=1, samples=4)}
    for name, make in (
        ("cogvideox", cogvideox),
        ("hunyuan", hunyuan),
        ("latte", latte),
        ("ltx", ltx),
        ("mochi", mochi),
        ("timesformer", timesformer),
        ("transformer-2d", transformer_2d),
        ("wan", wan),
    )
}
"""The examples of each model: functions that make them, by the name of the model, which the command
line takes, and that of the case."""

EXAMPLES["cogvideox"]["4 frames, added positions"] = partial(cogvideox, frames=4, rotary=False)
EXAMPLES["cogvideox"]["3 frames, recomputed"] = partial(cogvideox, frames=3, checkpoints=True)
EXAMPLES["hunyuan"]["3 frames, recomputed"] = partial(hunyuan, frames=3, checkpoints=True)
EXAMPLES["mochi"]["3 frames, recomputed"] = partial(mochi, frames=3, checkpoints=True)
EXAMPLES["latte"]["4 frames, recomputed"] = partial(latte, frames=4, checkpoints=True)
EXAMPLES["timesformer"]["4 frames, recomputed"] = partial(timesformer, frames=4, checkpoints=True)
EXAMPLES["wan"]["4 frames, recomputed"] = partial(wan, frames=4, checkpoints=True)
EXAMPLES["wan"]["a step of each place"] = partial(wan, steps_of_places=True)
EXAMPLES["ltx"]["2 frames, recomputed"] = partial(ltx, frames=2, checkpoints=True)
