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

__all__ = [
    "four_exchanges",
    "heads_rows",
    "layer_rows",
    "padded",
    "plain_columns",
    "plain_tokens",
    "switch_rows",
]

Row = dict[str, Any]

SWITCHES = ((16, 1024, 256), (15, 1023, 256), (5, 4096, 256), (64, 256, 256))
"""Frames, patches and features, two of them uneven."""

HEADS = ((1024, 16, 64), (1023, 10, 64), (4096, 32, 128), (8192, 8, 128))
"""Tokens, heads and features of a head."""


LAYER = (64, 256, 8, 32)
"""Frames, patches, heads and features of a head of a layer's exchanges."""


def padded(
    x: torch.Tensor, sizes: Sequence[int], from_dim: int = 0, to_dim: int = 1
) -> torch.Tensor:
    """A switch of two dims of [rows, columns, h] as the paper's code has it: both padded to a
    multiple of the ranks, a list of messages, a cat, and what was padded cut off."""
    ranks = len(sizes)
    rows, width = -(-sum(sizes) // ranks), -(-x.shape[to_dim] // ranks) * ranks
    more = [0, 0, 0]
    more[from_dim], more[to_dim] = rows - x.shape[from_dim], width - x.shape[to_dim]
    x = torch.nn.functional.pad(x, (0, more[2], 0, more[1], 0, more[0]))
    sent = [part.contiguous() for part in x.tensor_split(ranks, to_dim)]
    came = [torch.empty_like(sent[0]) for _ in range(ranks)]
    dist.all_to_all(came, sent)
    whole = torch.cat(came, dim=from_dim).contiguous()
    return whole.narrow(from_dim, 0, sum(sizes))


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


def four_exchanges(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Heads for frames and back as DeepSpeed's Ulysses has it, of [t / N, s, n, d]: one exchange
    for each of queries, keys, values and the result (here the queries), copied before and after.
    Ranks divide frames and heads."""
    gathered = [_heads_for_frames(x) for x in (q, k, v)]
    return _frames_for_heads(gathered[0])


def _heads_for_frames(x: torch.Tensor) -> torch.Tensor:
    """[t / N, s, n, d] to [t, s, n / N, d]."""
    ranks = dist.get_world_size()
    sent = x.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4).contiguous()
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent)
    return came.flatten(0, 1)


def _frames_for_heads(x: torch.Tensor) -> torch.Tensor:
    """[t, s, n / N, d] to [t / N, s, n, d]."""
    sent = x.unflatten(0, (dist.get_world_size(), -1)).contiguous()
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent)
    return came.permute(1, 2, 0, 3, 4).flatten(2, 3)


def layer_rows(rounds: int) -> Row:
    """The least seconds of what the two blocks of one layer exchange, forward: two switches;
    Ulysses by one exchange of queries, keys and values, and one of the result; by four as in
    DeepSpeed; and two switches as in the paper's code."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    frames, patches, heads, features = LAYER
    x = torch.randn(frames // ranks, patches, heads * features)
    q, k, v = torch.randn(3, frames // ranks, patches, heads, features)
    qkv = torch.randn(frames // ranks, patches, heads, 3 * features)
    even = split_sizes(frames, ranks)

    def ulysses() -> torch.Tensor:
        own = switch(qkv, 0, 2, group)[..., :features]
        return switch(own, 2, 0, group)

    seconds = _seconds(
        {
            "dsp": lambda: switch(switch(x, 0, 1, group), 1, 0, group),
            "ulysses": ulysses,
            "four exchanges": lambda: four_exchanges(q, k, v),
            "padded dsp": lambda: padded(padded(x, even), split_sizes(patches, ranks), 1, 0),
        },
        rounds,
    )
    return {name: min(some) for name, some in seconds.items()}


def _medians(ways: Mapping[str, Callable[[], torch.Tensor]], rounds: int) -> dict[str, float]:
    """Median seconds of each."""
    return {name: statistics.median(some) for name, some in _seconds(ways, rounds).items()}


def _seconds(ways: Mapping[str, Callable[[], torch.Tensor]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, all in every round and another one first; a first round warms up."""
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
    return {name: some[1:] for name, some in seconds.items()}
