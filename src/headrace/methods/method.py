"""A method: its facts, and the two functions that run the branches of a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.methods.context import Context
from headrace.methods.weights import State
from headrace.spec.method_facts import MethodFacts

__all__ = ["BranchFunction", "Method"]

BranchFunction = Callable[[torch.Tensor, State, Context], torch.Tensor]
"""A branch of a layer: the residual stream x [T / R, h] to the stream with the branch added,
[T / R, h]. It begins with its norm where the architecture has norms first, and ends with its
dropout. Its only side effect is that its backward adds gradients to the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How one layer's attention and feed-forward run on the ranks of a group."""

    facts: MethodFacts
    attention: BranchFunction
    feed_forward: BranchFunction
