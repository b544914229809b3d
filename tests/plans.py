"""Documents and plans drawn at random."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from headrace.spec import LayerPlan, Lengths, MicroBatch, Pipeline, Plan, Scheme
from headrace.spec.random_plans import random_plan

__all__ = ["random_documents", "random_pipelines", "random_plan", "random_staged_plan"]


def random_documents(
    rng: np.random.Generator, vocabulary: int, count: int, longest: int
) -> tuple[np.ndarray, ...]:
    """Documents of random lengths from one token up."""
    lengths = rng.integers(1, longest + 1, size=count)
    return tuple(rng.integers(vocabulary, size=n).astype(np.int32) for n in lengths)


def random_staged_plan(
    rng: np.random.Generator, devices: int, layers: int, micro_batches: int, longest: int = 99
) -> Plan:
    """Random micro-batches of one to three sequences on random pipelines, of which some may have
    no work."""
    pipelines = random_pipelines(rng, devices, layers)
    counts = rng.integers(1, 4, size=micro_batches)
    ends = np.cumsum(counts)
    plan = LayerPlan.parse(f"{layers}*local")
    return Plan(
        lengths=Lengths.of(rng.integers(1, longest + 1, size=ends[-1]).tolist()),
        devices=devices,
        pipelines=pipelines,
        micro_batches=tuple(
            MicroBatch(
                pipeline=int(rng.integers(len(pipelines))),
                sequences=tuple(range(end - count, end)),
                layers=plan,
            )
            for count, end in zip(counts.tolist(), ends.tolist(), strict=True)
        ),
        predicted_s=0.0,
        lower_bound_s=0.0,
    )


def random_pipelines(rng: np.random.Generator, devices: int, layers: int) -> tuple[Pipeline, ...]:
    """Pipelines of random schemes and shares on random ranks, side by side; ranks may be left
    over, and those without stages may work in more than one pipeline."""
    free = [int(rank) for rank in rng.permutation(devices)]
    pipelines: list[Pipeline] = []
    shared: list[int] = []
    while free and (not pipelines or rng.random() < 0.8):
        scheme = _random_scheme(rng, len(free), layers)
        ranks, free = tuple(free[: scheme.devices]), free[scheme.devices :]
        shares = _random_shares(rng, layers, scheme.pipeline) if rng.random() < 0.5 else ()
        pipelines.append(Pipeline(scheme=scheme, ranks=ranks, shares=shares))
        shared += ranks if scheme.pipeline == 1 else ()
    while shared and rng.random() < 0.5:
        scheme = _random_scheme(rng, len(shared), 1)
        ranks = tuple(int(rank) for rank in rng.permutation(shared)[: scheme.devices])
        pipelines.append(Pipeline(scheme=scheme, ranks=ranks))
    return tuple(pipelines)


def _random_scheme(rng: np.random.Generator, devices: int, layers: int) -> Scheme:
    pipeline = int(rng.integers(1, min(devices, layers) + 1))
    width = int(rng.integers(1, devices // pipeline + 1))
    tensor = int(rng.choice([n for n in range(1, width + 1) if width % n == 0]))
    return Scheme(tensor=tensor, context=width // tensor, pipeline=pipeline)


def _random_shares(rng: np.random.Generator, layers: int, stages: int) -> tuple[int, ...]:
    cuts = sorted(rng.choice(layers - 1, size=stages - 1, replace=False) + 1) if stages > 1 else []
    edges = [0, *map(int, cuts), layers]
    return tuple(stop - start for start, stop in pairwise(edges))
