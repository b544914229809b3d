"""Blocks of bands against masks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.spec.blocks import Band, Block, band_blocks


def drawn(blocks: list[Block], rows: int, columns: int) -> np.ndarray:
    """How often every score is in a block."""
    found = np.zeros((rows, columns), dtype=int)
    for b in blocks:
        square = np.ones((b.q_stop - b.q_start, b.k_stop - b.k_start), dtype=int)
        if b.causal:
            square = np.triu(square) if b.turned else np.tril(square)
        found[b.q_start : b.q_stop, b.k_start : b.k_stop] += square
    return found


@given(
    st.booleans(),
    st.none() | st.integers(1, 30),
    st.integers(0, 25),
    st.integers(0, 25),
    st.integers(0, 25),
    st.integers(0, 25),
)
def test_every_score_that_counts_once(
    causal: bool, window: int | None, a: int, b: int, c: int, d: int
) -> None:
    """Catches scores that are missing, counted twice, or outside the band."""
    queries, keys = (min(a, b), max(a, b)), (min(c, d), max(c, d))
    band = Band.of(causal=causal, window=window)
    blocks = band_blocks(band, queries, keys)
    for block in blocks:
        assert not block.causal or block.q_stop - block.q_start == block.k_stop - block.k_start
    q, k = np.ogrid[:25, :25]
    wanted = (q >= queries[0]) & (q < queries[1]) & (k >= keys[0]) & (k < keys[1])
    if causal:
        wanted = wanted & (k <= q)
    if window is not None:
        wanted = wanted & (abs(q - k) < window)
    assert (drawn(blocks, 25, 25) == wanted).all()
