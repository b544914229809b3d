"""The order of one epoch: a permutation of the samples, cut into batches.

It follows from (seed, epoch, options) alone, by the raw output of numpy's Philox generator, which
numpy promises to keep from version to version (it does not for its permutations).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from headrace.data.pieces import TooLong
from headrace.errors import ConfigError, did_you_mean

__all__ = ["Curriculum", "EpochOrder", "SamplerOptions", "order_epoch"]

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
        if self.shuffle:  # states of old know of no other order
            del value["shuffle"]
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> SamplerOptions:
        """The inverse of :meth:`to_json`."""
        return cls(**value)

    def full(self, *, sequences: int, tokens: int, following: int) -> bool:
        """Whether a batch of so many sequences and tokens cannot take the following sample."""
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
        """Batches of the epoch."""
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
    """Permute samples ``ids`` of these ``lengths`` and cut them into batches.

    ``first_step`` is the training step of the first batch: a curriculum may span epochs. Every
    sample is in exactly one batch; the last batch of an epoch may be small.
    """
    key = np.array([options.seed, epoch], dtype=np.uint64)  # a list would pass through a float
    bits = np.random.Philox(key=key)
    drawn = np.argsort(bits.random_raw(len(ids)), kind="stable")
    order = drawn if options.shuffle else np.arange(len(ids))
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
    """Append the ends of the batches that follow ``bounds[-1]``, each as full as order allows."""
    ends, budget = np.cumsum(lengths), options.batch_tokens
    while (start := bounds[-1]) < len(lengths):
        if budget is None:
            stop = start + (options.batch_sequences or 1)
        else:
            before = int(ends[start - 1]) if start else 0
            stop = int(np.searchsorted(ends, before + budget, side="right"))
        bounds.append(min(max(stop, start + 1), len(lengths)))


def _curriculum(
    lengths: NDArray[np.int64],
    options: SamplerOptions,
    *,
    first_step: int,
    chances: NDArray[np.uint64],
) -> list[list[int]]:
    """The batches of the curriculum's steps, as places in ``lengths``.

    Samples are released from short to long, early when the pool runs dry, and each is drawn from
    all of the pool alike; ``chances`` are the random numbers for that. (To take the pool in the
    order of the permutation would favour what was released last.)
    """
    sizes, by_length = lengths.tolist(), np.argsort(lengths, kind="stable").tolist()
    numbers = iter(chances.tolist())
    pool: list[int] = []
    batches: list[list[int]] = []
    released, held = 0, -1  # held: drawn, but the batch was full
    for step in range(first_step, options.curriculum_steps):
        share = max(released, ceil(len(sizes) * (step + 1) / options.curriculum_steps))
        pool += by_length[released:share]
        released = share
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
        if not batch:
            break
        batches.append(batch)
    return batches


def _draw(pool: list[int], number: int) -> int:
    """Take one of the pool, chosen by a random number of 64 bits."""
    at = (number * len(pool)) >> 64
    pool[at], pool[-1] = pool[-1], pool[at]
    return pool.pop()
