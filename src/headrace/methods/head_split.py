"""Which heads each rank attends with where heads are exchanged for tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from headrace.layouts.intervals import split_rows
from headrace.ops.core import Heads
from headrace.ops.index import index_tensor
from headrace.ops.resharding import Columns

__all__ = ["HeadSplit", "local_heads", "split_heads"]


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
    """Switched columns [T, C, D] of a member as queries, keys and values that a kernel takes:
    keys and values are repeated where the kernel's own grouping would pair them wrongly."""
    count = len(split.queries.of[member])
    keys = (qkv.shape[1] - count) // 2
    expand = split.expand[member]
    if expand is None:
        return qkv, Heads(queries=count, keys=keys)
    index = [*range(count), *(count + i for i in expand), *(count + keys + i for i in expand)]
    return qkv.index_select(1, index_tensor(index, qkv.device)), Heads(queries=count, keys=count)
