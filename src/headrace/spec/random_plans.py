"""Plans drawn at random: valid, never good. Verification runs them to prove exactness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from headrace.errors import SpecError
from headrace.spec.known_methods import DEFAULT, SINGLE_RANK
from headrace.spec.layer_plan import RECOMPUTE, LayerOption, LayerPlan
from headrace.spec.lengths import Lengths
from headrace.spec.plan import MicroBatch, Pipeline, Plan, Working
from headrace.spec.strategy import Scheme

__all__ = ["random_plan", "random_strategy"]


def random_plan(
    lengths: Lengths,
    devices: int,
    layers: int,
    rng: np.random.Generator,
    *,
    largest: int | None = None,
    working: Working | None = None,
    methods: Mapping[int, Sequence[str]] | None = None,
) -> Plan:
    """Draw a valid plan of groups without stages. Each sequence is put on a random aligned block of
    a random number of ranks (at most ``largest``) and packed with others there at random; token
    order, methods and recompute levels are random too. Larger groups come first.

    ``methods`` names the methods that a group may run by its number of ranks, and so the sizes that
    are drawn; where None, one rank is ``local`` and larger groups are ``ulysses_z``. ``working`` is
    random where None. Raises SpecError where no size is left.
    """
    most = min(devices, largest or devices)
    if methods is None:
        methods = {size: (SINGLE_RANK if size == 1 else DEFAULT,) for size in range(1, most + 1)}
    sizes = [size for size in sorted(methods) if size <= most and methods[size]]
    if not sizes:
        raise SpecError("methods of a random plan", got=dict(methods), wanted="some on few ranks")
    jobs: dict[tuple[int, int], list[list[int]]] = {}  # packs of sequences by (size, block)
    for i in rng.permutation(len(lengths)):
        size = sizes[int(rng.integers(len(sizes)))]
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
                layers=_random_layers(methods[size], layers, rng),
                order="zigzag" if size > 1 and rng.random() < 0.5 else "natural",
            )
            for pack in packs
        ]
    held: tuple[Working, ...] = ("replicated", "sharded")
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


def random_strategy(
    lengths: Lengths,
    devices: int,
    layers: int,
    rng: np.random.Generator,
    *,
    methods: Mapping[int, Sequence[str]],
    most_tensor: int = 1,
) -> Plan:
    """Draw a valid plan of pipelines side by side, with random tensor (at most ``most_tensor``),
    context and pipeline degrees and random numbers of layers in their stages. Some ranks may be in
    no pipeline. Each sequence goes to a random pipeline and is packed with others at random; token
    order, methods and recompute levels are random too.

    ``methods`` names the methods that a stage may run by its number of ranks.
    """
    pipelines: list[Pipeline] = []
    next_rank = int(rng.random() < 0.2 and devices > 1)  # rank 0 is left out at times
    while next_rank < devices:
        room = devices - next_rank
        pipeline = _random_pipeline(next_rank, room, layers, rng, methods, most_tensor)
        pipelines.append(pipeline)
        next_rank += pipeline.scheme.devices + int(rng.random() < 0.1)  # leaves out a rank at times
    packs: list[tuple[int, list[int]]] = []  # (pipeline, sequences)
    for i in rng.permutation(len(lengths)):
        chosen = int(rng.integers(len(pipelines)))
        if packs and packs[-1][0] == chosen and rng.random() < 0.5:
            packs[-1][1].append(int(i))
        else:
            packs.append((chosen, [int(i)]))
    held: tuple[Working, ...] = ("replicated", "sharded")
    return Plan(
        lengths=lengths,
        devices=devices,
        pipelines=tuple(pipelines),
        micro_batches=tuple(
            MicroBatch(
                pipeline=chosen,
                sequences=tuple(pack),
                layers=_random_layers(methods[_width(pipelines[chosen])], layers, rng),
                order="zigzag" if rng.random() < 0.5 else "natural",
            )
            for chosen, pack in packs
        ),
        predicted_s=0.0,
        lower_bound_s=0.0,
        working=held[int(rng.integers(2))],
        planner="random",
    )


def _width(pipeline: Pipeline) -> int:
    """The number of ranks of one stage."""
    return pipeline.scheme.width


def _random_pipeline(
    first_rank: int,
    room: int,
    layers: int,
    rng: np.random.Generator,
    methods: Mapping[int, Sequence[str]],
    most_tensor: int,
) -> Pipeline:
    """Draw a pipeline on neighbouring ranks from ``first_rank`` on, at most ``room`` of them."""
    schemes = [
        Scheme(tensor=tensor, context=width // tensor, pipeline=stages)
        for width in sorted(methods)
        if methods[width]
        for tensor in range(1, most_tensor + 1)
        if width % tensor == 0
        for stages in range(1, min(layers, room // width) + 1)
    ]
    scheme = schemes[int(rng.integers(len(schemes)))]
    # The layers at which a new stage begins: distinct and above 0, so that no stage is empty.
    cuts = sorted(rng.choice(layers - 1, scheme.pipeline - 1, replace=False) + 1)
    edges = [0, *map(int, cuts), layers]
    return Pipeline(
        scheme=scheme,
        ranks=tuple(range(first_rank, first_rank + scheme.devices)),
        shares=tuple(b - a for a, b in pairwise(edges)),
    )


def _random_layers(methods: Sequence[str], layers: int, rng: np.random.Generator) -> LayerPlan:
    """Draw for each layer the attention's and the feed-forward's method of ``methods``, and a
    recompute level."""
    names = rng.integers(len(methods), size=(layers, 2)).tolist()
    levels = rng.integers(len(RECOMPUTE), size=layers).tolist()
    return LayerPlan(
        options=tuple(
            LayerOption(
                attention=methods[attention],
                feed_forward=methods[feed_forward],
                recompute=RECOMPUTE[level],
            )
            for (attention, feed_forward), level in zip(names, levels, strict=True)
        )
    )
