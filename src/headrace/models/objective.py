"""Objectives: the input that a model reads of a document, and the labels that it predicts.

    next token  reads the document                         predicts at each token the next one,
                                                           unless the document's mask leaves it out
    masked      reads it with picked tokens hidden         predicts the hidden tokens

[Note: the batch's count] A batch's loss is the sum of its token losses over the number of tokens
that have one. Every rank knows that number for the whole batch without asking the others: it
follows from the lengths and masks, or from the lengths and the hash that picks. So any plan gives
the loss and the gradients of one process.

[Note: picking] Whether a token is picked, and what is read in its place, is a function of (seed,
step, sample, position) only: a 64-bit finaliser (splitmix) of these four. Each step hides other
tokens of the same sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DataError
from headrace.ops.loss import IGNORED
from headrace.spec.architecture import Architecture
from headrace.spec.lengths import Lengths

__all__ = ["Masked", "NextToken", "Objective", "objective_of"]

Mask = NDArray[np.bool_] | None
"""Which tokens of a document have a loss, [n]; None where all have."""

LossMasks = Sequence[Mask]
"""The mask of each sequence of a batch, None where all tokens are learned; empty for no masks."""

Example = tuple[NDArray[np.int32], NDArray[np.int32]]
"""Ids and labels of one document, [L] each; IGNORED is the label of a token without a loss."""


class Objective(Protocol):
    """The objective of one step."""

    def example(self, document: NDArray[np.int32], sample: int, mask: Mask = None) -> Example:
        """(ids [L] that the model reads, labels [L]) of a ``document`` of token ids [L], which is
        number ``sample`` of the corpus; ``mask`` [L] is False for tokens that are not to be
        predicted."""

    def count(self, lengths: Lengths, masks: LossMasks = ()) -> int:
        """Tokens with a loss in a whole batch, at least 1."""


def objective_of(architecture: Architecture, *, seed: int, step: int) -> Objective:
    """The objective of a model at one step of a run."""
    a = architecture
    if a.mask_id is None:
        return NextToken()
    return Masked(
        seed=seed, step=step, share=a.head_share, mask_id=a.mask_id, vocabulary=a.vocabulary
    )


@dataclass(frozen=True, slots=True)
class NextToken:
    """Each token but the last of its document predicts the next."""

    def example(self, document: NDArray[np.int32], sample: int, mask: Mask = None) -> Example:
        """(ids [L], labels [L]) of a document [L]: the document itself, and for each token the next
        one, IGNORED where ``mask`` [L] leaves that out. Labels are shifted here, before tokens are
        split over ranks, so that no rank needs its neighbour's first token."""
        targets = document if mask is None else np.where(mask, document, np.int32(IGNORED))
        return document, np.append(targets[1:], np.int32(IGNORED))

    def count(self, lengths: Lengths, masks: LossMasks = ()) -> int:
        """The number of tokens with a loss in a batch, at least 1: all but the first of each
        document, without those that its mask leaves out."""
        if not masks:
            return max(1, lengths.predicted)
        learned = 0
        for length, mask in zip(lengths.tokens, masks, strict=True):
            learned += length - 1 if mask is None else int(np.count_nonzero(mask[1:]))
        return max(1, learned)


@dataclass(frozen=True, slots=True, kw_only=True)
class Masked:
    """Masked language modelling (Devlin et al., section 3.1): ``share`` of the tokens is picked;
    of these 80 % are read as ``mask_id``, 10 % as any id, 10 % as they are."""

    seed: int
    step: int
    share: float
    mask_id: int
    vocabulary: int

    def example(self, document: NDArray[np.int32], sample: int, mask: Mask = None) -> Example:
        """(ids [L], labels [L]) of a document [L], number ``sample`` of the corpus: the document
        with its picked tokens hidden, and the picked tokens as they were, IGNORED elsewhere. Raises
        DataError for a mask."""
        if mask is not None:
            wanted = "none, as the model hides its tokens itself"
            raise DataError("mask of the loss", got="one", wanted=wanted)
        samples, positions = np.full(len(document), sample), np.arange(len(document))
        bits = _bits(self.seed, self.step, samples, positions)
        # The upper half of a token's bits picks it, the lower half says what is read in its place.
        picked = _below(bits >> _HALF, self.share)
        choice = bits & _LOW
        hidden = picked & _below(choice, 0.8)
        changed = picked & ~hidden & _below(choice, 0.9)
        ids = document.astype(np.int32)
        ids[hidden] = self.mask_id
        ids[changed] = _mix(bits[changed]) % np.uint64(self.vocabulary)
        return ids, np.where(picked, document, np.int32(IGNORED)).astype(np.int32)

    def count(self, lengths: Lengths, masks: LossMasks = ()) -> int:
        """The number of picked tokens of all documents of a batch, at least 1."""
        return max(1, _count_picked(lengths, self.seed, self.step, self.share))


@lru_cache(maxsize=4)
def _count_picked(lengths: Lengths, seed: int, step: int, share: float) -> int:
    """The number of tokens of a whole batch that :class:`Masked` picks. It is cached, as each
    micro-batch of the batch asks for it."""
    tokens = np.array(lengths.tokens)
    # For each of all tokens: where its document starts, and its document's number.
    starts = np.repeat(np.cumsum(tokens) - tokens, tokens)
    samples = np.repeat(np.array(lengths.ids), tokens)
    bits = _bits(seed, step, samples, np.arange(lengths.total) - starts)
    return int(_below(bits >> _HALF, share).sum())


_HALF, _LOW = np.uint64(32), np.uint64(2**32 - 1)
"""Shift that leaves the upper half of 64 bits, and mask of the lower half."""


def _below(numbers: NDArray[np.uint64], share: float) -> NDArray[np.bool_]:
    """Whether each of some 32-bit ``numbers`` is among the lowest ``share`` of all such numbers:
    True with probability ``share`` for random ones."""
    return numbers < np.uint64(round(share * 2**32))


def _bits(
    seed: int, step: int, samples: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """64 pseudo-random bits for each of t tokens, [t]: a hash of the seed, the step, the number of
    the token's document in the corpus (``samples`` [t]) and its position in the document
    (``positions`` [t])."""
    step_key = _mix(_mix(np.array([seed % 2**64], np.uint64)) ^ np.uint64(step))
    sample_keys = _mix(samples.astype(np.uint64) ^ step_key)
    return _mix(sample_keys + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A hash of each 64-bit number, of the shape of ``x``: the finaliser of SplitMix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
