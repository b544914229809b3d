"""The rows that one rank exchanges with all others, in few calls.

A rank serves (as owner, which stores rows) or reads (to work with them) at most one interval of
each weight of a bucket per peer, here called a part. All parts of one peer travel one after the
other, in a buffer (the *wire*) with one piece per peer. With a thousand peers and seven weights
these are thousands of parts, and copying each by itself would be slow; but many are alike:

Serving: most readers want the same of an owner's few rows. Readers that want the same are of one
*kind*, and what is sent to them is put together once for the kind.

Reading: a reader of whole weights gets as many rows from one owner as from the next, and in its
tensor those follow each other. Such owners are a *run*: what comes from all of them of one weight
is a matrix in the buffer as in the tensor, so it is copied in one call:

    buffer  [owners, elements of all parts][:, elements of this part]
    tensor  [owners, elements of this part], consecutive rows
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["ReadRows", "ServedRows", "Tensors"]

Bounds = NDArray[np.int64]
"""[peers, weights, 2]: first row and end of what each peer reads or serves of each weight."""

Tensors = Mapping[str, torch.Tensor]
"""This rank's rows of each weight, by its name."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of one weight that travel to or from one peer: ``rows`` rows, from row ``start`` on,
    of weight number ``weight`` (from 0) of the bucket. Their ``elements`` elements begin at element
    ``at`` of all that travels to or from this peer."""

    weight: int
    start: int
    rows: int
    at: int
    elements: int

    def of(self, tensor: torch.Tensor, peers: int = 1) -> torch.Tensor:
        """A view [peers, elements] of ``tensor`` [rows, ...], this rank's rows of the weight: the
        rows of this part, and those after it, which are the parts of the following peers."""
        return tensor[self.start : self.start + peers * self.rows].view(peers, self.elements)


def _parts(bounds: Bounds, row_elements: Sequence[int]) -> tuple[_Part, ...]:
    """The parts that one peer has, of ``bounds`` [weights, 2] with ``row_elements`` elements in a
    row of each weight; weights of which it has no rows are left out."""
    parts, at = list[_Part](), 0
    for weight, ((start, end), width) in enumerate(zip(bounds.tolist(), row_elements, strict=True)):
        if end > start:
            elements = (end - start) * width
            parts.append(_Part(weight, start, end - start, at, elements))
            at += elements
    return tuple(parts)


def _elements(parts: Sequence[_Part]) -> int:
    """The number of elements of all parts together."""
    return sum(part.elements for part in parts)


class ServedRows:
    """The rows of a bucket that a rank serves to readers, itself among them.

    ``bounds`` [peers, weights, 2] are the first row and the end of what each peer reads of each
    weight, counted from the first row that the rank owns, equal where there is nothing. A row of
    each weight has ``row_elements`` elements, and the rank owns ``owned`` rows of it.
    ``sizes`` are the elements that each peer reads, 0 for the rank itself; ``total`` is their sum.
    """

    def __init__(
        self, bounds: Bounds, row_elements: Sequence[int], owned: Sequence[int], rank: int
    ) -> None:
        """Sort the readers by kind, and note where each kind's rows lie among this rank's own."""
        self.sizes = [0] * len(bounds)
        self._parts_of_kind: list[tuple[_Part, ...]] = []
        self._reader_kinds: list[int] = []  # the kind of each reader, in rank order
        self._own: int | None = None  # index of this rank among the readers
        kind_of_bounds: dict[bytes, int] = {}
        bounds_of_peer = np.ascontiguousarray(bounds).reshape(len(bounds), -1)
        reads_something = (bounds[:, :, 1] > bounds[:, :, 0]).any(axis=1)
        for peer in np.flatnonzero(reads_something).tolist():
            kind = kind_of_bounds.setdefault(bounds_of_peer[peer].tobytes(), len(kind_of_bounds))
            if kind == len(self._parts_of_kind):
                self._parts_of_kind.append(_parts(bounds[peer], row_elements))
            if peer == rank:
                self._own = len(self._reader_kinds)
            else:
                self.sizes[peer] = _elements(self._parts_of_kind[kind])
            self._reader_kinds.append(kind)
        self.total = sum(self.sizes)
        own_bounds = np.array([(0, rows) for rows in owned], dtype=np.int64)
        self._owned_parts = _parts(own_bounds, row_elements)
        # (first element among all that this rank owns, number of elements) of each part of a kind
        first_element = {part.weight: part.at for part in self._owned_parts}
        self._spans_of_kind = [
            [
                (first_element[part.weight] + part.start * row_elements[part.weight], part.elements)
                for part in parts
            ]
            for parts in self._parts_of_kind
        ]

    def own(self, names: Sequence[str], tensors: Tensors) -> list[torch.Tensor]:
        """Views of the rows that the rank reads of itself, [1, elements] for each weight that has
        some."""
        if self._own is None:
            return []
        parts = self._parts_of_kind[self._reader_kinds[self._own]]
        return [part.of(tensors[names[part.weight]]) for part in parts]

    def pack(
        self, names: Sequence[str], tensors: Tensors, dtype: torch.dtype | None
    ) -> torch.Tensor:
        """The buffer [total] to send to all readers, packed from ``tensors``, as ``dtype`` or in
        their own type."""
        like = tensors[names[0]]
        pieces = [
            torch.cat([part.of(tensors[names[part.weight]])[0] for part in parts]).to(
                dtype or like.dtype
            )
            for parts in self._parts_of_kind
        ]
        other_kinds = self._kinds_of_others()
        if not other_kinds:
            return like.new_empty(0, dtype=dtype or like.dtype)
        return torch.cat([pieces[kind] for kind in other_kinds])

    def add(
        self, wire: torch.Tensor, own: Sequence[torch.Tensor], names: Sequence[str], sums: Tensors
    ) -> None:
        """Set ``sums`` to the sum of the rows that all readers sent, ``wire`` [total], and of this
        rank's ``own``, which :meth:`ReadRows.own` gives, added in rank order."""
        # all that the rank owns, one weight after the other, and the parts of each kind in it
        total = sums[names[0]].new_zeros(_elements(self._owned_parts))
        targets_of_kind = [
            [total[at : at + count] for at, count in spans] for spans in self._spans_of_kind
        ]
        sizes = [
            part.elements for kind in self._kinds_of_others() for part in self._parts_of_kind[kind]
        ]
        received = iter(wire.split(sizes)) if sizes else iter(())
        for reader, kind in enumerate(self._reader_kinds):
            values = (rows[0] for rows in own) if reader == self._own else received
            # ``strict`` would take one more from ``received``, the first part of the next reader.
            for target, value in zip(targets_of_kind[kind], values, strict=False):
                target.add_(value)
        for part in self._owned_parts:
            part.of(sums[names[part.weight]])[0].copy_(total[part.at : part.at + part.elements])

    def _kinds_of_others(self) -> list[int]:
        """The kind of each reader but this rank, in rank order."""
        return [kind for reader, kind in enumerate(self._reader_kinds) if reader != self._own]


@dataclass(frozen=True, slots=True)
class _Run:
    """``owners`` consecutive owners from each of which this rank reads equally many rows of each
    weight, and these rows follow each other in its tensors.

    ``parts`` are what it reads of the first owner. What comes from the run begins at element ``at``
    of the buffer. This rank is a run by itself (``own``), whose rows do not travel."""

    owners: int
    at: int
    parts: tuple[_Part, ...]
    own: bool

    def pairs(
        self, wire: torch.Tensor, names: Sequence[str], tensors: Tensors
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each weight of the run two views of the same rows: (of the buffer ``wire``, of the
        weight's tensor), each [owners, elements of the part]."""
        size = self.owners * _elements(self.parts)
        by_owner = wire[self.at : self.at + size].view(self.owners, -1)
        for part in self.parts:
            in_wire = by_owner[:, part.at : part.at + part.elements]
            yield in_wire, part.of(tensors[names[part.weight]], self.owners)


class ReadRows:
    """The rows of a bucket that a rank reads from owners, itself among them.

    ``bounds`` [peers, weights, 2] are the first row and the end that it reads of each weight from
    each peer, counted from the first row of its own tensor; ``row_elements`` as of
    :class:`ServedRows`. ``sizes`` are the elements read from each peer, 0 for the rank itself;
    ``total`` is their sum."""

    def __init__(self, bounds: Bounds, row_elements: Sequence[int], rank: int) -> None:
        """Find the runs of owners of which this rank reads equally many rows."""
        row_counts = bounds[:, :, 1] - bounds[:, :, 0]
        elements = (row_counts * np.array(row_elements, dtype=np.int64)).sum(axis=1)
        elements[rank] = 0
        self.sizes: list[int] = elements.tolist()
        self.total = sum(self.sizes)
        self._runs = list[_Run]()
        owners, at = np.flatnonzero(row_counts.any(axis=1)), 0
        for first, end in pairwise(_cuts(bounds[owners], owners == rank)):
            parts, own = _parts(bounds[owners[first]], row_elements), bool(owners[first] == rank)
            self._runs.append(_Run(end - first, at, parts, own))
            at += 0 if own else (end - first) * _elements(parts)

    def own(self, names: Sequence[str], tensors: Tensors) -> list[torch.Tensor]:
        """Views of the rows that the rank reads of itself, [1, elements] for each weight that has
        some."""
        parts = [part for run in self._runs if run.own for part in run.parts]
        return [part.of(tensors[names[part.weight]]) for part in parts]

    def pack(
        self, names: Sequence[str], tensors: Tensors, dtype: torch.dtype | None
    ) -> torch.Tensor:
        """The buffer [total] of gradients to send back to all owners, packed from ``tensors``, as
        ``dtype`` or in their own type."""
        like = tensors[names[0]]
        wire = like.new_empty(self.total, dtype=dtype or like.dtype)
        for in_wire, in_tensor in self._pairs(wire, names, tensors):
            in_wire.copy_(in_tensor)
        return wire

    def unpack(self, wire: torch.Tensor, names: Sequence[str], tensors: Tensors) -> None:
        """Copy the buffer [total] received from all owners into ``tensors``."""
        for in_wire, in_tensor in self._pairs(wire, names, tensors):
            in_tensor.copy_(in_wire)

    def _pairs(
        self, wire: torch.Tensor, names: Sequence[str], tensors: Tensors
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(view of the buffer, view of the tensor with the same rows), for all owners but this
        rank."""
        for run in self._runs:
            if not run.own:
                yield from run.pairs(wire, names, tensors)


def _cuts(bounds: Bounds, own: NDArray[np.bool_]) -> list[int]:
    """The indices at which runs begin among owners with ``bounds`` [owners, weights, 2], and at the
    end the number of owners; [0] without owners. An owner joins the run of the one before when it
    has as many rows of every weight, directly after those. ``own`` [owners] is True for this rank,
    which is a run by itself."""
    if not len(bounds):
        return [0]
    row_counts = bounds[:, :, 1] - bounds[:, :, 0]
    follows = (bounds[1:, :, 0] == bounds[:-1, :, 1]) | (row_counts[1:] == 0)
    joins = (row_counts[1:] == row_counts[:-1]).all(axis=1) & follows.all(axis=1)
    joins &= ~own[1:] & ~own[:-1]
    return [0, *(np.flatnonzero(~joins) + 1).tolist(), len(bounds)]
