"""Attention of some heads over more tokens: a switch, any core, and a switch back.

Shape legend: t tokens of a rank, T of its block of U neighbouring ranks, N query and G key-value
heads of which a rank of the block takes n and g, D features of a head.

    forward    qkv [t, N + 2 G, D] -> switch -> [T, n + 2 g, D] -> core -> [T, n, D] -> switch back
    backward   grad [t, N, D] -> switch -> [T, n, D] -> core's -> [T, n + 2 g, D] -> switch back

A block of all ranks and a core without communication is Ulysses; a ring from block to block is the
composite of both. Kept: what the switch brought, the result of the heads, and what the core says;
so the backward sends nothing twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from headrace.methods.head_split import HeadSplit, local_heads, split_heads
from headrace.ops.columns import to_columns, to_tokens
from headrace.ops.core import Core, Gradients, Heads, Saved
from headrace.ops.index import index_tensor
from headrace.ops.resharding import Columns

__all__ = ["SwitchedCore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchedCore:
    """``core`` over the heads of one rank of a block whose ranks hold ``sizes`` tokens; ``member``
    is this rank's place in it. ``order`` [T] takes switched rows into the order of the pack and
    ``back`` undoes it, None where they are in order."""

    heads: Heads
    core: Core
    sizes: tuple[int, ...]
    member: int
    group: dist.ProcessGroup | None
    order: torch.Tensor | None
    back: torch.Tensor | None

    @property
    def split(self) -> HeadSplit:
        """Who takes which heads."""
        return split_heads(self.heads.queries, self.heads.keys, len(self.sizes))

    @property
    def inner(self) -> Heads:
        """Heads that the core of this rank sees."""
        split, count = self.split, len(self.split.queries.of[self.member])
        if split.expand[self.member] is not None:
            return Heads(queries=count, keys=count)
        return Heads(queries=count, keys=(len(split.columns.of[self.member]) - count) // 2)

    @property
    def rows(self) -> int:
        """T."""
        return sum(self.sizes)

    def forward(self, qkv: torch.Tensor) -> tuple[torch.Tensor, Saved]:
        """(out [t, N, D], (switched qkv [T, n + 2 g, D], its out [T, n, D], the core's...))."""
        own = self._sorted(self._columns(qkv, self.split.columns))
        own, _ = local_heads(own, self.split, self.member)
        out, saved = self.core.forward(own)
        return self._tokens(self._unsorted(out), self.split.queries), (own, out, *saved)

    def backward(
        self, grad: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, saved: Saved
    ) -> Gradients:
        """Those of qkv; ``qkv`` and ``out`` of the rank's tokens are not looked at."""
        own, own_out, *rest = saved
        switched = self._sorted(self._columns(grad, self.split.queries))
        dqkv = self._folded(self.core.backward(switched, own, own_out, tuple(rest)).whole)
        dqkv = self._tokens(self._unsorted(dqkv), self.split.columns)
        return Gradients.of(dqkv, self.heads)

    def _columns(self, x: torch.Tensor, columns: Columns) -> torch.Tensor:
        return x if self.group is None else to_columns(x, self.sizes, columns, self.group)

    def _tokens(self, x: torch.Tensor, columns: Columns) -> torch.Tensor:
        return x if self.group is None else to_tokens(x, self.sizes, columns, self.group)

    def _sorted(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.order is None else x.index_select(0, self.order)

    def _unsorted(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.back is None else x.index_select(0, self.back)

    def _folded(self, dqkv: torch.Tensor) -> torch.Tensor:
        """Gradients of repeated keys and values, added."""
        expand = self.split.expand[self.member]
        if expand is None:
            return dqkv
        count, keys = len(expand), max(expand) + 1
        index = index_tensor(
            [*range(count), *(count + i for i in expand), *(count + keys + i for i in expand)],
            dqkv.device,
        )
        out = dqkv.new_zeros((dqkv.shape[0], count + 2 * keys, dqkv.shape[2]))
        return out.index_add_(1, index, dqkv)
