"""transformers' TimesformerModel: attention over time and over space in one layer, and a token for
the whole clip that both see to.

Rows of patches are in shards from the embeddings on, whose length tells the model how many there
are. Around the attention over space frames are in shards instead; the clip's token, which every
rank has, has one copy for each frame there, and all copies come together afterwards.
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

__all__ = ["adapt_timesformer"]

_PATCHES, _CLIP = Dims.parse("(b t) (h w) d"), Dims.parse("(b t) k d")
_EMBEDDED = Dims.parse("b (h w t) d")


def adapt_timesformer(model: Any, *, groups: Groups | None = None) -> Adapted:
    """TimeSformer on shards; its result [B, 1 + patches of this rank, d] begins with the clip's
    token, which all ranks have alike. Raises ModelError for attention that is not divided."""
    inner = getattr(model, "module", model)
    config = inner.config
    if config.attention_type != "divided_space_time":
        raise ModelError(
            "TimeSformer", got=f"attention {config.attention_type}", wanted="divided_space_time"
        )

    def sizes(inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
        return {"h": inputs["pixel_values"].shape[3] // config.patch_size}

    prefix = "timesformer." if hasattr(inner, "timesformer") else ""
    body = getattr(inner, "timesformer", inner)
    over_time = AxisStage(
        modules=f"{prefix}encoder.layer.*.temporal_attention", mixes="t", dims="(b h w) t d"
    )
    run = Adapted(
        model,
        stages=[over_time],
        inputs={"pixel_values": "b t c y x"},
        axis="h",
        batch="b",
        sizes=sizes,
        groups=groups,
    )

    def embedded(_: Any, out: torch.Tensor) -> torch.Tensor:
        clip, patches = out[:, :1], out[:, 1:]
        assert run.shards is not None, "sharded"
        return torch.cat([clip, run.shards.local(patches, _EMBEDDED)], dim=1)

    def to_frames(args: Any, named: dict[str, Any]) -> Any:
        x, *rest = args
        shards = run.shards
        assert shards is not None, "sharded"
        if shards.group is None:
            return args, named
        patches = shards.switched(x[:, 1:], _PATCHES, "t")
        return (torch.cat([shards.cut(x[:, :1], _CLIP), patches], dim=1), *rest), named

    def to_rows(_: Any, out: Any) -> Any:
        x, *rest = out
        shards = run.shards
        assert shards is not None, "sharded"
        if shards.group is None:
            return out
        clip = shards.whole(x[:, :1], _CLIP)
        return (torch.cat([clip, shards.switched(x[:, 1:], _PATCHES, "h")], dim=1), *rest)

    run.traceable = False  # hooks of its own switch
    run.on(body.embeddings, after=embedded)
    for layer in body.encoder.layer:
        run.on(layer.attention, to_frames, to_rows)
    return run
