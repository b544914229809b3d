"""The rows that one rank exchanges with all others, in few calls.

A rank serves or reads at most one interval of each weight of a bucket to or from every peer, and
they travel peer by peer. With a thousand peers and seven weights these are thousands of intervals,
but they look alike. An owner's few rows lie in one place of most readers, so there are few *kinds*
of readers: what is sent to one of a kind is put together once. A reader of whole weights gets as
many rows of one owner as of the next, and those follow each other: owners stand in *runs*, whose
part of a weight is a matrix on both sides:

    wire    [owners, elements of all parts][:, the part's]
    tensor  [owners, elements of the part], rows that follow each other
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
"""[peers, weights, 2]: first row and end."""

Tensors = Mapping[str, torch.Tensor]
"""This rank's rows of each weight, by its name."""


@dataclass(frozen=True, slots=True)
class _Part:
    """``rows`` rows from ``start`` of weight number ``weight`` (from 0) of the bucket; ``at`` is
    where they begin among a peer's elements, ``elements`` how many they have."""

    weight: int
    start: int
    rows: int
    at: int
    elements: int

    def of(self, tensor: torch.Tensor, peers: int = 1) -> torch.Tensor:
        """The rows of ``peers`` consecutive peers in ``tensor``, [peers, elements]."""
        return tensor[self.start : self.start + peers * self.rows].view(peers, self.elements)


def _parts(bounds: Bounds, row_elements: Sequence[int]) -> tuple[_Part, ...]:
    """The non-empty intervals of ``bounds`` [weights, 2], in order."""
    found, at = list[_Part](), 0
    for weight, ((start, end), width) in enumerate(zip(bounds.tolist(), row_elements, strict=True)):
        if end > start:
            found.append(_Part(weight, start, end - start, at, (end - start) * width))
            at += found[-1].elements
    return tuple(found)


def _elements(parts: Sequence[_Part]) -> int:
    return sum(part.elements for part in parts)


class ServedRows:
    """The rows of a bucket that a rank serves to readers.

    ``bounds`` [peers, weights, 2] are first row and end, counted from the rank's own first, empty
    where they are the same; ``row_elements`` of each weight, of which the rank owns ``owned`` rows.
    """

    def __init__(
        self, bounds: Bounds, row_elements: Sequence[int], owned: Sequence[int], rank: int
    ) -> None:
        """Sort the readers by kind, and note where each kind's rows lie among this rank's own."""
        known: dict[bytes, int] = {}
        self._kinds: list[tuple[_Part, ...]] = []
        self._readers: list[int] = []
        self._own: int | None = None  # index of this rank among the readers
        self.sizes = [0] * len(bounds)
        flat = np.ascontiguousarray(bounds).reshape(len(bounds), -1)
        for peer in np.flatnonzero((bounds[:, :, 1] > bounds[:, :, 0]).any(axis=1)).tolist():
            kind = known.setdefault(flat[peer].tobytes(), len(known))
            if kind == len(self._kinds):
                self._kinds.append(_parts(bounds[peer], row_elements))
            if peer == rank:
                self._own = len(self._readers)
            else:
                self.sizes[peer] = _elements(self._kinds[kind])
            self._readers.append(kind)
        self.total = sum(self.sizes)
        whole = np.array([(0, rows) for rows in owned], dtype=np.int64)
        self._all = _parts(whole, row_elements)
        first = {part.weight: part.at for part in self._all}
        self._spans = [
            [
                (first[part.weight] + part.start * row_elements[part.weight], part.elements)
                for part in parts
            ]
            for parts in self._kinds
        ]

    def own(self, names: Sequence[str], tensors: Tensors) -> list[torch.Tensor]:
        """The rows of each weight that the rank reads of itself, [1, elements]."""
        if self._own is None:
            return []
        parts = self._kinds[self._readers[self._own]]
        return [part.of(tensors[names[part.weight]]) for part in parts]

    def pack(
        self, names: Sequence[str], tensors: Tensors, dtype: torch.dtype | None
    ) -> torch.Tensor:
        """The buffer to send to all readers, packed from ``tensors``, as ``dtype`` or in their own
        type."""
        like = tensors[names[0]]
        pieces = [
            torch.cat([part.of(tensors[names[part.weight]])[0] for part in parts]).to(
                dtype or like.dtype
            )
            for parts in self._kinds
        ]
        others = [kind for turn, kind in enumerate(self._readers) if turn != self._own]
        if not others:
            return like.new_empty(0, dtype=dtype or like.dtype)
        return torch.cat([pieces[kind] for kind in others])

    def add(
        self, wire: torch.Tensor, own: Sequence[torch.Tensor], names: Sequence[str], sums: Tensors
    ) -> None:
        """Set ``sums`` to the rows that all readers sent plus ``own``, added in rank order."""
        total = sums[names[0]].new_zeros(_elements(self._all))
        into = [[total[at : at + count] for at, count in spans] for spans in self._spans]
        sizes = [
            part.elements
            for turn, kind in enumerate(self._readers)
            if turn != self._own
            for part in self._kinds[kind]
        ]
        came = iter(wire.split(sizes)) if sizes else iter(())
        for turn, kind in enumerate(self._readers):
            values = (rows[0] for rows in own) if turn == self._own else came
            for target, value in zip(into[kind], values, strict=False):
                target.add_(value)
        for part in self._all:
            part.of(sums[names[part.weight]])[0].copy_(total[part.at : part.at + part.elements])


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of ``owners`` owners of equal rows: ``parts`` of the first one, from element ``at`` of
    the buffer."""

    owners: int
    at: int
    parts: tuple[_Part, ...]
    own: bool

    def pairs(
        self, wire: torch.Tensor, names: Sequence[str], tensors: Tensors
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(view of the buffer, view of the tensor) for every part, each [owners, elements of the
        part]."""
        size = self.owners * _elements(self.parts)
        rows = wire[self.at : self.at + size].view(self.owners, -1)
        for part in self.parts:
            there = rows[:, part.at : part.at + part.elements]
            yield there, part.of(tensors[names[part.weight]], self.owners)


class ReadRows:
    """The rows of a bucket that a rank reads from owners; ``bounds`` and ``row_elements`` as of
    :class:`ServedRows`."""

    def __init__(self, bounds: Bounds, row_elements: Sequence[int], rank: int) -> None:
        """Find the runs of owners of which this rank reads equally many rows."""
        lengths = bounds[:, :, 1] - bounds[:, :, 0]
        elements = (lengths * np.array(row_elements, dtype=np.int64)).sum(axis=1)
        elements[rank] = 0
        self.sizes: list[int] = elements.tolist()
        self.total = sum(self.sizes)
        self._runs = list[_Run]()
        peers, at = np.flatnonzero(lengths.any(axis=1)), 0
        for first, end in pairwise(_cuts(bounds[peers], peers == rank)):
            parts, own = _parts(bounds[peers[first]], row_elements), bool(peers[first] == rank)
            self._runs.append(_Run(end - first, at, parts, own))
            at += 0 if own else (end - first) * _elements(parts)

    def own(self, names: Sequence[str], tensors: Tensors) -> list[torch.Tensor]:
        """The rows of each weight that the rank reads of itself, [1, elements]."""
        parts = [part for run in self._runs if run.own for part in run.parts]
        return [part.of(tensors[names[part.weight]]) for part in parts]

    def pack(
        self, names: Sequence[str], tensors: Tensors, dtype: torch.dtype | None
    ) -> torch.Tensor:
        """The buffer to send to all owners, packed from ``tensors``, as ``dtype`` or in their own
        type."""
        like = tensors[names[0]]
        wire = like.new_empty(self.total, dtype=dtype or like.dtype)
        for there, here in self._pairs(wire, names, tensors):
            there.copy_(here)
        return wire

    def unpack(self, wire: torch.Tensor, names: Sequence[str], tensors: Tensors) -> None:
        """Copy the buffer received from all owners into ``tensors``."""
        for there, here in self._pairs(wire, names, tensors):
            here.copy_(there)

    def _pairs(
        self, wire: torch.Tensor, names: Sequence[str], tensors: Tensors
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs (received values, the rows that they belong to), of all ranks but this one."""
        for run in self._runs:
            if not run.own:
                yield from run.pairs(wire, names, tensors)


def _cuts(bounds: Bounds, own: NDArray[np.bool_]) -> list[int]:
    """The indices at which runs begin among owners of ``bounds`` [owners, weights, 2], and the end.
    An owner joins the run when it has as many rows of every weight as the one before, and they
    follow each other."""
    if not len(bounds):
        return [0]
    lengths = bounds[:, :, 1] - bounds[:, :, 0]
    follows = (bounds[1:, :, 0] == bounds[:-1, :, 1]) | (lengths[1:] == 0)
    alike = (lengths[1:] == lengths[:-1]).all(axis=1) & follows.all(axis=1)
    alike &= ~own[1:] & ~own[:-1]
    return [0, *(np.flatnonzero(~alike) + 1).tolist(), len(bounds)]
