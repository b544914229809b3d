"""Blocks: the pieces of a score matrix that attention computes.

[Note: only squares and rectangles] Whatever order the tokens of a pack have and however they are
spread, the scores that count fall into pieces of two kinds: the *causal square* of a run of tokens
with itself, and the *full rectangle* of one run with another. A kernel therefore needs no mask
tensor and no rule for unequal lengths.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Block", "document_blocks", "scores_of"]


class Block(NamedTuple):
    """Rows [q_start, q_stop) of the queries see rows [k_start, k_stop) of the keys; ``causal``
    blocks are square, and row i sees the columns up to i."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool

    @property
    def scores(self) -> int:
        """Scores that count."""
        rows, columns = self.q_stop - self.q_start, self.k_stop - self.k_start
        return rows * (rows + 1) // 2 if self.causal else rows * columns


def document_blocks(lengths: Iterable[int], causal: bool) -> tuple[Block, ...]:
    """The blocks of whole documents, one after the other."""
    blocks: list[Block] = []
    start = 0
    for length in lengths:
        blocks.append(Block(start, start + length, start, start + length, causal))
        start += length
    return tuple(blocks)


def scores_of(blocks: Iterable[Block]) -> int:
    """Scores that count in all blocks."""
    return sum(block.scores for block in blocks)
