"""Plans drawn at random: valid, never good. Verification runs them to prove exactness."""

from __future__ import annotations

import numpy as np

from headrace.spec.lengths import Lengths
from headrace.spec.method import RECOMPUTE, LayerOption, LayerPlan
from headrace.spec.plan import MicroBatch, Pipeline, Plan, Working
from headrace.spec.scheme import Scheme

__all__ = ["random_plan"]


def random_plan(
    lengths: Lengths, devices: int, layers: int, rng: np.random.Generator, *,
    largest: int | None = None, working: Working | None = None,
) -> Plan:  # fmt: skip
    """Each sequence on a random aligned block of a random size of at most ``largest`` ranks,
    packed at random, every layer with a random recompute level; larger groups come first."""
    jobs: dict[tuple[int, int], list[list[int]]] = {}
    for i in rng.permutation(len(lengths)):
        size = int(rng.integers(1, min(devices, largest or devices) + 1))
        block = int(rng.integers(devices // size))
        packs = jobs.setdefault((size, block), [[]])
        if packs[-1] and rng.random() < 0.4:
            packs.append([])
        packs[-1].append(int(i))
    pipelines: list[Pipeline] = []
    micro_batches: list[MicroBatch] = []
    for (size, block), packs in sorted(jobs.items(), key=lambda job: (-job[0][0], job[0][1])):
        ranks = tuple(range(block * size, (block + 1) * size))
        pipelines.append(Pipeline(scheme=Scheme(context=size), ranks=ranks))
        micro_batches += [
            MicroBatch(
                pipeline=len(pipelines) - 1,
                sequences=tuple(pack),
                layers=_random_layers("local" if size == 1 else "ulysses_z", layers, rng),
            )
            for pack in packs
        ]
    held: tuple[Working, ...] = ("whole", "sharded")
    return Plan(
        lengths=lengths,
        devices=devices,
        pipelines=tuple(pipelines),
        micro_batches=tuple(micro_batches),
        predicted_s=0.0,
        lower_bound_s=0.0,
        working=working or held[int(rng.integers(2))],
        planner="random",
    )


def _random_layers(method: str, layers: int, rng: np.random.Generator) -> LayerPlan:
    levels = rng.integers(len(RECOMPUTE), size=layers)
    return LayerPlan(options=tuple(LayerOption.of(method, RECOMPUTE[level]) for level in levels))
