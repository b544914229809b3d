"""The switches of a forward, known before it runs: a compiler sees numbers, and no state of ours.

A leg is what happens to the first tensor of a stage when it enters or leaves. Sizes are those of
one batch; a graph of them serves all batches of the same shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.adapters.dims import Dims
from headrace.adapters.shards import AxisShards
from headrace.adapters.stages import AxisStage
from headrace.ops.traced_switch import GroupSeat, traced_switch

__all__ = ["Leg", "StageLegs", "route"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """A switch of a tensor of ``dims``, of ``here`` places on this rank before."""

    dims: Dims
    here: Mapping[str, int]
    from_dim: int
    to_dim: int
    sizes: tuple[int, ...]
    to_sizes: tuple[int, ...]
    handle: int
    rank: int

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor afterwards."""
        opened = self.dims.opened(x, self.here)
        moved = traced_switch(
            opened, self.from_dim, self.to_dim, self.sizes, self.to_sizes, self.handle, self.rank
        )
        return self.dims.closed(moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLegs:
    """What happens around a stage. ``cuts`` are the other arguments of which this rank needs a
    part: the dims, places of all names, the dim that is cut, where from, and how many."""

    enter: Leg | None = None
    leave: Leg | None = None
    cuts: Mapping[int | str, tuple[Dims, Mapping[str, int], int, int, int]] = field(
        default_factory=dict
    )

    def entered(self, args: Any, named: Any) -> tuple[Any, Any]:
        """The arguments of the stage."""
        given = {**dict(enumerate(args)), **named}
        key = next(iter(given))
        if self.enter is not None:
            given[key] = self.enter.of(given[key])
        for side, (dims, totals, at, start, count) in self.cuts.items():
            value = given.get(side)
            if isinstance(value, torch.Tensor):
                given[side] = _cut(value, dims, totals, at, start, count)
        return tuple([given[at] for at in range(len(args))]), {k: given[k] for k in named}

    def left(self, out: Any) -> Any:
        """The results of the stage."""
        if self.leave is None:
            return out
        if isinstance(out, tuple):
            return (self.leave.of(out[0]), *out[1:])
        return self.leave.of(out)


def _cut(
    x: torch.Tensor, dims: Dims, totals: Mapping[str, int], at: int, start: int, count: int
) -> torch.Tensor:
    """This rank's part of an argument that has all places; one that has not stays as it is."""
    name = dims.flat[at]
    inside = next(i for i, names in enumerate(dims.names) if name in names)
    known = math.prod([totals[n] for n in dims.names[inside] if n in totals])
    if x.shape[inside] % known:
        return x
    return dims.closed(dims.opened(x, totals).narrow(at, start, count))


def _leg(shards: AxisShards, dims: Dims, axis: str, seat: GroupSeat) -> Leg:
    """The switch to another axis, which is in shards afterwards."""
    found = Leg(
        dims=dims,
        here=shards.here(),
        from_dim=dims.dim_of(shards.axis),
        to_dim=dims.dim_of(axis),
        sizes=shards.sizes(shards.axis),
        to_sizes=shards.sizes(axis),
        handle=seat.handle,
        rank=seat.rank,
    )
    shards.axis = axis
    return found


def _cuts(
    stage: AxisStage, shards: AxisShards
) -> dict[int | str, tuple[Dims, Mapping[str, int], int, int, int]]:
    """Those of a stage while its axis is in shards."""
    sizes = shards.sizes(shards.axis)
    found: dict[int | str, tuple[Dims, Mapping[str, int], int, int, int]] = {}
    for side, text in stage.sides.items():
        dims = Dims.parse(text)
        if shards.axis in dims:
            at = dims.dim_of(shards.axis)
            found[side] = (
                dims,
                dict(shards.totals),
                at,
                sum(sizes[: shards.rank]),
                sizes[shards.rank],
            )
    return found


def route(
    stages: Sequence[tuple[AxisStage, str]], shards: AxisShards, seat: GroupSeat
) -> list[StageLegs]:
    """The legs of stages in their order, each with the axis that is in shards during it."""
    begun, found = shards.axis, list[StageLegs]()
    for stage, axis in stages:
        before = shards.axis
        enter = None if axis == before else _leg(shards, stage.layout, axis, seat)
        own = _cuts(stage, shards)
        leave = None
        if stage.returns and shards.axis != before:
            leave = _leg(shards, stage.layout, before, seat)
        found.append(StageLegs(enter=enter, leave=leave, cuts=own))
    shards.axis = begun
    return found
