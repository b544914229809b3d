"""What a stage of a pipeline costs: the costs of a group of its width, for its layers only.

A stage of width w = tensor x context works as a group of w ranks does. Its rows of the weights are
those of its layers, cut into blocks of ``tensor`` ranks (all w when weights are held sharded); the
head and the loss are in the last stage. So everything here follows from the costs of groups:

    segment     seconds of one layer, or of the ends, forward and backward
    message     what a stage sends to the next: rows of h features, at the speed of the exchange
    held        working weights: the share of the whole weights' bytes that its rows are
    activations bytes kept from forward to backward, and the peak while a micro-batch runs
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.costs.cost_model import CostModel
from headrace.costs.quadratic import Linear
from headrace.spec.method import LayerOption, LayerPlan
from headrace.spec.plan import Pipeline, Working
from headrace.spec.scheme import Scheme
from headrace.spec.stage import Stage

__all__ = [
    "held_bytes",
    "kept_line",
    "message_s",
    "moments",
    "segment_rows",
    "segment_seconds",
    "stage_gather",
]

Floats = NDArray[np.float64]


def stage_gather(
    costs: CostModel, scheme: Scheme, option: LayerOption, working: Working
) -> tuple[float, float]:
    """What fetching weights adds to one layer's (forward, backward).

    A tensor block that holds a layer together lacks nothing for methods that work with shards as
    they lie; others fetch the rest, at most what a group of the whole width would.
    """
    width = scheme.width
    parts = scheme.parts(sharded=working == "sharded")
    if parts == 1 or width not in costs.options:
        return 0.0, 0.0
    if parts < width and costs.option(width, option).fetched < 1:
        return 0.0, 0.0
    return costs.gather_seconds(width, option, "sharded")


def segment_seconds(
    costs: CostModel,
    tokens: Sequence[int],
    pipeline: Pipeline,
    stage: Stage,
    layers: LayerPlan,
    working: Working,
) -> tuple[tuple[float, float], ...]:
    """Seconds of (forward, backward) of every segment of a stage for a pack of ``tokens``, in the
    order of ``stage.buckets``. The ends are charged where the head is.

    Raises CostError when the costs lack the width or an option.
    """
    width, found = len(stage.ranks), list[tuple[float, float]]()
    squares, total = sum(n * n for n in tokens), sum(tokens)
    of_option: dict[LayerOption, tuple[float, float]] = {}
    for bucket in stage.buckets:
        if bucket == 0:
            found.append((0.0, 0.0))
        elif bucket > stage.stop:
            ends = costs.ends[width]
            pair = ends.forward.of_sums(squares, total), ends.backward.of_sums(squares, total)
            found.append((pair[0] * costs.scale, pair[1] * costs.scale))
        else:
            option = layers.options[bucket - 1]
            if option not in of_option:
                cost = costs.option(width, option)
                gather = stage_gather(costs, pipeline.scheme, option, working)
                of_option[option] = (
                    (cost.forward.of_sums(squares, total) + gather[0]) * costs.scale,
                    (cost.backward.of_sums(squares, total) + gather[1]) * costs.scale,
                )
            found.append(of_option[option])
    return tuple(found)


def segment_rows(
    costs: CostModel, scheme: Scheme, layers: LayerPlan, working: Working
) -> tuple[Floats, Floats]:
    """Coefficients (a, b, c) of the seconds of (forward, backward) of every segment of a pipeline
    of one stage [buckets, 3], as :func:`segment_seconds` has them."""
    width = scheme.width
    rows = {0: [(0.0, 0.0, 0.0)], 1: [(0.0, 0.0, 0.0)]}
    for option, count in layers.counts:
        cost = costs.option(width, option)
        gather = stage_gather(costs, scheme, option, working)
        for way, (line, more) in enumerate(zip((cost.forward, cost.backward), gather, strict=True)):
            rows[way] += [(line.a, line.b, line.c + more)] * count
    ends = costs.ends[width]
    for way, line in enumerate((ends.forward, ends.backward)):
        rows[way].append((line.a, line.b, line.c))
    return np.array(rows[0]) * costs.scale, np.array(rows[1]) * costs.scale


def message_s(costs: CostModel, rows: int) -> float:
    """Seconds of a message of ``rows`` rows to a neighbouring stage.

    Between ranks what the pull of a step moves in its seconds: (N - 1) / N of all weights to each
    rank; 0 where costs know of no exchange.
    """
    n, shape = costs.cluster.devices, costs.shape
    elements = shape.elements * (n - 1) / n
    if n == 1 or elements == 0:
        return 0.0
    return costs.exchange_s.pull_s * costs.scale * rows * shape.hidden / elements


def held_bytes(costs: CostModel, pipeline: Pipeline, working: Working) -> tuple[int, ...]:
    """Bytes of working weights and their gradients on a rank of each stage.

    Where storage and working layout may be one, as on a single rank, the costs say so: what
    replicated weights take is the measure.
    """
    scheme = pipeline.scheme
    width, parts = scheme.width, scheme.parts(sharded=working == "sharded")
    if scheme.pipeline == 1 and parts in (1, width):
        return (costs.working_bytes[width]["replicated" if parts == 1 else "sharded"],)
    replicated = costs.working_bytes[width]["replicated"]
    return tuple(
        round(replicated * costs.shape.held_share(stage.buckets, parts))
        for stage in pipeline.stages(costs.shape.layers)
    )


def kept_line(costs: CostModel, stage: Stage, layers: LayerPlan) -> Linear:
    """Bytes that a stage keeps of a micro-batch from its forward to its backward, over tokens."""
    width = len(stage.ranks)
    lines = [costs.option(width, o).kept for o in layers.options[stage.start : stage.stop]]
    if stage.last:
        lines.append(costs.ends[width].kept)
    return Linear(
        slope=sum(line.slope for line in lines), constant=sum(line.constant for line in lines)
    )


def moments(costs: CostModel, stage: Stage, layers: LayerPlan) -> list[Linear]:
    """Bytes of a micro-batch's activations at every moment that can be its peak in a stage: what
    is kept so far and what the current segment needs in passing."""
    width = len(stage.ranks)
    first = costs.ends[width].kept if stage.last else Linear()
    slope, constant, found = first.slope, first.constant, list[Linear]()
    for option in layers.options[stage.start : stage.stop]:
        cost = costs.option(width, option)
        slope, constant = slope + cost.kept.slope, constant + cost.kept.constant
        found.append(
            Linear(slope=slope + cost.transient.slope, constant=constant + cost.transient.constant)
        )
    if stage.last:
        passing = costs.ends[width].transient
        found.append(Linear(slope=slope + passing.slope, constant=constant + passing.constant))
    return found
