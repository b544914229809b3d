"""How long the documents of a corpus are: quantiles, shares of the long ones, a histogram."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.data.corpus import Corpus
from headrace.errors import DataError
from headrace.units import count_text, percent_text

__all__ = ["BIN_NAMES", "LONG", "Summary", "summarise", "summarise_lengths"]

LONG = 1 << 15
"""Tokens from which a document counts as long."""

BIN_NAMES = ("<4K", "4-8K", "8-16K", "16-32K", "32-64K", "64-128K", ">=128K")
"""The bins of ParaDySe's Table 3 (K = 1024)."""

_BIN_EDGES = np.array([4096 << i for i in range(6)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The lengths of a corpus in numbers; lengths in tokens, shares from 0 to 1.

    ``bin_documents`` and ``bin_tokens`` are the shares per bin of BIN_NAMES. ``counts[i]``
    documents have a length in ``[edges[i], edges[i + 1])``; the edges are half powers of two.
    """

    name: str
    documents: int
    tokens: int
    skipped: int
    median: int
    p90: int
    p99: int
    longest: int
    long_document_share: float
    long_token_share: float
    bin_documents: tuple[float, ...]
    bin_tokens: tuple[float, ...]
    edges: tuple[int, ...]
    counts: tuple[int, ...]

    def facts(self) -> dict[str, Any]:
        """The facts about its data that a run records, as a JSON object."""
        return {
            "name": self.name,
            "documents": self.documents,
            "tokens": self.tokens,
            "median": self.median,
            "p90": self.p90,
            "p99": self.p99,
            "max": self.longest,
            "skipped": self.skipped,
            "histogram": {"edges": list(self.edges), "counts": list(self.counts)},
        }

    def __str__(self) -> str:
        """Counts and quantiles of lengths in tokens, and a table of their histogram."""
        rows = [("", BIN_NAMES)]
        rows += [
            (label, tuple(f"{100 * share:.1f} %" for share in shares))
            for label, shares in (("documents", self.bin_documents), ("tokens", self.bin_tokens))
        ]
        table = [f"{label:<12}" + "".join(f"{cell:>9}" for cell in cells) for label, cells in rows]
        skipped = f" ({self.skipped:,} skipped)" if self.skipped else ""
        head = [
            f"{'corpus':<12}  {self.name}",
            f"{'documents':<12}  {self.documents:,}{skipped}, {count_text(self.tokens)} tokens",
            f"{'length':<12}  median {self.median:,}   p90 {self.p90:,}   p99 {self.p99:,}"
            f"   longest {self.longest:,}",
            f"{'>= 32K':<12}  {percent_text(self.long_document_share)} of documents, "
            f"{percent_text(self.long_token_share)} of tokens",
        ]
        return "\n".join(head + table)


def _histogram(lengths: NDArray[np.int64]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(edges, counts): edges in tokens at half powers of two, from 1 to above the longest length,
    and the number of documents between each two."""
    steps = 2 * ceil(log2(int(lengths.max()) + 1)) + 1
    edges = np.unique(np.round(2.0 ** (np.arange(steps) / 2)).astype(np.int64))  # 1 occurs twice
    counts, _ = np.histogram(lengths, bins=edges)
    return tuple(edges.tolist()), tuple(counts.tolist())


def summarise_lengths(lengths: ArrayLike, *, name: str, skipped: int = 0) -> Summary:
    """The summary of lengths in tokens, each >= 1. Raises DataError when there are none."""
    sizes = np.asarray(lengths, dtype=np.int64)
    if not sizes.size or sizes.min() < 1:
        raise DataError(f"lengths of {name}", got=f"{sizes.size} lengths", wanted="some, all >= 1")
    total = int(sizes.sum())
    # A quantile is a length that occurs, never a mean of two.
    quantiles = np.quantile(sizes, [0.5, 0.9, 0.99], method="inverted_cdf")
    bins, count = np.searchsorted(_BIN_EDGES, sizes, side="right"), len(BIN_NAMES)
    document_shares = np.bincount(bins, minlength=count) / sizes.size
    token_shares = np.bincount(bins, weights=sizes.astype(float), minlength=count) / total
    long = sizes >= LONG
    edges, counts = _histogram(sizes)
    return Summary(
        name=name,
        documents=sizes.size,
        tokens=total,
        skipped=skipped,
        median=int(quantiles[0]),
        p90=int(quantiles[1]),
        p99=int(quantiles[2]),
        longest=int(sizes.max()),
        long_document_share=float(long.mean()),
        long_token_share=float(sizes[long].sum() / total),
        bin_documents=tuple(document_shares.tolist()),
        bin_tokens=tuple(token_shares.tolist()),
        edges=edges,
        counts=counts,
    )


def summarise(corpus: Corpus) -> Summary:
    """The summary of a corpus's lengths. Documents without a token are left out."""
    lengths = corpus.lengths[corpus.lengths > 0]
    skipped = sum(item.count for item in corpus.skipped)
    return summarise_lengths(lengths, name=corpus.name, skipped=skipped)
