"""Our own Transformer-2D: the axis in shards stays until a block mixes it, two switches a layer."""

from __future__ import annotations

import torch

from headrace.adapters.adapted import Adapted
from headrace.adapters.stages import AxisStage
from headrace.comm.mesh import Groups

__all__ = ["adapt_transformer_2d"]

_STAGES = (
    AxisStage(modules="layers.*.spatial", mixes="s", dims="b t s h", returns=False),
    AxisStage(modules="layers.*.temporal", mixes="t", dims="b t s h", returns=False),
)
_INPUTS = {"x": "b t s c", "timestep": "b", "frames": "t", "patches": "s"}


def adapt_transformer_2d(model: torch.nn.Module, *, groups: Groups | None = None) -> Adapted:
    """Transformer-2D on shards, frames first."""
    return Adapted(model, stages=_STAGES, inputs=_INPUTS, axis="t", batch="b", groups=groups)
