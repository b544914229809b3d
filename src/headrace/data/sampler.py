"""Random batches without replacement, the same whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, dataclass, field, fields, replace
from math import ceil
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError, DataError, did_you_mean
from headrace.spec.lengths import Lengths

__all__ = [
    "Batch",
    "BatchSampler",
    "Curriculum",
    "EpochOrder",
    "MeasuredDocuments",
    "Pieces",
    "Position",
    "Sample",
    "SampleTable",
    "Sampler",
    "SamplerOptions",
    "TooLong",
    "cut",
    "order_epoch",
    "position_in",
]

TooLong = Literal["truncate", "split", "refuse"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """All samples, in arrays [samples]: sample i is ``lengths[i]`` tokens of document
    ``documents[i]`` from its token ``starts[i]`` on."""

    documents: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)


def cut(lengths: NDArray[np.int64], *, context: int | None, too_long: TooLong) -> Pieces:
    """The samples of documents of these lengths.

    Documents longer than ``context`` tokens are truncated to it, or split into pieces of it and
    a rest; ``refuse`` raises DataError for them. Each later piece begins with the last token of the
    one before: so every token but the document's first is predicted once, and no rest is a single
    token. Unless documents are split, sample i is document i.
    """
    documents = np.arange(len(lengths), dtype=np.int64)
    starts = np.zeros_like(documents)
    if context is None or not (lengths > context).any():
        return Pieces(documents=documents, starts=starts, lengths=lengths)
    if too_long == "refuse":
        raise _too_long_error(lengths, context)
    if too_long == "truncate":
        return Pieces(documents=documents, starts=starts, lengths=np.minimum(lengths, context))
    stride = max(1, context - 1)  # pieces overlap by one token
    counts = np.maximum(-(-(lengths - 1) // stride), 1)  # pieces of each document, rounded up
    # For each piece the index of the first piece of its document.
    first = np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.arange(len(first)) - first) * stride
    documents = np.repeat(documents, counts)
    piece_lengths = np.minimum(lengths[documents] - starts, context)
    return Pieces(documents=documents, starts=starts, lengths=piece_lengths)


def _too_long_error(lengths: NDArray[np.int64], context: int) -> DataError:
    """The error that names the longest document above the context, and how many more there are."""
    longer = np.flatnonzero(lengths > context)
    worst = int(longer[np.argmax(lengths[longer])])
    others = f" and {len(longer) - 1:,} more that are too long" if len(longer) > 1 else ""
    return DataError(
        f"document {worst}{others}",
        got=f"{lengths[worst]:,} tokens",
        wanted=f"at most {context:,}, the context",
        hint="choose 'truncate' or 'split' for documents that are too long, or a longer context",
    )


Curriculum = Literal["none", "short-to-long"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOptions:
    """How batches are drawn.

    Exactly one of ``batch_tokens``, a budget that only a single longer sample may exceed, and
    ``batch_sequences``, a count. ``context`` is the most tokens of a sample, None for no limit,
    ``too_long`` what becomes of longer documents. Samples of fewer than ``min_tokens`` are
    dropped: a single token has nothing to predict. With ``short-to-long``, step s of the first
    ``curriculum_steps`` draws from the shortest (s + 1) / curriculum_steps of the samples, or from
    as many as fill the batch. Without ``shuffle`` samples come in the order of the documents.
    Raises ConfigError for a value out of range.
    """

    batch_tokens: int | None = None
    batch_sequences: int | None = None
    context: int | None = None
    too_long: TooLong = "truncate"
    curriculum: Curriculum = "none"
    curriculum_steps: int = 0
    min_tokens: int = 2
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        """Raise ConfigError for options out of range or that exclude each other."""
        if (self.batch_tokens is None) == (self.batch_sequences is None):
            got = "both" if self.batch_tokens is not None else "neither"
            raise ConfigError("batch_tokens and batch_sequences", got=got, wanted="one of them")
        for name in ("batch_tokens", "batch_sequences", "context", "min_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"data.{name}", got=value, wanted=">= 1")
        if self.context is not None and self.context < self.min_tokens:
            raise ConfigError(
                "data.min_tokens",
                got=self.min_tokens,
                wanted=f"at most data.context, {self.context}",
            )
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError("data.seed", got=self.seed, wanted="0 <= seed < 2^64")
        for name, words in (("too_long", get_args(TooLong)), ("curriculum", get_args(Curriculum))):
            value = getattr(self, name)
            if value not in words:
                hint = did_you_mean(str(value), words)
                wanted = f"one of {', '.join(words)}"
                raise ConfigError(f"data.{name}", got=repr(value), wanted=wanted, hint=hint)
        if (self.curriculum_steps > 0) != (self.curriculum != "none"):
            got = f"{self.curriculum_steps} with curriculum {self.curriculum!r}"
            raise ConfigError("data.curriculum_steps", got=got, wanted=">= 1 with one, else 0")

    def to_json(self) -> dict[str, Any]:
        """A JSON object that :meth:`from_json` reads back."""
        value = asdict(self)
        if self.shuffle:  # left out, as states saved before this option existed do not have it
            del value["shuffle"]
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> SamplerOptions:
        """Read the options that :meth:`to_json` gave."""
        return cls(**value)

    def full(self, *, sequences: int, tokens: int, following: int) -> bool:
        """Whether a batch of so many sequences and tokens cannot take another sample, of
        ``following`` tokens. An empty batch takes any."""
        if self.batch_tokens is None:
            return sequences == self.batch_sequences
        return sequences > 0 and tokens + following > self.batch_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochOrder:
    """Batch b of the epoch is samples ``ids[bounds[b] : bounds[b + 1]]``."""

    ids: NDArray[np.int64]
    bounds: NDArray[np.int64]

    @property
    def batches(self) -> int:
        """The number of batches of the epoch."""
        return len(self.bounds) - 1

    def batch(self, index: int) -> NDArray[np.int64]:
        """The samples of one batch."""
        return self.ids[self.bounds[index] : self.bounds[index + 1]]


def order_epoch(
    ids: NDArray[np.int64],
    lengths: NDArray[np.int64],
    options: SamplerOptions,
    *,
    epoch: int,
    first_step: int,
) -> EpochOrder:
    """Permute the samples ``ids``, whose lengths in tokens are ``lengths``, and cut them into
    batches.

    ``first_step`` is the training step of the first batch: a curriculum may span epochs. Every
    sample is in exactly one batch; the last batch of an epoch may be small.
    """
    key = np.array([options.seed, epoch], dtype=np.uint64)  # a list would pass through a float
    bits = np.random.Philox(key=key)
    # Raw random numbers are sorted, as numpy may change its own permutations between versions.
    permutation = np.argsort(bits.random_raw(len(ids)), kind="stable")
    order = permutation if options.shuffle else np.arange(len(ids))  # places in ``ids``
    early: list[list[int]] = []
    if first_step < options.curriculum_steps:
        chances = bits.random_raw(len(ids))
        early = _curriculum(lengths[order], options, first_step=first_step, chances=chances)
        taken = np.array([place for batch in early for place in batch], dtype=np.int64)
        rest = np.ones(len(order), dtype=bool)
        rest[taken] = False
        order = np.concatenate([order[taken], order[rest]])
    bounds = [0, *np.cumsum([len(batch) for batch in early], dtype=np.int64).tolist()]
    _cut(lengths[order], options, bounds)
    return EpochOrder(ids=ids[order], bounds=np.array(bounds, dtype=np.int64))


def _cut(lengths: NDArray[np.int64], options: SamplerOptions, bounds: list[int]) -> None:
    """Append to ``bounds`` the ends of the batches that follow ``bounds[-1]``: each takes the next
    samples of ``lengths``, in order, until it is full."""
    totals, budget = np.cumsum(lengths), options.batch_tokens
    while (start := bounds[-1]) < len(lengths):
        if budget is None:
            stop = start + (options.batch_sequences or 1)
        else:
            before = int(totals[start - 1]) if start else 0
            stop = int(np.searchsorted(totals, before + budget, side="right"))
        # At least one sample, as one above the budget is a batch alone.
        bounds.append(min(max(stop, start + 1), len(lengths)))


def _curriculum(
    lengths: NDArray[np.int64],
    options: SamplerOptions,
    *,
    first_step: int,
    chances: NDArray[np.uint64],
) -> list[list[int]]:
    """The batches of the curriculum's steps from ``first_step`` on, as lists of places in
    ``lengths``.

    Samples are released into a pool from short to long: a share in each step, and more when the
    pool is empty. Each sample of the pool is as likely to be drawn; ``chances`` are the random
    numbers for that. (To take the pool in the order of the permutation would favour what was
    released last.)
    """
    sizes, by_length = lengths.tolist(), np.argsort(lengths, kind="stable").tolist()
    numbers = iter(chances.tolist())
    pool: list[int] = []
    batches: list[list[int]] = []
    released = 0  # samples that have been in the pool
    held = -1  # a sample that was drawn when its batch was full, for the next batch; -1 for none
    for step in range(first_step, options.curriculum_steps):
        due = max(released, ceil(len(sizes) * (step + 1) / options.curriculum_steps))
        pool += by_length[released:due]
        released = due
        batch: list[int] = []
        tokens = 0
        while held >= 0 or pool or released < len(sizes):
            if held < 0:
                if not pool:
                    pool.append(by_length[released])
                    released += 1
                held = _draw(pool, next(numbers))
            if options.full(sequences=len(batch), tokens=tokens, following=sizes[held]):
                break
            batch.append(held)
            tokens, held = tokens + sizes[held], -1
        if not batch:  # the epoch's samples are used up before the curriculum's steps
            break
        batches.append(batch)
    return batches


def _draw(pool: list[int], number: int) -> int:
    """Remove a sample from the pool and return it, chosen by a random number of 64 bits."""
    at = (number * len(pool)) >> 64  # number / 2^64 of the way through the pool
    pool[at], pool[-1] = pool[-1], pool[at]  # so that it is removed in constant time
    return pool.pop()


@dataclass(frozen=True, slots=True)
class Sample:
    """``length`` tokens of a document from token ``start`` on."""

    document: int
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The samples of one optimizer step, in the order of ``lengths``.

    ``lengths.ids`` are the samples' numbers in the sampler's table. ``state_after`` is the state
    of the sampler once this batch is trained: what a checkpoint keeps, however far ahead batches
    were drawn. ``tokens[i] [length]`` int32 are the ids, empty until a reader has read them, and
    ``masks`` those of the loss, empty where all tokens have one.
    """

    step: int
    epoch: int
    lengths: Lengths
    samples: tuple[Sample, ...]
    state_after: dict[str, Any] = field(repr=False)
    tokens: tuple[NDArray[np.int32], ...] = field(default=(), repr=False, compare=False)
    masks: tuple[NDArray[np.bool_] | None, ...] = field(default=(), repr=False, compare=False)


class MeasuredDocuments(Protocol):
    """Documents whose lengths are known: all that a sampler needs to know of a corpus or of another
    data set."""

    @property
    def name(self) -> str:
        """The name of the data set in messages and reports."""
        ...

    @property
    def fingerprint(self) -> str:
        """A text that is equal for equal documents."""
        ...

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, an array [documents]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a sampler stands: its next batch is ``batch`` of ``epoch``, trained in ``step``.

    ``first_step`` is the step in which the epoch began, on which a curriculum depends.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    first_step: int = 0

    def after(self, batches: int) -> Position:
        """The next position where the epoch has ``batches`` batches: the next batch, or after the
        last one the first of the next epoch."""
        if self.batch + 1 < batches:
            return replace(self, step=self.step + 1, batch=self.batch + 1)
        step = self.step + 1
        return Position(step=step, epoch=self.epoch + 1, first_step=step)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleTable:
    """The samples of a corpus: its documents, cut, without those that are too short.

    ``kept`` are the numbers of the samples [samples] among all ``pieces``, ``name`` and
    ``fingerprint`` those of the corpus.
    """

    name: str
    fingerprint: str
    pieces: Pieces
    kept: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        corpus: MeasuredDocuments,
        *,
        context: int | None,
        too_long: TooLong,
        min_tokens: int,
    ) -> SampleTable:
        """The samples of a corpus, with the limits of :class:`SamplerOptions`. Raises DataError
        when no sample is left, or a document is longer than allowed."""
        pieces = cut(corpus.lengths, context=context, too_long=too_long)
        kept = np.flatnonzero(pieces.lengths >= min_tokens)
        if not len(kept):
            got = f"{len(pieces):,}, all shorter"
            wanted = f"one of {min_tokens} tokens or more"
            raise DataError(f"samples of {corpus.name}", got=got, wanted=wanted)
        return cls(name=corpus.name, fingerprint=corpus.fingerprint, pieces=pieces, kept=kept)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample [samples]."""
        return self.pieces.lengths[self.kept]

    def batch(
        self, ids: NDArray[np.int64], *, step: int, epoch: int, state_after: dict[str, Any]
    ) -> Batch:
        """The batch of the samples ``ids``, numbers among all pieces."""
        columns = (self.pieces.documents, self.pieces.starts, self.pieces.lengths)
        rows = zip(*(column[ids].tolist() for column in columns), strict=True)
        samples = tuple(Sample(*row) for row in rows)
        return Batch(
            step=step,
            epoch=epoch,
            lengths=Lengths.of((sample.length for sample in samples), ids),
            samples=samples,
            state_after=state_after,
        )


def position_in(
    state: Mapping[str, Any], table: SampleTable, options: Mapping[str, Any]
) -> Position:
    """The position in ``state``, which a sampler with these samples and ``options`` (as JSON) has
    saved.

    Raises DataError for a state that is damaged, or of another corpus or other options, naming what
    differs.
    """
    names = [each.name for each in fields(Position)]
    if missing := {"corpus", "options", *names} - state.keys():
        wanted = f"an entry {' and one '.join(sorted(missing))}"
        raise DataError("state of the data", got=f"{len(state)} entries", wanted=wanted)
    for name in names:
        value = state[name]
        if type(value) is not int or value < 0:
            what = f"{name} in the state of the data"
            raise DataError(what, got=repr(value), wanted="an int >= 0")
    if state["corpus"] != table.fingerprint:
        raise DataError(
            f"corpus {table.name}",
            got=f"fingerprint {table.fingerprint[:12]}",
            wanted=f"{str(state['corpus'])[:12]} as when the state was taken",
            hint="documents or the tokenizer have changed since; start anew, or restore them",
        )
    before = state["options"] if isinstance(state["options"], dict) else {}
    for name, value in options.items():
        if before.get(name) != value:
            wanted = f"{before.get(name)} as when the state was taken"
            raise DataError(f"data.{name}", got=value, wanted=wanted)
    return Position(**{name: state[name] for name in names})


class BatchSampler(Protocol):
    """An object that draws the batches of a run, every sample once per epoch: a :class:`Sampler`,
    or one in which iterations choose their own samples."""

    @property
    def per_batch(self) -> float:
        """Samples of a batch, about: an average where batches have a budget of tokens."""
        ...

    def next_batch(self) -> Batch:
        """Draw the next batch and move past it."""
        ...

    def copy(self) -> BatchSampler:
        """A sampler in the same state that moves on its own."""
        ...

    def peek(self, batches: int = 1) -> tuple[Batch, ...]:
        """The next batches, without moving past them."""
        ...

    def state(self) -> dict[str, Any]:
        """The state that :meth:`restore` takes to continue with the next batch: a JSON object, in
        which ``epoch`` and ``step`` are those of the next batch."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken. Raises DataError for the state of another corpus or of
        other options."""
        ...


class Sampler:
    """Draws batches for ever, every sample once per epoch, in an order set by (seed, epoch).

    The state is four numbers and what they are valid for; it does not know of ranks, so a run
    continues with the same batches on any number of them. Raises DataError when no sample is
    left, or a document is longer than the context and the options refuse that.
    """

    def __init__(self, corpus: MeasuredDocuments, options: SamplerOptions) -> None:
        """Cut documents into samples as the options say, and drop short ones; raises DataError
        where none is left."""
        self._options = options
        self._table = SampleTable.of(
            corpus,
            context=options.context,
            too_long=options.too_long,
            min_tokens=options.min_tokens,
        )
        self._at = Position()
        self._order: EpochOrder | None = None

    @property
    def options(self) -> SamplerOptions:
        """The options by which batches are drawn."""
        return self._options

    @property
    def samples(self) -> int:
        """The number of samples of one epoch."""
        return len(self._table.kept)

    @property
    def per_batch(self) -> float:
        """Samples of a batch, about: its budget over the mean length where it has one."""
        options = self._options
        if options.batch_sequences is not None:
            return float(options.batch_sequences)
        return (options.batch_tokens or 1) / float(self._table.lengths.mean())

    def _current(self) -> EpochOrder:
        """The order of the current epoch, made when it is first asked for."""
        if self._order is None:
            self._order = self._order_at(self._at)
        return self._order

    def _order_at(self, at: Position) -> EpochOrder:
        """The order of samples of the epoch at a position."""
        return order_epoch(
            self._table.kept,
            self._table.lengths,
            self._options,
            epoch=at.epoch,
            first_step=at.first_step,
        )

    def next_batch(self) -> Batch:
        """Draw the next batch and move past it."""
        order, at = self._current(), self._at
        ids = order.batch(at.batch)
        self._at = at.after(order.batches)
        if self._at.epoch != at.epoch:
            self._order = None  # the next epoch has another order
        return self._table.batch(ids, step=at.step, epoch=at.epoch, state_after=self.state())

    def copy(self) -> Sampler:
        """A sampler in the same state that moves on its own."""
        return copy(self)  # all that is shared is never changed in place

    def peek(self, batches: int = 1) -> tuple[Batch, ...]:
        """The next batches, without moving past them."""
        ahead = self.copy()
        return tuple(ahead.next_batch() for _ in range(batches))

    def state(self) -> dict[str, Any]:
        """The state that :meth:`restore` takes to continue with the next batch: a JSON object with
        the fingerprint of the corpus, the options and the fields of :class:`Position`."""
        return {
            "corpus": self._table.fingerprint,
            "options": self._options.to_json(),
            **asdict(self._at),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken: the same batches follow, in the same order.

        Raises DataError, and changes nothing, for the state of another corpus or of other options,
        naming what differs, and for a state that is damaged.
        """
        at = position_in(state, self._table, self._options.to_json())
        order = self._order_at(at)
        if at.batch >= order.batches:
            wanted = f"fewer than {order.batches}, all of epoch {at.epoch}"
            raise DataError("batch in the state of the data", got=at.batch, wanted=wanted)
        self._at, self._order = at, order
