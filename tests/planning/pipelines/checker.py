"""Recomputes plans from their JSON alone, and the best plan by trying everything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, product
from typing import Any

from headrace.costs.pipeline_costs import PipelineCosts
from headrace.planning.pipelines.world import World

__all__ = ["faults", "optimum_s", "step_s"]


def step_s(costs: PipelineCosts, lengths: Sequence[int], item: dict[str, Any]) -> float:
    """Seconds of an iteration's plan: the longest pipeline, phases one after the other."""
    by_name = {cost.name: cost for cost in costs.schemes}
    phases: dict[int, float] = {}
    for pipeline in item["pipelines"]:
        cost = by_name[pipeline["scheme"]]
        times = [cost.micro_batch_s([lengths[i] for i in own]) for own in pipeline["micro_batches"]]
        seconds = sum(times) + (cost.scheme.pipeline - 1) * max(times, default=0.0)
        phase = pipeline.get("phase", 0)
        phases[phase] = max(phases.get(phase, 0.0), seconds)
    return sum(phases.values()) + item.get("switch_s", 0.0)


def faults(
    costs: PipelineCosts, lengths: Sequence[int], item: dict[str, Any], devices: int
) -> list[str]:
    """What is wrong with an iteration's plan."""
    by_name = {cost.name: cost for cost in costs.schemes}
    found, seen, used = list[str](), list[int](), dict[int, int]()
    for n, pipeline in enumerate(item["pipelines"]):
        cost = by_name[pipeline["scheme"]]
        phase = pipeline.get("phase", 0)
        used[phase] = used.get(phase, 0) + cost.scheme.devices
        cap = cost.most_tokens(devices)
        for own in pipeline["micro_batches"]:
            tokens = sum(lengths[i] for i in own)
            if not own or cap is None or tokens > cap:
                found.append(f"pipeline {n}: {tokens} tokens, room for {cap}")
            seen += own
    if sorted(seen) != list(range(len(lengths))):
        found.append(f"sequences {sorted(seen)}")
    if max(used.values(), default=0) > devices:
        found.append(f"{used} devices of {devices}")
    if item["lower_bound_s"] > item["predicted_s"]:
        found.append(f"bound {item['lower_bound_s']} above {item['predicted_s']}")
    if abs(step_s(costs, lengths, item) / item["predicted_s"] - 1) > 1e-9:
        found.append(f"takes {step_s(costs, lengths, item)}, not {item['predicted_s']}")
    return found


def optimum_s(world: World, lengths: Sequence[int]) -> float:
    """Seconds of the best plan over all strategies, dispatches and packings; for a handful of
    sequences."""
    best = float("inf")
    packs: dict[tuple[int, tuple[int, ...]], float] = {}

    def pack_s(k: int, members: tuple[int, ...]) -> float:
        if (k, members) not in packs:
            pipe = world.pipes[k]
            packs[k, members] = min(
                (
                    pipe.pipeline_s([sum(map(pipe.sequence_s, own)) + pipe.c for own in parts])
                    for parts in _partitions(members)
                    if all(sum(own) <= pipe.cap for own in parts)
                ),
                default=float("inf"),
            )
        return packs[k, members]

    for kinds in _strategies(world, len(lengths)):
        for homes in product(range(len(kinds)), repeat=len(lengths)):
            held = [
                tuple(n for n, home in zip(lengths, homes, strict=True) if home == q)
                for q in range(len(kinds))
            ]
            best = min(best, max(pack_s(k, own) for k, own in zip(kinds, held, strict=True) if own))
    return best


def _strategies(world: World, most: int) -> Iterator[tuple[int, ...]]:
    """Pipes of the pipelines that fit side by side, as many as there are sequences at most."""
    for number in range(1, most + 1):
        for kinds in combinations_with_replacement(range(len(world.pipes)), number):
            if sum(world.pipes[k].devices for k in kinds) <= world.devices:
                yield kinds


def _partitions(items: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for parts in _partitions(rest):
        yield [(first,), *parts]
        for i, part in enumerate(parts):
            yield [*parts[:i], (first, *part), *parts[i + 1 :]]
