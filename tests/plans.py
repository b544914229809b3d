"""Random valid plans: mixed group sizes, several micro-batches per group, any recompute."""

from __future__ import annotations

import numpy as np

from headrace.spec import LayerOption, LayerPlan, Lengths, MicroBatch, Pipeline, Plan, Scheme

__all__ = ["random_documents", "random_plan"]


def random_plan(
    lengths: Lengths, devices: int, layers: int, rng: np.random.Generator, *,
    largest: int | None = None, working: str | None = None,
) -> Plan:  # fmt: skip
    """Each sequence on a random aligned block of a random size, packed at random, larger groups
    first; some micro-batches recompute."""
    jobs: dict[tuple[int, int], list[list[int]]] = {}
    for i in rng.permutation(len(lengths)):
        size = int(rng.integers(1, min(devices, largest or devices) + 1))
        block = int(rng.integers(devices // size))
        packs = jobs.setdefault((size, block), [[]])
        if packs[-1] and rng.random() < 0.4:
            packs.append([])
        packs[-1].append(int(i))
    pipelines, micro_batches = [], []
    for (size, block), packs in sorted(jobs.items(), key=lambda job: (-job[0][0], job[0][1])):
        ranks = tuple(range(block * size, (block + 1) * size))
        pipelines.append(Pipeline(scheme=Scheme(context=size), ranks=ranks))
        name = "local" if size == 1 else "ulysses_z"
        for pack in packs:
            levels = rng.choice(["none", "attention", "full"], size=layers)
            options = tuple(LayerOption.of(name, str(level)) for level in levels)  # type: ignore[arg-type]
            micro_batches.append(
                MicroBatch(
                    pipeline=len(pipelines) - 1, sequences=tuple(pack),
                    layers=LayerPlan(options=options),
                )
            )  # fmt: skip
    return Plan(
        lengths=lengths, devices=devices, pipelines=tuple(pipelines),
        micro_batches=tuple(micro_batches), predicted_s=1.0, lower_bound_s=1.0,
        working=working or str(rng.choice(["whole", "sharded"])),  # type: ignore[arg-type]
        planner="random",
    )  # fmt: skip


def random_documents(
    rng: np.random.Generator, vocabulary: int, count: int, longest: int
) -> tuple[np.ndarray, ...]:
    """Documents of random lengths from one token up."""
    lengths = rng.integers(1, longest + 1, size=count)
    return tuple(rng.integers(vocabulary, size=n).astype(np.int32) for n in lengths)
