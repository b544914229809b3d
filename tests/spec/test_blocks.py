"""Blocks against the score matrices that they mean."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.spec.blocks import Block, document_blocks, scores_of


def _matrix(blocks: tuple[Block, ...], tokens: int) -> np.ndarray:
    """How many blocks hold each score."""
    held = np.zeros((tokens, tokens), dtype=int)
    for b in blocks:
        part = np.ones((b.q_stop - b.q_start, b.k_stop - b.k_start), dtype=int)
        held[b.q_start : b.q_stop, b.k_start : b.k_stop] += np.tril(part) if b.causal else part
    return held


@given(lengths=st.lists(st.integers(0, 9), max_size=6), causal=st.booleans())
def test_documents_hold_each_of_their_scores_once(lengths: list[int], causal: bool) -> None:
    """Would catch a document that starts elsewhere than the last one ended, or sees another."""
    document = np.repeat(np.arange(len(lengths)), lengths)
    wanted = (document[:, None] == document[None, :]).astype(int)
    wanted = np.tril(wanted) if causal else wanted
    blocks = document_blocks(lengths, causal)
    assert len(blocks) == len(lengths)
    assert (_matrix(blocks, sum(lengths)) == wanted).all()
    assert scores_of(blocks) == wanted.sum()


@given(rows=st.integers(0, 12), columns=st.integers(0, 12))
def test_scores_of_a_block_are_counted(rows: int, columns: int) -> None:
    """Would catch a causal square without its diagonal, and rectangles counted as squares."""
    full = Block(5, 5 + rows, 7, 7 + columns, False)
    square = Block(5, 5 + rows, 7, 7 + rows, True)
    assert full.scores == rows * columns
    assert square.scores == np.tril(np.ones((rows, rows))).sum()


@pytest.mark.parametrize("causal", [True, False])
def test_no_documents_have_no_scores(causal: bool) -> None:
    """Would catch a count that fails on a rank without tokens."""
    assert document_blocks((), causal) == ()
    assert scores_of(()) == 0
