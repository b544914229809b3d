"""Attention of some heads over more tokens, for any core.

A switch is an all-to-all: from all heads of a rank's tokens to some heads of the block's tokens.

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
    """Which heads each rank of a block attends with.

    ``columns`` are the heads of each rank after the switch, out of the N + 2 G of qkv: its queries,
    then the keys, then the values that they need. ``queries`` are its query heads out of N, for the
    switch back. ``expand[r]`` has for each query of rank r the index of its key among the rank's
    keys; None where kernels pair queries and keys rightly by themselves (whole KV groups).
    """

    columns: Columns
    queries: Columns
    expand: tuple[tuple[int, ...] | None, ...]


@lru_cache(maxsize=64)
def split_heads(heads: int, kv_heads: int, ranks: int) -> HeadSplit:
    """Divide ``heads`` query heads and ``kv_heads`` key-value heads over ``ranks``: whole KV groups
    where there are at least as many as ranks, else single query heads, whose keys and values are
    then on several ranks."""
    queries_per_kv = heads // kv_heads
    cut_unit = queries_per_kv if ranks <= kv_heads else 1
    columns: list[tuple[int, ...]] = []
    queries: list[tuple[int, ...]] = []
    expand: list[tuple[int, ...] | None] = []
    for rows in split_rows(heads, ranks, cut_unit):
        own_queries = tuple(range(rows.start, rows.stop))
        own_kv_heads = sorted({head // queries_per_kv for head in own_queries})
        # columns of qkv: query heads first, then all keys, then all values
        columns.append(
            own_queries
            + tuple(heads + kv_head for kv_head in own_kv_heads)
            + tuple(heads + kv_heads + kv_head for kv_head in own_kv_heads)
        )
        queries.append(own_queries)
        expand.append(
            _expansion(
                [own_kv_heads.index(head // queries_per_kv) for head in own_queries],
                len(own_kv_heads),
            )
        )
    return HeadSplit(
        columns=Columns(total=heads + 2 * kv_heads, of=tuple(columns)),
        queries=Columns(total=heads, of=tuple(queries)),
        expand=tuple(expand),
    )


def _expansion(key_of: list[int], keys: int) -> tuple[int, ...] | None:
    """For each query of a rank the index of its key among the rank's ``keys`` keys, as given in
    ``key_of``; None where every key serves the same number of consecutive queries, which is how
    kernels for grouped heads pair them."""
    queries_per_key = len(key_of) // keys if keys else 0
    kernel_pairing = [i // queries_per_key for i in range(len(key_of))] if queries_per_key else []
    return None if key_of == kernel_pairing else tuple(key_of)


def local_heads(qkv: torch.Tensor, split: HeadSplit, member: int) -> tuple[torch.Tensor, Heads]:
    """(queries, keys and values [T, heads, D] for a kernel, their numbers) from the heads ``qkv``
    [T, C, D] of a member after the switch. Keys and values are repeated, one for each query, where
    a kernel would pair them wrongly with the queries."""
    queries = len(split.queries.of[member])
    keys = (qkv.shape[1] - queries) // 2
    expand = split.expand[member]
    if expand is None:
        return qkv, Heads(queries=queries, keys=keys)
    repeated = [
        *range(queries),
        *(queries + i for i in expand),
        *(queries + keys + i for i in expand),
    ]
    return qkv.index_select(1, index_tensor(repeated, qkv.device)), Heads(
        queries=queries, keys=queries
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchedCore:
    """Attention of local tokens by a switch to heads, ``core`` over this rank's heads of all tokens
    of the block, and a switch back.

    ``heads`` are those of the whole model. Rank r of the block holds ``sizes[r]`` tokens; this rank
    is its ``member``. Switched rows lie one rank after the other: ``rows[order]`` puts them into
    the order of the pack, ``rows[back]`` undoes that; both are None where they are in order."""

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
        """The numbers of heads that this rank's core is given: as many keys as queries where keys
        are repeated, else the rank's own keys."""
        split, queries = self.split, len(self.split.queries.of[self.member])
        keys = queries
        if split.expand[self.member] is None:
            keys = (len(split.columns.of[self.member]) - queries) // 2
        return replace(self.heads, queries=queries, keys=keys)

    @property
    def rows(self) -> int:
        """T, the tokens of all ranks of the block."""
        return sum(self.sizes)

    def forward(
        self, qkv: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Saved]:
        """Attention over qkv [t, N + 2 G, D] of the local tokens: (out [t, N, D], saved). Saved are
        the switched qkv [T, n + 2 g, D], its result [T, n, D], and what the core saves. ``sinks``
        [N] are those of all heads."""
        switched = self._in_pack_order(self._to_heads(qkv, self.split.columns))
        switched, _ = local_heads(switched, self.split, self.member)
        out, saved = self.core.forward(switched)
        if sinks is not None:
            out, saved = sunk(out, saved, sinks[self._own_queries(sinks.device)])
        local_out = self._to_tokens(self._in_rank_order(out), self.split.queries)
        return local_out, (switched, out, *saved)

    def backward(
        self,
        grad: torch.Tensor,
        qkv: torch.Tensor,
        out: torch.Tensor,
        saved: Saved,
        sinks: torch.Tensor | None = None,
    ) -> Gradients:
        """The gradients of qkv, and of ``sinks`` [N]: zero but for this rank's heads. ``qkv`` and
        ``out`` of the local tokens are not used: their switched forms were saved."""
        switched, switched_out, *core_saved = saved
        switched_grad = self._in_pack_order(self._to_heads(grad, self.split.queries))
        dsinks = None
        # with sinks the core keeps one tensor, the log-sum-exp
        if sinks is not None:
            heads = self._own_queries(sinks.device)
            dsinks = sinks.new_zeros(sinks.shape, dtype=core_saved[-1].dtype)
            dsinks[heads] = sink_gradient(switched_grad, switched_out, core_saved[-1], sinks[heads])
        dqkv = self._folded(
            self.core.backward(switched_grad, switched, switched_out, tuple(core_saved)).whole
        )
        dqkv = self._to_tokens(self._in_rank_order(dqkv), self.split.columns)
        return replace(Gradients.of(dqkv, self.heads), sinks=dsinks)

    def _own_queries(self, device: torch.device) -> torch.Tensor:
        """The indices of this rank's query heads among all."""
        return index_tensor(self.split.queries.of[self.member], device)

    def _to_heads(self, x: torch.Tensor, columns: Columns) -> torch.Tensor:
        """All-to-all from this rank's tokens [t, heads, D] to its heads of all tokens [T, heads,
        D]."""
        return x if self.group is None else to_columns(x, self.sizes, columns, self.group)

    def _to_tokens(self, x: torch.Tensor, columns: Columns) -> torch.Tensor:
        """All-to-all back, from this rank's heads of all tokens to all heads of its tokens."""
        return x if self.group is None else to_tokens(x, self.sizes, columns, self.group)

    def _in_pack_order(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, ...] with its rows, which are in rank order, put into the order of the pack."""
        return x if self.order is None else x.index_select(0, self.order)

    def _in_rank_order(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, ...] with its rows, which are in the order of the pack, put into rank order."""
        return x if self.back is None else x.index_select(0, self.back)

    def _folded(self, dqkv: torch.Tensor) -> torch.Tensor:
        """The adjoint of :func:`local_heads`: adds the gradients of each key and value that was
        repeated."""
        expand = self.split.expand[self.member]
        if expand is None:
            return dqkv
        queries, keys = len(expand), max(expand) + 1
        index = index_tensor(
            [
                *range(queries),
                *(queries + i for i in expand),
                *(queries + keys + i for i in expand),
            ],
            dqkv.device,
        )
        out = dqkv.new_zeros((dqkv.shape[0], queries + 2 * keys, dqkv.shape[2]))
        return out.index_add_(1, index, dqkv)
