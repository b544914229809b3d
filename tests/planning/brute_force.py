"""The quickest plan by trying everything, for a handful of sequences on two or three ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product

from headrace.costs import CostModel
from headrace.spec import LayerOption, LayerPlan

__all__ = ["layer_plans", "optimum_s", "partitions"]


def layer_plans(costs: CostModel, p: int) -> Iterator[LayerPlan]:
    """Every sequence of options over the layers."""
    options = [LayerOption.parse(text) for text in costs.options[p]]
    for chosen in product(options, repeat=costs.shape.layers):
        yield LayerPlan(options=chosen)


def optimum_s(costs: CostModel, lengths: Sequence[int]) -> float | None:
    """Seconds of the best step's computations with replicated weights over all sizes, blocks,
    packs, layer plans and orders; None when nothing fits."""
    devices = costs.cluster.devices
    sizes = [p for p in costs.group_sizes if p <= devices]
    blocks = [(p, k) for p in sizes for k in range(devices // p)]
    packs: dict[tuple[int, tuple[int, ...]], float | None] = {}

    def pack_s(p: int, pack: tuple[int, ...]) -> float | None:
        if (p, pack) not in packs:
            packs[p, pack] = min(
                (
                    sum(costs.micro_batch_s(pack, p, layers))
                    for layers in layer_plans(costs, p)
                    if costs.micro_batch_bytes(sum(pack), p, layers, "replicated", sizes)
                    <= costs.capacity_bytes
                ),
                default=None,
            )
        return packs[p, pack]

    best: float | None = None
    for homes in product(blocks, repeat=len(lengths)):
        held = {
            block: tuple(n for n, home in zip(lengths, homes, strict=True) if home == block)
            for block in set(homes)
        }
        for split in product(*(partitions(members) for members in held.values())):
            runs = [
                (block, pack_s(block[0], pack))
                for block, parts in zip(held, split, strict=True)
                for pack in parts
            ]
            if any(seconds is None for _, seconds in runs):
                continue
            for order in set(permutations(runs)):
                seconds = _last_s(devices, order)
                best = seconds if best is None else min(best, seconds)
    return best


def partitions(items: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """Every way to split ``items`` into non-empty packs."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for parts in partitions(rest):
        yield [(first,), *parts]
        for i, part in enumerate(parts):
            yield [*parts[:i], (first, *part), *parts[i + 1 :]]


def _last_s(devices: int, order: Sequence[tuple[tuple[int, int], float | None]]) -> float:
    free = [0.0] * devices
    for (p, k), seconds in order:
        assert seconds is not None
        ranks = range(k * p, (k + 1) * p)
        end = max(free[rank] for rank in ranks) + seconds
        for rank in ranks:
            free[rank] = end
    return max(free)
