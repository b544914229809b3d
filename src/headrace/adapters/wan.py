"""diffusers' WanTransformer3DModel: attention over all places of a clip at once.

Frames are in shards; attention exchanges heads for places, or passes keys and values on where there
are more ranks than heads. Rotary places are made for all frames, and each rank takes its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headrace.adapters.adapted import Adapted
from headrace.adapters.dims import Dims
from headrace.adapters.stages import AxisStage
from headrace.comm.mesh import Groups
from headrace.errors import ModelError

__all__ = ["adapt_wan"]

_ATTENTION = AxisStage(modules="blocks.*.attn1", mixes="t s", dims="b (t s) d")
_INPUTS = {
    "hidden_states": "b c t y x",
    "timestep": "b",
    "encoder_hidden_states": "b n e",
    "encoder_hidden_states_image": "b m f",
}
_ROTARY = Dims.parse("k (t s) j d")


def adapt_wan(model: Any, *, groups: Groups | None = None) -> Adapted:
    """Wan on shards; its inputs go by their names. Raises ModelError for patches of several
    frames."""
    inner = getattr(model, "module", model)
    deep, high, wide = inner.config.patch_size
    if deep != 1:
        raise ModelError("patches of Wan", got=f"{deep} frames", wanted="one frame")

    def sizes(inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
        *_, height, width = inputs["hidden_states"].shape
        return {"s": (height // high) * (width // wide)}

    run = Adapted(
        model, stages=[_ATTENTION], inputs=_INPUTS, axis="t", batch="b", sizes=sizes, groups=groups
    )

    def all_frames(args: Any, named: dict[str, Any]) -> Any:
        (x,) = args
        assert run.shards is not None, "sharded"
        b, c, _, *side = x.shape
        return (x.new_zeros(()).expand(b, c, run.shards.totals["t"], *side),), named

    def own_frames(_: Any, out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        assert run.shards is not None, "sharded"
        return tuple(run.shards.local(x, _ROTARY) for x in out)

    run.on(inner.rope, all_frames, own_frames)
    return run
