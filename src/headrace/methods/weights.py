"""Weights of a rank, replicated (``Whole``) or sharded (``Shard``), and parts for methods.

[Note: parts] A method names for every member of the group the rows that it wants: all of them
(gather methods), the member's own shard (tensor methods), one shard for everybody or another one
for each (METP), a larger shard shared by a sub-group (composites). Rows that are here already are
views; the others come by one uneven all-to-all from those who hold them, and gradients go back the
same way and are added where the rows live. So the same method runs whether a rank holds the whole
weight or a shard of it, and moves only what it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from headrace.comm.collectives import (
    Arriving,
    all_gather_rows,
    all_to_all_rows,
    issue_all_to_all,
    reduce_scatter_rows,
)
from headrace.layouts.partition import Rows, split_rows
from headrace.ops.linear import WeightSource, add_product, product

__all__ = ["Part", "Shard", "State", "Weight", "Whole"]


class Part(WeightSource, Protocol):
    """Some rows of a weight as a source; they can be fetched ahead of their use."""

    def issue(self) -> Arriving:
        """Start to fetch the rows; the result is returned by ``wait``."""


class Weight(Part, Protocol):
    """One weight of a layer. Vectors are replicated on every member, and split like the matrix that
    they belong to."""

    def split(self, parts: int) -> tuple[Rows, ...]:
        """Its rows cut into ``parts`` at the borders of units (KV groups, gate/up blocks)."""

    def part(self, wanted: Sequence[Rows]) -> Part:
        """The rows ``wanted[m]`` for member m of the group; collective where they must travel."""


State = Mapping[str, Weight]
"""The weights of one layer by short name (``qkv.weight``), as this rank holds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A weight, or rows of it, whose values this rank holds. ``grad`` [rows, ...], in at least
    fp32, is this rank's part of the gradient; the push at the end of the step sums it over ranks.
    ``member`` is this rank's index in the layer's group; parts are cut at multiples of ``unit``
    rows."""

    value: torch.Tensor
    grad: torch.Tensor
    member: int = 0
    unit: int = 1

    def rows(self) -> torch.Tensor:
        """All rows of the value, without communication."""
        return self.value

    def issue(self) -> Arriving:
        """All rows of the value, available at once."""
        return Arriving.there(self.value)

    def sums(self) -> torch.Tensor:
        """The tensor ``grad`` itself, to which callers may add."""
        return self.grad

    def add(self, grad: torch.Tensor) -> None:
        """Add ``grad`` to the partial sum, unless it is that tensor, which :meth:`sums` gives."""
        if grad is not self.grad:
            self.grad.add_(grad)

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add left^T right to the partial sum."""
        add_product(self.grad, left, right)

    def split(self, parts: int) -> tuple[Rows, ...]:
        """The rows of the weight cut into ``parts`` at the borders of units."""
        return split_rows(len(self.value), parts, self.unit)

    def part(self, wanted: Sequence[Rows]) -> Part:
        """A view of the rows that this member wants."""
        own_rows = slice(wanted[self.member].start, wanted[self.member].stop)
        return Whole(value=self.value[own_rows], grad=self.grad[own_rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A weight whose rows are spread over a group: fetched at each use, never kept.

    ``shards[m]`` are the rows that member m of ``group`` holds; ``value`` and ``grad`` are those of
    this rank, [own rows, ...]. ``group`` may be a block of neighbours in the layer's group, which
    begins at member ``first`` of it: other blocks hold replicas, and a member gets what it wants
    within its block. ``value`` may be the stored rows, of a wider type: they are used, and travel,
    in ``dtype``, and are cast to it each time. Parts are cut at multiples of ``unit`` rows.

        rows         all_gather(value)                    elements sent  W (R - 1) / R
        add(grad)    self.grad += reduce_scatter(grad)    elements sent  W (R - 1) / R

    of a weight of W elements over R ranks.
    """

    value: torch.Tensor
    grad: torch.Tensor
    shards: tuple[Rows, ...]
    group: dist.ProcessGroup
    unit: int = 1
    first: int = 0
    dtype: torch.dtype | None = None

    def own(self, rows: slice | None = None) -> torch.Tensor:
        """This rank's rows, in the type in which they are used (not copied where they are stored in
        it). ``rows`` selects some of them, counted from this rank's first; None for all."""
        stored = self.value if rows is None else self.value[rows]
        return stored.to(self.dtype or stored.dtype)

    @property
    def _sizes(self) -> list[int]:
        """The number of rows on each member of the group."""
        return [len(shard) for shard in self.shards]

    def rows(self) -> torch.Tensor:
        """All rows, gathered from the group. Collective."""
        return all_gather_rows(self.own(), self._sizes, self.group)

    def issue(self) -> Arriving:
        """Start to gather all rows; the result is returned by ``wait``."""
        # every member wants all rows
        everything = (Rows(0, self.shards[-1].stop),) * len(self.shards)
        return self._fetched(everything).issue()

    def sums(self) -> torch.Tensor:
        """A tensor of zeros for the gradient of all rows."""
        return self.grad.new_zeros((self.shards[-1].stop, *self.grad.shape[1:]))

    def add(self, grad: torch.Tensor) -> None:
        """Sum ``grad`` over the group, and add this rank's rows to its gradient."""
        self.grad.add_(reduce_scatter_rows(grad.to(self.grad.dtype), self._sizes, self.group))

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add left^T right, summed over the group."""
        self.add(product(left, right, self.grad.dtype))

    def split(self, parts: int) -> tuple[Rows, ...]:
        """The rows of the weight cut into ``parts`` at the borders of units."""
        return split_rows(self.shards[-1].stop, parts, self.unit)

    def part(self, wanted: Sequence[Rows]) -> Part:
        """The rows ``wanted[m]`` for this member m of the layer's group: without communication
        where every member of its block wants just the shard that it holds, else fetched at each
        use."""
        # what the members of this rank's block want, by their place in it
        block = tuple(wanted[self.first : self.first + len(self.shards)])
        if block == self.shards:
            return Whole(value=self.own(), grad=self.grad)
        return self._fetched(block)

    def _fetched(self, wanted: tuple[Rows, ...]) -> _Fetched:
        """A source of rows that are fetched: ``wanted[m]`` for member m of the block."""
        return _Fetched(shard=self, wanted=wanted, member=dist.get_rank(self.group))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fetched:
    """The rows ``wanted[member]`` of a sharded weight, fetched from the members that hold them."""

    shard: Shard
    wanted: tuple[Rows, ...]
    member: int

    def _rows_to_send(self) -> list[Rows]:
        """For each member the rows that it wants and this rank holds."""
        return [self.shard.shards[self.member].meet(wanted) for wanted in self.wanted]

    def _receive_counts(self) -> list[int]:
        """For each member the number of rows that it holds and this rank wants."""
        return [len(held.meet(self.wanted[self.member])) for held in self.shard.shards]

    def issue(self) -> Arriving:
        """Start to fetch the wanted rows; the result is returned by ``wait``."""
        held, to_send = self.shard.shards[self.member], self._rows_to_send()
        sent = torch.cat(
            [self.shard.own(rows.within(held)) for rows in to_send if len(rows)]
            or [self.shard.own(slice(0))]  # cat takes no empty list
        )
        return issue_all_to_all(
            sent, [len(rows) for rows in to_send], self._receive_counts(), self.shard.group
        )

    def rows(self) -> torch.Tensor:
        """The wanted rows of this member. Collective."""
        return self.issue().wait()

    def sums(self) -> torch.Tensor:
        """A tensor of zeros for the gradient of the wanted rows."""
        wanted = self.wanted[self.member]
        return self.shard.grad.new_zeros((len(wanted), *self.shard.grad.shape[1:]))

    def add(self, grad: torch.Tensor) -> None:
        """Send the gradients of the wanted rows to the members that hold these rows, which add them
        in the order of the members."""
        held, to_send = self.shard.shards[self.member], self._rows_to_send()
        arrived = all_to_all_rows(
            grad.to(self.shard.grad.dtype),
            self._receive_counts(),
            [len(rows) for rows in to_send],
            self.shard.group,
        )
        for rows, received in zip(
            to_send, arrived.split([len(rows) for rows in to_send]), strict=True
        ):
            if len(rows):
                self.shard.grad[rows.within(held)] += received

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """As :meth:`add`, of the product left^T right."""
        self.add(product(left, right, self.shard.grad.dtype))
