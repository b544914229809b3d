"""What a method is: two functions of one signature, and the groups that can run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from headrace.methods.context import Context, Members
from headrace.methods.weights import State
from headrace.spec.architecture import Architecture
from headrace.spec.plan import TokenOrder

__all__ = ["BRANCHES", "Branch", "BranchFunction", "Method"]

Branch = Literal["attention", "feed_forward"]
BRANCHES: tuple[Branch, ...] = get_args(Branch)

BranchFunction = Callable[[torch.Tensor, State, Context], torch.Tensor]
"""A branch of a layer: the residual stream x [T / R, h] to what is added to it, [T / R, h],
beginning with its norm where the architecture has norms first. Pure but for what weights add up."""

Rule = Callable[[Architecture, int], str | None]
"""None when a group of so many ranks can run a branch, else the rule it breaks."""


Groups = Callable[[Architecture, int, int], tuple[Members, ...]]
"""The groups within a group of so many ranks, in tensor-parallel blocks of so many, that a method
needs."""


def _all_rows(architecture: Architecture, ranks: int) -> float:
    return 1.0


def _no_groups(architecture: Architecture, ranks: int, tensor: int) -> tuple[Members, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How one layer's attention and feed-forward are spread over the ranks of a group.

    ``order`` is the token order in which it is fastest (it is right in any). ``*_groups`` are the
    groups within the group that a branch needs. ``automatic`` methods are considered when the
    choice is left to the planner. ``of`` names the method whose feed-forward this one uses, its
    own name where it has one. ``fetched`` is the share of the weight rows it lacks that a rank
    fetches where weights are held sharded. ``unlevelled`` branches do the same at the levels
    ``none`` and ``attention``.
    """

    name: str
    attention: BranchFunction
    feed_forward: BranchFunction
    attention_rule: Rule
    feed_forward_rule: Rule
    of: str
    order: TokenOrder = "natural"
    attention_groups: Groups = _no_groups
    feed_forward_groups: Groups = _no_groups
    fetched: Callable[[Architecture, int], float] = _all_rows
    unlevelled: tuple[Branch, ...] = ()
    automatic: bool = True

    def rule(self, branch: Branch, architecture: Architecture, ranks: int) -> str | None:
        """None when a group of ``ranks`` can run the branch, else the rule it breaks."""
        rule = self.attention_rule if branch == "attention" else self.feed_forward_rule
        return rule(architecture, ranks)

    def supports(self, architecture: Architecture, ranks: int) -> str | None:
        """None when a group of ``ranks`` can run both branches, else the rule it breaks."""
        for branch in BRANCHES:
            broken = self.rule(branch, architecture, ranks)
            if broken:
                return broken
        return None
