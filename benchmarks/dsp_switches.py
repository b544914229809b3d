"""Exchanges beside others that do the same: for the benchmark of models of several axes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from measured import settled

from headrace.comm.collectives import all_to_all_rows
from headrace.layouts.partition import split_sizes
from headrace.ops.switch import Columns, switch, to_columns, to_tokens

__all__ = ["heads_rows", "padded", "plain_columns", "plain_tokens", "switch_rows"]

Row = dict[str, Any]

SWITCHES = ((16, 1024, 256), (15, 1023, 256), (5, 4096, 256), (64, 256, 256))
"""Frames, patches and features, two of them uneven."""

HEADS = ((1024, 16, 64), (1023, 10, 64), (4096, 32, 128), (8192, 8, 128))
"""Tokens, heads and features of a head."""


def padded(x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """A switch of dims 0 and 1 as the paper's code has it: both padded to a multiple of the ranks,
    a list of messages, a cat, and what was padded cut off."""
    ranks = len(sizes)
    frames, patches = sum(sizes), x.shape[1]
    rows, width = -(-frames // ranks), -(-patches // ranks) * ranks
    x = torch.nn.functional.pad(x, (0, 0, 0, width - patches, 0, rows - x.shape[0]))
    sent = [part.contiguous() for part in x.tensor_split(ranks, 1)]
    came = [torch.empty_like(sent[0]) for _ in range(ranks)]
    dist.all_to_all(came, sent)
    whole = torch.cat(came, dim=0).contiguous()
    return whole.narrow(0, 0, frames)


def plain_columns(x: torch.Tensor, sizes: Sequence[int], columns: Columns) -> torch.Tensor:
    """Heads for tokens, written for three dims: an index for every rank, a cat, one exchange."""
    group, features = dist.group.WORLD, x.shape[2]
    assert group is not None, "ranks have met"
    parts = [x.index_select(1, columns.index(r, x.device)).reshape(-1) for r in range(len(sizes))]
    mine = len(columns.of[dist.get_rank()])
    flat = all_to_all_rows(
        torch.cat(parts), [p.numel() for p in parts], [n * mine * features for n in sizes], group
    )
    return flat.view(sum(sizes), mine, features)


def plain_tokens(x: torch.Tensor, sizes: Sequence[int], columns: Columns) -> torch.Tensor:
    """The way back likewise: one exchange, added at an index for every rank."""
    group, features, rank = dist.group.WORLD, x.shape[2], dist.get_rank()
    assert group is not None, "ranks have met"
    held = [len(part) for part in columns.of]
    flat = all_to_all_rows(
        x.reshape(-1),
        [n * held[rank] * features for n in sizes],
        [sizes[rank] * count * features for count in held],
        group,
    )
    out, at = x.new_zeros((sizes[rank], columns.total, features)), 0
    for r, count in enumerate(held):
        part = flat[at : at + sizes[rank] * count * features].view(sizes[rank], count, features)
        out.index_add_(1, columns.index(r, x.device), part)
        at += part.numel()
    return out


def switch_rows(rounds: int) -> list[Row]:
    """Our switch beside the padded one."""
    ranks, rank, found = dist.get_world_size(), dist.get_rank(), []
    for frames, patches, features in SWITCHES:
        sizes = split_sizes(frames, ranks)
        x = torch.randn(sizes[rank], patches, features)
        medians = _medians(
            {
                "switch": lambda x=x, s=sizes: switch(x, 0, 1, dist.group.WORLD, sizes=s),
                "padded": lambda x=x, s=sizes: padded(x, s),
            },
            rounds,
        )
        found.append({"ranks": ranks, "shape": [frames, patches, features], **medians})
    return found


def heads_rows(rounds: int) -> list[Row]:
    """Heads for tokens and back through the exchange of any dims, beside those of three dims."""
    ranks, rank, found = dist.get_world_size(), dist.get_rank(), []
    group = dist.group.WORLD
    assert group is not None, "ranks have met"
    for tokens, heads, features in HEADS:
        sizes = tuple(split_sizes(tokens, ranks))
        columns = Columns.consecutive(tuple(split_sizes(heads, ranks)))
        x = torch.randn(sizes[rank], heads, features)

        def ours(x: Any = x, s: Any = sizes, c: Any = columns) -> torch.Tensor:
            return to_tokens(to_columns(x, s, c, group), s, c, group)

        def plain(x: Any = x, s: Any = sizes, c: Any = columns) -> torch.Tensor:
            return plain_tokens(plain_columns(x, s, c), s, c)

        medians = _medians({"switch": ours, "plain": plain}, rounds)
        found.append({"ranks": ranks, "shape": [tokens, heads, features], **medians})
    return found


def _medians(ways: Mapping[str, Callable[[], torch.Tensor]], rounds: int) -> dict[str, float]:
    """Seconds of each, all in every round and another one first; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    with settled():
        for at in range(rounds + 1):
            for name in names[at % len(names) :] + names[: at % len(names)]:
                dist.barrier()
                begin = time.perf_counter()
                ways[name]()
                dist.barrier()
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(some[1:]) for name, some in seconds.items()}
