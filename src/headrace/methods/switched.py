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

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.distributed as dist

from headrace.layouts.partition import split_rows
from headrace.ops.core import Core, Gradients, Heads, Saved, sink_gradient, sunk
from headrace.ops.fused import index_tensor
from headrace.ops.switch import Columns, to_columns, to_tokens

__all__ = [
    "HeadSplit",
    "SwitchedCore",
    "local_heads",
    "split_heads",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSplit:
    """Which heads each rank attends with.

    ``columns`` are the switched heads of each rank out of n + 2g: its queries, then the keys, then
    the values they need. ``queries`` are the columns on the way back, out of n. ``expand[r]`` maps
    rank r's queries to its own keys, or is None where groups are whole and the kernel's own
    grouping is right.
    """

    columns: Columns
    queries: Columns
    expand: tuple[tuple[int, ...] | None, ...]


@lru_cache(maxsize=64)
def split_heads(heads: int, kv_heads: int, ranks: int) -> HeadSplit:
    """Heads over ``ranks``: whole KV groups when there are enough, single query heads else."""
    m = heads // kv_heads
    unit = m if ranks <= kv_heads else 1
    columns: list[tuple[int, ...]] = []
    queries: list[tuple[int, ...]] = []
    expand: list[tuple[int, ...] | None] = []
    for part in split_rows(heads, ranks, unit):
        mine = tuple(range(part.start, part.stop))
        groups = sorted({head // m for head in mine})
        columns.append(
            mine
            + tuple(heads + group for group in groups)
            + tuple(heads + kv_heads + group for group in groups)
        )
        queries.append(mine)
        expand.append(_expansion([groups.index(head // m) for head in mine], len(groups)))
    return HeadSplit(
        columns=Columns(total=heads + 2 * kv_heads, of=tuple(columns)),
        queries=Columns(total=heads, of=tuple(queries)),
        expand=tuple(expand),
    )


def _expansion(group_of: list[int], groups: int) -> tuple[int, ...] | None:
    share = len(group_of) // groups if groups else 0
    grouped = [i // share for i in range(len(group_of))] if share else []
    return None if group_of == grouped else tuple(group_of)


def local_heads(qkv: torch.Tensor, split: HeadSplit, member: int) -> tuple[torch.Tensor, Heads]:
    """Columns [T, C, D] of a member after the switch, as queries, keys and values for a kernel:
    keys and values are repeated where the kernel would pair them wrongly with queries."""
    count = len(split.queries.of[member])
    keys = (qkv.shape[1] - count) // 2
    expand = split.expand[member]
    if expand is None:
        return qkv, Heads(queries=count, keys=keys)
    index = [*range(count), *(count + i for i in expand), *(count + keys + i for i in expand)]
    return qkv.index_select(1, index_tensor(index, qkv.device)), Heads(queries=count, keys=count)


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
        """The heads that each rank attends with."""
        return split_heads(self.heads.queries, self.heads.keys, len(self.sizes))

    @property
    def inner(self) -> Heads:
        """The heads of this rank's core."""
        split, count = self.split, len(self.split.queries.of[self.member])
        keys = count
        if split.expand[self.member] is None:
            keys = (len(split.columns.of[self.member]) - count) // 2
        return replace(self.heads, queries=count, keys=keys)

    @property
    def rows(self) -> int:
        """T, the tokens of all ranks of the block."""
        return sum(self.sizes)

    def forward(
        self, qkv: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Saved]:
        """(out [t, N, D], (switched qkv [T, n + 2 g, D], its out [T, n, D], the core's...)), with
        the ``sinks`` [N] of all heads where there are any."""
        own = self._sorted(self._columns(qkv, self.split.columns))
        own, _ = local_heads(own, self.split, self.member)
        out, saved = self.core.forward(own)
        if sinks is not None:
            out, saved = sunk(out, saved, sinks[self._own(sinks.device)])
        return self._tokens(self._unsorted(out), self.split.queries), (own, out, *saved)

    def backward(
        self,
        grad: torch.Tensor,
        qkv: torch.Tensor,
        out: torch.Tensor,
        saved: Saved,
        sinks: torch.Tensor | None = None,
    ) -> Gradients:
        """The gradients of qkv, and of ``sinks`` by this rank's heads; ``qkv`` and ``out`` of the
        local tokens are not used."""
        own, own_out, *rest = saved
        switched = self._sorted(self._columns(grad, self.split.queries))
        dsinks = None
        if sinks is not None:
            heads = self._own(sinks.device)
            dsinks = sinks.new_zeros(sinks.shape, dtype=rest[-1].dtype)
            dsinks[heads] = sink_gradient(switched, own_out, rest[-1], sinks[heads])
        dqkv = self._folded(self.core.backward(switched, own, own_out, tuple(rest)).whole)
        dqkv = self._tokens(self._unsorted(dqkv), self.split.columns)
        return replace(Gradients.of(dqkv, self.heads), sinks=dsinks)

    def _own(self, device: torch.device) -> torch.Tensor:
        """The numbers of this rank's query heads."""
        return index_tensor(self.split.queries.of[self.member], device)

    def _columns(self, x: torch.Tensor, columns: Columns) -> torch.Tensor:
        return x if self.group is None else to_columns(x, self.sizes, columns, self.group)

    def _tokens(self, x: torch.Tensor, columns: Columns) -> torch.Tensor:
        return x if self.group is None else to_tokens(x, self.sizes, columns, self.group)

    def _sorted(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.order is None else x.index_select(0, self.order)

    def _unsorted(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.back is None else x.index_select(0, self.back)

    def _folded(self, dqkv: torch.Tensor) -> torch.Tensor:
        """Sums the gradients of repeated keys and values."""
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
