"""A schedule on blocks of ranks while it is being improved, with exact seconds.

A *tree* holds the sequences of every block of a chain of sizes, the seconds of every block, and
when every rank is free: the sum over the blocks it lies in.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.planning.groups.drafts import Block, Members
from headrace.planning.groups.packing import launches_needed
from headrace.planning.groups.work import Work

__all__ = ["Tree"]


class Tree:
    """A schedule on the blocks of sizes ``rows`` (each divides the next), changed in place."""

    def __init__(self, work: Work, rows: Sequence[int], members: Members) -> None:
        self.work, self.rows = work, tuple(rows)
        self.members: Members = {}
        self.load: dict[Block, float] = {}
        self.free = np.zeros(work.devices)
        self.home: list[Block] = [(0, 0)] * len(work.tokens)
        self._row = {work.sizes[row]: row for row in rows}
        self._cap = work.costs.cap_tokens
        for block, held in members.items():
            self.put(block, list(held))

    @property
    def seconds(self) -> float:
        """When the last rank is free."""
        return float(self.free.max())

    def block_s(self, block: Block, held: Sequence[int]) -> float:
        """What a block takes for the sequences ``held``, longest first."""
        p, row = block[0], self.work.rows[self._row[block[0]]]
        launches = launches_needed(self.work.tokens, held, self._cap * p)
        return sum([row[i] for i in held]) + launches * self.work.c_s

    def put(self, block: Block, held: list[int]) -> None:
        """Give ``block`` the sequences ``held``, longest first, instead of what it has."""
        load = self.block_s(block, held)
        p, k = block
        self.free[k * p : (k + 1) * p] += load - self.load.get(block, 0.0)
        if held:
            self.members[block], self.load[block] = held, load
        else:
            self.members.pop(block, None)
            self.load.pop(block, None)
        for i in held:
            self.home[i] = block

    def copy_members(self) -> Members:
        """What every block holds, apart from this tree."""
        return {block: list(held) for block, held in self.members.items()}
