"""Shapes as the pipes of :mod:`headrace.planning.pipelines`, whose search deals out sequences.

A pipe has one line of seconds and one room; a shape has a layer plan for every size of a
micro-batch. So a shape is offered as several pipes, which bracket what it can do:

    tp2          as quick as its quickest plan, as roomy as its thriftiest: nearly true where few
                 micro-batches need the thrifty one
    tp2+quick    the quickest plan and no more than it holds
    tp2+middle   a plan in between
    tp2+thrifty  the thriftiest plan
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product

from headrace.costs.pipeline_costs import PipelineCosts, SchemeCost
from headrace.planning.pipelines.world import Counts, World
from headrace.planning.strategies.schemes import Shape
from headrace.spec import Scheme, Strategy

__all__ = ["Pipes"]

_COMBINED = 64


@dataclass(frozen=True, kw_only=True)
class Pipes:
    """A world of the pipes of some shapes; ``owners[k]`` is the scheme of pipe k."""

    world: World
    owners: tuple[Scheme, ...]

    @classmethod
    def of(cls, shapes: Iterable[Shape], devices: int, *, bracketed: bool = True) -> Pipes:
        """The pipes of some shapes, at least one; only the first of each unless ``bracketed``."""
        entries = [
            (shape.scheme, entry)
            for shape in shapes
            for entry in islice(_entries(shape, devices), None if bracketed else 1)
        ]
        costs = PipelineCosts(schemes=tuple(entry for _, entry in entries))
        world = World.of(costs, devices)
        owners = {entry.name: scheme for scheme, entry in entries}
        return cls(world=world, owners=tuple(owners[pipe.name] for pipe in world.pipes))

    def strategy(self, counts: Counts) -> Strategy:
        """What strategy pipes make."""
        return Strategy.of(
            scheme for scheme, n in zip(self.owners, counts, strict=True) for _ in range(n)
        )

    def counts(self, strategy: Strategy) -> list[Counts]:
        """Ways to give a strategy's pipelines pipes: every scheme one kind, or one of its pipelines
        another than the rest."""
        each = [self._of_scheme(scheme, count) for scheme, count in strategy.counts]
        found = list[Counts]()
        for some in islice(product(*each), _COMBINED):
            found.append(tuple(sum(column) for column in zip(*some, strict=True)))
        return list(dict.fromkeys(found))

    def _of_scheme(self, scheme: Scheme, count: int) -> list[Counts]:
        mine = [k for k, owner in enumerate(self.owners) if owner == scheme]
        found = [self._row({k: count}) for k in mine]
        if count > 1:
            # Roomy pipes stand first: one for the long sequences, quicker ones for the rest.
            found += [self._row({mine[0]: 1, k: count - 1}) for k in mine[1:]]
        return found

    def _row(self, some: dict[int, int]) -> Counts:
        return tuple(some.get(k, 0) for k in range(len(self.owners)))


def _entries(shape: Shape, devices: int) -> Iterator[SchemeCost]:
    frontier, name = shape.frontier, str(shape.scheme)
    last = len(frontier.caps) - 1
    yield _entry(shape, devices, name, 0, last)
    if last > 0:
        yield _entry(shape, devices, f"{name}+quick", 0, 0)
        yield _entry(shape, devices, f"{name}+thrifty", last, last)
    if last > 1:
        middle = _middle(frontier.caps)
        yield _entry(shape, devices, f"{name}+middle", middle, middle)


def _middle(caps: Sequence[int]) -> int:
    """The plan nearest to the geometric mean of the least and the largest room."""
    mean = (caps[0] * caps[-1]) ** 0.5
    return min(range(1, len(caps) - 1), key=lambda i: (abs(caps[i] - mean), i))


def _entry(shape: Shape, devices: int, name: str, quick: int, roomy: int) -> SchemeCost:
    a, b, c = shape.frontier.rows[quick]
    return SchemeCost(
        scheme=shape.scheme, a_s=a, b_s=b, c_s=c, name=name,
        max_length={devices: shape.frontier.caps[roomy]},
    )  # fmt: skip
