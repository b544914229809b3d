"""Which adapter a model has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from headrace.adapters.adapted import Adapted, Sizes
from headrace.adapters.latte import adapt_latte
from headrace.adapters.stages import AxisStage
from headrace.adapters.timesformer import adapt_timesformer
from headrace.adapters.transformer_2d import adapt_transformer_2d
from headrace.adapters.wan import adapt_wan
from headrace.comm.mesh import Groups
from headrace.errors import ModelError

__all__ = ["KNOWN", "adapt"]

KNOWN: Mapping[str, Callable[..., Adapted]] = {
    "LatteTransformer3DModel": adapt_latte,
    "TimesformerForVideoClassification": adapt_timesformer,
    "TimesformerModel": adapt_timesformer,
    "Transformer2D": adapt_transformer_2d,
    "WanTransformer3DModel": adapt_wan,
}
"""Adapters by the names of models' classes."""


def adapt(
    model: torch.nn.Module,
    *,
    stages: Sequence[AxisStage] = (),
    inputs: Mapping[str, str] | None = None,
    axis: str | None = None,
    batch: str | None = None,
    sizes: Sizes = None,
    groups: Groups | None = None,
) -> Adapted:
    """Run a multi-dimensional model on shards of its axes, unchanged (DSP). Arguments::

        model    diffusers' Latte or Wan, or transformers' TimeSformer, which need nothing else, or
                 one whose stages are named; alone, under DDP or FSDP2
        stages   the modules in which places of an axis see each other
        inputs   dims of the inputs with places of axes, by name: ``{"x": "b t s c"}``
        axis     in shards where no stage says otherwise
        batch    the name of the samples, which are worked on apart where there are more ranks than
                 places of the axis
        sizes    places of axes that the model makes of its inputs, by name

    Raises ModelError for models that are not known and have no stages, and for stages whose modules
    are not there.
    """
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    known = KNOWN.get(type(inner).__name__.removeprefix("FSDP"))
    if known is not None and not stages:
        return known(model, groups=groups)
    if not stages or inputs is None or axis is None:
        raise ModelError(
            f"axes of {type(inner).__name__}",
            got="a model without an adapter",
            wanted=f"one of {', '.join(KNOWN)}, or stages, inputs and axis",
            hint='hr.adapt(model, stages=[hr.AxisStage(modules="blocks.*.temporal", mixes="t", '
            'dims="(b s) t c"), ...], inputs={"x": "b t s c"}, axis="t")',
        )
    return Adapted(
        model, stages=stages, inputs=inputs, axis=axis, batch=batch, sizes=sizes, groups=groups
    )
