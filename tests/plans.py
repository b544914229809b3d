"""Documents drawn at random."""

from __future__ import annotations

import numpy as np

from headrace.planning.drawn import random_plan

__all__ = ["random_documents", "random_plan"]


def random_documents(
    rng: np.random.Generator, vocabulary: int, count: int, longest: int
) -> tuple[np.ndarray, ...]:
    """Documents of random lengths from one token up."""
    lengths = rng.integers(1, longest + 1, size=count)
    return tuple(rng.integers(vocabulary, size=n).astype(np.int32) for n in lengths)
