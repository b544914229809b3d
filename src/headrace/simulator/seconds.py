"""Seconds of the segments of a plan's micro-batches."""

from __future__ import annotations

from headrace.costs.cost_model import CostModel
from headrace.costs.stages import segment_seconds
from headrace.errors import CostError
from headrace.spec.plan import MicroBatch, Plan
from headrace.spec.stage import Stage

__all__ = ["check_costs", "segments_of"]

Segments = tuple[tuple[float, float], ...]


def check_costs(plan: Plan, costs: CostModel) -> None:
    """Raise CostError when ``plan`` uses a width of a stage, or layers on it, for which ``costs``
    have no answer."""
    widths: list[int] = []
    for pipeline in plan.pipelines:
        scheme = pipeline.scheme
        widths.append(scheme.width)
        if widths[-1] not in costs.options:
            known = ", ".join(f"cp{p}" for p in costs.group_sizes)
            raise CostError(f"costs of {scheme}", got="none", hint=f"known are {known}")
    # By identity: hashing all layers of all micro-batches takes longer than the few repetitions.
    used = {(widths[m.pipeline], id(m.layers)): m.layers for m in plan.micro_batches}
    for (width, _), layers in used.items():
        if len(layers.options) != costs.shape.layers:
            raise CostError(
                "layer plan", got=f"{len(layers.options)} layers", wanted=costs.shape.layers
            )
        for option, _ in layers.counts:
            costs.option(width, option)


def segments_of(plan: Plan, micro: MicroBatch, stage: Stage, costs: CostModel) -> Segments:
    """Seconds of (forward, backward) of a micro-batch's segments in a stage, in the order of
    ``stage.buckets``."""
    return segment_seconds(
        costs,
        plan.tokens_of(micro),
        plan.pipelines[micro.pipeline],
        stage,
        micro.layers,
        plan.working,
    )
