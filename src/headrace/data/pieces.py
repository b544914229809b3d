"""The table of samples: documents, or pieces of them when they are longer than the context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DataError

__all__ = ["Pieces", "TooLong", "cut"]

TooLong = Literal["truncate", "split", "refuse"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """All samples, ``[samples]`` each: ``lengths[i]`` tokens of document ``documents[i]``."""

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
        raise _refused(lengths, context)
    if too_long == "truncate":
        return Pieces(documents=documents, starts=starts, lengths=np.minimum(lengths, context))
    stride = max(1, context - 1)
    counts = np.maximum(-(-(lengths - 1) // stride), 1)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.arange(len(first)) - first) * stride
    documents = np.repeat(documents, counts)
    rest = np.minimum(lengths[documents] - starts, context)
    return Pieces(documents=documents, starts=starts, lengths=rest)


def _refused(lengths: NDArray[np.int64], context: int) -> DataError:
    longer = np.flatnonzero(lengths > context)
    worst = int(longer[np.argmax(lengths[longer])])
    others = f" and {len(longer) - 1:,} more that are too long" if len(longer) > 1 else ""
    return DataError(
        f"document {worst}{others}",
        got=f"{lengths[worst]:,} tokens",
        wanted=f"at most {context:,}, the context",
        hint="choose 'truncate' or 'split' for documents that are too long, or a longer context",
    )
