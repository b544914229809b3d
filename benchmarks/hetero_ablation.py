"""What each idea of Hydraulis gives (its Figure 16): 32B on 64 devices, CommonCrawl-like lengths.

    base            packs as long as the context, dealt out evenly; the best strategy of one scheme
                    that holds the context, as in the three steps that follow
    a               sequences dispatched by cost (equation 3), then packed to the context
    b               packed by equation 1
    c               one strategy of several schemes that holds the context: of those that ours
                    chooses for an iteration with one more sequence, as long as the context, the one
                    that is best for all
    d, filled       ours for each iteration without exchanges of pipelines and local search
    d               ours for each iteration
    d by hydraulis  the paper's planner for each iteration

Dispatch and packing of (a) to (d) are ours. Where the strategy has one stage, packing only counts
by the number of packs, so (b) gives little beyond (a): of the published schemes only tp16 holds
32K, where the paper's strategy has two stages at 16K and context parallelism at 32K.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from given_strategies import counted, dispatched, table_of
from hetero_scenarios import (
    WORKLOADS,
    Make,
    Scenario,
    best_static,
    by_equation_1,
    holding,
    max_length_ways,
    packed_to_context,
)
from rich.table import Table

from headrace.cli.display import tell
from headrace.engine.planned_iterations import OWN, plan_iterations
from headrace.planning import Problem, plan
from headrace.planning.batch import PriceTable
from headrace.planning.improvement import Improvement
from headrace.planning.side_by_side import ANY_SCHEME, Counts, SideBySide
from headrace.planning.static import Static
from headrace.spec import Lengths

__all__ = ["ablation", "ablation_tables"]

_FILLED = (Static(), SideBySide(role=ANY_SCHEME, exchanged=0))
_PACKED = Improvement(looks=0)


def ablation(o: argparse.Namespace) -> dict[str, Any]:
    """The section of Figure 16: 32B, CommonCrawl-like, 64 devices, F2 and F3."""
    rows = list[dict[str, Any]]()
    for workload in ("F3",) if o.quick else ("F2", "F3"):
        context, tokens = WORKLOADS[workload]
        scenario = Scenario(
            costs="hydraulis-32b",
            devices=64,
            corpus="CommonCrawl",
            workload=workload,
            context=context,
            tokens=tokens,
        )
        tell(f"ablation {scenario}")
        found = parts_of(scenario, o.iterations, o.seed)
        base_s = found["base"][0]
        rows.append(
            {
                "scenario": str(scenario),
                "workload": workload,
                "mean_s": {name: seconds for name, (seconds, _) in found.items()},
                "strategies": {name: text for name, (_, text) in found.items()},
                "throughput": {name: base_s / seconds for name, (seconds, _) in found.items()},
            }
        )
    return {"iterations": o.iterations, "rows": rows}


def parts_of(scenario: Scenario, iterations: int, seed: int) -> dict[str, tuple[float, str]]:
    """Mean seconds and strategy of each step of the ablation."""
    costs, devices, context = scenario.costs_of(), scenario.devices, scenario.context
    lengths = scenario.lengths(iterations, seed)
    roomy = Problem(costs=holding(costs, devices, context), devices=devices)
    tables = [table_of(roomy, tokens) for tokens in lengths]
    ways: dict[str, tuple[Make, ...]] = {
        "base": max_length_ways(context),
        "a": (lambda table, k: packed_to_context(table, k, context),),
        "b": (by_equation_1,),
    }
    found = dict[str, tuple[float, str]]()
    for name, own in ways.items():
        strategy, made = best_static(tables, *own)
        found[name] = fmean(schedule.seconds for schedule in made), strategy
    problem = Problem(costs=costs, devices=devices)
    found["c"] = one_for_all(problem, lengths, context, seed)
    filled = [
        plan(
            problem,
            Lengths(tokens=tuple(tokens)),
            seed=seed,
            generators=_FILLED,
            improvement=_PACKED,
        )
        for tokens in lengths
    ]
    used = len({str(own.strategy) for own in filled})
    found["d, filled"] = fmean(own.predicted_s for own in filled), f"{used} strategies"
    for name, planner in (("d", OWN), ("d by hydraulis", "hydraulis")):
        planned = plan_iterations(problem, lengths, planner=planner, seed=seed)
        used = len({item.strategy for item in planned})
        found[name] = fmean(item.plan.predicted_s for item in planned), f"{used} strategies"
    return found


def one_for_all(
    problem: Problem, lengths: Sequence[Sequence[int]], context: int, seed: int
) -> tuple[float, str]:
    """Mean seconds and text of the best strategy that holds the context, of those that ours
    chooses for an iteration and one more sequence as long as that."""
    tables = [table_of(problem, tokens) for tokens in lengths]
    longer = plan_iterations(problem, [[context, *tokens] for tokens in lengths], seed=seed)
    schemes = [scheme.scheme for scheme in tables[0].schemes]
    chosen = {
        tuple(dict(item.plan.strategy.counts).get(scheme, 0) for scheme in schemes)
        for item in longer
    }
    return min((mean_s(tables, counts), counted(tables[0], counts)) for counts in chosen)


def mean_s(tables: Sequence[PriceTable], counts: Counts) -> float:
    """Mean seconds of a strategy that holds all batches."""
    made = [dispatched(table, counts) for table in tables]
    return fmean(schedule.seconds for schedule in made if schedule is not None)


def ablation_tables(found: dict[str, Any]) -> list[Table]:
    """Throughput over that of the base, step by step."""
    table = Table(title="ablation: throughput over the base", title_justify="left")
    for title in ("scenario", "", "mean step", "throughput", "strategy"):
        table.add_column(title, no_wrap=True)
    for row in found["rows"]:
        for name, seconds in row["mean_s"].items():
            table.add_row(
                row["scenario"] if name == "base" else "",
                name,
                f"{seconds:.3f} s",
                f"{row['throughput'][name]:.2f}",
                row["strategies"][name],
            )
        table.add_section()
    return [table]
