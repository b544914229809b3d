"""Local search under the free semantics: sequences leave the rank that ends last.

A step takes one sequence out of the
blocks of the last rank and puts it into another block, of any size, or changes it for a sequence
of another block, such that every rank whose load changes ends before the last rank did. So the
number of ranks that end last falls with every step. When no step is left, a few sequences are
shaken loose and the descent begins again. Effort is counted in steps tried, never in time, so that
a seed gives one plan.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from headrace.planning.groups.drafts import Block, Members
from headrace.planning.groups.tree import Tree
from headrace.planning.groups.work import Work

__all__ = ["improve"]

_GAIN = 1e-9  # relative: less is rounding
_TRIED_EXACTLY = 4
_SHAKEN = 3

# (predicted seconds, sequence, its block, target block, sequence that comes back or -1)
_Step = tuple[float, int, Block, Block, int]


def improve(
    work: Work, rows: Sequence[int], members: Members, *, target_s: float, tries: int,
    random: Random,
) -> tuple[float, Members]:  # fmt: skip
    """(seconds, members) of the best schedule found from ``members`` with ``tries`` steps."""
    tree = Tree(work, rows, members)
    ground = _Ground(tree)
    tries = ground.descend(target_s, tries)
    best_s, best = tree.seconds, tree.copy_members()
    while tries > 0 and best_s > target_s:
        ground.shake(random)
        tries = ground.descend(target_s, tries - 1)
        if tree.seconds < best_s * (1 - _GAIN):
            best_s, best = tree.seconds, tree.copy_members()
        elif tree.seconds > best_s * (1 + _GAIN):
            tree = Tree(work, rows, best)
            ground = _Ground(tree)
    return best_s, best


class _Ground:
    """The blocks that a tree could use, as arrays, and the steps between them."""

    def __init__(self, tree: Tree) -> None:
        work = tree.work
        self.tree, self.work = tree, work
        self.blocks = [
            (work.sizes[row], k)
            for row in tree.rows
            for k in range(work.devices // work.sizes[row])
        ]
        self.number = {block: n for n, block in enumerate(self.blocks)}
        self.row_of = np.array([work.sizes.index(p) for p, _ in self.blocks])
        self.first = np.array([p * k for p, k in self.blocks])
        self.last = np.array([p * (k + 1) for p, k in self.blocks])

    def descend(self, target_s: float, tries: int) -> int:
        """Steps while they help; returns the tries that are left."""
        while tries > 0 and self.tree.seconds > target_s:
            steps = sorted(self._steps())[: min(_TRIED_EXACTLY, tries)]
            tries -= max(1, len(steps))
            if not any(self._take(step) for step in steps):
                break
        return tries

    def shake(self, random: Random) -> None:
        """One to three sequences go to random blocks on which they are not too slow."""
        limit_s = self.tree.seconds
        for _ in range(random.randint(1, _SHAKEN)):
            i = random.randrange(len(self.work.tokens))
            target = self.blocks[random.randrange(len(self.blocks))]
            here = self.tree.home[i]
            if target != here and self.work.seconds[self.row_of[self.number[target]], i] < limit_s:
                self._move(i, here, target)

    def _steps(self) -> list[_Step]:
        """Steps that are predicted to help, for every sequence that the last rank works on."""
        tree, work = self.tree, self.work
        late_s, critical = tree.seconds, int(tree.free.argmax())
        limit_s = late_s * (1 - _GAIN)
        least = self._block_free(tree.free)
        homes = np.array([self.number[block] for block in tree.home])
        own = work.share_s[self.row_of[homes], np.arange(len(homes))]
        empty = work.c_s * np.array([block not in tree.members for block in self.blocks])
        found: list[_Step] = []
        for p in (work.sizes[row] for row in tree.rows):
            source = p, critical // p
            held = tree.members.get(source)
            if held is None:
                continue
            inside = (self.first >= p * source[1]) & (self.last <= p * (source[1] + 1))
            around = (self.first <= p * source[1]) & (self.last >= p * (source[1] + 1))
            number = self.number[source]
            for i in held:
                own_s = float(own[i])
                after = least + work.share_s[self.row_of, i] + empty - own_s * inside
                outer = np.flatnonzero(around & ~inside)
                if len(outer):
                    after[outer] += self._without(source, own_s, outer) - least[outer]
                after[number] = np.inf
                k = int(after.argmin())
                if after[k] < limit_s:
                    rest_s = late_s - own_s
                    found.append((max(float(after[k]), rest_s), i, source, self.blocks[k], -1))
                found += self._swaps(i, source, own_s, homes, own, least, limit_s)
        return found

    def _swaps(
        self, i: int, source: Block, own_s: float, homes: NDArray[np.int64],
        own: NDArray[np.float64], least: NDArray[np.float64], limit_s: float,
    ) -> list[_Step]:  # fmt: skip
        """The best change of ``i`` for a sequence of a block apart from ``source``."""
        p, k = source
        row, late_s = self.work.sizes.index(p), self.tree.seconds
        there = least[homes] + self.work.share_s[self.row_of[homes], i] - own
        here = late_s - own_s + self.work.share_s[row]
        apart = (self.last[homes] <= p * k) | (self.first[homes] >= p * (k + 1))
        after = np.where(apart, np.maximum(there, here), np.inf)
        j = int(after.argmin())
        if after[j] >= limit_s:
            return []
        return [(float(after[j]), i, source, self.tree.home[j], j)]

    def _block_free(self, free: NDArray[np.float64]) -> NDArray[np.float64]:
        """When the last rank of every block is free."""
        parts = []
        for row in self.tree.rows:
            p = self.work.sizes[row]
            count = len(free) // p
            parts.append(free[: count * p].reshape(count, p).max(axis=1))
        return np.concatenate(parts)

    def _without(
        self, source: Block, own_s: float, outer: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """When blocks around ``source`` are free once it has ``own_s`` seconds less."""
        p, k = source
        free = self.tree.free.copy()
        free[k * p : (k + 1) * p] -= own_s
        return np.array([free[self.first[n] : self.last[n]].max() for n in outer.tolist()])

    def _take(self, step: _Step) -> bool:
        """Do a step if it helps exactly too: all ranks it touches end before the last one did."""
        _, i, source, target, back = step
        tree, late_s = self.tree, self.tree.seconds
        held, there = tree.members[source], tree.members.get(target, [])
        self._move(i, source, target)
        if back >= 0:
            self._move(back, target, source)
        (p, k), (q, m) = source, target
        worst = max(tree.free[k * p : (k + 1) * p].max(), tree.free[m * q : (m + 1) * q].max())
        if worst < late_s * (1 - _GAIN):
            return True
        tree.put(source, held)
        tree.put(target, there)
        return False

    def _move(self, i: int, source: Block, target: Block) -> None:
        there = list(self.tree.members.get(target, []))
        insort(there, i)
        self.tree.put(source, [x for x in self.tree.members[source] if x != i])
        self.tree.put(target, there)
