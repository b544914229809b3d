"""What each idea of Hydraulis gives (its Figure 16): 32B on 64 devices, CommonCrawl-like lengths.

    base            packs as long as the context, dealt out evenly; the best strategy of one scheme
                    that holds the context, as in the three steps that follow
    a               sequences dispatched by cost (equation 3), then packed to the context
    b               packed by equation 1
    c               one strategy of several schemes that holds the context, found by exchanging
                    pipelines while the first iterations get quicker
    d               ours for each iteration
    d by hydraulis  the paper's planner for each iteration

Dispatch and packing of (a) to (d) are ours. Where the strategy has one stage, packing only counts
by the number of packs, so (b) gives little beyond (a): of the published schemes only tp16 holds
32K, where the paper's strategy has two stages at 16K and context parallelism at 32K.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from math import inf
from statistics import fmean
from typing import Any

from headrace.planning.pipelines import plan_pipelines
from headrace.planning.pipelines.batch import Batch
from headrace.planning.pipelines.climb import climb
from headrace.planning.pipelines.proposal import propose
from headrace.planning.pipelines.world import Counts, World
from hetero_scenarios import (
    WORKLOADS,
    Scenario,
    Solve,
    best_static,
    by_equation_1,
    holding,
    max_length_ways,
    packed_to_context,
)
from rich.table import Table

from headrace.cli.display import tell

__all__ = ["ablation", "ablation_tables"]

_EXCHANGES = 150
_FEW_ITERATIONS = 8  # to search one strategy for all; more only cost time


def ablation(o: argparse.Namespace) -> dict[str, Any]:
    """The section of Figure 16: 32B, CommonCrawl-like, 64 devices, F2 and F3."""
    rows = list[dict[str, Any]]()
    for workload in ("F3",) if o.quick else ("F2", "F3"):
        context, tokens = WORKLOADS[workload]
        scenario = Scenario(costs="hydraulis-32b", devices=64, corpus="CommonCrawl",
                            workload=workload, context=context, tokens=tokens)  # fmt: skip
        tell(f"ablation {scenario}")
        found = parts_of(scenario, o.iterations, o.seed)
        base_s = found["base"][0]
        rows.append(
            {
                "scenario": str(scenario), "workload": workload,
                "mean_s": {name: seconds for name, (seconds, _) in found.items()},
                "strategies": {name: text for name, (_, text) in found.items()},
                "throughput": {name: base_s / seconds for name, (seconds, _) in found.items()},
            }
        )  # fmt: skip
    return {"iterations": o.iterations, "rows": rows}


def parts_of(scenario: Scenario, iterations: int, seed: int) -> dict[str, tuple[float, str]]:
    """Mean seconds and strategy of each step of the ablation."""
    costs, devices, context = scenario.costs_of(), scenario.devices, scenario.context
    lengths = scenario.lengths(iterations, seed)
    world = World.of(holding(costs, devices, context), devices)
    batches = [Batch(world, tokens) for tokens in lengths]
    ways: dict[str, tuple[Solve, ...]] = {
        "base": max_length_ways(context),
        "a": (lambda batch, counts: packed_to_context(batch, counts, context),),
        "b": (by_equation_1,),
    }
    found = dict[str, tuple[float, str]]()
    for name, own in ways.items():
        counts, made = best_static(world, batches, *own)
        found[name] = fmean(solution.seconds for solution in made), world.text(counts)
    found["c"] = one_for_all(World.of(costs, devices), lengths, context, seed)
    for name, planner in (("d", "headrace"), ("d by hydraulis", "hydraulis")):
        plan = plan_pipelines(costs, lengths, devices, planner=planner, seed=seed)
        used = len({item.strategy for item in plan.iterations})
        found[name] = plan.mean_s, f"{used} strategies"
    return found


def one_for_all(
    world: World, lengths: Sequence[Sequence[int]], context: int, seed: int
) -> tuple[float, str]:
    """Mean seconds and text of the best found strategy that holds the context: the best proposed
    one, and from there exchanges of pipelines while some of the iterations get quicker."""
    batches = [Batch(world, tokens) for tokens in lengths]

    def mean_s(counts: Counts, of: Sequence[Batch]) -> float:
        if not any(n and pipe.cap >= context for n, pipe in zip(counts, world.pipes, strict=True)):
            return inf
        total = 0.0
        for batch in of:
            solution = by_equation_1(batch, counts)
            if solution is None:
                return inf
            total += solution.seconds
        return total / len(of)

    few = batches[:_FEW_ITERATIONS]
    proposal = propose(world, [*lengths, [context]], seed)
    starts = {*proposal.candidates, *world.homogeneous()}
    start_s, start = min((mean_s(counts, few), counts) for counts in starts)
    _, best, _ = climb(
        world, start, start_s, lambda counts, _: mean_s(counts, few), proposal.kinds, _EXCHANGES,
    )  # fmt: skip
    return min((mean_s(counts, batches), world.text(counts)) for counts in {start, best})


def ablation_tables(found: dict[str, Any]) -> list[Table]:
    """Throughput over that of the base, step by step."""
    table = Table(title="ablation: throughput over the base", title_justify="left")
    for title in ("scenario", "", "mean step", "throughput", "strategy"):
        table.add_column(title, no_wrap=True)
    for row in found["rows"]:
        for name, seconds in row["mean_s"].items():
            table.add_row(
                row["scenario"] if name == "base" else "", name, f"{seconds:.3f} s",
                f"{row['throughput'][name]:.2f}", row["strategies"][name],
            )  # fmt: skip
        table.add_section()
    return [table]
