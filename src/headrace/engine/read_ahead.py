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
"""About how many batches the processes read ahead of the loop."""

_MOST_AHEAD = 4096
"""The most samples that one process reads ahead."""


class _SampleSource(Protocol):
    """Reads samples by their number."""

    def read(self, index: int) -> Item:
        """Read the sample ``index``: its fields as tensors."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """The fields of the error for a sample that a worker could not read, as errors themselves
    cannot always be sent between processes."""

    what: str
    got: str | None
    wanted: str | None
    hint: str | None

    def error(self) -> DataError:
        """The error to raise where the sample is used."""
        return DataError(self.what, got=self.got, wanted=self.wanted, hint=self.hint)


class ReadAhead:
    """Samples of the batches that a sampler draws from its present place on, read by processes
    beside the loop."""

    def __init__(
        self, samples: _SampleSource, sampler: BatchSampler, *, workers: int, per_batch: float
    ) -> None:
        """Start ``workers`` processes that read ``samples`` in the order in which a copy of
        ``sampler`` draws them; a batch has about ``per_batch`` samples."""
        ahead_per_worker = min(_MOST_AHEAD, max(2, ceil(_BATCHES_AHEAD * per_batch / workers)))
        loader: DataLoader[Any] = DataLoader(
            _WorkerDataset(samples),
            sampler=_SampleNumbers(sampler.copy()),  # type: ignore[arg-type]
            batch_size=None,
            num_workers=workers,
            prefetch_factor=ahead_per_worker,
            collate_fn=_unchanged,
            # Of its own, or it would draw its seed from the generator that dropout draws from.
            generator=torch.Generator().manual_seed(0),
        )
        self._items: Iterator[Any] = iter(loader)

    def take(self, count: int) -> list[Item | Unread]:
        """The next ``count`` samples in the order of the batches, with an error in the place of one
        that could not be read. Waits until they are read."""
        return [_as_tensors(next(self._items)) for _ in range(count)]


class _SampleNumbers:
    """The numbers of all samples that a sampler draws, batch after batch without end."""

    def __init__(self, sampler: BatchSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[int]:
        """Numbers of samples; batches are drawn from the sampler as they are needed."""
        while True:
            yield from (sample.document for sample in self._sampler.next_batch().samples)


class _WorkerDataset(Dataset[Any]):
    """The data set from which workers read samples by number. They send tensors as numpy arrays,
    as each tensor that is sent would hold an open file."""

    def __init__(self, samples: _SampleSource) -> None:
        self._samples = samples

    def __getitem__(self, index: int) -> Any:
        """The fields of a sample as arrays by name; where it cannot be read, an :class:`Unread`,
        which the loop raises when it comes to the sample."""
        try:
            return {name: _as_array(x) for name, x in self._samples.read(index).items()}
        except HeadraceError as error:
            got, wanted = (None if x is None else str(x) for x in (error.got, error.wanted))
            return Unread(what=error.what, got=got, wanted=wanted, hint=error.hint)
        except Exception as error:  # a data set may raise anything
            got = f"{type(error).__name__}: {error}"
            return Unread(what=f"item {index}", got=got, wanted="a sample", hint=None)


def _unchanged(value: Any) -> Any:
    """The collate function of the loader, which would make tensors of arrays."""
    return value


def _as_array(x: torch.Tensor) -> Any:
    """A tensor as an array, which processes send without torch; unchanged where numpy lacks its
    type."""
    try:
        return x.numpy()
    except TypeError:  # a type that numpy has not
        return x


def _as_tensors(received: Any) -> Item | Unread:
    """A sample as tensors, of the arrays that a worker sent; an error as it is."""
    if isinstance(received, Unread):
        return received
    return {name: torch.as_tensor(x) for name, x in received.items()}
