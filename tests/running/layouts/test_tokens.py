"""Token plans against the pack written out."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.layouts.tokens import TokenPlan

packs = st.builds(
    lambda lengths, ranks: TokenPlan(lengths=tuple(lengths), ranks=ranks),
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(1, 12),
)


@settings(deadline=None)
@given(packs)
def test_tokens_are_shared_out_evenly_in_order(pack: TokenPlan) -> None:
    """Would catch a token on two ranks or none, and a rank with two tokens more than another."""
    assert pack.total == sum(pack.lengths) == sum(pack.sizes)
    assert len(pack.sizes) == pack.ranks
    assert max(pack.sizes) - min(pack.sizes) <= 1
    tokens = np.arange(pack.total) * 7
    parts = [pack.take(rank, tokens) for rank in range(pack.ranks)]
    assert [len(part) for part in parts] == list(pack.sizes)
    np.testing.assert_array_equal(np.concatenate(parts), tokens)


@settings(deadline=None)
@given(packs)
def test_positions_and_documents_of_the_whole_pack(pack: TokenPlan) -> None:
    """Would catch positions that count from the pack's or the rank's first token instead of the
    document's: a rotary angle or a dropout mask would depend on the packing."""
    positions = [pack.positions(rank) for rank in range(pack.ranks)]
    documents = [pack.documents(rank) for rank in range(pack.ranks)]
    assert all(part.dtype == np.int64 for part in (*positions, *documents))
    pairs = list(
        zip(np.concatenate(documents).tolist(), np.concatenate(positions).tolist(), strict=True)
    )
    assert pairs == [(i, at) for i, length in enumerate(pack.lengths) for at in range(length)]


def test_fewer_tokens_than_ranks() -> None:
    """Would catch an error, or a token invented, where a rank has none."""
    pack = TokenPlan(lengths=(1, 1), ranks=4)
    assert pack.sizes == (1, 1, 0, 0)
    assert [pack.documents(rank).tolist() for rank in range(4)] == [[0], [1], [], []]
    assert pack.take(3, np.arange(2)).shape == (0,)
