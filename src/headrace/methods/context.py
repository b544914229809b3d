"""What a method is given besides the activations: weights as they lie, and where it stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from headrace.comm.collectives import all_gather_rows, reduce_scatter_rows
from headrace.layouts.intervals import Rows
from headrace.layouts.tokens import TokenPlan
from headrace.ops.linear import Source
from headrace.ops.random import DropoutKey
from headrace.ops.recompute import region
from headrace.spec.architecture import Architecture
from headrace.spec.method import Recompute

__all__ = ["Context", "Method", "Shard", "State", "Whole"]

State = Mapping[str, Source]
"""The weights of one layer by short name (``qkv.weight``), as this rank holds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A weight of which this rank holds all rows; gradients are partial sums, added by the push."""

    value: torch.Tensor
    grad: torch.Tensor

    def rows(self) -> torch.Tensor:
        """All rows: no communication."""
        return self.value

    def add(self, grad: torch.Tensor) -> None:
        """Add to the partial sum."""
        self.grad.add_(grad)

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add left^T right to the partial sum."""
        if left.dtype == self.grad.dtype:
            self.grad.addmm_(left.t(), right)
        else:
            self.grad.add_(left.t() @ right)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A weight whose rows are spread over a group: gathered at each use, never kept.

    ``value`` and ``grad`` are this rank's part [rows of ``shards[member]``, ...].

        rows         all_gather(value)                       bytes sent  V W
        add(grad)    grad_part += reduce_scatter(grad)       bytes sent  V W,  V = (R - 1) / R
    """  # fmt: skip

    value: torch.Tensor
    grad: torch.Tensor
    shards: tuple[Rows, ...]
    group: dist.ProcessGroup

    @property
    def _sizes(self) -> list[int]:
        return [len(shard) for shard in self.shards]

    def rows(self) -> torch.Tensor:
        """All rows, gathered from the group."""
        return all_gather_rows(self.value, self._sizes, self.group)

    def add(self, grad: torch.Tensor) -> None:
        """Sum over the group, keep this rank's rows."""
        self.grad.add_(reduce_scatter_rows(grad.to(self.grad.dtype), self._sizes, self.group))

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add left^T right, summed over the group."""
        self.add(left.t() @ right)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Where a layer runs: the group and this rank's place in it, the pack, the model's shape.

    ``group`` is None for a single rank. ``tables`` are the rotary cosines and sines of the local
    tokens, or None. ``documents`` are the lengths of the whole pack.
    """

    architecture: Architecture
    tokens: TokenPlan
    member: int
    group: dist.ProcessGroup | None
    tables: tuple[torch.Tensor, torch.Tensor] | None
    dropout: DropoutKey
    recompute: Recompute = "none"
    layer: int = 0
    training: bool = field(default=True)

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return self.tokens.ranks

    def linear_part(self, fn: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """Run a part of a layer that has no communication of activations: computed again in the
        backward when the level is ``attention``, kept otherwise."""
        return region(fn, *inputs) if self.recompute == "attention" else fn(*inputs)


class Method(Protocol):
    """How one layer's attention and feed-forward are spread over the ranks of a group.

    Both take the residual stream ``x`` [T / R, h] and return the branch to add to it, [T / R, h];
    each begins with its norm. They are pure but for what sources add up.
    """

    @property
    def name(self) -> str:
        """The name in plans."""

    def supports(self, architecture: Architecture, ranks: int) -> str | None:
        """None when a group of ``ranks`` can run it, else the rule it breaks."""

    def attention(self, x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
        """The attention branch."""

    def feed_forward(self, x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
        """The feed-forward branch."""
