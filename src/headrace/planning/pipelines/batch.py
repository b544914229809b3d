"""The sequences of one iteration, longest first, and what they take on every pipe."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.planning.pipelines.world import World

__all__ = ["Batch"]


class Batch:
    """``tokens[i]`` are the lengths, longest first, ``order[i]`` where each stands in the caller's
    list, ``sums[i]`` the tokens before i. Pipes go by their number in the world; the tables of one
    are made when first asked for."""

    def __init__(self, world: World, lengths: Sequence[int]) -> None:
        given = np.array(lengths, dtype=np.int64)
        order = np.argsort(-given, kind="stable")
        self.world = world
        self.values: NDArray[np.float64] = given[order].astype(np.float64)
        self.order: list[int] = order.tolist()
        self.tokens: list[int] = given[order].tolist()
        self.sums: list[int] = [0, *np.cumsum(given[order]).tolist()]
        self._seconds: list[list[float]] = [[] for _ in world.pipes]
        self._work: list[list[float]] = [[] for _ in world.pipes]
        caps = [-pipe.cap for pipe in world.pipes]
        self.first: list[int] = np.searchsorted(-self.values, caps).tolist()
        """By pipe: the first (longest) sequence that it can hold."""

    def __len__(self) -> int:
        return len(self.tokens)

    def array(self, k: int) -> NDArray[np.float64]:
        """Seconds of each sequence in a micro-batch of pipe ``k``, without the constant: an array
        [sequences]."""
        pipe = self.world.pipes[k]
        return (pipe.a * self.values + pipe.b) * self.values

    def seconds(self, k: int) -> list[float]:
        """:meth:`array` as a list."""
        if not self._seconds[k]:
            self._seconds[k] = self.array(k).tolist()
        return self._seconds[k]

    def work(self, k: int) -> list[float]:
        """Sums of :meth:`seconds` before each sequence, and of all."""
        if not self._work[k]:
            self._work[k] = [0.0, *np.cumsum(self.array(k)).tolist()]
        return self._work[k]
