"""The order of samples: drawn at random from a data set, or as a stream gives them.

Both cut batches by a budget of tokens, take every sample exactly once an epoch, and go on where a
state was taken, on any number of ranks.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.adopt.spread_model import Item, SampleReader
from headrace.data.length_summary import summarise_lengths
from headrace.data.sampler import BatchSampler
from headrace.engine.attach_options import LengthSource
from headrace.errors import DataError
from headrace.spec.lengths import Lengths
from headrace.spec.plan import Plan
from headrace.units import counted

if TYPE_CHECKING:
    from headrace.engine.read_ahead import ReadAhead
    from headrace.planning import Problem

__all__ = [
    "DrawnOrder",
    "LoopBatch",
    "PricedOrder",
    "SampleOrder",
    "Samples",
    "StreamOrder",
]

_COLUMNS = ("length", "lengths", "num_tokens")
"""Columns of a data set that are taken for the lengths of its items, the first that it has."""

_LOOKED_AT = 8
"""Number of samples whose contents ranks compare before the first step."""


def fingerprint_of(samples: Sequence[Item]) -> str:
    """A hash of samples' names, shapes and bits."""
    digest = hashlib.sha256()
    for sample in samples:
        for name in sorted(sample):
            value = sample[name].detach().cpu().contiguous()
            digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
            digest.update(value.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """A map-style data set, in the form in which a sampler takes a corpus, and with :meth:`read`.

    Attributes:
        dataset: Gives an item for each index.
        lengths: The tokens of each item [n].
        reader: Turns an item of the data set into a sample: tensors by their names.
        name: The name of the data set's class.
        fingerprint: A hash of the lengths.
    """

    dataset: Any
    lengths: NDArray[np.int64]
    reader: SampleReader
    name: str
    fingerprint: str

    @classmethod
    def of(cls, dataset: Any, lengths: LengthSource, reader: SampleReader) -> Samples:
        """Find out how many tokens each item of a data set has. Raises DataError for a data set
        without items, where there are more or fewer lengths than items, and for a length below
        1."""
        count = len(dataset)
        found = np.asarray(_lengths(dataset, lengths, reader), dtype=np.int64).reshape(-1)
        if not count or len(found) != count:
            raise DataError(
                "lengths of the data set",
                got=f"{len(found):,} of {count:,} items",
                wanted="one for each item, in tokens",
            )
        if found.min() < 1:
            at = int(found.argmin())
            raise DataError(f"length of item {at}", got=int(found[at]), wanted=">= 1 token")
        digest = hashlib.sha256(found.tobytes()).hexdigest()
        return cls(
            dataset=dataset,
            lengths=found,
            reader=reader,
            name=type(dataset).__name__,
            fingerprint=digest,
        )

    def facts(self) -> dict[str, Any]:
        """The lengths, summarized, for reports."""
        found = summarise_lengths(self.lengths, name=self.name).facts()
        return found | {"fingerprint": self.fingerprint, "context": int(self.lengths.max())}

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return int(self.lengths.max())

    @property
    def total(self) -> int:
        """Sum of the tokens of all samples."""
        return int(self.lengths.sum())

    def contents(self) -> str:
        """A hash of a few samples at equal distances, which must be the same on all ranks."""
        spread = np.linspace(0, len(self.lengths) - 1, _LOOKED_AT)
        indices = sorted({int(at) for at in spread})
        return fingerprint_of([self.read(at) for at in indices])

    def read(self, index: int) -> Item:
        """Read one sample. Raises DataError where its tokens are not as many as ``lengths`` say."""
        item = self.reader.read(self.dataset[index], f"item {index}")
        count, expected = self.reader.length(item), int(self.lengths[index])
        if count != expected:
            raise DataError(
                f"item {index} of {self.name}",
                got=f"{count} tokens",
                wanted=f"{expected}, as its length says",
                hint="lengths count the tokens of an item without padding",
            )
        return item


def _lengths(dataset: Any, lengths: LengthSource, reader: SampleReader) -> Any:
    """The tokens of every item [n]. ``lengths`` has them, or is the name of the column that does,
    or a function from an item to its tokens. Where it is None, the first column named in _COLUMNS
    has them; without such a column all items are read and counted. Raises DataError for a column
    that the data set lacks."""
    if lengths is None:
        names = getattr(dataset, "column_names", None) or ()
        lengths = next((name for name in _COLUMNS if name in names), None)
    if isinstance(lengths, str):
        try:
            return list(dataset[lengths])
        except (KeyError, IndexError, TypeError, ValueError):
            raise DataError(
                "lengths of the data set", got=f"no column {lengths!r}", wanted="a column of it"
            )
    if callable(lengths):
        return [lengths(dataset[i]) for i in range(len(dataset))]
    if lengths is not None:
        return lengths
    return [reader.length(reader.read(dataset[i], f"item {i}")) for i in range(len(dataset))]


def _nothing(_: int) -> Item:
    """No fields, for a batch whose samples have nothing that the model does not take."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoopBatch:
    """The samples of one optimizer step.

    Attributes:
        lengths: The tokens of the sequences that the planner sees: the samples, or where some are
            kept ``together``, each of these groups as one sequence.
        epoch: The pass over the data that they belong to.
        read: Gives the i-th sequence that the planner sees, as tensors by their names.
        state_after: The state of the order once they are trained, as JSON.
        together: The numbers of the samples in each sequence that the planner sees; None where
            each sample is one.
        counts: The tokens of each sample, where some are kept ``together``.
        learned: Whether the batch is trained on, so that some of its tokens must have a loss.
        like: Gives a sample with the fields that all samples of this batch have; None where these
            are those of the sample that the model was measured with.
        beside: Gives the fields of the i-th sample that the model does not take.
        starts: Where each rank has its own samples, the number of the first sample of each rank,
            then the number of samples [ranks + 1].
        bring: Where each rank has its own samples, fetches those that this rank works on in a plan;
            no others may be read. Collective.
    """

    lengths: Lengths
    epoch: int
    read: Callable[[int], Item] = field(repr=False)
    state_after: Mapping[str, Any] = field(repr=False)
    together: Sequence[tuple[int, ...]] | None = None
    counts: Sequence[int] = ()
    learned: bool = True
    like: Callable[[], Item] | None = None
    beside: Callable[[int], Item] = field(default=_nothing, repr=False)
    starts: Sequence[int] | None = None
    bring: Callable[[Plan], None] = field(default=lambda plan: None, repr=False)

    def members(self, index: int) -> tuple[int, ...]:
        """The numbers of the samples that make up the i-th sequence of the plan."""
        return (index,) if self.together is None else self.together[index]

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens of each sample."""
        return self.lengths.tokens if self.together is None else self.counts


class SampleOrder(Protocol):
    """Endless batches of samples, in an order that all ranks share."""

    @property
    def epoch(self) -> int:
        """The pass over the data that the next batch belongs to."""
        ...

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sample, where it is known."""
        ...

    @property
    def total(self) -> int:
        """Tokens of all samples, where it is known; else the most that a batch is made of."""
        ...

    @property
    def fingerprint(self) -> str:
        """A text that must be equal on all ranks."""
        ...

    def next_batch(self) -> LoopBatch:
        """The samples of the next step."""
        ...

    def coming(self, epochs: int | None) -> Iterator[Lengths] | None:
        """The lengths of the batches that follow, without taking them: of the first ``epochs``
        passes over the data, endless where that is None. None where they are not known before the
        data is read."""
        ...

    def first(self) -> Item:
        """A sample of the data set that shows the names and shapes of fields. It stays in the
        order, to come in a batch later."""
        ...

    def facts(self) -> dict[str, Any]:
        """What is known of the data before it is read, for a report: any keys, with values that
        JSON can hold."""
        ...

    def state(self) -> dict[str, Any]:
        """The position in the order, as JSON."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken. Raises DataError for a state of other data."""
        ...

    def close(self) -> None:
        """End the processes that read samples ahead."""
        ...


@runtime_checkable
class PricedOrder(Protocol):
    """An order in which costs and ranks decide which samples a batch holds."""

    def price(self, problem: Problem) -> None:
        """Draw batches for the costs and ranks of this planning problem from now on."""
        ...


class DrawnOrder:
    """Batches of a map-style data set, drawn without replacement; read ahead by ``workers``
    processes where there are any."""

    def __init__(self, samples: Samples, sampler: BatchSampler, *, workers: int = 0) -> None:
        """An order of ``samples`` in the batches that ``sampler`` draws of them."""
        self.samples = samples
        self._sampler, self._workers = sampler, workers
        self._contents = ""  # a hash of some samples, once they were read
        self._ahead: ReadAhead | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return int(self._sampler.state()["epoch"])

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sample."""
        return self.samples.longest

    @property
    def total(self) -> int:
        """Sum of the tokens of all samples."""
        return self.samples.total

    @property
    def fingerprint(self) -> str:
        """A hash of some samples, and one of the lengths."""
        return f"{self._hashed_samples()[:12]} {self.samples.fingerprint}"

    def _hashed_samples(self) -> str:
        """A hash of some samples, which are read once."""
        if not self._contents:
            self._contents = self.samples.contents()
        return self._contents

    def next_batch(self) -> LoopBatch:
        """The samples of the next step."""
        if self._workers and self._ahead is None:
            self._ahead = self._reading_ahead()  # from where the sampler stands, so before it moves
        batch = self._sampler.next_batch()
        indices = [sample.document for sample in batch.samples]
        ready = None if self._ahead is None else self._ahead.take(len(indices))

        def read(i: int) -> Item:
            """The i-th sample of the batch; raises what a worker that read it ahead failed with."""
            found = self.samples.read(indices[i]) if ready is None else ready[i]
            if isinstance(found, dict):
                return found
            raise found.error()

        return LoopBatch(
            lengths=batch.lengths,
            epoch=batch.epoch,
            state_after={**batch.state_after, "samples": self._hashed_samples()},
            read=read,
        )

    def _reading_ahead(self) -> ReadAhead:
        """Start the processes that read the samples of coming batches."""
        from headrace.engine.read_ahead import ReadAhead

        each = self._sampler.per_batch
        return ReadAhead(self.samples, self._sampler, workers=self._workers, per_batch=each)

    def close(self) -> None:
        """End the processes that read ahead."""
        self._ahead = None

    def coming(self, epochs: int | None) -> Iterator[Lengths]:
        """The lengths of the batches that follow, from a copy of the sampler."""
        sampler = self._sampler.copy()
        while epochs is None or int(sampler.state()["epoch"]) < epochs:
            yield sampler.next_batch().lengths

    def facts(self) -> dict[str, Any]:
        """The lengths of the samples, summarized."""
        return self.samples.facts()

    def first(self) -> Item:
        """The longest sample of the data set."""
        return self.samples.read(int(self.samples.lengths.argmax()))

    def state(self) -> dict[str, Any]:
        """The position in the order and a hash of some samples, as JSON."""
        return {**self._sampler.state(), "samples": self._hashed_samples()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises DataError for that of other samples."""
        self._sampler.restore(state)
        self._ahead = None
        known = state.get("samples", self._hashed_samples())  # older states do not have it
        # Samples that are drawn anew at each reading cannot be compared.
        if known != self._hashed_samples() == self.samples.contents():
            raise DataError(
                f"samples of {self.samples.name}",
                got="others of the same lengths, or in another order",
                wanted="those that it had when the state was taken",
                hint="restore the data set, or start anew",
            )


_NO_ITEM = object()
"""What an iterator that has ended gives."""


def _continued(crc: int, item: Item) -> int:
    """The checksum of the items of ``crc`` and of one more."""
    return zlib.crc32(fingerprint_of([item]).encode(), crc)


class StreamOrder:
    """Batches of an iterable data set, in the order in which it gives its items. The data set is
    iterated over anew for every epoch, and must give the same items on all ranks."""

    def __init__(self, dataset: Iterable[Any], reader: SampleReader, *, batch_tokens: int) -> None:
        """An order that reads samples one after the other into batches of at most ``batch_tokens``
        tokens."""
        self._dataset, self._reader = dataset, reader
        self._budget = batch_tokens
        # Items that were taken in the epoch, and a checksum of them.
        self._position = {"epoch": 0, "items": 0, "crc": 0}
        self._items: Iterator[Any] = iter(dataset)
        self._read_items = 0  # that ``_items`` has given
        self._next: Item | None = None  # the item that was read and not taken yet
        self._read_failed = False  # so the iterator may have ended, or be past the position

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._position["epoch"]

    @property
    def longest(self) -> int | None:
        """None: a stream does not tell its longest sample."""
        return None

    @property
    def total(self) -> int:
        """The token budget of a batch, as the tokens of all samples of a stream are not known."""
        return self._budget

    @property
    def fingerprint(self) -> str:
        """A text with the beginning of the next item: 64 values of each field."""
        shown = {name: x.flatten()[:64].tolist() for name, x in sorted(self.first().items())}
        return f"{self._reader.length(self.first())} tokens {shown}"

    def next_batch(self) -> LoopBatch:
        """Take the items that follow, as many as the budget of tokens holds, one at least; a batch
        ends at the end of the epoch. Where an item cannot be read, none of the batch is taken: the
        next call begins with the same items."""
        self._read_next()
        epoch, items, total = self.epoch, list[Item](), 0
        taken, crc = self._position["items"], self._position["crc"]
        while (item := self._next) is not None:
            count = self._reader.length(item)
            if items and total + count > self._budget:
                break
            items.append(item)
            total += count
            crc = _continued(crc, item)
            self._next = None  # held in ``items`` alone, also where the next one cannot be read
            self._next = self._read(taken + len(items))
        self._position = {"epoch": epoch, "items": taken + len(items), "crc": crc}
        if self._next is None:
            self._position = {"epoch": epoch + 1, "items": 0, "crc": 0}
            self._items, self._read_items = iter(self._dataset), 0
        return LoopBatch(
            lengths=Lengths.of(map(self._reader.length, items)),
            epoch=epoch,
            read=lambda i: items[i],
            state_after=self.state(),
        )

    def coming(self, epochs: int | None) -> None:
        """None: the lengths of a stream are not known before it is read."""

    def facts(self) -> dict[str, Any]:
        """The class of the data set, for reports."""
        return {"name": type(self._dataset).__name__}

    def first(self) -> Item:
        """The item that comes next, which is not consumed."""
        self._read_next()
        assert self._next is not None, "read"
        return self._next

    def state(self) -> dict[str, Any]:
        """The epoch, how many of its items were consumed, and a checksum of these."""
        return dict(self._position)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position: read the items that were consumed again, from where this
        order stands if it can. Raises DataError where the data set has fewer or gives others, for a
        generator, which gives its items once, that is past the position, and for a class that is
        its own iterator: whether it begins anew is not known."""
        epoch, items, crc = (state.get(key) for key in ("epoch", "items", "crc"))
        if any(type(value) is not int or value < 0 for value in (epoch, items)):
            raise DataError("state of the data", got=dict(state), wanted="that of a stream")
        position = {"epoch": int(epoch or 0), "items": int(items or 0)}
        here, consumed = self._position, position["items"]
        if self._read_failed or position["epoch"] != here["epoch"] or consumed < here["items"]:
            self._begin_again(position)
            here = here if self._read_items else {"items": 0, "crc": 0}
        reached = False
        try:
            position["crc"] = self._skipped(here["items"], consumed, here["crc"])
            # A state that an earlier version saved has no checksum.
            if crc is not None and crc != position["crc"]:
                raise DataError(
                    "stream of samples",
                    got=f"others for the first {counted(consumed, 'item')} of epoch {epoch}",
                    wanted="those that it gave when the state was taken",
                    hint="shuffle by a seed and the epoch alone, or give a data set by number",
                )
            self._position, reached = position, True
        finally:
            self._read_failed = not reached

    def _begin_again(self, position: Mapping[str, int]) -> None:
        """Iterate over the data set anew, to reach a position that is not ahead. Raises DataError
        where it cannot be, unless its iterator is at the position."""
        items, taken = iter(self._dataset), self._position["items"]
        # A loader with persistent workers gives the same iterator, which begins anew.
        is_loader = isinstance(self._dataset, torch.utils.data.DataLoader)
        if items is not self._items or is_loader or not self._read_items:
            self._items, self._read_items = items, 0
        elif isinstance(type(items).__iter__, FunctionType):
            raise DataError(
                "stream of samples",
                got=f"{type(items).__name__}, which is its own iterator",
                wanted="a new iterator for each loop, to go on where a run was",
                hint="write __iter__ with yield, and leave __next__ out",
            )
        elif position["epoch"] or not self._read_items == taken <= position["items"]:
            raise DataError(
                "stream of samples",
                got=f"a generator that has given {counted(self._read_items, 'item')}",
                wanted=f"one to go on with after {position['items']}",
                hint="give what can be looped over again, such as a list or a class with __iter__",
            )
        self._next = None

    def _skipped(self, taken: int, consumed: int, crc: int) -> int:
        """Skip items until ``consumed`` of the epoch are taken, where ``taken`` are; return their
        checksum, which continues ``crc``. Raises DataError where there are fewer."""
        for at in range(taken, consumed):
            item = self._read(at) if self._next is None else self._next
            self._next = None
            if item is None:
                raise DataError(
                    "stream of samples",
                    got=f"{at} items",
                    wanted=f"more than {at}",
                    hint="it gave more when the state was taken",
                )
            crc = _continued(crc, item)
        return crc

    def close(self) -> None:
        """Do nothing: no process reads ahead."""

    def _read_next(self) -> None:
        """Read the next item of the epoch without taking it, unless that was done already. Raises
        DataError where the data set gives no more items."""
        if self._read_failed:
            self.restore(self._position)
        if self._next is None:
            self._next = self._read(self._position["items"])
        if self._next is None:
            raise DataError(
                "stream of samples",
                got="no item",
                wanted="at least one in every epoch",
                hint="a generator gives its items once: give what can be looped over again",
            )

    def _read(self, place: int) -> Item | None:
        """The next item of the stream as tensors, whose place in the epoch is ``place``; None at
        the stream's end."""
        self._read_failed = True  # until it was read
        item = next(self._items, _NO_ITEM)
        self._read_items += item is not _NO_ITEM
        found = None if item is _NO_ITEM else self._reader.read(item, f"item {place} of the stream")
        self._read_failed = False
        return found
