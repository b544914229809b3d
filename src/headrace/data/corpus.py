"""A corpus: documents that have been turned into tokens and can be read one by one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.data.token_reading import Tokens
from headrace.errors import DataError

__all__ = ["Corpus", "Skipped", "StoredCorpus", "corpus_of"]

FOREIGN_IDS = (
    "data.tokenizer is that of these ids, or 'ids:VOCABULARY' with all of them below VOCABULARY; "
    "data.dtype is that of a file without index"
)
"""What to look at where ids are too large."""

FINGERPRINT_TOKENS = 1 << 15
"""Tokens at either end of a file of ready tokens that count for its fingerprint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """``count`` files or lines at ``path`` that were left out of a corpus, and the reason."""

    path: str
    reason: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        """A JSON object: the fields by name."""
        return {"path": self.path, "reason": self.reason, "count": self.count}


class Corpus(Protocol):
    """A collection of documents as token ids."""

    @property
    def name(self) -> str:
        """What a person calls it, e.g. ``python:stdlib``."""
        ...

    @property
    def fingerprint(self) -> str:
        """A SHA-256 that is equal for corpora of equal documents, tokens and vocabulary."""
        ...

    @property
    def vocabulary(self) -> int:
        """The number of ids: all are below it."""
        ...

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, ``[documents]``."""
        ...

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Files and lines that were found but left out."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should be told once, e.g. that a damaged cache was built again."""
        ...

    def __len__(self) -> int:
        """The number of documents in it."""
        ...

    def tokens(self, index: int, start: int = 0, stop: int | None = None) -> NDArray[np.int32]:
        """Ids of one document, ``[lengths[index]]``, or of its tokens from start to stop."""
        ...

    @property
    def masked(self) -> bool:
        """Whether some tokens have no loss."""
        ...

    def learned(
        self, index: int, start: int = 0, stop: int | None = None
    ) -> NDArray[np.bool_] | None:
        """A bool for each token of a document, or of its tokens from start to stop: whether it has
        a loss. None where all have."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredCorpus:
    """A corpus over flat arrays of ids, in memory or in files.

    ``table [documents, 3]`` holds the array, the first token and the tokens of each document.
    """

    name: str
    fingerprint: str
    vocabulary: int
    arrays: tuple[Tokens, ...]
    table: NDArray[np.int64]
    lengths: NDArray[np.int64]
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()
    masks: Tokens | None = None
    """A 1 for each token of the only array that has a loss, else 0; None where all have."""

    @property
    def masked(self) -> bool:
        """Whether some tokens have no loss."""
        return self.masks is not None

    def learned(
        self, index: int, start: int = 0, stop: int | None = None
    ) -> NDArray[np.bool_] | None:
        """A bool for each token of a document, or of its tokens from start to stop: whether it has
        a loss. None where all have."""
        if self.masks is None:
            return None
        _, first, count = (int(number) for number in self.table[index])
        part = range(first, first + count)[start:stop]  # places of the tokens in the flat array
        has_loss = np.asarray(self.masks[part.start : part.stop]) != 0
        return None if has_loss.all() else has_loss

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, index: int, start: int = 0, stop: int | None = None) -> NDArray[np.int32]:
        """Ids of one document, ``[lengths[index]]``, or of its tokens from start to stop; a copy.

        Raises DataError when an id is outside the vocabulary: the tokens were made by another
        tokenizer than the one named.
        """
        array, first, count = (int(number) for number in self.table[index])
        part = range(first, first + count)[start:stop]  # places of the tokens in the flat array
        stored = self.arrays[array][part.start : part.stop]
        if len(stored) and (int(stored.min()) < 0 or int(stored.max()) >= self.vocabulary):
            raise DataError(
                f"document {index} of {self.name}",
                got=f"a token id {int(stored.max())}",
                wanted=f"ids from 0 to {self.vocabulary - 1}",
                hint=FOREIGN_IDS,
            )
        return stored.astype(np.int32)


def fingerprint_of(arrays: Sequence[Tokens], table: NDArray[np.int64], vocabulary: int) -> str:
    """SHA-256 over the vocabulary, the table of documents and both ends of each array: whole arrays
    may be too large to read."""
    digest = hashlib.sha256(f"headrace corpus 1 {vocabulary}".encode())
    digest.update(np.ascontiguousarray(table).data)
    for array in arrays:
        digest.update(f"{array.dtype.name} {len(array)}".encode())
        for part in (slice(FINGERPRINT_TOKENS), slice(-FINGERPRINT_TOKENS, None)):
            digest.update(np.ascontiguousarray(array[part]).data)
    return digest.hexdigest()


def corpus_of(
    documents: Sequence[Sequence[int] | NDArray[Any]], *, vocabulary: int, name: str = "memory"
) -> StoredCorpus:
    """A corpus in memory from the ids of its documents.

    Raises DataError when there is none or an id is outside ``vocabulary``.
    """
    if not documents:
        raise DataError(f"corpus {name}", got="no documents", wanted="at least one")
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    ids = np.concatenate([np.asarray(document, dtype=np.int64) for document in documents])
    if ids.size and (ids.min() < 0 or ids.max() >= vocabulary):
        got = f"ids from {ids.min()} to {ids.max()}"
        raise DataError(f"corpus {name}", got=got, wanted=f"ids below {vocabulary}")
    tokens = ids.astype(np.int32)
    starts = np.cumsum(lengths) - lengths
    table = np.stack([np.zeros_like(lengths), starts, lengths], axis=1)
    digest = hashlib.sha256(fingerprint_of([tokens], table, vocabulary).encode())
    digest.update(tokens.data)  # all of it: what is in memory is small
    return StoredCorpus(
        name=name,
        fingerprint=digest.hexdigest(),
        vocabulary=vocabulary,
        arrays=(tokens,),
        table=table,
        lengths=lengths,
    )
