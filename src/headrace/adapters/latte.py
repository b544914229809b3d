"""diffusers' LatteTransformer3DModel: spatial and temporal blocks in turn.

Frames are in shards but for temporal blocks, which run on shards of the patches. The model adds its
embedding of frames before the first temporal block, by a count of frames that is that of this rank:
it is given nothing to add there, and the whole embedding is added once all frames are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headrace.adapters.adapted import Adapted
from headrace.adapters.stages import AxisStage
from headrace.comm.mesh import Groups

__all__ = ["adapt_latte"]

_STAGES = (
    AxisStage(modules="transformer_blocks.*", mixes="s", dims="(b t) s d"),
    AxisStage(
        modules="temporal_transformer_blocks.*", mixes="t", dims="(b s) t d", sides={4: "(b s) e"}
    ),
)

_INPUTS = {"hidden_states": "b c t y x", "timestep": "b", "encoder_hidden_states": "b n e"}


def adapt_latte(model: Any, *, groups: Groups | None = None) -> Adapted:
    """Latte on shards; its inputs go by their names."""
    inner: Any = getattr(model, "module", model)
    side = inner.config.patch_size

    def sizes(inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
        *_, height, width = inputs["hidden_states"].shape
        return {"s": (height // side) * (width // side)}

    run = Adapted(
        model, stages=_STAGES, inputs=_INPUTS, axis="t", batch="b", sizes=sizes, groups=groups
    )
    kept = list[torch.Tensor]()

    def before(args: Any, named: dict[str, Any]) -> Any:
        kept.append(inner.temp_pos_embed)
        inner.temp_pos_embed = torch.zeros_like(kept[-1][:, :1])
        return args, named

    def after(_: Any, out: Any) -> Any:
        inner.temp_pos_embed = kept.pop()
        return out

    def first_temporal(args: Any, named: dict[str, Any]) -> Any:
        x, *rest = args
        if x.shape[1] > 1:
            x = x + (kept[-1] if kept else inner.temp_pos_embed).to(x.dtype)
        return (x, *rest), named

    run.on(inner, before, after, always=True)
    run.on(inner.temporal_transformer_blocks[0], first_temporal)
    return run
