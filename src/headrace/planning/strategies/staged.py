"""Micro-batches of one pipeline: which sequences each packs, and the layers of each.

Without stages only the sum of the seconds counts, and :mod:`headrace.planning.packing` is exact in
the layer plans. With stages a pipeline takes sum_j t_j + (P - 1) max_j t_j. There the sequences
are packed for every layer plan as if all micro-batches had it, which keeps P of them within the
memory; then single micro-batches take quicker plans while what is really in flight at the same
time leaves room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.planning.packing import pack as pack_one_stage
from headrace.planning.pipelines.batch import Batch
from headrace.planning.pipelines.packing import pack as pack_stages
from headrace.planning.pipelines.world import Pipe, World
from headrace.planning.strategies.schemes import Shape
from headrace.planning.stages import StageCosts

__all__ = ["Load", "loaded", "quickened"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a pipeline of ``shape`` has: micro-batches of places in the batch, the number of each
    one's layer plan, and the seconds to expect."""

    shape: Shape
    packs: tuple[tuple[int, ...], ...]
    plans: tuple[int, ...]
    seconds: float

    @property
    def members(self) -> list[int]:
        """All its sequences, longest first."""
        return sorted(i for own in self.packs for i in own)


def loaded(shape: Shape, tokens: Sequence[int], members: Sequence[int]) -> Load:
    """Pack the sequences at ``members``, longest first, each of which the shape can take.
    ``tokens`` are the lengths of the batch."""
    if not members:
        return Load(shape=shape, packs=(), plans=(), seconds=0.0)
    own = [tokens[i] for i in members]
    if shape.scheme.pipeline == 1:
        packed = pack_one_stage(own, shape.frontier)
        packs = tuple(tuple(members[i] for i in bin_) for bin_ in packed.bins)
        return Load(shape=shape, packs=packs, plans=packed.plans, seconds=packed.seconds)
    pipes = {
        plan: _pipe(shape, plan)
        for plan, cap in enumerate(shape.frontier.caps)
        if cap >= own[0]
    }  # fmt: skip
    # The pipes of a world of one's own, so that places are those of the pipeline's sequences.
    batch = Batch(World(devices=shape.scheme.devices, pipes=tuple(pipes.values())), own)
    tried = [
        (*pack_stages(batch, k, range(len(own))), plan) for k, plan in enumerate(pipes)
    ]  # fmt: skip
    seconds, bins, plan = min(tried, key=lambda item: (item[0], item[2]))
    packs = tuple(tuple(sorted(members[i] for i in bin_)) for bin_ in bins)
    return Load(shape=shape, packs=packs, plans=(plan,) * len(packs), seconds=seconds)


def _pipe(shape: Shape, plan: int) -> Pipe:
    a, b, c = shape.frontier.rows[plan]
    scheme = shape.scheme
    return Pipe(
        name=f"{scheme}+{plan}", devices=scheme.devices, stages=scheme.pipeline, a=a, b=b, c=c,
        cap=shape.frontier.caps[plan], util=1,
    )  # fmt: skip


def quickened(load: Load, costs: StageCosts, tokens: Sequence[int]) -> Load:
    """The micro-batches in this order with quicker layer plans, where ``costs`` have memory for
    them, what gains most first; seconds by the costs' slowest stages."""
    sums = [(sum(tokens[i] ** 2 for i in own), sum(tokens[i] for i in own)) for own in load.packs]
    table = [[costs.seconds(plan, *both) for plan in range(len(costs.plans))] for both in sums]
    plans = list(load.plans)
    gains = sorted(
        (row[other] - row[plans[j]], j, other)
        for j, row in enumerate(table)
        for other in range(len(row))
        if row[other] < row[plans[j]]
    )
    done = set[int]()
    for _, j, other in gains:
        if j not in done:
            tried = [*plans[:j], other, *plans[j + 1 :]]
            if costs.fits([(held, plan) for (_, held), plan in zip(sums, tried, strict=True)]):
                plans[j] = other
                done.add(j)
    each = [row[plan] for row, plan in zip(table, plans, strict=True)]
    seconds = sum(each) + (load.shape.scheme.pipeline - 1) * max(each, default=0.0)
    return replace(load, plans=tuple(plans), seconds=seconds)
