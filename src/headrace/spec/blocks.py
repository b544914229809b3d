"""Blocks: the pieces of a score matrix that attention computes.

[Note: only squares and rectangles] Whatever order the tokens of a pack have and however they are
spread, the scores that count fall into pieces of two kinds: the *causal square* of a run of tokens
with itself, and the *full rectangle* of one run with another. A window adds a third, the causal
square turned round, in which a row sees the columns from its own on. A kernel therefore needs no
mask tensor and no rule for unequal lengths.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

__all__ = ["Band", "Block", "band_blocks", "document_blocks", "joined", "scores_of"]


class Band(NamedTuple):
    """Which scores of a document count: a query at q sees the keys from q - ``behind`` to q +
    ``ahead``, without an end where it is None."""

    behind: int | None = None
    ahead: int | None = None

    @classmethod
    def of(cls, *, causal: bool, window: int | None = None) -> Band:
        """The band of causal or full attention. A ``window`` counts the query itself and the tokens
        before it; without ``causal`` as many tokens after the query are seen too."""
        reach = None if window is None else window - 1
        return cls(behind=reach, ahead=0 if causal else reach)


class Block(NamedTuple):
    """Rows [q_start, q_stop) of the queries see rows [k_start, k_stop) of the keys, all of them
    unless the block is ``causal``: then it is square, and row i sees the columns up to i, or from i
    on where it is ``turned`` too."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool
    turned: bool = False

    @property
    def scores(self) -> int:
        """The number of pairs of a query and a key that it sees."""
        rows, columns = self.q_stop - self.q_start, self.k_stop - self.k_start
        # The triangle of a causal square includes its diagonal.
        return rows * (rows + 1) // 2 if self.causal else rows * columns


def document_blocks(lengths: Iterable[int], causal: bool) -> tuple[Block, ...]:
    """One square block for each document of a pack, whose documents of these ``lengths`` in tokens
    lie one after the other."""
    blocks: list[Block] = []
    start = 0
    for length in lengths:
        blocks.append(Block(start, start + length, start, start + length, causal))
        start += length
    return tuple(blocks)


def band_blocks(band: Band, queries: tuple[int, int], keys: tuple[int, int]) -> list[Block]:
    """Cover the scores of a band by blocks: causal and turned squares first, then rectangles.

    ``queries`` and ``keys`` are half-open ranges (start, stop) of positions in one document. A
    query at q sees the keys q - behind to q + ahead, which are cut off at the ends of ``keys``.
    Rows whose last key q + ahead lies within ``keys`` end in a causal square, rows whose first key
    q - behind does begin with a turned square, and the keys between are a rectangle. Rows are cut
    where either square begins or ends, and so short that the two squares share no key.
    """
    (q_start, q_stop), (k_start, k_stop) = queries, keys
    cuts = {q_start, q_stop}
    # Row q has its first key at q - behind and its last at q + ahead: where one of these is an edge
    # of the keys, the form of the blocks changes.
    for reach in (band.behind, None if band.ahead is None else -band.ahead):
        if reach is not None:
            cuts |= {edge + reach for edge in keys}
    edges = sorted(cut for cut in cuts if q_start <= cut <= q_stop)
    squares, full = list[Block](), list[Block]()
    for start, stop in pairwise(edges):
        step = stop - start
        if band.behind is not None and band.ahead is not None:
            step = max(1, min(step, band.behind + band.ahead))
        for first in range(start, stop, step):
            rows = first, min(first + step, stop)
            low, high = k_start, k_stop  # the keys that all these rows see: the rectangle
            # As rows were cut at the edges, a square lies within the keys or outside of them.
            if band.ahead is not None:
                last_keys = rows[0] + band.ahead, rows[1] + band.ahead
                if last_keys[0] < k_stop:
                    high = min(last_keys[0], k_stop)
                    if k_start <= last_keys[0]:
                        squares.append(Block(*rows, *last_keys, causal=True))
            if band.behind is not None:
                first_keys = rows[0] - band.behind, rows[1] - band.behind
                if first_keys[1] > k_start:
                    low = max(first_keys[1], k_start)
                    # A single row whose first key is its last has it in its causal square already.
                    if first_keys[1] <= k_stop and (rows[1] - rows[0] > 1 or first_keys[0] < high):
                        squares.append(Block(*rows, *first_keys, causal=True, turned=True))
            if low < high:
                full.append(Block(*rows, low, high, causal=False))
    return [*squares, *full]


def joined(rectangles: Iterable[Block]) -> list[Block]:
    """Merge full rectangles of the same queries whose keys follow each other. ``rectangles`` are
    ordered by queries and then by keys."""
    merged = list[Block]()
    for block in rectangles:
        same_queries = bool(merged) and merged[-1][:2] == block[:2]
        if same_queries and merged[-1].k_stop == block.k_start:
            merged[-1] = merged[-1]._replace(k_stop=block.k_stop)
        else:
            merged.append(block)
    return merged


def scores_of(blocks: Iterable[Block]) -> int:
    """The number of pairs of a query and a key that attention computes over all blocks."""
    return sum(block.scores for block in blocks)
