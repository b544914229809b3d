"""Token plans: which rank of a group holds which tokens of a pack.

Natural order: the pack is one run of documents, cut into contiguous parts whose sizes differ by at
most one; documents may straddle ranks, and a rank may hold no token at all. Every method honours
the same plan, so a change of method between two layers moves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from headrace.layouts.intervals import Rows, split_rows

__all__ = ["TokenPlan"]


@dataclass(frozen=True, kw_only=True)
class TokenPlan:
    """A pack of documents of ``lengths`` tokens over ``ranks`` ranks."""

    lengths: tuple[int, ...]
    ranks: int

    @property
    def total(self) -> int:
        """Tokens of the pack."""
        return sum(self.lengths)

    @cached_property
    def parts(self) -> tuple[Rows, ...]:
        """The tokens of each rank."""
        return split_rows(self.total, self.ranks)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Tokens on each rank."""
        return tuple(len(part) for part in self.parts)

    def positions(self, rank: int) -> np.ndarray:
        """[t] int64: each local token's position in its own document."""
        return self._per_token(rank, [np.arange(length) for length in self.lengths])

    def documents(self, rank: int) -> np.ndarray:
        """[t] int64: each local token's document, counted within the pack."""
        return self._per_token(rank, [np.full(length, i) for i, length in enumerate(self.lengths)])

    def take(self, rank: int, values: np.ndarray) -> np.ndarray:
        """The local part of one value per token of the pack."""
        part = self.parts[rank]
        return values[part.start : part.stop]

    def _per_token(self, rank: int, pieces: list[np.ndarray]) -> np.ndarray:
        return self.take(rank, np.concatenate(pieces)).astype(np.int64)
