"""Token plans: which rank of a group holds which tokens of a pack.

Every rank holds as many tokens as any other, but for one: shares of memory and of linear work are
even, and collectives are. There are two orders:

    natural  the pack cut into contiguous parts; documents may straddle ranks
    zigzag   a long document is cut into 2 R pieces of which rank r holds the r-th from the front
             and from the back, so that causal work is even; short documents stay whole on the
             rank with the most room left, and what fits nowhere is cut

Every method honours the plan of its micro-batch, so a change of method between two layers moves
nothing. The rows of a rank stand in the order of the pack.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np

from headrace.errors import SpecError
from headrace.layouts.partition import Rows, split_rows, split_sizes
from headrace.spec.blocks import Band, Block, band_blocks, joined
from headrace.spec.plan import TokenOrder
from headrace.units import counted

__all__ = ["Held", "TokenPlan"]

_SHORTEST_PIECE = 64
"""Documents are cut for balance only where each piece keeps this many tokens: kernels lose more
on shorter ones than even ranks gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Tokens [start, stop) of the pack, all of the document with index ``document``. In a
    :class:`Held` that has them they are the rows from ``row`` on."""

    document: int
    start: int
    stop: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The tokens that some ranks hold together: as ``intervals`` of the pack, in its order, and as
    ``pieces``, which are these intervals cut at the borders of documents.

    ``gathered[order]`` brings rows that were gathered one rank after the other, [T, ...], into the
    order of the pack; None where they are in order already.
    """

    intervals: tuple[Rows, ...]
    pieces: tuple[_Piece, ...]
    order: np.ndarray | None

    @property
    def tokens(self) -> int:
        """Number of tokens that these ranks hold."""
        return sum(len(part) for part in self.intervals)


@dataclass(frozen=True, kw_only=True)
class TokenPlan:
    """Which of ``ranks`` ranks holds which tokens of a pack of documents of ``lengths`` tokens: in
    the ``order`` natural or zigzag, or as ``given``, the intervals of the pack on each rank."""

    lengths: tuple[int, ...]
    ranks: int
    order: TokenOrder = "natural"
    given: tuple[tuple[Rows, ...], ...] | None = None
    _held: dict[tuple[int, ...], Held] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _blocks: dict[tuple[tuple[int, ...], tuple[int, ...], Band], tuple[Block, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Raise SpecError for no ranks and for a document without tokens."""
        if self.ranks < 1 or min(self.lengths, default=1) < 1:
            raise SpecError(
                "token plan",
                got=f"{counted(self.ranks, 'rank')}, lengths {self.lengths[:8]}",
                wanted="at least one rank and tokens in every document",
            )

    @property
    def total(self) -> int:
        """Number of tokens in the pack."""
        return sum(self.lengths)

    @cached_property
    def parts(self) -> tuple[tuple[Rows, ...], ...]:
        """The tokens of each rank: disjoint intervals of the pack, in its order."""
        if self.given is not None:
            return tuple(map(_merge, self.given))
        if self.order == "natural" or self.ranks == 1:
            return tuple((part,) if len(part) else () for part in self._even_parts)
        return tuple(map(_merge, _zigzag(self.lengths, self._starts, self.sizes)))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of tokens on each rank."""
        if self.given is not None:
            return tuple(sum(map(len, parts)) for parts in self.given)
        return tuple(len(part) for part in self._even_parts)

    def index(self, rank: int) -> np.ndarray:
        """[t] int64: index in the pack of each token of a rank."""
        return _places(self.parts[rank])

    def positions(self, rank: int) -> np.ndarray:
        """[t] int64: each local token's position in its own document."""
        return self.pack_positions[self.index(rank)]

    @cached_property
    def pack_positions(self) -> np.ndarray:
        """[T] int64: each token's position in its own document, in the order of the pack."""
        pieces = [np.arange(length, dtype=np.int64) for length in self.lengths]
        return np.concatenate([np.zeros(0, np.int64), *pieces])

    def documents(self, rank: int) -> np.ndarray:
        """[t] int64: for each local token the index of its document in the pack."""
        pack_documents = np.repeat(np.arange(len(self.lengths), dtype=np.int64), self.lengths)
        return pack_documents[self.index(rank)]

    def take(self, rank: int, values: np.ndarray) -> np.ndarray:
        """The part [t] of a rank, of one value per token of the pack, [T]."""
        return values[self.index(rank)]

    def held(self, members: tuple[int, ...]) -> Held:
        """The tokens that the ranks ``members`` hold together."""
        if members not in self._held:
            self._held[members] = self._make_held(members)
        return self._held[members]

    def blocks(
        self,
        queries: tuple[int, ...],
        keys: tuple[int, ...],
        causal: bool,
        window: int | None = None,
    ) -> tuple[Block, ...]:
        """The scores that count between the queries of the ranks ``queries`` and the keys of the
        ranks ``keys``, as blocks; squares before rectangles.

        Rows and columns are counted among the tokens that these ranks hold, as in :meth:`held`.
        ``keys`` must be the same ranks, others, or contain them. ``window``: as in :class:`Band`.
        """
        band = Band.of(causal=causal, window=window)
        key = (queries, keys, band)
        if key not in self._blocks:
            held = self.held(queries), self.held(keys)
            self._blocks[key] = (
                _blocks(*held, causal) if window is None else _band_blocks(*held, band)
            )
        return self._blocks[key]

    def scores(self, rank: int, causal: bool) -> int:
        """Number of scores that count for one rank's queries: its share of the work of
        attention."""
        everyone = tuple(range(self.ranks))
        return sum(block.scores for block in self.blocks((rank,), everyone, causal))

    @cached_property
    def _even_parts(self) -> tuple[Rows, ...]:
        """The pack cut into one interval for each rank, as even as possible."""
        return split_rows(self.total, self.ranks)

    @cached_property
    def _starts(self) -> list[int]:
        """The index in the pack of each document's first token, and the end of the pack."""
        return [0, *accumulate(self.lengths)]

    def _make_held(self, members: tuple[int, ...]) -> Held:
        """The tokens that the ranks ``members`` hold together, without the cache of
        :meth:`held`."""
        places = np.concatenate([np.zeros(0, np.int64), *map(self.index, members)])
        ordered = bool((np.diff(places) > 0).all())
        intervals = _merge([part for member in members for part in self.parts[member]])
        return Held(
            intervals=tuple(intervals),
            pieces=tuple(_pieces(intervals, self._starts)),
            order=None if ordered else np.argsort(places, kind="stable"),
        )


def _zigzag(
    lengths: Sequence[int], starts: Sequence[int], sizes: Sequence[int]
) -> list[list[Rows]]:
    """For each rank the intervals of the pack that it holds in token order ``zigzag``, unsorted.
    Documents of ``lengths`` tokens begin at ``starts``; rank r holds ``sizes[r]`` tokens.

    Long documents are cut for all ranks, then short ones go whole to the rank with most room, the
    longest first; at last, those that fit nowhere are cut to fill what room is left."""
    ranks = len(sizes)
    room = list(sizes)  # tokens that each rank can still take
    parts: list[list[Rows]] = [[] for _ in sizes]

    def give(rank: int, start: int, count: int) -> None:
        """Give a rank ``count`` tokens of the pack from ``start``."""
        parts[rank].append(Rows(start, start + count))
        room[rank] -= count

    shortest_cut = 2 * ranks * _SHORTEST_PIECE
    for document, length in enumerate(lengths):
        if length >= shortest_cut:
            _fold_document(starts[document], _shares(length, room), give)
    fits_nowhere: list[int] = []
    short = [document for document, length in enumerate(lengths) if length < shortest_cut]
    for document in sorted(short, key=lambda i: -lengths[i]):
        rank = max(range(ranks), key=lambda r: room[r])
        if lengths[document] <= room[rank]:
            give(rank, starts[document], lengths[document])
        else:
            fits_nowhere.append(document)
    # the ranks' room adds up to the tokens that are left
    for document in fits_nowhere:
        start, stop = starts[document], starts[document + 1]
        for rank in range(ranks):
            count = min(room[rank], stop - start)
            if count:
                give(rank, start, count)
                start += count
    return parts


def _shares(length: int, room: Sequence[int]) -> list[int]:
    """How many tokens of a document of ``length`` tokens each rank gets: as even as possible, the
    larger shares where most ``room`` (tokens that a rank can still take) is left."""
    shares = [0] * len(room)
    ranks_by_room = sorted(range(len(room)), key=lambda r: -room[r])
    for rank, share in zip(ranks_by_room, split_sizes(length, len(room)), strict=True):
        shares[rank] = share
    return shares


def _fold_document(
    start: int, shares: Sequence[int], give: Callable[[int, int, int], None]
) -> None:
    """Cut a document, which begins at ``start`` in the pack, into two pieces for each rank: rank r
    gets the r-th piece from the front and the r-th from the back, ``shares[r]`` tokens together,
    so that causal attention is even. ``give(rank, start, count)`` is called for each piece."""
    fronts = [-(-share // 2) for share in shares]
    for rank, front in enumerate(fronts):
        give(rank, start, front)
        start += front
    for rank in reversed(range(len(shares))):
        give(rank, start, shares[rank] - fronts[rank])
        start += shares[rank] - fronts[rank]


def _merge(parts: Sequence[Rows]) -> tuple[Rows, ...]:
    """The intervals sorted, those that touch joined, empty ones dropped."""
    merged: list[Rows] = []
    filled = [part for part in parts if len(part)]
    for part in sorted(filled, key=lambda part: part.start):
        if merged and merged[-1].stop == part.start:
            merged[-1] = Rows(merged[-1].start, part.stop)
        else:
            merged.append(part)
    return tuple(merged)


def _places(parts: Sequence[Rows]) -> np.ndarray:
    """[t] int64: the index in the pack of every token of the intervals, one after the other."""
    places = [np.arange(part.start, part.stop) for part in parts]
    return np.concatenate([np.zeros(0, np.int64), *places])


def _pieces(intervals: Sequence[Rows], starts: Sequence[int]) -> list[_Piece]:
    """The sorted intervals cut at the borders of documents. ``starts`` are the indices in the pack
    of the documents' first tokens, and the end of the pack."""
    pieces: list[_Piece] = []
    row = 0
    for part in intervals:
        start = part.start
        document = bisect_right(starts, start) - 1
        while start < part.stop:
            stop = min(part.stop, starts[document + 1])
            pieces.append(_Piece(document=document, start=start, stop=stop, row=row))
            row, start, document = row + stop - start, stop, document + 1
    return pieces


def _band_blocks(queries: Held, keys: Held, band: Band) -> tuple[Block, ...]:
    """The blocks of scores, in rows of ``queries`` and ``keys``, that lie in a band around the
    diagonal of each document; causal squares first, then turned ones, then rectangles."""
    keys_of_document = _by_document(keys.pieces)
    found: list[Block] = []
    for q in queries.pieces:
        for k in keys_of_document.get(q.document, ()):
            # what to add to an index in the pack for the row among the held tokens
            q_shift, k_shift = q.row - q.start, k.row - k.start
            found += [
                block._replace(
                    q_start=block.q_start + q_shift,
                    q_stop=block.q_stop + q_shift,
                    k_start=block.k_start + k_shift,
                    k_stop=block.k_stop + k_shift,
                )
                for block in band_blocks(band, (q.start, q.stop), (k.start, k.stop))
            ]
    return tuple(sorted(found, key=lambda block: (not block.causal, block.turned)))


def _by_document(pieces: Sequence[_Piece]) -> dict[int, list[_Piece]]:
    """The pieces of each document, in order."""
    found: dict[int, list[_Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.document, []).append(piece)
    return found


def _blocks(queries: Held, keys: Held, causal: bool) -> tuple[Block, ...]:
    """The blocks of scores of each document without a window, in rows of ``queries`` and ``keys``:
    causal squares, and rectangles that are seen whole."""
    keys_of_document = _by_document(keys.pieces)
    squares: list[Block] = []
    full: list[Block] = []
    for q in queries.pieces:
        rows = (q.row, q.row + q.stop - q.start)
        for k in keys_of_document.get(q.document, ()):
            if not causal:
                full.append(Block(*rows, k.row, k.row + k.stop - k.start, False))
                continue
            # keys before the first query are seen by all queries: a rectangle
            before = min(k.stop, q.start) - k.start
            if before > 0:
                full.append(Block(*rows, k.row, k.row + before, False))
            # The piece of keys contains the queries' own tokens: a causal square. Keys after the
            # last query are seen by none.
            if k.start < q.stop and q.start < k.stop:
                assert k.start <= q.start, "keys contain the queries' ranks"
                assert q.stop <= k.stop, "keys contain the queries' ranks"
                own = k.row + q.start - k.start
                squares.append(Block(*rows, own, own + q.stop - q.start, True))
    return (*squares, *joined(full))
