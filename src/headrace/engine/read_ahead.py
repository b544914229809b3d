"""Samples of the batches to come, read by processes beside the loop.

Every rank reads every sample, in the order in which batches come, so that the next ones are there
when their step is planned: which of them a rank works on is known only then. What a worker cannot
read is raised where the sample is used, as without workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from headrace.adopt.spread_model import Item
from headrace.data.sampler import BatchSampler
from headrace.errors import DataError, HeadraceError

__all__ = ["ReadAhead", "Unread"]

_BATCHES_AHEAD = 2
_MOST_AHEAD = 4096


class _Reads(Protocol):
    """A data set whose samples are read by their number."""

    def read(self, index: int) -> Item:
        """Read the sample of a number."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """What is wrong with a sample that a worker could not read."""

    what: str
    got: str | None
    wanted: str | None
    hint: str | None

    def error(self) -> DataError:
        """The error to raise where the sample is used."""
        return DataError(self.what, got=self.got, wanted=self.wanted, hint=self.hint)


class ReadAhead:
    """Samples of the batches that ``sampler`` draws from where it stands, read by ``workers``
    processes; ``per_batch`` samples are in a batch, about."""

    def __init__(
        self, samples: _Reads, sampler: BatchSampler, *, workers: int, per_batch: float
    ) -> None:
        """Start ``workers`` processes that read samples in the sampler's order, about so many for a
        batch, a few batches ahead."""
        ahead = min(_MOST_AHEAD, max(2, ceil(_BATCHES_AHEAD * per_batch / workers)))
        loader: DataLoader[Any] = DataLoader(
            _Readable(samples),
            sampler=_Indices(sampler.copy()),  # type: ignore[arg-type]
            batch_size=None,
            num_workers=workers,
            prefetch_factor=ahead,
            collate_fn=_as_it_is,
            # Its own: it would draw from the generator that dropout draws from.
            generator=torch.Generator().manual_seed(0),
        )
        self._items: Iterator[Any] = iter(loader)

    def take(self, count: int) -> list[Item | Unread]:
        """The next samples, in the order of the batches."""
        return [_as_tensors(next(self._items)) for _ in range(count)]


class _Indices:
    """The numbers of all samples to come, batch after batch."""

    def __init__(self, sampler: BatchSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from (sample.document for sample in self._sampler.next_batch().samples)


class _Readable(Dataset[Any]):
    """Samples by number in a worker. Tensors are sent as arrays: each would hold an open file."""

    def __init__(self, samples: _Reads) -> None:
        self._samples = samples

    def __getitem__(self, index: int) -> Any:
        """The sample as arrays by name, or the error of reading it as a value, which the loop
        raises when it comes to the sample."""
        try:
            return {name: _as_array(x) for name, x in self._samples.read(index).items()}
        except HeadraceError as error:
            got, wanted = (None if x is None else str(x) for x in (error.got, error.wanted))
            return Unread(what=error.what, got=got, wanted=wanted, hint=error.hint)
        except Exception as error:  # a data set may raise anything
            got = f"{type(error).__name__}: {error}"
            return Unread(what=f"item {index}", got=got, wanted="a sample", hint=None)


def _as_it_is(value: Any) -> Any:
    return value


def _as_array(x: torch.Tensor) -> Any:
    """A tensor as an array, which processes send without torch; unchanged where numpy lacks its
    type."""
    try:
        return x.numpy()
    except TypeError:  # a type that numpy has not
        return x


def _as_tensors(found: Any) -> Item | Unread:
    """What a process read as tensors again; an error as it is."""
    if isinstance(found, Unread):
        return found
    return {name: torch.as_tensor(x) for name, x in found.items()}
