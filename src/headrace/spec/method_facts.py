"""What both sides know of a method without running it: its rules, its groups, what it uses.

A method is named in two places only: its facts (:mod:`headrace.spec.known_methods`) and, where it
runs, the file of its two functions. Everyone else asks the facts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from headrace.spec.architecture import Architecture
from headrace.spec.layer_plan import BRANCHES, Branch
from headrace.spec.plan import TokenOrder

__all__ = [
    "BranchFormula",
    "BranchUse",
    "GroupRule",
    "Members",
    "MethodFacts",
    "RankBlocks",
    "SupportRule",
    "TrafficPattern",
    "largest_divisor",
    "tensor_blocks",
    "ulysses_blocks",
]

Members = tuple[int, ...]
"""Ranks of a group, counted within the group."""

TrafficPattern = Literal["gather", "exchange", "hop"]
"""Gathers and the scatters of sums; all-to-all; from each rank to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchUse:
    """What one branch of a layer uses on the busiest of p ranks.

    ``linear`` and ``core`` are its shares of the branch's linear and attention FLOPs. Bytes are in
    units u = T h e / p, those of one local activation: ``sent`` forward and ``sent_back`` backward
    in so many ``messages`` of one ``pattern``; ``kept`` for the backward at the level ``none`` and
    ``kept_attention`` at ``attention``; ``buffers`` needed in passing. ``launches`` counts how
    often the branch starts its kernels, ``cut`` over how many ranks the features of its weights
    are cut. A branch that ``recomputes`` runs its first product again in every backward, whatever
    the level.
    """

    linear: float
    core: float = 0.0
    sent: float = 0.0
    sent_back: float = 0.0
    messages: int = 0
    messages_back: int = 0
    pattern: TrafficPattern = "gather"
    kept: float
    kept_attention: float
    buffers: float
    launches: int = 1
    cut: int = 1
    recomputes: bool = False


SupportRule = Callable[[Architecture, int], str | None]
"""(architecture, ranks) to None when a group of so many ranks can run a branch, else to the rule
that it breaks, in words."""

GroupRule = Callable[[Architecture, int, int], tuple[Members, ...]]
"""(architecture, ranks, tensor) to the groups that a branch needs within a group of so many ranks,
where blocks of ``tensor`` ranks hold the weights together."""

BranchFormula = Callable[[Architecture, int, float], BranchUse]
"""(architecture, p, r) to what a branch uses on each of p ranks, where one fp32 sum takes the place
of r elements of an activation."""


def _no_groups(architecture: Architecture, ranks: int, tensor: int) -> tuple[Members, ...]:
    """The groups of a branch that needs none within its group."""
    return ()


def _alone(ranks: int, most: int) -> int:
    """The ranks of a block (see ``MethodFacts.block``) where each rank wants whole weights."""
    return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodFacts:
    """One method, as planners, costs and the runtime know it.

    ``owner`` names the method whose feed-forward this one uses, its own name where it has one.
    ``order`` is the token order in which it is fastest (it is right in any). ``*_groups`` are the
    groups within the group that a branch needs. ``block(ranks, most)`` is the number of
    neighbouring ranks that use their shards of a layer's weights as they lie, of at most ``most``
    shards; 1 where each rank wants whole weights. ``unlevelled`` branches do the same at the levels
    ``none`` and ``attention``. ``automatic`` methods are considered when the choice is left to the
    planner; those of them with ``many_kernels`` are not on GPUs, as the host cannot launch so many
    small kernels as fast as they run. ``*_use`` are formulas of what the branches use, None where
    there are none.
    """

    name: str
    owner: str
    attention_rule: SupportRule
    feed_forward_rule: SupportRule
    order: TokenOrder = "natural"
    attention_groups: GroupRule = _no_groups
    feed_forward_groups: GroupRule = _no_groups
    block: Callable[[int, int], int] = _alone
    unlevelled: tuple[Branch, ...] = ()
    automatic: bool = True
    many_kernels: bool = False
    attention_use: BranchFormula | None = None
    feed_forward_use: BranchFormula | None = None

    def rule(self, branch: Branch, architecture: Architecture, ranks: int) -> str | None:
        """None when a group of ``ranks`` can run the branch, else the rule it breaks."""
        rule = self.attention_rule if branch == "attention" else self.feed_forward_rule
        return rule(architecture, ranks)

    def supports(self, architecture: Architecture, ranks: int) -> str | None:
        """None when a group of ``ranks`` can run both branches, else the rule it breaks."""
        broken = (self.rule(branch, architecture, ranks) for branch in BRANCHES)
        return next((rule for rule in broken if rule), None)

    def fetched(self, ranks: int, most: int) -> float:
        """What a rank fetches of a layer's weights where they are sharded over ``ranks`` = R, as a
        fraction of the rows that it does not hold.

        A rank holds 1 / R of the rows and works with 1 / U of them, where U is its block's size
        (weights can be cut into ``most`` shards): (1 / U - 1 / R) / (1 - 1 / R).
        """
        if ranks == 1:
            return 1.0
        return (1 / self.block(ranks, most) - 1 / ranks) / (1 - 1 / ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBlocks:
    """R ranks as blocks of ``inner`` neighbours, for methods over two mesh axes."""

    ranks: int
    inner: int

    @property
    def blocks(self) -> tuple[Members, ...]:
        """The members of each block."""
        return tuple(
            tuple(range(start, start + self.inner)) for start in range(0, self.ranks, self.inner)
        )

    @property
    def rings(self) -> tuple[Members, ...]:
        """The members with the same index in all blocks."""
        return tuple(tuple(range(member, self.ranks, self.inner)) for member in range(self.inner))


def largest_divisor(ranks: int, most: int) -> int | None:
    """The largest proper divisor of ``ranks`` above one and at most ``most``."""
    return next((d for d in range(min(most, ranks - 1), 1, -1) if ranks % d == 0), None)


def ulysses_blocks(a: Architecture, ranks: int, tensor: int = 1) -> RankBlocks | None:
    """Split ``ranks`` into blocks that run Ulysses within: as large as divides the group and leaves
    each rank a key-value head, or else a query head. None where no such size divides the group.
    ``tensor`` has no part in it."""
    inner = largest_divisor(ranks, a.kv_heads) or largest_divisor(ranks, a.heads)
    return None if inner is None else RankBlocks(ranks=ranks, inner=inner)


def tensor_blocks(a: Architecture, ranks: int, tensor: int = 1) -> RankBlocks | None:
    """Split ``ranks`` into blocks that share a layer's weights: of ``tensor`` ranks, or, where that
    is 1, as large as divides the group. None where a rank would have no shard."""
    most = a.tensor_ranks
    if tensor == 1:
        inner = largest_divisor(ranks, most)
    else:
        inner = tensor if tensor <= most else None
    return None if inner is None else RankBlocks(ranks=ranks, inner=inner)
