"""Corpora in memory and the summary of their lengths."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.data.corpus import Skipped, corpus_of
from headrace.data.length_summary import summarise, summarise_lengths
from headrace.errors import DataError


def test_documents_read_back() -> None:
    """Catches a shifted start, a lost empty document, a slice past the document's end."""
    documents = [[1, 2, 3], [], [4], [5, 6, 7, 8]]
    corpus = corpus_of(documents, vocabulary=9)
    assert len(corpus) == 4
    assert corpus.lengths.tolist() == [3, 0, 1, 4]
    assert [corpus.tokens(i).tolist() for i in range(4)] == documents
    assert corpus.tokens(3, 1, 3).tolist() == [6, 7]
    assert corpus.tokens(0, 1, 99).tolist() == [2, 3]
    assert corpus.tokens(0).dtype == np.int32


def test_fingerprint_follows_the_tokens() -> None:
    """Catches a fingerprint that misses a token, a border or the vocabulary."""
    base = corpus_of([[1, 2], [3]], vocabulary=9).fingerprint
    assert corpus_of([[1, 2], [3]], vocabulary=9, name="other").fingerprint == base
    others = [
        corpus_of([[1, 2], [4]], vocabulary=9),
        corpus_of([[1], [2, 3]], vocabulary=9),
        corpus_of([[1, 2], [3]], vocabulary=10),
    ]
    assert len({base, *(other.fingerprint for other in others)}) == 4


def test_bad_corpora() -> None:
    """Catches ids that would index past the embedding."""
    with pytest.raises(DataError, match="no documents"):
        corpus_of([], vocabulary=9)
    for ids in ([1, 9], [-1]):
        with pytest.raises(DataError, match="ids"):
            corpus_of([ids], vocabulary=9)


@given(st.lists(st.integers(1, 300_000), min_size=1, max_size=60))
def test_summary_against_counting(lengths: list[int]) -> None:
    """Catches an off-by-one at a bin's edge, a histogram that loses lengths, mean for median."""
    summary = summarise_lengths(lengths, name="x")
    ordered = sorted(lengths)
    assert summary.median == ordered[(len(lengths) - 1) // 2]
    assert summary.longest == ordered[-1]
    assert summary.tokens == sum(lengths)
    long = [length for length in lengths if length >= 32768]
    assert summary.long_document_share == pytest.approx(len(long) / len(lengths))
    assert summary.long_token_share == pytest.approx(sum(long) / sum(lengths))
    edges = [0, 4096, 8192, 16384, 32768, 65536, 131072, 10**9]
    for i, (low, high) in enumerate(pairwise(edges)):
        inside = [length for length in lengths if low <= length < high]
        assert summary.bin_documents[i] == pytest.approx(len(inside) / len(lengths))
        assert summary.bin_tokens[i] == pytest.approx(sum(inside) / sum(lengths))
    assert sum(summary.counts) == len(lengths)
    assert len(summary.edges) == len(summary.counts) + 1
    for low, high, count in zip(summary.edges, summary.edges[1:], summary.counts, strict=False):
        last = high == summary.edges[-1]
        assert count == sum(low <= n < high or (last and n == high) for n in lengths)


def test_summary_as_text() -> None:
    """Catches a table that no longer names its numbers."""
    text = str(summarise_lengths([100] * 9 + [40_000], name="demo", skipped=3))
    assert "demo" in text
    assert "10 (3 skipped)" in text
    assert "median 100 " in text
    assert "10 % of documents" in text
    assert "90.0 %" in text


def test_summary_of_a_corpus() -> None:
    """Catches a skipped count of entries instead of what they stand for."""
    corpus = corpus_of([[1, 2], [], [1]], vocabulary=3)
    assert summarise(corpus).documents == 2
    with pytest.raises(DataError, match="lengths of x"):
        summarise_lengths([], name="x")
    assert Skipped(path="a", reason="b", count=7).count == 7


def test_importing_data_loads_nothing_heavy() -> None:
    """Catches torch, tokenizers or another optional package on the way in."""
    code = "import sys, headrace.data; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"torch", "tokenizers", "transformers", "pyarrow", "pyfaidx", "pydantic"}
