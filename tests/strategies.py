"""Plans of named strategies: each sequence to the next pipeline, by the methods of its scheme."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.spec import (
    Architecture,
    LayerOption,
    LayerPlan,
    Lengths,
    MicroBatch,
    Pipeline,
    Plan,
    Scheme,
    Strategy,
)
from headrace.spec.plan import Working

__all__ = ["NAMED", "laid_out"]

NAMED = {
    2: ("1*tp2", "2*cp1", "1*pp2", "1*cp2"),
    3: ("1*tp2 + 1*cp1", "1*pp3", "1*pp2 + 1*cp1", "1*cp3", "3*cp1"),
    4: ("1*tp2 + 2*cp1", "1*pp2 + 1*cp2", "1*tp2-pp2", "1*tp2-cp2", "1*cp2-pp2", "2*tp2"),
    6: ("1*tp2 + 1*cp2 + 1*pp2", "1*tp2-pp3", "1*tp2-cp3", "1*pp2-cp3", "1*tp2-cp2 + 2*cp1"),
    8: ("1*tp2-cp2-pp2", "1*tp2-pp2 + 1*cp2 + 2*cp1", "1*cp4 + 1*pp2 + 1*tp2", "1*tp2-cp2"),
}
"""By ranks; the last of eight leaves ranks without work."""

_METHODS = {(False, False): "local", (True, False): "megatron_ts", (True, True): "tensor_ring"}


def _method(scheme: Scheme) -> LayerOption:
    tensor, context = scheme.tensor > 1, scheme.context > 1
    name = "megatron_cz" if context and not tensor else _METHODS[tensor, context]
    return LayerOption.of(name)


def laid_out(
    text: str,
    a: Architecture,
    lengths: Sequence[int],
    devices: int,
    *,
    packed: int = 2,
    working: Working = "replicated",
) -> Plan:
    """The plan: pipelines on the ranks in order, micro-batches of ``packed`` sequences."""
    pipelines: list[Pipeline] = []
    at = 0
    for scheme, count in Strategy.parse(text).counts:
        for _ in range(count):
            ranks = tuple(range(at, at + scheme.devices))
            pipelines.append(Pipeline(scheme=scheme, ranks=ranks))
            at += scheme.devices
    micro_batches: list[MicroBatch] = []
    for i, pipeline in enumerate(pipelines):
        own = range(i, len(lengths), len(pipelines))
        layers = LayerPlan.uniform(_method(pipeline.scheme), a.layers)
        order = "zigzag" if pipeline.scheme.context > 1 else "natural"
        micro_batches += [
            MicroBatch(pipeline=i, sequences=pack, layers=layers, order=order)
            for pack in _packs(list(own), packed)
        ]
    return Plan(
        lengths=Lengths(tokens=tuple(lengths)),
        devices=devices,
        pipelines=tuple(pipelines),
        micro_batches=tuple(micro_batches),
        predicted_s=0.0,
        lower_bound_s=0.0,
        working=working,
    )


def _packs(numbers: list[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(numbers[i : i + size]) for i in range(0, len(numbers), size)]
