"""Token plans against the pack written out and the mask of its scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.layouts.token_plan import TokenPlan
from headrace.spec.blocks import Block, document_blocks, scores_of
from headrace.spec.plan import TokenOrder

ORDERS: tuple[TokenOrder, ...] = ("natural", "zigzag")
PIECE = 64  # documents are cut for balance where each of 2 R pieces has this many tokens
each_order = pytest.mark.parametrize("order", ORDERS)


@st.composite
def _packs(draw: st.DrawFn, most_ranks: int = 4) -> TokenPlan:
    """Short documents and up to two that are folded, in any order; or few tokens on many ranks."""
    ranks = draw(st.integers(1, most_ranks))
    short = draw(st.lists(st.integers(1, 9) | st.integers(1, 120), max_size=6))
    long = 2 * ranks * PIECE
    most = 2 if ranks <= 4 else 0
    folded = draw(st.lists(st.integers(long, long + 2 * ranks), max_size=most))
    lengths = draw(st.permutations([*short, *folded, *([] if short or folded else [1])]))
    return TokenPlan(lengths=tuple(lengths), ranks=ranks, order=draw(st.sampled_from(ORDERS)))


@settings(deadline=None)
@given(_packs(most_ranks=12))
@example(TokenPlan(lengths=(513, 1, 1), ranks=4, order="zigzag"))
@example(TokenPlan(lengths=(1, 1), ranks=4, order="zigzag"))
def test_every_token_is_on_one_rank_and_ranks_are_even(pack: TokenPlan) -> None:
    """Would catch a token on two ranks or none, a rank with two tokens more than another, and
    rows of a rank that are not in the order of the pack, as blocks and rotations take them to
    be."""
    assert pack.total == sum(pack.lengths) == sum(pack.sizes)
    assert len(pack.sizes) == len(pack.parts) == pack.ranks
    assert max(pack.sizes) - min(pack.sizes) <= 1
    rows = [pack.index(rank) for rank in range(pack.ranks)]
    assert [len(part) for part in rows] == list(pack.sizes)
    assert all((np.diff(part) > 0).all() for part in rows)
    assert all(len(part) for parts in pack.parts for part in parts)
    assert sorted(np.concatenate(rows).tolist()) == list(range(pack.total))
    if pack.order == "natural":
        np.testing.assert_array_equal(np.concatenate(rows), np.arange(pack.total))


@settings(deadline=None)
@given(_packs(most_ranks=12))
def test_positions_and_documents_of_each_row(pack: TokenPlan) -> None:
    """Would catch positions that count from the pack's or the rank's first token instead of the
    document's: a rotary angle or a dropout mask would depend on the packing."""
    pairs = [(i, at) for i, length in enumerate(pack.lengths) for at in range(length)]
    values = np.arange(pack.total) * 7
    for rank in range(pack.ranks):
        positions, documents, index = pack.positions(rank), pack.documents(rank), pack.index(rank)
        assert {positions.dtype, documents.dtype, index.dtype} == {np.dtype(np.int64)}
        got = list(zip(documents.tolist(), positions.tolist(), strict=True))
        assert got == [pairs[place] for place in index]
        np.testing.assert_array_equal(pack.take(rank, values), values[index])
    assert pack.pack_positions.tolist() == [at for _, at in pairs]


@each_order
def test_fewer_tokens_than_ranks(order: TokenOrder) -> None:
    """Would catch an error, or a token invented, where a rank has none."""
    pack = TokenPlan(lengths=(1, 1), ranks=4, order=order)
    assert pack.sizes == (1, 1, 0, 0)
    assert [pack.documents(rank).tolist() for rank in range(4)] == [[0], [1], [], []]
    assert pack.parts[2:] == ((), ())
    assert pack.take(3, np.arange(2)).shape == (0,)
    assert pack.blocks((3,), (0, 1, 2, 3), True) == ()
    assert pack.scores(3, True) == 0
    assert pack.held((2, 3)).tokens == 0


@each_order
def test_a_pack_of_no_documents(order: TokenOrder) -> None:
    """Would catch a concatenation of nothing."""
    pack = TokenPlan(lengths=(), ranks=2, order=order)
    assert (pack.total, pack.sizes, pack.parts) == (0, (0, 0), ((), ()))
    assert pack.index(1).shape == pack.pack_positions.shape == (0,)
    assert pack.blocks((0,), (0, 1), True) == ()


@pytest.mark.parametrize(("lengths", "ranks"), [((3, 0), 2), ((3,), 0), ((-1,), 1)])
def test_documents_and_ranks_there_are_none_of(lengths: tuple[int, ...], ranks: int) -> None:
    """Would catch an empty document: its rows would be taken for those of the next."""
    with pytest.raises(SpecError, match="at least one rank and tokens in every document"):
        TokenPlan(lengths=lengths, ranks=ranks)


def _owners(pack: TokenPlan) -> np.ndarray:
    """The rank of each token of the pack."""
    owners = np.empty(pack.total, dtype=np.int64)
    for rank in range(pack.ranks):
        owners[pack.index(rank)] = rank
    return owners


@settings(deadline=None)
@given(_packs(), st.integers(2, 5))
def test_long_documents_are_folded(pack: TokenPlan, ranks: int) -> None:
    """Would catch pieces given round in a circle instead of back and forth: the last rank would
    hold the most expensive rows. Each rank has the r-th piece from the front and from the back."""
    pack = TokenPlan(lengths=(*pack.lengths, 2 * ranks * PIECE + 5), ranks=ranks, order="zigzag")
    owners = _owners(pack)
    start = pack.total - pack.lengths[-1]
    of_document = owners[start:]
    pieces = of_document[np.flatnonzero(np.diff(of_document, prepend=-1))]
    fold = [*range(ranks), *reversed(range(ranks - 1))]  # the middle two are neighbours on one rank
    assert pieces.tolist() == fold
    shares = [int((of_document == rank).sum()) for rank in range(ranks)]
    assert max(shares) - min(shares) <= 1


@settings(deadline=None, max_examples=30)
@given(
    st.integers(2, 4),
    st.integers(1000, 1100),
    st.lists(st.integers(1, 60), max_size=30),
    st.integers(0, 30),
)
def test_folded_work_is_even(ranks: int, share: int, short: list[int], at: int) -> None:
    """Would catch a rank that waits for the one with the end of the long document: causal scores
    of each are those of the mean but for a few percent, which natural order misses by far."""
    lengths = [*short]
    lengths.insert(min(at, len(short)), ranks * share)
    folded, natural = (
        TokenPlan(lengths=tuple(lengths), ranks=ranks, order=order)
        for order in ("zigzag", "natural")
    )
    total = scores_of(document_blocks(lengths, True))
    for pack, even in ((folded, True), (natural, False)):
        scores = [pack.scores(rank, True) for rank in range(ranks)]
        assert sum(scores) == total
        assert (max(scores) < 1.03 * total / ranks) == even


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(2, 6))
@example([5, 3, 4, 4], 2)
def test_short_documents_stay_whole_where_there_is_room(lengths: list[int], ranks: int) -> None:
    """Would catch short documents cut without need, whose attention would then need other ranks'
    keys: one is cut only when it is longer than the room that any rank has beside whole ones, so
    that fewer are cut than there are ranks."""
    pack = TokenPlan(lengths=tuple(lengths), ranks=ranks, order="zigzag")
    owners = _owners(pack)
    documents = np.repeat(np.arange(len(lengths)), lengths)
    cut = [i for i in range(len(lengths)) if len(set(owners[documents == i].tolist())) > 1]
    assert len(cut) < ranks
    room = [int((np.isin(documents, cut) & (owners == rank)).sum()) for rank in range(ranks)]
    assert all(lengths[i] > max(room) for i in cut)
    if lengths == [5, 3, 4, 4]:
        assert not cut


@settings(deadline=None)
@given(_packs(), st.data())
def test_what_ranks_hold_together_is_in_the_order_of_the_pack(
    pack: TokenPlan, data: st.DataObject
) -> None:
    """Would catch the order of gathered rows inverted, and an order where there is none to be
    made (a copy of every gathered tensor)."""
    everyone = tuple(range(pack.ranks))
    members = tuple(data.draw(st.permutations(everyone)))[: data.draw(st.integers(1, pack.ranks))]
    held = pack.held(members)
    rows = np.concatenate([pack.index(member) for member in members])
    assert held.tokens == len(rows)
    together = np.concatenate(
        [np.zeros(0, np.int64), *(np.arange(part.start, part.stop) for part in held.intervals)]
    )
    np.testing.assert_array_equal(together, np.sort(rows))
    assert all(a.stop < b.start for a, b in zip(held.intervals, held.intervals[1:], strict=False))
    if held.order is None:
        np.testing.assert_array_equal(rows, together)
    else:
        assert (rows != together).any()
        np.testing.assert_array_equal(rows[held.order], together)
    assert pack.held(members) is held


def _counts(blocks: Sequence[Block], rows: int, columns: int) -> np.ndarray:
    """How often the blocks count each score."""
    counts = np.zeros((rows, columns), dtype=np.int64)
    for block in blocks:
        part = counts[block.q_start : block.q_stop, block.k_start : block.k_stop]
        part += np.tri(*part.shape, dtype=np.int64) if block.causal else 1
    return counts


def _mask(pack: TokenPlan, queries: Sequence[int], keys: Sequence[int], causal: bool) -> np.ndarray:
    """The scores that count, of rows in the order of the pack."""
    documents = np.repeat(np.arange(len(pack.lengths)), pack.lengths)
    q, k = (np.sort(np.concatenate([pack.index(m) for m in part])) for part in (queries, keys))
    same = documents[q][:, None] == documents[k]
    return same & (q[:, None] >= k) if causal else same


def _pairs(ranks: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """What methods ask for: a rank and another, itself or everyone; everyone; neighbours."""
    everyone = tuple(range(ranks))
    pairs = [((0,), (other,)) for other in everyone] + [((ranks - 1,), (r,)) for r in everyone]
    pairs += [((rank,), everyone) for rank in everyone] + [(everyone, everyone)]
    if ranks == 4:
        halves = ((0, 1), (2, 3))
        pairs += [(one, other) for one in halves for other in halves]
    return pairs


@settings(deadline=None, max_examples=40)
@given(_packs(), st.booleans())
@example(TokenPlan(lengths=(520, 3, 31), ranks=4, order="zigzag"), True)
def test_blocks_are_the_scores_that_count(pack: TokenPlan, causal: bool) -> None:
    """Would catch a score counted twice or never, of two documents or of the future; and
    rectangles before squares, as rows of a square need a first key."""
    for queries, keys in _pairs(pack.ranks):
        blocks = pack.blocks(queries, keys, causal)
        mask = _mask(pack, queries, keys, causal)
        np.testing.assert_array_equal(_counts(blocks, *mask.shape), mask)
        kinds = [block.causal for block in blocks]
        assert kinds == sorted(kinds, reverse=True)
        assert causal or not any(kinds)
        assert scores_of(blocks) == mask.sum()
        assert pack.blocks(queries, keys, causal) is blocks
    everyone = tuple(range(pack.ranks))
    for rank in everyone:
        assert pack.scores(rank, causal) == _mask(pack, (rank,), everyone, causal).sum()


@each_order
def test_one_rank_has_the_blocks_of_whole_documents(order: TokenOrder) -> None:
    """Would catch a long document cut where there is nobody to share it with: a kernel call more
    for each piece."""
    pack = TokenPlan(lengths=(3, 700, 1), ranks=1, order=order)
    assert pack.blocks((0,), (0,), True) == document_blocks((3, 700, 1), True)
    assert pack.blocks((0,), (0,), False) == document_blocks((3, 700, 1), False)
    assert pack.held((0,)).order is None


def test_plans_are_values() -> None:
    """Would catch a plan that is no longer itself once something was worked out of it."""
    used, fresh = (TokenPlan(lengths=(300, 4), ranks=2, order="zigzag") for _ in range(2))
    used.blocks((0,), (0, 1), True)
    assert used == fresh
    assert hash(used) == hash(fresh)
    assert used != TokenPlan(lengths=(300, 4), ranks=2)
