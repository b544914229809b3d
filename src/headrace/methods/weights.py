"""Weights as a rank holds them: all rows, or a shard; and the parts that methods ask for.

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
    """Some rows of a weight as a source, of which the fetch can be issued ahead."""

    def issue(self) -> Arriving:
        """The rows, issued."""


class Weight(Part, Protocol):
    """One weight of a layer. Vectors are whole on every member and take the parts of the matrix
    that they belong to."""

    def split(self, parts: int) -> tuple[Rows, ...]:
        """Its rows cut into ``parts`` at the borders of units (KV groups, gate/up blocks)."""

    def part(self, wanted: Sequence[Rows]) -> Part:
        """The rows ``wanted[m]`` for member m of the group; collective where they must travel."""


State = Mapping[str, Weight]
"""The weights of one layer by short name (``qkv.weight``), as this rank holds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """Rows of which this rank holds the value; gradients are partial sums, added by the push."""

    value: torch.Tensor
    grad: torch.Tensor
    member: int = 0
    unit: int = 1

    def rows(self) -> torch.Tensor:
        """All rows: no communication."""
        return self.value

    def issue(self) -> Arriving:
        """All rows, which are here."""
        return Arriving.there(self.value)

    def sums(self) -> torch.Tensor:
        """The partial sum, which is wide."""
        return self.grad

    def add(self, grad: torch.Tensor) -> None:
        """Add to the partial sum, unless it is that."""
        if grad is not self.grad:
            self.grad.add_(grad)

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add left^T right to the partial sum."""
        add_product(self.grad, left, right)

    def split(self, parts: int) -> tuple[Rows, ...]:
        """Its rows in ``parts``."""
        return split_rows(len(self.value), parts, self.unit)

    def part(self, wanted: Sequence[Rows]) -> Part:
        """A view."""
        mine = slice(wanted[self.member].start, wanted[self.member].stop)
        return Whole(value=self.value[mine], grad=self.grad[mine])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A weight whose rows are spread over a group: fetched at each use, never kept.

    ``value`` and ``grad`` are this rank's part [rows of ``shards[member]``, ...]. ``group`` may be
    a block of neighbours, of which the ``first`` is that member of the layer's group: other blocks
    hold replicas, and what a member wants it gets within its block.

        rows         all_gather(value)                       bytes sent  V W
        add(grad)    grad_part += reduce_scatter(grad)       bytes sent  V W,  V = (R - 1) / R
    """

    value: torch.Tensor
    grad: torch.Tensor
    shards: tuple[Rows, ...]
    group: dist.ProcessGroup
    unit: int = 1
    first: int = 0

    @property
    def _sizes(self) -> list[int]:
        return [len(shard) for shard in self.shards]

    def rows(self) -> torch.Tensor:
        """All rows, gathered from the group."""
        return all_gather_rows(self.value, self._sizes, self.group)

    def issue(self) -> Arriving:
        """All rows, issued."""
        everything = (Rows(0, self.shards[-1].stop),) * len(self.shards)
        return self._fetched(everything).issue()

    def sums(self) -> torch.Tensor:
        """Zeros of all rows."""
        return self.grad.new_zeros((self.shards[-1].stop, *self.grad.shape[1:]))

    def add(self, grad: torch.Tensor) -> None:
        """Sum over the group, keep this rank's rows."""
        self.grad.add_(reduce_scatter_rows(grad.to(self.grad.dtype), self._sizes, self.group))

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add left^T right, summed over the group."""
        self.add(product(left, right, self.grad.dtype))

    def split(self, parts: int) -> tuple[Rows, ...]:
        """Its rows in ``parts``."""
        return split_rows(self.shards[-1].stop, parts, self.unit)

    def part(self, wanted: Sequence[Rows]) -> Part:
        """This rank's shard itself where everybody wants their own, else fetched rows."""
        block = tuple(wanted[self.first : self.first + len(self.shards)])
        if block == self.shards:
            return Whole(value=self.value, grad=self.grad)
        return self._fetched(block)

    def _fetched(self, wanted: tuple[Rows, ...]) -> _Fetched:
        return _Fetched(shard=self, wanted=wanted, member=dist.get_rank(self.group))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fetched:
    """Rows ``wanted[member]`` of a shard's weight, from those who hold them."""

    shard: Shard
    wanted: tuple[Rows, ...]
    member: int

    def _given(self) -> list[Rows]:
        """Of this rank's rows those that each member wants."""
        return [self.shard.shards[self.member].meet(wanted) for wanted in self.wanted]

    def _taken(self) -> list[int]:
        """How many of the rows wanted here each member holds."""
        return [len(held.meet(self.wanted[self.member])) for held in self.shard.shards]

    def issue(self) -> Arriving:
        """The rows, issued."""
        held, given = self.shard.shards[self.member], self._given()
        sent = torch.cat(
            [self.shard.value[rows.within(held)] for rows in given if len(rows)]
            or [self.shard.value[:0]]
        )
        return issue_all_to_all(
            sent, [len(rows) for rows in given], self._taken(), self.shard.group
        )

    def rows(self) -> torch.Tensor:
        """The rows."""
        return self.issue().wait()

    def sums(self) -> torch.Tensor:
        """Zeros of the rows."""
        wanted = self.wanted[self.member]
        return self.shard.grad.new_zeros((len(wanted), *self.shard.grad.shape[1:]))

    def add(self, grad: torch.Tensor) -> None:
        """Send each owner its rows; the owners add them in the order of the members."""
        held, given = self.shard.shards[self.member], self._given()
        arrived = all_to_all_rows(
            grad.to(self.shard.grad.dtype),
            self._taken(),
            [len(rows) for rows in given],
            self.shard.group,
        )
        for rows, part in zip(given, arrived.split([len(rows) for rows in given]), strict=True):
            if len(rows):
                self.shard.grad[rows.within(held)] += part

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add left^T right likewise."""
        self.add(product(left, right, self.shard.grad.dtype))
