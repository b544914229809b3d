"""Method ``ulysses_z``: heads are exchanged for tokens around the attention, weights are gathered.

Over R ranks, with T tokens, n query and g key-value heads of d features:

    q, k, v   [T/R, n + 2g, d]     local tokens, all heads
    switch    [T, (n + 2g)/R, d]   all tokens, this rank's heads
    attend    [T, n/R, d]          whole documents, local heads
    switch_back  [T/R, n, d]

Activations sent per rank, forward (backward the same), V = (R - 1)/R: V (2 h + 2 g d) T / R
elements when R divides T, n and g. Key-value heads are replicated when ranks outnumber them, and
heads that R does not divide are split unevenly. Weights held sharded cost V W on each gather and
V W on the reduce-scatter of each gradient; weights held whole cost nothing here (ParaDySe's
"Ulysses + ZeRO-3"; DeepSpeed Ulysses).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from headrace.layouts.intervals import split_rows
from headrace.methods.block import gathered_feed_forward, output, queries_keys_values
from headrace.methods.context import Context, State
from headrace.ops.attention import attend
from headrace.ops.switch import Columns, switch, switch_back
from headrace.spec.architecture import Architecture

__all__ = ["HeadSplit", "UlyssesZ", "split_heads"]


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


class UlyssesZ:
    """Ulysses attention and a feed-forward on local tokens, weights gathered by their sources."""

    name = "ulysses_z"

    def supports(self, architecture: Architecture, ranks: int) -> str | None:
        """Any group of at most as many ranks as query heads."""
        if ranks <= architecture.heads:
            return None
        return f"ulysses_z runs on at most {architecture.heads} ranks, one per query head"

    def attention(self, x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
        """Norm, projection, switch, attention over local heads, switch back, output projection."""
        a, sizes, group = context.architecture, context.tokens.sizes, context.group
        heads = split_heads(a.heads, a.kv_heads, context.ranks)
        qkv = switch(queries_keys_values(x, state, context), sizes, heads.columns, group)
        count = len(heads.queries.of[context.member])
        keys = (qkv.shape[1] - count) // 2
        q, k, v = qkv.split([count, keys, keys], dim=1)
        expand = heads.expand[context.member]
        if expand is not None:
            index = torch.tensor(expand, device=x.device)
            k, v = k.index_select(1, index), v.index_select(1, index)
        out = attend(q, k, v, context.tokens.lengths, a.causal)
        return output(switch_back(out, sizes, heads.queries, group), state, context)

    def feed_forward(self, x: torch.Tensor, state: State, context: Context) -> torch.Tensor:
        """Norm and feed-forward of local tokens."""
        return gathered_feed_forward(x, state, context)
