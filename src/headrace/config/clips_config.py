"""The configuration of a run over clips: Transformer-2D on synthetic video."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from headrace.config.load import read_config
from headrace.config.model import (
    CheckpointConfig,
    DevicesConfig,
    OptimizerConfig,
    PlannerConfig,
    ReportConfig,
    RunConfig,
    cache_folder,
)
from headrace.config.section import Count, Place, Positive, Section

__all__ = ["ClipsConfig", "ClipsDataConfig", "ClipsModelConfig"]

_UNUSED: Mapping[str, tuple[str, ...]] = {
    "run": ("check_finite", "deterministic"),
    "devices": ("hardware",),
    "planner": ("strategies", "rotate", "methods", "candidates", "smoothing", "working"),
    "report": ("timelines", "tensorboard", "wandb"),
}
"""Keys that say nothing about a run over clips."""


class ClipsDataConfig(Section):
    """Clips to train on, which are synthetic: travelling waves under noise. The model learns to
    predict the noise, as diffusion models do."""

    kind: Literal["synthetic-clips"]
    """``synthetic-clips``: drawn by their numbers, the same on every machine."""

    shapes: Annotated[dict[str, Annotated[float, Field(gt=0)]], Field(min_length=1)]
    """How often each shape is drawn, as ``FRAMESxPATCHES``: ``{ "1x256" = 4, "16x144" = 1 }``;
    images have one frame."""

    clips: Positive = 10_000
    """Number of clips of one epoch."""

    batch_tokens: Count | None = None
    """Places (frames times patches) of one optimizer step (``"64Ki"``)."""

    batch_sequences: Positive | None = None
    """Clips of one optimizer step, in place of a number of places."""

    cache: Place | None = None
    """Folder of profile caches, as ``data.cache`` of other runs."""

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """(frames, patches) of each of ``shapes``, in their order."""
        return tuple((int(t), int(s)) for t, s in (text.split("x") for text in self.shapes))

    @property
    def cache_folder(self) -> Path:
        """The folder of caches: ``cache``, or the default folder where that is left out."""
        return cache_folder(self.cache)

    @field_validator("shapes")
    @classmethod
    def _read(cls, value: dict[str, float]) -> dict[str, float]:
        """Refuse names of shapes that are not FRAMESxPATCHES."""
        for text in value:
            if not re.fullmatch(r"[1-9]\d{0,5}x[1-9]\d{0,6}", text):
                raise ValueError(f"{text!r}: wanted FRAMESxPATCHES, such as '16x256'")
        return value

    @model_validator(mode="after")
    def _one_budget(self) -> ClipsDataConfig:
        """Refuse both sizes of a batch at once, or none."""
        if (self.batch_tokens is None) == (self.batch_sequences is None):
            raise ValueError("give either batch_tokens or batch_sequences")
        return self


class ClipsModelConfig(Section):
    """Transformer-2D: layers of a block over space and one over time."""

    kind: Literal["transformer-2d"]
    """The model, ``transformer-2d``."""

    preset: Literal["720m", "3b", "tiny"] | None = None
    """A shape of the paper's (DSP, Table 5), or a tiny one; the other keys change it."""

    layers: Positive | None = None
    """Number of layers, each of two blocks."""

    hidden: Positive | None = None
    """Features of a patch between layers."""

    heads: Positive | None = None
    """Number of attention heads."""

    channels: Positive | None = None
    """Number of values of a patch."""

    @model_validator(mode="after")
    def _whole(self) -> ClipsModelConfig:
        """Refuse a model without a preset that lacks a part of its shape."""
        wanted = [n for n in ("layers", "hidden", "heads") if getattr(self, n) is None]
        if self.preset is None and wanted:
            raise ValueError(f"{wanted[0]}: wanted a value, or a preset")
        return self


class ClipsConfig(Section):
    """A whole configuration. Samples of ``batch_tokens`` places are spread over ``devices.ranks``
    whose axes are switched (``headrace.adapt``), planned step by step as a loop of one's own.
    Weights and activations are float32 on every device where ``devices.dtype`` is ``auto``."""

    run: RunConfig = RunConfig()
    data: ClipsDataConfig
    model: ClipsModelConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    devices: DevicesConfig = DevicesConfig()
    planner: PlannerConfig = PlannerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    report: ReportConfig = ReportConfig()

    @model_validator(mode="after")
    def _refuse_unused(self) -> ClipsConfig:
        """Refuse keys that a run over clips would not obey."""
        for section, keys in _UNUSED.items():
            given = sorted(getattr(self, section).model_fields_set & set(keys))
            if given:
                raise ValueError(f"{section}.{given[0]} says nothing about clips: leave it out")
        if self.planner.name == "strategies":
            raise ValueError("planner.name: clips have no stages: wanted adaptive, or another")
        if self.devices.dtype == "bfloat16":
            raise ValueError("devices.dtype: wanted float32 or float64 for clips")
        return self

    @classmethod
    def load(cls, path: str | Path, *changes: str) -> ClipsConfig:
        """Read a configuration of a run over clips, as :meth:`headrace.Config.load` does."""
        return read_config(cls, Path(path), changes)

    def to_json(self) -> dict[str, Any]:
        """All keys as a JSON object."""
        return self.model_dump(mode="json")
